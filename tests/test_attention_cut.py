"""Both halves of a cut, one after the other, are the attention module's own forward bit for bit."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import StaticCache
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tbo.models.attention import AttentionCut, cut_attention
from tbo.models.attention_liveness import LivenessCut, halves_of
from tbo.models.families import adapter_for
from tbo.models.parts import find_decoder, own_forward
from tiny_models import FAMILIES, build, prefill_and_decode, token_batch, visited_layers

LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
PLAIN = (
    "dots1",
    "ernie4_5_moe",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "hunyuan_v1_moe",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)
WRITTEN_OUT = (*LATENT, *PLAIN)

Cutter = Callable[[nn.Module], AttentionCut]


def cut_generically(module: nn.Module) -> AttentionCut:
    halves = halves_of(own_forward(module))
    assert halves is not None
    return LivenessCut(module, halves)


def own_result(module: nn.Module, hidden: Tensor, kwargs: Mapping[str, Any]) -> tuple[Tensor, Any]:
    returned = module(hidden_states=hidden, **kwargs)
    if not isinstance(returned, tuple):
        return returned, None
    return returned[0], returned[2] if len(returned) > 2 else None


def twin_of(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) if isinstance(value, Cache) else value for name, value in kwargs.items()}


def checked(model: Any, cutter: Cutter, run: Callable[[], Any]) -> list[str]:
    """Runs a model with each attention call repeated through a cut; the kinds of cut that were compared."""
    decoder = find_decoder(model)
    adapters = [adapter_for(layer, decoder.config) for layer in decoder.layers]
    kinds: list[str] = []

    def compare(index: int, own: Callable[..., Any], hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        adapter = adapters[index]
        attn_input, _, _ = adapter.prepare_attention(hidden)
        mine = adapter.attention_kwargs(kwargs, kwargs.get("prev_topk_indices"))
        first, second = twin_of(mine), twin_of(mine)
        cut = cutter(adapter.attention_module())
        torch.manual_seed(0)
        expected, expected_carry = own_result(adapter.attention_module(), attn_input, first)
        torch.manual_seed(0)
        result = cut.core(cut.prepare(attn_input, second))
        assert torch.equal(result.output, expected), f"differs by {(result.output - expected).abs().max()}"
        assert (result.carry is None) == (expected_carry is None)
        if expected_carry is not None:
            assert torch.equal(result.carry, expected_carry)
        kinds.append(cut.kind)
        return own(hidden, **kwargs)

    with visited_layers(decoder.layers, compare):
        run()
    return kinds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("left_padding", [True, False], ids=["padded", "unpadded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_chosen_cut_is_the_modules_forward(family: str, left_padding: bool, dtype: torch.dtype) -> None:
    model = build(family, dtype=dtype)
    kinds = checked(model, cut_attention, lambda: prefill_and_decode(model, left_padding=left_padding))
    if family in LATENT:
        assert set(kinds) == {"explicit latent attention"}
    elif family in PLAIN:
        assert set(kinds) == {"explicit plain attention"}
    elif family == "minimax":
        assert set(kinds) == {"not cut", "explicit plain attention"}
    elif family == "qwen3_next":
        assert set(kinds) == {"not cut", "at the cache write"}
    else:
        assert set(kinds) == {"at the cache write"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", WRITTEN_OUT)
def test_the_generic_cut_agrees_with_the_written_out_one(family: str, dtype: torch.dtype) -> None:
    model = build(family, dtype=dtype)
    kinds = checked(model, cut_generically, lambda: prefill_and_decode(model))
    assert set(kinds) == {"at the cache write"}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("deepseek_v2", {"q_lora_rank": None}),
        ("deepseek_v3", {"q_lora_rank": None}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("dots1", {"sliding_window": 4, "max_window_layers": 1}),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": True}),
        ("mixtral", {"sliding_window": 4}),
        ("olmoe", {"clip_qkv": None}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4}),
    ],
    ids=str,
)
def test_variants_of_written_out_attention(family: str, overrides: dict[str, Any], attention: str) -> None:
    model = build(family, attention=attention, **overrides)
    kinds = checked(model, cut_attention, lambda: prefill_and_decode(model))
    assert all(kind.startswith("explicit") for kind in kinds)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "gpt_oss", "llama4_text"])
def test_a_static_cache(family: str) -> None:
    model = build(family)
    ids, mask = token_batch(2, 7)

    def run() -> None:
        cache = StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)

    assert len(checked(model, cut_attention, run)) == model.config.num_hidden_layers


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "mixtral"])
def test_dropout_in_training(family: str) -> None:
    model = build(family, attention="eager", attention_dropout=0.5).train()
    kinds = checked(model, cut_attention, lambda: prefill_and_decode(model, decode_steps=0))
    assert len(kinds) == model.config.num_hidden_layers


def first_call(model: Any, layer_index: int) -> tuple[nn.Module, Tensor, dict[str, Any]]:
    """Attention, hidden states and arguments of one layer in a prefill, before the layer ran."""
    decoder = find_decoder(model)
    calls: list[tuple[nn.Module, Tensor, dict[str, Any]]] = []

    def keep(index: int, own: Callable[..., Any], hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        if index == layer_index:
            adapter = adapter_for(decoder.layers[index], decoder.config)
            attn_input, _, _ = adapter.prepare_attention(hidden)
            calls.append((adapter.attention_module(), attn_input, twin_of(adapter.attention_kwargs(kwargs))))
        return own(hidden, **kwargs)

    with visited_layers(decoder.layers, keep):
        prefill_and_decode(model, decode_steps=0)
    return calls[0]


@pytest.mark.parametrize("family", WRITTEN_OUT)
@pytest.mark.parametrize("cutter", [cut_attention, cut_generically])
@torch.no_grad()
def test_the_first_half_writes_the_cache_and_the_second_does_not(family: str, cutter: Cutter) -> None:
    module, hidden, kwargs = first_call(build(family), 1)
    cache = next(value for value in kwargs.values() if isinstance(value, Cache))
    cut = cutter(module)
    assert cache.get_seq_length(1) == 0
    carried = cut.prepare(hidden, kwargs)
    assert cache.get_seq_length(1) == 9
    entry: Any = cache.layers[1]
    written = entry.keys.clone()
    cut.core(carried)
    assert torch.equal(entry.keys, written)


@torch.no_grad()
def test_latents_are_expanded_in_the_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    module, hidden, kwargs = first_call(build("deepseek_v3"), 1)
    for cut in (cut_attention(module), cut_generically(module)):
        expand = mock.Mock(wraps=module.expand_kv)
        with monkeypatch.context() as patch:
            patch.setattr(module, "expand_kv", expand)
            carried = cut.prepare(hidden, twin_of(kwargs))
            assert expand.call_count == 0
            cut.core(carried)
            assert expand.call_count == 1


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "llama4_text"])
@torch.no_grad()
def test_the_models_attention_implementation_is_asked(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, hidden, kwargs = first_call(build(family), 1)
    cut = cut_attention(module)
    carried = cut.prepare(hidden, kwargs)
    masks: list[Any] = []

    def stand_in(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        masks.append(mask)
        batch, heads, positions, _ = query.shape
        return torch.zeros(batch, positions, heads, value.shape[-1]), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "stand-in", stand_in)
    monkeypatch.setattr(module.config, "_attn_implementation", "stand-in")
    output = cut.core(carried).output
    assert output.count_nonzero() == 0
    assert masks[0] is kwargs["attention_mask"]


@pytest.mark.parametrize("family", WRITTEN_OUT)
@torch.no_grad()
def test_the_attention_function_is_called_alike(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, sinks and whatever else only some attention functions look at."""
    module, hidden, kwargs = first_call(build(family), 2)
    options: list[dict[str, Any]] = []

    def stand_in(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
        options.append(given)
        batch, heads, positions, _ = query.shape
        return torch.zeros(batch, positions, heads, value.shape[-1]), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "stand-in", stand_in)
    monkeypatch.setattr(module.config, "_attn_implementation", "stand-in")
    cut = cut_attention(module)
    own_result(module, hidden, twin_of({**kwargs, "anything": "else"}))
    cut.core(cut.prepare(hidden, twin_of({**kwargs, "anything": "else"})))
    assert options[0].keys() == options[1].keys()
    assert all(value is options[1][name] or value == options[1][name] for name, value in options[0].items())
    assert options[0]["anything"] == "else"
    assert ("s_aux" in options[0]) == (family == "gpt_oss")


@torch.no_grad()
def test_adapters_put_on_later_are_seen() -> None:
    class Zero(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return torch.zeros(*rows.shape[:-1], 64)

    for family in ("deepseek_v3", "qwen3_moe", "qwen3_next", "llama4_text"):
        module, hidden, kwargs = first_call(build(family), 1)
        cut = cut_attention(module)
        module.o_proj = Zero()
        assert cut.core(cut.prepare(hidden, kwargs)).output.count_nonzero() == 0


def test_a_failure_in_a_half_points_into_the_models_own_source() -> None:
    module, hidden, kwargs = first_call(build("llama4_text"), 1)
    cut = cut_attention(module)
    with pytest.raises(RuntimeError) as caught:
        cut.prepare(hidden[..., :7], kwargs)
    frames = traceback.extract_tb(caught.value.__traceback__)
    frame = next(frame for frame in frames if frame.filename.endswith("modeling_llama4.py"))
    assert frame.line is not None
    assert "self.q_proj(hidden_states)" in frame.line
