"""Calling a router and reading what it returns.

Hugging Face routers compute logits and top-k in one call. They differ in what they take and in the order of what they
return; both are declared per family, never guessed from dtypes.

Shapes: T tokens, K experts a token, E experts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class RouterCall(Enum):
    """What a router is called with."""

    ROWS = "rows"
    ROWS_AND_BIAS = "rows and the block's correction bias"
    ROWS_AND_INPUT_IDS = "rows and token ids"


class RouterOutput(Enum):
    """The order of what a router returns."""

    LOGITS_WEIGHTS_IDS = "logits, weights, ids"
    IDS_WEIGHTS_LOGITS = "ids, weights, logits"
    SCORES_LOGITS = "scores of all experts, logits"


def call_router(call: RouterCall, router: Any, block: Any, rows_TH: Tensor, layer_kwargs: Mapping[str, Any]) -> Any:
    """The router's own output for ``[T, H]`` rows."""
    if call is RouterCall.ROWS_AND_BIAS:
        return router(rows_TH, block.e_score_correction_bias)
    if call is RouterCall.ROWS_AND_INPUT_IDS:
        return router(rows_TH, layer_kwargs["input_ids"])
    return router(rows_TH)


def read_router(order: RouterOutput, routed: Any, top_k: int | None) -> tuple[Tensor, Tensor]:
    """Expert ids ``[T, K]`` int64 and their weights ``[T, K]``.

    Args:
        order: what `routed` holds.
        routed: the router's output.
        top_k: experts a token, where the router's output does not say.
    """
    if order is RouterOutput.IDS_WEIGHTS_LOGITS:
        ids_TK, weights_TK = routed[0], routed[1]
    elif order is RouterOutput.LOGITS_WEIGHTS_IDS:
        ids_TK, weights_TK = routed[2], routed[1]
    else:
        scores_TE, logits_TE = routed
        ids_TK = torch.topk(logits_TE, top_k or 1, dim=-1).indices
        weights_TK = scores_TE.gather(1, ids_TK)
    return ids_TK, weights_TK
