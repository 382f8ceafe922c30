"""Every family's adapter pieces, put together in order, are its layer's own forward bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.zaya.modeling_zaya import ZayaDecoderLayer

from tbo.errors import UnsupportedModelError
from tbo.models.attention import cut_attention
from tbo.models.families import LayerAdapter, adapter_for
from tbo.models.parts import find_decoder
from tiny_models import CONFIGS, FAMILIES, build, prefill_and_decode, token_batch, visited_layers

STACKED = tuple(family for family in FAMILIES if family != "llama4_text")
TOKEN_SPLIT = frozenset(
    [
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5_moe",
        "glm4_moe",
        "glm4_moe_lite",
        "granitemoe",
        "hunyuan_v1_moe",
        "minimax_m2",
        "mixtral",
        "olmoe",
        "qwen2_moe",
        "qwen3_moe",
    ]
)


def in_pieces(
    adapter: LayerAdapter, hidden: Tensor, layer_kwargs: Mapping[str, Any], carried_topk: Any = None
) -> tuple[Tensor, Any]:
    """A layer's forward out of what its adapter offers, in the order the ops call it."""
    cut = cut_attention(adapter.attention_module())
    attn_input, residual, extra = adapter.prepare_attention(hidden)
    attention = cut.core(cut.prepare(attn_input, adapter.attention_kwargs(layer_kwargs, carried_topk)))
    mlp_input, residual, extra = adapter.after_attention(attention.output, residual, extra)
    mlp_output = (
        sparse_in_pieces(adapter, mlp_input, layer_kwargs) if adapter.is_sparse else adapter.dense_mlp(mlp_input)
    )
    return adapter.after_mlp(mlp_output, residual, extra), attention.carry


def sparse_in_pieces(adapter: LayerAdapter, mlp_input: Tensor, layer_kwargs: Mapping[str, Any]) -> Tensor:
    ids, weights = adapter.select(adapter.route(mlp_input, layer_kwargs))
    rows, weights = adapter.dispatch_rows(mlp_input, weights)
    output = adapter.experts(rows, ids, weights).reshape(mlp_input.shape)
    shared = adapter.shared(mlp_input)
    assert (shared is not None) == adapter.has_shared
    return output if shared is None else output + shared


def twin_of_cache(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments with a copy of the cache, so that a layer can be run twice."""
    return {name: copy.deepcopy(value) if isinstance(value, Cache) else value for name, value in kwargs.items()}


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors_of(item)]
    return [tensor for item in value for tensor in tensors_of(item)] if isinstance(value, list | tuple) else []


def assert_same_cache(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for name, value in one.items():
        if isinstance(value, Cache):
            states = [[tensors_of(vars(layer)) for layer in cache.layers] for cache in (value, other[name])]
            for mine, theirs in zip(*states, strict=True):
                for left, right in zip(mine, theirs, strict=True):
                    assert torch.equal(left, right)


def checked_layers(model: Any) -> list[str]:
    """Runs a model with every layer's call repeated in pieces; which kinds of layer were compared."""
    decoder = find_decoder(model)
    adapters = [adapter_for(layer, decoder.config) for layer in decoder.layers]
    seen: list[str] = []

    def compare(index: int, own: Callable[..., Any], hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        adapter, given, twin = adapters[index], hidden.clone(), twin_of_cache(kwargs)
        expected = own(hidden, **kwargs)
        carry = kwargs.get("prev_topk_indices")
        got = adapter.layer_output(*in_pieces(adapter, hidden, twin, carry))
        assert torch.equal(hidden, given), "the layer's input was written to"
        assert type(got) is type(expected)
        for mine, theirs in zip(tensors_of([got]), tensors_of([expected]), strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs), f"layer {index} differs by {(mine - theirs).abs().max()}"
        assert_same_cache(twin, kwargs)
        seen.append("sparse" if adapter.is_sparse else "dense")
        return expected

    with visited_layers(decoder.layers, compare):
        prefill_and_decode(model)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_are_the_layers_forward(family: str, dtype: torch.dtype) -> None:
    model = build(family, dtype=dtype)
    seen = checked_layers(model)
    assert len(seen) == 3 * model.config.num_hidden_layers
    assert "sparse" in seen


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
@pytest.mark.parametrize("family", STACKED)
def test_own_tokens_use_the_configured_experts_implementation(family: str, experts: str) -> None:
    assert "sparse" in checked_layers(build(family, experts=experts))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": None}),
        ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}),
        ("ernie4_5_moe", {"moe_num_shared_experts": 0}),
        ("glm4_moe", {"use_qk_norm": False}),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full", "shared"]}),
        ("llama4_text", {"use_qk_norm": False, "attn_temperature_tuning": False}),
        ("olmoe", {"clip_qkv": None}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4, "norm_topk_prob": False}),
        ("mixtral", {"sliding_window": 4}),
    ],
    ids=str,
)
def test_other_branches_of_a_family(family: str, overrides: dict[str, Any]) -> None:
    assert "sparse" in checked_layers(build(family, **overrides))


