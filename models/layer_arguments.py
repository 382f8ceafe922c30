"""Cutting what a decoder layer is called with: hidden states and keyword arguments, by rows or by tokens.

Every tensor argument is in the table below or the call is refused: an argument passed whole to a part of the batch
gives wrong tokens without a word.

Shapes: B sequences (rows), S positions, Q query positions, KV key positions, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tbo.errors import WrapError

POSITIONAL: Final = frozenset({"position_ids", "position_embeddings", "input_ids", "prev_topk_indices"})
"""One entry a token: ``[B, S, ...]``, or ``[1, S, ...]`` shared by all rows; tuples and dicts of such tensors."""

MASKS: Final = frozenset({"attention_mask", "causal_mask", "padding_mask"})
"""``[B, 1, Q, KV]``, ``[B, KV]`` or None."""

SEQUENCE_ENDS: Final = frozenset({"cu_seq_lens_q", "cu_seq_lens_k"})
"""Cumulative lengths of packed sequences, ``[sequences + 1]``."""

WHOLE: Final = frozenset({"cache_position"})
"""Tensors every row part needs whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCut:
    """A padded batch cut between rows: part i is ``rows[i]`` of dimension 0.

    Attributes:
        rows: the parts, in order, covering the batch.
        batch_size: B.
        length: S.
    """

    rows: tuple[slice, ...]
    batch_size: int
    length: int

    def hidden(self, hidden_states: Tensor) -> list[Tensor]:
        """The rows of each part, as views."""
        return [hidden_states[rows] for rows in self.rows]

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """Inverse of `hidden`."""
        return torch.cat(list(parts), dim=0)

    def argument(self, name: str, value: Any) -> list[Any]:
        """The value each part's layers are called with."""
        if name in SEQUENCE_ENDS and value is not None:
            raise _unknown(name, value, "a padded batch cannot carry packed sequence lengths")
        if name in POSITIONAL or name in MASKS:
            return _per_part(name, value, len(self.rows), lambda tensor, part: self._cut(name, tensor, part))
        return _others(name, value, len(self.rows))

    def _cut(self, name: str, tensor: Tensor, part: int) -> Tensor:
        if name in POSITIONAL:
            _check_positional(name, tensor, self.length)
        if tensor.dim() < 2 or tensor.shape[0] not in (1, self.batch_size):
            raise _unknown(name, tensor, f"its first dimension is neither 1 nor the batch size {self.batch_size}")
        return tensor if tensor.shape[0] == 1 != self.batch_size else tensor[self.rows[part]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCut:
    """One row cut between tokens: part i is ``tokens[i]`` of dimension 1.

    Attributes:
        tokens: the parts, in order, covering the row.
        past: key positions in the cache before this step.
        buffer: key positions of a preallocated cache, which attention always sees whole; None if keys grow.
        shared: later parts attend to earlier ones through the cache. False where every cut lies between packed
            sequences, which never see each other.
        fills_mask: the attention implementation takes a missing mask as "causal, aligned at the start", so that a
            later part needs an explicit one.
        device: where such a mask is built.
    """

    tokens: tuple[slice, ...]
    past: int
    buffer: int | None
    shared: bool
    fills_mask: bool
    device: torch.device

    def hidden(self, hidden_states: Tensor) -> list[Tensor]:
        """The positions of each part, as views."""
        return [hidden_states[:, tokens] for tokens in self.tokens]

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """Inverse of `hidden`."""
        return torch.cat(list(parts), dim=1)

    def argument(self, name: str, value: Any) -> list[Any]:
        """The value each part's layers are called with."""
        count = len(self.tokens)
        if name in SEQUENCE_ENDS and value is not None:
            return [self._sequence_ends(value, part) for part in self.tokens]
        if name in MASKS:
            return [self._mask(name, value, part) for part in self.tokens]
        if name in POSITIONAL:
            return _per_part(name, value, count, lambda tensor, part: self._cut(name, tensor, part))
        if name in WHOLE and isinstance(value, Tensor):
            return [value[part] for part in self.tokens]
        return _others(name, value, count)

    def _cut(self, name: str, tensor: Tensor, part: int) -> Tensor:
        _check_positional(name, tensor, self.tokens[-1].stop)
        return tensor[:, self.tokens[part]]

    def _mask(self, name: str, mask: Any, part: slice) -> Any:
        if mask is None:
            return self._causal_mask(part) if self._needs_mask(part) else None
        if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
            raise _unknown(name, mask, "it is no mask over tokens")
        first_key, end_key = (0, self.past + part.stop) if self.shared else (part.start, part.stop)
        if self.buffer is not None:
            first_key, end_key = 0, mask.shape[-1]
        if mask.dim() == 2:
            return mask[:, first_key:end_key]
        return mask[..., part, first_key:end_key]

    def _needs_mask(self, part: slice) -> bool:
        """Without one, queries are aligned at the first key; and one query alone sees a whole buffer."""
        misplaced = part.start > 0 or (self.buffer is not None and part.stop == 1)
        return self.fills_mask and self.shared and misplaced and part.stop > part.start

    def _causal_mask(self, part: slice) -> Tensor:
        queries = torch.arange(self.past + part.start, self.past + part.stop, device=self.device)
        keys = torch.arange(self.buffer or self.past + part.stop, device=self.device)
        return (keys[None, :] <= queries[:, None])[None, None]

    @staticmethod
    def _sequence_ends(ends: Tensor, part: slice) -> Tensor:
        within: Tensor = ends[(ends >= part.start) & (ends <= part.stop)]
        return within.sub(part.start)


Cut = RowCut | TokenCut


def split_layer_kwargs(
    kwargs: Mapping[str, Any], cut: Cut, caches: Sequence[Cache | None], memo: dict[tuple[str, int], list[Any]]
) -> list[dict[str, Any]]:
    """The keyword arguments of one layer for each part.

    Args:
        kwargs: what the model calls the layer with.
        cut: how the batch is cut.
        caches: each part's cache, standing for the model's own wherever it appears (found by type: its argument was
            renamed in transformers 5.24).
        memo: results of earlier layers in this step, by name and identity, so that what all layers share is
            cut once. The caller keeps the values alive.

    Raises:
        WrapError: an argument that cannot be cut, by name.
    """
    parts: list[dict[str, Any]] = [{} for _ in caches]
    for name, value in kwargs.items():
        values: Sequence[Any]
        if isinstance(value, Cache):
            values = caches
        else:
            key = (name, id(value))
            if key not in memo:
                memo[key] = cut.argument(name, value)
            values = memo[key]
        for part, cut_value in zip(parts, values, strict=True):
            part[name] = cut_value
    return parts


def why_no_part(kwargs: Mapping[str, Any]) -> str | None:
    """Names the argument that no cut can serve, or None.

    Such a step runs un-split instead of failing: the values are legal, there is only no part of them to take.
    """
    for name, value in kwargs.items():
        if type(value).__name__ == "BlockMask":
            return f"{name} is a flex-attention BlockMask, which has no rows to take"
    return None


def hides(mask: Tensor, queries: slice, keys: slice) -> bool:
    """Whether a mask lets none of these queries see any of these keys.

    Args:
        mask: ``[..., Q, KV]``: boolean, False where hidden, or added to the scores, very negative where hidden.
        queries: of dimension Q.
        keys: of dimension KV.
    """
    block = mask[..., queries, keys]
    if mask.dtype == torch.bool:
        return not bool(block.any())
    return block.numel() == 0 or bool(block.max() <= torch.finfo(mask.dtype).min / 2)


def _others(name: str, value: Any, count: int) -> list[Any]:
    """Flags and numbers go to every part; a tensor nobody has classified is refused."""
    if name not in WHOLE and _holds_tensor(value):
        raise _unknown(name, value, "tbo does not know whether it belongs to tokens, rows or the whole batch")
    return [value] * count


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0
    if isinstance(value, Mapping):
        return any(_holds_tensor(item) for item in value.values())
    return isinstance(value, list | tuple) and any(_holds_tensor(item) for item in value)


def _per_part(name: str, value: Any, count: int, cut: Callable[[Tensor, int], Tensor]) -> list[Any]:
    """Applies a cut inside tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [cut(value, part) for part in range(count)]
    if isinstance(value, Mapping):
        cut_items = {key: _per_part(name, item, count, cut) for key, item in value.items()}
        return [{key: items[part] for key, items in cut_items.items()} for part in range(count)]
    if isinstance(value, list | tuple):
        cut_list = [_per_part(name, item, count, cut) for item in value]
        return [type(value)(items[part] for items in cut_list) for part in range(count)]
    if value is not None:
        raise _unknown(name, value, "it is neither a tensor nor made of tensors")
    return [None] * count


def _check_positional(name: str, tensor: Tensor, length: int) -> None:
    """Dimension 1 is S, or the tensor is laid out in a way that would be cut wrongly without a word."""
    plain = name in ("position_ids", "input_ids")
    if tensor.dim() < 2 or tensor.shape[1] != length or (plain and tensor.dim() != 2):
        raise _unknown(name, tensor, f"it does not have one entry for each of {length} positions in dimension 1")


def _unknown(name: str, value: Any, why: str) -> WrapError:
    shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
    return WrapError(
        f"the layer argument {name!r} ({shape}) cannot be cut into sub-batches: {why}",
        remedy="Call the model without it, or wrap with overlap='never'.",
    )
