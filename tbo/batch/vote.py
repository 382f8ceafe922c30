"""How ranks agree, once a step, on whether and how to overlap.

Each rank casts one `Vote`; one small all-gather brings all of them to every rank; `decide` is a pure function of them,
so every rank reaches the same `Outcome`. Nothing about a peer is ever deduced from counts or from this rank's own
state: a rank that took another path than its peers would leave them waiting in a collective.

- One rank that *objects* (it must not split, must run layer by layer, or was told never to) keeps all from overlapping.
- Else they overlap if one *active* rank asks for it. A rank that has no tokens, or fewer than there are sub-batches,
  neither vetoes nor asks: it takes part with empty sub-batches.

Letters in shapes: W ranks, N sub-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

from tbo.batch.phase import Phase
from tbo.batch.reasons import Reason
from tbo.batch.wants import Overlap, Thresholds, Wants, wants_overlap
from tbo.errors import InternalError, RanksDisagreeError

__all__ = [
    "MAX_PLANS",
    "MAX_SUB_BATCHES",
    "ORDER_OF_PHASE",
    "VOTE_LENGTH",
    "Activity",
    "Outcome",
    "Overlap",
    "Reason",
    "Thresholds",
    "Vote",
    "Wants",
    "decide",
    "decode_vote",
    "encode_vote",
    "wants_overlap",
]

MAX_SUB_BATCHES = 8
"""Sub-batches a vote has room for."""
MAX_PLANS = 8
"""Candidate plans a vote has room for."""
_FORMAT = 0x7B01
"""First number of an encoded vote; raised whenever the meaning of the others changes."""
VOTE_LENGTH = 8 + (1 + MAX_SUB_BATCHES) + (1 + MAX_PLANS)
"""Integers in an encoded vote."""

ORDER_OF_PHASE: Mapping[Phase, str] = MappingProxyType(
    {
        Phase.PREFILL: "prefill",
        Phase.MIXED: "prefill",
        Phase.DECODE: "decode",
        Phase.VERIFY: "decode",
        Phase.IDLE: "prefill",
    }
)
"""Key of the order that a step of each phase runs by: verify as decode, mixed as prefill. In an all-idle step nothing
can be hidden, so it takes the order without an offset."""


class Activity(IntEnum):
    """Where a rank is in its work."""

    ACTIVE = 1
    LEFT = 2
    """Its own generation is over; it serves its peers with empty sub-batches until all have left."""
    FINISHED = 3
    """It will never run another step (`handle.finish()`), and serves its peers until all have finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One rank's word on one step.

    Attributes:
        step: number of this vote since the ranks were joined; equal on all ranks.
        phase: of this rank's batch; IDLE if it has no tokens.
        rows: its tokens in each sub-batch of its split, `[N]`; all of them in the first if it must not split.
        wants: what its own policy says.
        reason: why it does not ask for overlap; NONE if and only if it does.
        can_split: False if its batch must not be split. Too few tokens are no reason: parts may be empty.
        must_run_inline: its layers must run one after the other in this step (captured outputs, hooks).
        plans: fingerprint of each plan that this step might run, in an order all ranks share; 64 bits each.
        activity: whether it is at work, has left, or has finished.

    Raises:
        InternalError: the fields contradict each other.
    """

    step: int
    phase: Phase
    rows: tuple[int, ...]
    wants: Wants
    reason: Reason
    can_split: bool = True
    must_run_inline: bool = False
    plans: tuple[int, ...] = ()
    activity: Activity = Activity.ACTIVE

    def __post_init__(self) -> None:
        if not 1 <= len(self.rows) <= MAX_SUB_BATCHES or any(count < 0 for count in self.rows):
            raise InternalError(f"a vote has row counts {self.rows}")
        if len(self.plans) > MAX_PLANS:
            raise InternalError(f"a vote has room for {MAX_PLANS} plans, not {len(self.plans)}")
        if self.phase is Phase.IDLE and any(self.rows):
            raise InternalError(f"an idle rank votes with row counts {self.rows}")
        if self.phase is not Phase.IDLE and self.activity is not Activity.ACTIVE:
            raise InternalError(f"a rank that has {self.activity.name} votes for phase {self.phase.name}")
        if self.asks != (self.reason is Reason.NONE):
            raise InternalError(f"a vote that {'asks' if self.asks else 'does not ask'} has reason {self.reason.name}")
        if self.asks and self.phase is Phase.IDLE:
            raise InternalError("an idle rank asks for overlap")
        # Whether a fingerprint was made as a signed or an unsigned number must not make ranks disagree.
        object.__setattr__(self, "plans", tuple(plan % 2**64 for plan in self.plans))

    @property
    def objects(self) -> bool:
        """Whether this rank keeps all ranks from overlapping."""
        return not self.can_split or self.must_run_inline or self.wants is Wants.NEVER

    @property
    def asks(self) -> bool:
        """Whether this rank asks for overlap."""
        return self.wants is Wants.YES and not self.objects

    @classmethod
    def idle(
        cls, *, step: int, sub_batches: int, plans: tuple[int, ...] = (), activity: Activity = Activity.ACTIVE
    ) -> Vote:
        """The vote of a rank without tokens: it fits any phase, and neither vetoes nor asks."""
        return cls(
            step=step,
            phase=Phase.IDLE,
            rows=(0,) * sub_batches,
            wants=Wants.IF_OTHERS,
            reason=Reason.IDLE,
            plans=plans,
            activity=activity,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What all ranks do in one step: the same on every rank.

    Attributes:
        engaged: whether the sub-batches overlap.
        phase: the phase of the step: the active ranks' own if they agree, else MIXED; IDLE if none is active.
        sub_batches: how many sub-batches run: 1 if not engaged.
        order: key of the order to run by, see `ORDER_OF_PHASE`.
        rows: tokens of each rank in each sub-batch that runs, `[W][sub_batches]`.
        reason: why the step is not overlapped; NONE if it is.
        reason_rank: the rank whose reason that is; None if it is not one rank's.
        everyone_left: every rank's generation is over, so nobody needs to be served.
        everyone_finished: no rank will ever run another step.
        votes: what it was made from, by rank.
    """

    engaged: bool
    phase: Phase
    sub_batches: int
    order: str
    rows: tuple[tuple[int, ...], ...]
    reason: Reason
    reason_rank: int | None
    everyone_left: bool
    everyone_finished: bool
    votes: tuple[Vote, ...]

    def explain(self) -> str:
        """One line for a person: whether the step overlapped, with what counts, and if not, whose reason it was."""
        if self.engaged:
            return f"overlapped: {self.phase.name.lower()} in {self.sub_batches} sub-batches"
        if self.reason_rank is None:
            return f"not overlapped: {self.reason.text}"
        rows = self.votes[self.reason_rank].rows
        return f"not overlapped: rank {self.reason_rank} (tokens per sub-batch: {list(rows)}): {self.reason.text}"


