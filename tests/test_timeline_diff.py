"""Comparing runs, what travels without a kernel, gaps and limits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tbo.timeline.check import Limits, LimitsError
from tbo.timeline.chrome import write_chrome
from tbo.timeline.commands.inputs import OptionError
from tbo.timeline.diff import compare, describe_key
from tbo.timeline.gaps import Cause, find_gaps
from tbo.timeline.metrics import measure
from tbo.timeline.span import Kind, Span, Timeline, make_timeline
from trace_cases import (
    COMBINE,
    DISPATCH,
    GEMM,
    NOTIFY,
    annotation,
    kernel,
    launch,
    run_command,
    span,
    twelve_spans,
    write_trace,
)

pytestmark = pytest.mark.timeout(60)


def step(*, slower: str = "") -> Timeline:
    """Two layers of two sub-batches; `slower` names the op that takes 10 % longer, layer 1, sub-batch 0."""
    spans = []
    now = 0
    for layer in (0, 1):
        for sub_batch in (0, 1):
            for op, kind in (("attn", Kind.COMPUTE), ("dispatch", Kind.TRANSFER), ("experts", Kind.COMPUTE)):
                long = 110 if (op, layer, sub_batch) == (slower, 1, 0) else 100
                spans.append(span(kind, now, now + long, op=op, stage=op, layer=layer, sub_batch=sub_batch))
                now += long
    return make_timeline(spans, source="plan")


def written(folder: Path, name: str, timeline: Timeline) -> Path:
    write_chrome(timeline, folder / name)
    return folder / name


# ---------------------------------------------------------------- diff


def test_acceptance_12_a_run_compared_with_itself_is_all_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "a.json", twelve_spans())
    assert run_command("diff", path, path) == 0
    assert "No op differs." in capsys.readouterr().out
    assert run_command("diff", path, path, "--json") == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert (rank["all"], rank["changes"]) == (0, [])
    assert rank["metrics"]["before"] == rank["metrics"]["after"]
    assert all(change.delta_ns == 0 for change in compare(step(), step()))


@pytest.mark.parametrize("op", ["attn", "dispatch", "experts"])
def test_acceptance_12_slowing_one_op_shows_exactly_that_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], op: str
) -> None:
    before, after = written(tmp_path, "a.json", step()), written(tmp_path, "b.json", step(slower=op))
    assert run_command("diff", before, after, "--json") == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert rank["changes"] == [
        {
            "stage": op,
            "layer": 1,
            "sub_batch": 0,
            "op": op,
            "count_before": 1,
            "count_after": 1,
            "total_before_ns": 100_000,
            "total_after_ns": 110_000,
            "delta_ns": 10_000,
            "contention": None,
        }
    ]
    assert run_command("diff", before, after) == 0
    printed = capsys.readouterr().out
    assert f"{op}, layer 1, sub-batch 0" in printed
    assert "+10.0 %" in printed
    assert printed.count("sub-batch") == 1


def test_contention_is_overlapped_over_alone() -> None:
    alone = make_timeline(
        [span(Kind.COMPUTE, 0, 100, op="gemm"), span(Kind.TRANSFER, 100, 200, op="send")], source="plan"
    )
    beside = make_timeline(
        [span(Kind.COMPUTE, 0, 120, op="gemm"), span(Kind.TRANSFER, 0, 130, op="send")], source="plan"
    )
    factors = {change.key[3]: change.contention for change in compare(alone, beside)}
    assert factors == {"gemm": pytest.approx(1.2), "send": pytest.approx(1.3)}
    assert {change.contention for change in compare(alone, alone)} == {None}


def test_ops_of_one_run_only_are_changes() -> None:
    more = make_timeline([*step().spans, span(Kind.COMPUTE, 5000, 5001, op="new")], source="plan")
    (change,) = [change for change in compare(step(), more) if change.is_change]
    assert (change.before.count, change.after.count, change.delta_ns) == (0, 1, 1000)
    assert describe_key(change.key) == "new"


def test_runs_of_other_ranks_are_not_compared(tmp_path: Path) -> None:
    one = write_trace(tmp_path / "a.json", twelve_spans())
    two = write_trace(tmp_path / "b.json", twelve_spans(), distributedInfo={"rank": 2})
    with pytest.raises(OptionError, match=r"holds ranks \[0\] and .* holds \[2\]"):
        run_command("diff", one, two)


# ---------------------------------------------------------------- in flight

ISSUE = span(Kind.TRANSFER, 0, 5, op="dispatch_send", lane="stream 7")
RECEIVE = span(Kind.TRANSFER, 60, 65, op="dispatch_receive", lane="stream 7")
BETWEEN = span(Kind.COMPUTE, 5, 60, op="attn", lane="stream 7")
IN_FLIGHT = span(Kind.IN_FLIGHT, 5, 60, op="dispatch", lane="in flight")


def test_acceptance_12_low_latency_rows_in_flight_are_hidden_by_computation() -> None:
    """Between issue and receive no kernel of the exchange runs: only the recorder's interval knows that rows travel."""
    timeline = make_timeline([ISSUE, RECEIVE, BETWEEN, IN_FLIGHT], source="recorder")
    metrics = measure(timeline)
    assert (metrics.communication_ns, metrics.overlapped_ns, metrics.exposed_ns) == (65_000, 55_000, 10_000)
    assert metrics.exposed_by_kind[Kind.IN_FLIGHT] == 0
    kernels_only = measure(make_timeline([ISSUE, RECEIVE, BETWEEN], source="recorder"))
    assert kernels_only.overlap_ratio == 0.0


