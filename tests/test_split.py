"""Split rules: hand-worked cuts, faults of other systems, and properties that hold for every batch."""

from __future__ import annotations

import itertools
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbo.batch import (
    Phase,
    Split,
    SplitRule,
    TokenBatch,
    choose_split,
    split_at,
    split_attention_cost,
    split_half,
    split_rows,
    split_sequences,
    split_tokens,
    take,
)
from tbo.errors import SplitError

pytestmark = pytest.mark.timeout(60)

PHASES_WITH_TOKENS = [Phase.PREFILL, Phase.DECODE, Phase.VERIFY, Phase.MIXED]


def sequences_of(split: Split) -> list[tuple[int, int]]:
    return [(part.sequence_start, part.sequence_stop) for part in split.parts]


# ---------------------------------------------------------------- hand-worked numbers


@pytest.mark.parametrize(
    ("lengths", "n", "rows"),
    [
        ([4, 1, 1, 2, 4], 2, (6, 6)),
        ([3, 3, 3], 2, (6, 3)),
        ([10, 1, 1, 1], 2, (10, 3)),
        ([1, 1, 1, 10], 3, (2, 1, 10)),
        ([5, 5, 5, 5, 5, 5], 3, (10, 10, 10)),
        ([7], 2, (7, 0)),
        ([3, 4], 4, (3, 4, 0, 0)),
        ([2, 2, 2], 1, (6,)),
        ([], 3, (0, 0, 0)),
        ([0, 0], 2, (0, 0)),
    ],
)
def test_sequence_balanced_cut_is_where_counts_are_most_even(lengths: list[int], n: int, rows: tuple[int, ...]) -> None:
    assert split_sequences(lengths, n).rows == rows


@pytest.mark.parametrize(
    ("count", "n", "sizes"),
    [(4, 2, (2, 2)), (5, 2, (3, 2)), (1, 2, (1, 0)), (0, 2, (0, 0)), (5, 3, (2, 2, 1)), (2, 3, (1, 1, 0))],
)
def test_half_gives_equal_numbers_of_sequences_larger_parts_first(count: int, n: int, sizes: tuple[int, ...]) -> None:
    decode = split_half([1] * count, n)
    verify = split_half([4] * count, n)

    assert decode.rows == sizes
    assert verify.rows == tuple(4 * size for size in sizes), "verify keeps the w tokens of a sequence together"
    assert sequences_of(decode) == sequences_of(verify)


def test_token_split_keeps_sequences_whole_while_they_are_even_enough() -> None:
    split = split_tokens([52, 48], 2)  # 48 of 100 tokens are exactly the threshold: not under it
    assert (split.rule, split.rows) == (SplitRule.SEQUENCES, (52, 48))


def test_token_split_cuts_inside_a_sequence_just_under_the_threshold() -> None:
    split = split_tokens([53, 47], 2)
    assert (split.rule, split.rows) == (SplitRule.TOKENS, (50, 50))
    first, second = split.parts
    assert (first.lengths, first.offset, first.remaining) == ((50,), 0, 3)
    assert (second.lengths, second.offset, second.remaining) == ((3, 47), 50, 0)
    assert sequences_of(split) == [(0, 1), (0, 2)], "the cut sequence belongs to both parts"
    assert "47.0% of the tokens, under 48.0%" in split.reason


def test_one_long_sequence_over_four_parts_knows_every_offset() -> None:
    split = split_tokens([10], 4)
    assert split.rows == (3, 3, 2, 2)
    assert [part.offset for part in split.parts] == [0, 3, 6, 8]
    assert [part.remaining for part in split.parts] == [7, 4, 2, 0]


def test_threshold_scales_with_the_number_of_parts() -> None:
    # Three parts: 0.48 * 2 / 3 = 32 % each.
    assert split_tokens([34, 33, 33], 3).rule is SplitRule.SEQUENCES
    assert split_tokens([35, 34, 31], 3).rows == (34, 33, 33)


def test_threshold_zero_never_cuts_a_sequence() -> None:
    split = split_tokens([100, 2000], 2, threshold=0)
    assert (split.rule, split.rows) == (SplitRule.SEQUENCES, (100, 2000))


