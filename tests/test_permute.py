"""Grouping by expert and the weighted sum on the way back, against their definitions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tbo.kernels.permute import gather_rows, group_by_expert, weighted_sum


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("ids", "order", "counts"),
    [
        ([[2, 0], [0, 1], [2, 2]], [1, 2, 3, 0, 4, 5], [2, 1, 3]),  # stable, one expert twice for a token
        ([[1, 1, 1]], [0, 1, 2], [0, 3, 0]),  # everything to one expert
        ([[-1, 2], [-1, -1], [0, -1]], [4, 1, 0, 2, 3, 5], [1, 0, 1]),  # pairs without an expert come last
    ],
)
def test_pairs_are_grouped_by_expert(
    ids: list[list[int]], order: list[int], counts: list[int], dtype: torch.dtype
) -> None:
    grouping = group_by_expert(torch.tensor(ids, dtype=dtype), 3)
    assert grouping.order_P.tolist() == order
    assert grouping.counts_E.tolist() == counts
    assert grouping.counts_E.dtype is torch.int64


def test_no_tokens_make_no_groups() -> None:
    grouping = group_by_expert(torch.empty(0, 8, dtype=torch.int64), 4)
    assert grouping.order_P.shape == (0,)
    assert grouping.counts_E.tolist() == [0, 0, 0, 0]
    rows = gather_rows(torch.empty(0, 5), grouping.order_P, 8)
    assert weighted_sum(rows, grouping.order_P, torch.empty(0, 8)).shape == (0, 5)


def test_ids_of_any_strides() -> None:
    ids = torch.tensor([[3, 1, 0], [2, 2, 1]])
    strided = ids.t().contiguous().t()
    assert not strided.is_contiguous()
    assert group_by_expert(strided, 4).order_P.tolist() == group_by_expert(ids, 4).order_P.tolist()


@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_the_weighted_sum_is_exactly_the_plain_one(rows_dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    tokens, top_k, hidden, experts = 37, 4, 16, 6
    torch.manual_seed(0)
    ids_TK = torch.randint(0, experts, (tokens, top_k))
    weights_TK = torch.rand(tokens, top_k).to(weights_dtype)
    outputs_PH = torch.randn(tokens * top_k, hidden).to(rows_dtype)
    plain_TH = (outputs_PH * weights_TK.reshape(-1, 1)).view(tokens, top_k, hidden).sum(1).to(rows_dtype)

    order_P = group_by_expert(ids_TK, experts).order_P
    assert torch.equal(weighted_sum(outputs_PH[order_P], order_P, weights_TK), plain_TH)


def test_pairs_that_did_not_move_add_nothing() -> None:
    ids_TK = torch.tensor([[1, -1], [-1, -1]])
    grouping = group_by_expert(ids_TK, 2)
    order_P = grouping.order_P[: int(grouping.counts_E.sum())]
    summed_TH = weighted_sum(torch.tensor([[2.0, 4.0]]), order_P, torch.tensor([[0.5, 9.0], [9.0, 9.0]]))
    assert summed_TH.tolist() == [[1.0, 2.0], [0.0, 0.0]]


def test_one_byte_rows_are_summed_in_float32() -> None:
    rows = torch.tensor([[1.0, -2.0], [0.5, 4.0]]).to(torch.float8_e4m3fn)
    summed_TH = weighted_sum(rows, torch.tensor([1, 0]), torch.tensor([[0.5, 2.0]]))
    assert summed_TH.dtype is torch.float8_e4m3fn
    assert summed_TH.float().tolist() == [[2.25, -2.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_experts_come_out_bit_for_bit_as_in_transformers(dtype: torch.dtype) -> None:
    moe = pytest.importorskip("transformers.integrations.moe")
    tokens, top_k, hidden, inner, experts = 21, 2, 16, 8, 4
    torch.manual_seed(1)
    stand_in: Any = SimpleNamespace(
        num_experts=experts,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        is_concatenated=True,
        gate_up_proj=torch.randn(experts, 2 * inner, hidden).to(dtype),
        down_proj=torch.randn(experts, hidden, inner).to(dtype),
        gate_up_proj_bias=None,
        down_proj_bias=None,
    )
    stand_in._apply_gate = lambda gate_up: torch.nn.functional.silu(gate_up[:, :inner]) * gate_up[:, inner:]
    rows_TH = torch.randn(tokens, hidden).to(dtype)
    ids_TK = torch.randint(0, experts, (tokens, top_k))
    weights_TK = torch.rand(tokens, top_k)
    plain_TH = moe.grouped_mm_experts_forward(stand_in, rows_TH, ids_TK, weights_TK)

    grouping = group_by_expert(ids_TK, experts)
    rows_PH = gather_rows(rows_TH, grouping.order_P, top_k)
    ids_P1 = ids_TK.reshape(-1, 1)[grouping.order_P]
    outputs_PH = moe.grouped_mm_experts_forward(stand_in, rows_PH, ids_P1, torch.ones(len(ids_P1), 1))
    assert torch.equal(weighted_sum(outputs_PH, grouping.order_P, weights_TK), plain_TH)
