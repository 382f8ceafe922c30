"""In which order the sub-batches run their stages. Pure functions; every rank gets the same answer."""

from __future__ import annotations

from collections.abc import Sequence


def order(num_stages: int, offsets: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Interleaves the sub-batches: round r runs stage ``r - offset`` of each sub-batch, in index order.

    Args:
        num_stages: stages of one sub-batch.
        offsets: for each sub-batch, how many stages it starts after round 0.

    Returns:
        ``(sub_batch, stage)`` pairs, each exactly once.

    Example:
        >>> order(2, [0, 1])
        ((0, 0), (0, 1), (1, 0), (1, 1))
    """
    rounds = num_stages + max(offsets, default=0)
    return tuple(
        (sub_batch, turn - offset)
        for turn in range(rounds)
        for sub_batch, offset in enumerate(offsets)
        if 0 <= turn - offset < num_stages
    )


def sequential_order(num_stages: int, sub_batches: int) -> tuple[tuple[int, int], ...]:
    """One sub-batch after another through the same stages: nothing overlaps. The oracle of `order`."""
    return tuple((sub_batch, stage) for sub_batch in range(sub_batches) for stage in range(num_stages))
