"""Traces that torch.profiler wrote, for any program, as timelines.

A stage is the innermost named range that was open, on any thread, when a kernel was launched: backward kernels are
launched from another thread than the one that opened the range, and a range's own length on the host says nothing
about the device. Files that `tbo timeline export` wrote are read back as they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tbo.timeline.build import Builder
from tbo.timeline.classify import Classifier, make_classifier
from tbo.timeline.collect import Collector
from tbo.timeline.events import EventStream, ProgressHook, TraceError
from tbo.timeline.own_trace import restore
from tbo.timeline.span import Timeline

EPOCH_NS: Final = 10**18
"""Times above are since 1970, a clock that ranks share. Smaller ones count from whenever the machine started."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A timeline, and what else its file knows.

    Attributes:
        timeline: of the ranks in the file.
        path: the file.
        launches: for each span, when the host launched it, in the same nanoseconds; None where that is unknown.
        declared_rank: which rank the file says it is from.
        wall_clock: times are since 1970, which ranks of one host share.
    """

    timeline: Timeline
    path: Path
    launches: tuple[int | None, ...]
    declared_rank: int | None
    wall_clock: bool


def load(path: Path | str, classifier: Classifier | None = None, progress: ProgressHook | None = None) -> Timeline:
    """The timeline of a trace file, in nanoseconds since 1970 where the file says so, else since the file's own zero.

    Args:
        path: Kineto or Chrome JSON, also gzipped.
        classifier: tells communication from computation; None: the built-in table.
        progress: called with the bytes read so far and the file's size.

    Raises:
        TraceError: the file is missing, cut short, broken, not a trace, or holds no work of a device.
        MissingPackageError: the file is large and the package ijson is not installed.
    """
    return load_trace(path, classifier, progress).timeline


def load_trace(path: Path | str, classifier: Classifier | None = None, progress: ProgressHook | None = None) -> Trace:
    """Like `load`, with launch times and what is needed to merge ranks."""
    path = Path(path)
    stream = EventStream(path, progress)
    collected = Collector(path=path)
    for event in stream:
        collected.take(event)
    base_ns = _whole(stream.header.get("baseTimeNanoseconds")) or 0
    information = stream.header.get("distributedInfo")
    declared = _whole(information.get("rank")) if isinstance(information, dict) else None
    launches: tuple[int | None, ...]
    if collected.own_spans:
        timeline = restore(collected, stream.header, base_ns)
        launches = (None,) * len(timeline.spans)
        declared = timeline.ranks[0] if len(timeline.ranks) == 1 else None
    else:
        builder = Builder(collected, (classifier or make_classifier()).fresh(), base_ns, declared or 0, stream.header)
        timeline, launches = builder.build()
    return Trace(
        timeline=timeline,
        path=path,
        launches=launches,
        declared_rank=declared,
        wall_clock=min(span.start_ns for span in timeline.spans) > EPOCH_NS,
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


__all__ = ["Trace", "TraceError", "load", "load_trace"]
