"""The events of a Chrome or Kineto JSON trace, one after another, without holding the file in memory.

Plain or gzipped (told by the first bytes, not by the name); an object with `traceEvents`, or a bare array of events.
Numbers with a fraction arrive as `Decimal`: a double cannot hold an epoch in microseconds to the nanosecond.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, cast

from tbo.errors import MissingPackageError, UserError

Event: TypeAlias = dict[str, Any]
ProgressHook: TypeAlias = Callable[[int, int], None]
"""Called with the bytes of the file read so far and its size."""

CHUNK_BYTES: Final = 1 << 18
HEAD_BYTES: Final = 1 << 20
WITHOUT_IJSON_BYTES: Final = 50_000_000
BROKEN_REMEDY: Final = "Export the trace again, and wait until the program that writes it has closed the file."
KIND_REMEDY: Final = "Give a trace that torch.profiler's export_chrome_trace wrote, as .json or .json.gz."


class TraceError(UserError):
    """A trace file that is missing, broken, or not a trace."""


class _Bytes(Protocol):
    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes; none at the end."""
        ...


@dataclass(slots=True)
class _Tap:
    """Lets bytes through and keeps the first and the last of them: the header stands around the events."""

    source: _Bytes
    raw: _Bytes
    size: int
    progress: ProgressHook | None
    head: bytearray = field(default_factory=bytearray)
    tail: bytes = b""

    def read(self, size: int = CHUNK_BYTES) -> bytes:
        chunk = self.source.read(size)
        if chunk:
            if len(self.head) < HEAD_BYTES:
                self.head += chunk
            self.tail = (self.tail + chunk)[-CHUNK_BYTES:]
        if self.progress is not None:
            self.progress(cast("Any", self.raw).tell(), self.size)
        return chunk


@dataclass(slots=True)
class EventStream:
    """The events of one file; `header` holds the other top-level entries once all events were read.

    Attributes:
        path: the file.
        progress: told how far reading has come.
        header: such as `baseTimeNanoseconds` and `distributedInfo`; complete after the last event.

    Raises:
        TraceError: while reading: the file is missing, cut short, broken, or not a trace.
        MissingPackageError: the file is large and the package ijson is not installed.
    """

    path: Path
    progress: ProgressHook | None = None
    header: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Event]:
        count = 0
        try:
            with self.path.open("rb") as raw:
                for event in self._read(raw):
                    if isinstance(event, dict):
                        count += 1
                        yield event
        except OSError as error:
            raise self._unreadable(error) from error
        except (EOFError, zlib.error) as error:
            raise TraceError(f"{self.path} is cut short or damaged: {error}", remedy=BROKEN_REMEDY) from error
        except ValueError as error:  # of json and of ijson, and text that is not UTF-8
            reason = str(error).splitlines()[0]
            raise TraceError(f"{self.path} is not whole or not JSON: {reason}", remedy=BROKEN_REMEDY) from error
        if count == 0:
            raise TraceError(f"{self.path} holds no trace events", remedy=KIND_REMEDY)

    def _read(self, raw: Any) -> Iterator[Any]:
        magic = raw.read(2)
        raw.seek(0)
        source = gzip.GzipFile(fileobj=raw) if magic == b"\x1f\x8b" else raw
        first = source.read(CHUNK_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        source.seek(0)
        if first not in (b"{", b"["):
            what = "is empty" if not first else "is not a trace"
            raise TraceError(f"{self.path} {what}", remedy=KIND_REMEDY)
        tap = _Tap(source, raw, os.fstat(raw.fileno()).st_size, self.progress)
        try:
            import ijson
        except ImportError as error:
            yield from self._read_whole(tap, error)
            return
        try:
            yield from ijson.items(tap, "item" if first == b"[" else "traceEvents.item", buf_size=CHUNK_BYTES)
        except ijson.JSONError as error:
            raise ValueError(str(error)) from error
        if first == b"{":
            self.header = _header(bytes(tap.head), tap.tail)

    def _read_whole(self, tap: _Tap, missing: ImportError) -> Iterator[Any]:
        content = bytearray()
        while chunk := tap.read():
            content += chunk
            if len(content) > WITHOUT_IJSON_BYTES:
                raise MissingPackageError(
                    f"{self.path} is too large to be read at once, and the package ijson is not installed",
                    remedy="Run: pip install 'two-batch-overlap[timeline]'",
                ) from missing
        document = json.loads(content, parse_float=Decimal)
        if isinstance(document, list):
            yield from document
            return
        events = document.pop("traceEvents", [])
        self.header = document
        yield from events if isinstance(events, list) else []

    def _unreadable(self, error: OSError) -> TraceError:
        if isinstance(error, gzip.BadGzipFile):
            return TraceError(f"{self.path} is cut short or damaged: {error}", remedy=BROKEN_REMEDY)
        return TraceError(
            f"{self.path} cannot be read: {(error.strerror or str(error)).lower()}", remedy="Name an existing file."
        )


def _header(head: bytes, tail: bytes) -> dict[str, Any]:
    """The top-level entries before and after the array of events, read off the text around it."""
    return {**_entries_before(head), **_entries_after(tail)}


def _entries_before(head: bytes) -> dict[str, Any]:
    at = head.find(b'"traceEvents"')
    while at >= 0:
        entries = _parse_object(head[:at].rstrip().rstrip(b",") + b"}")
        if entries is not None:
            return entries
        at = head.find(b'"traceEvents"', at + 1)
    return {}


def _entries_after(tail: bytes) -> dict[str, Any]:
    """Text after a `]` closes only what is open there: of those suffixes that are whole, the longest is the header."""
    entries: dict[str, Any] = {}
    at = tail.rfind(b"]")
    for _ in range(1000):
        if at < 0:
            break
        rest = tail[at + 1 :].lstrip()
        found = _parse_object(b"{" + rest.lstrip(b","))
        if found is not None and "traceEvents" not in found:
            entries = found
        at = tail.rfind(b"]", 0, at)
    return entries


def _parse_object(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
