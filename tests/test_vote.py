"""Votes: the same outcome on every rank, whatever each of them brings, and always a reason."""

from __future__ import annotations

import pytest

from tbo.batch import (
    ORDER_OF_PHASE,
    Activity,
    Overlap,
    Phase,
    Reason,
    Thresholds,
    Vote,
    Wants,
    choose_split,
    decide,
    wants_overlap,
)

pytestmark = pytest.mark.timeout(60)


def vote(phase: Phase, *lengths: int, overlap: Overlap = "auto", n: int = 2, decode: bool = False) -> Vote:
    """The vote of one of several ranks with these sequence lengths, by the default policy."""
    split = choose_split(phase, lengths, n)
    wants, reason = wants_overlap(
        phase, split.rows, overlap=overlap, thresholds=Thresholds(decode=decode), world_size=4
    )
    return Vote(step=0, phase=phase, rows=split.rows, wants=wants, reason=reason)


def objecting(reason: Reason, *, inline: bool = False) -> Vote:
    return Vote(
        step=0,
        phase=Phase.PREFILL,
        rows=(1000, 0),
        wants=Wants.YES,
        reason=reason,
        can_split=inline,
        must_run_inline=inline,
    )


IDLE = Vote.idle(step=0, sub_batches=2)
LEFT = Vote.idle(step=0, sub_batches=2, activity=Activity.LEFT)
FINISHED = Vote.idle(step=0, sub_batches=2, activity=Activity.FINISHED)
LARGE = vote(Phase.PREFILL, 600)


# ---------------------------------------------------------------- outcomes worked out by hand


def test_large_prefill_overlaps_on_all_ranks() -> None:
    outcome = decide([vote(Phase.PREFILL, 600), vote(Phase.PREFILL, 310, 310)])

    assert outcome.engaged
    assert (outcome.phase, outcome.order, outcome.sub_batches) == (Phase.PREFILL, "prefill", 2)
    assert outcome.rows == ((300, 300), (310, 310))
    assert (outcome.reason, outcome.reason_rank) == (Reason.NONE, None)
    assert outcome.explain() == "overlapped: prefill in 2 sub-batches"


def test_a_step_that_is_not_split_counts_all_rows_in_its_one_sub_batch() -> None:
    outcome = decide([vote(Phase.DECODE, 1, 1, 1), IDLE])

    assert not outcome.engaged
    assert outcome.sub_batches == 1
    assert outcome.rows == ((3,), (0,))
    assert (outcome.reason, outcome.reason_rank, outcome.order) == (Reason.DECODE_OFF, 0, "decode")


@pytest.mark.parametrize(
    ("phases", "joint", "order"),
    [
        ((Phase.PREFILL, Phase.PREFILL), Phase.PREFILL, "prefill"),
        ((Phase.DECODE, Phase.DECODE), Phase.DECODE, "decode"),
        ((Phase.VERIFY, Phase.VERIFY), Phase.VERIFY, "decode"),
        ((Phase.MIXED, Phase.MIXED), Phase.MIXED, "prefill"),
        ((Phase.PREFILL, Phase.DECODE), Phase.MIXED, "prefill"),
        ((Phase.DECODE, Phase.VERIFY), Phase.MIXED, "prefill"),
        ((Phase.MIXED, Phase.DECODE), Phase.MIXED, "prefill"),
        ((Phase.IDLE, Phase.DECODE), Phase.DECODE, "decode"),
        ((Phase.PREFILL, Phase.IDLE), Phase.PREFILL, "prefill"),
        ((Phase.IDLE, Phase.IDLE), Phase.IDLE, "prefill"),
    ],
)
def test_joint_phase_and_order(phases: tuple[Phase, Phase], joint: Phase, order: str) -> None:
    outcome = decide([IDLE if phase is Phase.IDLE else vote(phase, 1, 1, overlap="always") for phase in phases])

    assert (outcome.phase, outcome.order) == (joint, order)
    assert outcome.engaged == (joint is not Phase.IDLE)


def test_orders_are_data_open_to_the_user() -> None:
    orders = {**ORDER_OF_PHASE, Phase.VERIFY: "my order"}
    assert decide([vote(Phase.VERIFY, 4, 4)], order_of_phase=orders).order == "my order"


