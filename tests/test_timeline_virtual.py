"""A plan on a virtual clock: timelines worked out by hand, with and without a host that takes part."""

from __future__ import annotations

from typing import Any

import pytest

from tbo.core import YIELD, Plan, compile_plan, op
from tbo.timeline.metrics import measure
from tbo.timeline.span import Kind, Timeline
from tbo.timeline.virtual import CPU, Durations, DurationsError, Machine, predict


class Layer:
    """Attention, a dispatch, experts, a combine: enough to see every kind of wait."""

    @op(writes="dispatch", starts="ep")
    def op_dispatch_a(self, hidden_states: Any) -> Any:
        return hidden_states

    @op(writes="received", waits="dispatch")
    def op_dispatch_b(self, dispatch: Any) -> Any:
        return dispatch

    @op(writes="combine", starts="ep")
    def op_combine_a(self, received: Any) -> Any:
        return received

    @op(writes="hidden_states", waits="combine")
    def op_combine_b(self, combine: Any) -> Any:
        return combine


DURATIONS = Durations(
    compute={"op_dispatch_a": 10, "op_combine_a": 10}, transfer={"op_dispatch_a": 6, "op_combine_a": 8}
)


def plan(*, layers: int = 1, sub_batches: int = 2, offset: int = 0, order: Any = "interleaved") -> Plan:
    layer = Layer()
    ops = [layer.op_dispatch_a, YIELD, layer.op_dispatch_b, layer.op_combine_a, YIELD, layer.op_combine_b]
    return compile_plan(
        [ops] * layers,
        inputs=("hidden_states",),
        outputs=("hidden_states",),
        sub_batches=sub_batches,
        offset=offset,
        order=order,
    )


def lane(timeline: Timeline, name: str) -> list[tuple[str, int | None, int, int]]:
    return [(s.op, s.sub_batch, s.start_ns, s.end_ns) for s in timeline.spans if s.lane == name]


def test_two_sub_batches_by_hand() -> None:
    timeline = predict(plan(), DURATIONS)
    assert lane(timeline, "compute") == [
        ("op_dispatch_a", 0, 0, 10),
        ("op_dispatch_a", 1, 10, 20),
        ("op_combine_a", 0, 20, 30),
        ("op_combine_a", 1, 30, 40),
    ]
    assert lane(timeline, "link") == [
        ("op_dispatch_a", 0, 10, 16),
        ("op_dispatch_a", 1, 20, 26),
        ("op_combine_a", 0, 30, 38),
        ("op_combine_a", 1, 40, 48),
    ]
    metrics = measure(timeline)
    assert (metrics.window_ns, metrics.overlapped_ns, metrics.exposed_ns) == (48, 20, 8)


def test_sequential_order_hides_nothing() -> None:
    metrics = measure(predict(plan(order="sequential"), DURATIONS))
    assert (metrics.window_ns, metrics.overlapped_ns) == (68, 0)


def test_a_transfer_queues_behind_the_other_sub_batchs() -> None:
    slow = Durations(compute=DURATIONS.compute, transfer={"op_dispatch_a": 30, "op_combine_a": 30})
    timeline = predict(plan(), slow)
    assert [(start, end) for *_, start, end in lane(timeline, "link")] == [(10, 40), (40, 70), (70, 100), (100, 130)]
    assert [(start, end) for *_, start, end in lane(timeline, "compute")][2:] == [(40, 50), (70, 80)]


@pytest.mark.parametrize(("offset", "window"), [(0, 48), (1, 60), (2, 68)])
def test_offsets_change_the_window_as_worked_out_by_hand(offset: int, window: int) -> None:
    assert measure(predict(plan(offset=offset), DURATIONS)).window_ns == window


def test_a_hundred_runs_are_equal() -> None:
    first = predict(plan(layers=3), DURATIONS)
    assert all(predict(plan(layers=3), DURATIONS).spans == first.spans for _ in range(100))


def test_a_slow_host_delays_everything_it_launches() -> None:
    timeline = predict(plan(), DURATIONS, Machine(launch_ns=20))
    # Eight ops are launched 20 ns apart; the first computing op of each sub-batch starts when it has been launched.
    assert [start for *_, start, _ in lane(timeline, "compute")] == [20, 40, 80, 120]
    assert len(lane(timeline, "host")) == 8
    assert {span.kind for span in timeline.spans if span.lane == "host"} == {Kind.HOST}


def test_a_host_that_waits_for_counts_in_the_first_half_stops_the_other_sub_batch() -> None:
    timeline = predict(plan(), DURATIONS, Machine(blocks_host="a", counts_ns=5))
    # The host stands until 15 and until 30, so sub-batch 1 starts late and so does every transfer.
    assert [start for *_, start, _ in lane(timeline, "compute")] == [0, 15, 30, 40]
    assert [(start, end) for *_, start, end in lane(timeline, "link")][:2] == [(15, 21), (30, 36)]


def test_issuing_in_the_second_half_starts_the_transfer_late_on_a_cpu() -> None:
    late = predict(plan(), DURATIONS, Machine(one_thread=True, issues_in="b"))
    assert next((start, end) for *_, start, end in lane(late, "link")) == (20, 26)
    assert measure(late).window_ns > measure(predict(plan(), DURATIONS, CPU)).window_ns


def test_bad_durations_are_refused_by_name() -> None:
    with pytest.raises(DurationsError, match="op_combine_a starts a transfer whose duration is not given"):
        predict(plan(), Durations(compute={}, transfer={"op_dispatch_a": 1}))
    with pytest.raises(DurationsError, match="given for op_gate, which this plan does not run"):
        predict(plan(), Durations(compute={"op_gate": 1}, transfer=DURATIONS.transfer))
    with pytest.raises(DurationsError, match="given for op_combine_b, which this plan does not start"):
        predict(plan(), Durations(compute={}, transfer={**DURATIONS.transfer, "op_combine_b": 3}))
    with pytest.raises(DurationsError, match="op_dispatch_a has a duration of -1 ns"):
        predict(plan(), Durations(compute={"op_dispatch_a": -1}, transfer=DURATIONS.transfer))
