"""Compiles lists of ops into a plan, refusing every plan that would go wrong while it runs.

The checks, in order: stages and offsets; data flow (each read sees a write or an input); aliasing (in-place changes);
communication (each start has one wait in the same sub-batch, later); what is in flight per channel, counted over all
sub-batches in the order they really run.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tbo.core.codegen import lines_of
from tbo.core.flow import Flow, Placed, trace_flow
from tbo.core.op import YIELD, Op
from tbo.core.order import order as interleave
from tbo.core.order import sequential_order
from tbo.core.plan import Plan, Stage, Step
from tbo.errors import PlanError

OrderName = Literal["interleaved", "sequential"]


def compile_plan(  # noqa: PLR0913 - the public signature; all but the ops have a name at the call
    layers_ops: Sequence[Sequence[Any]],
    *,
    inputs: Iterable[str],
    outputs: Iterable[str],
    carries: Iterable[str] = ("hidden_states", "residual"),
    limits: Mapping[str, int] | None = None,
    sub_batches: int = 2,
    offset: int | Sequence[int] = 0,
    order: OrderName = "interleaved",
    first_layer: int = 0,
) -> Plan:
    """Checks and compiles the ops of some layers into a plan for `run`.

    Args:
        layers_ops: for each layer its ops, with `YIELD` where the scheduler may switch to another sub-batch.
        inputs: state keys every sub-batch starts with. One that no op writes is visible in all layers.
        outputs: state keys `run` returns.
        carries: written keys that stay visible in later layers; all others are local to their layer.
        limits: for each channel, how many communications it holds at once, over all sub-batches.
        sub_batches: how many sub-batches run the stages.
        offset: how many stages each sub-batch starts after the one before it, or one offset for each sub-batch.
        order: "interleaved", or "sequential" to run one sub-batch after another: the oracle, and the first thing to
            try when looking for a fault.
        first_layer: number of the first of these layers in the model, for messages and instruments.

    Raises:
        PlanError: names the op, stage, layer and (where it matters) sub-batch at fault, and what to change.
    """
    placed, num_stages = _place(layers_ops, first_layer)
    offsets = _offsets(sub_batches, offset)
    input_keys, output_keys = tuple(inputs), tuple(outputs)
    flow = trace_flow(placed, input_keys, output_keys, frozenset(carries))
    communications = _Communications(placed, flow)
    communications.pair()
    if order == "interleaved":
        _check_overlap(offsets, num_stages)
        sequence = interleave(num_stages, offsets)
    elif order == "sequential":
        sequence = sequential_order(num_stages, sub_batches)
    else:
        raise PlanError(f"order={order!r} is unknown", remedy="Use 'interleaved' or 'sequential'.")
    peaks = _count_in_flight(communications, sequence, dict(limits or {}))
    return Plan(
        stages=_stages(placed, flow, num_stages),
        order=sequence,
        sub_batches=sub_batches,
        inputs=input_keys,
        outputs=output_keys,
        warnings=(*flow.warnings, *communications.warnings),
        in_flight=peaks,
        fingerprint=_fingerprint(placed, sequence),
    )


def _place(layers_ops: Sequence[Sequence[Any]], first_layer: int) -> tuple[list[Placed], int]:
    """Gives each op its stage; a yield begins a new one."""
    placed: list[Placed] = []
    stage = 0
    stage_is_empty = True
    for layer, ops in enumerate(layers_ops, first_layer):
        for item in ops:
            if item is YIELD:
                if stage_is_empty:
                    raise PlanError(
                        f"layer {layer}: a yield with no op before it, at stage {stage}",
                        remedy="Remove one of the two yields in a row, or the yield the plan begins with.",
                    )
                stage += 1
                stage_is_empty = True
                continue
            if not isinstance(item, Op):
                raise PlanError(
                    f"layer {layer}, stage {stage}: {item!r} is not an op",
                    remedy="Declare it with @tbo.op(...), or use tbo.YIELD.",
                )
            if item.needs_instance:
                raise PlanError(
                    f"layer {layer}, stage {stage}: {item.name} is a method taken from its class",
                    remedy=f"Take it from an instance: layer.{item.name}.",
                )
            placed.append(Placed(stage, layer, item))
            stage_is_empty = False
    if not placed:
        raise PlanError("the plan has no ops", remedy="Give at least one layer with at least one op.")
    return placed, stage + (not stage_is_empty)


def _offsets(sub_batches: int, offset: int | Sequence[int]) -> tuple[int, ...]:
    if sub_batches < 1:
        raise PlanError(f"sub_batches={sub_batches}", remedy="Use at least 1.")
    if isinstance(offset, int):
        offsets = tuple(index * offset for index in range(sub_batches))
    else:
        offsets = tuple(offset)
        if len(offsets) != sub_batches:
            raise PlanError(
                f"{len(offsets)} offsets for {sub_batches} sub-batches", remedy="Give one offset for each sub-batch."
            )
    for sub_batch, stages in enumerate(offsets):
        if stages < 0:
            raise PlanError(f"sub-batch {sub_batch} has offset {stages}", remedy="Offsets count stages from 0 up.")
    return offsets


def _check_overlap(offsets: Sequence[int], num_stages: int) -> None:
    late = max(offsets) - min(offsets)
    if late >= num_stages:
        raise PlanError(
            f"sub-batch {offsets.index(max(offsets))} would start {late} stages late in a plan of {num_stages} stages,"
            " so nothing overlaps",
            remedy=f"Use an offset below {num_stages}, or order='sequential' if that is what you want.",
        )


@dataclass(slots=True)
class _Communications:
    """Pairs starts with waits along one sub-batch.

    Attributes:
        ends: number of a waiting op -> the channel on which its communication began.
    """

    placed: Sequence[Placed]
    flow: Flow
    open: dict[str, int] = field(default_factory=dict)
    ended: dict[str, Placed] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def pair(self) -> None:
        for number, item in enumerate(self.placed):
            if item.op.waits is not None:
                self._end(item.op.waits, number, item)
            if item.op.starts is not None:
                self._start(item.op.writes[0], number, item)
        for handle, number in self.open.items():
            raise PlanError(
                f"{self.placed[number]}: starts {handle!r}, which no op waits for",
                remedy=f"Add an op with waits={handle!r} later in the plan.",
            )

    def _start(self, handle: str, number: int, item: Placed) -> None:
        if handle in self.open:
            raise PlanError(
                f"{item}: starts {handle!r} again while the one from {self.placed[self.open[handle]]} is in flight",
                remedy="Wait for the first, or write the second handle under another key.",
            )
        self.open[handle] = number

    def _end(self, handle: str, number: int, item: Placed) -> None:
        start_number = self.open.pop(handle, None)
        if start_number is None:
            earlier = self.ended.get(handle)
            known = ", ".join(sorted(self.open)) or "none"
            why = f"{earlier} has waited for it already" if earlier else f"in flight here: {known}"
            raise PlanError(
                f"{item}: waits for {handle!r}, which is not in flight ({why})",
                remedy="Start it earlier in the same sub-batch, and wait for it once.",
            )
        start = self.placed[start_number]
        self._check_handle(handle, number, start_number)
        self.ended[handle] = item
        self.ends[number] = start.op.starts or ""
        if start.stage == item.stage:
            self.warnings.append(
                f"{item}: waits in the stage in which {start.op.name} starts, so nothing can hide the communication;"
                " put a YIELD between them"
            )

    def _check_handle(self, handle: str, number: int, start: int) -> None:
        """The wait must be given what its start wrote, or the communication is never finished."""
        seen = self.flow.writers[number].get(handle)
        if seen is None:
            raise PlanError(
                f"{self.placed[number]}: waits for {handle!r} from {self.placed[start]}, but does not see it in this"
                " layer",
                remedy=f"Add {handle!r} to carries, or wait in the layer that starts it.",
            )
        if seen != start:
            raise PlanError(
                f"{self.placed[number]}: waits for {handle!r} from {self.placed[start]}, which {self.placed[seen]} has"
                " overwritten",
                remedy="Write the other value under another key.",
            )


def _count_in_flight(
    communications: _Communications, sequence: Sequence[tuple[int, int]], limits: Mapping[str, int]
) -> dict[str, int]:
    """Follows the real order of all sub-batches; a channel's buffer is shared by them all."""
    by_stage: dict[int, list[tuple[Placed, str | None]]] = {}
    for number, item in enumerate(communications.placed):
        ends = communications.ends.get(number)
        if item.op.starts is not None or ends is not None:
            by_stage.setdefault(item.stage, []).append((item, ends))
    now: dict[str, int] = {}
    peak: dict[str, int] = {}
    for sub_batch, stage in sequence:
        for item, ends in by_stage.get(stage, ()):
            if ends is not None:
                now[ends] -= 1
            channel = item.op.starts
            if channel is None:
                continue
            now[channel] = now.get(channel, 0) + 1
            peak[channel] = max(peak.get(channel, 0), now[channel])
            limit = limits.get(channel)
            if limit is not None and now[channel] > limit:
                raise PlanError(
                    f"sub-batch {sub_batch}, {item}: puts {now[channel]} communications in flight on channel"
                    f" {channel!r}, which holds {limit}",
                    remedy="Use fewer sub-batches, another offset, or an order that waits before it starts again.",
                )
    _check_channels(limits, peak)
    return peak


