"""One rank of the demo: a process of its own. Imports torch only after its number of threads is set."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection

from tbo.demo.messages import Failed, Finished, Message, Progressed, RankResult, Variant
from tbo.demo.options import DemoOptions
from tbo.errors import PeerError, UserError

GROUP_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a rank is started with.

    Attributes:
        store_port: of the TCP store on loopback in the parent.
        loopback: name of the network interface for gloo.
        threads: for computing.
        log: file for whatever the process prints.
    """

    rank: int
    options: DemoOptions
    store_port: int
    loopback: str
    threads: int
    log: str


def rank_main(job: Job, connection: Connection) -> None:
    """Entry point of the process. Tells the parent of progress, and of its end, good or bad."""
    _end_with_parent()
    _redirect_output(job.log)
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    os.environ["GLOO_SOCKET_IFNAME"] = job.loopback
    try:
        message: Message = Finished(result=_work(job, connection))
    except Exception as error:  # noqa: BLE001 - whatever it was, the parent shows it
        traceback.print_exc()
        blames_peer = isinstance(error, PeerError)
        text = str(error) if isinstance(error, (PeerError, UserError)) else f"{type(error).__name__}: {error}"
        message = Failed(rank=job.rank, message=text, blames_peer=blames_peer)
    connection.send(message)
    connection.close()
    sys.exit(isinstance(message, Failed))


def _work(job: Job, connection: Connection) -> RankResult:
    def report(what: str, done: int, total: int | None) -> None:
        connection.send(Progressed(rank=job.rank, what=what, done=done, total=total))

    report("loading torch and transformers", 0, None)
    import torch
    import torch.distributed as dist
    import transformers

    from tbo.demo.measure import run_variants
    from tbo.demo.model import prepare

    torch.set_num_threads(job.threads)
    transformers.logging.set_verbosity_error()
    store = dist.TCPStore("127.0.0.1", job.store_port, is_master=False, timeout=GROUP_TIMEOUT)
    ranks = job.options.ranks
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=ranks, timeout=GROUP_TIMEOUT)
    prepared = prepare(job.options.model, job.rank, report)
    report("waiting for the other ranks", 0, None)
    dist.barrier()
    results = run_variants(prepared, job.options, report)
    dist.destroy_process_group()
    tokens = next(result.tokens for result in results if result.variant is Variant.ALWAYS)
    limit = job.options.max_new_tokens
    rows, positions = prepared.input_ids.shape
    return RankResult(
        rank=job.rank,
        questions=prepared.questions,
        answers=tuple(prepared.to_text(list(ids)) + (" ..." if len(ids) == limit else "") for ids in tokens),
        tokens_per_step=rows if job.options.phase == "decode" else rows * positions,
        results=results,
    )


def _end_with_parent() -> None:
    """A parent that is killed cannot stop its ranks; each notices by itself."""
    parent = parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, name="watches the parent", daemon=True).start()


def _redirect_output(log: str) -> None:
    """Libraries print advice that would tear the parent's display; it is shown if the rank fails."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
