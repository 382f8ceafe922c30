"""One decoder layer of a Hugging Face model as named ops.

The ops are the same for every family; what differs (residual rule, router call, where attention is cut) is asked of
the layer's adapter. Ops hold the layer and look submodules up when called, so adapters put on later are seen.

Shapes: B sequences, S positions, H hidden size, T = B * S tokens, K experts a token, R rows received.
An empty sub-batch (T = 0) runs the same ops: attention and router are skipped, every communication takes place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tbo.core import Pending, op
from tbo.models.attention import cut_attention
from tbo.models.families import LayerAdapter, adapter_for
from tbo.ops.dispatch import Dispatcher, Received, Ticket

EXPERT_PARALLEL_CHANNEL = "ep"
"""The channel dispatch and combine of all sub-batches share."""

CARRIES = ("hidden_states", "carried_topk")
INPUTS = ("hidden_states", "layer_kwargs", "dispatcher", "carried_topk")


@dataclass(frozen=True, kw_only=True, slots=True)
class _EmptyAttention:
    """Stands for the projected attention input of a sub-batch without tokens."""

    attn_input: Tensor


class HuggingFaceLayer:
    """The ops of one decoder layer.

    Args:
        layer: the decoder layer; it is neither changed nor copied.
        config: the model's text configuration.

    Raises:
        UnsupportedModelError: no adapter serves this kind of layer.
    """

    def __init__(self, layer: nn.Module, config: Any) -> None:
        self.layer = layer
        self.adapter: LayerAdapter = adapter_for(layer, config)
        self.attention = cut_attention(self.adapter.attention_module())
        self.block_class = type(self.adapter.block_module())

    @property
    def is_sparse(self) -> bool:
        """Whether the layer routes tokens to experts."""
        return self.adapter.is_sparse

    @property
    def has_shared(self) -> bool:
        """Whether every token also passes shared experts."""
        return self.adapter.has_shared

    @op(writes=("attn_input", "residual", "extra"), passes={"residual": "hidden_states"})
    def op_comm_prepare_attn(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Input norm; the residual is set aside."""
        return self.adapter.prepare_attention(hidden_states)

    @op(writes="attention")
    def op_prepare(self, attn_input: Tensor, layer_kwargs: Mapping[Any, Any], carried_topk: Any = None) -> Any:
        """Projects queries, keys and values, and writes the cache."""
        if attn_input.numel() == 0:
            return _EmptyAttention(attn_input=attn_input)
        kwargs = self.adapter.attention_kwargs(layer_kwargs[self.layer], carried_topk)
        return self.attention.prepare(attn_input, kwargs)

    @op(writes=("attn_output", "carried_topk"))
    def op_core(self, attention: Any) -> tuple[Tensor, Any]:
        """Attention itself and its output projection."""
        if isinstance(attention, _EmptyAttention):
            return torch.zeros_like(attention.attn_input), None
        result = self.attention.core(attention)
        return result.output, result.carry

    @op(writes=("mlp_input", "residual", "extra", "mlp_shape"))
    def op_comm_prepare_mlp(
        self, attn_output: Tensor, residual: Tensor, extra: Any
    ) -> tuple[Tensor, Tensor, Any, torch.Size]:
        """Adds attention to the residual and norms the sum."""
        mlp_input, residual, extra = self.adapter.after_attention(attn_output, residual, extra)
        return mlp_input, residual, extra, mlp_input.shape

    @op(writes="mlp_output")
    def op_mlp(self, mlp_input: Tensor) -> Tensor:
        """The whole feed-forward block of a dense layer."""
        return self.adapter.dense_mlp(mlp_input)

    @op(writes="router_output")
    def op_gate(self, mlp_input: Tensor, layer_kwargs: Mapping[Any, Any]) -> Any:
        """The router. Hugging Face routers compute logits and top-k in one call."""
        if mlp_input.numel() == 0:
            return None
        return self.adapter.route(mlp_input, layer_kwargs[self.layer])

    @op(writes=("topk_ids", "topk_weights"))
    def op_select_experts(self, router_output: Any, mlp_input: Tensor) -> tuple[Tensor, Tensor]:
        """``topk_ids`` int64 ``[T, K]`` and ``topk_weights`` ``[T, K]`` out of the router's output."""
        if router_output is None:
            ids_TK = torch.empty((0, 1), dtype=torch.int64, device=mlp_input.device)
            return ids_TK, mlp_input.new_empty((0, 1))
        return self.adapter.select(router_output)

    @op(writes="dispatch", starts=EXPERT_PARALLEL_CHANNEL)
    def op_dispatch_a(
        self, mlp_input: Tensor, topk_ids: Tensor, topk_weights: Tensor, dispatcher: Dispatcher
    ) -> Pending[Any]:
        """Sends each token to the ranks of its experts."""
        rows_TH, weights_TK = self.adapter.dispatch_rows(mlp_input, topk_weights)
        return dispatcher.dispatch_a(rows_TH, topk_ids, weights_TK)

    @op(writes=("received", "ticket"), waits="dispatch")
    def op_dispatch_b(self, dispatch: Pending[Any], dispatcher: Dispatcher) -> tuple[Received, Ticket]:
        """Waits for the rows this rank's experts must compute."""
        return dispatcher.dispatch_b(dispatch)

    @op(writes="expert_output")
    def op_experts(self, received: Received) -> Tensor:
        """The routed experts of this rank, ``[R, H]``."""
        exchanged = received.group_ends_L is not None
        return self.adapter.experts(
            received.rows_RH, received.expert_ids_RK, received.expert_weights_RK, exchanged=exchanged
        )

    @op(writes="combine", starts=EXPERT_PARALLEL_CHANNEL)
    def op_combine_a(self, expert_output: Tensor, ticket: Ticket, dispatcher: Dispatcher) -> Pending[Any]:
        """Sends each row back to its token's rank."""
        return dispatcher.combine_a(expert_output, ticket)

    @op(writes="routed_output", waits="combine")
    def op_combine_b(self, combine: Pending[Any], dispatcher: Dispatcher) -> Tensor:
        """Waits for this rank's rows and sums each token's experts, ``[T, H]``."""
        return dispatcher.combine_b(combine)

    @op(writes="shared_output")
    def op_shared_experts(self, mlp_input: Tensor) -> Tensor | None:
        """The experts every token passes; needs no communication."""
        return self.adapter.shared(mlp_input)

    @op(writes="mlp_output")
    def op_output(self, routed_output: Tensor, mlp_shape: torch.Size, shared_output: Tensor | None = None) -> Tensor:
        """Routed plus shared output in the shape the layer works in."""
        output = routed_output.reshape(mlp_shape)
        return output if shared_output is None else output + shared_output

    @op(writes="hidden_states")
    def op_comm_postprocess_layer(self, mlp_output: Tensor, residual: Tensor, extra: Any) -> Tensor:
        """Adds the feed-forward output to the residual."""
        return self.adapter.after_mlp(mlp_output, residual, extra)
