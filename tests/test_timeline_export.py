"""Exported files: what viewers need of them, and that they hold the same timeline."""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tbo.errors import MissingPackageError
from tbo.timeline.chrome import ExportError, write_chrome
from tbo.timeline.collect import OWN_PREFIX
from tbo.timeline.commands.inputs import OptionError
from tbo.timeline.events import TraceError
from tbo.timeline.kineto import load
from tbo.timeline.metrics import Rules, measure
from tbo.timeline.pftrace import to_pftrace
from tbo.timeline.span import Edge, Kind, Lane, Span, Timeline, make_timeline
from tbo.timeline.stats import report
from trace_cases import run_command, span, twelve_spans, write_trace

pytestmark = pytest.mark.timeout(100)

FIRST_NS = 1_740_461_679_479_712_123


def crowded(seed: int, *, spans: int = 200) -> Timeline:
    """Two ranks, spans of every kind that overlap, nest, touch and last no time, at nanoseconds since 1970."""
    chance = random.Random(seed)
    made = []
    for number in range(spans):
        start = FIRST_NS + chance.randrange(20_000)
        made.append(
            Span(
                op=f"op_{number % 7}",
                lane=f"lane {chance.randrange(3)}",
                kind=chance.choice(list(Kind)),
                start_ns=start,
                end_ns=start + chance.choice((0, 1, 999, 1000, 12_345)),
                stage=chance.choice(("", "3", "attn(F)")),
                layer=chance.choice((None, 0, 5)),
                sub_batch=chance.choice((None, 0, 1)),
                rank=chance.randrange(2),
                name=chance.choice(("", "void k<1>(int)")),
            )
        )
    lanes = [Lane(name=f"lane {lane}", rank=rank, label=f"{lane} SMs") for rank in (0, 1) for lane in (2, 0, 1)]
    timeline = make_timeline(made, source="recorder", lanes=lanes, title='a "title"', notes=["A note.", "Ünother."])
    return replace(
        timeline,
        edges=tuple(Edge(before=i, after=i + 1) for i in range(0, spans - 1, 9)),
        rule_counts={"NCCL": 3},
        unclassified=(("k", 2),),
        shifts={0: (0, 0), 1: (-5, None)},
    )


