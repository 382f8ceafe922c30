"""The compiled plan: a value that can be listed, checked, drawn and run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tbo.core.codegen import StageFunction, WatchedStageFunction, stage_function, watched_stage_function
from tbo.core.op import Op, Where


@dataclass(frozen=True, slots=True)
class Step:
    """One op at its place in the plan.

    Attributes:
        op: the op.
        layer: index of its layer.
        arguments: the state keys passed to it, each with whether this is the key's last reader (which then receives
            the only reference). Optional reads that nothing writes are absent: the op's own default holds.
        dead: written keys that nothing reads; dropped at once.
        line: the line of the generated stage function that calls it.
    """

    op: Op
    layer: int
    arguments: Mapping[str, bool]
    dead: tuple[str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Stage:
    """The ops between two yields; a sub-batch runs them without being interrupted."""

    index: int
    steps: tuple[Step, ...]

    @property
    def name(self) -> str:
        """First and last op with their layers, for people."""
        first, last = self.steps[0], self.steps[-1]
        if first is last:
            return f"layer {first.layer} {first.op.name}"
        return f"layer {first.layer} {first.op.name} .. layer {last.layer} {last.op.name}"

    def step_at(self, line: int) -> Step:
        """The step whose call stands at or before a line of the generated function."""
        found = self.steps[0]
        for step in self.steps:
            if step.line <= line:
                found = step
        return found


@dataclass(frozen=True)
class Plan:
    """A checked order of (sub-batch, stage), ready for `run`. Made by `compile_plan`.

    Attributes:
        stages: the stages every sub-batch runs.
        order: ``(sub_batch, stage)`` in the order they run.
        sub_batches: how many sub-batches it takes.
        inputs: the keys each sub-batch's state must start with.
        outputs: the keys `run` returns.
        warnings: what is legal but hides nothing, one sentence each.
        in_flight: for each channel, the most communications in flight at once, over all sub-batches.
        fingerprint: differs between plans whose ops, channels or order differ, and is the same in every process;
            a 56-bit number.
    """

    stages: tuple[Stage, ...]
    order: tuple[tuple[int, int], ...]
    sub_batches: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    warnings: tuple[str, ...]
    in_flight: Mapping[str, int]
    fingerprint: int

    @cached_property
    def calls(self) -> tuple[tuple[int, StageFunction, int], ...]:
        """``(sub_batch, generated function, stage)`` in running order."""
        functions = [stage_function(stage.index, stage.steps) for stage in self.stages]
        return tuple((sub_batch, functions[stage], stage) for sub_batch, stage in self.order)

    @cached_property
    def watched_calls(self) -> tuple[tuple[int, WatchedStageFunction, int, tuple[Where, ...]], ...]:
        """As `calls`, through functions that call the instruments around each op."""
        functions = [watched_stage_function(stage.index, stage.steps) for stage in self.stages]
        return tuple(
            (
                sub_batch,
                functions[stage],
                stage,
                tuple(Where(sub_batch, stage, step.layer, step.op.name) for step in self.stages[stage].steps),
            )
            for sub_batch, stage in self.order
        )

    def where(self, sub_batch: int, stage: int, line: int) -> Where:
        """Which op a line of a stage's generated function belongs to."""
        step = self.stages[stage].step_at(line)
        return Where(sub_batch, stage, step.layer, step.op.name)

    def describe(self) -> str:
        """The stages and the order as text, one stage a line."""
        lines = [f"{len(self.stages)} stages, {self.sub_batches} sub-batches"]
        for stage in self.stages:
            names = ", ".join(step.op.name for step in stage.steps)
            lines.append(f"  stage {stage.index}: {names}")
        lines.append("order: " + " ".join(f"{sub_batch}:{stage}" for sub_batch, stage in self.order))
        return "\n".join(lines)
