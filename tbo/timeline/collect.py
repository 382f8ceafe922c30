"""Of a trace's many events, those a timeline is made of: device work, its launches, named ranges and thread names."""

from __future__ import annotations

import re
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, TypeAlias

from tbo.timeline.events import Event, TraceError
from tbo.timeline.names import IGNORED_RANGE, Range

Device: TypeAlias = tuple[str, str]
"""Group and number of a device: merged files hold several programs, told apart by text before the number."""

Stream: TypeAlias = tuple[Device, str]

MEMORY_CATEGORIES: Final = frozenset({"gpu_memcpy", "gpu_memset", "Memcpy", "Memset"})
KERNEL_CATEGORIES: Final = frozenset({"kernel", "Kernel"})
LAUNCH_CATEGORIES: Final = frozenset(
    {"cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "privateuse1_runtime", "Runtime"}
)
OWN_PREFIX: Final = "tbo."
"""Before the kind, in the category of an event that `tbo timeline export` wrote."""

_NUMBERED: Final = re.compile(r"^(.*?)\s*(\d+)$", re.DOTALL)


@dataclass(slots=True)
class DeviceEvent:
    """A kernel, copy or fill: integer nanoseconds, in the file's own time."""

    start: int
    duration: int
    name: str
    stream: Stream
    is_memory: bool
    correlation: int
    blocks: int


@dataclass(slots=True)
class Launches:
    """Correlation numbers and when the host launched them: two columns, as a trace holds many that nothing needs."""

    correlations: array[int] = field(default_factory=lambda: array("q"))
    times: array[int] = field(default_factory=lambda: array("q"))


@dataclass(slots=True, kw_only=True)
class Collector:
    """Takes events one by one and keeps what matters.

    Attributes:
        path: the file, for messages.
        events: of devices.
        launches, host_ranges: by group.
        device_ranges: by stream.
        own_spans, own_edges, own_lanes: what `tbo timeline export` wrote.
        skipped: device events that end before they start.
        count: events taken, for messages.
    """

    path: Path
    events: list[DeviceEvent] = field(default_factory=list)
    launches: defaultdict[str, Launches] = field(default_factory=lambda: defaultdict(Launches))
    host_ranges: defaultdict[str, list[Range]] = field(default_factory=lambda: defaultdict(list))
    device_ranges: defaultdict[Stream, list[Range]] = field(default_factory=lambda: defaultdict(list))
    own_spans: list[tuple[int, int, Event]] = field(default_factory=list)
    own_edges: list[Event] = field(default_factory=list)
    own_lanes: list[Event] = field(default_factory=list)
    skipped: int = 0
    count: int = 0
    _devices: dict[object, Device] = field(default_factory=dict)
    _streams: dict[tuple[object, object], Stream] = field(default_factory=dict)
    _handlers: dict[str, Callable[[Event], None]] = field(init=False)

    def __post_init__(self) -> None:
        self._handlers = {
            **dict.fromkeys(KERNEL_CATEGORIES, self._take_device),
            **dict.fromkeys(MEMORY_CATEGORIES, self._take_memory),
            **dict.fromkeys(LAUNCH_CATEGORIES, self._take_launch),
            "user_annotation": self._take_host_range,
            "gpu_user_annotation": self._take_device_range,
        }

    def take(self, event: Event) -> None:
        """Keeps what a timeline needs of one event.

        Raises:
            TraceError: the event has no time, or its time or duration is no number.
        """
        self.count += 1
        phase = event.get("ph")
        if phase == "X":
            handler = self._handler(event.get("cat"))
            if handler is not None:
                handler(event)
        elif phase == "M" and "tbo" in _arguments(event):
            self.own_lanes.append(event)
        elif phase == "s" and event.get("cat") == OWN_PREFIX + "edge":
            self.own_edges.append(event)

    def _handler(self, category: object) -> Callable[[Event], None] | None:
        if not isinstance(category, str):
            return None
        handler = self._handlers.get(category)
        return self._take_own if handler is None and category.startswith(OWN_PREFIX) else handler

    def _take_device(self, event: Event, *, is_memory: bool = False) -> None:
        start, duration = self._times(event)
        if duration < 0:
            self.skipped += 1
            return
        arguments = _arguments(event)
        self.events.append(
            DeviceEvent(
                start=start,
                duration=duration,
                name=_text(event.get("name")),
                stream=self._stream(event),
                is_memory=is_memory,
                correlation=_integer(arguments.get("correlation")),
                blocks=_blocks(arguments.get("grid")),
            )
        )

    def _take_memory(self, event: Event) -> None:
        self._take_device(event, is_memory=True)

    def _take_launch(self, event: Event) -> None:
        correlation = _integer(_arguments(event).get("correlation"))
        if correlation > 0:
            launches = self.launches[self._device(event.get("pid"))[0]]
            launches.correlations.append(correlation)
            launches.times.append(self._nanoseconds(event.get("ts")))

    def _take_host_range(self, event: Event) -> None:
        if (made := self._range(event)) is not None:
            self.host_ranges[self._device(event.get("pid"))[0]].append(made)

    def _take_device_range(self, event: Event) -> None:
        if (made := self._range(event)) is not None:
            self.device_ranges[self._stream(event)].append(made)

    def _take_own(self, event: Event) -> None:
        start, duration = self._times(event)
        self.own_spans.append((start, start + duration, event))

    def _range(self, event: Event) -> Range | None:
        name = _text(event.get("name"))
        if IGNORED_RANGE.match(name):
            return None
        start, duration = self._times(event)
        return Range(start, start + max(duration, 0), name)

    def _times(self, event: Event) -> tuple[int, int]:
        return self._nanoseconds(event.get("ts")), self._nanoseconds(event.get("dur", 0))

    def _nanoseconds(self, value: object) -> int:
        if isinstance(value, int):
            return value * 1000
        if isinstance(value, Decimal) and value.is_finite():
            return int((value * 1000).to_integral_value())
        raise TraceError(
            f"event {self.count} of {self.path} has {value!r} where its time or duration should stand",
            remedy="Times are numbers of microseconds; export the trace again.",
        )

    def _device(self, pid: object) -> Device:
        known = self._devices.get(pid)
        if known is None:
            match = _NUMBERED.match(str(pid))
            known = self._devices[pid] = (match.group(1), match.group(2)) if match else (str(pid), "")
        return known

    def _stream(self, event: Event) -> Stream:
        key = (event.get("pid"), event.get("tid"))
        known = self._streams.get(key)
        if known is None:
            thread = str(key[1]).strip()
            name = f"stream {thread}" if thread.isdecimal() else thread
            known = self._streams[key] = (self._device(key[0]), name)
        return known


def natural_key(text: str) -> tuple[tuple[int, str], ...]:
    """Sorts `stream 7` before `stream 27`."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text) if part)


def _arguments(event: Event) -> dict[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _text(value: object) -> str:
    """Names repeat by the thousand: one copy of each."""
    return sys.intern(str(value))


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 0


def _blocks(grid: object) -> int:
    if not isinstance(grid, list) or not grid or not all(isinstance(size, int) for size in grid):
        return 0
    product = 1
    for size in grid:
        product *= size
    return product
