"""Data flow through one sub-batch: which write each read sees, who reads it last, who may change it in place."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tbo.core.op import REQUIRED, Op, Read
from tbo.errors import PlanError

INPUT = -1
"""Stands for "written before the plan began" where an op's number would stand."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An op with its stage and layer."""

    stage: int
    layer: int
    op: Op

    def __str__(self) -> str:
        return f"layer {self.layer}, stage {self.stage}, {self.op.name}"


@dataclass(frozen=True, slots=True)
class Flow:
    """For each op, what it reads and what becomes of it.

    Attributes:
        arguments: read key -> whether this op is its last reader.
        writers: read key -> number of the op that wrote what it sees, or INPUT.
        dead: the written keys nothing reads.
        warnings: one sentence each.
    """

    arguments: tuple[dict[str, bool], ...]
    writers: tuple[dict[str, int], ...]
    dead: tuple[tuple[str, ...], ...]
    warnings: tuple[str, ...]


@dataclass(slots=True)
class _Tracer:
    placed: Sequence[Placed]
    inputs: tuple[str, ...]
    carries: frozenset[str]
    written_by: dict[str, int] = field(default_factory=dict)
    last_reader: dict[tuple[str, int], int] = field(default_factory=dict)
    seen: list[dict[str, int]] = field(default_factory=list)
    root: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)

    def trace(self) -> None:
        """Walks the ops once, resolving each read to the write it sees."""
        self.written_by = dict.fromkeys(self.inputs, INPUT)
        self.root = {(key, INPUT): (key, INPUT) for key in self.inputs}
        for number, item in enumerate(self.placed):
            reads = {}
            for read in item.op.reads:
                writer = self._writer(read, item)
                if writer is not None:
                    reads[read.key] = writer
                    self.last_reader[read.key, writer] = number
            self.seen.append(reads)
            for key in item.op.writes:
                source = item.op.passes.get(key)
                aliased = source is not None and source in reads
                self.root[key, number] = self.root[source, reads[source]] if aliased and source else (key, number)
                self.written_by[key] = number

    def _writer(self, read: Read, item: Placed) -> int | None:
        writer = self.written_by.get(read.key)
        if writer is not None:
            same_layer = writer == INPUT or self.placed[writer].layer == item.layer
            if same_layer or read.key in self.carries:
                return writer
        if read.default is not REQUIRED:
            return None
        if writer is not None:
            raise PlanError(
                f"{item}: reads {read.key!r}, last written by {self.placed[writer]}, in another layer",
                remedy=f"Add {read.key!r} to carries, or write it in this layer.",
            )
        near = difflib.get_close_matches(read.key, self.written_by, n=1)
        guess = f"Did you mean {near[0]!r}? " if near else ""
        raise PlanError(
            f"{item}: reads {read.key!r}, which no op before it writes and which is not an input"
            f" (inputs: {', '.join(self.inputs) or 'none'})",
            remedy=f"{guess}Write it earlier, add it to inputs, or give the parameter a default.",
        )

    def check_mutations(self) -> None:
        """An in-place change must not be seen by anyone else: a later reader, an alias, the caller, a transfer."""
        waits = {
            reads[item.op.waits]: number
            for number, (item, reads) in enumerate(zip(self.placed, self.seen, strict=True))
            if item.op.waits in reads
        }
        for number, item in enumerate(self.placed):
            for key in item.op.mutates:
                if key in self.seen[number]:
                    self._check_mutation(number, item, key)
                    self._check_transfers(number, item, key, waits)

    def _check_mutation(self, number: int, item: Placed, key: str) -> None:
        root = self.root[key, self.seen[number][key]]
        if root[1] == INPUT:
            raise PlanError(
                f"{item}: mutates {key!r}, which is or aliases the input {root[0]!r}",
                remedy="The caller may still use it: write a new value instead.",
            )
        for (other, writer), last in self.last_reader.items():
            if self.root[other, writer] == root and last > number and writer < number:
                reader = str(self.placed[last]) if last < len(self.placed) else f"the plan's output {other!r}"
                raise PlanError(
                    f"{item}: mutates {key!r}, but {reader} reads the same storage later",
                    remedy="Make the mutating op the last reader, or write a new value.",
                )

    def _check_transfers(self, number: int, item: Placed, key: str, waits: Mapping[int, int]) -> None:
        """What a start reads belongs to the transfer until its wait."""
        root = self.root[key, self.seen[number][key]]
        for start in range(number):
            in_flight = self.placed[start].op.starts is not None and waits.get(start, number) > number
            if in_flight and any(self.root[read] == root for read in self.seen[start].items()):
                raise PlanError(
                    f"{item}: mutates {key!r} while the communication from {self.placed[start]} may still read it",
                    remedy="Make the change after the wait, or write a new value.",
                )


def trace_flow(
    placed: Sequence[Placed], inputs: tuple[str, ...], outputs: tuple[str, ...], carries: frozenset[str]
) -> Flow:
    """Resolves every read; see `compile_plan` for what is refused."""
    if doubled := sorted({key for key in inputs if inputs.count(key) > 1}):
        raise PlanError(f"input {doubled[0]!r} is listed twice", remedy="List each input once.")
    tracer = _Tracer(placed, inputs, carries)
    tracer.trace()
    end = len(placed)
    for key in outputs:
        writer = tracer.written_by.get(key)
        if writer is None:
            near = difflib.get_close_matches(key, tracer.written_by, n=1)
            guess = f"Did you mean {near[0]!r}? " if near else ""
            raise PlanError(
                f"output {key!r} is never written", remedy=f"{guess}Let an op write it, or take it out of outputs."
            )
        tracer.last_reader[key, writer] = end
    tracer.check_mutations()
    return _flow(tracer)


def _flow(tracer: _Tracer) -> Flow:
    arguments = tuple(
        {key: tracer.last_reader[key, writer] == number for key, writer in reads.items()}
        for number, reads in enumerate(tracer.seen)
    )
    dead = tuple(
        tuple(key for key in item.op.writes if (key, number) not in tracer.last_reader)
        for number, item in enumerate(tracer.placed)
    )
    unread = [key for key in tracer.inputs if (key, INPUT) not in tracer.last_reader]
    warnings = tuple(f"input {key!r} is read by no op" for key in unread)
    return Flow(arguments, tuple(tracer.seen), dead, warnings)