def test_attention_cost_counts_pairs_of_queries_and_keys() -> None:
    # length * (length / 2 + prefix): 20*10 = 200; 4 times 10*5 = 200. Token counts alone would cut 20 | 40 as 30 | 30.
    assert split_attention_cost([20, 10, 10, 10, 10], 2).rows == (20, 40)
    # A prefix of 15 makes the last one 10*(5+15) = 200, as much as the four before it together.
    assert split_attention_cost([10, 10, 10, 10, 10], 2, prefix_lengths=[0, 0, 0, 0, 15]).rows == (40, 10)


def test_rows_of_a_padded_batch() -> None:
    split = split_rows(5, 2, tokens_per_row=7)
    assert [part.sequences for part in split.parts] == [slice(0, 3), slice(3, 5)]
    assert split.rows == (21, 14)
    assert split_rows(1, 2).rows == (1, 0)
    assert split_rows(0, 2).rows == (0, 0)


@pytest.mark.parametrize(
    ("phase", "lengths", "rule", "rows"),
    [
        (Phase.PREFILL, [6, 6], SplitRule.SEQUENCES, (6, 6)),
        (Phase.PREFILL, [2, 10], SplitRule.TOKENS, (6, 6)),
        (Phase.MIXED, [9, 1, 1, 1], SplitRule.TOKENS, (6, 6)),
        (Phase.DECODE, [1, 1, 1], SplitRule.HALF, (2, 1)),
        (Phase.VERIFY, [4, 4, 4], SplitRule.HALF, (8, 4)),
        (Phase.IDLE, [], SplitRule.HALF, (0, 0)),
    ],
)
def test_each_phase_has_its_rule(phase: Phase, lengths: list[int], rule: SplitRule, rows: tuple[int, ...]) -> None:
    split = choose_split(phase, lengths, 2)
    assert (split.rule, split.rows) == (rule, rows)


def test_a_rule_can_be_asked_for_by_name() -> None:
    split = choose_split(Phase.PREFILL, [10] * 5, 2, rule=SplitRule.ATTENTION_COST, prefix_lengths=[0, 0, 0, 0, 15])
    assert (split.rule, split.rows) == (SplitRule.ATTENTION_COST, (40, 10))


# ---------------------------------------------------------------- faults of other systems, by row of fault_cases.md


@pytest.mark.parametrize("lengths", [[32, 96], [32, 96, 10], [10, 32, 96]])
@pytest.mark.parametrize("phase", PHASES_WITH_TOKENS)
def test_fault_1_reader_of_a_prefix_stays_with_its_writer(phase: Phase, lengths: list[int]) -> None:
    reader, writer = lengths.index(32), lengths.index(96)
    depends_on = [(writer,) if sequence == reader else () for sequence in range(len(lengths))]

    split = choose_split(phase, lengths, 2, depends_on=depends_on)

    everyone = range(len(lengths))
    holders = [{part.index for part in split.parts if s in everyone[part.sequences]} for s in (reader, writer)]
    assert holders[0] == holders[1]
    assert len(holders[0]) == 1
    if len(lengths) == 2:
        assert split.rows == (128, 0)


def test_fault_1_a_cut_that_separates_reader_and_writer_is_refused_by_name() -> None:
    with pytest.raises(SplitError, match="before token 32 separates sequence 0 from sequence 1"):
        split_at([32, 96], [32], depends_on=[(1,), ()])
    with pytest.raises(SplitError, match="separates sequence 1 from sequence 0"):
        split_at([32, 96, 5], [100], depends_on=[(), (0,), ()])


def test_fault_1_a_chain_of_readers_stays_together() -> None:
    # 0 reads 1, 1 reads 2; 3 is free. 3 + 3 + 3 against 4.
    assert split_sequences([3, 3, 3, 4], 2, depends_on=[(1,), (2,), (), ()]).rows == (9, 4)


