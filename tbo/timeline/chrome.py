"""Timelines as Chrome trace JSON, which chrome://tracing, Perfetto and VizTracer's `vizviewer` open.

One process a rank, one thread a row (see `tbo.timeline.sub_lanes`), arrows for dependencies. Each event carries an
entry ``tbo`` in its arguments, so that `tbo.timeline.kineto.load` reads the same timeline back, to the nanosecond.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

from tbo.errors import UserError
from tbo.timeline.collect import OWN_PREFIX
from tbo.timeline.span import Span, Timeline
from tbo.timeline.sub_lanes import Row, split_rows

Json: TypeAlias = dict[str, Any]
COMPRESSION: Final = 5


class ExportError(UserError):
    """A file that cannot be written, or of a kind that is not known."""


def write_chrome(timeline: Timeline, path: Path) -> None:
    """Writes ``.json``, or ``.json.gz`` where the name ends so.

    Raises:
        ExportError: the file cannot be written.
    """
    try:
        with path.open("wb") as raw:
            if path.suffix == ".gz":
                # No name and no time in the file: the same timeline gives the same bytes.
                with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=COMPRESSION, mtime=0) as packed:
                    packed.writelines(_chunks(timeline))
            else:
                raw.writelines(_chunks(timeline))
    except OSError as error:
        raise ExportError(
            f"{path} cannot be written: {error.strerror or error}", remedy="Name a file in an existing folder."
        ) from error


def _chunks(timeline: Timeline) -> Iterator[bytes]:
    zero = min((span.start_ns for span in timeline.spans), default=0)
    header = {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": zero,
        "tbo": {
            "source": timeline.source,
            "title": timeline.title,
            "notes": list(timeline.notes),
            "rule_counts": dict(timeline.rule_counts),
            "unclassified": [list(pair) for pair in timeline.unclassified],
            "shifts": {str(rank): list(shift) for rank, shift in timeline.shifts.items()},
        },
    }
    yield json.dumps(header).removesuffix("}").encode() + b', "traceEvents": [\n'
    separator = b""
    for event in chrome_events(timeline):
        yield separator + json.dumps(event, separators=(",", ":")).encode()
        separator = b",\n"
    yield b"\n]}\n"


def chrome_events(timeline: Timeline) -> Iterator[Json]:
    """The events: names of processes and threads first, then spans, then arrows; times in microseconds."""
    rows = split_rows(timeline)
    zero = min((span.start_ns for span in timeline.spans), default=0)
    for rank in timeline.ranks:
        yield from _process(rank)
    places: dict[int, tuple[int, int]] = {}
    for thread, row in enumerate(rows):
        yield from _thread(row, thread)
        places.update((index, (row.lane.rank, thread)) for index in row.spans)
    for row in rows:
        for index in row.spans:
            yield _complete(timeline.spans[index], index, places[index], zero)
    for number, edge in enumerate(timeline.edges):
        before, after = timeline.spans[edge.before], timeline.spans[edge.after]
        common = {"cat": OWN_PREFIX + "edge", "name": "dependency", "id": number}
        arguments = {"tbo": {"before": edge.before, "after": edge.after}}
        yield {"ph": "s", **common, **_where(places[edge.before], before, zero), "args": arguments}
        yield {"ph": "f", "bp": "e", **common, **_where(places[edge.after], after, zero)}


def _process(rank: int) -> Iterator[Json]:
    for name, arguments in (
        ("process_name", {"name": f"rank {rank}"}),
        ("process_labels", {"labels": "tbo timeline"}),
        ("process_sort_index", {"sort_index": rank}),
    ):
        yield {"ph": "M", "name": name, "pid": rank, "tid": 0, "args": arguments}


def _thread(row: Row, thread: int) -> Iterator[Json]:
    arguments: Json = {"name": row.title}
    if row.number == 0:
        arguments["tbo"] = {"lane": row.lane.name, "rank": row.lane.rank, "label": row.lane.label}
    place = {"pid": row.lane.rank, "tid": thread}
    yield {"ph": "M", "name": "thread_name", **place, "args": arguments}
    yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": thread}}


def _complete(span: Span, index: int, place: tuple[int, int], zero: int) -> Json:
    return {
        "ph": "X",
        "cat": OWN_PREFIX + span.kind,
        "name": span.op if span.sub_batch is None else f"{span.op} {span.sub_batch}",
        **_where(place, span, zero),
        "dur": _microseconds(span.duration_ns),
        "args": {
            "tbo": {
                "index": index,
                "op": span.op,
                "lane": span.lane,
                "stage": span.stage,
                "layer": span.layer,
                "sub_batch": span.sub_batch,
                "rank": span.rank,
                "name": span.name,
            }
        },
    }


def _where(place: tuple[int, int], span: Span, zero: int) -> Json:
    return {"pid": place[0], "tid": place[1], "ts": _microseconds(span.start_ns - zero)}


def _microseconds(nanoseconds: int) -> int | float:
    """Exact: a double prints up to fifteen digits as they are, which is eleven days."""
    return nanoseconds // 1000 if nanoseconds % 1000 == 0 else nanoseconds / 1000
