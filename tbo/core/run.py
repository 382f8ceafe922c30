"""Runs a plan: one thread, one loop over generated stage functions."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

from tbo.core.codegen import FILE_PREFIX
from tbo.core.instruments import Instrument, overridden
from tbo.core.op import Where
from tbo.core.plan import Plan, Step
from tbo.errors import OpError, PeerError, PlanError

PLACE_NOTE = "this rank was in "
"""Begins the note that says where a run was when something other than its own op ended it."""

_HOOKS = ("before_step", "after_step", "before_stage", "after_stage", "before_op", "after_op")


class Progress:
    """Where a run is, for another thread to read (a heartbeat reports it, so that a killed rank's last op is known).

    The run only stores its place in the plan; the op within the stage is read from the running frame when asked for.
    """

    __slots__ = ("at", "plan", "thread")

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.at: tuple[Any, ...] | None = None
        self.thread = 0

    def describe(self) -> str:
        """For example ``sub-batch 1, layer 3, stage 7, op_dispatch_b``; ``outside a step`` when nothing runs."""
        plan, at = self.plan, self.at
        if plan is None or at is None or plan is not self.plan:  # the last: another step began between the two reads
            return "outside a step"
        sub_batch, stage = at[0], at[2]
        frame: FrameType | None = sys._current_frames().get(self.thread)  # noqa: SLF001 - the one way to see another thread's line
        while frame is not None:
            if frame.f_code.co_filename.startswith(FILE_PREFIX):
                return str(plan.where(sub_batch, stage, frame.f_lineno or 0))
            frame = frame.f_back
        return str(plan.where(sub_batch, stage, 0))


def run(
    plan: Plan,
    inputs: Iterable[Mapping[str, Any]],
    instruments: Sequence[Instrument] = (),
    *,
    rank: int | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Runs a plan over its sub-batches.

    Args:
        plan: from `compile_plan`.
        inputs: one mapping of the plan's input keys for each sub-batch. What the caller does not hold on to (an
            iterator, or a list without a name) is freed in or right after its last reader.
        instruments: observers to call; without any, the run takes a path that has no hooks.
        rank: named in errors.
        progress: kept up to date for another thread to read.

    Returns:
        For each sub-batch the plan's output keys and values.

    Raises:
        PlanError: the inputs do not fit the plan.
        OpError: an op raised; its state is described and then released.
        PeerError: another rank failed while an op waited for it.
    """
    states = _initial_states(plan, inputs)
    del inputs  # this frame would keep every value alive, and so would the traceback of an error
    handled = sys.exception()
    hooks = {hook: overridden(instruments, hook) for hook in _HOOKS} if instruments else {}
    progress = progress or Progress()
    progress.plan, progress.thread = plan, threading.get_ident()
    try:
        if any(hooks.values()):
            _run_watched(plan, states, hooks, progress)
        else:
            for call in plan.calls:
                progress.at = call
                call[1](states[call[0]])
    except Exception as error:
        scene = _describe_failure(plan, states, progress.at, error)
        _release(states, error, handled)
        if scene is None:
            raise
        where, held = scene
        if isinstance(error, PeerError):
            error.add_note(f"{PLACE_NOTE}{where}")
            raise
        raise OpError(where, rank, held, error) from error
    except BaseException as interruption:
        if progress.at is not None:
            interruption.add_note(f"{PLACE_NOTE}{_place_of(plan, progress.at, interruption)}")
        raise
    finally:
        progress.at = None
    return [{key: state[key] for key in plan.outputs} for state in states]


def _initial_states(plan: Plan, inputs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    states = []
    for sub_batch, given in enumerate(inputs):
        missing = [key for key in plan.inputs if key not in given]
        if missing:
            raise PlanError(
                f"sub-batch {sub_batch} has no input {missing[0]!r} (given: {', '.join(given) or 'nothing'})",
                remedy=f"Give every sub-batch the keys {', '.join(plan.inputs)}.",
            )
        states.append({key: given[key] for key in plan.inputs})
    if len(states) != plan.sub_batches:
        raise PlanError(
            f"{len(states)} inputs for a plan of {plan.sub_batches} sub-batches",
            remedy="Give one mapping for each sub-batch, or compile the plan for another number.",
        )
    return states


def _run_watched(plan: Plan, states: list[dict[str, Any]], hooks: Mapping[str, list[Any]], progress: Progress) -> None:
    try:
        for hook in hooks["before_step"]:
            hook(plan)
        _run_watched_stages(plan, states, hooks, progress)
    except BaseException as error:
        for hook in hooks["after_step"]:
            try:
                hook(plan, error)
            except Exception as second:  # noqa: BLE001 - the first error is the one to report
                error.add_note(f"an after_step hook raised too: {second!r}")
        raise
    progress.at = None
    for hook in hooks["after_step"]:
        hook(plan, None)


def _run_watched_stages(
    plan: Plan, states: list[dict[str, Any]], hooks: Mapping[str, list[Any]], progress: Progress
) -> None:
    for call in plan.watched_calls:
        progress.at = call
        sub_batch, function, stage, places = call
        state = states[sub_batch]

        def before(number: int, state: dict[str, Any] = state, places: tuple[Where, ...] = places) -> None:
            for hook in hooks["before_op"]:
                hook(places[number], state)

        def after(number: int, state: dict[str, Any] = state, places: tuple[Where, ...] = places) -> None:
            for hook in hooks["after_op"]:
                hook(places[number], state)

        for hook in hooks["before_stage"]:
            hook(sub_batch, stage)
        function(state, before, after)
        for hook in hooks["after_stage"]:
            hook(sub_batch, stage)


def _describe_failure(
    plan: Plan, states: Sequence[Mapping[str, Any]], at: tuple[Any, ...] | None, error: Exception
) -> tuple[Where, dict[str, str]] | None:
    """Where the step failed and what the state held, or None if a hook of the whole step raised."""
    if at is None:
        return None
    stage_frame = _stage_frame(error.__traceback__)
    where = _place_of(plan, at, error)
    step = plan.stages[where.stage].step_at(0 if stage_frame is None else stage_frame.tb_lineno)
    return where, _describe_state(states[where.sub_batch], step, stage_frame)


def _place_of(plan: Plan, at: tuple[Any, ...], error: BaseException) -> Where:
    """The op that an error passed through on its way out of the stage at `at`."""
    stage_frame = _stage_frame(error.__traceback__)
    return plan.where(at[0], at[2], 0 if stage_frame is None else stage_frame.tb_lineno)


def _release(states: Iterable[dict[str, Any]], error: BaseException, handled: BaseException | None) -> None:
    """Lets go of every value: in the states, and in the frames of the error and of those that led to it.

    An error the caller was already handling (`handled`) is not ours to touch.
    """
    for state in states:
        state.clear()
    released: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or link is handled or any(link is done for done in released):
            continue
        traceback.clear_frames(link.__traceback__)
        released.append(link)
        waiting += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions


def _stage_frame(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith(FILE_PREFIX):
        trace = trace.tb_next
    return trace


def _describe_state(state: Mapping[str, Any], step: Step, stage_frame: TracebackType | None) -> dict[str, str]:
    """Shapes, not values: the state, and what the failing op had already taken out of it."""
    described = {key: describe(value) for key, value in state.items()}
    op_frame = stage_frame.tb_next if stage_frame is not None else None
    if op_frame is not None:
        taken = op_frame.tb_frame.f_locals
        described |= {key: describe(taken[key]) for key in step.arguments if key in taken}
        if isinstance(taken, dict):  # up to Python 3.12 a copy that the frame keeps, even when it is cleared
            taken.clear()
    return described


def describe(value: Any) -> str:
    """``[2, 5, 64] float32`` for a tensor, otherwise the type's name."""
    shape = getattr(value, "shape", None)
    if shape is None:
        return type(value).__name__
    return f"{list(shape)} {str(getattr(value, 'dtype', '')).removeprefix('torch.')}".strip()
