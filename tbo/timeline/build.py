"""A timeline of what was collected from a trace: ranks, lanes, stages, kinds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tbo.timeline.classify import Classifier
from tbo.timeline.collect import Collector, Device, DeviceEvent, natural_key
from tbo.timeline.events import TraceError
from tbo.timeline.intervals import length
from tbo.timeline.metrics import covered
from tbo.timeline.names import Range, innermost, parse_place, qualified, short
from tbo.timeline.span import Kind, Lane, Span, Timeline, make_timeline


@dataclass(slots=True)
class Builder:
    """Makes a timeline.

    Attributes:
        collected: the events.
        classifier: decides kinds, and counts.
        base_ns: added to every time.
        rank: of a file with one device.
        header: the file's other entries.
    """

    collected: Collector
    classifier: Classifier
    base_ns: int
    rank: int
    header: Mapping[str, Any]

    def build(self) -> tuple[Timeline, tuple[int | None, ...]]:
        """The timeline, and when each of its spans was launched.

        Raises:
            TraceError: nothing ran on a device.
        """
        events = self.collected.events
        if not events:
            raise TraceError(
                f"{self.collected.path} holds no kernel, copy or fill of a device",
                remedy="Profile with ProfilerActivity.CUDA among the activities.",
            )
        ranks = self._ranks()
        launches = self._launch_times()
        ranges = self._ranges(launches)
        spans = [self._span(event, ranks, range_) for event, range_ in zip(events, ranges, strict=True)]
        order = sorted(range(len(spans)), key=lambda i: (spans[i].rank, spans[i].start_ns, spans[i].end_ns))
        timeline = make_timeline(
            (spans[i] for i in order),
            source="kineto",
            lanes=self._lanes(spans),
            title=self.collected.path.name,
            notes=self._notes(ranks, launches),
        )
        timeline = replace(
            timeline,
            rule_counts=dict(self.classifier.counts.most_common()),
            unclassified=self._unclassified(timeline),
        )
        moved = (launches[i] for i in order)
        return timeline, tuple(None if time is None else time + self.base_ns for time in moved)

    def _ranks(self) -> dict[Device, int]:
        devices = {event.stream[0] for event in self.collected.events}
        if len(devices) == 1:
            return dict.fromkeys(devices, self.rank)
        ordered = sorted(devices, key=lambda device: natural_key(" ".join(device)))
        return {device: rank for rank, device in enumerate(ordered)}

    def _launch_times(self) -> list[int | None]:
        wanted: defaultdict[str, set[int]] = defaultdict(set)
        for event in self.collected.events:
            wanted[event.stream[0][0]].add(event.correlation)
        times: dict[tuple[str, int], int] = {}
        for group, launches in self.collected.launches.items():
            for correlation, time in zip(launches.correlations, launches.times, strict=True):
                if correlation in wanted[group]:
                    times.setdefault((group, correlation), time)
        return [times.get((event.stream[0][0], event.correlation)) for event in self.collected.events]

    def _ranges(self, launches: Sequence[int | None]) -> list[Range | None]:
        """Where each event belongs: a range of ours on its stream, the range of its launch, any range on its stream."""
        events = self.collected.events
        found = _by_group(
            ((event.stream[0][0], time) for event, time in zip(events, launches, strict=True)),
            self.collected.host_ranges,
        )
        streamed = _by_group(((event.stream, event.start) for event in events), self.collected.device_ranges)
        return [
            on_stream if on_stream is not None and (at_launch is None or parse_place(on_stream.name)) else at_launch
            for at_launch, on_stream in zip(found, streamed, strict=True)
        ]

    def _span(self, event: DeviceEvent, ranks: Mapping[Device, int], range_: Range | None) -> Span:
        device, lane = event.stream
        kind = self.classifier.classify(event.name, lane, is_memory=event.is_memory)
        place = parse_place(range_.name) if range_ is not None else None
        label = event.name.split("(")[0].strip() if event.is_memory else short(event.name)
        start = self.base_ns + event.start
        return Span(
            op=place.op if place else label,
            lane=lane,
            kind=kind,
            start_ns=start,
            end_ns=start + event.duration,
            stage=place.op if place else range_.name if range_ else "",
            layer=place.layer if place else None,
            sub_batch=place.sub_batch if place else None,
            rank=ranks[device],
            name=event.name,
        )

    def _lanes(self, spans: Sequence[Span]) -> list[Lane]:
        """Streams in order, each with the multiprocessors its transfers occupy where that is fewer than all."""
        multiprocessors = _multiprocessors(self.header)
        blocks: Counter[tuple[int, str]] = Counter()
        for span, event in zip(spans, self.collected.events, strict=True):
            lane = (span.rank, span.lane)
            blocks[lane] = max(blocks[lane], event.blocks if span.kind is Kind.TRANSFER else 0)
        return [
            Lane(name=name, rank=rank, label=f"{taken} SMs" if 0 < taken < multiprocessors else "")
            for (rank, name), taken in sorted(blocks.items(), key=lambda item: (item[0][0], natural_key(item[0][1])))
        ]

    def _notes(self, ranks: Mapping[Device, int], launches: Sequence[int | None]) -> list[str]:
        notes = []
        if len(ranks) > 1:
            named = ", ".join(f"{' '.join(device).strip()} is rank {rank}" for device, rank in ranks.items())
            notes.append(f"The file holds {len(ranks)} devices: {named}.")
        if self.collected.skipped:
            notes.append(f"Events that end before they start were left out: {self.collected.skipped}.")
        if all(time is None for time in launches):
            notes.append("The file has no launches, so stages are known only where the device's own ranges tell them.")
        return notes

    def _unclassified(self, timeline: Timeline) -> tuple[tuple[str, int], ...]:
        """Kernels no rule took beside each rank's busiest lane: where communication we do not know would run."""
        names: Counter[str] = Counter()
        for rank in timeline.ranks:
            lanes: defaultdict[str, list[Span]] = defaultdict(list)
            for span in timeline.of_rank(rank):
                lanes[span.lane].append(span)
            busiest = max(lanes, key=lambda lane: length(covered(lanes[lane])))
            for lane, spans in lanes.items():
                if lane != busiest:
                    names.update(s.name for s in spans if self._is_unclassified(s))
        totals: Counter[str] = Counter()
        for name, count in names.items():
            totals[qualified(name)] += count
        return tuple(totals.most_common())

    def _is_unclassified(self, span: Span) -> bool:
        return span.kind is Kind.COMPUTE and self.classifier.is_unclassified(span.name, span.lane)


def _by_group(
    keyed_times: Iterable[tuple[Any, int | None]], ranges: Mapping[Any, Sequence[Range]]
) -> list[Range | None]:
    """For each key and time, the innermost of that key's ranges at that time."""
    pairs = list(keyed_times)
    positions: defaultdict[Any, list[tuple[int, int]]] = defaultdict(list)
    for position, (key, time) in enumerate(pairs):
        if time is not None and key in ranges:
            positions[key].append((time, position))
    found: list[Range | None] = [None] * len(pairs)
    for key, entries in positions.items():
        entries.sort()
        for (_, position), range_ in zip(entries, innermost(ranges[key], [time for time, _ in entries]), strict=True):
            found[position] = range_
    return found


def _multiprocessors(header: Mapping[str, Any]) -> int:
    devices = header.get("deviceProperties")
    sizes = (
        [device.get("numSms") for device in devices if isinstance(device, dict)] if isinstance(devices, list) else []
    )
    return min((size for size in sizes if isinstance(size, int)), default=0)
