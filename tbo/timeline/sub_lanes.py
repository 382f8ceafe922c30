"""Sub-lanes: a row of its own for what viewers would drop, an event that overlaps another without lying inside it.

Kernels of one stream do overlap (programmatic dependent launch, rounded times), and so do transfers in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tbo.timeline.span import Lane, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a viewer.

    Attributes:
        lane: whose spans it holds.
        number: 0 for the lane's own row, then 1, 2 for its sub-lanes.
        spans: indices into `Timeline.spans`, by start, a span before those inside it; any two nest or are disjoint.
    """

    lane: Lane
    number: int
    spans: tuple[int, ...]

    @property
    def title(self) -> str:
        """The lane's name, numbered from the second row on, with its label."""
        name = self.lane.name if self.number == 0 else f"{self.lane.name} ({self.number + 1})"
        return f"{name}, {self.lane.label}" if self.lane.label else name


def split_rows(timeline: Timeline) -> tuple[Row, ...]:
    """The rows of a timeline, in the order of its lanes; a lane without spans keeps one empty row."""
    by_lane: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for index, span in enumerate(timeline.spans):
        by_lane[span.rank, span.lane].append(index)
    return tuple(row for lane in timeline.lanes for row in _rows_of(timeline, lane, by_lane))


def _rows_of(timeline: Timeline, lane: Lane, by_lane: Mapping[tuple[int, str], list[int]]) -> list[Row]:
    spans = timeline.spans
    indices = by_lane.get((lane.rank, lane.name), [])
    rows: list[list[int]] = [[]]
    open_ends: list[list[int]] = [[]]
    for index in sorted(indices, key=lambda i: (spans[i].start_ns, -spans[i].end_ns)):
        row = _first_fitting(open_ends, spans[index].start_ns, spans[index].end_ns)
        if row == len(rows):
            rows.append([])
            open_ends.append([])
        rows[row].append(index)
        open_ends[row].append(spans[index].end_ns)
    return [Row(lane=lane, number=number, spans=tuple(held)) for number, held in enumerate(rows)]


def _first_fitting(open_ends: list[list[int]], start: int, end: int) -> int:
    for row, ends in enumerate(open_ends):
        while ends and ends[-1] <= start:
            ends.pop()
        if not ends or end <= ends[-1]:
            return row
    return len(open_ends)
