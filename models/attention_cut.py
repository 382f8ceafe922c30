"""What every way of cutting an attention module in two has in common.

A cut divides a module's forward at the point where the cache is written: `prepare` projects queries, keys and values
and writes the cache, `core` attends and projects the output. Run one after the other they are the module's own forward.

Shapes: B sequences, S positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers.cache_utils import Cache


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionResult:
    """What an attention module hands back.

    Attributes:
        output: ``[B, S, H]``, after the output projection.
        carry: what the next layer's attention is called with (top-k token indices of sparse attention), or None.
    """

    output: Tensor
    carry: Any = None


class AttentionCut(Protocol):
    """An attention module's forward in two halves. Submodules are looked up when a half runs."""

    module: nn.Module

    @property
    def kind(self) -> str:
        """Where the forward is cut, in words."""
        ...

    def prepare(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> Any:
        """The first half; writes the cache.

        Args:
            hidden: ``[B, S, H]``, at least one token.
            kwargs: the module's other arguments, by name.
        """
        ...

    def core(self, carried: Any) -> AttentionResult:
        """The second half, from what the first returned."""
        ...


def cache_among(kwargs: Mapping[str, Any]) -> Cache | None:
    """The cache of a call, found by type: its argument was renamed in transformers 5.24."""
    return next((value for value in kwargs.values() if isinstance(value, Cache)), None)


def result_of(returned: Any) -> AttentionResult:
    """Reads what an attention forward returned: ``output``, ``(output, weights)`` or ``(output, weights, carry)``."""
    if not isinstance(returned, tuple):
        return AttentionResult(output=returned)
    return AttentionResult(output=returned[0], carry=returned[2] if len(returned) > 2 else None)
