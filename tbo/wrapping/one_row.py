"""Where the single row of a batch may be cut between tokens.

Either every cut lies between two packed sequences, which never see each other; or a later part finds the earlier ones'
keys and values in the cache. Who sees whom is read off the mask, never assumed: a caller may pass a mask of their own.

Shapes: S positions, Q query positions, KV key positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tbo.batch import Reason, Split, split_tokens
from tbo.models.attention_cut import cache_among
from tbo.models.cache_rows import why_not_by_tokens
from tbo.models.layer_arguments import MASKS, hides

CAUSAL_WITHOUT_MASK: Final = frozenset({"sdpa"})
"""Attention implementations that take a missing mask as causal and aligned at the start of the keys."""

_MASKED: Final = frozenset({"sdpa", "eager"})
"""Attention implementations whose mask says all about who sees whom."""

_SEQUENCE_ENDS: Final = ("cu_seq_lens_q", "cu_seq_lens_k")

_CACHE_NAMES: Final = ("past_key_values", "cache")
"""What layers call their cache, up to transformers 5.23 and from 5.24 on; only asked where there is no cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OneRow:
    """A batch of one row.

    Attributes:
        kwargs: what the model calls its first layer with.
        attention: the model's attention implementation.
        length: S.
        past: positions in the cache before this step.
    """

    kwargs: Mapping[str, Any]
    attention: str
    length: int
    past: int

    def cut(self, parts: int) -> tuple[Split, bool] | Reason:
        """The split and whether every cut lies between packed sequences; or why the row cannot be cut."""
        cache = cache_among(self.kwargs)
        split = split_tokens((self.length,) if cache is not None else self._packed_lengths(), parts)
        cuts = sorted({part.tokens.start for part in split.parts} - {0, self.length})
        if cache is None and all(part.offset == 0 for part in split.parts) and self._keeps_apart(cuts):
            return split, True
        why_not = self._why_not_inside(cache, cuts)
        return (split, False) if why_not is None else why_not

    def _packed_lengths(self) -> tuple[int, ...]:
        """Lengths of the sequences in the row.

        From their positions, of which one that does not go up by one begins a new sequence, where the mask or the
        attention function is made from those; else as the caller says.
        """
        ends = self.kwargs.get(_SEQUENCE_ENDS[0])
        if self.attention in _MASKED or (ends is None and self.attention.startswith("flash_attention")):
            positions = self.kwargs.get("position_ids")
            if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[0] != 1:
                return (self.length,)
            starts = (torch.nonzero(positions[0].diff() != 1)[:, 0] + 1).tolist()
        elif isinstance(ends, Tensor):
            starts = [end for end in ends.tolist() if 0 < end < self.length]
        else:
            return (self.length,)
        return tuple(stop - start for start, stop in itertools.pairwise([0, *starts, self.length]))

    def _keeps_apart(self, cuts: Sequence[int]) -> bool:
        """Whether no token sees one on the other side of a cut."""
        if self.attention not in _MASKED:
            return True  # it goes by the packed lengths
        masks = self._masks()
        return any(isinstance(mask, Tensor) for mask in masks) and all(
            hides(mask, slice(cut, None), slice(cut)) and hides(mask, slice(cut), slice(cut, None))
            for mask in masks
            if mask is not None
            for cut in cuts
        )

    def _why_not_inside(self, cache: Cache | None, cuts: Sequence[int]) -> Reason | None:
        """Why a sequence cannot be cut, or None.

        That takes a cache in which later tokens find earlier ones, and a mask under which none sees a later one.
        """
        packed = any(self.kwargs.get(name) is not None for name in _SEQUENCE_ENDS)
        if self.attention not in _MASKED or packed or (cache is None and cache_name(self.kwargs) is None):
            return Reason.NOTHING_TO_SPLIT
        if cache is not None and why_not_by_tokens(cache) is not None:
            return Reason.CACHE_NOT_SPLITTABLE
        for mask in self._masks():
            if mask is None and self.attention in CAUSAL_WITHOUT_MASK:
                continue
            if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[0] != 1:
                return Reason.ARGUMENT_NOT_SPLITTABLE
            if not all(hides(mask, slice(cut), slice(self.past + cut, None)) for cut in cuts):
                return Reason.ARGUMENT_NOT_SPLITTABLE
        return None

    def _masks(self) -> list[Any]:
        return [value for name, value in self.kwargs.items() if name in MASKS]


def cache_name(kwargs: Mapping[str, Any]) -> str | None:
    """Under which name a layer that was given no cache would take one."""
    return next((name for name in _CACHE_NAMES if name in kwargs and kwargs[name] is None), None)