def _check_channels(limits: Mapping[str, int], peak: Mapping[str, int]) -> None:
    """A limit on a misspelt channel would silently limit nothing."""
    for channel in limits:
        if peak and channel not in peak:
            near = difflib.get_close_matches(channel, peak, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Channels of this plan: {', '.join(sorted(peak))}."
            raise PlanError(f"limits name channel {channel!r}, on which nothing starts", remedy=hint)


def _stages(placed: Sequence[Placed], flow: Flow, num_stages: int) -> tuple[Stage, ...]:
    grouped: list[list[int]] = [[] for _ in range(num_stages)]
    for number, item in enumerate(placed):
        grouped[item.stage].append(number)
    stages = []
    for index, numbers in enumerate(grouped):
        lines = lines_of([(placed[number].op, flow.dead[number]) for number in numbers])
        steps = tuple(
            Step(placed[number].op, placed[number].layer, flow.arguments[number], flow.dead[number], line)
            for number, line in zip(numbers, lines, strict=True)
        )
        stages.append(Stage(index, steps))
    return tuple(stages)


def _fingerprint(placed: Sequence[Placed], sequence: Sequence[tuple[int, int]]) -> int:
    """Covers names, places, channels and order, so plans that communicate differently differ."""
    text = repr([(item.stage, item.layer, item.op.name, item.op.starts, item.op.waits) for item in placed])
    digest = hashlib.blake2b((text + repr(tuple(sequence))).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
