"""Reading traces: every form they come in, what stages and ranks are, and files that are no traces."""

from __future__ import annotations

import gzip
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import timeline_load
from tbo.errors import MissingPackageError
from tbo.timeline import events
from tbo.timeline.events import TraceError
from tbo.timeline.kineto import load, load_trace
from tbo.timeline.metrics import measure
from tbo.timeline.names import parse_place, qualified, short
from tbo.timeline.span import Timeline
from trace_cases import (
    COMBINE,
    DISPATCH,
    EPOCH_US,
    GEMM,
    annotation,
    kernel,
    launch,
    run_command,
    shifted,
    twelve_spans,
    write_trace,
)

pytestmark = pytest.mark.timeout(100)


def without_title(timeline: Timeline) -> Timeline:
    return replace(timeline, title="")


# ---------------------------------------------------------------- forms of one trace


def test_acceptance_4_epoch_and_base_forms_are_one_trace(tmp_path: Path) -> None:
    base_ns = EPOCH_US * 1000 - 467
    epoch = load(write_trace(tmp_path / "epoch.json", shifted(twelve_spans(), EPOCH_US)))
    relative = [{**event, "ts": float(event["ts"]) + 0.467} for event in twelve_spans()]
    fractional = load(write_trace(tmp_path / "base.json", relative, baseTimeNanoseconds=base_ns))
    assert without_title(fractional) == without_title(epoch)
    assert measure(fractional) == measure(epoch)
    assert epoch.spans[0].start_ns == EPOCH_US * 1000


@pytest.mark.parametrize("place", ["before", "after"])
def test_the_base_is_found_on_either_side_of_the_events(tmp_path: Path, place: str) -> None:
    text = json.dumps(twelve_spans())
    base = '"other": [[1], {"deep": ["]"]}], "baseTimeNanoseconds": 5'
    whole = f'{{{base}, "traceEvents": {text}}}' if place == "before" else f'{{"traceEvents": {text}, {base}}}'
    path = tmp_path / "t.json"
    path.write_text(whole)
    assert load(path).spans[0].start_ns == 5


def test_large_fractional_times_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7,'
        ' "ts": 1740461679479712.123, "dur": 85.001}]}'
    )
    (span,) = load(path).spans
    assert (span.start_ns, span.duration_ns) == (1_740_461_679_479_712_123, 85_001)


def test_acceptance_4_text_for_pid_and_tid_bare_arrays_and_gzip_load(tmp_path: Path) -> None:
    plain = without_title(load(write_trace(tmp_path / "plain.json", twelve_spans())))
    texts = [{**event, "pid": str(event["pid"]), "tid": str(event["tid"])} for event in twelve_spans()]
    odd = [{"ph": "X", "cat": "Trace", "pid": "Spans", "tid": "PyTorch Profiler", "ts": 1, "dur": 1, "name": "p"}]
    odd += [{"ph": "i", "pid": "", "tid": "", "ts": 1, "name": "x", "s": "g"}, {"ph": "M", "name": "process_name"}]
    assert without_title(load(write_trace(tmp_path / "texts.json", odd + texts))) == plain
    assert without_title(load(write_trace(tmp_path / "bare.json", twelve_spans(), bare=True))) == plain
    assert without_title(load(write_trace(tmp_path / "packed.json.gz", twelve_spans()))) == plain
    write_trace(tmp_path / "packed.json.gz", twelve_spans()).rename(tmp_path / "misnamed.json")
    assert without_title(load(tmp_path / "misnamed.json")) == plain


@pytest.mark.parametrize("bare", [True, False])
def test_without_ijson_small_files_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare: bool
) -> None:
    path = write_trace(tmp_path / "t.json.gz", twelve_spans(), bare=bare)
    expected = load(path)
    monkeypatch.setitem(sys.modules, "ijson", None)
    assert load(path) == expected
    monkeypatch.setattr(events, "WITHOUT_IJSON_BYTES", 100)
    with pytest.raises(MissingPackageError, match=r"too large .* Run: pip install 'two-batch-overlap\[timeline\]'"):
        load(path)


