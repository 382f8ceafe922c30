"""Recorded outputs, hooks and reports: what a wrapped model shows is what the plain model shows, and says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import tbo
from tbo.batch import Reason, Vote, Wants
from tbo.wrapping.report import Mode
from tiny_models import FAMILIES, build, token_batch
from wrapped_models import cache_argument, cache_of, hidden, report

IDS, MASK = token_batch(5, 9)
RECORDED = ("hidden_states", "router_logits", "attentions")


@torch.no_grad()
def call(model: Any, **options: Any) -> Any:
    return model(IDS, attention_mask=MASK, use_cache=False, **options)


def same(one: Any, other: Any) -> bool:
    """Whether two recorded outputs are equal: tuples of tensors, of nothing, or missing."""
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else one is other


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_outputs_are_the_plain_models(family: str) -> None:
    model: Any = build(family, attention="eager")
    options = {f"output_{name}": True for name in RECORDED}
    expected = call(model, **options)
    handle = tbo.wrap(model, overlap="always")
    before = call(model).logits
    assert report(handle).engaged
    actual = call(model, **options)
    assert torch.equal(actual.logits, expected.logits)
    assert all(same(getattr(actual, name, None), getattr(expected, name, None)) for name in RECORDED)
    assert len(actual.hidden_states) == 5
    assert (report(handle).mode, report(handle).reason) == (Mode.PLAIN, Reason.OUTPUTS_CAPTURED)
    # transformers leaves its hooks on the layers and attentions; they sleep when nothing is asked for.
    assert torch.equal(call(model).logits, before)
    assert report(handle).engaged


@pytest.mark.parametrize("name", RECORDED)
def test_each_output_by_itself_and_from_the_configuration(name: str) -> None:
    model: Any = build("qwen3_moe", attention="eager")
    expected = getattr(call(model, **{f"output_{name}": True}), name)
    handle = tbo.wrap(model, overlap="always")
    assert same(getattr(call(model, **{f"output_{name}": True}), name), expected)
    setattr(model.config, f"output_{name}", True)
    assert same(getattr(call(model), name), expected)
    assert report(handle).reason is Reason.OUTPUTS_CAPTURED


def test_the_load_balancing_loss_is_the_plain_models() -> None:
    model: Any = build("mixtral")
    expected = call(model, output_router_logits=True, labels=IDS)
    tbo.wrap(model, overlap="always")
    actual = call(model, output_router_logits=True, labels=IDS)
    assert torch.equal(actual.aux_loss, expected.aux_loss)
    assert torch.equal(actual.loss, expected.loss)


Seen = list[tuple[str, Tensor]]


def record(seen: Seen, name: str) -> Callable[..., None]:
    def hook(_module: nn.Module, _given: Any, output: Any) -> None:
        seen.append((name, (output[0] if isinstance(output, tuple) else output).clone()))

    return hook


def equal(seen: Seen, expected: Seen) -> bool:
    return [name for name, _ in seen] == [name for name, _ in expected] and all(
        torch.equal(one, other) for (_, one), (_, other) in zip(seen, expected, strict=True)
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm_moe_dsa"])
def test_a_hook_on_a_layer_sees_what_it_sees_in_the_plain_model(family: str) -> None:
    model: Any = build(family)
    seen: Seen = []
    hooks = [layer.register_forward_hook(record(seen, str(i))) for i, layer in enumerate(model.model.layers)]
    logits = call(model).logits
    expected = list(seen)
    handle = tbo.wrap(model, overlap="always")
    seen.clear()
    assert torch.equal(call(model).logits, logits)
    assert equal(seen, expected)
    assert (report(handle).mode, report(handle).reason) == (Mode.PLAIN, Reason.LAYER_HOOKS)
    for hook in hooks:
        hook.remove()
    call(model)
    assert report(handle).engaged


@pytest.mark.parametrize("kind", ["forward_pre", "full_backward", "full_backward_pre"])
def test_every_kind_of_layer_hook_runs_the_layers_one_by_one(kind: str) -> None:
    model: Any = build("qwen3_moe")
    handle = tbo.wrap(model, overlap="always")
    getattr(model.model.layers[2], f"register_{kind}_hook")(lambda *_: None)
    call(model)
    assert report(handle).reason is Reason.LAYER_HOOKS


def test_a_global_hook_runs_the_layers_one_by_one() -> None:
    model: Any = build("qwen3_moe")
    handle = tbo.wrap(model, overlap="always")
    names: list[str] = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: names.append(type(module).__name__))
    try:
        call(model)
    finally:
        hook.remove()
    assert report(handle).reason is Reason.LAYER_HOOKS
    assert names.count("Qwen3MoeDecoderLayer") == 4
    assert names.count("Qwen3MoeAttention") == 4


LEAVES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate", "mlp.experts", "input_layernorm")


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_hook_inside_attention_and_block_fires_for_each_part(leaf: str) -> None:
    model: Any = build("qwen3_moe")
    seen: Seen = []
    model.model.layers[2].get_submodule(leaf).register_forward_hook(record(seen, leaf))
    call(model)
    rows = len(seen[0][1])
    handle = tbo.wrap(model, overlap="always")
    seen.clear()
    call(model)
    assert report(handle).engaged
    assert [len(tensor) for _, tensor in seen] == [rows * 3 // 5, rows * 2 // 5]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("name", "called", "kind"),
    [("self_attn", "attention", "Qwen3MoeAttention"), ("mlp", "the MoE block", "Qwen3MoeSparseMoeBlock")],
)
def test_a_hook_that_would_not_fire_is_refused(name: str, called: str, kind: str, when: str) -> None:
    """Whether it was there at wrap or has been put on since."""
    model: Any = build("qwen3_moe")
    if when == "after":
        tbo.wrap(model, overlap="always")
    model.model.layers[2].get_submodule(name).register_forward_hook(lambda *_: None)
    with pytest.raises(tbo.WrapError) as caught:
        tbo.wrap(model) if when == "before" else call(model)
    assert str(caught.value) == (
        f"layer 2: {called} ({kind}) has a forward hook, which would not fire because its forward is cut into ops. Hook"
        f" the decoder layer or a module inside {called}, or unwrap the model."
    )


def test_a_hook_on_a_dense_block_fires() -> None:
    model: Any = build("deepseek_v3", first_k_dense_replace=1)
    seen: Seen = []
    model.model.layers[0].mlp.register_forward_hook(record(seen, "mlp"))
    handle = tbo.wrap(model, overlap="always")
    seen.clear()
    call(model)
    assert report(handle).engaged
    assert [tuple(tensor.shape) for _, tensor in seen] == [(5, 9, 64)]


class OwnCache(DynamicCache):
    """A cache class that nobody has told tbo about."""


class OwnLayer(DynamicLayer):
    """Likewise for a layer."""


def own_layers(model: Any) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.layers[1] = OwnLayer()  # type: ignore[no-untyped-call]
    return cache


def refusing(**options: Any) -> Callable[[Any], Any]:
    return lambda model: call(model, **options)


def cached(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda model: hidden(model, IDS, **cache_argument(model.model, make(model)))


REASONS: dict[str, tuple[dict[str, Any], Callable[[Any], Any], Reason]] = {
    "overlaps": ({"overlap": "always"}, refusing(), Reason.NONE),
    "one rank has nothing to hide": ({"overlap": "auto"}, refusing(), Reason.NOTHING_TO_HIDE),
    "never": ({"overlap": "never"}, refusing(), Reason.POLICY_NEVER),
    "one sub-batch": ({"overlap": "always", "sub_batches": 1}, refusing(), Reason.ONE_SUB_BATCH),
    "captured": ({"overlap": "always"}, refusing(output_hidden_states=True), Reason.OUTPUTS_CAPTURED),
    "captured, never": ({"overlap": "never"}, refusing(output_hidden_states=True), Reason.OUTPUTS_CAPTURED),
    "own cache": ({"overlap": "always"}, cached(lambda model: OwnCache()), Reason.CACHE_NOT_SPLITTABLE),
    "own cache layer": ({"overlap": "always"}, cached(own_layers), Reason.CACHE_NOT_SPLITTABLE),
    "own cache, never": ({"overlap": "never"}, cached(lambda model: OwnCache()), Reason.POLICY_NEVER),
}


@pytest.mark.parametrize("case", REASONS)
def test_every_step_says_why(case: str) -> None:
    options, run, reason = REASONS[case]
    model: Any = build("qwen3_moe")
    expected = run(model)
    handle = tbo.wrap(model, **options)
    actual = run(model)
    last = report(handle)
    assert (last.reason, last.engaged) == (reason, reason is Reason.NONE)
    assert last.mode is (Mode.DEFERRED if last.engaged else Mode.PLAIN)
    assert last.tokens_per_sub_batch == ((27, 18) if last.engaged else (45,))
    assert last.split == ("rows" if last.engaged else "none")
    assert reason.text in tbo.explain(model)
    if not last.engaged:
        one, other = (output if isinstance(output, Tensor) else output.logits for output in (actual, expected))
        assert torch.equal(one, other)


def test_a_report_holds_what_the_step_did() -> None:
    model: Any = build("qwen3_moe")
    handle = tbo.wrap(model, overlap="always")
    assert handle.last is None
    assert tbo.explain(model) == (
        "self-check: 2 kinds of layer equal their ops (whole layers; largest relative difference 0.0e+00)\n"
        "no step has run yet"
    )
    with torch.no_grad():
        output = model(IDS, attention_mask=MASK)
    last = report(handle)
    vote = Vote(step=0, phase=tbo.Phase.PREFILL, rows=(27, 18), wants=Wants.YES, reason=Reason.NONE)
    assert (last.step, last.phase, last.reason_rank, last.modelled) == (1, tbo.Phase.PREFILL, None, False)
    assert [(found.step, found.phase, found.rows, found.wants) for found in last.votes] == [
        (vote.step, vote.phase, vote.rows, vote.wants)
    ]
    assert (last.communication_seconds, last.exposed_seconds, last.hidden_share) == (0, 0, None)
    assert 0 < last.seconds < 60
    assert str(last) == (
        "step 1 (prefill) overlapped: nothing stands against overlapping\n"
        "  layers ran deferred; split rows; tokens per sub-batch 27, 18"
    )
    with torch.no_grad():
        mask = torch.cat([MASK, MASK.new_ones(5, 1)], dim=1)
        model(IDS[:, :1], attention_mask=mask, **cache_argument(model, cache_of(output)))
    assert tbo.explain(model).endswith(
        "step 2 (decode) overlapped: nothing stands against overlapping\n"
        "  layers ran deferred; split rows; tokens per sub-batch 3, 2"
    )
    assert handle.explain() == tbo.explain(model)


def test_decode_is_reported_with_its_reason_and_rank() -> None:
    model: Any = build("qwen3_moe")
    handle = tbo.wrap(model)
    call(model)
    assert report(handle).reason_rank == 0
    assert str(report(handle)) == (
        "step 1 (prefill) did not overlap: there is no communication to hide on one rank\n"
        "  layers ran plain; split none; tokens per sub-batch 45"
    )


def test_communication_and_votes_of_several_ranks_in_words() -> None:
    votes = (
        Vote(step=6, phase=tbo.Phase.PREFILL, rows=(300, 300), wants=Wants.YES, reason=Reason.NONE),
        Vote.idle(step=6, sub_batches=2),
    )
    shown = tbo.StepReport(
        step=7,
        engaged=True,
        reason=Reason.NONE,
        reason_rank=None,
        mode=Mode.SERVED,
        phase=tbo.Phase.PREFILL,
        split="none",
        tokens_per_sub_batch=(0, 0),
        votes=votes,
        communication_seconds=0.004,
        exposed_seconds=0.001,
        modelled=True,
        seconds=0.0125,
    )
    assert shown.hidden_share == 0.75
    assert str(shown) == (
        "step 7 (prefill) overlapped: nothing stands against overlapping\n"
        "  layers ran served; split none; tokens per sub-batch 0, 0\n"
        "  communication: 4.00 ms, 1.00 ms exposed, 75% hidden (modelled link); step 12.50 ms\n"
        "  votes: rank 0 prefill [300, 300] yes; rank 1 idle [0, 0] if_others"
    )
    blamed = replace(shown, engaged=False, reason=Reason.TOO_FEW_TOKENS, reason_rank=0, modelled=False)
    assert str(blamed).startswith("step 7 (prefill) did not overlap: rank 0: its smallest sub-batch has too few tokens")
    assert "75% hidden; step" in str(blamed)
    assert replace(shown, exposed_seconds=0.009).hidden_share == 0


def test_explaining_a_model_that_is_not_wrapped() -> None:
    model = build("qwen3_moe")
    with pytest.raises(tbo.WrapError) as caught:
        tbo.explain(model)
    assert str(caught.value) == "Qwen3MoeForCausalLM is not wrapped. Call tbo.wrap(model, ...) first."
