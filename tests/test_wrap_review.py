"""What a review by hand found: a model changed after wrapping, steps that end early, ranks that leave unannounced."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tbo
from ranks import run_ranks, values
from tbo import Handle
from tbo.errors import PeerError, WrapError
from tiny_models import build, token_batch

pytestmark = pytest.mark.timeout(90)


class _Halved(nn.Module):
    """Passes attributes through, as the wrappers of other software do, and changes the result."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        return (output[0] / 2, *output[1:]) if isinstance(output, tuple) else output / 2


def _exchange(layer: Any, name: str) -> None:
    setattr(layer, name, _Halved(getattr(layer, name)))


def _patch(layer: Any, name: str) -> None:
    module = getattr(layer, name)
    module.forward = _Halved(copy.deepcopy(module)).forward


@pytest.mark.parametrize("change", [_exchange, _patch])
@pytest.mark.parametrize(("name", "called"), [("self_attn", "attention"), ("mlp", "the MoE block")])
def test_a_module_cut_into_ops_that_is_changed_after_wrapping_is_refused(
    change: Callable[[Any, str], None], name: str, called: str
) -> None:
    model: Any = build("qwen3_moe")
    tbo.wrap(model, overlap="always")
    ids, mask = token_batch(4, 10)
    change(model.model.layers[2], name)
    with pytest.raises(WrapError, match=rf"layer 2: {called} \(\w+\) was exchanged, or given another forward"):
        model(ids, attention_mask=mask)


@pytest.mark.parametrize("index", [1, 3])
def test_a_layer_exchanged_after_wrapping_is_refused(index: int) -> None:
    model: Any = build("qwen3_moe")
    tbo.wrap(model, overlap="always")
    model.model.layers[index] = copy.deepcopy(build("qwen3_moe").model.layers[index])
    with pytest.raises(WrapError, match="list of layers was changed"):
        model(*token_batch(4, 10))


def test_layers_cut_off_after_wrapping_are_refused() -> None:
    model: Any = build("qwen3_moe")
    tbo.wrap(model, overlap="always")
    model.model.layers = model.model.layers[:3]
    with pytest.raises(WrapError, match="list of layers was changed"):
        model(*token_batch(4, 10))


def test_a_model_that_stops_early_runs_the_layers_it_has_called() -> None:
    plain: Any = build("qwen3_moe")
    model = copy.deepcopy(plain)
    tbo.wrap(model, overlap="always")
    ids, mask = token_batch(4, 10)
    for each in (plain, model):
        each.config.num_hidden_layers = 2
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits)
        for each in (plain, model):
            each.config.num_hidden_layers = 4
        torch.testing.assert_close(model(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits)


def _wrapped(timeout: float = 60.0) -> tuple[Any, Handle]:
    model = build("qwen3_moe")
    return model, tbo.wrap(model, dist.group.WORLD, overlap="always", timeout=timeout)


def _unwraps_while_the_other_generates() -> tuple[str, float]:
    model, handle = _wrapped()
    if dist.get_rank() == 0:
        handle.unwrap()
        return "", 0.0
    began = time.monotonic()
    with pytest.raises(PeerError) as caught:
        model.generate(*token_batch(2, 6)[:1], max_new_tokens=3)
    return str(caught.value), time.monotonic() - began


def test_a_rank_that_unwraps_without_finishing_is_named_within_seconds() -> None:
    _, (message, seconds) = values(run_ranks(2, _unwraps_while_the_other_generates, timeout=80))
    assert "rank 0 left while others waited for a vote: the model was unwrapped" in message
    assert seconds < 10


def _stops_early_on_ranks() -> str:
    model, _ = _wrapped()
    model.config.num_hidden_layers = 2
    with torch.no_grad(), pytest.raises((WrapError, PeerError)) as caught:
        model(token_batch(2, 6)[0])
    return str(caught.value)


def test_stopping_early_across_ranks_is_refused() -> None:
    for message in values(run_ranks(2, _stops_early_on_ranks, timeout=80)):
        assert "the model would call 2 of its 4 layers" in message


def _finishes_after_a_call_that_broke() -> str:
    model, handle = _wrapped()
    ids, _ = token_batch(2, 6)
    with torch.no_grad():
        if dist.get_rank() == 1:
            model.model.layers[2].register_forward_pre_hook(_raise)
            with pytest.raises(ValueError, match="the user's own"):
                model(ids)
        with pytest.raises((PeerError, WrapError)) as caught:
            model(ids) if dist.get_rank() == 0 else handle.finish()
    return str(caught.value)


def _raise(*_: Any) -> None:
    raise ValueError("the user's own")


def test_finishing_after_a_call_that_broke_between_layers_ends_all_ranks() -> None:
    told = values(run_ranks(2, _finishes_after_a_call_that_broke, timeout=80))
    assert told[1].startswith("the model's last call ended before its last layer")
    assert "rank 1 failed" in told[0]
