"""One Hugging Face cache, used by several sub-batches in one step.

`split_cache` gives every sub-batch a cache of its own rows; `share_cache_by_tokens` lets the parts of one sequence
use the same cache one after another. The model's cache object stays the same, and between steps it is an ordinary
whole-batch cache: plain steps, other cuts, beam search, cropping and resetting may follow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from transformers.cache_utils import Cache, DynamicCache, StaticLayer

from tbo.errors import SplitError
from tbo.models.cache_layers import SPLIT_LAYERS, STATIC_ROWS, SplitLayer, StaticRows, check_rows
from tbo.models.cache_slices import Slices, slice_object
from tbo.models.cache_undo import CacheMark, refuse_unusable, remember, restore

__all__ = [
    "CacheMark",
    "CacheSplit",
    "buffer_length",
    "remember",
    "restore",
    "share_cache_by_tokens",
    "split_cache",
    "why_not_by_tokens",
    "why_not_splittable",
]

_CACHES: Final = frozenset({"Cache", "DynamicCache", "StaticCache", "MiniMaxCache"})
_SLICED_LAYERS: Final = frozenset(
    {
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "DeepseekV4HCACache",
        "DeepseekV4CSACache",
    }
)
"""Layers cut attribute by attribute: every tensor in them with two or more dimensions starts with the batch."""

_SHARED_LAYERS: Final = frozenset({"DynamicLayer", "StaticLayer"})
_REASONS: Final = {
    "QuantizedCache": "it keeps keys and values quantized in groups",
    "EncoderDecoderCache": "it holds an encoder's keys and values as well",
    "PagedAttentionCache": "its blocks belong to no row",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSplit:
    """What the sub-batches of one step use as cache.

    Attributes:
        parts: one cache per sub-batch; None where the sub-batch has no rows or the model no cache.
        finish: to be called once when all sub-batches have passed all layers. If the step fails it must not be
            called; see `tbo.models.cache_undo`.
    """

    parts: tuple[Cache | None, ...]
    finish: Callable[[], None]


def why_not_splittable(cache: object) -> str | None:
    """Says why a cache cannot be cut into rows, or None when it can. Such a step runs un-split."""
    if cache is None:
        return None
    reason = _why_unknown(cache)
    if reason is not None or not isinstance(cache, Cache):
        return reason
    known = {kind.__name__ for kind in (*SPLIT_LAYERS, *STATIC_ROWS)} | _SLICED_LAYERS
    return _why_layers(cache, known, "tbo does not know which of its tensors start with the batch")


def why_not_by_tokens(cache: object) -> str | None:
    """Says why the parts of one sequence cannot use a cache one after another, or None when they can."""
    if cache is None:
        return None
    reason = _why_unknown(cache)
    if reason is not None or not isinstance(cache, Cache):
        return reason
    return _why_layers(cache, _SHARED_LAYERS, "it forgets positions, or keeps state, that a later part needs whole")


def buffer_length(cache: Cache | None) -> int | None:
    """Positions of a preallocated cache, all of which attention is given; None if the cache grows."""
    layers = () if cache is None else cache.layers
    return next((int(layer.max_cache_len) for layer in layers if isinstance(layer, StaticLayer)), None)


def _why_unknown(cache: object) -> str | None:
    name = type(cache).__name__
    if name in _REASONS:
        return f"{name} cannot be split: {_REASONS[name]}"
    if not isinstance(cache, Cache):
        return f"{name} is not a transformers Cache"
    if name not in _CACHES or not type(cache).__module__.startswith("transformers."):
        return f"{name} is a cache class tbo does not know"
    if getattr(cache, "offloading", False):
        return f"{name} moves its layers to the CPU between uses (offloading)"
    return None


def _why_layers(cache: Cache, known: frozenset[str] | set[str], why: str) -> str | None:
    for index, layer in enumerate(cache.layers):
        kind = _stood_for(layer)
        if kind.__name__ not in known or not kind.__module__.startswith("transformers."):
            return f"layer {index} of the cache is a {kind.__name__}: {why}"
    return None


def _stood_for(layer: object) -> type:
    """The transformers class of a layer, seen through our stand-in."""
    for original, stand_in in SPLIT_LAYERS.items():
        if type(layer) is stand_in:
            return original
    return type(layer)


def split_cache(cache: Cache | None, rows: Sequence[slice], batch_size: int, *, first_layer: int = 0) -> CacheSplit:
    """Gives each sub-batch a cache of its rows.

    Growing layers stay split between steps and are not copied; preallocated layers are written through views; other
    known layers are sliced and merged (`cache_slices`).

    Args:
        cache: the model's cache, or None.
        rows: rows of each sub-batch, in order, covering ``0 .. batch_size``; empty ones are allowed.
        batch_size: rows of the whole batch.
        first_layer: layers before this one have already run on the whole batch in this step and stay whole.

    Raises:
        SplitError: the rows do not cover the batch, the cache holds another batch, or it cannot be split (see
            `why_not_splittable`).
        WrapError: an earlier step failed and left the cache half written.
    """
    _check_rows(rows, batch_size)
    refuse_unusable(cache)
    if cache is None:
        return CacheSplit(parts=(None,) * len(rows), finish=_nothing)
    reason = why_not_splittable(cache)
    if reason is not None:
        raise SplitError(reason, remedy="Run this step un-split, or use a DynamicCache or StaticCache.")
    filled = [part for part in rows if part.stop > part.start]
    if len(filled) < 2:
        return CacheSplit(parts=_spread([cache] * len(filled), rows), finish=_nothing)
    split = _Splitter(cache, filled, batch_size, first_layer)
    return CacheSplit(parts=_spread(split.caches, rows), finish=split.finish)


def share_cache_by_tokens(cache: Cache | None, lengths: Sequence[int]) -> CacheSplit:
    """Lets the parts of one sequence use one cache one after another, so that later parts see earlier ones.

    In every layer, part i must have written before part i + 1 does; every order in which a sub-batch never overtakes
    the one before it keeps that.

    Args:
        cache: the model's cache; None stands for a cache that lives for this step only.
        lengths: new positions of each part, in order; 0 is allowed.

    Raises:
        SplitError: a length is negative, or the cache's layers forget positions (see `why_not_by_tokens`).
        WrapError: an earlier step failed and left the cache half written.
    """
    if any(length < 0 for length in lengths):
        raise SplitError(
            f"the parts of a sequence have lengths {list(lengths)}", remedy="Pass lengths that are at least 0."
        )
    refuse_unusable(cache)
    reason = why_not_by_tokens(cache)
    if reason is not None:
        raise SplitError(reason, remedy="Split between sequences instead, or run this step un-split.")
    shared = DynamicCache() if cache is None else cache
    return CacheSplit(parts=tuple(shared if length else None for length in lengths), finish=_nothing)


def _check_rows(rows: Sequence[slice], batch_size: int) -> None:
    """Every row belongs to exactly one sub-batch, in order."""
    expected = 0
    for part in rows:
        if part.start != expected or part.stop is None or part.stop < part.start or part.step not in (None, 1):
            break
        expected = part.stop
    else:
        if rows and expected == batch_size:
            return
    shown = ", ".join(f"{part.start}:{part.stop}" for part in rows) or "none"
    raise SplitError(
        f"the rows of the sub-batches ({shown}) do not cover 0:{batch_size} once and in order",
        remedy="Pass consecutive slices that start at 0.",
    )


def _spread(caches: Sequence[Cache], rows: Sequence[slice]) -> tuple[Cache | None, ...]:
    """Caches of the sub-batches that have rows, None for the others."""
    rest = iter(caches)
    return tuple(next(rest) if part.stop > part.start else None for part in rows)


def _nothing() -> None:
    """Nothing to write back."""


class _Splitter:
    """One step's split of one cache."""

    def __init__(self, cache: Cache, rows: Sequence[slice], batch_size: int, first_layer: int) -> None:
        self._cache = cache
        self._rows = tuple(rows)
        self._batch_size = batch_size
        self._views: list[StaticRows] = []
        self._slices: list[Slices] = []
        self._attributes = slice_object(cache, rows, batch_size, skip=("layers",))
        self.caches: tuple[Any, ...] = self._attributes.parts
        for part in self.caches:
            part.layers = list(cache.layers[:first_layer])
        for index in range(first_layer, len(cache.layers)):
            for part, layer in zip(self.caches, self._split_layer(index), strict=True):
                part.layers.append(layer)

    def _split_layer(self, index: int) -> Sequence[Any]:
        layer: Any = self._cache.layers[index]
        check_rows(layer, self._batch_size, f"layer {index}")
        if type(layer) in SPLIT_LAYERS:
            layer = SPLIT_LAYERS[type(layer)]([layer], ())
            self._cache.layers[index] = layer
        if isinstance(layer, SplitLayer):
            layer.cut(self._rows)
            return layer.parts
        if type(layer) in STATIC_ROWS:
            view_of = STATIC_ROWS[type(layer)]
            views = [view_of(layer, rows, self._batch_size) for rows in self._rows]
            self._views.append(views[0])
            return views
        slices = slice_object(layer, self._rows, self._batch_size)
        self._slices.append(slices)
        return slices.parts

    def finish(self) -> None:
        """Writes back what the sub-batches hold apart, and adopts layers they have added."""
        for view in self._views:
            view.finish()
        for slices in self._slices:
            slices.finish()
        for index in range(len(self._cache.layers), len(self.caches[0].layers)):
            self._cache.layers.append(self._adopt([part.layers[index] for part in self.caches]))
        self._attributes.finish()

    def _adopt(self, layers: Sequence[Any]) -> Any:
        kind = type(layers[0])
        if kind in SPLIT_LAYERS:
            return SPLIT_LAYERS[kind](layers, self._rows)
        whole = copy.copy(layers[0])
        empty: tuple[dict[str, Any], ...] = ({},) * len(layers)
        Slices(whole=whole, parts=tuple(layers), handed=empty).finish()
        return whole
