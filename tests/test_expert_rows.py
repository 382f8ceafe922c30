"""Experts on rows that a dispatcher regrouped: shards, missing experts, no rows."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tbo.models.families import LayerAdapter, adapter_for
from tbo.models.parts import find_decoder
from tiny_models import FAMILIES, NUM_EXPERTS, build

HIDDEN = 64
INTERFACED = tuple(family for family in FAMILIES if family != "llama4_text")
"""Llama 4's experts are not under transformers' experts interface and have one implementation."""


def last_layer(family: str, **options: Any) -> LayerAdapter:
    """Sparse in every family."""
    decoder = find_decoder(build(family, **options))
    return adapter_for(decoder.layers[-1], decoder.config)


def routed_by_hand(family: str, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    top_k = 1 if family == "llama4_text" else 2
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:top_k] for _ in range(tokens)])
    return (
        torch.randn(tokens, HIDDEN, generator=generator),
        ids,
        torch.rand(tokens, top_k, generator=generator),
    )


def share_of(experts: nn.Module, first: int, count: int) -> nn.Module:
    """One rank's experts."""
    share = copy.deepcopy(experts)
    for name, parameter in list(share.named_parameters(recurse=False)):
        setattr(share, name, nn.Parameter(parameter.data[first : first + count].clone()))
    vars(share)["num_experts"] = count
    return share


def on_two_ranks(adapter: LayerAdapter, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """What each rank's share computes of rows sent one by one, summed by weight where they came from."""
    whole, count = adapter.moe.experts, NUM_EXPERTS // 2
    products = rows_TH.new_zeros(*ids_TK.shape, HIDDEN)
    for first in (0, count):
        vars(adapter.moe.block)["_modules"]["experts"] = share_of(whole, first, count)
        tokens, places = ((ids_TK >= first) & (ids_TK < first + count)).nonzero(as_tuple=True)
        local_R1 = (ids_TK[tokens, places] - first)[:, None]
        products[tokens, places] = adapter.experts(
            rows_TH[tokens], local_R1, rows_TH.new_ones(len(tokens), 1), exchanged=True
        )
    return (products * weights_TK.unsqueeze(-1)).sum(dim=1).to(rows_TH.dtype)


@pytest.mark.parametrize(
    ("family", "experts"),
    [(family, experts) for family in INTERFACED for experts in ("grouped_mm", "eager", "batched_mm")]
    + [("llama4_text", None)],
)
@torch.no_grad()
def test_two_shards_make_the_plain_experts(family: str, experts: str | None) -> None:
    adapter = last_layer(family, experts=experts)
    rows, ids, weights = routed_by_hand(family, tokens=7)
    sent, remaining = adapter.dispatch_rows(rows, weights)
    expected = adapter.experts(sent, ids, remaining)
    torch.testing.assert_close(on_two_ranks(adapter, sent, ids, remaining), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_llama4_weights_its_rows_before_they_are_sent() -> None:
    adapter = last_layer("llama4_text")
    rows, _, weights = routed_by_hand("llama4_text", tokens=3)
    sent, remaining = adapter.dispatch_rows(rows, weights)
    assert torch.equal(sent, rows * weights)
    assert torch.equal(remaining, torch.ones(3, 1))


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
@torch.no_grad()
def test_exchanged_rows_take_the_grouped_product_whatever_is_configured(
    experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batched product copies a whole expert's weights for each row; ``generate`` turns to it by itself on a GPU."""
    adapter = last_layer("qwen3_moe", experts=experts)
    grouped = mock.Mock(wraps=ALL_EXPERTS_FUNCTIONS["grouped_mm"])
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "grouped_mm", grouped)
    rows, ids, weights = routed_by_hand("qwen3_moe", tokens=3)
    adapter.experts(rows, ids, weights)
    assert grouped.call_count == 0
    adapter.experts(rows, ids[:, :1], torch.ones(3, 1), exchanged=True)
    assert grouped.call_count == 1


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4_text"])
@torch.no_grad()
def test_an_absent_expert_weighs_nothing(family: str) -> None:
    adapter = last_layer(family)
    rows = torch.randn(3, HIDDEN)
    ids = torch.tensor([[2], [-1], [0]])
    got = adapter.experts(rows, ids, torch.ones(3, 1), exchanged=True)
    present = torch.tensor([0, 2])
    alone = adapter.experts(rows[present], ids[present], torch.ones(2, 1), exchanged=True)
    assert torch.equal(got[1], torch.zeros(HIDDEN))
    torch.testing.assert_close(got[present], alone)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("exchanged", [False, True])
def test_no_rows_give_no_rows(family: str, exchanged: bool) -> None:
    empty = torch.empty(0, 1)
    output = last_layer(family).experts(torch.empty(0, HIDDEN), empty.long(), empty, exchanged=exchanged)
    assert output.shape == (0, HIDDEN)
