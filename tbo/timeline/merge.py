"""Traces of several ranks on one clock.

Each rank's times come from its own clock. What ranks share is a barrier: none ends before the last rank has entered
it. Each barrier therefore bounds the shift between two clocks from both sides, and its ends, which lie close together,
estimate it. Where ranks share no barriers but their times are since 1970, their clocks are trusted as they are.
Otherwise nothing can be said, and merging is refused: a wrong shift looks like a finding.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from tbo.errors import UserError
from tbo.timeline.kineto import Trace
from tbo.timeline.span import Edge, Kind, Span, Timeline, make_timeline

ROUNDING_NS: Final = 2_000
"""Two times of a trace in whole microseconds differ from the truth by this at most, together."""

RANK_IN_NAME: Final = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)


class MergeError(UserError):
    """Traces that cannot be put on one clock, or under one numbering of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """What is added to a rank's times.

    Attributes:
        nanoseconds: the shift.
        uncertainty_ns: how far it may be off; None where clocks are trusted and nothing tells.
    """

    nanoseconds: int
    uncertainty_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """How far ranks stand apart at shared barriers, in nanoseconds.

    Attributes:
        barriers: how many every rank took part in.
        arrival_ns: largest spread of the barriers' starts: how long the first rank waits for the last.
        end_ns: largest spread of their ends: what alignment leaves over.
    """

    barriers: int
    arrival_ns: int
    end_ns: int


def merge(traces: Sequence[Trace], align: Literal["auto", "barrier", "clock"] = "auto") -> Timeline:
    """One timeline of several traces; the clock of the first is kept.

    Args:
        traces: each of other ranks.
        align: on barriers, on clocks since 1970, or (auto) on barriers where all ranks share some, else on clocks.

    Raises:
        MergeError: two traces claim one rank, or nothing ties their clocks together.
    """
    if not traces:
        raise MergeError("there is nothing to merge", remedy="Name one trace for each rank.")
    ranked = [_with_rank(trace, position) for position, trace in enumerate(_in_rank_order(traces))]
    _refuse_double_ranks(ranked)
    shifts = [Shift(nanoseconds=0, uncertainty_ns=0)]
    shifts += [_shift(ranked[0], trace, align) for trace in ranked[1:]]
    timeline = _join(ranked, shifts)
    if any(shift.uncertainty_ns is None for shift in shifts):
        note = "Ranks are aligned by their clocks: how far these differ is not known."
        timeline = replace(timeline, notes=(*timeline.notes, note))
    return timeline


def skew(timeline: Timeline) -> Skew | None:
    """The spread at barriers that all ranks took part in; None for one rank, or where their barriers do not match."""
    barriers = [_barriers(timeline, rank) for rank in timeline.ranks]
    names = [[span.op for span in each] for each in barriers]
    if len(barriers) < 2 or not names[0] or any(other != names[0] for other in names):
        return None
    together = list(zip(*barriers, strict=True))
    return Skew(
        barriers=len(together),
        arrival_ns=max(_spread([span.start_ns for span in spans]) for spans in together),
        end_ns=max(_spread([span.end_ns for span in spans]) for spans in together),
    )


def _in_rank_order(traces: Sequence[Trace]) -> list[Trace]:
    known = [_known_rank(trace) for trace in traces]
    if any(rank is None for rank in known):
        return list(traces)
    return [trace for _, trace in sorted(zip(known, traces, strict=True), key=lambda pair: pair[0] or 0)]


def _known_rank(trace: Trace) -> int | None:
    if trace.declared_rank is not None:
        return trace.declared_rank
    match = RANK_IN_NAME.search(trace.path.name)
    return int(match.group(1)) if match else None


def _with_rank(trace: Trace, position: int) -> Trace:
    if len(trace.timeline.ranks) != 1:
        return trace
    known = _known_rank(trace)
    rank = position if known is None else known
    timeline = replace(
        trace.timeline,
        spans=tuple(replace(span, rank=rank) for span in trace.timeline.spans),
        lanes=tuple(replace(lane, rank=rank) for lane in trace.timeline.lanes),
    )
    return replace(trace, timeline=timeline)


