"""Running a module of stacked experts, on a layer's own tokens or on rows that came from other ranks.

Shapes: T tokens of this rank, K experts a token, R rows, E experts of this rank, H hidden size, I inner size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS


class ExpertLayout(Protocol):
    """One way experts are stored and called."""

    def sent(self, rows_TH: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """What is given to the dispatcher: rows, and the weights that the outputs are summed with."""
        ...

    def run(self, experts: Any, rows_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, *, exchanged: bool) -> Tensor:
        """The weighted sum of each row's experts, ``[R, H]``."""
        ...


class StackedExperts:
    """Experts under transformers' experts interface: ``experts(rows, ids, weights)``."""

    def sent(self, rows_TH: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens as they are."""
        return rows_TH, weights_TK

    def run(self, experts: Any, rows_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, *, exchanged: bool) -> Tensor:
        """Own tokens run through the module, as in the plain model; exchanged rows through the grouped product.

        On a GPU ``generate`` turns the configured grouped product into the batched one for decoding, which copies one
        expert's weights for every row: fine for a few tokens, ruinous for the rows of all ranks. So exchanged rows
        do not ask the configuration. A module that is not under the interface (an adapter put around it) is called.
        """
        if exchanged:
            ids_RK, weights_RK = _without_absent(ids_RK, weights_RK)
            if hasattr(experts, "has_gate") and hasattr(experts, "_apply_gate"):
                return _grouped_product()(experts, rows_RH, ids_RK, weights_RK)
        output: Tensor = experts(rows_RH, ids_RK, weights_RK)
        return output


class InputWeightedExperts:
    """Llama 4: the weight multiplies a token before its one expert, and experts run as one batched product.

    So rows are weighted before they are sent, and what comes back is summed with ones.
    """

    def sent(self, rows_TH: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted tokens, and ones."""
        return rows_TH * weights_TK, torch.ones_like(weights_TK)

    def run(self, experts: Any, rows_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, *, exchanged: bool) -> Tensor:
        """Own tokens as the plain model does, every expert on every token; exchanged rows by their expert only."""
        if exchanged:
            ids_RK, weights_RK = _without_absent(ids_RK, weights_RK)
            return _gathered(experts, rows_RH, ids_RK) * weights_RK
        count = experts.gate_up_proj.shape[0]
        chosen_ER1 = ids_RK.T.unsqueeze(-1) == torch.arange(count, device=ids_RK.device).view(-1, 1, 1)
        rows_ERH = torch.where(chosen_ER1, rows_RH, torch.zeros((), dtype=rows_RH.dtype, device=rows_RH.device))
        output: Tensor = experts(rows_ERH.reshape(-1, rows_RH.shape[-1]))
        return output.view(count, -1, rows_RH.shape[-1]).sum(dim=0)


def _gathered(experts: Any, rows_RH: Tensor, ids_R1: Tensor) -> Tensor:
    """Each row through its own expert: rows are grouped by expert and multiplied group by group."""
    order_R = ids_R1[:, 0].argsort(stable=True)
    counts = torch.bincount(ids_R1[:, 0], minlength=experts.gate_up_proj.shape[0]).tolist()
    outputs = [
        (up * experts.act_fn(gate)) @ down
        for rows, gate_up, down in zip(
            rows_RH[order_R].split(counts), experts.gate_up_proj, experts.down_proj, strict=True
        )
        for gate, up in ((rows @ gate_up).chunk(2, dim=-1),)
    ]
    return torch.empty_like(rows_RH).index_copy(0, order_R, torch.cat(outputs))


def _without_absent(ids_RK: Tensor, weights_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Dispatchers write -1 where a row has no expert here; such a place computes something and weighs nothing."""
    return ids_RK.clamp(min=0), weights_RK.masked_fill(ids_RK < 0, 0)


def _grouped_product() -> Callable[[Any, Tensor, Tensor, Tensor], Tensor]:
    function: Callable[[Any, Tensor, Tensor, Tensor], Tensor] = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    return function
