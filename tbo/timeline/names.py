"""Names in traces: kernels shortened to what people call them, and ranges that say where a kernel belongs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

IGNORED_RANGE: Final = re.compile(r"^(?:ProfilerStep#|nccl:|gloo:)")
"""Ranges that libraries open: the profiler around a step, and backends around a collective inside a user's stage."""

_OUR_RANGE: Final = re.compile(r"^tbo::([^/]*)/([^/]*)/(.+)$")
_TEMPLATE: Final = re.compile(r"<[^<>]*>")
_MANGLED: Final = re.compile(r"^_ZN?K?")
_LENGTH: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Range:
    """A named stretch of time, ``[start, end)``."""

    start: int
    end: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in a model work belongs, as ``tbo::<sub_batch>/<layer>/<op>`` says."""

    sub_batch: int | None
    layer: int | None
    op: str


def parse_place(name: str) -> Place | None:
    """What a range of ours says; None for any other range. A part that is no number is unknown.

    Example:
        >>> parse_place("tbo::1/3/op_gate")
        Place(sub_batch=1, layer=3, op='op_gate')
    """
    match = _OUR_RANGE.match(name)
    if match is None:
        return None
    sub_batch, layer, op = match.groups()
    return Place(sub_batch=_number(sub_batch), layer=_number(layer), op=op)


def qualified(kernel: str) -> str:
    """A kernel's name with its namespaces, without result type, template arguments and parameters.

    Example:
        >>> qualified("void deep_ep::intranode::dispatch<8, 768>(int4*, float*)")
        'deep_ep::intranode::dispatch'
    """
    if _MANGLED.match(kernel):
        return _demangle(kernel) or kernel
    text = kernel.replace("(anonymous namespace)::", "")
    while (shorter := _TEMPLATE.sub("", text)) != text:
        text = shorter
    words = re.split(r"[<(]", text, maxsplit=1)[0].split()
    return words[-1] if words else kernel


def short(kernel: str) -> str:
    """The last part of a kernel's qualified name.

    Example:
        >>> short("void deep_ep::intranode::dispatch<8, 768>(int4*, float*)")
        'dispatch'
    """
    return qualified(kernel).rsplit("::", 1)[-1] or kernel


def innermost(ranges: Iterable[Range], times: Sequence[int]) -> list[Range | None]:
    """For each of the sorted times, the range holding it that began last; of those, the one that ends first."""
    waiting = sorted(ranges, key=lambda each: (each.start, -each.end))
    open_ranges: list[Range] = []
    found: list[Range | None] = []
    begun = 0
    for time in times:
        while begun < len(waiting) and waiting[begun].start <= time:
            open_ranges.append(waiting[begun])
            begun += 1
        while open_ranges and open_ranges[-1].end <= time:
            open_ranges.pop()
        found.append(open_ranges[-1] if open_ranges else None)
    return found


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _demangle(kernel: str) -> str:
    """Only the nested names that follow each other with their lengths: enough to recognise a kernel."""
    match = _MANGLED.match(kernel)
    at = match.end() if match else 0
    parts = []
    while length := _LENGTH.match(kernel, at):
        at = length.end() + int(length.group())
        parts.append(kernel[length.end() : at])
    return "::".join(part for part in parts if not part.startswith("_GLOBAL__"))
