"""Processes that end, with an error or without one, while the others still count on them: told, and in order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import tbo
from ranks import run_ranks
from tiny_models import build, token_batch
from wrapped_ranks import ROWS

BOUND = 10.0


@torch.no_grad()
def end_after(steps: list[int]) -> None:
    rank = dist.get_rank()
    handle = tbo.wrap(build("mixtral"), dist.group.WORLD, timeout=60, overlap="always")
    for _ in range(steps[rank]):
        handle.model(token_batch(ROWS[rank], 6, seed=rank)[0])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_ends_without_finishing_is_named(culprit: int) -> None:
    results = run_ranks(2, end_after, [5 - 3 * (culprit == rank) for rank in (0, 1)], together=False)
    peer = results[1 - culprit]
    assert isinstance(peer.error, tbo.PeerError)
    assert peer.error.rank == culprit
    assert str(peer.error).startswith(f"rank {culprit} left while others waited for ")
    assert "its process ended" in str(peer.error)
    assert peer.seconds < BOUND
    assert [result.exit_code for result in results] == [int(rank != culprit) for rank in (0, 1)]


@torch.no_grad()
def step_into_a_fault(culprit: int) -> None:
    def boom() -> None:
        raise ValueError("boom")

    fault = tbo.InjectFault("op_experts", boom, sub_batch=1, layer=1)
    rank = dist.get_rank()
    handle = tbo.wrap(
        build("mixtral"),
        dist.group.WORLD,
        timeout=60,
        overlap="always",
        instruments=[fault] if rank == culprit else [],
    )
    handle.model(token_batch(ROWS[rank], 6, seed=rank)[0])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("culprit", [0, 2])
def test_errors_nobody_catches_end_every_process_in_order(culprit: int) -> None:
    results = run_ranks(4, step_into_a_fault, culprit, together=False)
    for result in results:
        assert isinstance(result.error, tbo.OpError if result.rank == culprit else tbo.PeerError)
        assert (result.exit_code, "terminate called" in result.output) == (1, False), result.output
        assert result.lifetime < 2 * BOUND
