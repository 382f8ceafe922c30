"""A rank that fails, dies or falls silent: every rank stops in seconds, says who, where and why, and can end.

Most cases share one start of processes: after a failure the groups are unusable, but both ranks can unwrap and wrap
again, which makes new ones. Layers in messages are the model's own, also where leading dense ones are in no plan.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

import tbo
from ranks import STORE_PID, Result, run_ranks, values
from tbo import InjectFault, Instrument
from tbo.errors import PeerError
from tbo.wrapping.handle import Handle
from tiny_models import build, token_batch
from wrapped_models import cache_argument
from wrapped_ranks import each, on_every_rank

BOUND = 10.0
CALLS = 1000
FAMILY = "qwen2_moe"
SPARSE, DENSE = 3, 2
LAYERS: dict[str, Any] = {"mlp_only_layers": [0, DENSE]}
"""Layer 0 runs before the plan, layer 2 as `op_mlp` in it, 1 and 3 are sparse with shared experts."""

OPS = (
    "op_comm_prepare_attn",
    "op_prepare",
    "op_core",
    "op_comm_prepare_mlp",
    "op_mlp",
    "op_gate",
    "op_select_experts",
    "op_dispatch_a",
    "op_dispatch_b",
    "op_experts",
    "op_combine_a",
    "op_shared_experts",
    "op_combine_b",
    "op_output",
    "op_comm_postprocess_layer",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What one rank does wrong, and how its step runs.

    Attributes:
        during: "prefill", "decode", "un-split", "layer by layer" (hidden states are captured), or "serving" (the rank
            has no tokens and computes for the other).
        raises: what the op raises.
    """

    op: str
    sub_batch: int
    culprit: int
    during: str = "prefill"
    raises: type[BaseException] = ValueError

    @property
    def layer(self) -> int:
        return DENSE if self.op == "op_mlp" else SPARSE

    def __str__(self) -> str:
        return f"{self.op}-{self.sub_batch}-{self.during}-{self.raises.__name__}"


