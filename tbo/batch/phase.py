"""The phase of one step: what kind of tokens a rank's batch holds."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """What a step computes. The numbers travel in votes, so they never change meaning."""

    PREFILL = 1
    """Prompts: many tokens a sequence."""
    DECODE = 2
    """One new token a sequence."""
    VERIFY = 3
    """Speculative decoding: the same few draft tokens a sequence, checked in one pass."""
    MIXED = 4
    """Prompts and decoding sequences in one step, on one rank or on different ranks."""
    IDLE = 5
    """No tokens: the rank only serves its peers, so its vote fits any phase."""
