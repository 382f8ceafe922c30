"""A plan played on a virtual clock: the predicted timeline, without a GPU and equal every time.

Three lanes: *compute* runs ops one after another, the *link* runs transfers in the order in which they are issued, and
the *host* issues everything. A communication has three moments: ready (its input is computed), issue (the host hands it
to the link) and wait. The result holds all that the order itself costs (fill, drain, transfers that queue behind each
other) and, with a host that blocks or launches slowly, what that costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from tbo.core import Plan, Where
from tbo.core.op import Op
from tbo.errors import UserError
from tbo.timeline.span import Kind, Lane, Span, Timeline, make_timeline

COMPUTE, LINK, HOST = "compute", "link", "host"


class DurationsError(UserError):
    """Durations that do not fit a plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """How long things take for one sub-batch, in nanoseconds.

    Attributes:
        compute: by op name; an op that is absent takes no time.
        transfer: by the name of the op that starts it; every starting op needs one.
    """

    compute: Mapping[str, int]
    transfer: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """How the host takes part.

    Attributes:
        issues_in: the half of a communication in which the host hands it to the link: "a" with the start, "b" with
            the wait.
        blocks_host: the half of a dispatch in which the host stands until the counts of other ranks are there; None
            if it never does.
        counts_ns: how long they take after the dispatch's input is ready.
        launch_ns: what the host needs to launch one op.
        one_thread: computation runs on the host itself, as on a CPU: while one works, so does the other, and every
            wait stops it.
    """

    issues_in: Literal["a", "b"] = "a"
    blocks_host: Literal["a", "b"] | None = None
    counts_ns: int = 0
    launch_ns: int = 0
    one_thread: bool = False


CPU: Final = Machine(one_thread=True)
GPU: Final = Machine()


@dataclass(slots=True)
class _Communication:
    where: Where
    ready: int
    begin: int = -1
    end: int = -1


@dataclass(slots=True)
class _Player:
    durations: Durations
    machine: Machine
    spans: list[Span] = field(default_factory=list)
    host: int = 0
    compute: int = 0
    link: int = 0
    under_way: dict[tuple[int, str], _Communication] = field(default_factory=dict)

    def play(self, op: Op, where: Where) -> None:
        """One op: launch, wait, compute, start, in this order."""
        machine = self.machine
        if machine.launch_ns:
            self._span(where, HOST, Kind.HOST, self.host, self.host + machine.launch_ns)
            self.host += machine.launch_ns
        if op.waits is not None:
            self._wait(self.under_way.pop((where.sub_batch, op.waits)), op)
        duration = self.durations.compute.get(op.name, 0)
        begin = max(self.compute, self.host)
        if duration:
            self._span(where, COMPUTE, Kind.COMPUTE, begin, begin + duration)
            self.compute = begin + duration
        if machine.one_thread:
            self.host = max(self.host, self.compute)
        if op.starts is not None:
            communication = _Communication(where=where, ready=self.compute)
            self.under_way[where.sub_batch, op.writes[0]] = communication
            if machine.issues_in == "a":
                self._issue(communication, blocks=machine.blocks_host == "a" and _is_dispatch(op))

    def _wait(self, communication: _Communication, op: Op) -> None:
        if self.machine.issues_in == "b":
            self._issue(communication, blocks=self.machine.blocks_host == "b" and _is_dispatch(op))
        elif self.machine.blocks_host == "b" and _is_dispatch(op):
            self._block_host(communication, communication.ready + self.machine.counts_ns)
        self.compute = max(self.compute, communication.end)
        if self.machine.one_thread:
            self.host = max(self.host, communication.end)

    def _issue(self, communication: _Communication, *, blocks: bool) -> None:
        if blocks:
            self._block_host(communication, communication.ready + self.machine.counts_ns)
        communication.begin = max(self.link, communication.ready, self.host)
        communication.end = communication.begin + self.durations.transfer[communication.where.op]
        self.link = communication.end
        self._span(communication.where, LINK, Kind.TRANSFER, communication.begin, communication.end)

    def _block_host(self, communication: _Communication, until: int) -> None:
        if until > self.host:
            self._span(communication.where, HOST, Kind.HOST, self.host, until)
            self.host = until

    def _span(self, where: Where, lane: str, kind: Kind, start: int, end: int) -> None:
        self.spans.append(
            Span(
                op=where.op,
                lane=lane,
                kind=kind,
                start_ns=start,
                end_ns=end,
                stage=str(where.stage),
                layer=where.layer,
                sub_batch=where.sub_batch,
            )
        )


def predict(plan: Plan, durations: Durations, machine: Machine = GPU, *, title: str = "") -> Timeline:
    """The timeline of one step.

    Args:
        plan: interleaved or sequential.
        durations: of one sub-batch.
        machine: how the host takes part.
        title: for people.

    Raises:
        DurationsError: an op starts a transfer whose duration is not given, a duration is negative, or one names an op
            that the plan does not have.
    """
    _check(plan, durations)
    player = _Player(durations, machine)
    for sub_batch, stage in plan.order:
        for step in plan.stages[stage].steps:
            player.play(step.op, Where(sub_batch, stage, step.layer, step.op.name))
    lanes = [Lane(name=COMPUTE), Lane(name=LINK)]
    if machine.launch_ns or machine.blocks_host:
        lanes.append(Lane(name=HOST))
    return make_timeline(player.spans, source="plan", lanes=lanes, title=title)


def _is_dispatch(op: Op) -> bool:
    """Only a dispatch must learn how many rows will come; a combine knows."""
    return "combine" not in op.name


def _check(plan: Plan, durations: Durations) -> None:
    starts = {step.op.name for stage in plan.stages for step in stage.steps if step.op.starts is not None}
    ops = {step.op.name for stage in plan.stages for step in stage.steps}
    for missing in sorted(starts - durations.transfer.keys()):
        raise DurationsError(
            f"{missing} starts a transfer whose duration is not given",
            remedy=f"Add {missing} to the transfer durations; this plan starts {', '.join(sorted(starts))}.",
        )
    for unknown in sorted((durations.compute.keys() - ops) | (durations.transfer.keys() - starts)):
        raise DurationsError(
            f"a duration is given for {unknown}, which this plan does not {'start' if unknown in ops else 'run'}",
            remedy=f"Ops of this plan: {', '.join(sorted(ops))}.",
        )
    for name, duration in (*durations.compute.items(), *durations.transfer.items()):
        if duration < 0:
            raise DurationsError(f"{name} has a duration of {duration} ns", remedy="Give 0 or more.")


__all__ = ["CPU", "GPU", "Durations", "DurationsError", "Machine", "predict"]
