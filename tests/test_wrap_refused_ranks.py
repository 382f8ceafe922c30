"""Steps that only one rank could take are refused where experts are spread over ranks; recorded outputs are right.

Rank 0 does what is refused; rank 1 hears of it, or does its own step in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tbo
from ranks import run_ranks, values
from tbo.batch import Reason
from tbo.wrapping.report import Mode
from tiny_models import build, token_batch
from wrapped_models import report

IDS, MASK = token_batch(5, 9)


def attentions(model: Any) -> None:
    """Of an attention whose forward is cut into ops, nobody sees the weights."""
    with torch.no_grad():
        model(IDS, attention_mask=MASK, output_attentions=dist.get_rank() == 0)


def adapters(model: Any) -> None:
    """Trained weights inside the layers behind frozen embeddings: the first hidden states need no gradient."""
    model.requires_grad_(requires_grad=False)
    model.model.layers[1].self_attn.q_proj.weight.requires_grad_(requires_grad=True)
    with torch.set_grad_enabled(dist.get_rank() == 0):
        model(IDS, attention_mask=MASK)


def checkpointing(model: Any) -> None:
    """Reentrant checkpointing calls the layers without gradients, and again with them in the backward pass."""
    if dist.get_rank() == 0:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": True})
    with torch.set_grad_enabled(dist.get_rank() == 0):
        model(IDS, attention_mask=MASK, use_cache=False)


CASES: dict[Callable[[Any], None], str] = {
    attentions: (
        "output_attentions is recorded from attention (Qwen3MoeAttention), whose forward is cut into ops where experts"
        " are spread over ranks. Call the model without output_attentions=True, or record it on one rank."
    ),
    adapters: (
        "gradients are enabled on a model whose experts are spread over ranks; they would stop at the exchange. Call"
        " the model under torch.no_grad(); training across ranks is not served."
    ),
    checkpointing: (
        "gradient checkpointing is on in a model whose experts are spread over ranks. Call model.eval(); training"
        " across ranks is not served."
    ),
}


def all_refused() -> dict[str, tuple[str, str]]:
    told = {}
    for case in CASES:
        model = build("qwen3_moe", attention="eager")
        tbo.wrap(model, dist.group.WORLD, overlap="always", timeout=60)
        with pytest.raises(tbo.TboError) as caught:
            case(model)
        told[case.__name__] = (type(caught.value).__name__, str(caught.value))
    return told


@pytest.mark.timeout(90)
def test_what_cannot_cross_ranks_is_refused_by_name() -> None:
    first, second = values(run_ranks(2, all_refused))
    for case, message in CASES.items():
        assert first[case.__name__] == ("WrapError", message)
        kind, heard = second[case.__name__]
        assert kind == "PeerError"
        assert f"rank 0 failed: outside a step: WrapError: {message}" in heard


def recorded() -> dict[str, float | bool]:
    """Largest difference of each recorded output to the plain model's."""
    model: Any = build("qwen3_moe")
    options = {"attention_mask": MASK, "output_hidden_states": True, "output_router_logits": True}
    with torch.no_grad():
        expected = model(IDS, **options)
        handle = tbo.wrap(model, dist.group.WORLD, overlap="always", timeout=60)
        actual = model(IDS, **options)
    assert (report(handle).mode, report(handle).reason) == (Mode.INLINE, Reason.OUTPUTS_CAPTURED)
    found: dict[str, float | bool] = {}
    for name in ("hidden_states", "router_logits"):
        pairs = list(zip(actual[name], expected[name], strict=True))
        rows = [
            (one - other)[MASK.bool()] if one.dim() == 3 else (one - other)[MASK.flatten().bool()]
            for one, other in pairs
        ]
        found[name] = max(row.abs().max().item() for row in rows)
    handle.finish()
    return found


@pytest.mark.timeout(90)
def test_hidden_states_and_router_logits_are_recorded_layer_by_layer() -> None:
    for found in values(run_ranks(2, recorded)):
        assert found["hidden_states"] < 4e-6
        assert found["router_logits"] < 4e-6
