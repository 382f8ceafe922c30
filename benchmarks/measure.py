"""What the benchmarks share: medians with their spread, a word on the machine, a table or JSON."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Repeated measurements of one thing.

    Attributes:
        median: the middle one.
        quarter: a quarter of them are smaller.
        three_quarters: a quarter of them are larger.
        smallest: of all.
        largest: of all.
        repeats: how many.
    """

    median: float
    quarter: float
    three_quarters: float
    smallest: float
    largest: float
    repeats: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """The spread of one or more samples."""
        ordered = sorted(samples)
        low, median, high = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
        return cls(
            median=median,
            quarter=low,
            three_quarters=high,
            smallest=ordered[0],
            largest=ordered[-1],
            repeats=len(ordered),
        )

    def text(self, digits: int, *, scale: float = 1.0) -> str:
        """``1.234 (1.200 to 1.300)``: the median and the middle half."""
        median, low, high = (scale * value for value in (self.median, self.quarter, self.three_quarters))
        return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def interleaved(subjects: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measures all subjects in turn, `repeats` times, so that a slow moment of the machine falls on all of them."""
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(repeats):
        for name, measure in subjects.items():
            samples[name].append(measure())
    return samples


def machine() -> dict[str, Any]:
    """Processor, cores, Python, and how busy the machine was."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def show(table: Table, notes: Sequence[str]) -> None:
    """Prints a table with notes under it; into a file or pipe as wide as its columns need."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)


def print_json(rows: Sequence[Any], **more: Any) -> None:
    """Prints dataclass rows, the machine and whatever else as one JSON object."""
    print(json.dumps({"machine": machine(), **more, "rows": [asdict(row) for row in rows]}, indent=2))


@contextmanager
def no_collector() -> Iterator[None]:
    """Keeps the garbage collector out of a measurement, as `timeit` does."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
