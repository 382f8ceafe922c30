"""What a timeline says about overlap, by interval unions on integer nanoseconds, never by sums of durations.

For one rank, with C the time some computation runs and M the time some communication does, in a window W:

    overlapped = |C and M|      exposed = |M without C|      compute only = |C without M|      idle = W - |C or M|

These four add up to W. The overlap ratio is overlapped / |M|: 1 for an exchange that is wholly hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tbo.timeline.intervals import Interval, difference, intersection, length, union
from tbo.timeline.span import COMMUNICATION, Kind, Span, Timeline

EXPOSED_ORDER = (Kind.TRANSFER, Kind.NOTIFY, Kind.IN_FLIGHT)
"""Where several kinds of communication are exposed at once, the first of these is blamed, so that parts add up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What counts as computation and what as communication.

    Attributes:
        exclude_memory: copies and fills count as nothing instead of as computation.
        transfer_only: waiting for peers (notify) counts as nothing instead of as communication.
        by_lane: count every span of these lanes as communication and every other one as computation, whatever it is.
    """

    exclude_memory: bool = False
    transfer_only: bool = False
    by_lane: frozenset[str] = frozenset()

    def is_compute(self, span: Span) -> bool:
        """Whether a span counts towards C."""
        if span.kind is Kind.HOST:
            return False
        if self.by_lane:
            return span.lane not in self.by_lane
        return span.kind is Kind.COMPUTE or (span.kind is Kind.MEMORY and not self.exclude_memory)

    def is_communication(self, span: Span) -> bool:
        """Whether a span counts towards M."""
        if span.kind is Kind.HOST:
            return False
        if self.by_lane:
            return span.lane in self.by_lane
        return span.kind in COMMUNICATION and not (self.transfer_only and span.kind is Kind.NOTIFY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """One rank's figures, in nanoseconds unless they say otherwise.

    Attributes:
        rank: whose.
        start_ns, end_ns: the window, from the first start to the last end of anything on the device.
        compute_ns, communication_ns: |C| and |M|.
        overlapped_ns, exposed_ns, compute_only_ns, idle_ns: the window's four parts.
        exposed_by_kind: `exposed_ns` split by what was exposed.
        spans: how many spans were counted.
    """

    rank: int
    start_ns: int
    end_ns: int
    compute_ns: int
    communication_ns: int
    overlapped_ns: int
    exposed_ns: int
    compute_only_ns: int
    idle_ns: int
    exposed_by_kind: Mapping[Kind, int]
    spans: int

    @property
    def window_ns(self) -> int:
        """W."""
        return self.end_ns - self.start_ns

    @property
    def overlap_ratio(self) -> float | None:
        """Share of communication that ran beside computation; None where there was no communication."""
        return self.overlapped_ns / self.communication_ns if self.communication_ns else None

    @property
    def bubble(self) -> float | None:
        """Share of the window in which nothing was computed; None for an empty window."""
        return 1 - self.compute_ns / self.window_ns if self.window_ns else None

    @property
    def ideal(self) -> float | None:
        """max(C, M) / W: 1 means no better schedule of the same work exists. None for an empty window."""
        return max(self.compute_ns, self.communication_ns) / self.window_ns if self.window_ns else None


def measure(timeline: Timeline, *, rank: int = 0, rules: Rules | None = None) -> Metrics:
    """The figures of one rank of a timeline."""
    rules = rules or Rules()
    counted = [span for span in timeline.of_rank(rank) if rules.is_compute(span) or rules.is_communication(span)]
    compute = covered(span for span in counted if rules.is_compute(span))
    communication = covered(span for span in counted if rules.is_communication(span))
    start = min((span.start_ns for span in counted), default=0)
    end = max((span.end_ns for span in counted), default=0)
    overlapped = length(intersection(compute, communication))
    exposed = difference(communication, compute)
    busy = length(compute) + length(communication) - overlapped
    return Metrics(
        rank=rank,
        start_ns=start,
        end_ns=end,
        compute_ns=length(compute),
        communication_ns=length(communication),
        overlapped_ns=overlapped,
        exposed_ns=length(exposed),
        compute_only_ns=length(compute) - overlapped,
        idle_ns=end - start - busy,
        exposed_by_kind=_split_exposed(counted, exposed),
        spans=len(counted),
    )


def covered(spans: Iterable[Span]) -> list[Interval]:
    """The time at least one of the spans runs."""
    return union((span.start_ns, span.end_ns) for span in spans)


def _split_exposed(spans: Sequence[Span], exposed: Sequence[Interval]) -> dict[Kind, int]:
    left = list(exposed)
    parts = {}
    for kind in EXPOSED_ORDER:
        of_kind = covered(span for span in spans if span.kind is kind)
        parts[kind] = length(intersection(left, of_kind))
        left = difference(left, of_kind)
    # Under `by_lane` a lane's computation may count as communication; it is a transfer for this purpose.
    parts[Kind.TRANSFER] += length(left)
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table of spans: times in nanoseconds.

    Attributes:
        key: what the row's spans have in common.
        count, total_ns, mean_ns, p95_ns: their number and durations; `p95_ns` by the nearest-rank method.
        share: their union's share of the window.
        compute_ns, transfer_ns, notify_ns, in_flight_ns: unions by kind (memory counts as compute).
        exposed_ns: the part of the row's communication beside which nothing is computed, by anyone.
    """

    key: str
    count: int
    total_ns: int
    mean_ns: float
    p95_ns: int
    share: float
    compute_ns: int
    transfer_ns: int
    notify_ns: int
    in_flight_ns: int
    exposed_ns: int


def table(
    timeline: Timeline, key: Callable[[Span], str], *, rank: int = 0, rules: Rules | None = None
) -> tuple[Row, ...]:
    """A row for each value of `key`, in order of first appearance."""
    rules = rules or Rules()
    spans = [span for span in timeline.of_rank(rank) if rules.is_compute(span) or rules.is_communication(span)]
    window = max((s.end_ns for s in spans), default=0) - min((s.start_ns for s in spans), default=0)
    computing = covered(span for span in spans if rules.is_compute(span))
    groups: dict[str, list[Span]] = {}
    for span in spans:
        groups.setdefault(key(span), []).append(span)
    return tuple(_row(name, group, computing, window, rules) for name, group in groups.items())


def _row(name: str, spans: Sequence[Span], computing: Sequence[Interval], window: int, rules: Rules) -> Row:
    durations = sorted(span.duration_ns for span in spans)
    communication = covered(span for span in spans if rules.is_communication(span))

    def of(*kinds: Kind) -> int:
        return length(covered(span for span in spans if span.kind in kinds))

    return Row(
        key=name,
        count=len(spans),
        total_ns=sum(durations),
        mean_ns=sum(durations) / len(durations),
        p95_ns=durations[math.ceil(0.95 * len(durations)) - 1],
        share=length(covered(spans)) / window if window else 0.0,
        compute_ns=of(Kind.COMPUTE, Kind.MEMORY),
        transfer_ns=of(Kind.TRANSFER),
        notify_ns=of(Kind.NOTIFY),
        in_flight_ns=of(Kind.IN_FLIGHT),
        exposed_ns=length(difference(communication, computing)),
    )
