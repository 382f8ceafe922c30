"""What a decoder layer of a served family does between its ops.

A `LayerAdapter` has one small method for each thing the ops ask of a layer. What differs between families is in
`family_table`; here is only how the pieces are called. Submodules are looked up when used.

Shapes: B sequences, S positions, H hidden size, T = B * S tokens, K experts a token, R rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from tbo.errors import UnsupportedModelError
from tbo.models.attention_cut import cache_among
from tbo.models.experts import InputWeightedExperts
from tbo.models.family_table import FAMILIES, REFUSED, FamilyTraits
from tbo.models.parts import MoeParts, find_block_name, find_moe, own_forward, transformers_class
from tbo.models.residuals import Prepared
from tbo.models.routing import RouterCall, RouterOutput, call_router, read_router
from tbo.models.structure import traits_by_structure, unpacked_order

_LINEAR_ATTENTION: Final = "linear_attn"
_ATTENTION_NAMES: Final = ("self_attn", _LINEAR_ATTENTION)
_LINEAR_DROPS: Final = frozenset({"position_embeddings", "position_ids", "attention_mask", "past_key_values", "cache"})


class LayerAdapter:
    """One decoder layer, in the pieces its ops call. Nothing is copied, nothing is changed.

    Attributes:
        layer: the decoder layer.
        traits: how its family differs from the common kind.
        is_sparse: whether it routes tokens to experts.
        has_shared: whether every token also passes shared experts.
        carries_topk: whether it returns top-k token indices for the next layer beside its hidden states.
        batch_size_dependent: see `FamilyTraits`.
        token_split: whether one sequence may be cut between tokens, its second part seeing the first through the
            cache. A model with a sliding or chunked window is not cut: its cache does not only grow.
    """

    def __init__(self, layer: nn.Module, config: Any, traits: FamilyTraits, moe: MoeParts | None) -> None:
        self.layer: Any = layer
        self.traits = traits
        self.is_sparse = moe is not None
        self.has_shared = moe is not None and moe.shared_name is not None
        self.carries_topk = traits.carries_topk
        self.batch_size_dependent = traits.batch_size_dependent
        self.token_split = traits.token_split and not _has_window(config)
        self._moe = moe
        self._block_name = find_block_name(layer)
        self._attention_name = _attention_name(layer)
        if self._attention_name == _LINEAR_ATTENTION:
            self._linear_cache_name = _linear_cache_name(self.attention_module())
        self._router_call = _router_call(traits, moe)
        self._router_output = _router_output(traits, moe)
        self._top_k: int | None = getattr(config, "num_experts_per_tok", None)
        if moe is not None and isinstance(traits.experts, InputWeightedExperts) and self._top_k != 1:
            raise UnsupportedModelError(
                f"{type(layer).__name__} weights tokens before its experts and routes each to {self._top_k} of them",
                remedy="Only num_experts_per_tok=1, which all released models of this family use, is served.",
            )

    @property
    def moe(self) -> MoeParts:
        """The mixture-of-experts pieces.

        Raises:
            UnsupportedModelError: the layer is dense.
        """
        if self._moe is None:
            raise UnsupportedModelError(
                f"{type(self.layer).__name__} is a dense layer and has no experts", remedy="Ask is_sparse first."
            )
        return self._moe

    def attention_module(self) -> nn.Module:
        """The layer's attention."""
        return self.layer.get_submodule(self._attention_name)  # type: ignore[no-any-return]

    def block_module(self) -> nn.Module:
        """The layer's feed-forward block, dense or sparse."""
        return self.layer.get_submodule(self._block_name)  # type: ignore[no-any-return]

    def prepare_attention(self, hidden: Tensor) -> Prepared:
        """Attention's input, the residual, and what the residual rule carries besides."""
        return self.traits.residual.before_attention(self.layer, hidden)

    def attention_kwargs(self, layer_kwargs: Mapping[str, Any], carried_topk: Any = None) -> dict[str, Any]:
        """What the layer calls its attention with.

        Args:
            layer_kwargs: what the model calls the layer with.
            carried_topk: what the layer before returned beside its hidden states, for families that do.
        """
        if self._attention_name == _LINEAR_ATTENTION:
            return self._linear_kwargs(layer_kwargs)
        kwargs = {name: value for name, value in layer_kwargs.items() if name not in self.traits.kept_from_attention}
        if self.carries_topk:
            kwargs["prev_topk_indices"] = carried_topk
        return kwargs

    def after_attention(self, attn_output: Tensor, residual: Tensor, extra: Any) -> Prepared:
        """The feed-forward block's input, the new residual, and what the residual rule carries besides."""
        return self.traits.residual.between(self.layer, attn_output, residual, extra)

    def dense_mlp(self, mlp_input: Tensor) -> Tensor:
        """The whole feed-forward block of a dense layer."""
        output = self.block_module()(mlp_input)
        return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]

    def route(self, mlp_input: Tensor, layer_kwargs: Mapping[str, Any]) -> Any:
        """The router's own output.

        Raises:
            UnsupportedModelError: the block puts noise on its input in training, which may change the residual, too.
        """
        block: Any = self.moe.block
        if block.training and getattr(block, "jitter_noise", 0):
            raise UnsupportedModelError(
                f"{type(block).__name__} multiplies its input by noise in training (router_jitter_noise)",
                remedy="Call model.eval(), or set router_jitter_noise to 0.",
            )
        rows_TH = mlp_input.reshape(-1, mlp_input.shape[-1])
        return call_router(self._router_call, self.moe.router, block, rows_TH, layer_kwargs)

    def select(self, routed: Any) -> tuple[Tensor, Tensor]:
        """Expert ids ``[T, K]`` and weights ``[T, K]`` out of the router's output."""
        return read_router(self._router_output, routed, self._top_k)

    def dispatch_rows(self, mlp_input: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """What the dispatcher is given: rows ``[T, H]`` and the weights their outputs are summed with, ``[T, K]``.

        The tokens and the router's weights, but for a family that weights the experts' input.
        """
        return self.traits.experts.sent(mlp_input.reshape(-1, mlp_input.shape[-1]), weights_TK)

    def experts(self, rows_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, *, exchanged: bool = False) -> Tensor:
        """The weighted sum of each row's experts, ``[R, H]``.

        Args:
            rows_RH: what `dispatch_rows` gave, or rows that came from any rank.
            ids_RK: experts by their place in this rank's module; -1 for none where rows were exchanged.
            weights_RK: their weights.
            exchanged: the rows went through a dispatcher that regroups them. Own tokens (False) are computed bit for
                bit as the plain model does, with the experts implementation it is configured with.
        """
        if rows_RH.shape[0] == 0:
            return rows_RH
        return self.traits.experts.run(self.moe.experts, rows_RH, ids_RK, weights_RK, exchanged=exchanged)

    def shared(self, mlp_input: Tensor) -> Tensor | None:
        """The shared experts' output in the shape of `mlp_input`; None where there are none."""
        shared = self.moe.shared
        if shared is None:
            return None
        given = mlp_input.reshape(-1, mlp_input.shape[-1]) if self.traits.shared_on_rows else mlp_input
        output: Tensor = shared(given)
        gate = self.moe.shared_gate
        if gate is not None:
            output = torch.sigmoid(gate(given)) * output
        return output.view(mlp_input.shape)

    def after_mlp(self, mlp_output: Tensor, residual: Tensor, extra: Any) -> Tensor:
        """The layer's hidden states."""
        return self.traits.residual.after(self.layer, mlp_output, residual, extra)

    def layer_output(self, hidden: Tensor, carry: Any = None) -> Any:
        """What the layer's own forward returns."""
        return (hidden, carry) if self.carries_topk else hidden

    def _linear_kwargs(self, layer_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Linear attention takes neither positions nor rotary tables, and has a name of its own for the cache."""
        kwargs = {name: value for name, value in layer_kwargs.items() if name not in _LINEAR_DROPS}
        kwargs[self._linear_cache_name] = cache_among(layer_kwargs)
        kwargs["attention_mask"] = layer_kwargs.get("attention_mask")
        return kwargs


def adapter_for(layer: nn.Module, config: Any) -> LayerAdapter:
    """The adapter of a decoder layer, by its class, else by its code.

    Args:
        layer: a decoder layer of a transformers model.
        config: the model's text configuration.

    Raises:
        UnsupportedModelError: no adapter serves it; names the class, the reason if known, and what is served.
    """
    name = transformers_class(layer) or ""
    if name in REFUSED:
        raise UnsupportedModelError(f"{name} is not served: {REFUSED[name]}", remedy="Leave this model unwrapped.")
    moe = find_moe(layer)
    traits = FAMILIES.get(name) or traits_by_structure(layer, moe)
    if traits is None:
        known = ", ".join(sorted(entry.family for entry in FAMILIES.values()))
        block = "" if moe is None else f" with {type(moe.block).__name__}"
        raise UnsupportedModelError(
            f"{type(layer).__name__}{block} ({type(layer).__module__}) is of no family tbo knows, and its code is like"
            " that of none",
            remedy=f"Served are {known}, and families whose layer and block have the same code as one of these.",
        )
    return LayerAdapter(layer, config, traits, moe)


def _attention_name(layer: nn.Module) -> str:
    children = dict(layer.named_children())
    name = next((name for name in _ATTENTION_NAMES if name in children), None)
    if name is None:
        raise UnsupportedModelError(
            f"{type(layer).__name__} has no attention under a name that tbo knows ({', '.join(_ATTENTION_NAMES)});"
            f" it has {', '.join(children) or 'no submodules'}",
            remedy="Leave this model unwrapped.",
        )
    return name


def _router_call(traits: FamilyTraits, moe: MoeParts | None) -> RouterCall:
    """DeepSeek V4 mixes layers whose router looks token ids up in a table with layers whose router does not."""
    if moe is not None and getattr(moe.block, "is_hash", False):
        return RouterCall.ROWS_AND_INPUT_IDS
    return traits.router_call


def _router_output(traits: FamilyTraits, moe: MoeParts | None) -> RouterOutput:
    """The installed release's own code comes first: the order has changed between releases."""
    read = None if moe is None else unpacked_order(own_forward(moe.block))
    return read or traits.router_output


def _has_window(config: Any) -> bool:
    """Whether some layer's cache forgets or is of another kind: the fields transformers picks cache layers from."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return any(kind != "full_attention" for kind in types)
    return bool(getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None))


def _linear_cache_name(attention: nn.Module) -> str:
    """What linear attention calls its cache: ``cache_params``, and ``cache`` from transformers 5.24 on."""
    parameters = inspect.signature(type(attention).forward).parameters
    name = next((name for name in ("cache_params", "cache") if name in parameters), None)
    if name is None:
        raise UnsupportedModelError(
            f"{type(attention).__name__}.forward takes no cache under a name that tbo knows (cache_params, cache);"
            f" it takes {', '.join(parameters)}",
            remedy="Leave this model unwrapped.",
        )
    return name
