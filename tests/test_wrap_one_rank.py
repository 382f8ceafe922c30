"""One rank: a wrapped model equals the plain model run on each part, bit for bit."""

from __future__ import annotations

import pytest
import torch
from oracle import case, even_rows, expected_of_steps, hidden_of_steps, worst_difference
from tiny_models import FAMILIES, build

import tbo

BATCH_SIZE_DEPENDENT = {"llama4_text": 2e-6, "deepseek_v4": 4e-6}
"""Families whose plain layers round differently with the batch around a row: fp32 tolerance."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_equal_the_plain_model_on_each_part(family: str, dtype: torch.dtype) -> None:
    model = build(family, dtype=dtype)
    ids, mask, following = case()
    expected = expected_of_steps(model, ids, mask, following, even_rows(5, 2))
    trace = tbo.Trace()
    for instruments in ((), (trace,)):
        handle = tbo.wrap(model, overlap="always", instruments=instruments)
        actual = hidden_of_steps(model, ids, mask, following)
        assert handle.last is not None
        assert handle.last.engaged
        assert handle.last.tokens_per_sub_batch == (3, 2)
        assert worst_difference(actual, expected, mask) == 0
        handle.unwrap()
    assert {where.sub_batch for where in trace.ops} == {0, 1}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_three_sub_batches(family: str) -> None:
    model = build(family)
    ids, mask, following = case()
    expected = expected_of_steps(model, ids, mask, following, even_rows(5, 3))
    handle = tbo.wrap(model, overlap="always", sub_batches=3)
    actual = hidden_of_steps(model, ids, mask, following)
    assert worst_difference(actual, expected, mask) == 0
    assert handle.last is not None
    assert handle.last.tokens_per_sub_batch == (2, 2, 1)
