"""Undoing what a failed step wrote into a cache.

`remember` notes, before a step, what is needed to take it back; `restore` does so, or marks the cache unusable, so
that nobody goes on from a half-written one. Growing and preallocated layers are cut back to their length, which
costs nothing to remember. Of other layers the old tensors are held until the mark is dropped, and they can be put
back unless the step wrote into them in place.

Shapes: B sequences (rows), S cached positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    StaticIndexedLayer,
    StaticLayer,
)

from tbo.errors import WrapError
from tbo.models.cache_layers import STATIC_LENGTHS, SplitIndexedLayer, SplitLayer
from tbo.models.cache_slices import shallow

_GROWING = (DynamicLayer, DynamicIndexedLayer, SplitLayer, SplitIndexedLayer)
_PREALLOCATED = (StaticLayer, StaticIndexedLayer)
_POSITIONS: Final = (("keys", -2), ("values", -2), ("indexer_keys", 1))
"""A layer's tensors, and which of their dimensions is S."""
_UNCOUNTED: Final = -1
"""Stands for the version of an inference tensor, which counts no writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheMark:
    """What a cache was before a step.

    Attributes:
        cache: the cache, or None.
        layers: one note per layer it had; called with (cache, layer index), each undoes the step in its layer and
            says whether that was possible.
        attributes: the cache's own attributes, where it keeps tensors outside its layers.
    """

    cache: Cache | None
    layers: tuple[Callable[[Cache, int], bool], ...]
    attributes: _Snapshot | None


def remember(cache: Cache | None) -> CacheMark:
    """Notes what a cache is before a step, for `restore`.

    Call it before `split_cache`. Any cache may be given, also one that is not split.

    Raises:
        WrapError: an earlier step has left the cache unusable.
    """
    refuse_unusable(cache)
    if cache is None:
        return CacheMark(cache=None, layers=(), attributes=None)
    positions = _PreallocatedLength.of(cache)
    notes = tuple(_note(layer, positions) for layer in cache.layers)
    plain = type(cache).__name__ in ("DynamicCache", "StaticCache")
    return CacheMark(cache=cache, layers=notes, attributes=None if plain else _Snapshot.of(cache, skip="layers"))


def restore(mark: CacheMark) -> bool:
    """Takes back a failed step.

    Returns:
        Whether the cache is what it was. If not, its next use raises `WrapError`.
    """
    cache = mark.cache
    if cache is None:
        return True
    del cache.layers[len(mark.layers) :]
    for index, undo in enumerate(mark.layers):
        if not undo(cache, index):
            kind = type(cache.layers[index]).__name__
            condemn(cache, f"layer {index} of its {type(cache).__name__}, a {kind}, was overwritten in place")
            return False
    if mark.attributes is not None and not mark.attributes.put_back(cache):
        condemn(cache, f"the state its {type(cache).__name__} keeps outside its layers was overwritten in place")
        return False
    return True


def condemn(cache: Cache, reason: str) -> None:
    """Makes every later use of a cache raise an error with this reason."""
    cache.layers[:] = [
        UnusableLayer(reason) if isinstance(layer, CacheLayerMixin) else UnusableState(reason) for layer in cache.layers
    ] or [UnusableLayer(reason)]


def refuse_unusable(cache: object) -> None:
    """Refuses a cache that `condemn` has marked.

    Raises:
        WrapError: it is marked.
    """
    layers = getattr(cache, "layers", None)
    if isinstance(layers, list) and layers and isinstance(layers[0], Unusable):
        layers[0].refuse()


class Unusable:
    """What a layer of a cache that a failed step left half written does: every use raises."""

    def __init__(self, reason: str) -> None:
        vars(self)["_reason"] = reason

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raises the error every use of this cache ends in."""
        raise WrapError(
            f"this cache cannot be used any more: a step failed halfway and {vars(self)['_reason']}",
            remedy="Start the sequences again with a new cache.",
        )

    lazy_initialization = update = get_mask_sizes = get_seq_length = get_max_length = refuse
    update_conv_state = update_recurrent_state = activate_past_recording = crop = refuse
    reset = reorder_cache = offload = prefetch = refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # copying and printing stay possible
        self.refuse()


class UnusableLayer(Unusable, CacheLayerMixin):
    """In the place of a layer with keys and values."""


