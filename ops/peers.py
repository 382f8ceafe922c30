"""The ranks of one expert-parallel group: exchange rows, agree on numbers and settings, and fail together."""

from __future__ import annotations

import atexit
import ctypes
import json
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tbo.core import Progress
from tbo.errors import DispatcherError, PeerError
from tbo.ops.heartbeat import Heartbeat
from tbo.ops.rendezvous import (
    Group,
    build_gloo,
    build_nccl,
    collective_options,
    data_backend,
    open_meeting,
    refuse_disagreement,
    wait_for_all,
)
from tbo.ops.vigil import TICK, ConnectionClosedError, Vigil

_TICK = timedelta(seconds=TICK)
_POLL = 50e-6


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective under way.

    Attributes:
        work: torch's handle.
        number: how many collectives this rank had started, this one included. All ranks start the same ones in the
            same order, so the number tells who has not come to it.
    """

    work: dist.Work
    number: int


class Peers:
    """This rank's side of an expert-parallel group, on communication groups of its own.

    Ranks are ranks within `ep_group`. Making it is collective: every rank of the group makes one.

    Args:
        ep_group: the ranks that share the experts; None for the whole world.
        sub_batches: how many data groups to make, one a sub-batch.
        timeout: seconds of *silence* after which ranks that never came are named. A failure that some rank recorded
            stops all ranks within 10 s, whatever this is.
        progress: says where this rank is; read by the heartbeat.
        device: where the rows to exchange live, which decides the transport of the data groups.

    Attributes:
        rank, world_size: within `ep_group`.
        control: gloo group for votes and facts.
        data: one group a sub-batch.
        transport: of the data groups, ``gloo`` or ``nccl``.

    Raises:
        DispatcherError: no process group, not a member, or senseless arguments.
        RanksDisagreeError: ranks differ in `sub_batches` or transport.
        PeerError: a rank did not come within `timeout`.
    """

    def __init__(
        self,
        ep_group: dist.ProcessGroup | None,
        *,
        sub_batches: int,
        timeout: float,
        progress: Progress | None = None,
        device: torch.device | None = None,
    ) -> None:
        if sub_batches < 1 or timeout <= 0:
            raise DispatcherError(
                f"sub_batches={sub_batches} and timeout={timeout} must both be positive",
                remedy="Pass the number of sub-batches and a limit in seconds.",
            )
        device = device or torch.device("cpu")
        backend = data_backend(device)
        meeting = open_meeting(ep_group)
        self.rank, self.world_size = meeting.rank, meeting.world_size
        self.transport = backend
        self._started = 0
        self._options = collective_options(timeout)
        self._heartbeat = Heartbeat(
            meeting.watch_store,
            rank=meeting.rank,
            world_size=meeting.world_size,
            hosts_store=meeting.hosts_store,
            describe=progress.describe if progress is not None else lambda: "outside a step",
        )
        self._heartbeat.announce()
        store_rank = wait_for_all(meeting, {"sub_batches": str(sub_batches), "transport": backend}, timeout)
        self._vigil = Vigil(
            self._heartbeat,
            rank=meeting.rank,
            timeout=timeout,
            progress=progress,
            store_address=meeting.store_address,
            store_rank=store_rank,
        )
        self._heartbeat.start()
        self._ties = _Ties(self._heartbeat)
        weakref.finalize(self, self._ties.cut, "it let its groups go").atexit = False
        groups = self._ties.groups
        try:
            groups.append(build_gloo(meeting, "control"))
            for index in range(sub_batches):
                name = f"data/{index}"
                groups.append(build_nccl(meeting, name, timeout) if backend == "nccl" else build_gloo(meeting, name))
        except RuntimeError as error:
            self._vigil.blame_closed_connection("the setting up of communication groups", error)
        self.control: Group = groups[0]
        self.data: tuple[Group, ...] = tuple(groups[1:])

    def exchange(self, group: Group, output: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> Exchange:
        """Starts an all-to-all of `rows` along dimension 0; empty lists of counts mean equal parts.

        All ranks must start the same exchanges in the same order. Nothing may touch the two tensors until it is over.

        Raises:
            PeerError: the group failed earlier.
        """
        self.check()
        self._started += 1
        self._heartbeat.started = self._started
        exchange = Exchange(group.alltoall_base(output, rows, received, sent, self._options), self._started)
        # Kept for as long as the transport may write to it: see `_Ties.cut`.
        self._ties.under_way[exchange.number] = (exchange.work, output, rows)
        return exchange

    def wait(self, exchange: Exchange, what: str) -> None:
        """Waits for an exchange on a CPU group, in short waits that look for word of a failure in between.

        Args:
            exchange: what `exchange` returned.
            what: names it in messages, such as "the rows of dispatch, sub-batch 1".

        Raises:
            PeerError: a rank failed, died, left, or was silent for longer than the timeout.
        """
        work = exchange.work

        def finished() -> bool:
            # One exception type means "not yet" and "broken". Asked beforehand, because it may complete in between.
            completed = work.is_completed()
            try:
                work.wait(_TICK)
            except RuntimeError as error:
                if completed:
                    raise ConnectionClosedError(str(error)) from error
                return False
            return True

        self._vigil.wait(finished, exchange.number, what)
        self._ties.under_way.pop(exchange.number, None)

    def wait_until(self, ready: Callable[[], bool], exchange: Exchange, what: str) -> None:
        """Like `wait`, where only a question (to a CUDA event) tells whether what was exchanged is there."""

        def finished() -> bool:
            deadline = time.monotonic() + TICK
            while not (done := ready()) and time.monotonic() < deadline:
                time.sleep(_POLL)
            return done

        self._vigil.wait(finished, exchange.number, what)
        self._ties.under_way.pop(exchange.number, None)

    def wait_on_stream(self, exchange: Exchange) -> None:
        """Makes the current CUDA stream, not the host, wait for an exchange on an NCCL group."""
        exchange.work.wait()
        self._ties.under_way.pop(exchange.number, None)

    def gather(self, numbers: Sequence[int], what: str = "a vote") -> list[tuple[int, ...]]:
        """Every rank's `numbers`, in rank order. Collective; all ranks pass equally many.

        Raises:
            PeerError: see `wait`.
        """
        # An all-to-all of equal copies reaches every rank in one step; gloo's all-gather goes round a ring.
        sent_Wn = torch.tensor(numbers, dtype=torch.int64).expand(self.world_size, len(numbers)).contiguous()
        received_Wn = torch.empty_like(sent_Wn)
        self.wait(self.exchange(self.control, received_Wn, sent_Wn, [], []), what)
        return [tuple(row) for row in received_Wn.tolist()]

    def compare(self, facts: Mapping[str, str]) -> None:
        """Checks that all ranks hold the same facts. Collective.

        Raises:
            RanksDisagreeError: on every rank alike, naming each fact that differs, with ranks and values.
            PeerError: see `wait`.
        """
        what = "the comparison of settings"
        text = torch.frombuffer(bytearray(json.dumps(dict(facts)).encode()), dtype=torch.uint8)
        lengths = [length for (length,) in self.gather([len(text)], what)]
        received = torch.empty(sum(lengths), dtype=torch.uint8)
        copies = text.repeat(self.world_size)
        self.wait(self.exchange(self.control, received, copies, lengths, [len(text)] * self.world_size), what)
        refuse_disagreement([json.loads(bytes(part.tolist())) for part in received.split(lengths)])

    def fail(self, error: BaseException) -> None:
        """Records this rank's failure for all ranks and gives the groups up. Raises nothing; takes 2 s at most."""
        if not self._ties.are_cut:
            self._vigil.fail(error)

    def check(self) -> None:
        """Raises PeerError if the groups cannot be used any more. Costs well under a microsecond otherwise."""
        self._vigil.check()
        if self._ties.are_cut:
            raise PeerError(f"rank {self.rank} has closed its expert-parallel groups", rank=self.rank)

    def close(self, reason: str = "it closed its groups") -> None:
        """Leaves in good order; ranks that still wait for this one are told why. Bounded, and safe to repeat."""
        self._ties.cut(reason)


