"""`tbo timeline check`: fails where a trace does not keep its limits."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from tbo.timeline.check import Limits, judge
from tbo.timeline.commands.inputs import add_json_argument, add_rule_arguments, print_json, read_trace, rules_of
from tbo.timeline.stats import measure_ranks, no_communication

NAME = "check"
SUMMARY = "fail where a trace does not keep its limits, for continuous integration"
DESCRIPTION = """\
Measures a trace and holds it against limits, every rank against all of them. Exit code: 0 if all are kept; 1 if one is
not; 2 if the file cannot be read or some rank holds no communication.
"""

EXIT_BROKEN = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a trace, .json or .json.gz")
    for option, what in (
        ("--min-overlap", "least share of communication that runs beside computation, 0 to 1"),
        ("--max-exposed-us", "most exposed communication, in microseconds"),
        ("--max-idle", "largest share of the window in which nothing runs, 0 to 1"),
        ("--max-bubble", "largest share of the window in which nothing is computed, 0 to 1"),
    ):
        parser.add_argument(option, type=float, default=None, metavar="X", help=f"{what} (default: no limit)")
    add_rule_arguments(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Reads, measures, judges."""
    limits = Limits(
        min_overlap=arguments.min_overlap,
        max_exposed_us=arguments.max_exposed_us,
        max_idle=arguments.max_idle,
        max_bubble=arguments.max_bubble,
    )
    timeline = read_trace(arguments.file, arguments).timeline
    measured = measure_ranks(timeline, rules_of(arguments, timeline))
    if any(metrics.overlap_ratio is None for metrics in measured):
        raise no_communication(timeline)
    verdicts = [verdict for metrics in measured for verdict in judge(metrics, limits)]
    if arguments.json:
        print_json(
            {
                "file": str(arguments.file),
                "checks": [{**asdict(verdict), "holds": verdict.holds} for verdict in verdicts],
            }
        )
    else:
        sys.stdout.write("".join(f"{verdict}\n" for verdict in verdicts))
    return 0 if all(verdict.holds for verdict in verdicts) else EXIT_BROKEN
