"""`tbo timeline stats`: how much communication is hidden, and where it is not."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tbo.timeline.commands.inputs import (
    add_json_argument,
    add_rule_arguments,
    make_console,
    milliseconds,
    print_json,
    read_trace,
    rules_of,
    share,
)
from tbo.timeline.critical import critical_path
from tbo.timeline.merge import skew
from tbo.timeline.metrics import Metrics, Rules
from tbo.timeline.span import Timeline
from tbo.timeline.stats import KEYS, find_rows, lane_report, measure_ranks, path_report, report

NAME = "stats"
SUMMARY = "how much communication is hidden, by stage, op and lane"
DESCRIPTION = """\
Prints, for every rank, how long it computes and communicates, how much of the communication runs beside computation
(overlap ratio) and how much is exposed, and a table by stage, op, lane, kind, layer or sub-batch. All times are unions
of intervals. Exit code: 0; 2 if a file cannot be read or holds no communication.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="traces, .json or .json.gz")
    parser.add_argument(
        "--by", choices=tuple(KEYS), default="stage", help="what the table has rows for (default: %(default)s)"
    )
    add_rule_arguments(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Reads, measures, prints."""
    console = make_console()
    documents: list[dict[str, Any]] = []
    for path in arguments.files:
        timeline = read_trace(path, arguments).timeline
        rules = rules_of(arguments, timeline)
        if arguments.json:
            documents.append({"file": str(path), **report(timeline, rules)})
        else:
            _print(console, timeline, rules, arguments.by)
    if arguments.json:
        print_json(documents[0] if len(documents) == 1 else documents)
    return 0


def _print(console: Console, timeline: Timeline, rules: Rules, by: str) -> None:
    for metrics in measure_ranks(timeline, rules):
        console.print(Text(f"{timeline.title}, rank {metrics.rank}: milliseconds", style="bold"))
        console.print(_summary(metrics))
        console.print(_rows(timeline, metrics, rules, by))
        console.print(_lanes(timeline, metrics, rules))
        path = critical_path(timeline, metrics.rank)
        if path is None:
            console.print("Critical path: not known, as this timeline has no dependencies between its spans.")
        else:
            facts = path_report(path)
            parts = ", ".join(f"{kind} {milliseconds(part)}" for kind, part in facts["by_kind_ns"].items())
            waiting = milliseconds(facts["waiting_ns"])
            console.print(f"Critical path: {facts['spans']} spans, {parts}, waiting {waiting}.")
    _print_rest(console, timeline)


def _print_rest(console: Console, timeline: Timeline) -> None:
    apart = skew(timeline)
    if apart is not None:
        console.print(
            f"Ranks at {apart.barriers} barriers: arrivals at most {milliseconds(apart.arrival_ns)} apart, "
            f"ends at most {milliseconds(apart.end_ns)}."
        )
    if timeline.rule_counts:
        taken = "; ".join(f"{name}: {count}" for name, count in timeline.rule_counts.items())
        console.print(Text(f"Events by rule: {taken}"))
    for note in timeline.notes:
        console.print(Text(note))


def _summary(metrics: Metrics) -> Table:
    summary = Table(box=None, show_header=False, pad_edge=False)
    summary.add_column()
    summary.add_column(justify="right")
    summary.add_column()
    exposed = ", ".join(
        f"{kind.value.replace('_', '-')} {milliseconds(part)}" for kind, part in metrics.exposed_by_kind.items() if part
    )
    for label, figure, remark in (
        ("window", milliseconds(metrics.window_ns), "first start to last end on the device"),
        ("computation", milliseconds(metrics.compute_ns), f"bubble {share(metrics.bubble)}"),
        ("communication", milliseconds(metrics.communication_ns), ""),
        ("  overlapped", milliseconds(metrics.overlapped_ns), f"overlap ratio {share(metrics.overlap_ratio)}"),
        ("  exposed", milliseconds(metrics.exposed_ns), exposed),
        ("computation only", milliseconds(metrics.compute_only_ns), ""),
        ("idle", milliseconds(metrics.idle_ns), ""),
        ("ideal", share(metrics.ideal), "the longer of computation and communication, of the window"),
    ):
        summary.add_row(label, figure, remark)
    return summary


def _rows(timeline: Timeline, metrics: Metrics, rules: Rules, by: str) -> Table:
    rows = Table(box=None, pad_edge=False, header_style="bold")
    rows.add_column(by, overflow="fold")
    for heading in ("n", "sum", "mean", "p95", "share", "compute", "transfer", "notify", "in flight", "exposed"):
        rows.add_column(heading, justify="right", no_wrap=True)
    for row in find_rows(timeline, by, rank=metrics.rank, rules=rules):
        times = (row.compute_ns, row.transfer_ns, row.notify_ns, row.in_flight_ns, row.exposed_ns)
        rows.add_row(
            Text(row.key),
            str(row.count),
            milliseconds(row.total_ns),
            milliseconds(row.mean_ns),
            milliseconds(row.p95_ns),
            f"{100 * row.share:.1f}%",
            *(milliseconds(time) if time else "" for time in times),
        )
    return rows


def _lanes(timeline: Timeline, metrics: Metrics, rules: Rules) -> Table:
    lanes = Table(box=None, pad_edge=False, header_style="bold")
    lanes.add_column("lane")
    for heading in ("n", "busy", "alone", "beside others", "first", "last"):
        lanes.add_column(heading, justify="right", no_wrap=True)
    for lane in timeline.lanes:
        if lane.rank == metrics.rank:
            facts = lane_report(timeline, lane, rules)
            name = f"{lane.name}, {lane.label}" if lane.label else lane.name
            times = ("busy_ns", "alone_ns", "beside_others_ns", "first_ns", "last_ns")
            lanes.add_row(Text(name), str(facts["count"]), *(milliseconds(facts[time]) for time in times))
    return lanes
