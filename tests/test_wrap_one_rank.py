"""One rank: a wrapped model equals the plain model run on each part, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import tbo
from oracle import case, even_rows, expected_of_steps, hidden_of_steps, worst_difference
from tbo.batch import Reason
from tiny_models import FAMILIES, NUM_LAYERS, VOCABULARY, build, token_batch
from wrapped_models import cache_argument, cache_of, report


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
        assert report(handle).engaged
        assert report(handle).tokens_per_sub_batch == (3, 2)
        assert worst_difference(actual, expected, mask) == 0
        handle.unwrap()
    assert {where.sub_batch for where in trace.ops} == {0, 1}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    ("batch_size", "sub_batches", "tokens"),
    [(5, 3, (2, 2, 1)), (2, 3, (1, 1, 0)), (3, 8, (1, 1, 1, 0, 0, 0, 0, 0)), (4, 2, (2, 2))],
)
def test_any_number_of_sub_batches(family: str, batch_size: int, sub_batches: int, tokens: tuple[int, ...]) -> None:
    model = build(family)
    ids, mask, following = case(batch_size, decode_steps=3)
    expected = expected_of_steps(model, ids, mask, following, even_rows(batch_size, sub_batches))
    handle = tbo.wrap(model, overlap="always", sub_batches=sub_batches)
    actual = hidden_of_steps(model, ids, mask, following)
    assert worst_difference(actual, expected, mask) == 0
    assert report(handle).tokens_per_sub_batch == tokens


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_next", "deepseek_v4"])
def test_one_sub_batch_after_another_gives_the_same(family: str) -> None:
    model = build(family)
    ids, mask, following = case(decode_steps=3)
    runs, traces = [], (tbo.Trace(), tbo.Trace())
    for order, trace in zip(("interleaved", "sequential"), traces, strict=True):
        with tbo.wrap(model, overlap="always", order=order, instruments=(trace,)):  # type: ignore[arg-type]
            runs.append(hidden_of_steps(model, ids, mask, following))
    assert worst_difference(runs[0], runs[1], mask) == 0
    switches = [sum(a != b for (a, _), (b, _) in zip(t.stages, t.stages[1:], strict=False)) for t in traces]
    assert switches[1] == 2 * 4 - 1  # each of 4 steps: from sub-batch 0 to 1, and back at the next step
    assert switches[0] > 4 * switches[1]
    assert sorted(map(str, traces[0].ops)) == sorted(map(str, traces[1].ops))


def test_dense_layers_between_sparse_ones_run_in_the_same_plan() -> None:
    trace = tbo.Trace()
    model = build("qwen3_moe", mlp_only_layers=[1])
    ids, mask, _ = case()
    tbo.wrap(model, overlap="always", instruments=(trace,))
    hidden_of_steps(model, ids, mask, ids[:, :0])
    dense = {(where.sub_batch, where.layer) for where in trace.ops if where.op == "op_mlp"}
    sparse = {(where.sub_batch, where.layer) for where in trace.ops if where.op == "op_experts"}
    assert dense == {(0, 1), (1, 1)}
    assert sparse == {(sub_batch, layer) for sub_batch in (0, 1) for layer in (0, 2, 3)}


def test_layers_before_the_first_sparse_one_run_unsplit() -> None:
    model: Any = build("deepseek_v3", first_k_dense_replace=2)
    ids, mask, _ = case()
    rows: list[tuple[int, int]] = []
    for index, layer in enumerate(model.model.layers):
        layer.input_layernorm.register_forward_hook(
            lambda _module, given, _output, index=index: rows.append((index, given[0].shape[0]))
        )
    trace = tbo.Trace()
    tbo.wrap(model, overlap="always", instruments=(trace,))
    rows.clear()
    hidden_of_steps(model, ids, mask, ids[:, :0])
    assert sorted(rows) == [(0, 5), (1, 5), (2, 2), (2, 3), (3, 2), (3, 3)]
    assert {where.layer for where in trace.ops} == {2, 3}


def joined(caches: Sequence[Any]) -> Any:
    """One cache of all parts' rows."""
    whole = DynamicCache()
    for index, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        whole.update(torch.cat([layer.keys for layer in layers]), torch.cat([layer.values for layer in layers]), index)
    return whole


def rows_of(cache: Any, rows: slice) -> Any:
    """A cache of some rows."""
    part = DynamicCache()
    for index, layer in enumerate(cache.layers):
        part.update(layer.keys[rows], layer.values[rows], index)
    return part


