"""Tiny models of the served families, with random weights, for tests on a CPU.

Sizes are as small as each family's code allows while every branch that matters runs: several routed experts and
groups, dense layers before and between sparse ones, sliding and linear layers next to full ones, factors
that are not 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

NUM_EXPERTS: Final = 8
NUM_LAYERS: Final = 4
VOCABULARY: Final = 96

_SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}
_GROUPED_QUERY: Final[dict[str, Any]] = {"num_key_value_heads": 2, "head_dim": 16}
_LATENT: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_GROUP_LIMITED: Final[dict[str, Any]] = {
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.75,
    "first_k_dense_replace": 1,
    "intermediate_size": 80,
    "moe_intermediate_size": 32,
}
_QWEN: Final[dict[str, Any]] = {
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "intermediate_size": 80,
    "moe_intermediate_size": 32,
}
_MIXTRAL: Final[dict[str, Any]] = {
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
}

CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "deepseek_v2": {**_LATENT, **_GROUP_LIMITED, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_LATENT, **_GROUP_LIMITED},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "hc_mult": 2,
        "n_routed_experts": NUM_EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "dots1": {**_GROUPED_QUERY, **_GROUP_LIMITED},
    "ernie4_5_moe": {
        "num_key_value_heads": 2,
        "moe_num_experts": NUM_EXPERTS,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
        "moe_layer_interval": 1,
        "intermediate_size": 80,
        "moe_intermediate_size": 32,
    },
    "glm4_moe": {**_GROUPED_QUERY, **_GROUP_LIMITED, "use_qk_norm": True},
    "glm4_moe_lite": {**_LATENT, **_GROUP_LIMITED},
    "glm_moe_dsa": {**_LATENT, **_GROUP_LIMITED, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 6},
    "gpt_oss": {
        **_GROUPED_QUERY,
        **_MIXTRAL,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "granitemoe": {
        **_MIXTRAL,
        "num_key_value_heads": 2,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.6,
        "embedding_multiplier": 2.0,
        "logits_scaling": 2.0,
    },
    "hunyuan_v1_moe": {**_GROUPED_QUERY, "num_experts": NUM_EXPERTS, "moe_topk": 2, "intermediate_size": 32},
    "llama4_text": {
        **_GROUPED_QUERY,
        **_MIXTRAL,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 80,
        "moe_layers": [1, 3],
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 8,
    },
    "minimax": {
        **_GROUPED_QUERY,
        **_MIXTRAL,
        "block_size": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "full_attn_alpha_factor": 1.5,
        "full_attn_beta_factor": 0.75,
        "linear_attn_alpha_factor": 1.25,
        "linear_attn_beta_factor": 0.5,
        "mlp_alpha_factor": 1.75,
        "mlp_beta_factor": 0.6,
    },
    "minimax_m2": {**_GROUPED_QUERY, **_MIXTRAL},
    "mixtral": {**_MIXTRAL, "num_key_value_heads": 2},
    "olmoe": {
        "num_key_value_heads": 4,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "clip_qkv": 0.8,
    },
    "qwen2_moe": {**_QWEN, "num_key_value_heads": 2, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    "qwen3_moe": {**_QWEN, **_GROUPED_QUERY, "num_local_experts": NUM_EXPERTS, "mlp_only_layers": [1]},
    "qwen3_next": {
        **_QWEN,
        **_GROUPED_QUERY,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [],
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}
"""What each family's configuration sets besides the common sizes."""

FAMILIES: Final = tuple(CONFIGS)
"""The 19 families, by model type."""

_EAGER_ONLY: Final = frozenset({"gpt_oss", "deepseek_v4"})
"""Attention sinks have no scaled-dot-product implementation."""


def build(
    family: str,
    *,
    attention: str | None = None,
    experts: str | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> PreTrainedModel:
    """A causal language model of one family in evaluation mode; equal arguments give equal weights.

    Args:
        family: one of `FAMILIES`; any other model type if `overrides` say all that it needs.
        attention: transformers' attention implementation; sdpa where the family has it.
        experts: transformers' experts implementation; its own default if None.
        dtype: of the weights.
        seed: of the weights.
        overrides: configuration fields that differ from `CONFIGS`.
    """
    config = AutoConfig.for_model(family, **{**_SIZES, **CONFIGS.get(family, {}), **overrides})
    options: dict[str, Any] = {} if experts is None else {"experts_implementation": experts}
    if attention is None:
        attention = "eager" if family in _EAGER_ONLY else "sdpa"
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=dtype, **options
    ).eval()
    _roughen(model, torch.Generator().manual_seed(seed + 1))
    return model


@torch.no_grad()
def _roughen(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Makes every norm, bias, sink and table different from its neighbours, so that a mix-up shows.

    Fresh models have norms of ones and biases of zeros, with which most mistakes compute the right thing.
    """
    for parameter in model.parameters():
        if parameter.dim() == 1 or bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(_noise(parameter, generator))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(_noise(buffer, generator))
        elif name.endswith("tid2eid"):
            rows, chosen = buffer.shape
            buffer.copy_(torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:chosen] for _ in range(rows)]))


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.randn(like.shape, generator=generator) * 0.1).to(like.dtype)


def token_batch(rows: int, positions: int, *, seed: int = 0, left_padding: bool = True) -> tuple[Tensor, Tensor]:
    """Token ids and a mask, ``[rows, positions]`` each; every second row is padded on the left."""
    ids = torch.randint(3, VOCABULARY, (rows, positions), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if left_padding:
        for row in range(1, rows, 2):
            padding = 1 + row % max(1, positions // 2)
            ids[row, :padding], mask[row, :padding] = 0, 0
    return ids, mask


Visit = Callable[[int, Callable[..., Any], Tensor, dict[str, Any]], Any]
"""Called for each layer's call: its index, its own forward, hidden states, keyword arguments; returns the output."""


@contextmanager
def visited_layers(layers: Sequence[nn.Module], visit: Visit) -> Iterator[None]:
    """Sends every call of the layers through `visit`, with exactly the arguments the model calls them with."""

    def stand_in(index: int, layer: Any) -> Callable[..., Any]:
        own = layer.forward
        return lambda hidden_states, **kwargs: visit(index, own, hidden_states, kwargs)

    for index, layer in enumerate(layers):
        vars(layer)["forward"] = stand_in(index, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


@torch.no_grad()
def prefill_and_decode(
    model: PreTrainedModel, *, rows: int = 3, positions: int = 9, decode_steps: int = 2, left_padding: bool = True
) -> list[Tensor]:
    """Runs a model over a padded batch and then token by token with its cache; the logits of each step."""
    ids, mask = token_batch(rows, positions, left_padding=left_padding)
    following, _ = token_batch(rows, decode_steps, seed=1, left_padding=False)
    output = model(ids, attention_mask=mask, use_cache=True)
    logits = [output.logits]
    for step in range(decode_steps):
        mask = torch.cat([mask, mask.new_ones(rows, 1)], dim=1)
        output = model(
            following[:, step : step + 1], attention_mask=mask, use_cache=True, **{_cache_name(output): _cache(output)}
        )
        logits.append(output.logits)
    return logits


def _cache(output: Any) -> Any:
    return getattr(output, _cache_name(output))


def _cache_name(output: Any) -> str:
    """``past_key_values`` up to transformers 5.23, ``cache`` from 5.24."""
    return "cache" if getattr(output, "cache", None) is not None else "past_key_values"
