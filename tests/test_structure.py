"""What is read off a layer's code: families built like served ones, and the order of a router's output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tbo.errors import UnsupportedModelError
from tbo.models.families import adapter_for
from tbo.models.parts import find_decoder, find_moe, own_forward
from tbo.models.routing import RouterOutput
from tbo.models.structure import traits_by_structure, unpacked_order
from tiny_models import CONFIGS, FAMILIES, build


class Block(nn.Module):
    router: Any
    gate: Any
    experts: Any


class Renamed(Block):
    def forward(self, rows: Tensor) -> Any:
        chosen, shares, _ = self.router(rows)
        return self.experts(rows, chosen, shares)


class Strange(Block):
    def forward(self, rows: Tensor) -> Any:
        weights, ids, _ = self.gate(rows)
        return self.experts(rows, ids, weights)


class Silent(Block):
    def forward(self, rows: Tensor) -> Any:
        routed = self.gate(rows)
        return self.experts(rows, *routed)


class Rewritten(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama4_text"])
@torch.no_grad()
def test_the_order_read_off_the_code_is_the_order_of_the_values(family: str) -> None:
    """Granite's order is one thing up to transformers 5.17 and another by 5.24: the values themselves must fit it."""
    model = build(family)
    decoder = find_decoder(model)
    adapter = adapter_for(decoder.layers[-1], decoder.config)
    assert unpacked_order(own_forward(adapter.moe.block)) is not None
    ids, weights = adapter.select(adapter.route(torch.randn(5, 64), {"input_ids": torch.arange(5)}))
    assert ids.dtype == torch.int64
    assert weights.is_floating_point()
    assert ids.shape == weights.shape
    assert ids.shape[1] < 8


def test_names_do_not_matter_for_the_order() -> None:
    assert unpacked_order(Renamed.forward) is RouterOutput.IDS_WEIGHTS_LOGITS


def test_an_order_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Strange\.forward unpacks its router's output as weights, ids, _"):
        unpacked_order(Strange.forward)


def test_code_that_does_not_say_leaves_the_order_to_the_table() -> None:
    assert unpacked_order(Silent.forward) is None


def test_a_block_like_none_is_refused_though_the_layer_is_like_one() -> None:
    model = build("mellum", **CONFIGS["qwen3_moe"])
    layer = find_decoder(model).layers[0]
    assert traits_by_structure(layer, find_moe(layer)) is not None
    block: Any = layer.get_submodule("mlp")
    block.__class__ = type("RewrittenBlock", (type(block),), {"forward": Rewritten.forward})
    assert traits_by_structure(layer, find_moe(layer)) is None
    with pytest.raises(UnsupportedModelError, match=r"MellumDecoderLayer with RewrittenBlock \(transformers\.models"):
        adapter_for(layer, model.config)


def test_a_family_served_by_structure_is_not_cut_between_tokens() -> None:
    model = build("mellum", **CONFIGS["qwen3_moe"])
    decoder = find_decoder(model)
    assert not any(adapter_for(layer, decoder.config).token_split for layer in decoder.layers)


@pytest.mark.parametrize(("family", "kept"), [("llama4_text", "position_ids"), ("deepseek_v4", "input_ids")])
def test_attention_is_not_given_what_its_layer_keeps(family: str, kept: str) -> None:
    decoder = find_decoder(build(family))
    adapter = adapter_for(decoder.layers[0], decoder.config)
    assert adapter.attention_kwargs({kept: 1, "attention_mask": None}) == {"attention_mask": None}