def rows_of(path: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = defaultdict(list)
    for event in json.loads(text)["traceEvents"]:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    return rows


def assert_rows_nest(rows: dict[tuple[int, int], list[dict[str, Any]]]) -> None:
    """What Perfetto asks: of two events of one row, one lies in the other or they do not overlap."""
    for row in rows.values():
        spans = [(round(1000 * event["ts"]), round(1000 * (event["ts"] + event["dur"]))) for event in row]
        assert spans == sorted(spans, key=lambda each: (each[0], -each[1])), "viewers take the outer one first"
        for number, (start, end) in enumerate(spans):
            for other_start, other_end in spans[number + 1 :]:
                assert other_start >= end or other_end <= end, (start, end, other_start, other_end)


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
@pytest.mark.parametrize("seed", range(5))
def test_acceptance_9_export_nests_keeps_all_events_and_comes_back(tmp_path: Path, seed: int, ending: str) -> None:
    timeline = crowded(seed)
    path = tmp_path / f"out{ending}"
    write_chrome(timeline, path)
    rows = rows_of(path)
    assert_rows_nest(rows)
    assert sum(len(row) for row in rows.values()) == 200
    assert len(rows) > 6, "overlapped spans need sub-lanes"
    assert load(path) == timeline
    for rank in (0, 1):
        assert measure(load(path), rank=rank) == measure(timeline, rank=rank)


def test_acceptance_9_export_of_a_trace_gives_the_same_report(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "in.json", twelve_spans())
    assert run_command("export", path, "-o", tmp_path / "out.json") == 0
    assert report(load(tmp_path / "out.json"), Rules()) == report(load(path), Rules())


def test_spans_that_nest_need_no_sub_lane(tmp_path: Path) -> None:
    timeline = make_timeline(
        [
            span(Kind.COMPUTE, 0, 10),
            span(Kind.COMPUTE, 0, 10),
            span(Kind.COMPUTE, 2, 5),
            span(Kind.COMPUTE, 5, 10),
            span(Kind.COMPUTE, 10, 10),
            span(Kind.COMPUTE, 10, 12),
        ],
        source="plan",
    )
    write_chrome(timeline, tmp_path / "nested.json")
    assert len(rows_of(tmp_path / "nested.json")) == 1
    crossing = make_timeline([span(Kind.COMPUTE, 0, 10), span(Kind.COMPUTE, 5, 11)], source="plan")
    write_chrome(crossing, tmp_path / "crossing.json")
    events = json.loads((tmp_path / "crossing.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["compute", "compute (2)"]


def test_processes_and_threads_have_names_and_an_order(tmp_path: Path) -> None:
    write_chrome(crowded(0), tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    metadata = [event for event in events if event["ph"] == "M"]
    processes = {event["pid"]: event["args"]["name"] for event in metadata if event["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    threads = {event["tid"]: event["args"]["name"] for event in metadata if event["name"] == "thread_name"}
    order = {event["tid"]: event["args"]["sort_index"] for event in metadata if event["name"] == "thread_sort_index"}
    assert threads.keys() == order.keys()
    assert threads[0] == "lane 2, 2 SMs"
    assert next(iter(json.loads((tmp_path / "t.json").read_text()))) == "displayTimeUnit"


def test_arrows_join_the_spans_that_depend_on_each_other(tmp_path: Path) -> None:
    timeline = crowded(1)
    write_chrome(timeline, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    ends = {phase: {e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"}
    assert len(ends["s"]) == len(ends["f"]) == len(timeline.edges)
    for number, edge in enumerate(timeline.edges):
        for phase, index in (("s", edge.before), ("f", edge.after)):
            arrow = ends[phase][number]
            assert arrow["pid"] == timeline.spans[index].rank
            assert round(1000 * arrow["ts"]) + min(s.start_ns for s in timeline.spans) == timeline.spans[index].start_ns


def test_the_same_timeline_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        write_chrome(crowded(2), tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_a_changed_export_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_chrome(crowded(0), path)
    path.write_text(path.read_text().replace(OWN_PREFIX + "compute", OWN_PREFIX + "thinking"))
    with pytest.raises(TraceError, match="was written by tbo and changed since: ValueError: 'thinking'"):
        load(path)


def test_acceptance_9_pftrace_parses_with_the_protos_of_perfetto() -> None:
    proto: Any = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    timeline = crowded(3)
    trace = proto.Trace()
    trace.ParseFromString(to_pftrace(timeline))
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    assert {track.process.process_name for track in tracks.values()} == {"", "rank 0", "rank 1"}
    open_slices: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    found = []
    flows: defaultdict[int, int] = defaultdict(int)
    for packet in trace.packet:
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        assert tracks[event.track_uuid].name.startswith("lane ")
        if event.type == event.TYPE_SLICE_BEGIN:
            open_slices[event.track_uuid].append((packet.timestamp, event.name))
            for flow in event.flow_ids:
                flows[flow] += 1
        else:
            start, name = open_slices[event.track_uuid].pop()
            found.append((start, packet.timestamp, name))
    expected = [
        (s.start_ns, s.end_ns, s.op if s.sub_batch is None else f"{s.op} {s.sub_batch}") for s in timeline.spans
    ]
    assert sorted(found) == sorted(expected)
    assert not any(open_slices.values())
    assert set(flows.values()) == {2}
    assert len(flows) == len(timeline.edges)


def test_without_perfetto_a_pftrace_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    path = write_trace(tmp_path / "t.json", twelve_spans())
    with pytest.raises(MissingPackageError, match=r"pip install 'two-batch-overlap\[perfetto\]'"):
        run_command("export", path, "-o", tmp_path / "t.pftrace")
    assert not (tmp_path / "t.pftrace").exists()


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", twelve_spans())
    with pytest.raises(ExportError, match=r"out.png has no known ending. Known are .json, .json.gz, .pftrace"):
        run_command("export", path, "-o", "out.png")
    with pytest.raises(OptionError, match="is read and would be overwritten"):
        run_command("export", path, "-o", path)
    with pytest.raises(ExportError, match="cannot be written: No such file or directory"):
        run_command("export", path, "-o", tmp_path / "none" / "t.json")
    with pytest.raises(OptionError, match="2 files are given without --merge"):
        run_command("export", path, path, "-o", tmp_path / "o.json")