def test_acceptance_12_low_latency_rows_in_flight_are_exposed_without_computation(tmp_path: Path) -> None:
    timeline = make_timeline([ISSUE, RECEIVE, IN_FLIGHT], source="recorder")
    metrics = measure(timeline)
    assert (metrics.overlapped_ns, metrics.exposed_ns) == (0, 65_000)
    assert metrics.exposed_by_kind == {Kind.TRANSFER: 10_000, Kind.NOTIFY: 0, Kind.IN_FLIGHT: 55_000}
    assert run_command("check", written(tmp_path, "t.json", timeline), "--max-exposed-us", "64.9") == 1
    assert run_command("check", written(tmp_path, "t.json", timeline), "--max-exposed-us", "65") == 0


# ---------------------------------------------------------------- gaps


def launched(name: str, ts: float, dur: float, launch_at: float, tid: int = 7) -> list[dict[str, Any]]:
    correlation = int(1000 * launch_at) + tid
    return [launch(correlation, launch_at), kernel(name, ts, dur, tid, args={"correlation": correlation})]


def test_gaps_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        annotation("attn(F)", 0, 5),
        *launched("first<1>(int)", 10, 10, 1),
        *launched(NOTIFY, 20, 50, 2, 27),  # exposed 20..70: waits for a peer
        *launched("second<1>(int)", 70, 30, 3),
        *launched("third<1>(int)", 140, 10, 120),  # idle 100..140: launched at 120
        *launched(DISPATCH, 140, 70, 4, 27),  # exposed 150..210: what follows starts when it ends
        *launched("fourth<1>(int)", 212, 10, 4.5),
        *launched(COMBINE, 262, 30, 4.75, 27),  # idle 222..262, then exposed: nothing follows
    ]
    path = write_trace(tmp_path / "t.json", events)
    assert run_command("gaps", path, "--json") == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    found = [
        (gap["start_ns"] // 1000, gap["duration_ns"] // 1000, gap["what"], gap["cause"], gap["before"], gap["after"])
        for gap in rank["gaps"]
    ]
    assert found == [
        (140, 60, "exposed", "dependency", "third", "attn(F): fourth"),
        (10, 50, "exposed", "waiting for peer", "attn(F): first", "attn(F): second"),
        (90, 40, "idle", "host late", "attn(F): second", "third"),
        (212, 40, "idle", "unknown", "attn(F): fourth", "-"),
        (252, 30, "exposed", "unknown", "attn(F): fourth", "-"),
    ]
    assert run_command("gaps", path, "--top", "2", "--min-us", "35") == 0
    printed = capsys.readouterr().out
    assert "4 gaps of at least 35 us" in printed
    assert "and 2 more, together 0.080" in printed


def test_a_recorded_host_span_tells_that_the_host_was_late() -> None:
    place: dict[str, Any] = {"op": "experts", "layer": 0, "sub_batch": 1}
    spans = [
        span(Kind.COMPUTE, 0, 10, op="gate"),
        span(Kind.TRANSFER, 0, 10),
        span(Kind.HOST, 30, 38, **place),
        span(Kind.COMPUTE, 40, 50, **place),
    ]
    (gap,) = find_gaps(make_timeline(spans, source="recorder"))
    assert (gap.cause, gap.exposed, gap.duration_ns) == (Cause.HOST, False, 30_000)
    early = [*spans[:2], replace(spans[2], start_ns=0, end_ns=1000), spans[3]]
    (gap,) = find_gaps(make_timeline(early, source="recorder"))
    assert gap.cause is Cause.UNKNOWN


def test_nothing_has_no_gaps() -> None:
    nothing: list[Span] = []
    assert find_gaps(make_timeline(nothing, source="plan")) == ()


@pytest.mark.parametrize("options", [("--min-us", "-1"), ("--top", "0"), ("--min-us", "nan")])
def test_gap_options_that_make_no_sense(tmp_path: Path, options: tuple[str, str]) -> None:
    with pytest.raises(OptionError):
        run_command("gaps", write_trace(tmp_path / "t.json", twelve_spans()), *options)


def test_a_lane_that_is_not_there(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", [kernel(GEMM, 0, 1)])
    with pytest.raises(OptionError, match=r"--by-lane 27: there is no such lane. Lanes are stream 7"):
        run_command("stats", path, "--by-lane", "27")


# ---------------------------------------------------------------- check


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        (("--min-overlap", "0.5"), 0, "ok: rank 0: overlap ratio 0.5, must be at least 0.5"),
        (("--min-overlap", "0.51"), 1, "FAILED: rank 0: overlap ratio 0.5, must be at least 0.51"),
        (("--max-exposed-us", "19"), 1, "FAILED: rank 0: exposed communication (us) 20, must be at most 19"),
        (("--max-idle", "0.25"), 0, "ok: rank 0: idle share 0.25, must be at most 0.25"),
        (("--max-idle", "0.2", "--min-overlap", "0"), 1, "FAILED: rank 0: idle share 0.25, must be at most 0.2"),
        (("--max-bubble", "0.4"), 1, "FAILED: rank 0: bubble 0.5, must be at most 0.4"),
    ],
)
def test_check_holds_a_trace_against_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], code: int, line: str
) -> None:
    path = write_trace(tmp_path / "t.json", twelve_spans())
    assert run_command("check", path, *options) == code
    assert line in capsys.readouterr().out.splitlines()
    assert run_command("check", path, *options, "--json") == code
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert all(check["holds"] for check in checks) == (code == 0)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "no limit is given"),
        ({"min_overlap": 90.0}, "--min-overlap is 90"),
        ({"max_idle": -0.1}, "--max-idle is -0.1"),
        ({"max_bubble": float("nan")}, "--max-bubble is nan"),
        ({"max_exposed_us": -1.0}, "--max-exposed-us is -1"),
        ({"max_exposed_us": float("nan")}, "--max-exposed-us is nan"),
    ],
)
def test_limits_that_make_no_sense(limits: dict[str, float], message: str) -> None:
    with pytest.raises(LimitsError, match=message):
        Limits(**limits)