def test_progress_is_told_bytes_of_the_file(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json.gz", twelve_spans() * 3000)
    told: list[tuple[int, int]] = []
    load(path, progress=lambda done, total: told.append((done, total)))
    size = path.stat().st_size
    assert told[-1] == (size, size)
    assert told == sorted(told)


# ---------------------------------------------------------------- stages, ranks, lanes


def launched(name: str, ts: float, correlation: int, tid: int = 7) -> dict[str, Any]:
    return kernel(name, ts, 10, tid, args={"correlation": correlation, "grid": [20, 1, 1]})


def test_a_stage_is_the_innermost_range_at_the_launch_on_any_thread(tmp_path: Path) -> None:
    trace = [
        annotation("ProfilerStep#3", 0, 1000),
        annotation("1F1B", 0, 900),
        annotation("attn(B)", 100, 100),
        annotation("nccl:all_to_all", 110, 5),
        annotation("mlp(F)", 200, 100),
        launch(1, 112, tid=2571),
        launch(2, 199.999),
        launch(3, 200),
        launch(4, 300),
        launch(5, 950),
        *(launched(GEMM, 2000 + 20 * number, number) for number in range(1, 7)),
    ]
    loaded = load_trace(write_trace(tmp_path / "t.json", trace))
    assert [span.stage for span in loaded.timeline.spans] == ["attn(B)", "attn(B)", "mlp(F)", "1F1B", "", ""]
    assert loaded.launches == (112_000, 199_999, 200_000, 300_000, 950_000, None)


def test_ranges_of_ours_say_sub_batch_layer_and_op(tmp_path: Path) -> None:
    graph = {**annotation("tbo::1/4/op_experts", 500, 100, tid=7), "cat": "gpu_user_annotation", "pid": 0}
    other = {**annotation("replay", 500, 300, tid=7), "cat": "gpu_user_annotation", "pid": 0}
    trace = [annotation("step", 0, 100), annotation("tbo::0/3/op_gate", 10, 10), other, graph]
    trace += [launch(1, 15), launch(2, 50), launched(GEMM, 400, 1), launched(GEMM, 510, 2), launched(GEMM, 700, 9)]
    spans = load(write_trace(tmp_path / "t.json", trace)).spans
    assert [(s.op, s.stage, s.layer, s.sub_batch) for s in spans] == [
        ("op_gate", "op_gate", 3, 0),
        ("op_experts", "op_experts", 4, 1),
        ("device_kernel", "replay", None, None),
    ]
    assert spans[0].name == GEMM


def test_multiprocessors_of_a_lane_of_transfers(tmp_path: Path) -> None:
    trace = [launched(DISPATCH, 0, 1, tid=27), launched(GEMM, 0, 2), kernel(COMBINE, 0, 1, 28, args={"grid": [132]})]
    path = write_trace(tmp_path / "t.json", trace, deviceProperties=[{"id": 0, "numSms": 132}])
    assert [(lane.name, lane.label) for lane in load(path).lanes] == [
        ("stream 7", ""),
        ("stream 27", "20 SMs"),
        ("stream 28", ""),
    ]


def test_the_rank_of_a_file_and_of_a_file_with_several_devices(tmp_path: Path) -> None:
    one = write_trace(tmp_path / "one.json", twelve_spans(), distributedInfo={"backend": "nccl", "rank": 5})
    assert load(one).ranks == (5,)
    two = [*twelve_spans(), *({**event, "pid": 10} for event in twelve_spans())]
    timeline = load(write_trace(tmp_path / "two.json", two))
    assert timeline.ranks == (0, 1)
    assert measure(timeline, rank=1).overlapped_ns == 20_000
    assert timeline.notes[0] == "The file holds 2 devices: 0 is rank 0, 10 is rank 1."


def test_correlations_of_merged_programs_are_not_mixed(tmp_path: Path) -> None:
    trace = []
    for number, stage in enumerate(("attn", "mlp")):
        program = [annotation(stage, 0, 10), launch(1, 5), launched(GEMM, 20, 1)]
        trace += [{**event, "pid": f"[TP{number:02}] {event['pid']}"} for event in program]
    assert [(s.rank, s.stage) for s in load(write_trace(tmp_path / "t.json", trace)).spans] == [(0, "attn"), (1, "mlp")]


def test_events_that_end_before_they_start_are_left_out_and_said(tmp_path: Path) -> None:
    timeline = load(write_trace(tmp_path / "t.json", [kernel(GEMM, 5, -1), kernel(GEMM, 5, 1)]))
    assert len(timeline.spans) == 1
    assert "left out: 1." in timeline.notes[0]


@pytest.mark.parametrize(
    ("name", "full", "last"),
    [
        ("void a::b<c::d<1>, 2>(int, e::f)", "a::b", "b"),
        ("void (anonymous namespace)::one_kernel<int>(int*)", "one_kernel", "one_kernel"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int>(p)", "internal::gemvx::kernel", "kernel"),
        ("_ZN7deep_ep9intranode8dispatchILi8EEEvP4int4", "deep_ep::intranode::dispatch", "dispatch"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("", "", ""),
    ],
)
def test_short_names(name: str, full: str, last: str) -> None:
    assert (qualified(name), short(name)) == (full, last)


def test_places_that_are_not_numbers_are_unknown() -> None:
    place = parse_place("tbo::-/x/op_a/b")
    assert place is not None
    assert (place.sub_batch, place.layer, place.op) == (None, None, "op_a/b")
    assert parse_place("tbo::1/op") is None


# ---------------------------------------------------------------- files that are no traces

WHOLE = json.dumps({"traceEvents": twelve_spans()}).encode()

BROKEN: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "cannot be read: no such file or directory"),
    "empty": (b"", "is empty"),
    "half of JSON": (WHOLE[:700], "is not whole or not JSON"),
    "half of a bare array": (WHOLE[16:700], "is not whole or not JSON"),
    "without its end": (WHOLE[:-1], "is not whole or not JSON"),
    "half of gzip": (gzip.compress(WHOLE)[:60], "is cut short or damaged"),
    "damaged gzip": (gzip.compress(WHOLE)[:40] + b"\0\0\0\0" + gzip.compress(WHOLE)[44:], "is cut short or damaged"),
    "other JSON": (b'{"a": [1, 2]}', "holds no trace events"),
    "no events": (b'{"traceEvents": []}', "holds no trace events"),
    "no list": (b'{"traceEvents": 7}', "holds no trace events"),
    "numbers": (b"[1, 2]", "holds no trace events"),
    "a text": (b'"traceEvents"', "is not a trace"),
    "text": (b"hello", "is not a trace"),
    "not a text": (b'{"traceEvents": ["\xff\xfe"]}', "is not whole or not JSON"),
    "host only": (json.dumps([launch(1, 1)]).encode(), "holds no kernel, copy or fill of a device"),
    "no time": (b'[{"ph": "X", "cat": "kernel", "name": "k", "dur": 1}]', "event 1 of .* has None where its time"),
    "time is text": (b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": "1"}]', "event 1 of .* has '1' where its time"),
}


@pytest.mark.parametrize("with_ijson", [True, False], ids=["ijson", "json"])
@pytest.mark.parametrize("what", BROKEN)
def test_acceptance_5_a_file_that_is_no_trace_ends_in_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, with_ijson: bool
) -> None:
    if not with_ijson:
        monkeypatch.setitem(sys.modules, "ijson", None)
    content, message = BROKEN[what]
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        run_command("stats", path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.remedy


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: is a directory"):
        load(tmp_path)


def test_any_cut_of_a_trace_is_refused_or_whole(tmp_path: Path) -> None:
    """Wherever the writer stopped, no figure comes of it."""
    chance = random.Random(0)
    packed = gzip.compress(WHOLE)
    path = tmp_path / "t.json.gz"
    for _ in range(60):
        content = chance.choice((WHOLE, packed))
        path.write_bytes(content[: chance.randrange(len(content))])
        with pytest.raises(TraceError):
            load(path)


# ---------------------------------------------------------------- size


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peak memory is read from Linux's /proc")
def test_acceptance_5_memory_of_a_large_trace(tmp_path: Path) -> None:
    """A sixth of the benchmark's trace: 142,040 events. What is kept grows with the device's events alone."""
    path = tmp_path / "large.json.gz"
    assert timeline_load.generate(path, steps=10) == 142_040
    _, peak = timeline_load.measure(path)
    assert peak < 50
