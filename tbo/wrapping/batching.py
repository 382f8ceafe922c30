"""Describes the batch of one step of a Hugging Face model and cuts it into sub-batches.

Shapes: B sequences (rows), S positions a row in this step, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from tbo.batch import Phase, Reason, Split, split_at, split_rows, split_tokens
from tbo.models.attention_cut import cache_among
from tbo.models.cache_rows import (
    buffer_length,
    share_cache_by_tokens,
    split_cache,
    why_not_splittable,
)
from tbo.models.layer_arguments import RowCut, TokenCut, split_layer_kwargs, why_no_part
from tbo.wrapping.one_row import CAUSAL_WITHOUT_MASK, OneRow, cache_name

if TYPE_CHECKING:
    from tbo.models.layer import HuggingFaceLayer

VERIFY_MOST_TOKENS = 8
"""Up to this many positions a row after a filled cache are speculative tokens to verify; more are a prompt chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """What one step's batch is, and how it would be cut.

    Attributes:
        phase: of this rank's tokens.
        split: computed once; everything that cuts uses it.
        by_tokens: the split cuts one row between tokens instead of a batch between rows.
        packed: the row holds several sequences that do not see each other, and every cut lies between two of them.
        why_whole: why all tokens stay in the first sub-batch, if they do.
        batch_size: B.
        past: positions in the cache before this step.
        cache: the model's cache, if it uses one.
    """

    phase: Phase
    split: Split
    by_tokens: bool
    packed: bool
    why_whole: Reason | None
    batch_size: int
    past: int
    cache: Cache | None

    def parts(self, count: int) -> tuple[str, tuple[int, ...]]:
        """The name of the split rule and the tokens of each part, as run with `count` sub-batches."""
        if count == 1:
            return "none", (self.split.num_tokens,)
        return self.split.rule.value, self.split.rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """A step's batch, cut.

    Attributes:
        hidden: each part's hidden states.
        layer_kwargs: for each part, each layer's keyword arguments.
        carried: for each part, what the first layer receives from the one before it besides hidden states.
        finish_cache: to be called after the run.
        merge: joins the parts' outputs.
    """

    hidden: list[Tensor]
    layer_kwargs: list[dict[nn.Module, Mapping[str, Any]]]
    carried: list[Any]
    finish_cache: Callable[[], None]
    merge: Callable[[Sequence[Tensor]], Tensor]


