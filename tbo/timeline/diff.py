"""Two timelines compared op by op: what became slower, and what running beside communication cost it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from tbo.timeline.intervals import Interval, intersection, length, union
from tbo.timeline.metrics import Rules, covered
from tbo.timeline.span import Span, Timeline

Key: TypeAlias = tuple[str, int | None, int | None, str]
"""Stage, layer, sub-batch and op."""

ALONE: Final = 0.1
OVERLAPPED: Final = 0.5
"""Shares of an op's time beside the other kind of work, up to and from which it counts as alone or overlapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One op in one of the timelines: how often, how long in all, and the share of it beside the other kind."""

    count: int
    total_ns: int
    overlapped: float

    @property
    def mean_ns(self) -> float:
        """Mean duration, 0 where the op did not run."""
        return self.total_ns / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One op in both timelines.

    Attributes:
        key: stage, layer, sub-batch and op.
        before, after: in the first and in the second.
    """

    key: Key
    before: Side
    after: Side

    @property
    def delta_ns(self) -> int:
        """Time gained (negative) or lost in all."""
        return self.after.total_ns - self.before.total_ns

    @property
    def is_change(self) -> bool:
        """Whether anything but the overlap differs."""
        return (self.before.count, self.before.total_ns) != (self.after.count, self.after.total_ns)

    @property
    def contention(self) -> float | None:
        """Mean duration overlapped / alone; None unless one timeline has the op alone, the other overlapped."""
        for alone, overlapped in ((self.before, self.after), (self.after, self.before)):
            if alone.mean_ns and alone.overlapped <= ALONE and overlapped.overlapped >= OVERLAPPED:
                return overlapped.mean_ns / alone.mean_ns
        return None


def compare(before: Timeline, after: Timeline, *, rank: int = 0, rules: Rules | None = None) -> tuple[Change, ...]:
    """Every op of either timeline, largest change first, then in order of first appearance."""
    rules = rules or Rules()
    first, second = _sides(before.of_rank(rank), rules), _sides(after.of_rank(rank), rules)
    nothing = Side(count=0, total_ns=0, overlapped=0.0)
    changes = [
        Change(key=key, before=first.get(key, nothing), after=second.get(key, nothing))
        for key in dict.fromkeys((*first, *second))
    ]
    return tuple(sorted(changes, key=lambda change: -abs(change.delta_ns)))


def _sides(spans: Sequence[Span], rules: Rules) -> dict[Key, Side]:
    computing = covered(span for span in spans if rules.is_compute(span))
    communicating = covered(span for span in spans if rules.is_communication(span))
    groups: dict[Key, list[Span]] = {}
    for span in spans:
        if rules.is_compute(span) or rules.is_communication(span):
            groups.setdefault((span.stage, span.layer, span.sub_batch, span.op), []).append(span)
    return {
        key: _side(group, communicating if rules.is_compute(group[0]) else computing) for key, group in groups.items()
    }


def _side(spans: Sequence[Span], others: Sequence[Interval]) -> Side:
    own = union((span.start_ns, span.end_ns) for span in spans)
    busy = length(own)
    return Side(
        count=len(spans),
        total_ns=sum(span.duration_ns for span in spans),
        overlapped=length(intersection(own, others)) / busy if busy else 0.0,
    )


def describe_key(key: Key) -> str:
    """A key for people: ``stage op, layer 3, sub-batch 1``."""
    stage, layer, sub_batch, op = key
    words: Iterable[str] = dict.fromkeys(word for word in (stage, op) if word)
    places = [f"layer {layer}"] if layer is not None else []
    places += [f"sub-batch {sub_batch}"] if sub_batch is not None else []
    return ", ".join([" ".join(words), *places])
