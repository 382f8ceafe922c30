"""The critical path: the chain of spans that the step's length hangs on. Only where dependencies are known."""

from __future__ import annotations

from collections import defaultdict

from tbo.timeline.span import Kind, Span, Timeline


def critical_path(timeline: Timeline, rank: int = 0) -> tuple[Span, ...] | None:
    """The chain that ends last, walked backwards: each span's latest predecessor, by dependency or on its own lane.

    Returns:
        Spans in order of time; None where the timeline knows no dependencies.
    """
    if not timeline.edges:
        return None
    spans = timeline.spans
    before: defaultdict[int, list[int]] = defaultdict(list)
    for edge in timeline.edges:
        before[edge.after].append(edge.before)
    last_on_lane: dict[tuple[int, str], int] = {}
    for index, span in enumerate(spans):
        lane = (span.rank, span.lane)
        if lane in last_on_lane:
            before[index].append(last_on_lane[lane])
        last_on_lane[lane] = index
    own = [i for i, span in enumerate(spans) if span.rank == rank and span.kind is not Kind.HOST]
    if not own:
        return ()
    path = [max(own, key=lambda i: spans[i].end_ns)]
    while True:
        start = spans[path[-1]].start_ns
        # Strictly earlier starts: the walk ends even where zero-length spans depend on each other.
        earlier = [i for i in before[path[-1]] if spans[i].end_ns <= start and spans[i].start_ns < start]
        if not earlier:
            return tuple(spans[i] for i in reversed(path))
        path.append(max(earlier, key=lambda i: spans[i].end_ns))
