"""Instruments: which hooks are called, in which order, with what, and what happens when one raises."""

from __future__ import annotations

from typing import Any

import pytest

from tbo.core import YIELD, InjectFault, Instrument, Plan, Trace, Where, compile_plan, run
from tbo.core.instruments import overridden
from tbo.errors import OpError, PeerError
from toy_ops import EveryHook, toy

pytestmark = pytest.mark.timeout(60)


class HookError(Exception):
    """What a faulty instrument raises."""


def small_plan() -> Plan:
    """Stage 0: make, use. Stage 1: end. Two sub-batches."""
    ops = [toy("make", ["x"], ("a", "dropped")), toy("use", ["a", "x"], "b"), YIELD, toy("end", ["b"], "y")]
    return compile_plan([ops], inputs=["x"], outputs=["y"])


def small_inputs() -> list[dict[str, int]]:
    return [{"x": 1}, {"x": 2}]


# ---------------------------------------------------------------- order


def test_every_hook_in_order_with_the_state_before_and_after() -> None:
    """Before an op its reads are there, after it what it read last is gone; a dropped key is seen once, by after_op."""
    watch = EveryHook()
    run(small_plan(), small_inputs(), [watch])

    def stage_0(sub_batch: int) -> list[str]:
        return [
            f"before stage {sub_batch}:0",
            f"before {sub_batch}:make ['x']",
            f"after {sub_batch}:make ['a', 'dropped', 'x']",
            f"before {sub_batch}:use ['a', 'x']",
            f"after {sub_batch}:use ['b']",
            f"after stage {sub_batch}:0",
        ]

    def stage_1(sub_batch: int) -> list[str]:
        return [
            f"before stage {sub_batch}:1",
            f"before {sub_batch}:end ['b']",
            f"after {sub_batch}:end ['y']",
            f"after stage {sub_batch}:1",
        ]

    assert watch.events == [
        "before step of 2",
        *stage_0(0),
        *stage_0(1),
        *stage_1(0),
        *stage_1(1),
        "after step",
    ]


def test_instruments_are_called_in_the_order_given() -> None:
    events: list[str] = []

    class Named(Instrument):
        def __init__(self, name: str) -> None:
            self.name = name

        def before_stage(self, sub_batch: int, stage: int) -> None:
            events.append(f"{self.name} {sub_batch}:{stage}")

    run(small_plan(), small_inputs(), [Named("first"), Named("second")])
    assert events == [
        *("first 0:0", "second 0:0", "first 1:0", "second 1:0"),
        *("first 0:1", "second 0:1", "first 1:1", "second 1:1"),
    ]


@pytest.mark.parametrize("hook", ["before_step", "after_step", "before_stage", "after_stage", "before_op", "after_op"])
def test_one_overridden_hook_is_called_alone(hook: str) -> None:
    calls: list[tuple[Any, ...]] = []

    def note(_: Instrument, *args: Any) -> None:
        calls.append(args)

    kind = type("OneHook", (Instrument,), {hook: note})
    plan = small_plan()
    run(plan, small_inputs(), [Instrument(), kind()])
    stages = [(sub_batch, stage) for stage in range(2) for sub_batch in range(2)]
    places = [(0, 0, "make"), (0, 0, "use"), (1, 0, "make"), (1, 0, "use"), (0, 1, "end"), (1, 1, "end")]
    if hook == "before_step":
        assert calls == [(plan,)]
    elif hook == "after_step":
        assert calls == [(plan, None)]
    elif hook.endswith("stage"):
        assert calls == stages
    else:
        assert [call[0] for call in calls] == [Where(sub_batch, stage, 0, op) for sub_batch, stage, op in places]


def test_an_instrument_without_hooks_leaves_the_plain_path() -> None:
    plan = small_plan()
    run(plan, small_inputs(), [Instrument()])
    assert "calls" in vars(plan)
    assert "watched_calls" not in vars(plan)
    run(plan, small_inputs(), [Trace()])
    assert "watched_calls" in vars(plan)


def test_only_real_overrides_are_found() -> None:
    trace = Trace()
    assert overridden([Instrument(), trace], "before_op") == [trace.before_op]
    assert overridden([Instrument(), trace], "after_op") == []


# ---------------------------------------------------------------- when an op raises


def raising_plan(error: Exception) -> Plan:
    def fail(b: Any) -> Any:
        raise error

    ops = [toy("make", ["x"], "a"), YIELD, toy("use", ["a"], "b"), toy("end", ["b"], "y", body=fail)]
    return compile_plan([ops], inputs=["x"], outputs=["y"], offset=1)


