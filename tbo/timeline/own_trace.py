"""Files that `tbo timeline export` wrote, read back as the timeline they were made from.

Such events carry, beside what viewers show, an entry `tbo` in their arguments; see `tbo.timeline.chrome`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from tbo.timeline.collect import OWN_PREFIX, Collector
from tbo.timeline.events import Event, TraceError
from tbo.timeline.span import Edge, Kind, Lane, Span, Timeline, make_timeline


def restore(collected: Collector, header: Mapping[str, Any], base_ns: int) -> Timeline:
    """The timeline that was exported.

    Args:
        collected: the file's events.
        header: its other entries.
        base_ns: added to every time.

    Raises:
        TraceError: an event lacks what the exporter writes, as after another program rewrote the file.
    """
    try:
        return _restore(collected, header, base_ns)
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(
            f"{collected.path} was written by tbo and changed since: {type(error).__name__}: {error}",
            remedy="Export it again.",
        ) from error


def _restore(collected: Collector, header: Mapping[str, Any], base_ns: int) -> Timeline:
    numbered = sorted(
        (
            (event["args"]["tbo"]["index"], _span(start, end, event, base_ns))
            for start, end, event in collected.own_spans
        ),
        key=lambda pair: cast("int", pair[0]),
    )
    lanes = [_lane(event) for event in collected.own_lanes]
    about = header.get("tbo", {})
    timeline = make_timeline(
        (span for _, span in numbered),
        source=str(about.get("source", "kineto")),
        lanes=lanes,
        title=str(about.get("title", "")),
        notes=tuple(about.get("notes", ())),
    )
    return replace(
        timeline,
        edges=tuple(
            Edge(before=e["args"]["tbo"]["before"], after=e["args"]["tbo"]["after"]) for e in collected.own_edges
        ),
        rule_counts=dict(about.get("rule_counts", {})),
        unclassified=tuple((name, count) for name, count in about.get("unclassified", ())),
        shifts={int(rank): (shift, doubt) for rank, (shift, doubt) in about.get("shifts", {}).items()},
    )


def _span(start: int, end: int, event: Event, base_ns: int) -> Span:
    fields = event["args"]["tbo"]
    return Span(
        op=fields["op"],
        lane=fields["lane"],
        kind=Kind(event["cat"].removeprefix(OWN_PREFIX)),
        start_ns=base_ns + start,
        end_ns=base_ns + end,
        stage=fields["stage"],
        layer=fields["layer"],
        sub_batch=fields["sub_batch"],
        rank=fields["rank"],
        name=fields["name"],
    )


def _lane(event: Event) -> Lane:
    fields = event["args"]["tbo"]
    return Lane(name=fields["lane"], rank=fields["rank"], label=fields["label"])
