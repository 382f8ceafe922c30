"""One rank's vote and the outcome of all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tbo.batch import (
    Activity,
    Outcome,
    Overlap,
    Reason,
    Thresholds,
    Vote,
    Wants,
    decide,
    decode_vote,
    encode_vote,
    wants_overlap,
)
from tbo.errors import DispatcherError

if TYPE_CHECKING:
    from tbo.ops.peers import Peers
    from tbo.wrapping.batching import StepBatch


class Voting:
    """Casts this rank's vote, gathers the others', and returns what all do.

    Args:
        sub_batches: of an overlapped step.
        overlap: the user's option.
        thresholds: for ``"auto"``.
        disabled: the environment turns overlap off, whatever the option.
        fingerprint: of all candidate plans.
        peers: the other ranks, or None on one rank.
        max_tokens: of one rank in one dispatch, or None for no limit.
    """

    def __init__(
        self,
        *,
        sub_batches: int,
        overlap: Overlap,
        thresholds: Thresholds,
        disabled: bool,
        fingerprint: int,
        peers: Peers | None,
        max_tokens: int | None,
    ) -> None:
        self._sub_batches = sub_batches
        self._overlap: Overlap = "never" if disabled else overlap
        self._why_never = Reason.DISABLED if disabled else Reason.POLICY_NEVER
        self._thresholds = thresholds
        self._plans = (fingerprint,)
        self._peers = peers
        self._max_tokens = max_tokens
        self._step = 0

    def vote(self, batch: StepBatch, *, must_run_inline: Reason | None) -> Outcome:
        """Votes for a step with tokens.

        Args:
            batch: what this rank would run.
            must_run_inline: why every layer must finish before the next is called, if it must.
        """
        rows = batch.split.rows
        wants, reason = wants_overlap(
            batch.phase,
            rows,
            overlap=self._overlap,
            thresholds=self._thresholds,
            world_size=1 if self._peers is None else self._peers.world_size,
        )
        if must_run_inline is not None:
            reason = must_run_inline
        elif wants is Wants.NEVER:
            reason = self._why_never
        elif batch.why_whole is not None:
            wants, reason = Wants.IF_OTHERS, batch.why_whole
        return self._decide(
            Vote(
                step=self._step,
                phase=batch.phase,
                rows=rows,
                must_run_inline=must_run_inline is not None,
                wants=wants,
                reason=reason,
                plans=self._plans,
            )
        )

    def vote_idle(self, *, finished: bool) -> Outcome:
        """Votes without tokens of its own, having left or finished."""
        activity = Activity.FINISHED if finished else Activity.LEFT
        return self._decide(
            Vote.idle(step=self._step, sub_batches=self._sub_batches, plans=self._plans, activity=activity)
        )

    def _decide(self, vote: Vote) -> Outcome:
        self._step += 1
        if self._peers is None:
            outcome = decide([vote])
        else:
            outcome = decide([decode_vote(numbers) for numbers in self._peers.gather(encode_vote(vote))])
        self._refuse_over_cap(outcome)
        return outcome

    def _refuse_over_cap(self, outcome: Outcome) -> None:
        """Every rank sees every rank's counts, so all refuse alike, before any has sent a row.

        Raises:
            DispatcherError: names the rank and its tokens.
        """
        if self._max_tokens is None:
            return
        for rank, rows in enumerate(outcome.rows):
            if max(rows) > self._max_tokens:
                what = "a sub-batch" if outcome.engaged else "a step that is not split"
                raise DispatcherError(
                    f"rank {rank} has {max(rows)} tokens in {what} ({outcome.explain()}), and the dispatcher takes"
                    f" {self._max_tokens} at once",
                    remedy="Use smaller batches on that rank, or a dispatcher that takes more.",
                )
