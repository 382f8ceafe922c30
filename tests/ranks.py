"""Runs a function on several real ranks: one process each, gloo on loopback, bounded in time.

    results = run_ranks(4, my_function, "an argument", timeout=30)
    assert values(results) == [...]

The function is module-level and finds `torch.distributed` initialised. Processes come from a fork server that has
loaded torch and transformers once, so that a rank starts in a fraction of a second.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

STORE_PID = "TBO_TEST_STORE_PID"
"""Environment variable of a rank: process id of the store's host under `store="separate"`."""

_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.testing",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "tbo",
    "tbo.ops.peers",
    "tbo.ops.all_to_all",
]
_GROUP_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What became of one rank.

    Attributes:
        value: what the function returned, or None.
        error: what it raised, or None. A `RuntimeError` with the text where the exception itself does not pickle.
        trace: the traceback of `error`.
        exit_code: as of `multiprocessing`: negative for a signal, 1 after an exception, None if killed on timeout.
        seconds: time the function ran.
        lifetime: seconds from the start of the first rank to the end of this process.
        output: what the process wrote to stdout and stderr.
    """

    rank: int
    value: Any
    error: BaseException | None
    trace: str
    exit_code: int | None
    seconds: float
    lifetime: float
    output: str


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    store: Literal["rank 0", "separate"] = "rank 0",
    together: bool = True,
) -> list[Result]:
    """Calls `function(*args)` on every rank and reports each rank's end.

    Args:
        function: module-level, in a file the ranks can load.
        timeout: seconds after which all ranks still running are killed.
        store: who hosts the TCP store; "separate" is what `torchrun` does.
        together: ranks whose function is over wait for the others, then run their exit functions and end. False lets
            each end on its own, as scripts do: at once, and through the interpreter's whole finalisation (half a second
            a rank), so that what goes wrong there shows in the exit code.
    """
    context = _fork_server()
    address = ("127.0.0.1", _free_port())
    with tempfile.TemporaryDirectory() as folder, _store_host(store, address) as store_pid:
        ranks = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            job = _Job(
                rank=rank,
                world_size=world_size,
                address=address,
                store_pid=store_pid,
                module=function.__module__,
                file=function.__code__.co_filename,
                name=function.__qualname__,
                args=pickle.dumps(args),
                log=str(Path(folder) / f"{rank}.log"),
                together=together,
            )
            process = context.Process(target=_rank_main, args=(job, theirs), name=f"rank {rank}")
            process.start()
            theirs.close()
            ranks.append(_Rank(process=process, connection=ours, log=Path(job.log)))
        _wait_for_end(ranks, timeout)
        return [rank.result(index) for index, rank in enumerate(ranks)]


def values(results: Sequence[Result]) -> list[Any]:
    """The ranks' return values; fails with every rank's traceback if one has none."""
    broken = [result for result in results if result.error is not None or result.exit_code != 0]
    if broken:
        raise AssertionError(
            "\n".join(f"rank {r.rank}, exit code {r.exit_code}:\n{r.trace or '(no word)'}\n{r.output}" for r in broken)
        )
    return [result.value for result in results]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    rank: int
    world_size: int
    address: tuple[str, int]
    store_pid: int | None
    module: str
    file: str
    name: str
    args: bytes
    log: str
    together: bool


@dataclass(kw_only=True, slots=True)
class _Rank:
    process: BaseProcess
    connection: Connection
    log: Path
    report: tuple[Any, BaseException | None, str, float] | None = None
    killed: bool = False
    lifetime: float = float("nan")

    def receive(self) -> None:
        """Takes the report, if there is one: a rank that was killed closes its pipe without a word."""
        with contextlib.suppress(EOFError, OSError):
            if self.report is None and self.connection.poll():
                self.report = pickle.loads(self.connection.recv_bytes())

    def result(self, index: int) -> Result:
        value, error, trace, seconds = self.report or (None, None, "", float("nan"))
        output = self.log.read_text(errors="replace") if self.log.exists() else ""
        return Result(
            rank=index,
            value=value,
            error=error,
            trace=trace,
            exit_code=None if self.killed else self.process.exitcode,
            seconds=seconds,
            lifetime=self.lifetime,
            output=output,
        )


def _fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # Read by OpenMP when the fork server loads torch: ranks share few cores and must not fight over them.
    os.environ["OMP_NUM_THREADS"] = "1"
    return context


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _store_host(store: str, address: tuple[str, int]) -> Iterator[int | None]:
    if store == "rank 0":
        yield None
        return
    context = _fork_server()
    ready, theirs = context.Pipe()
    host = context.Process(target=_host_store, args=(address, theirs), name="store host")
    host.start()
    try:
        if not ready.poll(30):
            raise RuntimeError("the store's host did not start within 30 s")
        ready.recv()
        yield host.pid
    finally:
        host.kill()
        host.join()


def _host_store(address: tuple[str, int], ready: Connection) -> None:
    from torch.distributed import TCPStore

    store = TCPStore(*address, is_master=True, wait_for_workers=False)
    ready.send(store.port)
    time.sleep(3600)


def _wait_for_end(ranks: Sequence[_Rank], timeout: float) -> None:
    """Collects reports while ranks run (a large one would block in its pipe), releases them once all have reported."""
    began = time.monotonic()
    deadline = began + timeout
    released = False
    while running := [rank for rank in ranks if rank.process.is_alive()]:
        left = deadline - time.monotonic()
        if left <= 0:
            for rank in running:
                rank.process.kill()
                rank.process.join()
                rank.killed = True
            break
        open_pipes = [rank.connection for rank in running if rank.report is None]
        wait([*open_pipes, *(rank.process.sentinel for rank in running)], timeout=min(left, 1.0))
        for rank in running:
            rank.receive()
            if not rank.process.is_alive():
                rank.lifetime = time.monotonic() - began
        if not released and all(rank.report is not None for rank in running):
            released = True
            for rank in running:
                with contextlib.suppress(OSError):
                    rank.connection.send(None)
    for rank in ranks:
        rank.receive()
        rank.process.join()


def _rank_main(job: _Job, connection: Connection) -> None:
    # The fork server's objects are nobody's garbage; looking through them at exit would copy their pages.
    gc.freeze()
    began = time.perf_counter()
    report: tuple[Any, BaseException | None, str, float]
    try:
        _redirect_output(job.log)
        _join_world(job)
        began = time.perf_counter()
        report = (_load_function(job)(*pickle.loads(job.args)), None, "", time.perf_counter() - began)
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is its result
        traceback.print_exc()
        # What the interpreter itself does for an exception nobody caught.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, None
        report = (None, _portable(error), traceback.format_exc(), time.perf_counter() - began)
    with contextlib.suppress(OSError, EOFError):
        connection.send_bytes(pickle.dumps(report))
        if job.together:
            connection.recv()
    failed = report[1] is not None
    del report
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    if job.together:
        atexit._run_exitfuncs()
        os._exit(int(failed))
    ctypes.pythonapi.Py_Exit(int(failed))


def _redirect_output(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _join_world(job: _Job) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if job.store_pid is not None:
        os.environ[STORE_PID] = str(job.store_pid)
    hosts = job.store_pid is None and job.rank == 0
    store = dist.TCPStore(*job.address, job.world_size, is_master=hosts, timeout=_GROUP_TIMEOUT, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=_GROUP_TIMEOUT)


def _load_function(job: _Job) -> Callable[..., Any]:
    """Test files are not always importable by name from another process; their path always works."""
    try:
        module = importlib.import_module(job.module)
    except ImportError:
        spec = importlib.util.spec_from_file_location(job.module, job.file)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[job.module] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in job.name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _portable(error: BaseException) -> BaseException:
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - any failure to pickle means the same
        return RuntimeError(f"{type(error).__name__}: {error}")
    return copy if isinstance(copy, type(error)) else RuntimeError(f"{type(error).__name__}: {error}")