@torch.no_grad()
def test_one_cache_through_overlapped_plain_and_differently_cut_steps() -> None:
    """Every change of the cut, with the state that the steps before have left in the cache."""
    model = build("qwen3_moe")
    ids, _ = token_batch(5, 10, left_padding=False)
    steps = torch.randint(3, VOCABULARY, (5, 5), generator=torch.Generator().manual_seed(7))
    halves, thirds = even_rows(5, 2), even_rows(5, 3)
    expected: list[Tensor] = []
    caches: list[Any] = [DynamicCache() for _ in halves]
    for step, rows in enumerate((halves, halves, [slice(0, 5)], thirds, halves)):
        whole = joined(caches) if step else None
        caches = [DynamicCache() if whole is None else rows_of(whole, part) for part in rows]
        given = steps[:, step : step + 1] if step else ids
        outputs = [
            model.model(given[part], **cache_argument(model.model, cache))
            for part, cache in zip(rows, caches, strict=True)
        ]
        expected.append(torch.cat([output.last_hidden_state for output in outputs]))
    cache = DynamicCache()
    for step, sub_batches in enumerate((2, 2, None, 3, 2)):
        handle = None if sub_batches is None else tbo.wrap(model, overlap="always", sub_batches=sub_batches)
        given = steps[:, step : step + 1] if step else ids
        output = model.model(given, **cache_argument(model.model, cache))
        assert torch.equal(output.last_hidden_state, expected[step]), f"step {step}"
        assert cache_of(output) is cache
        if handle is not None:
            assert report(handle).engaged
            handle.unwrap()
    assert cache.get_seq_length() == 10 + 4


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_verify_step_runs_the_decode_order(family: str) -> None:
    """Speculative decoding: 3 drafted tokens a row after a filled cache; then the cache is cropped to 2 of them."""
    overrides: dict[str, Any] = {"first_k_dense_replace": 0} if family == "deepseek_v3" else {}
    model: Any = build(family, **overrides)
    ids, _ = token_batch(4, 10, left_padding=False)
    drafts, _ = token_batch(4, 3, seed=5, left_padding=False)

    def verify(rows: slice) -> list[Tensor]:
        cache = DynamicCache()
        found = []
        for given in (ids[rows], drafts[rows], drafts[rows][:, :1]):
            output = model.model(given, **cache_argument(model.model, cache))
            found.append(output.last_hidden_state)
            if given.shape[1] == 3:
                phases.append(handle.last.phase if handle is not None and handle.last is not None else None)
                cache.crop(12)
        return found

    handle: Any = None
    phases: list[tbo.Phase | None] = []
    parts = [verify(rows) for rows in even_rows(4, 2)]
    trace = tbo.Trace()
    handle = tbo.wrap(model, overlap="always", instruments=(trace,))
    actual = verify(slice(0, 4))
    assert phases == [None, None, tbo.Phase.VERIFY]
    assert all(torch.equal(step, torch.cat(halves)) for step, *halves in zip(actual, *parts, strict=True))
    assert len({where.stage for where in trace.ops}) >= 5 * 3


@torch.inference_mode()
@pytest.mark.parametrize("family", ["deepseek_v2", "gpt_oss", "qwen3_next"])
def test_under_inference_mode(family: str) -> None:
    model = build(family)
    ids, mask, following = case(decode_steps=3)
    expected = expected_of_steps(model, ids, mask, following, even_rows(5, 2))
    tbo.wrap(model, overlap="always")
    assert worst_difference(hidden_of_steps(model, ids, mask, following), expected, mask) == 0


def loss_and_gradients(model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(ids, attention_mask=mask, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_training_on_one_rank(family: str) -> None:
    """Overlapped, a weight's gradient is a sum over parts: equal within the rounding of that sum."""
    model = build(family).train()
    ids, mask, _ = case()
    loss, gradients = loss_and_gradients(model, ids, mask)
    handle = tbo.wrap(model, overlap="always")
    wrapped_loss, wrapped_gradients = loss_and_gradients(model, ids, mask)
    assert report(handle).engaged
    torch.testing.assert_close(wrapped_loss, loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(wrapped_gradients[name], gradient, rtol=0, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_gradient_checkpointing_runs_the_models_own_layers(family: str, reentrant: bool) -> None:
    """Checkpointing calls single layers again in the backward pass, where no other layer runs."""
    model = build(family).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ids, mask, _ = case()
    loss, gradients = loss_and_gradients(model, ids, mask)
    handle = tbo.wrap(model, overlap="always")
    for step in (1, 2):
        wrapped_loss, wrapped_gradients = loss_and_gradients(model, ids, mask)
        assert torch.equal(wrapped_loss, loss)
        assert all(torch.equal(wrapped_gradients[name], gradient) for name, gradient in gradients.items())
        assert report(handle).step == step
        assert report(handle).reason is Reason.TRAINING
    model.eval()
    with torch.no_grad():
        model(ids, attention_mask=mask)
    assert report(handle).engaged


def test_a_vision_wrapper_whose_decoder_is_deeper_inside() -> None:
    """Fault 15 of the reference: a decoder at ``language_model.model``."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    text = build("llama4_text").config.to_dict()
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    }
    torch.manual_seed(0)
    model: Any = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision)).eval()
    ids, mask, _ = case()
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    handle = tbo.wrap(model, overlap="always")
    assert torch.equal(model.generate(ids, **options), expected)
    assert report(handle).engaged
    assert report(handle).tokens_per_sub_batch == (3, 2)
    assert len(model.language_model.model.layers) == NUM_LAYERS
