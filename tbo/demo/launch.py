"""Starts the demo's ranks as processes of this machine, listens to them, and leaves none behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tbo.demo.messages import Failed, Finished, Progressed, RankResult
from tbo.demo.options import DemoOptions
from tbo.demo.rank import Job, rank_main
from tbo.errors import PeerError

SILENCE_SECONDS = 300.0
"""No word from any rank for this long ends the demo. A rank speaks at every step; loading takes tens of seconds."""

_GRACE_SECONDS = 5.0
"""How long a rank may take to end, or to say that a failure was its own and not a peer's."""

_LOG_LINES = 12


class _Rank:
    """One process and what is known of it."""

    def __init__(self, job: Job, process: BaseProcess, connection: Connection) -> None:
        self.job = job
        self.process = process
        self.connection = connection
        self.result: RankResult | None = None
        self.failure: Failed | None = None
        self.last_word = "starting"

    @property
    def over(self) -> bool:
        """Nothing more is expected of it."""
        return self.result is not None or self.failure is not None


def run_ranks(
    options: DemoOptions, listen: Callable[[Progressed], None], *, silence: float = SILENCE_SECONDS
) -> list[RankResult]:
    """Runs the demo on `options.ranks` processes and returns what each has to show, by rank.

    Args:
        options: the same for all.
        listen: called in this thread with every word of progress.
        silence: seconds without a word from any rank after which all are stopped.

    Raises:
        PeerError: a rank failed, died or fell silent; names it, with what it said last.
    """
    with _started(options) as ranks:
        while not all(rank.over for rank in ranks):
            open_ranks = [rank for rank in ranks if not rank.over]
            handles: list[Any] = [rank.connection for rank in open_ranks]
            if not wait(handles, timeout=silence):
                words = "; ".join(f"rank {rank.job.rank}: {rank.last_word}" for rank in open_ranks)
                raise PeerError(f"no rank of the demo said anything for {silence:.0f} s (last: {words})")
            for rank in open_ranks:
                _hear(rank, listen)
            if any(rank.failure is not None for rank in ranks):
                raise _failure(ranks)
        _wait_for_exit(ranks)
        return [rank.result for rank in ranks if rank.result is not None]


@contextlib.contextmanager
def _started(options: DemoOptions) -> Iterator[list[_Rank]]:
    """All ranks running; whatever happens in the body, none is left afterwards."""
    from torch.distributed import TCPStore

    # The parent hosts the store and lets the system choose a port: no rank has to guess a free one.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="tbo-demo-") as folder:
        try:
            with _interrupts_held_back():
                for number in range(options.ranks):
                    job = Job(
                        rank=number,
                        options=options,
                        store_port=store.port,
                        loopback=_loopback(),
                        threads=threads_per_rank(options.ranks),
                        log=str(Path(folder) / f"rank-{number}.log"),
                    )
                    ours, theirs = context.Pipe(duplex=False)
                    process = context.Process(target=rank_main, args=(job, theirs), name=f"tbo demo rank {number}")
                    process.start()
                    theirs.close()
                    ranks.append(_Rank(job, process, ours))
            yield ranks
        finally:
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.process.join()
                rank.connection.close()


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C reaches every process of the terminal; ranks started here inherit that it is not theirs to answer."""
    resource_tracker.ensure_running()  # multiprocessing's own helper; starting it later would let interrupts in again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hear(rank: _Rank, listen: Callable[[Progressed], None]) -> None:
    """Takes all a rank has said. A pipe that closes without a last word means that the process died."""
    try:
        while not rank.over and rank.connection.poll():
            message = rank.connection.recv()
            if isinstance(message, Finished):
                rank.result = message.result
            elif isinstance(message, Failed):
                rank.failure = message
            else:
                rank.last_word = message.what
                listen(message)
    except (EOFError, OSError):
        rank.process.join(_GRACE_SECONDS)
        text = (
            f"ended without a word ({_exit_text(rank.process.exitcode)}), last seen {rank.last_word}{_log_tail(rank)}"
        )
        rank.failure = Failed(rank=rank.job.rank, message=text, blames_peer=False)


def _failure(ranks: list[_Rank]) -> PeerError:
    """The failure that came first in cause, if not in time: ranks that only noticed a peer's are asked to wait."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while True:
        failed = [rank for rank in ranks if rank.failure is not None]
        culprit = next((rank for rank in failed if rank.failure is not None and not rank.failure.blames_peer), None)
        waiting = [rank for rank in ranks if not rank.over]
        left = deadline - time.monotonic()
        if culprit is not None or not waiting or left <= 0:
            break
        handles: list[Any] = [rank.connection for rank in waiting]
        wait(handles, timeout=left)
        for rank in waiting:
            _hear(rank, lambda _: None)
    rank = culprit or failed[0]
    message = "" if rank.failure is None else rank.failure.message
    return PeerError(f"rank {rank.job.rank} of the demo failed: {message}", rank=rank.job.rank)


def _log_tail(rank: _Rank) -> str:
    """The last lines a rank had printed."""
    log = Path(rank.job.log)
    lines = log.read_text(errors="replace").strip().splitlines()[-_LOG_LINES:] if log.exists() else []
    return "".join(f"\n  | {line}" for line in lines)


def _wait_for_exit(ranks: list[_Rank]) -> None:
    """Ranks that are through end by themselves; one that hangs in its exit is killed by the caller."""
    deadline = time.monotonic() + _GRACE_SECONDS
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))


def _exit_text(code: int | None) -> str:
    if code is None:
        return "it closed its pipe and runs on"
    if code < 0:
        hint = "; the machine may be short of memory" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"
    return f"exit code {code}"


def threads_per_rank(ranks: int) -> int:
    """An equal share of the cores this process may use, at least one."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    return max(1, cores // ranks)


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else next((name for name in names if name.startswith("lo")), "lo")
