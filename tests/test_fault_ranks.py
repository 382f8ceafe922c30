"""Faults that users of other overlap systems met, tried on wrapped models and dispatchers on real ranks.

Numbers are those of the table in test_fault_cases.py.
"""

from __future__ import annotations

import functools
import gc
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tbo
from ranks import run_ranks, values
from shape_cases import ROUTINGS, WORLD_SIZE, Case, Ran, Share, check
from tbo import Phase
from tbo.batch import Reason
from tbo.errors import DispatcherError
from tbo.ops.dispatch import create_dispatchers
from tbo.ops.peers import Peers
from tiny_models import build
from wrapped_models import hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a step of four ranks must be."""

    engaged: bool
    phase: Phase
    reason: Reason = Reason.NONE
    tokens: tuple[tuple[int, ...], ...]


ALWAYS, AUTO = 1, 2  # of `shape_cases.SETTINGS`: both with two sub-batches; 50 tokens in each are enough for AUTO
PREFILL = Share(phase="prefill", rows=1, length=300, past=0, layout="one row", routing=ROUTINGS[0], captured=False)
DECODE = replace(PREFILL, phase="decode", rows=64, length=1, past=3, layout="padded")
SERVES = replace(PREFILL, phase="idle", rows=0, length=3, layout="serves")
EMPTY = replace(SERVES, layout="empty batch")


def prompt(length: int, rows: int = 1) -> Share:
    return replace(PREFILL, rows=rows, length=length, layout="one row" if rows == 1 else "padded")


STEPS_OF_FOUR: dict[str, tuple[int, tuple[Share, ...], Expected]] = {
    "52: the first large prefill overlaps": (
        AUTO,
        (prompt(300),) * 4,
        Expected(engaged=True, phase=Phase.PREFILL, tokens=((150, 150),) * 4),
    ),
    "51: tiny prompts do not": (
        AUTO,
        (prompt(10, rows=9),) * 4,
        Expected(engaged=False, phase=Phase.PREFILL, reason=Reason.TOO_FEW_TOKENS, tokens=((90,),) * 4),
    ),
    "24: an un-split prefill beside an idle rank": (
        AUTO,
        (prompt(40), SERVES, SERVES, EMPTY),
        Expected(engaged=False, phase=Phase.PREFILL, reason=Reason.TOO_FEW_TOKENS, tokens=((40,), (0,), (0,), (0,))),
    ),
    "9: 1, 7, 300 and 300 tokens": (
        ALWAYS,
        (prompt(1), prompt(7), prompt(300), prompt(300)),
        Expected(engaged=True, phase=Phase.PREFILL, tokens=((1, 0), (4, 3), (150, 150), (150, 150))),
    ),
    "10: a batch of one does not veto": (
        ALWAYS,
        (prompt(400), prompt(200, rows=2), prompt(200, rows=2), prompt(200, rows=2)),
        Expected(engaged=True, phase=Phase.PREFILL, tokens=((200, 200),) * 4),
    ),
    "22, 23: decode on one rank of four": (
        ALWAYS,
        (replace(DECODE, rows=1), SERVES, EMPTY, SERVES),
        Expected(engaged=True, phase=Phase.DECODE, tokens=((1, 0), (0, 0), (0, 0), (0, 0))),
    ),
    "25: prefill on one rank, decode on another": (
        ALWAYS,
        (prompt(300), DECODE, replace(DECODE, rows=7), SERVES),
        Expected(engaged=True, phase=Phase.MIXED, tokens=((150, 150), (32, 32), (4, 3), (0, 0))),
    ),
    "26: an idle rank beside 64 decode tokens": (
        ALWAYS,
        (SERVES, DECODE, DECODE, DECODE),
        Expected(engaged=True, phase=Phase.DECODE, tokens=((0, 0), (32, 32), (32, 32), (32, 32))),
    ),
    "38: 600 tokens of prefill on each": (
        ALWAYS,
        (prompt(150, rows=4),) * 4,
        Expected(engaged=True, phase=Phase.PREFILL, tokens=((300, 300),) * 4),
    ),
}


@functools.cache
def steps_of_four() -> dict[str, list[Ran]]:
    """One start of processes for all steps."""
    cases = [
        Case(name=name, number=number, setting=setting, shares=shares)
        for number, (name, (setting, shares, _)) in enumerate(STEPS_OF_FOUR.items())
    ]
    return dict(zip(STEPS_OF_FOUR, check(cases, timeout=60), strict=True))


@pytest.mark.parametrize("name", STEPS_OF_FOUR)
def test_a_step_of_four_ranks(name: str) -> None:
    """Outputs are the plain model's and collectives are in the same order on all ranks: `check` has seen to that."""
    ranks, expected = steps_of_four()[name], STEPS_OF_FOUR[name][2]
    for ran, tokens in zip(ranks, expected.tokens, strict=True):
        engaged, phase, reason, votes = ran.agreed
        assert (engaged, phase, reason) == (expected.engaged, expected.phase, expected.reason)
        assert len(votes) == WORLD_SIZE
        assert ran.tokens == tokens
        assert engaged or expected.reason.text in ran.said


