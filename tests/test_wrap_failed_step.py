"""A step that fails on one rank: the error names the place, nothing of the step stays, and the next one is right."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import tbo
from tbo.core import Where
from tiny_models import build, token_batch
from wrapped_models import cache_argument, hidden, report

ROWS, POSITIONS, STEPS = 5, 10, 4


class Fails(tbo.Instrument):
    """Raises at one op of one step; steps are counted from 0."""

    def __init__(self, op: str, *, step: int, sub_batch: int = 1, layer: int = 2, after: bool = False) -> None:
        self.place = (op, sub_batch, layer)
        self.step = step
        self.after = after
        self.steps = -1

    def before_step(self, plan: tbo.Plan) -> None:
        self.steps += 1

    def before_op(self, where: Where, state: Mapping[str, Any]) -> None:
        self._act(where, after=False)

    def after_op(self, where: Where, state: Mapping[str, Any]) -> None:
        self._act(where, after=True)

    def _act(self, where: Where, *, after: bool) -> None:
        if self.steps == self.step and self.after == after and self.place == (where.op, where.sub_batch, where.layer):
            raise RuntimeError("the drill")


def new_cache(model: Any, kind: str) -> Any:
    if kind == "minimax":
        return MiniMaxCache()
    return StaticCache(config=model.config, max_cache_len=32) if kind == "static" else DynamicCache(config=model.config)


def decode(model: Any, kind: str, *, failing: int | None = None) -> list[Tensor]:
    """A prefill and some decode steps on one cache; a failing step is run again."""
    ids, _ = token_batch(ROWS, POSITIONS, left_padding=False)
    following, _ = token_batch(ROWS, STEPS, seed=1, left_padding=False)
    cache = cache_argument(model.model, new_cache(model, kind))
    outputs = []
    for step in range(STEPS + 1):
        given = ids if step == 0 else following[:, step - 1 : step]
        if step == failing:
            with pytest.raises(tbo.OpError, match="the drill"):
                hidden(model, given, **cache)
        outputs.append(hidden(model, given, **cache))
    return outputs


CASES = [
    ("qwen3_moe", "dynamic"),  # keys and values
    ("deepseek_v3", "dynamic"),  # latents, and a dense layer that has run before the failure
    ("gpt_oss", "dynamic"),  # sliding windows
    ("glm_moe_dsa", "dynamic"),  # an indexer's keys
    ("qwen3_moe", "static"),
    ("deepseek_v3", "static"),
]


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("op", ["op_prepare", "op_dispatch_b", "op_combine_b"])
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_failed_step_repeated_equals_an_undisturbed_run(family: str, kind: str, op: str, failing: int) -> None:
    model = build(family)
    with tbo.wrap(model, overlap="always"):
        undisturbed = decode(model, kind)
    with tbo.wrap(model, overlap="always", instruments=(Fails(op, step=failing, after=op == "op_prepare"),)) as handle:
        disturbed = decode(model, kind, failing=failing)
        assert report(handle).engaged
    assert all(torch.equal(one, other) for one, other in zip(disturbed, undisturbed, strict=True))


@pytest.mark.parametrize("sub_batch", [0, 1])
def test_linear_state_that_was_replaced_is_restored(sub_batch: int) -> None:
    model = build("minimax")
    with tbo.wrap(model, overlap="always"):
        undisturbed = decode(model, "minimax")
    tbo.wrap(model, overlap="always", instruments=(Fails("op_experts", step=2, sub_batch=sub_batch, layer=3),))
    disturbed = decode(model, "minimax", failing=2)
    assert all(torch.equal(one, other) for one, other in zip(disturbed, undisturbed, strict=True))


@pytest.mark.parametrize("sub_batch", [0, 1])
def test_linear_state_that_was_overwritten_makes_its_cache_unusable(sub_batch: int) -> None:
    model = build("qwen3_next")
    tbo.wrap(model, overlap="always", instruments=(Fails("op_experts", step=2, sub_batch=sub_batch, layer=3),))
    with pytest.raises(tbo.WrapError) as caught:
        decode(model, "dynamic", failing=2)
    assert str(caught.value) == (
        "this cache cannot be used any more: a step failed halfway and layer 0 of its DynamicCache, a"
        " LinearAttentionLayer, was overwritten in place. Start the sequences again with a new cache."
    )
    assert len(decode(model, "dynamic")) == STEPS + 1


def test_the_error_names_the_layer_as_the_model_numbers_it() -> None:
    """The first layer is dense and no part of the plan; the second is layer 1 all the same."""
    model = build("deepseek_v3", first_k_dense_replace=1)
    tbo.wrap(model, overlap="always", instruments=(Fails("op_experts", step=0, sub_batch=0, layer=1),))
    with pytest.raises(tbo.OpError) as caught:
        decode(model, "dynamic")
    assert (caught.value.where.sub_batch, caught.value.where.layer, caught.value.where.op) == (0, 1, "op_experts")
    assert caught.value.rank is None
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "sub-batch 0, layer 1, stage 1, op_experts: RuntimeError: the drill" in str(caught.value)


def test_nan_in_a_routers_weights_is_named_at_the_dispatch() -> None:
    model: Any = build("qwen3_moe")
    tbo.wrap(model, overlap="always")
    with torch.no_grad():
        model.model.layers[2].mlp.gate.weight.fill_(float("nan"))
    with pytest.raises(tbo.OpError) as caught:
        decode(model, "dynamic")
    assert (caught.value.where.layer, caught.value.where.op) == (2, "op_dispatch_a")
    assert isinstance(caught.value.cause, tbo.DispatcherError)
    assert "the routing weights of token 0 hold NaN" in str(caught.value)


class Weak(tbo.Instrument):
    """Weak references to every tensor that ever was in a state, also inside records."""

    def __init__(self) -> None:
        self.tensors: dict[str, list[weakref.ref[Tensor]]] = {}

    def after_op(self, where: Where, state: Mapping[str, Any]) -> None:
        for key, value in state.items():
            for tensor in tensors_in(value):
                self.tensors.setdefault(key, []).append(weakref.ref(tensor))

    def alive(self) -> set[str]:
        """Keys and shapes of the tensors of parts that still exist.

        Tensors of all rows, or of one for all, belong to transformers, whose frames are above ours in the traceback.
        """
        found = ((key, ref()) for key, references in self.tensors.items() for ref in references)
        return {
            f"{key} {list(tensor.shape)}"
            for key, tensor in found
            if tensor is not None and tensor.shape[:1] not in ((ROWS,), (1,))
        }


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    fields = getattr(value, "__slots__", ())
    return [tensor for name in fields for tensor in tensors_in(getattr(value, name, None))]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_whoever_keeps_the_error_keeps_no_tensor_of_the_step(family: str) -> None:
    model = build(family)
    weak = Weak()
    handle = tbo.wrap(model, overlap="always", instruments=(weak, Fails("op_combine_b", step=0)))
    ids, mask = token_batch(ROWS, POSITIONS)
    gc.disable()
    try:
        with torch.no_grad(), pytest.raises(tbo.OpError) as caught:
            model(ids, attention_mask=mask, use_cache=False)
        assert len(weak.tensors) > 10
        assert weak.alive() == set()
    finally:
        gc.enable()
    assert handle.last is None
    assert caught.value.where.op == "op_combine_b"


def test_a_finished_step_keeps_nothing_either() -> None:
    model = build("deepseek_v3")
    weak = Weak()
    handle = tbo.wrap(model, overlap="always", instruments=(weak,))
    ids, mask = token_batch(ROWS, POSITIONS)
    gc.disable()
    try:
        with torch.no_grad():
            model(ids, attention_mask=mask, use_cache=False)
        assert weak.alive() == set()
    finally:
        gc.enable()
    assert report(handle).engaged


def test_a_failure_between_the_layers_spoils_only_its_own_step() -> None:
    """A hook of the model's own raises between two layers, which are only recorded by then."""
    model: Any = build("qwen3_moe")
    ids, mask = token_batch(ROWS, POSITIONS)
    handle = tbo.wrap(model, overlap="always")
    expected = hidden(model, ids, attention_mask=mask)
    layers = list(model.model.layers)
    own_call = type(layers[2]).__call__

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is layers[2]:
            raise KeyboardInterrupt
        return own_call(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layers[2]), "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hidden(model, ids, attention_mask=mask)
    assert report(handle).step == 1
    assert torch.equal(hidden(model, ids, attention_mask=mask), expected)
    assert report(handle).step == 2


