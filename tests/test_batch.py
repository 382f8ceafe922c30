"""Batches and their fields' marks: what each sub-batch gets, and what is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, field
from functools import lru_cache

import pytest
import torch

from tbo.batch import (
    Batch,
    Phase,
    TokenBatch,
    choose_split,
    per_sequence,
    per_token,
    shared,
    split_at,
    split_half,
    split_sequences,
    take,
)
from tbo.errors import SplitError

pytestmark = pytest.mark.timeout(60)


class ServingBatch(Batch):
    """What a native model needs: every kind of mark, other dimensions than 0, and values that are no tensors."""

    positions: torch.Tensor = per_token()
    cos_sin: tuple[torch.Tensor, torch.Tensor] = per_token(dim=1)
    slots: tuple[int, ...] = per_token()
    block_table: torch.Tensor = per_sequence()
    names: list[str] = per_sequence()
    masks: dict[str, torch.Tensor | None] = per_sequence(dim=-1)
    scale: torch.Tensor = shared()
    note: str = shared(default="kept")


def serving_batch(lengths: tuple[int, ...]) -> ServingBatch:
    tokens, sequences = sum(lengths), len(lengths)
    return ServingBatch(
        phase=Phase.PREFILL,
        lengths=lengths,
        prefix_lengths=tuple(range(10, 10 + sequences)),
        positions=torch.arange(tokens),
        cos_sin=(torch.arange(2 * tokens).view(2, tokens), torch.zeros(1, tokens)),
        slots=tuple(range(100, 100 + tokens)),
        block_table=torch.arange(sequences)[:, None],
        names=[f"request {sequence}" for sequence in range(sequences)],
        masks={"full": torch.arange(sequences)[None], "sliding": None},
        scale=torch.ones(3),
    )


def test_each_field_is_cut_by_its_mark() -> None:
    batch = serving_batch((2, 3, 1))
    second = take(batch, split_sequences(batch.lengths, 2).parts[1])

    # 2 | 3 + 1 and 2 + 3 | 1 are (2, 4) and (5, 1): the first is more even.
    assert second.lengths == (3, 1)
    assert second.prefix_lengths == (11, 12)
    assert second.positions.tolist() == [2, 3, 4, 5]
    assert [part.tolist() for part in second.cos_sin] == [[[2, 3, 4, 5], [8, 9, 10, 11]], [[0, 0, 0, 0]]]
    assert second.slots == (102, 103, 104, 105)
    assert second.block_table.tolist() == [[1], [2]]
    assert second.names == ["request 1", "request 2"]
    full = second.masks["full"]
    assert full is not None
    assert full.tolist() == [[1, 2]]
    assert second.masks["sliding"] is None
    assert second.scale is batch.scale
    assert second.note == "kept"
    assert type(second) is ServingBatch
    assert second.starts == (0, 3, 4)


def test_tensors_are_views_not_copies() -> None:
    batch = TokenBatch(phase=Phase.PREFILL, lengths=(2, 2), positions=torch.arange(4))
    part = take(batch, split_half(batch.lengths, 2).parts[1])

    assert batch.positions is not None
    assert part.positions is not None
    assert part.positions.data_ptr() == batch.positions[2:].data_ptr()


def test_a_sequence_cut_in_two_has_its_first_tokens_as_prefix_of_the_second_part() -> None:
    batch = serving_batch((10, 4))
    first, second = (take(batch, part) for part in split_at(batch.lengths, [7]).parts)

    assert (first.lengths, first.prefix_lengths) == ((7,), (10,))
    assert (second.lengths, second.prefix_lengths) == ((3, 4), (17, 11))
    assert first.names == ["request 0"]
    assert second.names == ["request 0", "request 1"], "both parts need the cut sequence's block table and the like"


def test_an_empty_part_keeps_the_phase_and_every_field() -> None:
    batch = serving_batch((1,))
    empty = take(batch, choose_split(batch.phase, batch.lengths, 2).parts[1])

    assert empty.phase is Phase.PREFILL
    assert (empty.num_tokens, empty.num_sequences, empty.starts) == (0, 0, (0,))
    assert empty.positions.shape == (0,)
    assert empty.cos_sin[0].shape == (2, 0)
    assert empty.block_table.shape == (0, 1)
    assert empty.names == []


def test_dependencies_are_renumbered_for_the_part() -> None:
    batch = TokenBatch(phase=Phase.PREFILL, lengths=(5, 2, 3), depends_on=((), (2,), ()))
    first, second = (take(batch, part) for part in split_sequences((5, 2, 3), 2, depends_on=batch.depends_on).parts)

    assert first.depends_on == ((),)
    assert second.depends_on == ((1,), ())


def test_a_batch_cannot_be_changed_and_says_what_it_is() -> None:
    batch = serving_batch((2, 3))

    with pytest.raises(FrozenInstanceError):
        batch.lengths = (5,)  # type: ignore[misc]
    assert repr(batch) == "ServingBatch(PREFILL, 2 sequences, 5 tokens)"


# ---------------------------------------------------------------- faults of other systems, by row of fault_cases.md


def test_fault_1_a_part_that_separates_reader_and_writer_is_refused_even_if_the_split_was_made_without_knowing() -> (
    None
):
    batch = TokenBatch(phase=Phase.PREFILL, lengths=(32, 96), depends_on=((1,), ()))
    for cut in (20, 32, 60):
        for part in split_at(batch.lengths, [cut]).parts:
            with pytest.raises(SplitError, match=f"part {part.index} separates sequence 0 from sequence 1"):
                take(batch, part)


def test_fault_2_metadata_cached_for_one_half_is_never_found_for_the_other() -> None:
    @lru_cache
    def metadata(batch: Batch) -> tuple[int, ...]:
        return batch.starts

    batch = TokenBatch(phase=Phase.PREFILL, lengths=(5, 5, 5, 3, 3, 3, 3, 3))
    first, second = (take(batch, part) for part in split_sequences(batch.lengths, 2).parts)
    assert (first.num_sequences, second.num_sequences) == (3, 5)
    assert metadata(first) == (0, 5, 10, 15)
    assert metadata(second) == (0, 3, 6, 9, 12, 15)

    # Two halves that look the same are still two keys.
    even = TokenBatch(phase=Phase.DECODE, lengths=(1, 1))
    halves = {take(even, part) for part in split_half(even.lengths, 2).parts}
    assert len(halves) == 2


def test_fault_3_positions_of_a_sequence_cut_at_80() -> None:
    batch = TokenBatch(phase=Phase.PREFILL, lengths=(160,), positions=torch.arange(160), input_ids=torch.arange(160))
    first, second = (take(batch, part) for part in choose_split(Phase.PREFILL, (160,), 2).parts)

    assert first.positions is not None
    assert second.positions is not None
    assert first.positions.tolist() == list(range(80))
    assert second.positions.tolist() == list(range(80, 160))
    assert second.prefix_lengths == (80,)


def test_fault_12_a_field_without_a_mark_is_refused_where_it_is_defined() -> None:
    with pytest.raises(SplitError, match=r"field 'dp_padding_mode' of Unmarked does not say how it is cut.*shared\(\)"):

        class Unmarked(Batch):
            dp_padding_mode: str

    with pytest.raises(SplitError, match="field 'index' of Plain does not say how it is cut"):

        class Plain(Batch):
            index: torch.Tensor | None = field(default=None)


def test_fault_12_an_attribute_put_on_later_is_refused_by_name() -> None:
    batch = TokenBatch(phase=Phase.DECODE, lengths=(1, 1))
    object.__setattr__(batch, "dp_padding_mode", torch.zeros(2))

    with pytest.raises(SplitError, match="TokenBatch holds 'dp_padding_mode', which is not one of its fields"):
        take(batch, split_half(batch.lengths, 2).parts[0])


def test_fault_12_a_decorator_would_drop_the_marks_and_is_refused_by_python() -> None:
    class Decorated(Batch):
        positions: torch.Tensor = per_token()

    with pytest.raises(TypeError, match="Cannot overwrite attribute __setattr__"):
        dataclass(frozen=True, kw_only=True)(Decorated)


def test_fault_17_each_half_gets_its_own_rows_of_the_block_table() -> None:
    batch = serving_batch((1,) * 32)
    second = take(batch, split_half(batch.lengths, 2).parts[1])
    assert second.block_table.flatten().tolist() == list(range(16, 32))


def test_fault_22_starts_of_a_rank_without_requests() -> None:
    assert TokenBatch(phase=Phase.IDLE, lengths=()).starts == (0,)
    assert TokenBatch(phase=Phase.DECODE, lengths=(1,)).starts == (0, 1)


# ---------------------------------------------------------------- bad input


def test_a_tensor_with_another_number_of_rows_is_refused_by_name() -> None:
    batch = TokenBatch(phase=Phase.DECODE, lengths=(1, 1), positions=torch.arange(3))
    with pytest.raises(SplitError, match=r"field 'positions' has a tensor of shape \(3,\).* each of 2 tokens"):
        take(batch, split_half(batch.lengths, 2).parts[0])


class LooseBatch(Batch):
    """A field that may hold anything, to try wrong values on."""

    rows: object = per_sequence(dim=1)
    words: object = per_token(default=None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rows": torch.zeros(2)}, r"'rows' has a tensor of shape \(2,\), but its dimension 1 .* each of 2 sequences"),
        ({"rows": 3.0}, "'rows' has a float"),
        ({"rows": (1, 2)}, "'rows' has 2 values, but its dimension 1"),
        ({"rows": (torch.zeros(1, 2), 7)}, "'rows' has a int"),
        ({"rows": None, "words": ["a"]}, "'words' has 1 values, but its dimension 0 .* each of 2 tokens"),
    ],
)
def test_values_that_cannot_be_cut_are_refused_by_name(values: dict[str, object], message: str) -> None:
    batch = LooseBatch(phase=Phase.DECODE, lengths=(1, 1), **values)  # type: ignore[arg-type]
    with pytest.raises(SplitError, match=message):
        take(batch, split_half(batch.lengths, 2).parts[0])


@pytest.mark.parametrize("lengths", [(2, 1), (1, 1), (3,), (1, 2, 1)])
def test_a_part_of_another_batch_is_refused(lengths: tuple[int, ...]) -> None:
    batch = TokenBatch(phase=Phase.PREFILL, lengths=(1, 2))
    part = split_sequences(lengths, 1).parts[0]
    with pytest.raises(SplitError, match=r"does not fit a batch with lengths \(1, 2\)"):
        take(batch, part)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"phase": Phase.PREFILL, "lengths": (1, -1)}, "not all 0 or more"),
        ({"phase": Phase.IDLE, "lengths": (1,)}, "an idle batch has 1 tokens"),
        ({"phase": Phase.DECODE, "lengths": (1,), "prefix_lengths": (1, 2)}, "do not fit 1 sequences"),
        ({"phase": Phase.DECODE, "lengths": (1,), "depends_on": ((0,),)}, "sequence 0 cannot depend on sequence 0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(SplitError, match=message):
        TokenBatch(**values)  # type: ignore[arg-type]
