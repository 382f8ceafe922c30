"""Timelines in Perfetto's own format: nanoseconds, named rows, arrows. Needs the package `perfetto`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tbo.errors import MissingPackageError
from tbo.timeline.chrome import ExportError
from tbo.timeline.span import Span, Timeline
from tbo.timeline.sub_lanes import split_rows

SEQUENCE: Final = 1
RANK_TRACK: Final = 1_000_000


def write_pftrace(timeline: Timeline, path: Path) -> None:
    """Writes a ``.pftrace`` file.

    Raises:
        MissingPackageError: the package `perfetto` is not installed.
        ExportError: the file cannot be written.
    """
    content = to_pftrace(timeline)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ExportError(
            f"{path} cannot be written: {error.strerror or error}", remedy="Name a file in an existing folder."
        ) from error


def to_pftrace(timeline: Timeline) -> bytes:
    """The file's content.

    Raises:
        MissingPackageError: the package `perfetto` is not installed.
    """
    try:
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder
    except ImportError as error:
        raise MissingPackageError(
            "a .pftrace file needs the package perfetto, which is not installed",
            remedy="Run: pip install 'two-batch-overlap[perfetto]', or export .json, which Perfetto opens too.",
        ) from error
    builder: Any = TraceProtoBuilder()
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for flow, edge in enumerate(timeline.edges, 1):
        starts.setdefault(edge.before, []).append(flow)
        ends.setdefault(edge.after, []).append(flow)
    for rank in timeline.ranks:
        track = builder.add_packet().track_descriptor
        track.uuid = RANK_TRACK + rank
        track.process.pid = rank + 1  # Perfetto takes process 0 for the idle task
        track.process.process_name = f"rank {rank}"
    for uuid, row in enumerate(split_rows(timeline), 1):
        track = builder.add_packet().track_descriptor
        track.uuid = uuid
        track.parent_uuid = RANK_TRACK + row.lane.rank
        track.name = row.title
        track.sibling_order_rank = uuid
        open_ends: list[int] = []
        for index in row.spans:
            span = timeline.spans[index]
            while open_ends and open_ends[-1] <= span.start_ns:
                _end(builder, uuid, open_ends.pop())
            _begin(builder, uuid, span, [*starts.get(index, ()), *ends.get(index, ())])
            open_ends.append(span.end_ns)
        while open_ends:
            _end(builder, uuid, open_ends.pop())
    content: bytes = builder.serialize()
    return content


def _begin(builder: Any, track: int, span: Span, flows: list[int]) -> None:
    event = _event(builder, track, span.start_ns)
    event.type = event.TYPE_SLICE_BEGIN
    event.name = span.op if span.sub_batch is None else f"{span.op} {span.sub_batch}"
    event.categories.append(span.kind.value)
    event.flow_ids.extend(flows)
    for name, value in (("stage", span.stage), ("layer", span.layer), ("sub_batch", span.sub_batch)):
        if value not in ("", None):
            annotation = event.debug_annotations.add()
            annotation.name = name
            if isinstance(value, int):
                annotation.int_value = value
            else:
                annotation.string_value = str(value)


def _end(builder: Any, track: int, time: int) -> None:
    event = _event(builder, track, time)
    event.type = event.TYPE_SLICE_END


def _event(builder: Any, track: int, time: int) -> Any:
    packet = builder.add_packet()
    packet.timestamp = time
    packet.trusted_packet_sequence_id = SEQUENCE
    packet.track_event.track_uuid = track
    return packet.track_event
