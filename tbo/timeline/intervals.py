"""Interval algebra on integer nanoseconds.

An interval is ``(start, end)`` and covers ``[start, end)``. A *union* is a list of intervals that are sorted, disjoint,
not touching and not empty; every function here returns one and all but `union` expect them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points with overlaps counted once; instants cover nothing.

    Example:
        >>> union([(5, 9), (0, 2), (2, 4), (6, 7), (8, 8)])
        [(0, 4), (5, 9)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Points in both.

    Example:
        >>> intersection([(0, 4), (6, 9)], [(2, 7)])
        [(2, 4), (6, 7)]
    """
    shared = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            shared.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return shared


def difference(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Points of the first that are not in the second.

    Example:
        >>> difference([(0, 4), (6, 9)], [(2, 7)])
        [(0, 2), (7, 9)]
    """
    rest = []
    j = 0
    for start, end in left:
        begin = start
        while j < len(right) and right[j][1] <= begin:
            j += 1
        k = j
        while k < len(right) and right[k][0] < end:
            if right[k][0] > begin:
                rest.append((begin, right[k][0]))
            begin = max(begin, right[k][1])
            k += 1
        if begin < end:
            rest.append((begin, end))
    return rest


def length(intervals: Iterable[Interval]) -> int:
    """Nanoseconds covered."""
    return sum(end - start for start, end in intervals)
