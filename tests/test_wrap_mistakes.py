"""Mistakes on several ranks: every rank is told in seconds what differs or what is wrong, and what can go on does.

Most cases share one start of processes, and each makes groups of its own.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import tbo
from ranks import Result, run_ranks, values
from tbo.models.expert_parallel import is_sharded
from tbo.models.orders import PREFILL
from tiny_models import build, token_batch
from wrapped_models import hidden, report
from wrapped_ranks import each, on_every_rank

BOUND = 10.0
TOLERANCE = 2e-5
"""Of several ranks against the plain model: experts see rows in other batches, which rounds differently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What a rank learnt: the error's class, its words, whom it names, and after how many seconds."""

    kind: str
    message: str
    rank: int | None
    seconds: float


def told_by(call: Callable[[], object]) -> Told:
    began = time.monotonic()
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - interrupts end ranks, too
        seconds = time.monotonic() - began
        return Told(kind=type(error).__name__, message=str(error), rank=getattr(error, "rank", None), seconds=seconds)
    raise AssertionError("nothing failed")


def wrap(model: Any, group: Any = None, **options: Any) -> Any:
    defaults: dict[str, Any] = {"timeout": 60, "overlap": "always"}
    return tbo.wrap(model, group or dist.group.WORLD, **(defaults | options))


def ids_of(rank: int) -> Tensor:
    return token_batch(3 + rank, 6, seed=rank, left_padding=False)[0]


def equals_plain(model: Any, plain: Any) -> bool:
    """A collective step of this rank's own batch against the plain model."""
    ids = ids_of(dist.get_rank())
    return bool((hidden(model, ids) - hidden(plain, ids)).abs().max() < TOLERANCE)


# Ranks that were set up differently


def differ_in_schedules(rank: int) -> Told:
    """Nothing is compared but the plans they become, at the first vote."""
    schedules = {tbo.Phase.PREFILL: replace(PREFILL, offset=rank)}
    handle = wrap(build("mixtral"), schedules=schedules)
    try:
        return told_by(lambda: hidden(handle.model, ids_of(rank)))
    finally:
        handle.unwrap()


def differ_in_environment(rank: int) -> Told:
    os.environ["TBO_DISABLE"] = str(rank)
    try:
        return told_by(lambda: wrap(build("mixtral")))
    finally:
        del os.environ["TBO_DISABLE"]


def differ_in_sharding(rank: int) -> Told:
    model = build("mixtral")
    if rank == 1:
        tbo.shard_experts(model, dist.group.WORLD)
    return told_by(lambda: wrap(model))


DIFFERENCES: dict[str, tuple[Callable[[int], Told], str]] = {
    "sub_batches": (
        lambda rank: told_by(lambda: wrap(build("mixtral"), sub_batches=2 + rank)),
        "sub_batches is 2 on rank 0, 3 on rank 1. ",
    ),
    "dispatcher": (
        lambda rank: told_by(lambda: wrap(build("mixtral"), dispatcher=("auto", "all_to_all")[rank])),
        "dispatcher is auto on rank 0, all_to_all on rank 1. ",
    ),
    "order": (
        lambda rank: told_by(lambda: wrap(build("mixtral"), order=("interleaved", "sequential")[rank])),
        "order is interleaved on rank 0, sequential on rank 1. ",
    ),
    "configuration": (
        lambda rank: told_by(lambda: wrap(build("mixtral", num_experts_per_tok=2 + rank))),
        "config.num_experts_per_tok is 2 on rank 0, 3 on rank 1. ",
    ),
    "dtype": (
        lambda rank: told_by(lambda: wrap(build("mixtral", dtype=(torch.float32, torch.bfloat16)[rank]))),
        "dtype is torch.float32 on rank 0, torch.bfloat16 on rank 1. ",
    ),
    "family": (
        lambda rank: told_by(lambda: wrap(build(("mixtral", "qwen3_moe")[rank]))),
        "the model is MixtralForCausalLM on rank 0, Qwen3MoeForCausalLM on rank 1; ",
    ),
    "environment": (differ_in_environment, "TBO_DISABLE is False on rank 0, True on rank 1. "),
    "sharding": (differ_in_sharding, "experts already sharded is False on rank 0, True on rank 1. "),
    "schedules": (differ_in_schedules, "ranks disagree on the compiled plans (rank 0: "),
}

