"""One rank's own policy: whether its batch asks for overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from tbo.batch.phase import Phase
from tbo.batch.reasons import Reason

Overlap = Literal["auto", "always", "never"]


class Wants(IntEnum):
    """What a rank's own policy says about this step."""

    NEVER = 1
    """Objects: no rank may overlap."""
    IF_OTHERS = 2
    """Does not gain by itself, and joins in if another rank asks."""
    YES = 3
    """Asks for overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When `overlap="auto"` asks for overlap: fixed numbers, until a cost model replaces them.

    Attributes:
        prefill_min_tokens_per_sub_batch: tokens that the smallest sub-batch of a prefill or mixed step needs. One rank
            that has them is enough. 256 in each of two sub-batches means that fewer than 512 tokens a rank are never
            split: users of another system saw the time to the first token nearly double there (SGLang issue 7255,
            prompts of 512 tokens over 8 ranks), because notifying twice cost more than there was to hide.
        decode: whether decode and verify steps ask for overlap: with a few rows a sub-batch they mostly lose.
    """

    prefill_min_tokens_per_sub_batch: int = 256
    decode: bool = False


def wants_overlap(
    phase: Phase,
    rows: Sequence[int],
    *,
    overlap: Overlap = "auto",
    thresholds: Thresholds | None = None,
    world_size: int,
    prefix_reads: bool = False,
) -> tuple[Wants, Reason]:
    """One rank's own policy: whether it asks for overlap, and if not, why.

    Args:
        phase: of this rank's batch.
        rows: its tokens in each sub-batch.
        overlap: the user's option. "always" asks whatever the counts, if there are any tokens.
        thresholds: for "auto".
        world_size: ranks that exchange tokens.
        prefix_reads: whether sequences of this batch read blocks that others of it write, which keeps them together.
    """
    if overlap == "never":
        return Wants.NEVER, Reason.POLICY_NEVER
    if phase is Phase.IDLE or not any(rows):
        return Wants.IF_OTHERS, Reason.IDLE
    why_not = Reason.NONE
    if overlap == "auto":
        why_not = _why_not(phase, rows, thresholds or Thresholds(), world_size, prefix_reads=prefix_reads)
    return (Wants.YES if why_not is Reason.NONE else Wants.IF_OTHERS), why_not


def _why_not(
    phase: Phase, rows: Sequence[int], thresholds: Thresholds, world_size: int, *, prefix_reads: bool
) -> Reason:
    if world_size == 1:
        return Reason.NOTHING_TO_HIDE
    if sum(count > 0 for count in rows) <= 1:
        return Reason.PREFIX_READ if prefix_reads else Reason.NOTHING_TO_SPLIT
    if phase in (Phase.DECODE, Phase.VERIFY):
        return Reason.NONE if thresholds.decode else Reason.DECODE_OFF
    return Reason.TOO_FEW_TOKENS if min(rows) < thresholds.prefill_min_tokens_per_sub_batch else Reason.NONE
