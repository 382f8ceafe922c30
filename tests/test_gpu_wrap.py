"""On a CUDA device: a wrapped model equals the plain model run on each part, bit for bit, as on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tbo
from oracle import case, even_rows, expected_of_steps, hidden_of_steps, worst_difference
from tiny_models import build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAMILIES = ("qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss", "glm4_moe", "olmoe", "qwen2_moe")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_equal_the_plain_model_on_each_part(family: str, dtype: torch.dtype) -> None:
    model: Any = build(family, dtype=dtype)
    model.cuda()
    ids, mask, following = (tensor.cuda() for tensor in case())
    expected = expected_of_steps(model, ids, mask, following, even_rows(5, 2))
    with tbo.wrap(model, overlap="always") as handle:
        actual = hidden_of_steps(model, ids, mask, following)
        assert handle.last is not None
        assert handle.last.engaged
    assert worst_difference(actual, expected, mask) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_gives_the_plain_models_tokens(family: str) -> None:
    model: Any = build(family)
    model.cuda()
    ids, mask, _ = (tensor.cuda() for tensor in case())
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, attention_mask=mask, **options)
    with tbo.wrap(model, overlap="always"):
        actual = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(actual, expected)
