"""`tbo timeline diff`: what changed between two runs, op by op."""

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
    share,
)
from tbo.timeline.diff import Change, compare, describe_key
from tbo.timeline.metrics import Metrics, measure
from tbo.timeline.stats import metrics_report

NAME = "diff"
SUMMARY = "what changed between two runs, op by op"
DESCRIPTION = """\
Aligns two traces by stage, layer, sub-batch and op, and lists what differs, largest change first. Contention is an op's
mean duration beside communication divided by its mean duration alone, where one trace has it alone and the other
overlapped. Exit code: 0, also where they differ; 2 if a file cannot be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("before", type=Path, metavar="A", help="the trace compared with, .json or .json.gz")
    parser.add_argument("after", type=Path, metavar="B", help="the trace that is compared, .json or .json.gz")
    parser.add_argument(
        "--min-us", type=float, default=0.0, metavar="X", help="leave out smaller changes (default: %(default)s)"
    )
    parser.add_argument(
        "--top", type=int, default=20, metavar="N", help="list at most this many (default: %(default)s)"
    )
    add_rule_arguments(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Reads both, compares, prints."""
    before = read_trace(arguments.before, arguments).timeline
    after = read_trace(arguments.after, arguments).timeline
    if before.ranks != after.ranks:
        raise OptionError(
            f"{arguments.before} holds ranks {list(before.ranks)} and {arguments.after} holds {list(after.ranks)}",
            remedy="Compare traces of the same ranks.",
        )
    console = make_console()
    documents = []
    for rank in before.ranks:
        figures = [measure(timeline, rank=rank, rules=rules_of(arguments, timeline)) for timeline in (before, after)]
        every = compare(before, after, rank=rank, rules=rules_of(arguments, before))
        changes = [c for c in every if c.is_change and abs(c.delta_ns) >= arguments.min_us * 1000]
        if arguments.json:
            documents.append(_document(rank, figures, changes[: arguments.top], len(changes)))
        else:
            _print(console, rank, figures, changes, arguments.top)
    if arguments.json:
        print_json({"before": str(arguments.before), "after": str(arguments.after), "ranks": documents})
    return 0


def _print(console: Console, rank: int, figures: list[Metrics], changes: list[Change], top: int) -> None:
    first, second = figures
    console.print(Text(f"rank {rank}: milliseconds", style="bold"))
    summary = Table(box=None, pad_edge=False, header_style="bold")
    summary.add_column("")
    for heading in ("A", "B", "change"):
        summary.add_column(heading, justify="right")
    for label, a, b in (
        ("window", first.window_ns, second.window_ns),
        ("computation", first.compute_ns, second.compute_ns),
        ("communication", first.communication_ns, second.communication_ns),
        ("exposed", first.exposed_ns, second.exposed_ns),
        ("idle", first.idle_ns, second.idle_ns),
    ):
        summary.add_row(label, milliseconds(a), milliseconds(b), _signed(b - a))
    summary.add_row("overlap ratio", share(first.overlap_ratio), share(second.overlap_ratio), "")
    console.print(summary)
    if not changes:
        console.print("No op differs.")
        return
    listed = Table(box=None, pad_edge=False, header_style="bold")
    listed.add_column("op", overflow="fold")
    for heading in ("n A", "n B", "sum A", "sum B", "change", "", "contention"):
        listed.add_column(heading, justify="right", no_wrap=True)
    for change in changes[:top]:
        listed.add_row(
            Text(describe_key(change.key)),
            str(change.before.count),
            str(change.after.count),
            milliseconds(change.before.total_ns),
            milliseconds(change.after.total_ns),
            _signed(change.delta_ns),
            f"{100 * change.delta_ns / change.before.total_ns:+.1f} %" if change.before.total_ns else "new",
            "" if change.contention is None else f"{change.contention:.2f}",
        )
    console.print(listed)
    if len(changes) > top:
        console.print(f"and {len(changes) - top} more")


def _signed(nanoseconds: int) -> str:
    return "0" if nanoseconds == 0 else f"{nanoseconds / 1e6:+.3f}"


def _document(rank: int, figures: list[Metrics], changes: list[Change], count: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "metrics": {"before": metrics_report(figures[0]), "after": metrics_report(figures[1])},
        "all": count,
        "changes": [
            {
                **dict(zip(("stage", "layer", "sub_batch", "op"), change.key, strict=True)),
                "count_before": change.before.count,
                "count_after": change.after.count,
                "total_before_ns": change.before.total_ns,
                "total_after_ns": change.after.total_ns,
                "delta_ns": change.delta_ns,
                "contention": change.contention,
            }
            for change in changes
        ],
    }
