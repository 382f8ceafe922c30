"""The one model behind every timeline: spans of work on lanes, in integer nanoseconds.

Predicted, recorded and loaded timelines are the same kind of value, so every figure and every picture is made by the
same code from all three.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property


class Kind(StrEnum):
    """What a span is."""

    COMPUTE = "compute"
    TRANSFER = "transfer"
    """Rows on their way, by a kernel or a link."""
    NOTIFY = "notify"
    """Waiting for peers before a transfer: counts, barriers."""
    IN_FLIGHT = "in_flight"
    """Between issue and completion, with no kernel of its own."""
    MEMORY = "memory"
    """Copies and fills on the device."""
    HOST = "host"
    """The host preparing, issuing or waiting; neither computation nor communication of the device."""


COMMUNICATION = frozenset({Kind.TRANSFER, Kind.NOTIFY, Kind.IN_FLIGHT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One piece of work.

    Attributes:
        op: what ran: the op's name, or the kernel's where no op is known.
        lane: where it ran; lanes of one rank have different names.
        kind: what it is.
        start_ns, end_ns: from any common zero; a span covers ``[start_ns, end_ns)``.
        stage: the stage or annotation it belongs to, "" if unknown.
        layer, sub_batch: where in the model it belongs, None if unknown.
        rank: whose lane.
        name: the kernel's full name where `op` is not it.
    """

    op: str
    lane: str
    kind: Kind
    start_ns: int
    end_ns: int
    stage: str = ""
    layer: int | None = None
    sub_batch: int | None = None
    rank: int = 0
    name: str = ""

    @property
    def duration_ns(self) -> int:
        """Length in nanoseconds, 0 for an instant."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Where spans of one rank run, one after another.

    Attributes:
        name: as in `Span.lane`.
        rank: whose.
        label: written under the name, such as ``20 SMs``.
    """

    name: str
    rank: int = 0
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One span could not start before another had ended: indices into `Timeline.spans`."""

    before: int
    after: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Spans on lanes.

    Attributes:
        spans: by rank, then start, then end.
        lanes: in the order they are drawn.
        source: "plan", "recorder" or "kineto".
        title: for people.
        edges: dependencies, where the source knows them.
        rule_counts: how many events each classification rule took, for loaded timelines.
        unclassified: names no rule took, with how often they ran on lanes beside the busiest one, most frequent first.
        notes: what a reader should know, one sentence each (such as "the link is modelled").
        shifts: nanoseconds by which each rank's clock was moved, with the uncertainty (None: not known), where ranks
            were merged.
    """

    spans: tuple[Span, ...]
    lanes: tuple[Lane, ...]
    source: str
    title: str = ""
    edges: tuple[Edge, ...] = ()
    rule_counts: Mapping[str, int] = field(default_factory=dict)
    unclassified: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()
    shifts: Mapping[int, tuple[int, int | None]] = field(default_factory=dict)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have lanes, in order."""
        return tuple(sorted({lane.rank for lane in self.lanes}))

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """One rank's spans."""
        return tuple(span for span in self.spans if span.rank == rank)

    def of_lane(self, lane: Lane) -> tuple[Span, ...]:
        """One lane's spans."""
        return tuple(span for span in self.spans if span.rank == lane.rank and span.lane == lane.name)


def make_timeline(
    spans: Iterable[Span], *, source: str, lanes: Iterable[Lane] = (), title: str = "", notes: Iterable[str] = ()
) -> Timeline:
    """A timeline of spans in order; lanes not given are added in order of first use."""
    ordered = tuple(sorted(spans, key=lambda span: (span.rank, span.start_ns, span.end_ns)))
    known = {(lane.rank, lane.name): lane for lane in lanes}
    for span in ordered:
        known.setdefault((span.rank, span.lane), Lane(name=span.lane, rank=span.rank))
    return Timeline(spans=ordered, lanes=tuple(known.values()), source=source, title=title, notes=tuple(notes))
