"""`tbo timeline export`: a timeline as a file for a viewer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tbo.timeline.chrome import ExportError, write_chrome
from tbo.timeline.commands.inputs import OptionError, add_classify_argument, read_trace
from tbo.timeline.merge import merge
from tbo.timeline.pftrace import write_pftrace
from tbo.timeline.span import Timeline

NAME = "export"
SUMMARY = "write a timeline for Perfetto or a browser; merge ranks"
DESCRIPTION = """\
Writes a trace's timeline as Chrome or Perfetto JSON (.json, .json.gz) or Perfetto's own format (.pftrace).
--merge puts traces of several ranks on one clock. Exit code: 0; 2 if a file cannot be read or written, or ranks cannot
be aligned.
"""

ALIGNMENTS: Final = ("auto", "barrier", "clock")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="traces, .json or .json.gz")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="OUT",
        help=f"the file to write: {', '.join(ENDINGS)} (default: none, it must be given)",
    )
    parser.add_argument("--merge", action="store_true", help="several files, one for each rank (default: %(default)s)")
    parser.add_argument(
        "--align",
        choices=ALIGNMENTS,
        default="auto",
        help="with --merge: by barriers that ranks share, by clocks since 1970, or by barriers if there are any"
        " (default: %(default)s)",
    )
    add_classify_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Reads, merges, writes."""
    write = _writer(arguments.output)
    if len(arguments.files) > 1 and not arguments.merge:
        raise OptionError(f"{len(arguments.files)} files are given without --merge", remedy="Add --merge, or give one.")
    if any(_same_file(path, arguments.output) for path in arguments.files):
        raise OptionError(f"{arguments.output} is read and would be overwritten", remedy="Give another name to -o.")
    traces = [read_trace(path, arguments) for path in arguments.files]
    timeline = merge(traces, arguments.align) if arguments.merge else traces[0].timeline
    write(timeline, arguments.output)
    sys.stdout.write(f"{arguments.output}: {len(timeline.spans)} spans, {len(timeline.ranks)} ranks\n")
    for rank, (shift, uncertainty) in timeline.shifts.items():
        doubt = "uncertainty not known" if uncertainty is None else f"+- {uncertainty / 1000:.3f} us"
        sys.stdout.write(f"rank {rank}: clock moved by {shift / 1000:.3f} us, {doubt}\n")
    return 0


def _writer(output: Path) -> Callable[[Timeline, Path], None]:
    for ending, writer in ENDINGS.items():
        if output.name.endswith(ending):
            return writer
    raise ExportError(f"{output} has no known ending", remedy=f"Known are {', '.join(ENDINGS)}.")


def _same_file(left: Path, right: Path) -> bool:
    return left.resolve() == right.resolve()


ENDINGS: Final[dict[str, Callable[[Timeline, Path], None]]] = {
    ".json": write_chrome,
    ".json.gz": write_chrome,
    ".pftrace": write_pftrace,
}
