"""Interval algebra and overlap figures: hand-worked numbers, and a bitmap that counts nanosecond by nanosecond."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tbo.timeline.intervals import Interval, difference, intersection, length, union
from tbo.timeline.metrics import Rules, measure, table
from tbo.timeline.span import Kind, Span, Timeline, make_timeline

C, T, N, F, M, H = Kind.COMPUTE, Kind.TRANSFER, Kind.NOTIFY, Kind.IN_FLIGHT, Kind.MEMORY, Kind.HOST

TWELVE: Sequence[tuple[str, Kind, int, int]] = (
    ("compute", C, 0, 10),
    ("compute", C, 10, 15),  # touches the one before
    ("compute", C, 12, 14),  # nested in it
    ("compute", C, 30, 40),
    ("compute", C, 30, 40),  # the same again
    ("compute", C, 50, 50),  # an instant
    ("copy", M, 60, 65),
    ("link", T, 5, 20),
    ("link", N, 20, 24),
    ("link", T, 35, 45),
    ("link", F, 62, 70),
    ("host", H, 0, 100),
)
"""Compute covers 0-15, 30-40, 60-65 (30 ns); communication 5-24, 35-45, 62-70 (37 ns); both 5-15, 35-40, 62-65."""


def timeline(spans: Sequence[tuple[str, Kind, int, int]]) -> Timeline:
    return make_timeline(
        [Span(op=f"{lane}-{kind}", lane=lane, kind=kind, start_ns=a, end_ns=b) for lane, kind, a, b in spans],
        source="test",
    )


def points(intervals: Sequence[Interval]) -> set[int]:
    return {point for start, end in intervals for point in range(start, end)}


def test_twelve_spans_by_hand() -> None:
    metrics = measure(timeline(TWELVE))
    assert (metrics.start_ns, metrics.end_ns, metrics.window_ns) == (0, 70, 70)
    assert (metrics.compute_ns, metrics.communication_ns) == (30, 37)
    assert (metrics.overlapped_ns, metrics.exposed_ns) == (18, 19)
    assert (metrics.compute_only_ns, metrics.idle_ns) == (12, 21)
    assert metrics.exposed_by_kind == {T: 10, N: 4, F: 5}
    assert metrics.overlap_ratio == pytest.approx(18 / 37)
    assert metrics.bubble == pytest.approx(40 / 70)
    assert metrics.ideal == pytest.approx(37 / 70)
    assert metrics.spans == 11


def test_other_rules_count_otherwise() -> None:
    spans = timeline(TWELVE)
    assert measure(spans, rules=Rules(exclude_memory=True)).compute_ns == 25
    assert measure(spans, rules=Rules(transfer_only=True)).communication_ns == 33
    by_lane = measure(spans, rules=Rules(by_lane=frozenset({"link", "copy"})))
    assert (by_lane.compute_ns, by_lane.communication_ns) == (25, 39)
    assert sum(by_lane.exposed_by_kind.values()) == by_lane.exposed_ns


def test_nothing_sent_has_no_ratio_and_nothing_at_all_has_no_window() -> None:
    only_compute = measure(timeline([("compute", C, 0, 5)]))
    assert only_compute.overlap_ratio is None
    assert only_compute.idle_ns == 0
    nothing = measure(timeline([]))
    assert (nothing.window_ns, nothing.bubble, nothing.ideal) == (0, None, None)


def test_an_exchange_that_is_wholly_hidden_has_ratio_one() -> None:
    assert measure(timeline([("compute", C, 0, 10), ("link", T, 2, 8)])).overlap_ratio == 1.0


def test_table_rows_by_hand() -> None:
    rows = {row.key: row for row in table(timeline(TWELVE), lambda span: span.lane)}
    assert list(rows) == ["compute", "link", "copy"]
    link = rows["link"]
    assert (link.count, link.total_ns, link.mean_ns, link.p95_ns) == (4, 37, 9.25, 15)
    assert (link.transfer_ns, link.notify_ns, link.in_flight_ns, link.exposed_ns) == (25, 4, 8, 19)
    assert link.share == pytest.approx(37 / 70)
    assert rows["compute"].total_ns == 37
    assert rows["compute"].compute_ns == 25


@pytest.mark.parametrize("seed", range(20))
def test_algebra_equals_a_bitmap(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(50):
        left, right = ([(a, a + generator.randint(0, 6)) for a in _starts(generator)] for _ in range(2))
        one, other = union(left), union(right)
        assert points(one) == points(left)
        assert points(intersection(one, other)) == points(left) & points(right)
        assert points(difference(one, other)) == points(left) - points(right)
        assert length(one) == len(points(left))


@pytest.mark.parametrize("seed", range(20))
def test_the_four_parts_fill_the_window_and_equal_a_bitmap(seed: int) -> None:
    generator = random.Random(100 + seed)
    kinds = (C, T, N, F, M)
    for _ in range(50):
        spans = [("lane", generator.choice(kinds), a, a + generator.randint(0, 6)) for a in _starts(generator)]
        metrics = measure(timeline(spans))
        compute = points([(a, b) for _, kind, a, b in spans if kind in (C, M)])
        communication = points([(a, b) for _, kind, a, b in spans if kind in (T, N, F)])
        assert metrics.overlapped_ns == len(compute & communication)
        assert metrics.exposed_ns == len(communication - compute)
        assert metrics.compute_only_ns == len(compute - communication)
        parts = metrics.overlapped_ns + metrics.exposed_ns + metrics.compute_only_ns + metrics.idle_ns
        assert parts == metrics.window_ns
        assert sum(metrics.exposed_by_kind.values()) == metrics.exposed_ns


def _starts(generator: random.Random) -> list[int]:
    return [generator.randint(0, 40) for _ in range(generator.randint(0, 10))]