def test_fault_1_token_cut_moves_out_of_bound_sequences() -> None:
    # Even would be 50 | 50, inside the bound pair (0, 1), which ends at 60.
    assert split_tokens([30, 30, 40], 2, depends_on=[(1,), (), ()]).rows == (60, 40)
    # Here every token cut lands at an end of the batch, so the cut between sequences stays.
    assert split_tokens([1, 1, 1], 2, depends_on=[(), (2,), ()]).rows == (1, 2)
    # A sequence without tokens makes two boundaries at one token.
    assert split_tokens([2, 0, 5, 1], 4, depends_on=[(), (), (3,), ()]).rows == (2, 6, 0, 0)


def test_faults_7_and_9_one_token_gives_an_explicit_empty_part() -> None:
    for phase in PHASES_WITH_TOKENS:
        split = choose_split(phase, [1], 2)
        assert split.rows == (1, 0)
        assert split.parts[1].lengths == ()
        assert split.parts[1].tokens == slice(1, 1)


@pytest.mark.parametrize(("tokens", "rows"), [(1, (1, 0)), (7, (4, 3)), (300, (150, 150)), (0, (0, 0))])
def test_fault_9_ranks_with_few_tokens(tokens: int, rows: tuple[int, int]) -> None:
    assert choose_split(Phase.PREFILL, [tokens], 2).rows == rows


def test_fault_10_unbalanced_lengths_and_a_batch_of_one() -> None:
    assert choose_split(Phase.PREFILL, [100, 2000], 2).rows == (1050, 1050)
    assert choose_split(Phase.PREFILL, [4000], 2).rows == (2000, 2000)
    assert choose_split(Phase.PREFILL, [2000, 2000], 2).rows == (2000, 2000)


def test_fault_22_a_rank_without_requests() -> None:
    split = choose_split(Phase.IDLE, [], 3)
    assert split.rows == (0, 0, 0)
    assert sequences_of(split) == [(0, 0)] * 3


# ---------------------------------------------------------------- properties


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, ...]]]:
    lengths = draw(st.lists(st.integers(0, 40), max_size=9))
    depends_on: list[tuple[int, ...]] = [()] * len(lengths)
    if len(lengths) > 1:
        for reader in draw(st.sets(st.integers(0, len(lengths) - 1), max_size=3)):
            distance = draw(st.integers(1, len(lengths) - 1))
            depends_on[reader] = ((reader + distance) % len(lengths),)
    return lengths, depends_on


RULES = [SplitRule.SEQUENCES, SplitRule.HALF, SplitRule.TOKENS, SplitRule.ATTENTION_COST]


@settings(max_examples=300, deadline=None)
@given(batches(), st.integers(1, 5), st.sampled_from(RULES))
def test_parts_cover_every_token_once_and_in_order(
    batch: tuple[list[int], list[tuple[int, ...]]], n: int, rule: SplitRule
) -> None:
    lengths, depends_on = batch
    split = choose_split(Phase.PREFILL, lengths, n, rule=rule, depends_on=depends_on)

    tokens = [token for part in split.parts for token in range(part.token_start, part.token_stop)]
    assert tokens == list(range(sum(lengths)))
    assert len(split.parts) == n

    # The same from the sequences' side: (sequence, place in it).
    named = [
        (sequence, (part.offset if held == 0 else 0) + place)
        for part in split.parts
        for held, (sequence, length) in enumerate(
            zip(range(part.sequence_start, part.sequence_stop), part.lengths, strict=True)
        )
        for place in range(length)
    ]
    assert named == [(sequence, place) for sequence, length in enumerate(lengths) for place in range(length)]


