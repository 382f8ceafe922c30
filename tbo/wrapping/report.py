"""What a step did and why: the record behind `handle.last` and `tbo.explain`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tbo.batch import Phase, Reason, Vote


class Mode(StrEnum):
    """How the layers of a step were run."""

    PLAIN = "plain"
    """The model's own layer code, nothing of ours."""
    INLINE = "inline"
    """Each layer ran its own ops at once, un-split."""
    DEFERRED = "deferred"
    """All layers ran as one plan, after the last had been called."""
    SERVED = "served"
    """This rank had no tokens and computed for its peers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One step on one rank.

    Attributes:
        step: counts this rank's steps from 1.
        engaged: whether sub-batches were interleaved.
        reason: why, or why not; `Reason.text` says it in words.
        reason_rank: the rank whose reason that is, or None if it is not one rank's.
        mode: how the layers were run.
        phase: the phase all ranks agreed on.
        split: the rule that cut this rank's batch, or "none".
        tokens_per_sub_batch: this rank's tokens in each sub-batch.
        votes: every rank's word, by rank.
        communication_seconds: time this rank's transfers took: on the modelled link, or from issue to the wait's end.
        exposed_seconds: time the host stood still waiting for them.
        modelled: the transfer times come from a `Link`, not from the wire.
        seconds: host time from the first layer's call to the merged output.
    """

    step: int
    engaged: bool
    reason: Reason
    reason_rank: int | None
    mode: Mode
    phase: Phase
    split: str
    tokens_per_sub_batch: tuple[int, ...]
    votes: tuple[Vote, ...]
    communication_seconds: float
    exposed_seconds: float
    modelled: bool
    seconds: float

    @property
    def hidden_share(self) -> float | None:
        """Share of the communication that ran behind computation, 0 to 1; None when no transfer was timed."""
        if self.communication_seconds <= 0:
            return None
        return min(1.0, max(0.0, 1 - self.exposed_seconds / self.communication_seconds))

    def __str__(self) -> str:
        """One paragraph for people."""
        verb = "overlapped" if self.engaged else "did not overlap"
        several = len(self.votes) > 1 and self.reason_rank is not None
        whose = f"rank {self.reason_rank}: " if several else ""
        tokens = ", ".join(map(str, self.tokens_per_sub_batch))
        lines = [
            f"step {self.step} ({self.phase.name.lower()}) {verb}: {whose}{self.reason.text}",
            f"  layers ran {self.mode.value}; split {self.split}; tokens per sub-batch {tokens}",
        ]
        share = self.hidden_share
        if share is not None:
            label = " (modelled link)" if self.modelled else ""
            lines.append(
                f"  communication: {self.communication_seconds * 1e3:.2f} ms, {self.exposed_seconds * 1e3:.2f} ms"
                f" exposed, {share:.0%} hidden{label}; step {self.seconds * 1e3:.2f} ms"
            )
        if len(self.votes) > 1:
            words = (
                f"rank {rank} {vote.phase.name.lower()} {list(vote.rows)} {vote.wants.name.lower()}"
                for rank, vote in enumerate(self.votes)
            )
            lines.append("  votes: " + "; ".join(words))
        return "\n".join(lines)
