"""Ranks that exchange, agree, and fail together: real processes, each failure named and bounded in time."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import STORE_PID, Result, run_ranks, values
from tbo.core import Progress, Where
from tbo.errors import DispatcherError, OpError, PeerError, RanksDisagreeError, TboError
from tbo.ops.peers import Peers

BOUND = 10.0
LAST_OP = "sub-batch 1, layer 3, stage 7, op_dispatch_b"


class AtDispatch(Progress):
    """A run that is always at the same op."""

    def describe(self) -> str:
        return LAST_OP


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank learnt: the message, whom it names, and how long after the last good exchange."""

    message: str
    rank: int | None
    seconds: float
    later: str


def exchange_until_failure(action: str, culprit: int, timeout: float) -> Told:
    """Exchanges until something goes wrong; after ten good exchanges the culprit acts."""
    peers = Peers(None, sub_batches=2, timeout=timeout, progress=AtDispatch())
    rows = torch.ones(peers.world_size * 4, 8)
    last = time.monotonic()
    try:
        for step in range(200):
            if step == 10 and peers.rank == culprit:
                misbehave(peers, action)
            exchange = peers.exchange(peers.data[step % 2], torch.empty_like(rows), rows, [], [])
            peers.wait(exchange, "the rows of op_dispatch_b")
            last = time.monotonic()
            if step > 10:
                time.sleep(0.02)
    except TboError as error:
        told = time.monotonic() - last
        with pytest.raises(PeerError) as later:
            peers.gather([1])
        return Told(str(error), getattr(error, "rank", None), told, str(later.value))
    raise AssertionError("two hundred exchanges and no failure")


def misbehave(peers: Peers, action: str) -> None:
    if action == "raise":
        cause = ValueError("boom")
        error = OpError(Where(1, 7, 3, "op_experts"), peers.rank, {"rows": "[8, 16] float32"}, cause)
        peers.fail(error)
        raise error from cause
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "kill the store's host":
        os.kill(int(os.environ[STORE_PID]), signal.SIGKILL)
    if action == "sleep":
        time.sleep(5)
    if action == "leave":
        peers.close("it had answered all its questions")
        raise SystemExit(0)
    if action == "stop with a mistake":
        raise KeyError("a mistake outside of tbo")
    if action == "interrupt":
        threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(0.3)


def told(results: list[Result], culprits: set[int], *phrases: str) -> list[Told]:
    """What the other ranks learnt, checked for every phrase, for the time bound and for a clean end of the process."""
    learnt = []
    for result in results:
        if result.rank in culprits:
            continue
        assert result.error is None, result.trace
        assert result.exit_code == 0, result.output
        assert "terminate called" not in result.output
        for phrase in phrases:
            assert phrase in result.value.message
        assert result.value.seconds < BOUND
        assert "cannot be used any more" in result.value.later
        learnt.append(result.value)
    return learnt


@pytest.mark.timeout(60)
@pytest.mark.parametrize("culprit", [0, 2])
def test_an_op_that_raises_is_named_on_every_rank(culprit: int) -> None:
    results = run_ranks(4, exchange_until_failure, "raise", culprit, 60.0, together=False)
    learnt = told(results, set(), "sub-batch 1, layer 3, stage 7, op_experts: ValueError: boom")
    for result in results:
        assert f"rank {culprit}{',' if result.rank == culprit else ' failed:'} sub-batch 1" in result.value.message
    assert all(word.rank == culprit for word in learnt)
    # The others need no timeout for this: word is in the store.
    assert max(word.seconds for word in learnt) < 4


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("culprit", "store"), [(2, "rank 0"), (0, "separate")])
def test_a_killed_rank_is_named_with_its_last_op(culprit: int, store: Any) -> None:
    results = run_ranks(3, exchange_until_failure, "kill", culprit, 60.0, store=store, together=False)
    assert results[culprit].exit_code == -signal.SIGKILL
    learnt = told(results, {culprit}, f"rank {culprit} stopped reporting", LAST_OP, "the rows of op_dispatch_b")
    assert all(word.rank == culprit for word in learnt)