@settings(max_examples=300, deadline=None)
@given(batches(), st.integers(1, 5), st.sampled_from(RULES))
def test_no_rule_separates_a_prefix_reader_from_its_writer(
    batch: tuple[list[int], list[tuple[int, ...]]], n: int, rule: SplitRule
) -> None:
    lengths, depends_on = batch
    split = choose_split(Phase.PREFILL, lengths, n, rule=rule, depends_on=depends_on)

    holders = [
        [part.index for part in split.parts if part.sequence_start <= sequence < part.sequence_stop]
        for sequence in range(len(lengths))
    ]
    for reader, writers in enumerate(depends_on):
        for writer in writers:
            assert holders[reader] == holders[writer]
            assert len(holders[reader]) == 1


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(1, 5), st.sampled_from(PHASES_WITH_TOKENS))
def test_fault_30_planned_counts_are_the_realised_ones(
    batch: tuple[list[int], list[tuple[int, ...]]], n: int, phase: Phase
) -> None:
    lengths, depends_on = batch
    whole = TokenBatch(phase=phase, lengths=tuple(lengths), depends_on=tuple(depends_on))
    split = choose_split(phase, lengths, n, depends_on=depends_on)

    assert tuple(take(whole, part).num_tokens for part in split.parts) == split.rows


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=7), st.integers(1, 4))
def test_sequence_balance_is_the_best_there_is(lengths: list[int], n: int) -> None:
    starts = list(itertools.accumulate(lengths, initial=0))
    best = min(
        sum((high - low) ** 2 for low, high in itertools.pairwise([0, *cuts, starts[-1]]))
        for cuts in itertools.combinations_with_replacement(starts, n - 1)
    )
    assert sum(rows**2 for rows in split_sequences(lengths, n).rows) == best


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12))
def test_token_rule_leaves_no_part_under_the_threshold(lengths: list[int]) -> None:
    rows = split_tokens(lengths, 2).rows
    assert min(rows) >= 0.48 * sum(lengths) or max(rows) - min(rows) <= 1


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.integers(1, 8), st.integers(1, 6))
def test_rows_differ_by_at_most_one(batch_size: int, n: int, tokens_per_row: int) -> None:
    split = split_rows(batch_size, n, tokens_per_row=tokens_per_row)
    counts = [part.sequence_stop - part.sequence_start for part in split.parts]
    assert sum(counts) == batch_size
    assert max(counts) - min(counts) <= 1
    assert split.rows == tuple(count * tokens_per_row for count in counts)


# ---------------------------------------------------------------- bad input, and splits that cannot be changed


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_sequences([1], 0), "into 0 parts"),
        (lambda: split_half([1, -1], 2), "not all 0 or more"),
        (lambda: split_tokens([1], 2, threshold=0.6), "threshold 0.6"),
        (lambda: split_rows(-1, 2), "-1 rows"),
        (lambda: split_sequences([1, 1], 2, depends_on=[()]), "1 entries for 2 sequences"),
        (lambda: split_sequences([1, 1], 2, depends_on=[(2,), ()]), "sequence 0 cannot depend on sequence 2"),
        (lambda: split_sequences([1, 1], 2, depends_on=[(), (1,)]), "sequence 1 cannot depend on sequence 1"),
        (lambda: split_attention_cost([1, 1], 2, prefix_lengths=[3]), "do not fit 2 sequences"),
        (lambda: split_at([4], [3, 1]), "do not go upwards"),
        (lambda: split_at([4], [5]), "batch of 4 tokens"),
        (lambda: choose_split(Phase.IDLE, [3], 2), "an idle step has 3 tokens"),
        (lambda: choose_split(Phase.PREFILL, [3], 2, rule=SplitRule.ROWS), "Call split_rows or split_at"),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(SplitError, match=message):
        call()


def test_split_at_takes_empty_parts_inside_a_sequence() -> None:
    split = split_at([4, 4], [2, 2])

    assert split.rows == (2, 0, 6)
    assert sequences_of(split) == [(0, 1), (0, 0), (0, 2)]
    assert split.parts[2].offset == 2


def test_a_split_is_frozen_and_cannot_lie() -> None:
    split = split_sequences([2, 2], 2)

    with pytest.raises(SplitError, match="does not go on at token 0"):
        replace(split, parts=split.parts[::-1])
    with pytest.raises(SplitError, match="does not hold every token once"):
        replace(split, parts=split.parts[:1])
    with pytest.raises(SplitError, match="does not go on at token 0"):
        replace(split, parts=(replace(split.parts[0], token_stop=3), split.parts[1]))
    with pytest.raises(FrozenInstanceError):
        split.parts = ()  # type: ignore[misc]