FAULTS = (
    *(
        Fault(op=op, sub_batch=half, culprit=(index + half) % 2, during=("prefill", "decode")[index % 2])
        for index, op in enumerate(OPS)
        for half in (0, 1)
    ),
    Fault(op="op_gate", sub_batch=0, culprit=0, during="un-split"),
    Fault(op="op_combine_b", sub_batch=0, culprit=1, during="layer by layer"),
    Fault(op="op_experts", sub_batch=1, culprit=0, during="serving"),
    Fault(op="op_core", sub_batch=1, culprit=1, raises=KeyboardInterrupt),
    Fault(op="op_experts", sub_batch=0, culprit=0, during="serving", raises=SystemExit),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What a rank learnt.

    Attributes:
        kind, message, rank: of the exception.
        seconds: from the call of the model that failed.
        later: what the next use of the model says.
    """

    kind: str
    message: str
    rank: int | None
    seconds: float
    later: str


def told_by(handle: Handle, call: Callable[[], object]) -> Told:
    """Calls a wrapped model until it fails, and once more.

    A rank hears of a failure at its next communication, which for what comes last in a step is the next step's vote.
    """
    began = time.monotonic()
    try:
        for _ in range(CALLS):
            call()
    except BaseException as error:  # noqa: BLE001 - interrupts are among the cases
        seconds = time.monotonic() - began
        with pytest.raises(PeerError) as later:
            handle.model(torch.tensor([[5, 6]]))
        return Told(
            kind=type(error).__name__,
            message=str(error),
            rank=getattr(error, "rank", None),
            seconds=seconds,
            later=str(later.value),
        )
    raise AssertionError("nothing failed")


class Armed(Instrument):
    """An injected fault that waits until it is armed."""

    def __init__(self, fault: Fault) -> None:
        self.armed = False
        self._fault = fault
        self._inner = InjectFault(fault.op, self._act, sub_batch=fault.sub_batch, layer=fault.layer)

    def before_op(self, where: tbo.Where, state: Any) -> None:
        self._inner.before_op(where, state)

    def _act(self) -> None:
        if self.armed:
            raise self._fault.raises("boom")


@torch.no_grad()
def fail(fault: Fault, model: Any) -> Told:
    """One fault on this rank."""
    rank = dist.get_rank()
    bomb = Armed(fault)
    handle = tbo.wrap(
        model,
        dist.group.WORLD,
        timeout=60,
        overlap="never" if fault.during == "un-split" else "always",
        instruments=[bomb] if rank == fault.culprit else [],
    )
    ids, mask = token_batch(4, 6, seed=rank, left_padding=False)
    try:
        if fault.during == "serving" and rank == fault.culprit:
            bomb.armed = True
            return told_by(handle, handle.finish)
        if fault.during == "decode":
            output = model(ids, attention_mask=mask, use_cache=True)
            bomb.armed = True
            cache = getattr(output, "cache", None) or output.past_key_values
            return told_by(handle, lambda: model(ids[:, -1:], **cache_argument(model, cache)))
        bomb.armed = True
        return told_by(handle, lambda: model(ids, output_hidden_states=fault.during == "layer by layer"))
    finally:
        handle.unwrap()


def fail_in_turn(faults: tuple[Fault, ...]) -> dict[Fault, Any]:
    return each(faults, fail, build(FAMILY, **LAYERS))


@functools.cache
def failed() -> list[Result]:
    return run_ranks(2, fail_in_turn, FAULTS, timeout=170)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_every_rank_stops_and_names_rank_sub_batch_layer_op_and_cause(fault: Fault) -> None:
    results: list[Told] = on_every_rank(failed(), fault)
    culprit, peer = results[fault.culprit], results[1 - fault.culprit]
    place = rf"sub-batch {fault.sub_batch}, layer {fault.layer}, stage \d+, {fault.op}"
    cause = f"{fault.raises.__name__}: boom"
    if issubclass(fault.raises, Exception):
        assert culprit.kind == "OpError"
        assert re.match(rf"rank {fault.culprit}, {place}: {cause}", culprit.message)
    else:
        assert culprit.kind == fault.raises.__name__
    assert peer.kind == "PeerError"
    assert peer.rank == fault.culprit
    assert re.match(rf"rank {fault.culprit} failed: {place}: {cause}", peer.message)
    assert f"Rank {1 - fault.culprit}, in " in peer.message
    for told in results:
        assert told.seconds < BOUND
        assert re.search(rf"cannot be used any more: rank {fault.culprit} failed: {place}: {cause}", told.later)
        assert "Restart all ranks" in told.later


# Ranks that cannot say what happened, each case in processes of its own


def until_it_fails(action: str, culprit: int, timeout: float) -> Told:
    """Steps until the culprit acts in op_experts of sub-batch 1 in layer 2."""
    rank = dist.get_rank()
    acts = [InjectFault("op_experts", ACTIONS[action], sub_batch=1, layer=2)] if rank == culprit else []
    handle = tbo.wrap(build("mixtral"), dist.group.WORLD, timeout=timeout, overlap="always", instruments=acts)
    ids, _ = token_batch(3, 6, seed=rank)
    with torch.no_grad():
        return told_by(handle, lambda: handle.model(ids))


def linger_and_die() -> None:
    """Long enough in the op for the heartbeat to have reported it."""
    time.sleep(1.3)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_the_stores_host() -> None:
    with contextlib.suppress(ProcessLookupError):  # steps go on until the loss is noticed
        os.kill(int(os.environ[STORE_PID]), signal.SIGKILL)


ACTIONS: dict[str, Callable[[], None]] = {
    "be killed": linger_and_die,
    "fall silent": lambda: time.sleep(4),
    "kill the store's host": kill_the_stores_host,
}
LAST_OP = r"sub-batch 1, layer 2, stage \d+, op_experts"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_killed_inside_an_op_is_named_with_its_last_reported_op(culprit: int) -> None:
    results = run_ranks(2, until_it_fails, "be killed", culprit, 60.0, store="separate", together=False)
    assert results[culprit].exit_code == -signal.SIGKILL
    survivor = results[1 - culprit]
    assert (survivor.exit_code, survivor.error) == (0, None), survivor.trace
    told: Told = survivor.value
    assert told.kind == "PeerError"
    assert told.rank == culprit
    assert re.search(rf"rank {culprit} stopped reporting .* last in {LAST_OP}", told.message)
    assert told.seconds < BOUND


@pytest.mark.timeout(60)
def test_a_silent_rank_is_named_after_the_timeout_with_its_last_reported_op() -> None:
    results = run_ranks(4, until_it_fails, "fall silent", 1, 1.5, together=False)
    silent = results.pop(1)
    for result in results:
        assert (result.exit_code, result.error) == (0, None), result.trace
        told: Told = result.value
        assert told.rank == 1
        assert re.search(rf"but rank 1 never came to it: rank 1 is alive, last in {LAST_OP}", told.message)
        assert told.seconds < 4
    # It hears of its own failure when it wakes up.
    assert (silent.exit_code, silent.error) == (0, None), silent.trace
    assert silent.value.kind == "PeerError"
    assert silent.value.rank == 1


@pytest.mark.timeout(60)
def test_a_store_whose_host_is_killed_is_named() -> None:
    results = run_ranks(2, until_it_fails, "kill the store's host", 0, 60.0, store="separate", together=False)
    for told in values(results):
        assert told.kind == "PeerError"
        assert "the process that hosts the store (127.0.0.1:" in told.message
        assert told.seconds < BOUND


# Errors around the steps


@torch.no_grad()
def generate_from_ids_that_do_not_exist() -> NoReturn:
    rank = dist.get_rank()
    model: Any = build("mixtral")
    tbo.wrap(model, dist.group.WORLD, timeout=60)
    ids, mask = token_batch(2, 4)
    if rank == 1:
        ids[0, 2] = 10_000
    model.generate(ids, attention_mask=mask, max_new_tokens=3)
    raise AssertionError("nothing failed")


@pytest.mark.timeout(60)
def test_an_error_in_generate_before_the_first_layer_reaches_every_rank_and_ends_it() -> None:
    results = run_ranks(2, generate_from_ids_that_do_not_exist, together=False)
    assert isinstance(results[1].error, IndexError)
    error = results[0].error
    assert isinstance(error, PeerError)
    assert str(error).startswith("rank 1 failed: outside a step: IndexError: ")
    for result in results:
        assert result.exit_code == 1
        assert result.seconds < BOUND
        assert "terminate called" not in result.output


def wrap_a_model_that_cannot_be() -> tuple[str, str]:
    """Rank 1's model is spoilt; rank 0 learns it at its first step, because wrapping itself sends nothing later on."""
    rank = dist.get_rank()
    model: Any = build("mixtral")
    if rank == 1:
        model.model.layers[2].forward = model.model.layers[1].forward
    try:
        tbo.wrap(model, dist.group.WORLD, timeout=60)
        with torch.no_grad():
            model(torch.tensor([[5, 6]]))
    except tbo.TboError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing failed")


@pytest.mark.timeout(60)
def test_a_model_refused_on_one_rank_is_known_to_the_others() -> None:
    peer, culprit = values(run_ranks(2, wrap_a_model_that_cannot_be))
    assert culprit[0] == "WrapError"
    assert culprit[1].startswith("layer 2: ")
    assert peer[0] == "PeerError"
    assert "rank 1 failed: outside a step: WrapError: layer 2: " in peer[1]


def train_on_rank_0() -> tuple[str, str]:
    model: Any = build("mixtral")
    tbo.wrap(model, dist.group.WORLD, timeout=60)
    with torch.set_grad_enabled(dist.get_rank() == 0), pytest.raises(tbo.TboError) as error:
        model(torch.tensor([[5, 6]]))
    return type(error.value).__name__, str(error.value)


@pytest.mark.timeout(60)
def test_training_across_ranks_is_refused_on_every_rank() -> None:
    trainer, peer = values(run_ranks(2, train_on_rank_0))
    assert trainer[0] == "WrapError"
    assert "gradients are enabled on a model whose experts are spread over ranks" in trainer[1]
    assert peer[0] == "PeerError"
    assert "rank 0 failed: outside a step: WrapError: gradients are enabled" in peer[1]
