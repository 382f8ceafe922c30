"""The order of (sub-batch, stage): hand-worked sequences, and what holds for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbo.core import order, sequential_order

pytestmark = pytest.mark.timeout(60)


def text(pairs: tuple[tuple[int, int], ...]) -> str:
    return " ".join(f"{sub_batch}:{stage}" for sub_batch, stage in pairs)


@pytest.mark.parametrize(
    ("num_stages", "offsets", "expected"),
    [
        (3, [0], "0:0 0:1 0:2"),
        (3, [0, 0], "0:0 1:0 0:1 1:1 0:2 1:2"),
        (3, [0, 1], "0:0 0:1 1:0 0:2 1:1 1:2"),
        (3, [0, 2], "0:0 0:1 0:2 1:0 1:1 1:2"),
        (4, [0, 2], "0:0 0:1 0:2 1:0 0:3 1:1 1:2 1:3"),
        (2, [0, 0, 0], "0:0 1:0 2:0 0:1 1:1 2:1"),
        (3, [0, 1, 2], "0:0 0:1 1:0 0:2 1:1 2:0 1:2 2:1 2:2"),
        (3, [1, 0], "1:0 0:0 1:1 0:1 1:2 0:2"),
        (2, [0, 2], "0:0 0:1 1:0 1:1"),
        (0, [0, 0], ""),
        (2, [], ""),
    ],
)
def test_hand_worked_interleaving(num_stages: int, offsets: list[int], expected: str) -> None:
    assert text(order(num_stages, offsets)) == expected


def test_hand_worked_sequence() -> None:
    assert text(sequential_order(2, 3)) == "0:0 0:1 1:0 1:1 2:0 2:1"


@given(st.integers(0, 12), st.lists(st.integers(0, 15), min_size=1, max_size=5))
def test_each_stage_of_each_sub_batch_runs_once_and_in_its_own_order(num_stages: int, offsets: list[int]) -> None:
    pairs = order(num_stages, offsets)
    for sub_batch in range(len(offsets)):
        assert [stage for other, stage in pairs if other == sub_batch] == list(range(num_stages))
    assert sorted(pairs) == sorted(sequential_order(num_stages, len(offsets)))


@given(st.integers(1, 12), st.lists(st.integers(0, 15), min_size=1, max_size=5))
def test_rounds_never_go_back(num_stages: int, offsets: list[int]) -> None:
    """In running order the round (stage + offset) grows, and within a round the sub-batch index does."""
    turns = [(stage + offsets[sub_batch], sub_batch) for sub_batch, stage in order(num_stages, offsets)]
    assert turns == sorted(turns)


@given(st.integers(1, 12), st.integers(1, 4))
def test_offsets_of_a_whole_plan_are_the_sequential_order(num_stages: int, sub_batches: int) -> None:
    offsets = [index * num_stages for index in range(sub_batches)]
    assert order(num_stages, offsets) == sequential_order(num_stages, sub_batches)