def decide(votes: Sequence[Vote], *, order_of_phase: Mapping[Phase, str] = ORDER_OF_PHASE) -> Outcome:
    """What all ranks do, from all ranks' votes in rank order. Pure: no clock, no random choice, no local state.

    Raises:
        RanksDisagreeError: ranks are at different steps, or have different numbers of sub-batches or different plans.
        InternalError: there are no votes.
    """
    if not votes:
        raise InternalError("an outcome was asked for without votes")
    _require_same(votes, "the step they vote on", lambda vote: str(vote.step))
    _require_same(votes, "the number of sub-batches", lambda vote: str(len(vote.rows)))
    _require_same(votes, "the compiled plans", lambda vote: " ".join(f"{plan:016x}" for plan in vote.plans) or "none")
    reason, reason_rank = _why_not(votes)
    engaged = reason is Reason.NONE
    phase = _joint_phase(votes)
    return Outcome(
        engaged=engaged,
        phase=phase,
        sub_batches=len(votes[0].rows) if engaged else 1,
        order=order_of_phase[phase],
        rows=tuple(vote.rows if engaged else (sum(vote.rows),) for vote in votes),
        reason=reason,
        reason_rank=reason_rank,
        everyone_left=all(vote.activity is not Activity.ACTIVE for vote in votes),
        everyone_finished=all(vote.activity is Activity.FINISHED for vote in votes),
        votes=tuple(votes),
    )


