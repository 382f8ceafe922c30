"""Finding the decoder inside a model and the pieces inside a layer, by names looked up when used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Llama4ForCausalLM

from tbo.errors import UnsupportedModelError
from tbo.models.parts import find_decoder, find_moe, num_experts
from tiny_models import FAMILIES, NUM_EXPERTS, build

DENSE_LAYERS = {
    "deepseek_v2": [0],
    "deepseek_v3": [0],
    "dots1": [0],
    "ernie4_5_moe": [0],
    "glm4_moe": [0],
    "glm4_moe_lite": [0],
    "glm_moe_dsa": [0],
    "llama4_text": [0, 2],
    "qwen2_moe": [0],
    "qwen3_moe": [1],
}
SHARED = {
    "deepseek_v2": "shared_experts",
    "deepseek_v3": "shared_experts",
    "deepseek_v4": "shared_experts",
    "dots1": "shared_experts",
    "ernie4_5_moe": "shared_experts",
    "glm4_moe": "shared_experts",
    "glm4_moe_lite": "shared_experts",
    "glm_moe_dsa": "shared_experts",
    "hunyuan_v1_moe": "shared_mlp",
    "llama4_text": "shared_expert",
    "qwen2_moe": "shared_expert",
    "qwen3_next": "shared_expert",
}


def holder(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def stacked_experts(count: int = 3) -> nn.Module:
    experts = nn.Module()
    experts.register_parameter("down_proj", nn.Parameter(torch.zeros(count, 2, 2)))
    return experts


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_and_experts_of_every_family(family: str) -> None:
    model = build(family)
    decoder = find_decoder(model)
    assert decoder.base is model.get_submodule("model")
    assert decoder.path == "model"
    assert decoder.layers == tuple(model.get_submodule("model.layers").children())
    found = [find_moe(layer) for layer in decoder.layers]
    assert [index for index, parts in enumerate(found) if parts is None] == DENSE_LAYERS.get(family, [])
    for parts in filter(None, found):
        assert parts.experts is parts.block.get_submodule("experts")
        assert num_experts(parts.experts) == NUM_EXPERTS
        assert parts.router in (getattr(parts.block, "gate", None), getattr(parts.block, "router", None))
        assert parts.shared_name == SHARED.get(family)
        assert (parts.shared_gate is not None) == (family in ("qwen2_moe", "qwen3_next"))


def test_the_base_model_itself_is_a_decoder() -> None:
    base = build("mixtral").get_submodule("model")
    decoder = find_decoder(base)
    assert decoder.base is base
    assert decoder.path == ""
    assert decoder.config is base.config


def test_llama4_names_its_decoder_unlike_its_prefix() -> None:
    model = build("llama4_text")
    assert isinstance(model, Llama4ForCausalLM)
    assert find_decoder(model).base is model.model


@pytest.mark.parametrize(
    "path", ["language_model", "model.language_model", "base_model.model.model", "model.text_model"]
)
def test_a_decoder_inside_a_multimodal_or_peft_wrapper(path: str) -> None:
    base = build("mixtral").get_submodule("model")
    model: nn.Module = base
    for name in reversed(path.split(".")):
        model = holder(vision_tower=nn.Linear(1, 1), **{name: model})
    decoder = find_decoder(model)
    assert decoder.base is base
    assert decoder.path == path


def test_only_the_layers_the_model_runs_are_found() -> None:
    model: Any = build("mixtral")
    model.config.num_hidden_layers = 2
    assert find_decoder(model).layers == tuple(model.model.layers[:2])


def test_what_is_no_decoder_is_refused_with_where_was_looked() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Linear has no decoder .* in the model itself \(Linear\)"):
        find_decoder(nn.Linear(2, 2))
    with pytest.raises(UnsupportedModelError, match=r"the model itself \(Module\), model \(Linear\)"):
        find_decoder(holder(model=nn.Linear(2, 2)))


def test_an_empty_stack_is_no_decoder() -> None:
    with pytest.raises(UnsupportedModelError, match="no non-empty ModuleList"):
        find_decoder(holder(layers=nn.ModuleList()))


def test_a_stack_without_configuration_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no config\.num_hidden_layers"):
        find_decoder(holder(layers=nn.ModuleList([nn.Linear(1, 1)])))


@pytest.mark.parametrize("count", [0, 3])
def test_a_configuration_that_does_not_fit_the_stack_is_refused(count: int) -> None:
    model: Any = holder(layers=nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]))
    model.config = SimpleNamespace(num_hidden_layers=count)
    with pytest.raises(UnsupportedModelError, match=f"holds 2 layers, but config.num_hidden_layers is {count}"):
        find_decoder(model)


def test_a_layer_without_a_feed_forward_block_is_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"no feed-forward block .*mlp, feed_forward.*it has self_attn, ffn"
    ):
        find_moe(holder(self_attn=nn.Linear(1, 1), ffn=nn.Linear(1, 1)))


def test_experts_without_a_router_are_refused() -> None:
    layer = holder(mlp=holder(experts=stacked_experts(), chooser=nn.Linear(1, 1)))
    with pytest.raises(
        UnsupportedModelError, match=r"experts but no router .*\(gate, router\); it has experts, chooser"
    ):
        find_moe(layer)


def test_experts_in_a_list_are_refused() -> None:
    """Families that transformers has not stacked, and models of releases before 5."""
    layer = holder(mlp=holder(gate=nn.Linear(1, 1), experts=nn.ModuleList([nn.Linear(1, 1)])))
    with pytest.raises(UnsupportedModelError, match="ModuleList holds no stacked expert weights"):
        find_moe(layer)


def test_a_dense_layer_has_no_parts() -> None:
    assert find_moe(holder(mlp=nn.Linear(1, 1))) is None


def test_parts_are_looked_up_when_used() -> None:
    layer = holder(mlp=holder(gate=nn.Linear(1, 1), experts=stacked_experts(), shared_mlp=nn.Linear(1, 1)))
    parts = find_moe(layer)
    assert parts is not None
    replaced = {name: nn.Identity() for name in ("gate", "experts", "shared_mlp")}
    for name, module in replaced.items():
        setattr(parts.block, name, module)
    assert [parts.router, parts.experts, parts.shared] == list(replaced.values())


def test_experts_are_counted_after_sharding() -> None:
    experts = stacked_experts(6)
    assert num_experts(experts) == 6
    experts.register_parameter("down_proj", nn.Parameter(torch.zeros(2, 2, 2)))
    assert num_experts(experts) == 2