@pytest.mark.parametrize("family", FAMILIES)
def test_token_split_is_stated_per_family(family: str) -> None:
    decoder = find_decoder(build(family))
    answers = {adapter_for(layer, decoder.config).token_split for layer in decoder.layers}
    assert answers == {family in TOKEN_SPLIT}


def test_a_sliding_window_forbids_the_token_split() -> None:
    decoder = find_decoder(build("mixtral", sliding_window=4))
    assert not adapter_for(decoder.layers[0], decoder.config).token_split


@pytest.mark.parametrize("family", sorted(TOKEN_SPLIT))
def test_a_sequence_may_be_cut_between_tokens(family: str) -> None:
    """Both parts write their keys before either attends: the first must not see the second, the second all."""
    model: Any = build(family)
    decoder = find_decoder(model)
    adapters = [adapter_for(layer, decoder.config) for layer in decoder.layers]
    parts = (slice(0, 5), slice(5, 12))

    def compare(index: int, own: Callable[..., Any], hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        twin = twin_of_cache(kwargs)
        expected = own(hidden, **kwargs)
        adapter = adapters[index]
        cut = cut_attention(adapter.attention_module())
        begun = [adapter.prepare_attention(hidden[:, part]) for part in parts]
        prepared = [
            cut.prepare(attn_input, adapter.attention_kwargs(token_part(twin, part)))
            for part, (attn_input, _, _) in zip(parts, begun, strict=True)
        ]
        outputs = [cut.core(carried).output for carried in reversed(prepared)]
        after = [
            adapter.after_attention(output, residual, extra)
            for output, (_, residual, extra) in zip(reversed(outputs), begun, strict=True)
        ]
        got = torch.cat(
            [
                adapter.after_mlp(
                    sparse_in_pieces(adapter, mlp_input, kwargs) if adapter.is_sparse else adapter.dense_mlp(mlp_input),
                    residual,
                    extra,
                )
                for mlp_input, residual, extra in after
            ],
            dim=1,
        )
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
        return expected

    ids, mask = token_batch(1, 12, left_padding=False)
    mask[0, 0] = 0  # a padded batch has an explicit mask, which can be cut
    with visited_layers(decoder.layers, compare), torch.no_grad():
        model(ids, attention_mask=mask, use_cache=True)


def token_part(kwargs: Mapping[str, Any], part: slice) -> dict[str, Any]:
    def cut(name: str, value: Any) -> Any:
        if name == "attention_mask":
            return value[:, :, part, : part.stop]
        if isinstance(value, tuple):
            return tuple(cut(name, item) for item in value)
        return value[:, part] if isinstance(value, Tensor) else value

    return {name: cut(name, value) for name, value in kwargs.items()}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_an_empty_sub_batch_passes_everything_but_attention_and_router(family: str) -> None:
    decoder = find_decoder(build(family))
    for layer in decoder.layers:
        adapter = adapter_for(layer, decoder.config)
        hidden = torch.empty(0, 5, 2, 64) if family == "deepseek_v4" else torch.empty(0, 5, 64)
        attn_input, residual, extra = adapter.prepare_attention(hidden)
        mlp_input, residual, extra = adapter.after_attention(torch.zeros_like(attn_input), residual, extra)
        output = adapter.shared(mlp_input) if adapter.has_shared else mlp_input
        assert output is not None
        assert adapter.after_mlp(output, residual, extra).shape == hidden.shape


def test_adapters_put_on_later_are_seen() -> None:
    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any) -> Any:
            return self.inner(*args) * 2

    decoder = find_decoder(build("deepseek_v3"))
    adapter = adapter_for(decoder.layers[-1], decoder.config)
    rows = torch.randn(1, 3, 64)
    ids, weights = torch.tensor([[0, 1], [2, 3], [4, 5]]), torch.rand(3, 2)
    with torch.no_grad():
        before = adapter.shared(rows), adapter.experts(rows[0], ids, weights)
        for name in ("shared_experts", "experts"):
            block = adapter.moe.block
            setattr(block, name, Doubled(block.get_submodule(name)))
        after = adapter.shared(rows), adapter.experts(rows[0], ids, weights)
        exchanged = adapter.experts(rows[0], ids[:, :1], torch.ones(3, 1), exchanged=True)
        plain = adapter.moe.experts.get_submodule("inner")(rows[0], ids[:, :1], torch.ones(3, 1))
    for one, two in zip(before, after, strict=True):
        assert one is not None
        assert two is not None
        assert torch.equal(one * 2, two)
    assert torch.equal(exchanged, plain * 2)