class Batching:
    """Cuts the steps of one model.

    Args:
        layers: the ops of every decoder layer.
        first_sparse: index of the first layer that is run by sub-batches.
        sub_batches: how many.
        config: the decoder's configuration; its attention implementation may change between steps.
        like: a parameter of the model, for dtype and device of an idle rank's hidden states.
        hidden_tail: shape of one token's hidden states.
    """

    def __init__(
        self,
        layers: Sequence[HuggingFaceLayer],
        *,
        first_sparse: int,
        sub_batches: int,
        config: Any,
        like: Tensor,
        hidden_tail: tuple[int, ...],
    ) -> None:
        self._layers = tuple(layers)
        self._first_sparse = first_sparse
        self._sub_batches = sub_batches
        self._config = config
        self._like = like
        self._hidden_tail = hidden_tail

    @property
    def _attention(self) -> str:
        return str(getattr(self._config, "_attn_implementation", "eager"))

    def empty_hidden(self) -> Tensor:
        """Hidden states of a sub-batch without tokens, ``[0, 1, H]``."""
        return self._like.new_empty((0, 1, *self._hidden_tail))

    def describe(self, hidden_states: Tensor, kwargs: Mapping[str, Any]) -> StepBatch:
        """What a step is, from the first layer's call. Computes the split."""
        batch_size, length = hidden_states.shape[:2]
        cache = cache_among(kwargs)
        past = 0 if cache is None else _cached_positions(cache)
        phase = _phase(batch_size, length, past)
        split = split_rows(batch_size, self._sub_batches, tokens_per_row=length)
        by_tokens = packed = False
        why_whole = self._why_whole(cache, kwargs)
        if why_whole is None and batch_size == 1 and length > 1:
            cut = self._cut_of_one_row(kwargs, phase, length, past)
            if isinstance(cut, Reason):
                why_whole = cut
            else:
                split, packed = cut
                by_tokens = True
        if why_whole is not None:
            split = split_tokens((0,), self._sub_batches) if batch_size == 0 else _all_in_first(split)
        return StepBatch(
            phase=phase,
            split=split,
            by_tokens=by_tokens,
            packed=packed,
            why_whole=why_whole,
            batch_size=batch_size,
            past=past,
            cache=cache,
        )

    def _why_whole(self, cache: Cache | None, kwargs: Mapping[str, Any]) -> Reason | None:
        if self._attention == "flex_attention" or why_no_part(kwargs) is not None:
            return Reason.ARGUMENT_NOT_SPLITTABLE
        if cache is not None and why_not_splittable(cache) is not None:
            return Reason.CACHE_NOT_SPLITTABLE
        return None

    def _cut_of_one_row(
        self, kwargs: Mapping[str, Any], phase: Phase, length: int, past: int
    ) -> tuple[Split, bool] | Reason:
        """One row is only worth cutting in a prompt, and only where the attention of all layers allows it."""
        layers = self._layers[self._first_sparse :]
        if phase is not Phase.PREFILL or not all(layer.adapter.token_split for layer in layers):
            return Reason.NOTHING_TO_SPLIT
        return OneRow(kwargs=kwargs, attention=self._attention, length=length, past=past).cut(self._sub_batches)

    def cut(
        self,
        batch: StepBatch,
        hidden_states: Tensor,
        layers: Sequence[HuggingFaceLayer],
        recorded: Sequence[Mapping[str, Any]],
        count: int,
    ) -> Parts:
        """Cuts a step for `count` sub-batches.

        Args:
            batch: from `describe`.
            hidden_states: ``[B, S, H]``.
            layers: the layers that run by sub-batches.
            recorded: each layer's keyword arguments.
            count: 1, or the number the split was made for.

        Raises:
            WrapError: a layer argument that nobody knows how to cut.
        """
        topk = recorded[0].get("prev_topk_indices")
        if count == 1:
            whole: dict[nn.Module, Mapping[str, Any]] = {
                layer.layer: kwargs for layer, kwargs in zip(layers, recorded, strict=True)
            }
            return Parts(
                hidden=[hidden_states],
                layer_kwargs=[whole],
                carried=[topk],
                finish_cache=_nothing,
                merge=lambda parts: parts[0],
            )
        cut, caches, finish = self._cut_and_caches(batch, hidden_states)
        if batch.by_tokens and batch.cache is None and not batch.packed:
            recorded = _with_cache(recorded, next(cache for cache in caches if cache is not None))
        memo: dict[tuple[str, int], list[Any]] = {}
        layer_kwargs: list[dict[nn.Module, Mapping[str, Any]]] = [{} for _ in range(count)]
        for layer, kwargs in zip(layers, recorded, strict=True):
            for part, part_kwargs in zip(layer_kwargs, split_layer_kwargs(kwargs, cut, caches, memo), strict=True):
                part[layer.layer] = part_kwargs
        return Parts(
            hidden=cut.hidden(hidden_states),
            layer_kwargs=layer_kwargs,
            carried=cut.argument("prev_topk_indices", topk),
            finish_cache=finish,
            merge=cut.merge,
        )

    def _cut_and_caches(
        self, batch: StepBatch, hidden_states: Tensor
    ) -> tuple[RowCut | TokenCut, Sequence[Cache | None], Callable[[], None]]:
        parts = batch.split.parts
        if not batch.by_tokens:
            rows = tuple(part.sequences for part in parts)
            caches = split_cache(batch.cache, rows, batch.batch_size, first_layer=self._first_sparse)
            cut = RowCut(rows=rows, batch_size=batch.batch_size, length=hidden_states.shape[1])
            return cut, caches.parts, caches.finish
        by_tokens = TokenCut(
            tokens=tuple(part.tokens for part in parts),
            past=batch.past,
            buffer=buffer_length(batch.cache),
            shared=not batch.packed,
            fills_mask=self._attention in CAUSAL_WITHOUT_MASK,
            device=hidden_states.device,
        )
        if batch.packed:
            return by_tokens, [None] * len(parts), _nothing
        shared = share_cache_by_tokens(batch.cache, [part.rows for part in parts])
        return by_tokens, shared.parts, shared.finish


def _nothing() -> None:
    """The cache needs no finishing."""


def _cached_positions(cache: Cache) -> int:
    """Positions before this step. Layers of linear attention may keep none: MiniMax has one first of all."""
    first = int(cache.get_seq_length())
    if first > 0:
        return first
    return max((int(layer.get_seq_length()) for layer in cache.layers if isinstance(layer, CacheLayerMixin)), default=0)


def _phase(batch_size: int, length: int, past: int) -> Phase:
    if batch_size * length == 0:
        return Phase.IDLE
    if past == 0 or length > VERIFY_MOST_TOKENS:
        return Phase.PREFILL
    return Phase.DECODE if length == 1 else Phase.VERIFY


def _all_in_first(split: Split) -> Split:
    """The same tokens as one part followed by empty ones."""
    total = split.num_tokens
    return split_at(split.lengths, [total] * (len(split.parts) - 1))


def _with_cache(recorded: Sequence[Mapping[str, Any]], cache: Cache) -> list[Mapping[str, Any]]:
    """The layers' arguments with a cache that lives for this step only, so that later tokens find earlier ones."""
    return [{**kwargs, name: cache} for kwargs in recorded if (name := cache_name(kwargs)) is not None]