def test_the_model_called_from_within_its_own_step_is_refused() -> None:
    model = build("qwen3_moe")
    ids, mask = token_batch(ROWS, POSITIONS)

    def call_again() -> None:
        hidden(model, ids)

    inner = tbo.InjectFault("op_experts", call_again, sub_batch=1, layer=2)
    tbo.wrap(model, overlap="always", instruments=(inner,))
    with pytest.raises(tbo.OpError) as caught:
        hidden(model, ids, attention_mask=mask)
    assert isinstance(caught.value.cause, tbo.WrapError)
    assert str(caught.value.cause) == (
        "layer 0 was called while a step of the same model is running. Do not call the model from an instrument, a hook"
        " or another thread; wrap a second model."
    )


def test_the_model_called_from_a_hook_between_its_layers_is_refused() -> None:
    model: Any = build("qwen3_moe")
    ids, mask = token_batch(ROWS, POSITIONS)
    handle = tbo.wrap(model, overlap="always")
    calls = []

    def call_again(*_: Any) -> None:
        calls.append(0)
        if len(calls) == 1:
            hidden(model, ids)

    hook = model.model.layers[1].register_forward_hook(call_again)
    with pytest.raises(tbo.WrapError, match=r"layer 2 was called out of turn \(no step has begun\)\. Call the whole"):
        hidden(model, ids, attention_mask=mask)
    hook.remove()
    hidden(model, ids, attention_mask=mask)
    assert report(handle).engaged


def test_a_layer_called_alone_is_refused() -> None:
    model: Any = build("qwen3_moe")
    tbo.wrap(model)
    with pytest.raises(tbo.WrapError) as caught:
        model.model.layers[1](torch.zeros(2, 3, 64))
    assert str(caught.value) == (
        "layer 1 was called out of turn (no step has begun). Call the whole model, and not from within itself; to call"
        " single layers, unwrap it first."
    )