def test_an_unknown_layer_is_refused_with_what_is_known() -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, hidden_states: Tensor) -> Tensor:
            output: Tensor = self.mlp(self.self_attn(hidden_states))
            return output

    with pytest.raises(
        UnsupportedModelError, match=r"Strange \(.*\) is of no family tbo knows.*deepseek_v2, .*qwen3_next"
    ):
        adapter_for(Strange(), None)


def unchanged(self: nn.Module, hidden_states: Tensor) -> Tensor:
    return hidden_states


def test_a_namesake_from_elsewhere_is_not_taken_for_the_family() -> None:
    """Remote code reuses transformers' class names for older, different layers."""
    source = build("deepseek_v3")
    layer = find_decoder(source).layers[0]
    namesake = type("DeepseekV3DecoderLayer", (type(layer),), {"forward": unchanged})
    layer.__class__ = namesake
    with pytest.raises(UnsupportedModelError, match="DeepseekV3DecoderLayer"):
        adapter_for(layer, source.config)


def test_a_subclass_that_keeps_the_forward_is_served() -> None:
    """FSDP makes one of every module it shards."""
    layer = find_decoder(build("qwen3_moe")).layers[0]
    layer.__class__ = type("FSDPQwen3MoeDecoderLayer", (type(layer),), {})
    assert adapter_for(layer, None).traits.family == "qwen3_moe"


def test_a_layer_known_not_to_fit_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModelError, match="ZayaDecoderLayer is not served: a second output of each layer"):
        adapter_for(ZayaDecoderLayer.__new__(ZayaDecoderLayer), None)


def test_llama4_with_two_experts_a_token_is_refused() -> None:
    decoder = find_decoder(build("llama4_text", num_experts_per_tok=2))
    with pytest.raises(UnsupportedModelError, match="routes each to 2 of them"):
        adapter_for(decoder.layers[1], decoder.config)


def test_noise_on_the_router_in_training_is_refused() -> None:
    model = build("mixtral", router_jitter_noise=0.1)
    adapter = adapter_for(find_decoder(model).layers[0], model.config)
    adapter.route(torch.randn(1, 2, 64), {})
    model.train()
    with pytest.raises(UnsupportedModelError, match="router_jitter_noise"):
        adapter.route(torch.randn(1, 2, 64), {})


def test_a_dense_layer_has_no_experts_to_ask_for() -> None:
    model = build("deepseek_v3")
    adapter = adapter_for(find_decoder(model).layers[0], model.config)
    assert not adapter.is_sparse
    with pytest.raises(UnsupportedModelError, match="dense layer"):
        _ = adapter.moe


@pytest.mark.parametrize(
    ("family", "like"), [("mellum", "qwen3_moe"), ("solar_open", "glm4_moe"), ("exaone_moe", "glm4_moe")]
)
def test_a_family_with_the_code_of_a_served_one_is_served(family: str, like: str) -> None:
    model = build(family, **CONFIGS[like])
    decoder = find_decoder(model)
    assert all("built like" in adapter_for(layer, decoder.config).traits.family for layer in decoder.layers)
    assert "sparse" in checked_layers(model)
