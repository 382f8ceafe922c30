"""Random valid plans: interleaved, in sequence and interpreted naively, all give the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbo.core import YIELD, Instrument, Op, Trace, Where, compile_plan, run
from toy_ops import REST, EveryHook, mix, toy

pytestmark = pytest.mark.timeout(100)

INPUTS = ("in_a", "in_b")
LOCAL_KEYS = ("p", "q", "r")
CARRIED_KEYS = ("hidden", "topk")
CHANNELS = ("ep", "tp")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A valid plan's ingredients."""

    layers: list[list[Any]]
    outputs: tuple[str, ...]
    carries: tuple[str, ...]
    sub_batches: int
    offsets: tuple[int, ...]


class _Builder:
    """Draws ops one by one, knowing which keys each may read."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.visible: set[str] = set(INPUTS)
        self.in_flight: list[str] = []
        self.handles: set[str] = set()
        self.count = 0

    def layer(self, *, is_last: bool) -> list[Any]:
        ops: list[Any] = []
        for _ in range(self.draw(st.integers(1, 5))):
            ops.append(self.any_op())
            if self.draw(st.booleans()):
                ops.append(YIELD)
        if is_last:
            ops += [self.wait() for _ in list(self.in_flight)]
        elif ops[-1] is YIELD:  # the next layer may begin with anything but a second yield
            ops.pop()
        self.visible = {key for key in self.visible if key in (*CARRIED_KEYS, *INPUTS, *self.in_flight)}
        return ops

    def any_op(self) -> Op:
        kind = self.draw(st.sampled_from(["plain", "plain", "start", "wait"]))
        if kind == "wait" and self.in_flight:
            return self.wait()
        if kind == "start" and len(self.in_flight) < 3:
            handle = f"handle_{self.count}"
            self.handles.add(handle)
            self.in_flight.append(handle)
            made = self.op((handle,), starts=self.draw(st.sampled_from(CHANNELS)))
            self.visible.add(handle)
            return made
        writes = self.draw(st.lists(st.sampled_from(LOCAL_KEYS + CARRIED_KEYS), unique=True, max_size=3))
        made = self.op(tuple(writes))
        self.visible.update(writes)
        return made

    def wait(self) -> Op:
        handle = self.in_flight.pop(self.draw(st.integers(0, len(self.in_flight) - 1)))
        key = self.draw(st.sampled_from(LOCAL_KEYS))
        made = self.op((key,), extra=[handle], waits=handle)
        self.visible.discard(handle)
        self.visible.add(key)
        return made

    def op(self, writes: tuple[str, ...], extra: list[str] | None = None, **declared: Any) -> Op:
        readable = sorted(self.visible - self.handles)
        required = self.draw(st.lists(st.sampled_from(readable), unique=True, max_size=3))
        optional = self.draw(st.lists(st.sampled_from(LOCAL_KEYS + CARRIED_KEYS), unique=True, max_size=2))
        reads = [*(extra or []), *required, *(f"{key}?" for key in optional if key not in required)]
        self.count += 1
        return toy(f"op_{self.count}", reads, writes, **declared)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    builder = _Builder(draw)
    count = draw(st.integers(1, 3))
    layers = [builder.layer(is_last=index == count - 1) for index in range(count)]
    stages = 1 + sum(item is YIELD for ops in layers for item in ops) - (layers[-1][-1] is YIELD)
    sub_batches = draw(st.integers(1, 4))
    return Case(
        layers=layers,
        outputs=tuple(draw(st.lists(st.sampled_from(sorted(builder.visible)), unique=True, max_size=3))),
        carries=(*CARRIED_KEYS, *sorted(builder.handles)),
        sub_batches=sub_batches,
        offsets=tuple(draw(st.integers(0, stages - 1)) for _ in range(sub_batches)),
    )


def interpret(case: Case, given: dict[str, int]) -> tuple[dict[str, Any], list[str]]:
    """The meaning of a plan in ten lines: one sub-batch, op after op, nothing freed."""
    state = {key: (value, -1) for key, value in given.items()}
    names = []
    for layer, ops in enumerate(case.layers):
        for item in ops:
            if item is YIELD:
                continue
            values = []
            for read in item.reads:
                value, written_in = state.get(read.key, (REST, -1))
                visible = written_in in (-1, layer) or read.key in case.carries
                values.append(value if visible else REST)
            names.append(item.name)
            state |= {key: (mix(item.name, n, *values), layer) for n, key in enumerate(item.writes)}
    return {key: state[key][0] for key in case.outputs}, names


class Leftovers(Instrument):
    """Remembers each sub-batch's keys after its last op."""

    def __init__(self) -> None:
        self.keys: dict[int, set[str]] = {}

    def after_stage(self, sub_batch: int, stage: int) -> None:
        self.keys[sub_batch] = set(self.states[sub_batch])

    def before_step(self, plan: Any) -> None:
        self.states: dict[int, Any] = {}

    def before_op(self, where: Where, state: Any) -> None:
        self.states[where.sub_batch] = state


@given(cases())
@settings(max_examples=150, deadline=None)
def test_every_way_to_run_a_valid_plan_gives_the_same(case: Case) -> None:
    options: dict[str, Any] = {
        "inputs": INPUTS,
        "outputs": case.outputs,
        "carries": case.carries,
        "sub_batches": case.sub_batches,
        "offset": case.offsets,
    }
    plan = compile_plan(case.layers, **options)
    sequential = compile_plan(case.layers, order="sequential", **options)
    given_values = [{"in_a": 2 * index, "in_b": 2 * index + 1} for index in range(case.sub_batches)]
    meant = [interpret(case, values) for values in given_values]
    expected = [outputs for outputs, _ in meant]

    trace, leftovers = Trace(), Leftovers()
    assert run(plan, given_values) == expected
    assert run(sequential, given_values) == expected
    assert run(plan, given_values, [EveryHook(), trace, leftovers]) == expected

    for sub_batch, (_, names) in enumerate(meant):
        assert [where.op for where in trace.ops if where.sub_batch == sub_batch] == names
    unread = {warning.split("'")[1] for warning in plan.warnings if warning.startswith("input ")}
    for keys in leftovers.keys.values():
        assert keys == set(case.outputs) | unread
    assert compile_plan(case.layers, **options).fingerprint == plan.fingerprint


@given(cases())
@settings(max_examples=75, deadline=None)
def test_the_counted_peak_is_what_a_run_sees(case: Case) -> None:
    plan = compile_plan(
        case.layers,
        inputs=INPUTS,
        outputs=case.outputs,
        carries=case.carries,
        sub_batches=case.sub_batches,
        offset=case.offsets,
    )
    trace = Trace()
    run(plan, [{"in_a": 0, "in_b": 1}] * case.sub_batches, [trace])
    ops = {item.name: item for ops in case.layers for item in ops if item is not YIELD}
    channel_of = {item.writes[0]: item.starts for item in ops.values() if item.starts}
    now: dict[str, int] = {}
    peak: dict[str, int] = {}
    for where in trace.ops:
        item = ops[where.op]
        if item.waits:
            now[channel_of[item.waits]] -= 1
        if item.starts:
            now[item.starts] = now.get(item.starts, 0) + 1
            peak[item.starts] = max(peak.get(item.starts, 0), now[item.starts])
    assert plan.in_flight == peak
    assert all(count == 0 for count in now.values())