def _refuse_double_ranks(traces: Sequence[Trace]) -> None:
    holders: dict[int, Trace] = {}
    for trace in traces:
        for rank in trace.timeline.ranks:
            if rank in holders:
                raise MergeError(
                    f"{holders[rank].path} and {trace.path} both are of rank {rank}",
                    remedy="Give one trace for each rank, or put the rank into the files' names, as in rank3.json.",
                )
            holders[rank] = trace


def _shift(reference: Trace, trace: Trace, align: str) -> Shift:
    by_barrier = _shift_by_barriers(reference, trace) if align != "clock" else None
    if by_barrier is not None:
        return by_barrier
    if align != "barrier" and reference.wall_clock and trace.wall_clock:
        return Shift(nanoseconds=0, uncertainty_ns=None)
    lacking = {
        "barrier": "they share no barrier",
        "clock": "their times are not both since 1970",
        "auto": "they share no barrier, and their times are not both since 1970",
    }
    raise MergeError(
        f"the clocks of {reference.path} and {trace.path} cannot be aligned: {lacking[align]}",
        remedy="Record a step that begins with a barrier on every rank, or keep baseTimeNanoseconds in the files.",
    )


def _shift_by_barriers(reference: Trace, trace: Trace) -> Shift | None:
    """The shift that fits all shared barriers; None if there are none or they contradict each other."""
    ours = _barriers(reference.timeline, reference.timeline.ranks[0])
    theirs = _barriers(trace.timeline, trace.timeline.ranks[0])
    if not ours or [span.op for span in ours] != [span.op for span in theirs]:
        return None
    pairs = list(zip(ours, theirs, strict=True))
    least = max(our.start_ns - their.end_ns for our, their in pairs)
    most = min(our.end_ns - their.start_ns for our, their in pairs)
    if least > most + ROUNDING_NS:
        return None
    estimates = [our.end_ns - their.end_ns for our, their in pairs]
    shift = round(statistics.median(estimates))
    if least <= most:
        shift = min(max(shift, least), most)
    if len(pairs) == 1:
        return Shift(nanoseconds=shift, uncertainty_ns=max(most - shift, shift - least, 0))
    return Shift(nanoseconds=shift, uncertainty_ns=max(abs(estimate - shift) for estimate in estimates))


def _barriers(timeline: Timeline, rank: int) -> list[Span]:
    spans = [span for span in timeline.of_rank(rank) if span.kind is Kind.NOTIFY]
    return sorted(spans, key=lambda span: (span.end_ns, span.start_ns))


def _join(traces: Sequence[Trace], shifts: Sequence[Shift]) -> Timeline:
    entries = [
        (_moved(span, shift.nanoseconds), source, index)
        for source, (trace, shift) in enumerate(zip(traces, shifts, strict=True))
        for index, span in enumerate(trace.timeline.spans)
    ]
    entries.sort(key=lambda entry: (entry[0].rank, entry[0].start_ns, entry[0].end_ns))
    places = {(source, index): place for place, (_, source, index) in enumerate(entries)}
    joined = make_timeline(
        (span for span, _, _ in entries),
        source=traces[0].timeline.source,
        lanes=sorted((lane for trace in traces for lane in trace.timeline.lanes), key=lambda lane: lane.rank),
        title=f"{len(traces)} traces from {traces[0].timeline.title}",
        notes=dict.fromkeys(note for trace in traces for note in trace.timeline.notes),
    )
    edges = tuple(
        Edge(before=places[source, edge.before], after=places[source, edge.after])
        for source, trace in enumerate(traces)
        for edge in trace.timeline.edges
    )
    return replace(
        joined,
        edges=edges,
        rule_counts=_sum_counts([dict(trace.timeline.rule_counts) for trace in traces]),
        unclassified=tuple(_sum_counts([dict(trace.timeline.unclassified) for trace in traces]).items()),
        shifts={
            rank: (shift.nanoseconds, shift.uncertainty_ns)
            for trace, shift in zip(traces, shifts, strict=True)
            for rank in trace.timeline.ranks
        },
    )


def _moved(span: Span, shift_ns: int) -> Span:
    return replace(span, start_ns=span.start_ns + shift_ns, end_ns=span.end_ns + shift_ns) if shift_ns else span


def _sum_counts(tables: Sequence[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for table in tables:
        for name, count in table.items():
            total[name] = total.get(name, 0) + count
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _spread(values: Sequence[int]) -> int:
    return max(values) - min(values)