class _Ties:
    """What binds a `Peers` to its group: the heartbeat, the groups, and the exchanges under way.

    Apart from `Peers`, so that they can be cut when nobody holds it any more, and at the latest when the process ends:
    a thread that outlives the interpreter aborts the process.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self.under_way: dict[int, tuple[dist.Work, Tensor, Tensor]] = {}
        self.groups: list[Group] = []
        self.are_cut = False
        atexit.register(self._cut_at_exit)

    def cut(self, reason: str, *, process_ends: bool = False) -> None:
        """Leaves the group, telling the others why. Bounded, and safe to repeat."""
        self.are_cut = True
        if self.heartbeat.stop(reason, process_ends=process_ends):
            atexit.unregister(self._cut_at_exit)
        if any(not work.is_completed() for work, _, _ in self.under_way.values()):
            # A gloo group's destructor waits for its pending collectives, which may never end, and would hang the exit.
            # Nobody can cancel them either. So the group, and the memory it writes to, live as long as the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((self.under_way, tuple(self.groups))))
        self.under_way = {}
        self.groups.clear()

    def _cut_at_exit(self) -> None:
        unhandled = getattr(sys, "last_value", None)
        reason = "its process ended"
        if unhandled is not None:
            reason += f" with {type(unhandled).__name__}: {unhandled}"
        self.cut(reason, process_ends=True)
