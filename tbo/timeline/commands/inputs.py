"""What the subcommands that read traces share: their options, the progress bar, and how they print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from tbo.errors import UserError
from tbo.timeline.classify import Classifier, find_rules, make_classifier, read_rules
from tbo.timeline.events import ProgressHook
from tbo.timeline.kineto import Trace, load_trace
from tbo.timeline.metrics import Rules
from tbo.timeline.span import Timeline

LARGE_BYTES: Final = 3_000_000
"""Smaller files are read before a bar would be seen."""

PIPED_WIDTH: Final = 100


class OptionError(UserError):
    """An option that does not fit the trace."""


def add_classify_argument(parser: argparse.ArgumentParser) -> None:
    """How kernels are told apart."""
    parser.add_argument(
        "--classify",
        type=Path,
        default=None,
        metavar="FILE",
        help="TOML or JSON file of rules that say which kernels communicate, tried before the built-in ones"
        " (default: [tool.tbo.timeline] of the nearest pyproject.toml)",
    )


def add_rule_arguments(parser: argparse.ArgumentParser) -> None:
    """What counts as computation and what as communication."""
    add_classify_argument(parser)
    parser.add_argument(
        "--exclude-memory",
        action="store_true",
        help="copies and fills count as nothing instead of as computation (default: %(default)s)",
    )
    parser.add_argument(
        "--transfer-only",
        action="store_true",
        help="waiting for peers counts as nothing instead of as communication (default: %(default)s)",
    )
    parser.add_argument(
        "--by-lane",
        action="append",
        default=None,
        metavar="LANE",
        help="whatever runs on this lane (a stream's number will do) is communication, all else computation; may be"
        " repeated (default: kernels are told apart by name)",
    )


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Output for programs."""
    parser.add_argument("--json", action="store_true", help="print the figures as JSON (default: %(default)s)")


def classifier_of(options: argparse.Namespace) -> Classifier:
    """The built-in rules behind the user's.

    Raises:
        ClassifyError: these cannot be read or used.
    """
    return make_classifier(read_rules(options.classify) if options.classify else find_rules(Path.cwd()))


def read_trace(path: Path, options: argparse.Namespace) -> Trace:
    """Loads a file; a bar on the terminal shows how far it is if the file is large.

    Raises:
        TraceError: the file is missing, broken, or not a trace.
        ClassifyError: the rules cannot be read or used.
    """
    classifier = classifier_of(options)
    with _progress(path) as hook:
        return load_trace(path, classifier, hook)


def rules_of(options: argparse.Namespace, timeline: Timeline) -> Rules:
    """The counting rules that were asked for.

    Raises:
        OptionError: `--by-lane` names a lane the timeline does not have.
    """
    lanes = {lane.name for lane in timeline.lanes}
    named = [_find_lane(name, lanes) for name in options.by_lane or ()]
    return Rules(exclude_memory=options.exclude_memory, transfer_only=options.transfer_only, by_lane=frozenset(named))


def print_json(document: Any) -> None:
    """Prints a document for programs; no figure is ever NaN."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def make_console() -> Console:
    """Where people read: as wide as the terminal, or 100 columns in a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def milliseconds(nanoseconds: float) -> str:
    """Such as ``113.030``: microseconds are the last digit."""
    return f"{nanoseconds / 1e6:.3f}"


def share(part: float | None) -> str:
    """Such as ``96.33 %``; a dash where there is none."""
    return "-" if part is None else f"{100 * part:.2f} %"


def _find_lane(name: str, lanes: set[str]) -> str:
    for candidate in (name, f"stream {name}"):
        if candidate in lanes:
            return candidate
    raise OptionError(f"--by-lane {name}: there is no such lane", remedy=f"Lanes are {', '.join(sorted(lanes))}.")


@contextmanager
def _progress(path: Path) -> Iterator[ProgressHook | None]:
    if not sys.stderr.isatty() or not path.is_file() or path.stat().st_size < LARGE_BYTES:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"reading {path.name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