@pytest.mark.parametrize("reason", [Reason.POLICY_NEVER, Reason.CACHE_NOT_SPLITTABLE, Reason.OUTPUTS_CAPTURED])
@pytest.mark.parametrize("inline", [True, False])
def test_one_objection_is_enough_and_is_named(reason: Reason, *, inline: bool) -> None:
    outcome = decide([LARGE, LARGE, objecting(reason, inline=inline), LARGE])

    assert not outcome.engaged
    assert (outcome.reason, outcome.reason_rank) == (reason, 2)
    assert outcome.rows == ((600,), (600,), (1000,), (600,))
    assert outcome.explain() == f"not overlapped: rank 2 (tokens per sub-batch: [1000, 0]): {reason.text}"


def test_policy_never_is_an_objection_and_always_asks_at_any_count() -> None:
    assert decide([vote(Phase.PREFILL, 600, overlap="never"), LARGE]).reason is Reason.POLICY_NEVER
    assert decide([vote(Phase.DECODE, 1, overlap="always"), IDLE]).rows == ((1, 0), (0, 0))
    assert decide([Vote.idle(step=0, sub_batches=2)] * 2).reason is Reason.ALL_IDLE


def test_three_sub_batches() -> None:
    outcome = decide([vote(Phase.PREFILL, 900, n=3), vote(Phase.PREFILL, 2, n=3), Vote.idle(step=0, sub_batches=3)])
    assert (outcome.engaged, outcome.sub_batches) == (True, 3)
    assert outcome.rows == ((300, 300, 300), (1, 1, 0), (0, 0, 0))


def test_one_configured_sub_batch_never_overlaps() -> None:
    outcome = decide([vote(Phase.PREFILL, 900, n=1, overlap="always")])
    assert (outcome.engaged, outcome.reason) == (False, Reason.ONE_SUB_BATCH)


# ---------------------------------------------------------------- leaving


def test_a_rank_that_left_serves_its_peers_until_all_have_left() -> None:
    serving = decide([LEFT, LARGE, FINISHED])
    assert (serving.engaged, serving.everyone_left, serving.everyone_finished) == (True, False, False)
    assert serving.rows == ((0, 0), (300, 300), (0, 0))

    # An idle rank that is still generating keeps the others.
    assert not decide([LEFT, IDLE]).everyone_left

    left = decide([LEFT, FINISHED])
    assert (left.everyone_left, left.everyone_finished) == (True, False)
    assert (left.reason, left.reason_rank) == (Reason.ALL_LEFT, None)
    assert left.explain() == "not overlapped: every rank's generation is over"

    assert decide([FINISHED, FINISHED]).everyone_finished


# ---------------------------------------------------------------- faults of other systems, by row of fault_cases.md


def test_fault_9_ranks_with_1_7_300_and_300_tokens_take_part_with_what_they_have() -> None:
    votes = [vote(Phase.PREFILL, count, overlap="always") for count in (1, 7, 300, 300)]
    outcome = decide(votes)
    assert outcome.engaged
    assert outcome.rows == ((1, 0), (4, 3), (150, 150), (150, 150))


def test_fault_10_a_batch_of_one_does_not_veto() -> None:
    outcome = decide([vote(Phase.PREFILL, 4000), *[vote(Phase.PREFILL, 2000, 2000)] * 3])
    assert outcome.engaged
    assert outcome.rows == ((2000, 2000),) * 4
    # Not even one that cannot be cut in two: it has an empty sub-batch.
    assert decide([vote(Phase.PREFILL, 1), LARGE]).rows == ((1, 0), (300, 300))


@pytest.mark.parametrize("others", [LARGE, vote(Phase.DECODE, *[1] * 64), vote(Phase.DECODE, *[1] * 64, decode=True)])
def test_faults_24_and_26_an_idle_rank_neither_vetoes_nor_asks_and_never_goes_its_own_way(others: Vote) -> None:
    without = decide([others, others])
    outcome = decide([IDLE, others, others])

    assert outcome.engaged == without.engaged
    assert outcome.sub_batches == without.sub_batches, "the idle rank runs as many rounds as the others"
    assert outcome.phase is others.phase
    assert outcome.rows[0] == (0,) * outcome.sub_batches