# Mistakes of rank 1 alone


def dense_model() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_hidden_layers=1, **sizes))
    return model


def wrapped_twice(rank: int) -> Told:
    """The model's first handle goes on working."""
    plain, model, other = (build("mixtral") for _ in range(3))
    handle = wrap(model)
    told = told_by(lambda: wrap(model if rank == 1 else other))
    assert equals_plain(model, plain)
    handle.unwrap()
    return told


def broken_with_block(rank: int) -> Told:
    """What ends a `with` block is told to ranks that are in a step by then."""

    def body() -> None:
        with wrap(build("mixtral")) as handle:
            hidden(handle.model, ids_of(rank))
            if rank == 1:
                raise LookupError("no more prompts")

    return told_by(body)


def fails_while_others_serve(rank: int) -> Told:
    """Rank 0 has generated and finished; it computes for rank 1, whose op raises in its third step."""

    def boom() -> None:
        steps.append(0)
        if len(steps) == 3:
            raise LookupError("boom")

    steps: list[int] = []
    fault = tbo.InjectFault("op_core", boom, sub_batch=1, layer=2)
    handle = wrap(build("mixtral"), instruments=[fault] if rank == 1 else [])
    work = handle.finish if rank == 0 else lambda: [hidden(handle.model, ids_of(rank)) for _ in range(4)]
    told = told_by(work)
    assert rank == 1 or report(handle).step == 2
    handle.unwrap()
    return told


def one_rank(function: Callable[[], nn.Module], **options: Any) -> Callable[[int], Told]:
    return lambda rank: told_by(lambda: wrap(function(), **options) if rank == 1 else wrap(build("mixtral")))


ALONE: dict[str, tuple[Callable[[int], Told], str, str]] = {
    "not a mixture of experts": (one_rank(dense_model), "UnsupportedModelError", "LlamaForCausalLM has no mixture"),
    "no model": (one_rank(nn.Module), "UnsupportedModelError", "Module has no decoder"),
    "an option": (one_rank(lambda: build("mixtral"), sub_batches=0), "WrapError", "sub_batches=0. "),
    "a schedule": (one_rank(lambda: build("mixtral"), schedules=[1]), "PlanError", "schedules is a list"),
    "wrapped twice": (wrapped_twice, "WrapError", "this model is already wrapped"),
    "a with block": (broken_with_block, "LookupError", "no more prompts"),
    "an op while others serve": (fails_while_others_serve, "OpError", "sub-batch 1, layer 2, stage "),
}

# The same mistake on both ranks


def shares_of_another_group(rank: int) -> Told:
    model = build("mixtral")
    tbo.shard_experts(model, rank=rank, world_size=4)
    return told_by(lambda: wrap(model))


def each_others_shares(rank: int) -> Told:
    model = build("mixtral")
    tbo.shard_experts(model, rank=1 - rank, world_size=2)
    return told_by(lambda: wrap(model))


def shares_without_a_group(rank: int) -> Told:
    model = build("mixtral")
    tbo.shard_experts(model, dist.group.WORLD)
    return told_by(lambda: tbo.wrap(model))


def unknown_dispatcher(rank: int) -> Told:
    """The model is left whole, and is wrapped once the mistake is mended."""
    plain, model = build("mixtral"), build("mixtral")
    told = told_by(lambda: wrap(model, dispatcher="teleport"))
    assert not is_sharded(model)
    assert equals_plain(model, model)
    handle = wrap(model)
    assert equals_plain(model, plain)
    handle.unwrap()
    return told


