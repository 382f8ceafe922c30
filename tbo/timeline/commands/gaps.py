"""`tbo timeline gaps`: the longest stretches without computation, and why."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tbo.timeline.commands.inputs import (
    OptionError,
    add_json_argument,
    add_rule_arguments,
    make_console,
    milliseconds,
    print_json,
    read_trace,
    rules_of,
)
from tbo.timeline.gaps import Gap, find_gaps
from tbo.timeline.span import Span, Timeline
from tbo.timeline.stats import measure_ranks

NAME = "gaps"
SUMMARY = "the longest stretches of exposed communication and idleness, and why"
DESCRIPTION = """\
Lists stretches in which communication is exposed or nothing runs, longest first, each with the computation before and
after it and its cause: waiting for a peer, a host that launched too late, a dependency on a communication, or unknown.
Exit code: 0; 2 if the file cannot be read or holds no communication.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a trace, .json or .json.gz")
    parser.add_argument(
        "--min-us", type=float, default=10.0, metavar="X", help="leave out shorter gaps (default: %(default)s)"
    )
    parser.add_argument(
        "--top", type=int, default=20, metavar="N", help="list at most this many of a rank (default: %(default)s)"
    )
    add_rule_arguments(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Reads, finds, prints."""
    if not arguments.min_us >= 0 or arguments.top < 1:
        raise OptionError(
            "--min-us is negative or --top is below 1", remedy="Give --min-us 0 or more, --top 1 or more."
        )
    trace = read_trace(arguments.file, arguments)
    timeline = trace.timeline
    rules = rules_of(arguments, timeline)
    ranks = []
    for metrics in measure_ranks(timeline, rules):
        gaps = find_gaps(
            timeline,
            rank=metrics.rank,
            rules=rules,
            launches=trace.launches,
            min_ns=round(arguments.min_us * 1000),
        )
        ranks.append((metrics.rank, metrics.start_ns, gaps))
    if arguments.json:
        print_json(
            {
                "file": str(arguments.file),
                "ranks": [
                    {"rank": rank, "gaps": [_document(gap, zero) for gap in gaps[: arguments.top]], "all": len(gaps)}
                    for rank, zero, gaps in ranks
                ],
            }
        )
    else:
        console = make_console()
        for rank, zero, gaps in ranks:
            _print(console, timeline, rank, zero, gaps, arguments)
    return 0


def _print(
    console: Console, timeline: Timeline, rank: int, zero: int, gaps: tuple[Gap, ...], arguments: argparse.Namespace
) -> None:
    heading = f"{timeline.title}, rank {rank}: {len(gaps)} gaps of at least {arguments.min_us:g} us, milliseconds"
    console.print(Text(heading, style="bold"))
    listed = Table(box=None, pad_edge=False, header_style="bold")
    for column, justify in (
        ("at", "right"),
        ("length", "right"),
        ("what", "left"),
        ("before", "left"),
        ("after", "left"),
    ):
        listed.add_column(column, justify="right" if justify == "right" else "left", overflow="fold")
    listed.add_column("cause", no_wrap=True)
    for gap in gaps[: arguments.top]:
        what = f"exposed {_label(gap.communication)}" if gap.exposed else "idle"
        listed.add_row(
            milliseconds(gap.start_ns - zero),
            milliseconds(gap.duration_ns),
            Text(what),
            Text(_label(gap.before)),
            Text(_label(gap.after)),
            gap.cause.value,
        )
    console.print(listed)
    if len(gaps) > arguments.top:
        rest = sum(gap.duration_ns for gap in gaps[arguments.top :])
        console.print(f"and {len(gaps) - arguments.top} more, together {milliseconds(rest)}")


def _label(span: Span | None) -> str:
    if span is None:
        return "-"
    place = "" if span.sub_batch is None else f" {span.sub_batch}"
    return f"{span.op}{place}" if span.stage in {"", span.op} or span.stage.isdecimal() else f"{span.stage}: {span.op}"


def _document(gap: Gap, zero: int) -> dict[str, Any]:
    return {
        "start_ns": gap.start_ns - zero,
        "end_ns": gap.end_ns - zero,
        "duration_ns": gap.duration_ns,
        "what": "exposed" if gap.exposed else "idle",
        "cause": gap.cause.value,
        "communication": _label(gap.communication),
        "before": _label(gap.before),
        "after": _label(gap.after),
    }