class UnusableState(Unusable, LinearAttentionCacheLayerMixin):
    """In the place of a layer with a recurrent state, of which transformers asks other questions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _GrowingLength:
    """A layer that grows by concatenation is undone by cropping it."""

    positions: int

    def __call__(self, cache: Cache, index: int) -> bool:
        layer: Any = cache.layers[index]
        parts = layer.parts if isinstance(layer, SplitLayer) else (layer,)
        return all(self._crop(part) for part in parts)

    def _crop(self, layer: Any) -> bool:
        """Keys, values and indexer keys are cropped one by one: the step may have failed between them."""
        if self.positions == 0:
            fresh = type(layer)()
            vars(layer).update({name: value for name, value in vars(fresh).items() if name in vars(layer)})
            return True
        for name, dimension in _POSITIONS:
            tensor = vars(layer).get(name)
            if not isinstance(tensor, Tensor) or tensor.dim() < 2:
                continue
            if tensor.shape[dimension] < self.positions:
                return False
            setattr(layer, name, tensor.narrow(dimension, 0, self.positions))
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class _PreallocatedLength:
    """A preallocated layer is undone by its counters and by clearing what lies behind them.

    One counter is copied for all layers, which always agree between steps. Reading it would wait for the device, so
    that is left to `restore`. Positions behind the counters are masked, but a NaN there would still reach the output.
    """

    counter: Tensor | None

    @staticmethod
    def of(cache: Cache) -> _PreallocatedLength:
        for layer in cache.layers:
            if isinstance(layer, StaticLayer) and type(layer) in _PREALLOCATED and layer.is_initialized:
                counter: Any = layer.cumulative_length
                return _PreallocatedLength(counter=counter.clone())
        return _PreallocatedLength(counter=None)

    def __call__(self, cache: Cache, index: int) -> bool:
        layer: Any = cache.layers[index]
        length = 0 if self.counter is None else int(self.counter)
        for name in STATIC_LENGTHS:
            counter = vars(layer).get(name)
            if isinstance(counter, Tensor):
                counter.clamp_(max=length)
        for name, dimension in _POSITIONS:
            tensor = vars(layer).get(name)
            if isinstance(tensor, Tensor):
                tensor.narrow(dimension, length, tensor.shape[dimension] - length).zero_()
        if self.counter is None and layer.is_initialized:
            layer.keys = layer.values = None  # of the failed step's batch size; the next may have another
            layer.is_initialized = False
            if getattr(layer, "is_indexer_initialized", False):
                layer.indexer_keys = None
                layer.is_indexer_initialized = False
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class _Snapshot:
    """The attributes of an object, put back unless one of its tensors was written in place.

    Attributes:
        owner: the object.
        state: its attributes; containers are copies.
        versions: how often each tensor in `state` had been written in place.
        empty: a layer that held nothing yet; only its counters need to go back.
    """

    owner: Any
    state: dict[str, Any]
    versions: tuple[tuple[Tensor, int], ...]
    empty: bool

    @staticmethod
    def of(owner: Any, *, skip: str = "") -> _Snapshot:
        state = {name: shallow(value) for name, value in vars(owner).items() if name != skip}
        writes_in_place = isinstance(owner, LinearAttentionCacheLayerMixin | StaticLayer)
        return _Snapshot(
            owner=owner,
            state=state,
            versions=tuple((tensor, _version(tensor)) for tensor in _tensors(state)) if writes_in_place else (),
            empty=state.get("is_initialized") is False,
        )

    def __call__(self, cache: Cache, index: int) -> bool:
        if not self.put_back(self.owner):
            return False
        cache.layers[index] = self.owner
        return True

    def put_back(self, owner: Any) -> bool:
        if self.empty:
            for name in STATIC_LENGTHS:
                if isinstance(counter := self.state.get(name), Tensor):
                    counter.zero_()
        elif any(version == _UNCOUNTED or _version(tensor) != version for tensor, version in self.versions):
            return False
        vars(owner).update({name: shallow(value) for name, value in self.state.items()})
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class _SplitSnapshot:
    """Snapshots of the parts of a layer that is split already."""

    layer: SplitLayer
    rows: tuple[slice, ...]
    parts: tuple[_Snapshot, ...]

    def __call__(self, cache: Cache, index: int) -> bool:
        if not all(part.put_back(part.owner) for part in self.parts):
            return False
        self.layer.restore([part.owner for part in self.parts], self.rows)
        cache.layers[index] = self.layer
        return True


def _note(layer: Any, positions: _PreallocatedLength) -> Callable[[Cache, int], bool]:
    if type(layer) in _GROWING:
        return _GrowingLength(positions=layer.get_seq_length())
    if type(layer) in _PREALLOCATED:
        return positions
    if isinstance(layer, SplitLayer):
        parts = tuple(_Snapshot.of(part) for part in layer.parts)
        return _SplitSnapshot(layer=layer, rows=layer.rows, parts=parts)
    return _Snapshot.of(layer)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _version(tensor: Tensor) -> int:
    """How often a tensor, or any view of it, was written in place."""
    return _UNCOUNTED if tensor.is_inference() else tensor._version  # noqa: SLF001  # it has no public name
