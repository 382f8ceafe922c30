"""Attention written out: plain (multi-head, grouped-query) and latent, the readable reference for the generic cut.

Which norms, windows and sinks a class has is data, declared per class. The attention function is always the one the
model is configured with: transformers builds the mask for that name, and builds none for a name it does not know.

Shapes: B sequences, S positions of this step, C positions in the cache after it, N heads, G key/value heads, D head
size, L latent size, P rotated size, H hidden size.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tbo.models.attention_cut import AttentionResult, cache_among
from tbo.models.parts import own_forward


class QueryKeyNorm(Enum):
    """Where queries and keys are normed."""

    NONE = "not at all"
    PER_HEAD = "each head, before the rotation"
    FULL_WIDTH = "all heads together, before the rotation"
    AFTER_ROTATION = "each head, after the rotation"


class Window(Enum):
    """Where the sliding window's size is kept."""

    NONE = "no window argument"
    MODULE = "on the attention module"
    CONFIG = "in the configuration"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainTraits:
    """How one class of plain attention differs from the others."""

    norm: QueryKeyNorm = QueryKeyNorm.NONE
    window: Window = Window.NONE
    sinks: bool = False
    clips: bool = False


PLAIN: Final[Mapping[str, PlainTraits]] = MappingProxyType(
    {
        "Qwen2MoeAttention": PlainTraits(),
        "Qwen3MoeAttention": PlainTraits(norm=QueryKeyNorm.PER_HEAD, window=Window.MODULE),
        "MixtralAttention": PlainTraits(window=Window.CONFIG),
        "Glm4MoeAttention": PlainTraits(norm=QueryKeyNorm.PER_HEAD),
        "GptOssAttention": PlainTraits(window=Window.MODULE, sinks=True),
        "OlmoeAttention": PlainTraits(norm=QueryKeyNorm.FULL_WIDTH, window=Window.CONFIG, clips=True),
        "MiniMaxAttention": PlainTraits(window=Window.CONFIG),
        "MiniMaxM2Attention": PlainTraits(norm=QueryKeyNorm.FULL_WIDTH),
        "Ernie4_5_MoeAttention": PlainTraits(),
        "Dots1Attention": PlainTraits(norm=QueryKeyNorm.PER_HEAD, window=Window.MODULE),
        "HunYuanMoEV1Attention": PlainTraits(norm=QueryKeyNorm.AFTER_ROTATION),
        "GraniteMoeAttention": PlainTraits(),
    }
)
"""Plain attention classes of transformers, by name."""

LATENT: Final = frozenset({"DeepseekV2Attention", "DeepseekV3Attention", "Glm4MoeLiteAttention"})
"""Latent attention classes of transformers, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Projected:
    """What the first half hands to the second.

    Attributes:
        query: ``[B, N, S, D]``.
        key: ``[B, G, C, D]``, or the latents ``[B, 1, C, L]``.
        value: ``[B, G, C, D]``, or the rotated keys ``[B, 1, C, P]``.
        mask: as the attention function wants it.
        options: arguments the forward passes on to the attention function.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    options: Mapping[str, Any]


class _WrittenOut:
    """What plain and latent attention share: the call of the attention function and the output projection."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        forward = own_forward(module)
        self._modeling: Any = sys.modules[forward.__module__]
        self._consumed = frozenset(inspect.signature(forward).parameters)

    def _options(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments the forward does not name itself; it hands them to the attention function."""
        return {name: value for name, value in kwargs.items() if name not in self._consumed}

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]) -> Tensor:
        module = self.module
        name = module.config._attn_implementation  # noqa: SLF001 - transformers' models read it there, too
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, self._modeling.eager_attention_forward)
        dropout = module.attention_dropout if module.training else 0.0
        attended, _ = attend(module, query, key, value, mask, dropout=dropout, scaling=module.scaling, **options)
        batch, positions = query.shape[0], query.shape[2]
        output: Tensor = module.o_proj(attended.reshape(batch, positions, -1).contiguous())
        return output


