"""A timeline's figures as one report, for people and for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from tbo.errors import UserError
from tbo.timeline.critical import critical_path
from tbo.timeline.intervals import difference, length
from tbo.timeline.merge import skew
from tbo.timeline.metrics import Metrics, Row, Rules, covered, measure, table
from tbo.timeline.span import Kind, Lane, Span, Timeline

CANDIDATES: Final = 5


class NoCommunicationError(UserError):
    """A timeline without communication: there is nothing to say about overlap."""


KEYS: Final[Mapping[str, Callable[[Span], str]]] = {
    "stage": lambda span: span.stage or "(no stage)",
    "op": lambda span: span.op,
    "lane": lambda span: span.lane,
    "kind": lambda span: span.kind.value,
    "layer": lambda span: "(no layer)" if span.layer is None else f"layer {span.layer}",
    "sub-batch": lambda span: "(no sub-batch)" if span.sub_batch is None else f"sub-batch {span.sub_batch}",
}


def measure_ranks(timeline: Timeline, rules: Rules) -> tuple[Metrics, ...]:
    """The figures of every rank.

    Raises:
        NoCommunicationError: on no rank anything communicates; names the likeliest kernels.
    """
    measured = tuple(measure(timeline, rank=rank, rules=rules) for rank in timeline.ranks)
    if all(metrics.overlap_ratio is None for metrics in measured):
        raise no_communication(timeline)
    return measured


def no_communication(timeline: Timeline) -> NoCommunicationError:
    """The error that says so, with the kernels that may be the communication that was not recognised."""
    where = f"no communication found in {timeline.title or 'the timeline'}"
    candidates = ", ".join(f"{name} ({count} times)" for name, count in timeline.unclassified[:CANDIDATES])
    if not candidates:
        return NoCommunicationError(
            f"{where}, and all kernels run on one stream",
            remedy="If some of them communicate, name these with --classify FILE or in [tool.tbo.timeline].",
        )
    return NoCommunicationError(
        f"{where}; kernels beside the busiest stream that no rule knows: {candidates}",
        remedy="If one of these communicates, name it with --classify FILE or in [tool.tbo.timeline].",
    )


def report(timeline: Timeline, rules: Rules) -> dict[str, Any]:
    """All figures as plain values; times are integer nanoseconds, named so.

    Raises:
        NoCommunicationError: on no rank anything communicates.
    """
    apart = skew(timeline)
    return {
        "title": timeline.title,
        "source": timeline.source,
        "ranks": [_rank_report(timeline, metrics, rules) for metrics in measure_ranks(timeline, rules)],
        "rule_counts": dict(timeline.rule_counts),
        "unclassified": [{"name": name, "count": count} for name, count in timeline.unclassified],
        "shifts": {
            str(rank): {"shift_ns": shift, "uncertainty_ns": doubt} for rank, (shift, doubt) in timeline.shifts.items()
        },
        "skew": None if apart is None else asdict(apart),
        "notes": list(timeline.notes),
    }


def metrics_report(metrics: Metrics) -> dict[str, Any]:
    """One rank's figures as plain values."""
    return {
        "rank": metrics.rank,
        "start_ns": metrics.start_ns,
        "end_ns": metrics.end_ns,
        "window_ns": metrics.window_ns,
        "compute_ns": metrics.compute_ns,
        "communication_ns": metrics.communication_ns,
        "overlapped_ns": metrics.overlapped_ns,
        "exposed_ns": metrics.exposed_ns,
        "exposed_by_kind_ns": {kind.value: part for kind, part in metrics.exposed_by_kind.items()},
        "compute_only_ns": metrics.compute_only_ns,
        "idle_ns": metrics.idle_ns,
        "overlap_ratio": metrics.overlap_ratio,
        "bubble": metrics.bubble,
        "ideal": metrics.ideal,
        "spans": metrics.spans,
    }


def _rank_report(timeline: Timeline, metrics: Metrics, rules: Rules) -> dict[str, Any]:
    rank = metrics.rank
    path = critical_path(timeline, rank)
    return {
        **metrics_report(metrics),
        "by": {
            name: [asdict(row) for row in table(timeline, key, rank=rank, rules=rules)] for name, key in KEYS.items()
        },
        "lanes": [lane_report(timeline, lane, rules) for lane in timeline.lanes if lane.rank == rank],
        "critical_path": None if path is None else path_report(path),
    }


def lane_report(timeline: Timeline, lane: Lane, rules: Rules) -> dict[str, Any]:
    """How busy a lane is, and how much of that beside other lanes of its rank; times from the start of the window."""
    counted = [s for s in timeline.of_rank(lane.rank) if rules.is_compute(s) or rules.is_communication(s)]
    own = [span for span in counted if span.lane == lane.name]
    zero = min((span.start_ns for span in counted), default=0)
    busy = covered(own)
    alone = length(difference(busy, covered(span for span in counted if span.lane != lane.name)))
    return {
        "lane": lane.name,
        "label": lane.label,
        "count": len(own),
        "busy_ns": length(busy),
        "alone_ns": alone,
        "beside_others_ns": length(busy) - alone,
        "first_ns": min((span.start_ns for span in own), default=zero) - zero,
        "last_ns": max((span.end_ns for span in own), default=zero) - zero,
    }


def path_report(path: tuple[Span, ...]) -> dict[str, Any]:
    """What the critical path consists of."""
    by_kind = {kind.value: sum(span.duration_ns for span in path if span.kind is kind) for kind in Kind}
    total = path[-1].end_ns - path[0].start_ns if path else 0
    return {
        "spans": len(path),
        "total_ns": total,
        "by_kind_ns": {kind: part for kind, part in by_kind.items() if part},
        "waiting_ns": total - sum(by_kind.values()),
    }


def find_rows(timeline: Timeline, by: str, *, rank: int, rules: Rules) -> tuple[Row, ...]:
    """A table by one of `KEYS`, in order of first appearance; ops most time first, as there are many."""
    rows = table(timeline, KEYS[by], rank=rank, rules=rules)
    return tuple(sorted(rows, key=lambda row: -row.total_ns)) if by == "op" else rows