COMMON: dict[str, tuple[Callable[[int], Told], str]] = {
    "shares of another group": (
        shares_of_another_group,
        "the model holds the experts of rank {rank} of 4, but this is rank {rank} of 2. Pass the group",
    ),
    "each other's shares": (
        each_others_shares,
        "the model holds the experts of rank {other} of 2, but this is rank {rank} of 2. Pass the group",
    ),
    "shares without a group": (
        shares_without_a_group,
        "the model holds the experts of rank {rank} of 2, but this is rank 0 of 1. Pass the group",
    ),
    "unknown dispatcher": (unknown_dispatcher, "there is no dispatcher 'teleport'"),
}

CASES: dict[str, Callable[[int], Told]] = {
    **{name: case[0] for name, case in DIFFERENCES.items()},
    **{name: case[0] for name, case in ALONE.items()},
    **{name: case[0] for name, case in COMMON.items()},
}


def make_mistakes() -> dict[str, Any]:
    rank = dist.get_rank()
    return each(CASES, lambda name: CASES[name](rank))


@functools.cache
def made() -> list[Result]:
    return run_ranks(2, make_mistakes, timeout=110)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_ranks_differ_in_is_named_on_all_of_them(name: str) -> None:
    told: list[Told] = on_every_rank(made(), name)
    assert told[0].message == told[1].message
    for one in told:
        assert one.kind == "RanksDisagreeError"
        assert DIFFERENCES[name][1] in one.message
        assert len(one.message) < 1500
        assert one.seconds < BOUND


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ALONE)
def test_a_mistake_of_one_rank_is_told_to_the_other(name: str) -> None:
    peer, culprit = on_every_rank(made(), name)
    _, kind, words = ALONE[name]
    assert culprit.kind == kind
    assert words in culprit.message
    assert (peer.kind, peer.rank) == ("PeerError", 1)
    assert peer.message.startswith("rank 1 failed: ")
    assert words in peer.message
    assert ".." not in peer.message
    assert max(peer.seconds, culprit.seconds) < BOUND


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", COMMON)
def test_a_mistake_of_all_ranks_is_named_as_what_it_is(name: str) -> None:
    for rank, told in enumerate(on_every_rank(made(), name)):
        assert told.kind in ("WrapError", "DispatcherError")
        assert told.message.startswith(COMMON[name][1].format(rank=rank, other=1 - rank))


# Groups of other sizes


def numbers_that_do_not_fit() -> list[tuple[str, bool]]:
    said = []
    for experts in (8, 2):
        model = build("mixtral", num_local_experts=experts)
        told = told_by(functools.partial(wrap, model))
        said.append((f"{told.kind}: {told.message}", is_sharded(model)))
    return said


@pytest.mark.timeout(60)
def test_experts_that_ranks_cannot_share_leave_the_model_whole() -> None:
    for divided, few in values(run_ranks(3, numbers_that_do_not_fit)):
        remedy = "Use a group whose size divides the number of experts."
        assert (
            divided[0] == f"DispatcherError: 8 experts cannot be shared equally by the 3 ranks of this group. {remedy}"
        )
        assert few[0] == f"DispatcherError: 2 experts cannot be shared equally by the 3 ranks of this group. {remedy}"
        assert not divided[1]
        assert not few[1]


def part_of_the_world() -> list[Any]:
    group: Any = dist.new_group([1, 3])
    plain, model = build("deepseek_v3"), build("deepseek_v3")
    if dist.get_rank() in (0, 2):
        told = told_by(lambda: wrap(model, group))
        return [told.kind, told.message]
    found: list[Any] = []
    for _ in range(2):
        handle = wrap(model, group)
        found.append(equals_plain(model, plain))
        handle.unwrap()
        told = told_by(lambda: hidden(model, ids_of(0)))
        found += [told.kind, "the model's own forward would compute with the wrong ones" in told.message]
    return found


@pytest.mark.timeout(90)
def test_a_part_of_the_world_shares_experts_and_can_wrap_again_what_it_has_sharded() -> None:
    outside, one, outside_too, other = values(run_ranks(4, part_of_the_world, timeout=80))
    assert one == other == [True, "WrapError", True] * 2
    assert outside == outside_too
    assert outside[0] == "WrapError"
    assert "not a process group this rank belongs to" in outside[1]
