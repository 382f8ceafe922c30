"""Where an attention module's forward is cut in two.

Chosen per class: written-out code for the common kinds, else the generic cut of the module's own source, else the whole
module in the second half. A new transformers release that changes a written-out class is caught by the self-check
at wrap and by the tests that compare all three.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tbo.models.attention_cut import AttentionCut, AttentionResult, cache_among, result_of
from tbo.models.attention_explicit import LATENT, PLAIN, LatentAttention, PlainAttention
from tbo.models.attention_liveness import LivenessCut, halves_of
from tbo.models.parts import own_forward, transformers_class

__all__ = ["AttentionCut", "AttentionResult", "WholeAttention", "cache_among", "cut_attention"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """A call not made yet."""

    hidden: Tensor
    kwargs: Mapping[str, Any]


class WholeAttention:
    """An attention module that is not cut: all of it runs in the second half (linear attention)."""

    kind = "not cut"

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def prepare(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> _Call:
        """Keeps the arguments."""
        return _Call(hidden=hidden, kwargs=kwargs)

    def core(self, carried: _Call) -> AttentionResult:
        """Calls the module."""
        return result_of(self.module(hidden_states=carried.hidden, **carried.kwargs))


def cut_attention(module: nn.Module) -> AttentionCut:
    """The best cut of an attention module.

    Args:
        module: a decoder layer's attention module; held, never changed.
    """
    name = transformers_class(module) or ""
    if name in PLAIN:
        return PlainAttention(module, PLAIN[name])
    if name in LATENT:
        return LatentAttention(module)
    halves = halves_of(own_forward(module))
    return WholeAttention(module) if halves is None else LivenessCut(module, halves)
