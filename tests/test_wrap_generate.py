"""`generate` on a wrapped model gives the plain model's tokens, with every search method and cache.

Logits of the whole batch differ from those of its parts by rounding (a product's rounding depends on how many rows it
has), so tokens can only be compared where no two best tokens are as near as that. The prompts here are such: seeds
were kept for which the plain model's two best logits are never nearer than 1e-3 (`assert_clear` holds it).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tbo
from tbo.batch import Reason
from tiny_models import FAMILIES, build, token_batch
from wrapped_models import report

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
CLEAR = 1e-3


def prompts(rows: int, positions: int = 9, *, seed: int = 3) -> dict[str, Tensor]:
    """Left-padded prompts: every second row is shorter."""
    ids, mask = token_batch(rows, positions, seed=seed)
    return {"input_ids": ids, "attention_mask": mask}


def assert_clear(model: Any, given: dict[str, Tensor], tokens: int) -> None:
    """Whether rounding cannot have chosen any of the plain model's tokens."""
    output = model.generate(**given, max_new_tokens=tokens, **GREEDY, output_logits=True, return_dict_in_generate=True)
    best = torch.stack(output.logits).float().topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > CLEAR


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_in_every_family(family: str) -> None:
    model: Any = build(family)
    given = prompts(5)
    assert_clear(model, given, 6)
    expected = model.generate(**given, max_new_tokens=6, **GREEDY)
    handle = tbo.wrap(model, overlap="always")
    assert torch.equal(model.generate(**given, max_new_tokens=6, **GREEDY), expected)
    last = report(handle)
    assert (last.engaged, last.phase, last.tokens_per_sub_batch, last.step) == (True, tbo.Phase.DECODE, (3, 2), 6)


METHODS: dict[str, dict[str, Any]] = {
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "beam": {"num_beams": 3},
    "beam, sampled": {"num_beams": 2, "do_sample": True},
    "several a prompt": {"do_sample": True, "num_return_sequences": 3},
    "static cache": {"cache_implementation": "static"},
    "static cache, beam": {"cache_implementation": "static", "num_beams": 2},
    "chunked prefill": {"prefill_chunk_size": 4},
    "chunked prefill, static cache": {"prefill_chunk_size": 4, "cache_implementation": "static"},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_every_search_method_and_cache(family: str, method: str, rows: int) -> None:
    model: Any = build(family)
    given = prompts(rows)
    options = {**GREEDY, "max_new_tokens": 8, **METHODS[method]}
    torch.manual_seed(11)
    expected = model.generate(**given, **options)
    with tbo.wrap(model, overlap="always") as handle:
        torch.manual_seed(11)
        assert torch.equal(model.generate(**given, **options), expected)
        if rows > 1:
            assert report(handle).engaged
    torch.manual_seed(11)
    assert torch.equal(model.generate(**given, **options), expected)


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text", "glm_moe_dsa", "mixtral"])
def test_windows_chunks_and_indexers_in_beams(family: str) -> None:
    same_tokens(family, {"num_beams": 2})


@pytest.mark.parametrize("family", ["gpt_oss", "glm_moe_dsa", "mixtral"])
def test_windows_and_indexers_in_static_caches(family: str) -> None:
    same_tokens(family, {"cache_implementation": "static"})


def same_tokens(family: str, options: dict[str, Any]) -> None:
    overrides: dict[str, Any] = {"sliding_window": 5} if family == "mixtral" else {}
    model: Any = build(family, **overrides)
    given = prompts(3, 11)
    expected = model.generate(**given, max_new_tokens=8, **GREEDY, **options)
    handle = tbo.wrap(model, overlap="always")
    assert torch.equal(model.generate(**given, max_new_tokens=8, **GREEDY, **options), expected)
    assert report(handle).engaged


@pytest.mark.parametrize("sub_batches", [1, 3, 8])
def test_other_numbers_of_sub_batches(sub_batches: int) -> None:
    model: Any = build("qwen2_moe")
    given = prompts(5)
    expected = model.generate(**given, max_new_tokens=6, **GREEDY)
    handle = tbo.wrap(model, overlap="always", sub_batches=sub_batches)
    assert torch.equal(model.generate(**given, max_new_tokens=6, **GREEDY), expected)
    assert report(handle).engaged == (sub_batches > 1)
    assert sum(report(handle).tokens_per_sub_batch) == 5


def test_speculation_by_looking_up_the_prompt() -> None:
    """Several drafted tokens a step, then a crop of the cache to those accepted."""
    model: Any = build("qwen3_moe")
    ids = torch.arange(3, 12).repeat(3)[None]
    options = {**GREEDY, "max_new_tokens": 10, "prompt_lookup_num_tokens": 3}
    expected = model.generate(ids, **options)
    handle = tbo.wrap(model, overlap="always")
    assert torch.equal(model.generate(ids, **options), expected)
    assert report(handle).phase in (tbo.Phase.VERIFY, tbo.Phase.DECODE)


def test_rows_that_end_early() -> None:
    """An end token that some rows reach; the others go on beside their padding."""
    model: Any = build("qwen3_moe")
    given = prompts(5)
    free = model.generate(**given, max_new_tokens=8, **GREEDY)
    options = {**GREEDY, "max_new_tokens": 8, "eos_token_id": int(free[1, -6])}
    expected = model.generate(**given, **options)
    assert (expected[:, -1] == 0).any()
    tbo.wrap(model, overlap="always")
    assert torch.equal(model.generate(**given, **options), expected)


def test_two_generations_with_different_batches_share_nothing() -> None:
    model: Any = build("deepseek_v3")
    few, many = prompts(2, 7), prompts(6, 12, seed=5)
    expected = [model.generate(**given, max_new_tokens=5, **GREEDY) for given in (few, many, few)]
    handle = tbo.wrap(model, overlap="always")
    actual = [model.generate(**given, max_new_tokens=5, **GREEDY) for given in (few, many, few)]
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    assert report(handle).step == 15


@pytest.mark.parametrize("overlap", ["auto", "never"])
def test_a_generation_that_does_not_overlap_runs_the_models_own_layers(overlap: Any) -> None:
    model: Any = build("granitemoe")
    given = prompts(5)
    options = {**GREEDY, "max_new_tokens": 5, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(**given, **options)
    handle = tbo.wrap(model, overlap=overlap)
    actual = model.generate(**given, **options)
    assert torch.equal(actual.sequences, expected.sequences)
    assert all(torch.equal(one, other) for one, other in zip(actual.logits, expected.logits, strict=True))
    reason = Reason.NOTHING_TO_HIDE if overlap == "auto" else Reason.POLICY_NEVER
    assert (report(handle).mode.value, report(handle).reason) == ("plain", reason)


def test_a_compiled_model_breaks_its_graph_at_the_layers() -> None:
    """On a GPU, `generate` compiles the forward by itself when the cache is static."""
    model: Any = build("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[])
    given = prompts(3, 5)
    handle = tbo.wrap(model, overlap="always")
    with torch.no_grad():
        expected = model(**given, use_cache=False).logits
        compiled: Any = torch.compile(model, backend="eager")
        actual = compiled(**given, use_cache=False).logits
    assert torch.equal(actual, expected)
    assert (report(handle).step, report(handle).engaged) == (2, True)
