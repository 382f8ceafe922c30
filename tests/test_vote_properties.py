"""Votes on the wire, properties of every election, ranks that disagree, and votes that contradict themselves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbo.batch import (
    MAX_PLANS,
    MAX_SUB_BATCHES,
    VOTE_LENGTH,
    Activity,
    Outcome,
    Overlap,
    Phase,
    Reason,
    Vote,
    Wants,
    decide,
    decode_vote,
    encode_vote,
    wants_overlap,
)
from tbo.errors import InternalError, RanksDisagreeError

pytestmark = pytest.mark.timeout(60)


@st.composite
def ballots(draw: st.DrawFn, n: int, step: int, plans: tuple[int, ...]) -> Vote:
    activity = draw(st.sampled_from(Activity))
    if activity is not Activity.ACTIVE or draw(st.booleans()):
        return Vote.idle(step=step, sub_batches=n, plans=plans, activity=activity)
    phase = draw(st.sampled_from([Phase.PREFILL, Phase.DECODE, Phase.VERIFY, Phase.MIXED]))
    rows = tuple(draw(st.lists(st.integers(0, 700), min_size=n, max_size=n)))
    overlap: Overlap = draw(st.sampled_from(["auto", "auto", "always", "never"]))
    wants, reason = wants_overlap(phase, rows, overlap=overlap, world_size=4)
    can_split, inline = draw(st.sampled_from([(True, False)] * 4 + [(False, False), (True, True)]))
    if inline or not can_split:
        reason = draw(st.sampled_from([Reason.OUTPUTS_CAPTURED, Reason.LAYER_HOOKS, Reason.CANNOT_SPLIT]))
    return Vote(
        step=step,
        phase=phase,
        rows=rows,
        wants=wants,
        reason=reason,
        can_split=can_split,
        must_run_inline=inline,
        plans=plans,
    )


@st.composite
def elections(draw: st.DrawFn) -> list[Vote]:
    n = draw(st.integers(1, MAX_SUB_BATCHES))
    step = draw(st.integers(0, 2**62))
    plans = tuple(draw(st.lists(st.integers(0, 2**64 - 1), max_size=MAX_PLANS)))
    return draw(st.lists(ballots(n, step, plans), min_size=1, max_size=6))


def common(outcome: Outcome) -> tuple[object, ...]:
    """All that must not depend on how ranks are numbered."""
    return (
        outcome.engaged,
        outcome.phase,
        outcome.sub_batches,
        outcome.order,
        outcome.reason,
        outcome.everyone_left,
        outcome.everyone_finished,
    )


@settings(max_examples=300, deadline=None)
@given(elections())
def test_a_vote_survives_the_wire_as_64_bit_integers(votes: list[Vote]) -> None:
    for cast in votes:
        numbers = encode_vote(cast)
        assert len(numbers) == VOTE_LENGTH
        assert all(type(number) is int and -(2**63) <= number < 2**63 for number in numbers)
        assert decode_vote(numbers) == cast


@settings(max_examples=300, deadline=None)
@given(elections())
def test_every_rank_derives_the_same_outcome_from_what_it_gathered(votes: list[Vote]) -> None:
    gathered = [encode_vote(cast) for cast in votes]
    outcomes = [decide([decode_vote(numbers) for numbers in gathered]) for _ in votes]
    assert all(outcome == decide(votes) for outcome in outcomes)


@settings(max_examples=300, deadline=None)
@given(elections(), st.randoms(use_true_random=False))
def test_numbering_ranks_otherwise_changes_nothing_but_the_numbers(votes: list[Vote], chance: random.Random) -> None:
    order = list(range(len(votes)))
    chance.shuffle(order)
    plain, shuffled = decide(votes), decide([votes[rank] for rank in order])

    assert common(shuffled) == common(plain)
    assert shuffled.rows == tuple(plain.rows[rank] for rank in order)
    assert (shuffled.reason_rank is None) == (plain.reason_rank is None)


@settings(max_examples=300, deadline=None)
@given(elections())
def test_fault_26_overlap_needs_one_that_asks_and_none_that_objects(votes: list[Vote]) -> None:
    outcome = decide(votes)
    active = [cast for cast in votes if cast.phase is not Phase.IDLE]
    expected = (
        len(votes[0].rows) > 1
        and any(cast.wants is Wants.YES for cast in active)
        and not any(cast.wants is Wants.NEVER or cast.must_run_inline or not cast.can_split for cast in votes)
    )

    assert outcome.engaged == expected
    assert (outcome.reason is Reason.NONE) == expected, "a step that does not overlap always says why"
    assert outcome.sub_batches == (len(votes[0].rows) if expected else 1)
    assert [sum(rows) for rows in outcome.rows] == [sum(cast.rows) for cast in votes]
    assert all(len(rows) == outcome.sub_batches for rows in outcome.rows)


# ---------------------------------------------------------------- disagreement and votes that contradict themselves


def idle_vote(*, step: int = 0, sub_batches: int = 2, plans: tuple[int, ...] = ()) -> Vote:
    return Vote.idle(step=step, sub_batches=sub_batches, plans=plans)


def test_different_plans_name_the_ranks() -> None:
    votes = [idle_vote(plans=(7, 8)), idle_vote(plans=(7, 9)), idle_vote(plans=(7, 8))]
    with pytest.raises(RanksDisagreeError) as caught:
        decide(votes)
    assert str(caught.value) == (
        "ranks disagree on the compiled plans (ranks 0, 2: 0000000000000007 0000000000000008; "
        "rank 1: 0000000000000007 0000000000000009). "
        "Wrap the same model with the same options and versions on every rank, and run the same steps."
    )


def test_a_missing_plan_is_a_disagreement_too() -> None:
    with pytest.raises(RanksDisagreeError, match=r"rank 0: none; rank 1: 0000000000000001"):
        decide([idle_vote(), idle_vote(plans=(1,))])


def test_different_steps_and_sub_batch_counts_name_the_ranks() -> None:
    with pytest.raises(RanksDisagreeError, match=r"the step they vote on \(ranks 0, 1: 4; rank 2: 5\)"):
        decide([idle_vote(step=4), idle_vote(step=4), idle_vote(step=5)])
    with pytest.raises(RanksDisagreeError, match=r"number of sub-batches \(rank 0: 2; rank 1: 3\)"):
        decide([idle_vote(), idle_vote(sub_batches=3)])


def test_a_fingerprint_means_the_same_signed_or_unsigned() -> None:
    assert decide([idle_vote(plans=(-1,)), idle_vote(plans=(2**64 - 1,))]).reason is Reason.ALL_IDLE


@pytest.mark.parametrize("numbers", [(), (1, 2, 3), (0,) * VOTE_LENGTH])
def test_numbers_of_another_version_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(RanksDisagreeError, match="same version of tbo on every rank"):
        decode_vote(numbers)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": ()}, "row counts"),
        ({"rows": (1,) * 9}, "row counts"),
        ({"rows": (1, -1)}, "row counts"),
        ({"plans": (1,) * 9}, "room for 8 plans, not 9"),
        ({"phase": Phase.IDLE}, "an idle rank votes with row counts"),
        ({"phase": Phase.IDLE, "rows": (0, 0)}, "an idle rank asks for overlap"),
        ({"activity": Activity.LEFT}, "a rank that has LEFT votes for phase PREFILL"),
        ({"wants": Wants.NEVER}, "does not ask has reason NONE"),
        ({"can_split": False}, "does not ask has reason NONE"),
        ({"must_run_inline": True}, "does not ask has reason NONE"),
        ({"wants": Wants.IF_OTHERS}, "does not ask has reason NONE"),
        ({"reason": Reason.TOO_FEW_TOKENS}, "a vote that asks has reason TOO_FEW_TOKENS"),
    ],
)
def test_a_vote_that_contradicts_itself_is_a_fault_of_ours(changed: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {
        "step": 0,
        "phase": Phase.PREFILL,
        "rows": (300, 300),
        "wants": Wants.YES,
        "reason": Reason.NONE,
    }
    with pytest.raises(InternalError, match=message):
        Vote(**{**fields, **changed})  # type: ignore[arg-type]


def test_no_votes_is_a_fault_of_ours() -> None:
    with pytest.raises(InternalError, match="without votes"):
        decide([])


def test_every_reason_has_its_own_text_and_number() -> None:
    assert all(reason.text for reason in Reason)
    assert len({reason.text for reason in Reason}) == len(Reason)
    # These numbers travel between ranks: they are fixed.
    assert {int(reason): reason.name for reason in Reason} == {
        0: "NONE",
        10: "POLICY_NEVER",
        11: "DISABLED",
        12: "OUTPUTS_CAPTURED",
        13: "LAYER_HOOKS",
        14: "TRAINING",
        15: "CACHE_NOT_SPLITTABLE",
        16: "ARGUMENT_NOT_SPLITTABLE",
        17: "OVER_A_LIMIT",
        18: "CANNOT_SPLIT",
        30: "TOO_FEW_TOKENS",
        31: "DECODE_OFF",
        32: "NOTHING_TO_SPLIT",
        33: "PREFIX_READ",
        34: "NOTHING_TO_HIDE",
        35: "IDLE",
        50: "ONE_SUB_BATCH",
        51: "ALL_IDLE",
        52: "ALL_LEFT",
    }
