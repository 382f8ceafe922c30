"""What differs from family to family, as data: one entry for each decoder layer class that is served by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from tbo.models.experts import ExpertLayout, InputWeightedExperts, StackedExperts
from tbo.models.residuals import AlphaBeta, HyperConnections, PreNorm, ResidualRule, ScaledPreNorm
from tbo.models.routing import RouterCall, RouterOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyTraits:
    """How the layers of one family differ from the common kind, which every default describes.

    Attributes:
        family: the model type.
        residual: how block outputs are added.
        router_call: what the router takes.
        router_output: the order of what it returns.
        experts: how experts are stored and called.
        shared_on_rows: the shared experts are given ``[T, H]`` rows instead of the layer's ``[B, S, H]``.
        kept_from_attention: layer arguments its attention is not called with.
        carries_topk: a layer also returns top-k token indices, which the next layer's attention is given.
        token_split: one sequence may be cut between tokens, the second part seeing the first through the cache. That
            takes softmax attention over a cache that only grows: no linear attention, indexer or compressor,
            and no per-chunk or sliding cache (those depend on the configuration, see `LayerAdapter.token_split`).
        batch_size_dependent: the plain model's own result for a row depends on which rows are beside it by more than
            the rounding of a product's shape, so that equality with it needs a stated tolerance.
    """

    family: str
    residual: ResidualRule = field(default_factory=PreNorm)
    router_call: RouterCall = RouterCall.ROWS
    router_output: RouterOutput = RouterOutput.LOGITS_WEIGHTS_IDS
    experts: ExpertLayout = field(default_factory=StackedExperts)
    shared_on_rows: bool = False
    kept_from_attention: frozenset[str] = frozenset()
    carries_topk: bool = False
    token_split: bool = True
    batch_size_dependent: bool = False


FAMILIES: Final[Mapping[str, FamilyTraits]] = MappingProxyType(
    {
        "DeepseekV2DecoderLayer": FamilyTraits(family="deepseek_v2"),
        "DeepseekV3DecoderLayer": FamilyTraits(family="deepseek_v3"),
        "DeepseekV4DecoderLayer": FamilyTraits(
            family="deepseek_v4",
            residual=HyperConnections(),
            kept_from_attention=frozenset({"input_ids"}),
            token_split=False,
        ),
        "Dots1DecoderLayer": FamilyTraits(family="dots1"),
        "Ernie4_5_MoeDecoderLayer": FamilyTraits(family="ernie4_5_moe", shared_on_rows=True),
        "Glm4MoeDecoderLayer": FamilyTraits(family="glm4_moe"),
        "Glm4MoeLiteDecoderLayer": FamilyTraits(family="glm4_moe_lite"),
        "GlmMoeDsaDecoderLayer": FamilyTraits(family="glm_moe_dsa", carries_topk=True, token_split=False),
        "GptOssDecoderLayer": FamilyTraits(family="gpt_oss"),
        "GraniteMoeDecoderLayer": FamilyTraits(
            family="granitemoe", residual=ScaledPreNorm(), router_output=RouterOutput.IDS_WEIGHTS_LOGITS
        ),
        "HunYuanMoEV1DecoderLayer": FamilyTraits(family="hunyuan_v1_moe"),
        "Llama4TextDecoderLayer": FamilyTraits(
            family="llama4_text",
            router_output=RouterOutput.SCORES_LOGITS,
            experts=InputWeightedExperts(),
            shared_on_rows=True,
            kept_from_attention=frozenset({"position_ids"}),
        ),
        "MiniMaxDecoderLayer": FamilyTraits(family="minimax", residual=AlphaBeta(), token_split=False),
        "MiniMaxM2DecoderLayer": FamilyTraits(family="minimax_m2", router_call=RouterCall.ROWS_AND_BIAS),
        "MixtralDecoderLayer": FamilyTraits(family="mixtral"),
        "OlmoeDecoderLayer": FamilyTraits(family="olmoe"),
        "Qwen2MoeDecoderLayer": FamilyTraits(family="qwen2_moe", shared_on_rows=True),
        "Qwen3MoeDecoderLayer": FamilyTraits(family="qwen3_moe"),
        "Qwen3NextDecoderLayer": FamilyTraits(family="qwen3_next", shared_on_rows=True, token_split=False),
    }
)
"""Served families by the class of their decoder layers, as transformers names it."""

REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Gemma4TextDecoderLayer": "its layers share keys and values with earlier layers and take one more input each",
        "Glm5NextTextDecoderLayer": "a second output of each layer feeds the next one",
        "HYV4DecoderLayer": "a second output of each layer feeds the next one",
        "ZayaDecoderLayer": "a second output of each layer feeds the next one",
    }
)
"""Decoder layer classes known not to fit, and why; any other unknown class is refused for being unknown."""
