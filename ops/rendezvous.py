"""How the ranks of an expert-parallel group meet: a store of their own, and communication groups of their own.

The groups are built on the store directly instead of through `dist.new_group`: that call takes part of the whole world,
or (with `use_local_synchronization`) derives the name on which ranks meet from how many groups a process has, which
differs between ranks as soon as one of them is in a group another is not.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tbo.errors import DispatcherError, PeerError, RanksDisagreeError
from tbo.ops.failure import disagreements

_CONNECT_LIMIT = timedelta(seconds=20)
_STORE_LIMIT = timedelta(seconds=5)
_MOST_FACTS = 8
"""Disagreements that are told; two different models differ in dozens."""


class Group(Protocol):
    """The one collective `tbo` needs; `torch.distributed` backends offer it (their type stubs do not show it)."""

    def alltoall_base(  # noqa: D102 - named and described by torch
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: dist.AllToAllOptions,
    ) -> dist.Work: ...


class _FullStore(Protocol):
    """What a store offers beyond torch's type stubs."""

    def clone(self) -> dist.Store: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where the ranks of one group meet.

    Attributes:
        store: keys of this meeting only; for the thread that made it.
        watch_store: the same keys over a connection of its own, for the heartbeat's thread.
        store_address: where its host listens, for messages.
        hosts_store: this rank's process is its host.
    """

    rank: int
    world_size: int
    store: dist.Store
    watch_store: dist.Store
    store_address: str
    hosts_store: bool


def open_meeting(ep_group: dist.ProcessGroup | None) -> Meeting:
    """Opens this rank's side of a meeting of `ep_group` (None: the whole world).

    Raises:
        DispatcherError: `torch.distributed` is not initialised, or this process is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise DispatcherError(
            "torch.distributed is not initialised, so there are no ranks to exchange tokens with",
            remedy="Call torch.distributed.init_process_group first, or start with torchrun.",
        )
    group = dist.group.WORLD if ep_group is None else ep_group
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise DispatcherError(
            f"this process (rank {dist.get_rank()} of the world) is not a member of ep_group {ep_group!r}",
            remedy="Pass each process the expert-parallel group that it belongs to.",
        )
    rank = dist.get_rank(group)
    base = group.get_group_store()
    # Counted in the store: the n-th meeting of this group on one rank is the n-th on every rank.
    number = base.add(f"tbo/meetings/{rank}", 1)
    innermost = base
    while isinstance(innermost, dist.PrefixStore):
        innermost = innermost.underlying_store
    watch_base = cast("_FullStore", base).clone()
    watch_base.set_timeout(_STORE_LIMIT)
    prefix = f"tbo/{number}"
    return Meeting(
        rank=rank,
        world_size=dist.get_world_size(group),
        store=dist.PrefixStore(prefix, base),
        watch_store=dist.PrefixStore(prefix, watch_base),
        store_address=_address(innermost),
        hosts_store=_is_host(innermost),
    )


def wait_for_all(meeting: Meeting, facts: Mapping[str, str], timeout: float) -> int | None:
    """Ends once every rank has come with the same facts.

    Returns:
        The rank that hosts the store, or None if it is hosted outside of the group.

    Raises:
        PeerError: ranks did not come within `timeout` seconds, or one declined; names them.
        RanksDisagreeError: names the facts, ranks and values.
    """
    hello = {"facts": dict(facts), "hosts_store": meeting.hosts_store}
    meeting.store.set(f"hello/{meeting.rank}", json.dumps(hello))
    said: dict[int, dict[str, Any]] = {meeting.rank: hello}
    deadline = time.monotonic() + timeout
    pause = 0.001
    # Asking in short steps, not `store.wait`: that logs a stack trace for every limit that passes.
    while True:
        missing = [rank for rank in range(meeting.world_size) if rank not in said]
        said |= {rank: _hello_of(meeting, rank) for rank in missing if meeting.store.check([f"hello/{rank}"])}
        missing = [rank for rank in missing if rank not in said]
        if not missing:
            break
        if time.monotonic() > deadline:
            raise PeerError(
                f"rank {meeting.rank} waited {timeout:.1f} s to set up expert parallelism, but "
                f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))} never came: "
                "every rank of ep_group has to wrap its model",
                rank=missing[0],
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    in_order = [said[rank] for rank in range(meeting.world_size)]
    refuse_disagreement([each["facts"] for each in in_order])
    return next((rank for rank, each in enumerate(in_order) if each["hosts_store"]), None)


def _hello_of(meeting: Meeting, rank: int) -> dict[str, Any]:
    hello: dict[str, Any] = json.loads(meeting.store.get(f"hello/{rank}"))
    if "declined" in hello:
        raise PeerError(f"rank {rank} failed: outside a step: {hello['declined']}", rank=rank)
    return hello


def decline(ep_group: dist.ProcessGroup | None, error: BaseException) -> None:
    """Tells the ranks of a group that this one found a mistake before it could meet them. Waits for nobody."""
    said = {"declined": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(RuntimeError):  # of a store that is gone: the mistake itself must still be raised
        meeting = open_meeting(ep_group)
        meeting.store.set(f"hello/{meeting.rank}", json.dumps(said))


def refuse_disagreement(facts_of_rank: Sequence[Mapping[str, str]]) -> None:
    """Raises RanksDisagreeError if ranks differ on a fact. Every rank raises the same words."""
    if lines := disagreements(facts_of_rank):
        more = [f"and {len(lines) - _MOST_FACTS} more"] if len(lines) > _MOST_FACTS else []
        raise RanksDisagreeError(
            "ranks of this expert-parallel group are set up differently: " + "; ".join(lines[:_MOST_FACTS] + more),
            remedy="Give every rank the same model, options and versions.",
        )


def collective_options(timeout: float) -> dist.AllToAllOptions:
    """The transport's own limit, which only matters if ours (`timeout` seconds, shorter) is not kept."""
    options = dist.AllToAllOptions()
    options.timeout = timedelta(seconds=2 * timeout + 60)
    return options


def build_gloo(meeting: Meeting, name: str) -> Group:
    """A gloo group of all the meeting's ranks, who must all be there: connecting has a limit of its own."""
    store = dist.PrefixStore(name, meeting.store)
    return cast("Group", dist.ProcessGroupGloo(store, meeting.rank, meeting.world_size, timeout=_CONNECT_LIMIT))


def build_nccl(meeting: Meeting, name: str, timeout: float) -> Group:
    """An NCCL group of all the meeting's ranks; its communicator is made by the first collective."""
    backend: Any = dist.ProcessGroupNCCL  # an Any, because CPU builds of torch have no such class to check against
    options = backend.Options()
    options._timeout = timedelta(seconds=2 * timeout + 60)  # noqa: SLF001 - torch's name for it
    group = backend(dist.PrefixStore(name, meeting.store), meeting.rank, meeting.world_size, options)
    return cast("Group", group)


def data_backend(device: torch.device) -> str:
    """Which transport carries rows that live on `device`: NCCL for CUDA where torch has it, else gloo."""
    return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def _address(store: dist.Store) -> str:
    return f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else type(store).__name__


def _is_host(store: dist.Store) -> bool:
    """Only a store's printed form tells whether this process serves it. It decides the words of messages, no more."""
    if not isinstance(store, dist.TCPStore):
        return False
    printed = repr(store)
    return "server=" in printed and "server=<nullptr>" not in printed