@pytest.mark.timeout(60)
def test_a_killed_rank_that_hosts_the_store_is_named() -> None:
    results = run_ranks(3, exchange_until_failure, "kill", 0, 60.0, together=False)
    assert results[0].exit_code == -signal.SIGKILL
    learnt = told(results, {0}, "rank 0, which hosts the store (127.0.0.1:", f"it was last in {LAST_OP}")
    assert all(word.rank == 0 for word in learnt)


@pytest.mark.timeout(60)
def test_a_store_that_dies_alone_is_named_as_such() -> None:
    results = run_ranks(2, exchange_until_failure, "kill the store's host", 1, 60.0, store="separate", together=False)
    learnt = told(results, set(), "the process that hosts the store (127.0.0.1:", "such as torchrun")
    assert all(word.rank is None for word in learnt)


@pytest.mark.timeout(60)
def test_a_silent_rank_is_named_after_the_timeout_and_does_not_hold_up_the_exit() -> None:
    results = run_ranks(3, exchange_until_failure, "sleep", 1, 1.5, together=False)
    words = "s for the rows of op_dispatch_b, but rank 1 never came to it: rank 1 is alive, last in " + LAST_OP
    learnt = told(results, set(), words)
    assert all(word.rank == 1 for word in learnt)
    assert 1.4 < learnt[0].seconds < 4
    # Rank 1 sleeps on while the others end, although their last collective is still under way.
    assert results[0].lifetime < results[1].lifetime - 0.5
    assert results[2].lifetime < results[1].lifetime - 0.5


@pytest.mark.timeout(60)
def test_a_rank_that_left_in_good_order_is_named_with_its_reason() -> None:
    results = run_ranks(3, exchange_until_failure, "leave", 2, 60.0, together=False)
    learnt = told(results, {2}, "rank 2 left while others waited", "it had answered all its questions")
    assert all(word.rank == 2 for word in learnt)


@pytest.mark.timeout(60)
def test_a_rank_that_ended_with_an_error_outside_of_tbo_is_named_with_it() -> None:
    results = run_ranks(2, exchange_until_failure, "stop with a mistake", 0, 60.0, store="separate", together=False)
    assert results[0].exit_code == 1
    told(results, {0}, "rank 0 left", "KeyError: 'a mistake outside of tbo'")


@pytest.mark.timeout(60)
def test_an_interrupted_rank_tells_the_others() -> None:
    results = run_ranks(2, interrupted_while_waiting, together=False)
    assert isinstance(results[0].error, KeyboardInterrupt)
    assert results[1].value.rank == 0
    assert "rank 0 failed" in results[1].value.message
    assert "KeyboardInterrupt" in results[1].value.message
    assert [result.exit_code for result in results] == [1, 0]


def interrupted_while_waiting() -> Told:
    peers = Peers(None, sub_batches=1, timeout=30.0, progress=AtDispatch())
    if peers.rank == 0:
        threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        time.sleep(1)
    began = time.monotonic()
    try:
        for _ in range(100):
            peers.gather([peers.rank])
    except PeerError as error:
        return Told(str(error), error.rank, time.monotonic() - began, "")
    raise AssertionError("the interrupt went unnoticed")


@pytest.mark.timeout(60)
def test_a_group_that_is_part_of_the_world_counts_its_own_ranks() -> None:
    results = run_ranks(4, in_a_part_of_the_world)
    assert values(results) == [
        "not a member",
        (0, [(0, 10), (1, 11)]),
        "not a member",
        (1, [(0, 10), (1, 11)]),
    ]


def in_a_part_of_the_world() -> Any:
    group: Any = dist.new_group([1, 3])
    # Rank 1 is in one group more than rank 3: names made from a process's number of groups would not meet.
    dist.new_group([0, 1])
    if dist.get_rank() in (0, 2):
        with pytest.raises(DispatcherError, match="is not a member of ep_group"):
            Peers(group, sub_batches=1, timeout=5.0)
        return "not a member"
    peers = Peers(group, sub_batches=1, timeout=5.0)
    return peers.rank, peers.gather([peers.rank, peers.rank + 10])


@pytest.mark.timeout(60)
def test_ranks_that_differ_are_told_so_and_can_go_on() -> None:
    first, second, third = values(run_ranks(3, compare_facts))
    assert first == second == third
    sub_batches, facts, gathered = first
    assert "sub_batches is 2 on ranks 0, 2, 3 on rank 1" in sub_batches
    assert facts == (
        "ranks of this expert-parallel group are set up differently: "
        "dtype is bfloat16 on rank 0, float32 on ranks 1, 2; "
        "extra is nothing on ranks 0, 1, yes on rank 2. "
        "Give every rank the same model, options and versions."
    )
    assert gathered == [(0,), (1,), (2,)]