def encode_vote(vote: Vote) -> tuple[int, ...]:
    """The vote as `VOTE_LENGTH` integers that each fit in a signed 64-bit one."""
    return (
        _FORMAT,
        vote.step,
        int(vote.phase),
        int(vote.activity),
        int(vote.wants),
        int(vote.reason),
        int(vote.can_split),
        int(vote.must_run_inline),
        *_padded(vote.rows, MAX_SUB_BATCHES),
        *_padded([plan - 2**64 if plan >= 2**63 else plan for plan in vote.plans], MAX_PLANS),
    )


def decode_vote(numbers: Sequence[int]) -> Vote:
    """The vote that `encode_vote` made these integers from.

    Raises:
        RanksDisagreeError: they were made by another version of tbo.
    """
    if len(numbers) != VOTE_LENGTH or numbers[0] != _FORMAT:
        raise RanksDisagreeError(
            f"a vote of {len(numbers)} numbers in format {numbers[0] if numbers else None} arrived; this rank reads "
            f"{VOTE_LENGTH} numbers in format {_FORMAT}",
            remedy="Install the same version of tbo on every rank.",
        )
    _, step, phase, activity, wants, reason, can_split, must_run_inline, *lists = numbers
    rows, plans = lists[: MAX_SUB_BATCHES + 1], lists[MAX_SUB_BATCHES + 1 :]
    return Vote(
        step=step,
        phase=Phase(phase),
        rows=tuple(rows[1 : 1 + rows[0]]),
        wants=Wants(wants),
        reason=Reason(reason),
        can_split=bool(can_split),
        must_run_inline=bool(must_run_inline),
        plans=tuple(plans[1 : 1 + plans[0]]),
        activity=Activity(activity),
    )


def _padded(values: Sequence[int], room: int) -> list[int]:
    """How many there are, then the values, then zeros."""
    return [len(values), *values, *[0] * (room - len(values))]


def _joint_phase(votes: Sequence[Vote]) -> Phase:
    phases = {vote.phase for vote in votes} - {Phase.IDLE}
    if not phases:
        return Phase.IDLE
    return phases.pop() if len(phases) == 1 else Phase.MIXED


def _why_not(votes: Sequence[Vote]) -> tuple[Reason, int | None]:
    """The first reason against overlap and its rank, or NONE. The reason does not depend on how ranks are numbered."""
    active = [(vote, rank) for rank, vote in enumerate(votes) if vote.phase is not Phase.IDLE]
    if not active:
        left = all(vote.activity is not Activity.ACTIVE for vote in votes)
        return (Reason.ALL_LEFT if left else Reason.ALL_IDLE), None
    objections = [(vote.reason, rank) for rank, vote in enumerate(votes) if vote.objects]
    if objections:
        return min(objections)
    if len(votes[0].rows) == 1:
        return Reason.ONE_SUB_BATCH, None
    if any(vote.asks for vote, _ in active):
        return Reason.NONE, None
    # Nobody asks: the rank with the most tokens was the nearest to asking, so its reason says most.
    vote, rank = min(active, key=lambda entry: (-sum(entry[0].rows), entry[0].reason, entry[1]))
    return vote.reason, rank


def _require_same(votes: Sequence[Vote], what: str, value_of: Callable[[Vote], str]) -> None:
    ranks_of: dict[str, list[int]] = {}
    for rank, vote in enumerate(votes):
        ranks_of.setdefault(value_of(vote), []).append(rank)
    if len(ranks_of) > 1:
        found = "; ".join(f"{_name_ranks(ranks)}: {value}" for value, ranks in ranks_of.items())
        raise RanksDisagreeError(
            f"ranks disagree on {what} ({found})",
            remedy="Wrap the same model with the same options and versions on every rank, and run the same steps.",
        )


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
