"""Your own mixture-of-experts model in 40 lines; `torchrun --nproc-per-node 2 examples/own_model.py` for two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tbo
from tbo.ops.dispatch import create_dispatchers
from tbo.ops.peers import Peers

HIDDEN, EXPERTS, TOP_K, LAYERS = 64, 8, 2, 4


class Layer:
    def __init__(self, rank: int, world_size: int) -> None:
        self.router = torch.randn(HIDDEN, EXPERTS) / HIDDEN**0.5
        self.experts = (torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5).chunk(world_size)[rank]

    @tbo.op(writes=("topk_ids", "topk_weights"))
    def op_gate(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = (hidden_states @ self.router).softmax(-1).topk(TOP_K)
        return ids, weights

    @tbo.op(writes="dispatch", starts="ep")
    def op_dispatch_a(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, dispatcher: Any) -> Any:
        return dispatcher.dispatch_a(hidden_states, topk_ids, topk_weights)

    @tbo.op(writes=("received", "ticket"), waits="dispatch")
    def op_dispatch_b(self, dispatch: Any, dispatcher: Any) -> Any:
        return dispatcher.dispatch_b(dispatch)

    @tbo.op(writes="expert_output")
    def op_experts(self, received: Any) -> Tensor:
        output = torch.zeros_like(received.rows_RH)
        for expert, weight in enumerate(self.experts):
            row, k = (received.expert_ids_RK == expert).nonzero(as_tuple=True)
            product = (received.rows_RH[row] @ weight).relu()
            output.index_add_(0, row, product * received.expert_weights_RK[row, k, None])
        return output

    @tbo.op(writes="combine", starts="ep")
    def op_combine_a(self, expert_output: Tensor, ticket: Any, dispatcher: Any) -> Any:
        return dispatcher.combine_a(expert_output, ticket)

    @tbo.op(writes="hidden_states", waits="combine")
    def op_combine_b(self, combine: Any, dispatcher: Any, hidden_states: Tensor) -> Tensor:
        return hidden_states.add(dispatcher.combine_b(combine))


def main() -> Tensor:
    """Two sub-batches of this rank's tokens through all layers, interleaved."""
    peers = Peers(dist.group.WORLD, sub_batches=2, timeout=60) if dist.is_initialized() else None
    rank, world_size = (peers.rank, peers.world_size) if peers else (0, 1)
    torch.manual_seed(0)  # every rank draws the same weights and keeps its own experts
    layers = [Layer(rank, world_size) for _ in range(LAYERS)]
    plan = tbo.compile_plan(
        [
            [
                *(layer.op_gate, layer.op_dispatch_a, tbo.YIELD),
                *(layer.op_dispatch_b, layer.op_experts, layer.op_combine_a, tbo.YIELD),
                layer.op_combine_b,
            ]
            for layer in layers
        ],
        inputs=("hidden_states", "dispatcher"),
        outputs=("hidden_states",),
    )
    dispatchers = create_dispatchers("auto", num_experts=EXPERTS, sub_batches=2, peers=peers)
    tokens = torch.randn(100 + rank, HIDDEN, generator=torch.Generator().manual_seed(rank))
    parts = zip(tokens.chunk(2), dispatchers, strict=True)
    outputs = tbo.run(plan, [{"hidden_states": part, "dispatcher": dispatcher} for part, dispatcher in parts])
    return torch.cat([output["hidden_states"] for output in outputs])


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    print(main().shape)