def compare_facts() -> tuple[str, str, list[tuple[int, ...]]]:
    rank = dist.get_rank()
    with pytest.raises(RanksDisagreeError) as differing_setup:
        Peers(None, sub_batches=3 if rank == 1 else 2, timeout=5.0)
    peers = Peers(None, sub_batches=1, timeout=5.0)
    peers.compare({"torch": torch.__version__})
    facts = {"torch": torch.__version__, "dtype": "bfloat16" if rank == 0 else "float32"}
    if rank == 2:
        facts["extra"] = "yes"
    with pytest.raises(RanksDisagreeError) as differing_facts:
        peers.compare(facts)
    return str(differing_setup.value), str(differing_facts.value), peers.gather([rank])


@pytest.mark.timeout(60)
def test_a_rank_that_never_sets_up_is_named() -> None:
    results = run_ranks(3, set_up_without_rank_2)
    for message in values(results)[:2]:
        assert "to set up expert parallelism, but rank 2 never came" in message


def set_up_without_rank_2() -> str:
    if dist.get_rank() == 2:
        return ""
    with pytest.raises(PeerError) as error:
        Peers(None, sub_batches=1, timeout=0.5)
    return str(error.value)


@pytest.mark.timeout(60)
def test_many_groups_in_one_process_and_closing_twice() -> None:
    heartbeats = values(run_ranks(2, make_and_close_groups, together=False))
    assert heartbeats == [["tbo heartbeat of rank 0"], ["tbo heartbeat of rank 1"]]


def make_and_close_groups() -> list[str]:
    for _ in range(3):
        peers = Peers(None, sub_batches=3, timeout=5.0)
        assert peers.gather([7]) == [(7,), (7,)]
        peers.gather([7])
        peers.close()
        peers.close()
        with pytest.raises(PeerError, match="closed its expert-parallel groups"):
            peers.check()
    Peers(None, sub_batches=1, timeout=5.0).gather([1])
    # Let go without closing, that one's heartbeat ends too, once all ranks have left; this one's ends with the process.
    kept = Peers(None, sub_batches=1, timeout=5.0)
    kept.gather([1])
    deadline = time.monotonic() + 5
    while threading.active_count() > 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tbo")]


class CollectsGarbage(Progress):
    """Asked by the heartbeat where the run is, it collects garbage on the heartbeat's thread."""

    def describe(self) -> str:
        gc.collect()
        return "outside a step"


@pytest.mark.timeout(60)
def test_groups_that_are_collected_on_their_own_heartbeat_do_not_abort_the_exit() -> None:
    results = run_ranks(2, drop_groups_in_a_cycle, together=False)
    assert values(results) == [True, True]
    assert [result.output for result in results] == ["", ""]


def drop_groups_in_a_cycle() -> bool:
    gc.disable()
    peers = Peers(None, sub_batches=1, timeout=5.0, progress=CollectsGarbage())
    peers.gather([1])
    dropped = weakref.ref(peers)
    cycle: list[Any] = [peers]
    cycle.append(cycle)
    del peers, cycle
    deadline = time.monotonic() + 5
    while dropped() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    # The process ends while the heartbeat's thread is at its last words.
    return dropped() is None


@pytest.mark.timeout(60)
def test_the_host_of_the_store_ends_without_noise_on_the_others() -> None:
    results = run_ranks(2, end_one_after_the_other, together=False)
    assert values(results) == [None, None]
    assert [result.output for result in results] == ["", ""]


def end_one_after_the_other() -> None:
    peers = Peers(None, sub_batches=1, timeout=5.0)
    peers.gather([1])
    if peers.rank == 1:
        time.sleep(0.6)


def test_without_a_process_group_the_remedy_is_named() -> None:
    with pytest.raises(DispatcherError, match=r"Call torch\.distributed\.init_process_group first"):
        Peers(None, sub_batches=2, timeout=1.0)
    with pytest.raises(DispatcherError, match="must both be positive"):
        Peers(None, sub_batches=0, timeout=1.0)
