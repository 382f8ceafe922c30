"""Ops that raise: one error that names the place, and nothing kept alive by it; each with and without instruments."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from tbo.core import YIELD, InjectFault, Instrument, Pending, Plan, Progress, Where, compile_plan, op, run
from tbo.errors import InternalError, OpError, PeerError, PlanError
from toy_ops import WATCHES, EveryHook, toy

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=WATCHES)
def instruments(request: pytest.FixtureRequest) -> tuple[Instrument, ...]:
    return tuple(kind() for kind in WATCHES[request.param])


class Tensor:
    """Looks like a tensor to the scheduler, which knows none; weak references can watch it."""

    def __init__(self, *shape: int, dtype: str = "torch.float32") -> None:
        self.shape = shape
        self.dtype = dtype


class LinkDownError(Exception):
    """What the failing op raises."""


def failing_plan(fail: Callable[[Any, Any], Any]) -> Plan:
    """Two layers of two stages; `fail` is the op `op_experts` of layer 1, third of its stage, after a dropped key."""

    @op(writes=("rows", "unread"))
    def op_dispatch(x: Any) -> tuple[Any, Any]:
        return Tensor(7, 64), Tensor(1)

    @op(writes="scale")
    def op_scale(x: Any) -> Tensor:
        return Tensor(dtype="torch.bfloat16")

    @op(writes="x")
    def op_experts(rows: Any, scale: Any, x: Any) -> Any:
        return fail(rows, x)

    first = toy("op_first", ["x"], "x", body=lambda x: x)
    return compile_plan(
        [[first, YIELD, first], [op_dispatch, op_scale, op_experts, YIELD, first]],
        inputs=["x", "number"],
        outputs=["x", "number"],
        carries=["x"],
    )


def run_to_failure(
    fail: Callable[[Any, Any], Any], instruments: tuple[Instrument, ...], rank: int | None = 3
) -> OpError:
    with pytest.raises(OpError) as caught:
        run(failing_plan(fail), [{"x": Tensor(2, 5, 64), "number": 1}] * 2, instruments, rank=rank)
    return caught.value


def link_down(rows: Any, x: Any) -> Any:
    raise LinkDownError("no carrier")


# ---------------------------------------------------------------- what the error says


def test_the_error_names_the_place_and_what_the_state_held(instruments: tuple[Instrument, ...]) -> None:
    """Also what the failing op, as its last reader, had already taken out of the state: rows, scale and x."""
    error = run_to_failure(link_down, instruments)
    assert error.where == Where(sub_batch=0, stage=1, layer=1, op="op_experts")
    assert error.rank == 3
    assert isinstance(error.cause, LinkDownError)
    assert error.__cause__ is error.cause
    assert error.state == {
        "number": "int",
        "rows": "[7, 64] float32",
        "scale": "[] bfloat16",
        "x": "[2, 5, 64] float32",
    }
    assert str(error) == (
        "rank 3, sub-batch 0, layer 1, stage 1, op_experts: LinkDownError: no carrier"
        " [state held number: int, rows: [7, 64] float32, scale: [] bfloat16, x: [2, 5, 64] float32]"
    )


def test_without_ranks_none_is_named(instruments: tuple[Instrument, ...]) -> None:
    assert str(run_to_failure(link_down, instruments, rank=None)).startswith("sub-batch 0, layer 1, stage 1, op_exp")


@pytest.mark.parametrize("sub_batch", [0, 1, 2])
@pytest.mark.parametrize("name", ["a", "b", "c", "d", "e"])
def test_each_op_of_each_sub_batch_is_named(name: str, sub_batch: int, instruments: tuple[Instrument, ...]) -> None:
    """Several ops a stage, with dropped keys between them, which take lines of their own."""

    def body(this: str) -> Callable[[int], Any]:
        def fail_here(n: int) -> tuple[int, int]:
            if this == name and n == sub_batch:
                raise LinkDownError
            return (0, 0)

        return fail_here

    ops = {each: toy(each, ["n"], (f"{each}_dropped", f"{each}_too"), body=body(each)) for each in "abcde"}
    plan = compile_plan(
        [[ops["a"], ops["b"], YIELD], [ops["c"], ops["d"], YIELD, ops["e"]]],
        inputs=["n"],
        outputs=["n"],
        sub_batches=3,
        offset=(0, 1, 0),
    )
    with pytest.raises(OpError) as caught:
        run(plan, [{"n": 0}, {"n": 1}, {"n": 2}], instruments)
    layer, stage = {"a": (0, 0), "b": (0, 0), "c": (1, 1), "d": (1, 1), "e": (1, 2)}[name]
    assert caught.value.where == Where(sub_batch=sub_batch, stage=stage, layer=layer, op=name)


def test_an_op_that_returns_too_few_values_is_named(instruments: tuple[Instrument, ...]) -> None:
    pair = toy("op_pair", ["x"], ("y", "z"), body=lambda x: (x,))
    plan = compile_plan([[pair]], inputs=["x"], outputs=["y", "z"], sub_batches=1)
    with pytest.raises(OpError) as caught:
        run(plan, [{"x": 1}], instruments)
    assert str(caught.value) == (
        "sub-batch 0, layer 0, stage 0, op_pair: ValueError: not enough values to unpack (expected 2, got 1)"
        " [state held nothing]"
    )


def test_a_second_wait_is_reported_as_the_ops_failure(instruments: tuple[Instrument, ...]) -> None:
    pending = Pending(lambda: 1)
    pending.wait()
    wait = toy("op_wait", ["x"], "y", body=lambda _: pending.wait())
    with pytest.raises(OpError, match="a communication was waited for twice") as caught:
        run(compile_plan([[wait]], inputs=["x"], outputs=["y"], sub_batches=1), [{"x": 1}], instruments)
    assert isinstance(caught.value.cause, InternalError)


def test_a_plan_inside_an_op_names_both_places(instruments: tuple[Instrument, ...]) -> None:
    inner = compile_plan([[toy("op_inner", ["n"], body=lambda _: 1 // 0)]], inputs=["n"], outputs=[], sub_batches=1)
    outer = toy("op_outer", ["x"], body=lambda x: run(inner, [{"n": x}]))
    plan = compile_plan([[toy("op_before", ["x"], "b"), outer]], inputs=["x"], outputs=[], sub_batches=1)
    with pytest.raises(OpError) as caught:
        run(plan, [{"x": 1}], instruments)
    assert caught.value.where.op == "op_outer"
    assert isinstance(caught.value.cause, OpError)
    assert caught.value.cause.where.op == "op_inner"


def test_errors_survive_pickling(instruments: tuple[Instrument, ...]) -> None:
    """They cross process borders in launchers and tests."""
    error = run_to_failure(link_down, instruments)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.where, copy.rank, copy.state) == (str(error), error.where, error.rank, error.state)
    for other in (PlanError("bad", remedy="Mend it."), InternalError("odd"), PeerError("rank 2 died", rank=2)):
        copy = pickle.loads(pickle.dumps(other))
        assert (type(copy), str(copy), vars(copy)) == (type(other), str(other), vars(other))


# ---------------------------------------------------------------- what passes through


def test_a_peers_failure_passes_through_with_a_note(instruments: tuple[Instrument, ...]) -> None:
    """Its message names the rank at fault; wrapping it would blame the op that happened to wait."""
    failure = PeerError("rank 2 failed in op_experts", rank=2)

    def fail(rows: Any, x: Any) -> Any:
        raise failure

    with pytest.raises(PeerError) as caught:
        run(failing_plan(fail), [{"x": 1, "number": 1}] * 2, instruments, rank=0)
    assert caught.value is failure
    assert caught.value.__notes__ == ["this rank was in sub-batch 0, layer 1, stage 1, op_experts"]


def test_an_interrupt_passes_through(instruments: tuple[Instrument, ...]) -> None:
    def fail(rows: Any, x: Any) -> Any:
        raise KeyboardInterrupt

    progress = Progress()
    with pytest.raises(KeyboardInterrupt):
        run(failing_plan(fail), [{"x": 1, "number": 1}] * 2, instruments, progress=progress)
    assert progress.describe() == "outside a step"


def test_a_failed_step_does_not_spoil_the_next(instruments: tuple[Instrument, ...]) -> None:
    broken = [True, False]

    def fail_once(rows: Any, x: Any) -> Any:
        if broken.pop(0):
            raise LinkDownError
        broken.append(False)
        return x

    plan = failing_plan(fail_once)
    with pytest.raises(OpError):
        run(plan, [{"x": 1, "number": 1}, {"x": 2, "number": 2}], instruments)
    assert run(plan, [{"x": 1, "number": 1}, {"x": 2, "number": 2}], instruments) == [
        {"x": 1, "number": 1},
        {"x": 2, "number": 2},
    ]


# ---------------------------------------------------------------- what the error keeps alive


def fail_in_a_helper(rows: Any, x: Any) -> Any:
    return link_down(rows, x)


def fail_while_handling(rows: Any, x: Any) -> Any:
    """The first error's own traceback holds the helper's frame and so the tensors."""
    try:
        return link_down(rows, x)
    except LinkDownError:
        raise ValueError("cannot go on") from None


def fail_because_of_another(rows: Any, x: Any) -> Any:
    try:
        return link_down(rows, x)
    except LinkDownError as error:
        raise ValueError("cannot go on") from error


def fail_in_a_group(rows: Any, x: Any) -> Any:
    errors = []
    try:
        link_down(rows, x)
    except LinkDownError as error:
        errors.append(error)
    raise ExceptionGroup("several", errors)


def fail_for_a_peer(rows: Any, x: Any) -> Any:
    raise PeerError("rank 1 died", rank=1)


@pytest.mark.parametrize(
    "fail",
    [link_down, fail_in_a_helper, fail_while_handling, fail_because_of_another, fail_in_a_group, fail_for_a_peer],
)
@pytest.mark.parametrize("form", [list, iter])
def test_no_tensor_is_kept_alive_by_the_error(
    fail: Callable[[Any, Any], Any], form: Callable[[Any], Any], instruments: tuple[Instrument, ...]
) -> None:
    """A caller that catches the error to go on must not lose the memory of the failed step. Without the collector."""
    refs: list[weakref.ref[Tensor]] = []

    def tensor() -> Tensor:
        made = Tensor(2)
        refs.append(weakref.ref(made))
        return made

    def fail_with_tensors(rows: Any, x: Any) -> Any:
        own = tensor()
        return fail(rows, own)

    plan = failing_plan(fail_with_tensors)
    kept: BaseException | None = None
    gc.disable()
    try:
        try:
            run(plan, form([{"x": tensor(), "number": 1}, {"x": tensor(), "number": 2}]), instruments)
        except (OpError, PeerError) as error:
            kept = error
        assert kept is not None
        assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()


def test_frames_of_an_error_the_caller_was_handling_are_left_alone(instruments: tuple[Instrument, ...]) -> None:
    def helper(precious: str) -> None:
        raise LinkDownError(precious)

    kept: list[Any] = []
    try:
        helper("for the debugger")
    except LinkDownError as outer:
        error = run_to_failure(link_down, instruments)
        kept += [error.cause.__context__ is outer, outer.__traceback__]
    is_outer, trace = kept
    assert is_outer
    assert trace.tb_next.tb_frame.f_locals == {"precious": "for the debugger"}


# ---------------------------------------------------------------- injected


def test_an_unused_hook_does_not_hide_a_fault_injected_by_another() -> None:
    def act() -> None:
        raise LinkDownError("pulled")

    watch = EveryHook()
    plan = failing_plan(lambda rows, x: x)
    with pytest.raises(OpError) as caught:
        run(plan, [{"x": 1, "number": 1}] * 2, [watch, InjectFault("op_scale", act, sub_batch=1)])
    assert str(caught.value.where) == "sub-batch 1, layer 1, stage 1, op_scale"
    assert watch.events[-2:] == [
        "before 1:op_scale ['number', 'rows', 'x']",
        "after step: LinkDownError('pulled')",
    ]