class PlainAttention(_WrittenOut):
    """Multi-head or grouped-query attention whose cache holds keys and values."""

    kind = "explicit plain attention"

    def __init__(self, module: nn.Module, traits: PlainTraits) -> None:
        super().__init__(module)
        self.traits = traits

    def prepare(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> Projected:
        """Projects, norms and rotates queries and keys; writes keys and values to the cache."""
        query, key, value = self._project(hidden)
        cos, sin = kwargs["position_embeddings"]
        query, key = self._modeling.apply_rotary_pos_emb(query, key, cos, sin)
        if self.traits.norm is QueryKeyNorm.AFTER_ROTATION:
            query, key = self.module.query_layernorm(query), self.module.key_layernorm(key)
        cache = cache_among(kwargs)
        if cache is not None:
            key, value = cache.update(key, value, self.module.layer_idx)
        return Projected(
            query=query, key=key, value=value, mask=kwargs.get("attention_mask"), options=self._options(kwargs)
        )

    def core(self, carried: Projected) -> AttentionResult:
        """Attends to the cache and projects the output."""
        options = {**carried.options, **self._own_options()}
        return AttentionResult(output=self._attend(carried.query, carried.key, carried.value, carried.mask, options))

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[B, N, S, D]``, keys and values ``[B, G, S, D]`` before the rotation."""
        module, norm = self.module, self.traits.norm
        query, key, value = module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)
        if norm is QueryKeyNorm.FULL_WIDTH and self._has_norms():
            query, key = module.q_norm(query), module.k_norm(key)
        if self.traits.clips and module.config.clip_qkv is not None:
            limit = module.config.clip_qkv
            query, key, value = (states.clamp(min=-limit, max=limit) for states in (query, key, value))
        heads = (*hidden.shape[:-1], -1, module.head_dim)
        query, key, value = query.view(heads), key.view(heads), value.view(heads)
        if norm is QueryKeyNorm.PER_HEAD and self._has_norms():
            query, key = module.q_norm(query), module.k_norm(key)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _has_norms(self) -> bool:
        """Some classes norm or not by configuration."""
        return hasattr(self.module, "q_norm")

    def _own_options(self) -> dict[str, Any]:
        """Arguments of the attention function that come from the module or its configuration."""
        options: dict[str, Any] = {}
        if self.traits.window is Window.MODULE:
            options["sliding_window"] = self.module.sliding_window
        elif self.traits.window is Window.CONFIG:
            options["sliding_window"] = getattr(self.module.config, "sliding_window", None)
        if self.traits.sinks:
            options["s_aux"] = self.module.sinks
        return options


class LatentAttention(_WrittenOut):
    """Multi-head latent attention whose cache holds the latents.

    Expanding the latents of the whole context into keys and values is part of the second half: it is most of the work
    of a decode step, and nothing waits for it but attention itself.
    """

    kind = "explicit latent attention"

    def prepare(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> Projected:
        """Projects and rotates; writes the normed latents and the rotated keys to the cache."""
        module = self.module
        batch, positions = hidden.shape[:-1]
        query = self._queries(hidden).view(batch, positions, -1, module.qk_head_dim).transpose(1, 2)
        query_pass, query_rotated = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
        compressed = module.kv_a_proj_with_mqa(hidden)
        latent, key_rotated = compressed.split([module.kv_lora_rank, module.qk_rope_head_dim], dim=-1)
        latent = module.kv_a_layernorm(latent).view(batch, 1, positions, module.kv_lora_rank)
        key_rotated = key_rotated.view(batch, 1, positions, module.qk_rope_head_dim)
        query_rotated, key_rotated = self._rotate(query_rotated, key_rotated, kwargs["position_embeddings"])
        cache = cache_among(kwargs)
        if cache is not None:
            latent, key_rotated = cache.update(latent, key_rotated, module.layer_idx)
        return Projected(
            query=torch.cat((query_pass, query_rotated), dim=-1),
            key=latent,
            value=key_rotated,
            mask=kwargs.get("attention_mask"),
            options=self._options(kwargs),
        )

    def core(self, carried: Projected) -> AttentionResult:
        """Expands the cached latents, attends and projects the output."""
        key, value = self.module.expand_kv(carried.key, carried.value)
        return AttentionResult(output=self._attend(carried.query, key, value, carried.mask, carried.options))

    def _queries(self, hidden: Tensor) -> Tensor:
        module = self.module
        queries: Tensor = (
            module.q_proj(hidden)
            if module.q_lora_rank is None
            else module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden)))
        )
        return queries

    def _rotate(self, query: Tensor, key: Tensor, positions: Any) -> tuple[Tensor, Tensor]:
        """Rotary tables are one complex tensor (DeepSeek V2) or a pair of cosines and sines."""
        rotated: tuple[Tensor, Tensor]
        if isinstance(positions, Tensor):
            rotated = self._modeling.apply_rotary_emb(query, key, positions.to(query.device))
        elif self.module.config.rope_interleave:
            rotated = self._modeling.apply_rotary_pos_emb_interleave(query, key, *positions)
        else:
            rotated = self._modeling.apply_rotary_pos_emb(query, key, *positions)
        return rotated
