"""Where to cut a line of weights so that the pieces are as even as they can be. Pure arithmetic on integers."""

from __future__ import annotations

from collections.abc import Sequence


def even_sizes(count: int, n: int) -> tuple[int, ...]:
    """Sizes of `n` parts of `count` things that differ by at most one, the larger ones first: 5 in 3 is (2, 2, 1)."""
    size, larger = divmod(count, n)
    return tuple(size + (index < larger) for index in range(n))


def best_cuts(sums: Sequence[int], n: int) -> list[int]:
    """The `n - 1` places to cut that give the most even `n` parts.

    Args:
        sums: cumulative weight at each place where a cut is allowed, not decreasing, from 0 to the whole weight.
        n: number of parts, at least 1.

    Returns:
        Indices into `sums`, not decreasing; two equal ones enclose an empty part. The sum of the squared part weights
        is the least possible (for two parts: their difference is). Among equals the later cut wins, so that the
        larger part comes first and empty parts come last.
    """
    last = len(sums) - 1
    costs = [weight * weight for weight in sums]
    choices: list[list[int]] = []
    for parts in range(2, n + 1):
        # Only the whole line matters for the last part; every shorter line is needed by the parts before it.
        costs, choice = _add_part(sums, costs, first=last if parts == n else 0)
        choices.append(choice)
    cuts: list[int] = []
    end = last
    for choice in reversed(choices):
        end = choice[end]
        cuts.append(end)
    return cuts[::-1]


def _add_part(sums: Sequence[int], costs: Sequence[int], *, first: int) -> tuple[list[int], list[int]]:
    """Least cost, and the cut that gives it, of every line ending at `first` or later with one more part.

    The best cut never moves left when the line grows (squares are convex), so each half of the lines needs only the
    cuts on its own side of the middle line's: B log B steps instead of B squared.
    """
    new_costs = [0] * len(sums)
    choice = [0] * len(sums)
    ranges = [(first, len(sums) - 1, 0, len(sums) - 1)]
    while ranges:
        low, high, cut_low, cut_high = ranges.pop()
        end = (low + high) // 2
        cost, cut = min(
            (costs[place] + (sums[end] - sums[place]) ** 2, -place) for place in range(cut_low, min(end, cut_high) + 1)
        )
        new_costs[end], choice[end] = cost, -cut
        if low < end:
            ranges.append((low, end - 1, cut_low, -cut))
        if end < high:
            ranges.append((end + 1, high, -cut, cut_high))
    return new_costs, choice