def test_fault_25_extend_on_one_rank_and_decode_on_another_is_one_mixed_step() -> None:
    outcome = decide([LARGE, vote(Phase.DECODE, 1, 1, 1)])
    assert (outcome.engaged, outcome.phase, outcome.order) == (True, Phase.MIXED, "prefill")
    assert outcome.rows == ((300, 300), (2, 1))


def test_fault_51_tiny_prompts_do_not_overlap_and_say_why() -> None:
    outcome = decide([vote(Phase.PREFILL, *[10] * 10), IDLE])
    assert not outcome.engaged
    assert outcome.explain() == (
        "not overlapped: rank 0 (tokens per sub-batch: [50, 50]): its smallest sub-batch has too few tokens: "
        "splitting would cost more than it hides"
    )


@pytest.mark.parametrize(("tokens", "engaged"), [(2, False), (256, False), (511, False), (512, True), (4000, True)])
def test_fault_53_under_512_tokens_a_rank_must_not_split(tokens: int, *, engaged: bool) -> None:
    outcome = decide([vote(Phase.PREFILL, tokens)] * 8)
    assert outcome.engaged == engaged
    assert outcome.reason is (Reason.NONE if engaged else Reason.TOO_FEW_TOKENS)


def test_the_rank_with_most_tokens_says_why_nobody_asked() -> None:
    outcome = decide([vote(Phase.DECODE, 1, 1), vote(Phase.PREFILL, 100), IDLE])
    assert (outcome.reason, outcome.reason_rank) == (Reason.TOO_FEW_TOKENS, 1)


def test_fault_53_one_rank_with_enough_tokens_is_enough() -> None:
    assert decide([vote(Phase.PREFILL, 100), vote(Phase.PREFILL, 512)]).engaged


# ---------------------------------------------------------------- one rank's own policy


@pytest.mark.parametrize(
    ("phase", "rows", "options", "expected"),
    [
        (Phase.PREFILL, (256, 256), {}, (Wants.YES, Reason.NONE)),
        (Phase.PREFILL, (600, 255), {}, (Wants.IF_OTHERS, Reason.TOO_FEW_TOKENS)),
        (Phase.MIXED, (256, 256), {}, (Wants.YES, Reason.NONE)),
        (Phase.PREFILL, (600, 0), {}, (Wants.IF_OTHERS, Reason.NOTHING_TO_SPLIT)),
        (Phase.PREFILL, (600, 0), {"prefix_reads": True}, (Wants.IF_OTHERS, Reason.PREFIX_READ)),
        (Phase.PREFILL, (600, 600), {"world_size": 1}, (Wants.IF_OTHERS, Reason.NOTHING_TO_HIDE)),
        (Phase.PREFILL, (600, 600), {"overlap": "never"}, (Wants.NEVER, Reason.POLICY_NEVER)),
        (Phase.PREFILL, (1, 0), {"overlap": "always"}, (Wants.YES, Reason.NONE)),
        (Phase.PREFILL, (600, 600), {"overlap": "always", "world_size": 1}, (Wants.YES, Reason.NONE)),
        (Phase.PREFILL, (0, 0), {"overlap": "always"}, (Wants.IF_OTHERS, Reason.IDLE)),
        (Phase.DECODE, (64, 64), {}, (Wants.IF_OTHERS, Reason.DECODE_OFF)),
        (Phase.VERIFY, (640, 640), {}, (Wants.IF_OTHERS, Reason.DECODE_OFF)),
        (Phase.DECODE, (64, 64), {"thresholds": Thresholds(decode=True)}, (Wants.YES, Reason.NONE)),
        (
            Phase.PREFILL,
            (9, 9),
            {"thresholds": Thresholds(prefill_min_tokens_per_sub_batch=9)},
            (Wants.YES, Reason.NONE),
        ),
        (Phase.IDLE, (0, 0), {}, (Wants.IF_OTHERS, Reason.IDLE)),
    ],
)
def test_what_a_rank_wants(
    phase: Phase, rows: tuple[int, ...], options: dict[str, object], expected: tuple[Wants, Reason]
) -> None:
    arguments: dict[str, object] = {"world_size": 2, **options}
    assert wants_overlap(phase, rows, **arguments) == expected  # type: ignore[arg-type]


def test_defaults_are_the_documented_ones() -> None:
    assert Thresholds() == Thresholds(prefill_min_tokens_per_sub_batch=256, decode=False)
