"""Where a device loses time, and why: stretches in which communication is exposed, or nothing runs at all."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tbo.timeline.intervals import Interval, difference, intersection, length
from tbo.timeline.metrics import Rules, covered
from tbo.timeline.span import Kind, Span, Timeline

NEAR_NS: Final = 10_000
"""A kernel that starts this soon after an event is taken to have waited for it."""


class Cause(StrEnum):
    """Why nothing was computed."""

    PEER = "waiting for peer"
    """Most of it is a barrier, or counts of other ranks that had not come."""
    HOST = "host late"
    """The next computation was launched only after the gap had begun."""
    DEPENDENCY = "dependency"
    """The next computation starts when a communication ends."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A stretch without computation.

    Attributes:
        start_ns, end_ns: where.
        exposed: communication runs in it; otherwise nothing does.
        communication: the communication that fills most of it, None in an idle gap.
        before: the computation that ended last before it, None at the start.
        after: the computation that starts first after it, None at the end.
        cause: why.
    """

    start_ns: int
    end_ns: int
    exposed: bool
    communication: Span | None
    before: Span | None
    after: Span | None
    cause: Cause

    @property
    def duration_ns(self) -> int:
        """Length in nanoseconds."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    computation: Sequence[tuple[Span, int | None]]
    communication: Sequence[Span]
    hosts: Sequence[Span]
    ends: Sequence[int]
    by_end: Sequence[Span]
    starts: Sequence[int]


def find_gaps(
    timeline: Timeline,
    *,
    rank: int = 0,
    rules: Rules | None = None,
    launches: Sequence[int | None] = (),
    min_ns: int = 10_000,
) -> tuple[Gap, ...]:
    """The gaps of one rank that last at least `min_ns`, longest first.

    Args:
        timeline: any.
        rank: whose.
        rules: what counts as computation and communication.
        launches: when the host launched each of the timeline's spans, if known.
        min_ns: shorter ones, mostly the time between two kernels, are no findings.
    """
    rules = rules or Rules()
    known = _sort(timeline, rank, rules, launches)
    computing = covered(span for span, _ in known.computation)
    communicating = covered(known.communication)
    bounds = [*computing, *communicating]
    if not bounds:
        return ()
    window = [(min(start for start, _ in bounds), max(end for _, end in bounds))]
    exposed = difference(communicating, computing)
    idle = difference(difference(window, computing), communicating)
    found = [_gap(stretch, known, exposed=True) for stretch in _long(exposed, min_ns)]
    found += [_gap(stretch, known, exposed=False) for stretch in _long(idle, min_ns)]
    return tuple(sorted(found, key=lambda gap: (-gap.duration_ns, gap.start_ns)))


def _long(stretches: Iterable[Interval], min_ns: int) -> list[Interval]:
    return [(start, end) for start, end in stretches if end - start >= min_ns]


def _sort(timeline: Timeline, rank: int, rules: Rules, launches: Sequence[int | None]) -> _Rank:
    times = launches or (None,) * len(timeline.spans)
    own = [pair for pair in zip(timeline.spans, times, strict=True) if pair[0].rank == rank]
    computation = [pair for pair in own if rules.is_compute(pair[0])]
    by_end = sorted((span for span, _ in computation), key=lambda span: span.end_ns)
    return _Rank(
        computation=computation,
        communication=[span for span, _ in own if rules.is_communication(span)],
        hosts=[span for span, _ in own if span.kind is Kind.HOST],
        ends=[span.end_ns for span in by_end],
        by_end=by_end,
        starts=[span.start_ns for span, _ in computation],
    )


def _gap(stretch: Interval, known: _Rank, *, exposed: bool) -> Gap:
    start, end = stretch
    place = bisect_right(known.ends, start)
    before = known.by_end[place - 1] if place else None
    # Where spans begin together the last to end is the one people see.
    place = bisect_right(known.starts, end - 1)
    after, launch = known.computation[place] if place < len(known.computation) else (None, None)
    inside = [span for span in known.communication if span.start_ns < end and span.end_ns > start]
    return Gap(
        start_ns=start,
        end_ns=end,
        exposed=exposed,
        communication=max(inside, key=lambda span: _shared(span, stretch), default=None),
        before=before,
        after=after,
        cause=_cause(stretch, known, inside, after, launch),
    )


def _cause(stretch: Interval, known: _Rank, inside: Sequence[Span], after: Span | None, launch: int | None) -> Cause:
    start, end = stretch
    waiting = length(intersection([stretch], covered(span for span in inside if span.kind is Kind.NOTIFY)))
    if 2 * waiting >= end - start:
        return Cause.PEER
    if after is None:
        return Cause.UNKNOWN
    issued = launch if launch is not None else _issued(after, known.hosts)
    if issued is not None and issued >= start:
        return Cause.HOST
    if any(0 <= after.start_ns - span.end_ns <= NEAR_NS for span in known.communication):
        return Cause.DEPENDENCY
    return Cause.UNKNOWN


def _issued(span: Span, hosts: Sequence[Span]) -> int | None:
    """When the recorder or the plan saw the host issue a span, None if it did not."""
    same = [
        host.end_ns
        for host in hosts
        if (host.op, host.layer, host.sub_batch) == (span.op, span.layer, span.sub_batch)
        and host.end_ns <= span.start_ns
    ]
    return max(same, default=None)


def _shared(span: Span, stretch: Interval) -> int:
    return min(span.end_ns, stretch[1]) - max(span.start_ns, stretch[0])