@pytest.mark.parametrize("error", [ValueError("no"), PeerError("rank 1 died", rank=1)], ids=["own", "peer's"])
def test_after_step_is_told_the_error_and_no_hook_runs_in_between(error: Exception) -> None:
    watch = EveryHook()
    with pytest.raises((OpError, PeerError)):
        run(raising_plan(error), small_inputs(), [watch])
    assert watch.events == [
        "before step of 2",
        "before stage 0:0",
        "before 0:make ['x']",
        "after 0:make ['a']",
        "after stage 0:0",
        "before stage 0:1",
        "before 0:use ['a']",
        "after 0:use ['b']",
        "before 0:end ['b']",
        f"after step: {error!r}",
    ]


def test_after_step_is_told_of_an_interrupt() -> None:
    watch = EveryHook()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(small_plan(), small_inputs(), [watch, InjectFault("use", interrupt)])
    assert watch.events[-1] == "after step: KeyboardInterrupt()"


# ---------------------------------------------------------------- when a hook raises


class Faulty(Instrument):
    """Raises in one hook, at one place."""

    def __init__(self, hook: str, op: str = "use") -> None:
        self.hook = hook
        self.op = op

    def _act(self, hook: str, op: str | None = None) -> None:
        if hook == self.hook and op in (None, self.op):
            raise HookError(hook)

    def before_step(self, plan: Plan) -> None:
        self._act("before_step")

    def after_step(self, plan: Plan, error: BaseException | None) -> None:
        self._act("after_step")

    def before_stage(self, sub_batch: int, stage: int) -> None:
        if (sub_batch, stage) == (1, 0):
            self._act("before_stage")

    def after_stage(self, sub_batch: int, stage: int) -> None:
        if (sub_batch, stage) == (1, 0):
            self._act("after_stage")

    def before_op(self, where: Where, state: Any) -> None:
        self._act("before_op", where.op)

    def after_op(self, where: Where, state: Any) -> None:
        self._act("after_op", where.op)


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        ("before_op", "sub-batch 0, layer 0, stage 0, use: HookError: before_op [state held x: int, a: int]"),
        ("after_op", "sub-batch 0, layer 0, stage 0, use: HookError: after_op [state held b: int]"),
        ("before_stage", "sub-batch 1, layer 0, stage 0, make: HookError: before_stage [state held x: int]"),
        ("after_stage", "sub-batch 1, layer 0, stage 0, make: HookError: after_stage [state held b: int]"),
    ],
)
def test_a_hook_of_an_op_or_stage_fails_that_op_or_stage(hook: str, says: str) -> None:
    """A stage is named by its first op."""
    watch = EveryHook()
    with pytest.raises(OpError) as caught:
        run(small_plan(), small_inputs(), [Faulty(hook), watch])
    assert str(caught.value) == says
    assert watch.events[-1] == f"after step: HookError('{hook}')"


@pytest.mark.parametrize("hook", ["before_step", "after_step"])
def test_a_hook_of_the_whole_step_fails_as_itself(hook: str) -> None:
    """No op is to blame, so none is named."""
    with pytest.raises(HookError, match=hook):
        run(small_plan(), small_inputs(), [Faulty(hook)])


def test_a_failing_after_step_does_not_hide_the_ops_failure() -> None:
    watch = EveryHook()
    with pytest.raises(OpError) as caught:
        run(raising_plan(ValueError("no")), small_inputs(), [Faulty("after_step"), watch])
    assert caught.value.where == Where(0, 1, 0, "end")
    assert caught.value.cause.__notes__ == ["an after_step hook raised too: HookError('after_step')"]
    assert watch.events[-1] == "after step: ValueError('no')"


# ---------------------------------------------------------------- fault injection


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["0:0 a", "1:0 a", "0:1 a", "1:1 a"]),
        ({"sub_batch": 1}, ["1:0 a", "1:1 a"]),
        ({"layer": 1}, ["0:1 a", "1:1 a"]),
        ({"sub_batch": 0, "layer": 1}, ["0:1 a"]),
        ({"sub_batch": 0, "layer": 0, "after": True}, ["0:0 a done"]),
        ({"layer": 2}, []),
    ],
    ids=["everywhere", "one sub-batch", "one layer", "one place", "after the op", "nowhere"],
)
def test_faults_are_injected_where_asked(options: dict[str, Any], expected: list[str]) -> None:
    """The action notes the place the trace saw last, and whether the op had run."""
    trace = Trace()
    noted: list[str] = []
    ran: list[str] = []

    def act() -> None:
        place = trace.ops[-1]
        noted.append(f"{place.sub_batch}:{place.layer} {place.op}" + " done" * (len(ran) == len(trace.ops)))

    ops = [toy(name, ["x"], "y", body=lambda x: ran.append("op")) for name in ("a", "b")]
    plan = compile_plan([[ops[0], ops[1], YIELD], [ops[0]]], inputs=["x"], outputs=["y"])
    run(plan, small_inputs(), [trace, InjectFault("a", act, **options)])
    assert noted == expected