# Two ranks: buffers

EXPERTS, HIDDEN = 4, 64


def exchanged(dispatcher: Any, rows_TH: Tensor, ids_TK: Tensor, *, spoil: bool) -> Tensor:
    """Each expert multiplies by its number. If asked, inputs die once sent, and their memory is filled with NaN."""
    weights_TK = torch.ones(ids_TK.shape)
    sent = dispatcher.dispatch_a(rows_TH.clone(), ids_TK.clone(), weights_TK)
    filled = [torch.full_like(rows_TH, float("nan")) for _ in range(3 if spoil else 0)]
    received, ticket = dispatcher.dispatch_b(sent)
    first = dist.get_rank() * EXPERTS // 2
    outputs_RH = received.rows_RH * (received.expert_ids_RK + first)
    del received
    returned = dispatcher.combine_a(outputs_RH, ticket)
    rows = outputs_RH.shape
    del outputs_RH
    filled += [torch.full(rows, float("nan")) for _ in range(3 if spoil else 0)]
    output_TH: Tensor = dispatcher.combine_b(returned)
    return output_TH


def drop_after_launch() -> bool:
    peers = Peers(None, sub_batches=1, timeout=20.0)
    (dispatcher,) = create_dispatchers("all_to_all", num_experts=EXPERTS, sub_batches=1, peers=peers)
    generator = torch.Generator().manual_seed(peers.rank)
    right = True
    for count in (5000, 3, 2000, 0, 5000):
        rows_TH = torch.randint(-4, 5, (count, HIDDEN), generator=generator).float()
        ids_TK = torch.randint(0, EXPERTS, (count, 2), generator=generator)
        expected = rows_TH * ids_TK.sum(1, keepdim=True)
        right &= torch.equal(exchanged(dispatcher, rows_TH, ids_TK, spoil=True), expected)
    return right


def test_fault_33_rows_dropped_after_their_launch_still_arrive() -> None:
    assert values(run_ranks(2, drop_after_launch)) == [True, True]


def count_what_is_left() -> tuple[int, int, int]:
    """Tensors alive after the first and after the last of many steps, and exchanges still held."""
    model = build("qwen3_moe", num_hidden_layers=2)
    handle = tbo.wrap(model, dist.group.WORLD, overlap="always", timeout=20)
    chance = random.Random(dist.get_rank())
    alive = []
    for _ in range(60):
        hidden(model, torch.full((chance.randint(1, 9), chance.randint(1, 9)), 5), use_cache=False)
        gc.collect()
        alive.append(sum(issubclass(type(found), Tensor) for found in gc.get_objects()))
    assert handle._peers is not None
    return alive[0], alive[-1], len(handle._peers._ties.under_way)


def test_fault_35_nothing_is_left_of_steps_that_are_over() -> None:
    for first, last, under_way in values(run_ranks(2, count_what_is_left)):
        assert last <= first
        assert under_way == 0


def exceed_the_cap() -> list[str]:
    """Rank 1 has 200 tokens, un-split because rank 0 captures its hidden states."""
    model = build("qwen3_moe", num_hidden_layers=2)
    trace = tbo.Trace()
    handle = tbo.wrap(model, dist.group.WORLD, overlap="always", timeout=20, instruments=[trace])
    assert handle._runner is not None
    handle._runner._voting._max_tokens = 128
    rank = dist.get_rank()
    ids = torch.full((20 if rank else 2, 10), 5)
    hidden(model, ids)
    trace.ops.clear()
    try:
        hidden(model, ids, output_hidden_states=rank == 0)
    except DispatcherError as error:
        return [str(error), *(where.op for where in trace.ops)]
    return []


def test_fault_43_every_rank_refuses_what_is_too_much_for_one() -> None:
    ranks = values(run_ranks(2, exceed_the_cap))
    assert ranks[0] == ranks[1]
    assert len(ranks[0]) == 1  # a message, and no op had run
    assert ranks[0][0].startswith("rank 1 has 200 tokens in a step that is not split (")
