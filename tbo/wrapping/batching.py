"""Describes the batch of one step of a Hugging Face model and cuts it into sub-batches.

Shapes: B sequences (rows), S positions a row in this step, H hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from tbo.batch import Phase, Reason, Split, split_at, split_rows, split_tokens
from tbo.models.cache_rows import share_cache_by_tokens, split_cache, why_not_by_tokens, why_not_splittable
from tbo.models.layer_arguments import RowCut, TokenCut, split_layer_kwargs, why_no_part

if TYPE_CHECKING:
    from tbo.models.layer import HuggingFaceLayer

VERIFY_MOST_TOKENS = 8
"""Up to this many positions a row after a filled cache are speculative tokens to verify; more are a prompt chunk."""

CAUSAL_WITHOUT_MASK = frozenset({"sdpa"})
"""Attention implementations that take a missing mask as causal and aligned at the start of the keys."""

TOKEN_SPLIT_ATTENTION = frozenset({"sdpa", "eager"})
"""Attention implementations whose mask says all about who sees whom, so that one row can be cut between tokens."""


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
        attention: the model's attention implementation.
        like: a parameter of the model, for dtype and device of an idle rank's hidden states.
        hidden_tail: shape of one token's hidden states.
    """

    def __init__(
        self,
        layers: Sequence[HuggingFaceLayer],
        *,
        first_sparse: int,
        sub_batches: int,
        attention: str,
        like: Tensor,
        hidden_tail: tuple[int, ...],
    ) -> None:
        self._layers = tuple(layers)
        self._first_sparse = first_sparse
        self._sub_batches = sub_batches
        self._attention = attention
        self._like = like
        self._hidden_tail = hidden_tail

    def empty_hidden(self) -> Tensor:
        """Hidden states of a sub-batch without tokens, ``[0, 1, H]``."""
        return self._like.new_empty((0, 1, *self._hidden_tail))

    def describe(self, hidden_states: Tensor, kwargs: Mapping[str, Any]) -> StepBatch:
        """What a step is, from the first layer's call. Computes the split."""
        batch_size, length = hidden_states.shape[:2]
        cache = next((value for value in kwargs.values() if isinstance(value, Cache)), None)
        past = 0 if cache is None else int(cache.get_seq_length())
        phase = _phase(batch_size, length, past)
        split = split_rows(batch_size, self._sub_batches, tokens_per_row=length)
        by_tokens = packed = False
        why_whole = self._why_whole(cache, kwargs)
        if why_whole is None and batch_size == 1 and length > 1:
            why_whole = self._why_not_by_tokens(cache, phase)
            by_tokens = why_whole is None
        if by_tokens:
            lengths = _packed_lengths(kwargs, length) if cache is None else (length,)
            split = split_tokens(lengths, self._sub_batches)
            packed = len(lengths) > 1 and all(part.offset == 0 for part in split.parts)
            if not packed and any(kwargs.get(name) is not None for name in ("cu_seq_lens_q", "cu_seq_lens_k")):
                by_tokens, why_whole = False, Reason.NOTHING_TO_SPLIT
                split = split_rows(1, self._sub_batches, tokens_per_row=length)
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
        if why_no_part(kwargs) is not None:
            return Reason.ARGUMENT_NOT_SPLITTABLE
        if cache is not None and why_not_splittable(cache) is not None:
            return Reason.CACHE_NOT_SPLITTABLE
        return None

    def _why_not_by_tokens(self, cache: Cache | None, phase: Phase) -> Reason | None:
        """One row is only worth cutting in a prompt, and only where later tokens find earlier ones in the cache."""
        layers = self._layers[self._first_sparse :]
        can = (
            phase is Phase.PREFILL
            and self._attention in TOKEN_SPLIT_ATTENTION
            and all(layer.adapter.token_split for layer in layers)
        )
        if not can:
            return Reason.NOTHING_TO_SPLIT
        if cache is not None and why_not_by_tokens(cache) is not None:
            return Reason.CACHE_NOT_SPLITTABLE
        return None

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
            return RowCut(rows=rows, batch_size=batch.batch_size), caches.parts, caches.finish
        cut = TokenCut(
            tokens=tuple(part.tokens for part in parts),
            past=batch.past,
            shared=not batch.packed,
            fills_mask=self._attention in CAUSAL_WITHOUT_MASK,
            device=hidden_states.device,
        )
        if batch.packed:
            return cut, [None] * len(parts), _nothing
        shared = share_cache_by_tokens(batch.cache, [part.rows for part in parts])
        return cut, shared.parts, shared.finish


def _nothing() -> None:
    """The cache needs no finishing."""


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


def _packed_lengths(kwargs: Mapping[str, Any], length: int) -> tuple[int, ...]:
    """Lengths of the sequences packed into one row: positions that do not go up by one begin a new sequence."""
    positions = kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[0] != 1:
        return (length,)
    starts = (torch.nonzero(positions[0].diff() != 1)[:, 0] + 1).tolist()
    edges = [0, *starts, length]
    return tuple(stop - start for start, stop in itertools.pairwise(edges))
