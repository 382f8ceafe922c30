"""Grouping rows by expert and putting them back: the torch reference.

Shape letters: T tokens of this rank, K top-k, E experts, H hidden, P = T * K pairs of a token and one of its experts.
A pair's number is ``token * K + k``. An expert id of -1 names no expert: such a pair moves nowhere and adds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """Pairs in the order of their experts.

    Attributes:
        order_P: pair numbers sorted by expert id; pairs of one expert keep their order. Pairs without an expert come
            last, so that the first ``counts_E.sum()`` entries are those that move.
        counts_E: pairs of each expert, int64.
    """

    order_P: Tensor
    counts_E: Tensor


def group_by_expert(topk_ids_TK: Tensor, num_experts: int) -> Grouping:
    """Sorts (token, expert) pairs by expert, stably, without a device synchronisation.

    Args:
        topk_ids_TK: expert ids in [-1, num_experts), any integer dtype, any strides.
        num_experts: how many there are in all.
    """
    # As an extra expert, pairs that name none sort last instead of first.
    ids_P = topk_ids_TK.reshape(-1).long()
    ids_P = torch.where(ids_P < 0, num_experts, ids_P)
    order_P = torch.argsort(ids_P, stable=True)
    # bincount would do, but it synchronises on CUDA to find the largest id.
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_P.device)
    counts.scatter_add_(0, ids_P, torch.ones_like(ids_P))
    return Grouping(order_P=order_P, counts_E=counts[:num_experts])


def gather_rows(rows_TH: Tensor, order: Tensor, top_k: int) -> Tensor:
    """One row for each pair number in `order`: the row of that pair's token."""
    return rows_TH.index_select(0, order if top_k == 1 else order // top_k)


def weighted_sum(rows: Tensor, order: Tensor, weights_TK: Tensor) -> Tensor:
    """Sums each token's expert rows with its routing weights.

    The arithmetic is that of transformers' grouped experts, bit for bit: multiply in the promoted dtype, add over the
    top-k axis in pair order, round once to the rows' dtype.

    Args:
        rows: ``[len(order), H]``, the experts' outputs.
        order: the pair number of each row; pairs not named add nothing.
        weights_TK: routing weights; they must be finite where a pair is not named.

    Returns:
        ``[T, H]`` in the dtype of `rows`.
    """
    num_tokens, top_k = weights_TK.shape
    num_pairs, hidden = num_tokens * top_k, rows.shape[1]
    # One-byte floats can be moved but not multiplied.
    terms = rows.float() if rows.is_floating_point() and rows.element_size() == 1 else rows
    everything_moved = len(order) == num_pairs
    by_pair_PH = terms.new_empty(num_pairs, hidden) if everything_moved else terms.new_zeros(num_pairs, hidden)
    by_pair_PH.index_copy_(0, order, terms)
    weighted_PH = by_pair_PH * weights_TK.reshape(-1, 1)
    return weighted_PH.view(num_tokens, top_k, hidden).sum(dim=1).to(rows.dtype)
