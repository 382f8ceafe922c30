"""Rules 1 to 5 of the system the seeds describe: orders, stages, offsets, and layers that run un-split."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tbo
from oracle import case, even_rows, expected_of_steps, hidden_of_steps, worst_difference
from tbo.core import Plan, Where
from tbo.models.layer import CARRIES, INPUTS, HuggingFaceLayer
from tbo.models.orders import DEEPSEEK_DECODE, PREFILL, QWEN_DECODE, Schedule, default_schedules, layers_ops
from tiny_models import build
from wrapped_models import report


def layers_of(family: str, count: int, **overrides: Any) -> list[HuggingFaceLayer]:
    model: Any = build(family, num_hidden_layers=count, **overrides)
    return [HuggingFaceLayer(layer, model.config) for layer in model.model.layers]


def plan_of(layers: list[HuggingFaceLayer], schedule: Schedule, sub_batches: int = 2, **options: Any) -> Plan:
    return tbo.compile_plan(
        layers_ops(layers, schedule),
        inputs=INPUTS,
        outputs=("hidden_states",),
        carries=CARRIES,
        sub_batches=sub_batches,
        offset=schedule.offset,
        **options,
    )


def names(plan: Plan, stage: int) -> list[str]:
    return [step.op.name.removeprefix("op_") for step in plan.stages[stage].steps]


ATTENTION = ["comm_prepare_attn", "prepare", "core", "comm_prepare_mlp"]
ROUTE = ["gate", "select_experts"]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rule_1_prefill_has_2_l_plus_1_stages_and_offset_0(count: int) -> None:
    """A layer's end shares a stage with the next layer's start."""
    layers = layers_of("deepseek_v3", count, first_k_dense_replace=0)
    plan = plan_of(layers, PREFILL)
    assert PREFILL.offset == 0
    assert len(plan.stages) == 2 * count + 1
    start = [*ATTENTION, *ROUTE, "dispatch_a"]
    end = ["shared_experts", "combine_b", "output", "comm_postprocess_layer"]
    assert names(plan, 0) == start
    assert all(names(plan, 2 * layer + 1) == ["dispatch_b", "experts", "combine_a"] for layer in range(count))
    assert all(names(plan, 2 * layer) == end + start for layer in range(1, count))
    assert names(plan, 2 * count) == end
    assert plan.warnings == ()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rule_2_deepseek_decode_has_5_l_plus_1_stages_and_offset_2(count: int) -> None:
    layers = layers_of("deepseek_v3", count, first_k_dense_replace=0)
    plan = plan_of(layers, DEEPSEEK_DECODE)
    assert DEEPSEEK_DECODE.offset == 2
    assert len(plan.stages) == 5 * count + 1
    assert names(plan, 0) == ["comm_prepare_attn", "prepare"]
    assert names(plan, 1) == ["core", "comm_prepare_mlp", *ROUTE]
    assert names(plan, 2) == ["dispatch_a", "shared_experts"]
    assert names(plan, 3) == ["dispatch_b", "experts", "combine_a"]
    assert names(plan, 4) == ["combine_b"]
    end = ["output", "comm_postprocess_layer"]
    assert names(plan, 5) == (end if count == 1 else [*end, "comm_prepare_attn", "prepare"])
    assert names(plan, 5 * count) == end
    assert plan.warnings == ()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rule_3_qwen_decode_has_5_l_stages_and_offset_2(count: int) -> None:
    """No shared experts; the layer ends with a yield."""
    layers = layers_of("qwen3_moe", count, mlp_only_layers=[])
    plan = plan_of(layers, QWEN_DECODE)
    assert QWEN_DECODE.offset == 2
    assert len(plan.stages) == 5 * count
    for layer in range(count):
        assert names(plan, 5 * layer) == ["comm_prepare_attn", "prepare"]
        assert names(plan, 5 * layer + 1) == ["core", "comm_prepare_mlp", *ROUTE]
        assert names(plan, 5 * layer + 2) == ["dispatch_a"]
        assert names(plan, 5 * layer + 3) == ["dispatch_b", "experts", "combine_a"]
        assert names(plan, 5 * layer + 4) == ["combine_b", "output", "comm_postprocess_layer"]
    assert plan.warnings == ()


@pytest.mark.parametrize(("has_shared", "decode"), [(True, DEEPSEEK_DECODE), (False, QWEN_DECODE)])
def test_rule_4_verify_runs_as_decode_and_mixed_as_prefill(has_shared: bool, decode: Schedule) -> None:
    assert default_schedules(has_shared_experts=has_shared) == {
        tbo.Phase.PREFILL: PREFILL,
        tbo.Phase.MIXED: PREFILL,
        tbo.Phase.DECODE: decode,
        tbo.Phase.VERIFY: decode,
    }


@pytest.mark.parametrize(
    ("family", "dense"),
    [("deepseek_v3", {"first_k_dense_replace": 2}), ("qwen2_moe", {"mlp_only_layers": [0, 1, 3]})],
)
def test_rule_5_layers_before_the_first_sparse_one_run_unsplit(family: str, dense: dict[str, Any]) -> None:
    """They are in no plan; a dense layer after the first sparse one is, and runs on each part."""
    model: Any = build(family, **dense)
    rows: dict[int, list[int]] = {}
    for index, layer in enumerate(model.model.layers):
        layer.post_attention_layernorm.register_forward_hook(
            lambda _module, given, _output, index=index: rows.setdefault(index, []).append(len(given[0]))
        )
    trace = tbo.Trace()
    tbo.wrap(model, overlap="always", instruments=(trace,))
    rows.clear()
    ids, mask, _ = case()
    hidden_of_steps(model, ids, mask, ids[:, :0])
    assert rows == {0: [5], 1: [5], 2: [3, 2], 3: [3, 2]}
    assert {where.layer for where in trace.ops} == {2, 3}
    dense_ops = {where.layer for where in trace.ops if where.op == "op_mlp"}
    assert dense_ops == ({3} if family == "qwen2_moe" else set())


@pytest.mark.parametrize(("schedule", "stages"), [(PREFILL, 6 + 1), (DEEPSEEK_DECODE, 15 + 1 + 1), (QWEN_DECODE, 16)])
def test_a_dense_layer_between_sparse_ones(schedule: Schedule, stages: int) -> None:
    """It has no communication to hide, but in the decode orders its attention is cut as in the others."""
    layers = layers_of("qwen3_moe", 4, mlp_only_layers=[1])
    plan = plan_of(layers, schedule)
    assert len(plan.stages) == stages
    dense = [step.op.name.removeprefix("op_") for stage in plan.stages for step in stage.steps if step.layer == 1]
    assert dense == [*ATTENTION, "mlp", "comm_postprocess_layer"]


def test_the_offset_lets_one_sub_batch_run_ahead() -> None:
    layers = layers_of("deepseek_v3", 2, first_k_dense_replace=0)
    prefill = plan_of(layers, PREFILL)
    decode = plan_of(layers, DEEPSEEK_DECODE)
    assert prefill.order[:6] == ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2))
    assert decode.order[:7] == ((0, 0), (0, 1), (0, 2), (1, 0), (0, 3), (1, 1), (0, 4))
    assert decode.order[-3:] == ((1, 8), (1, 9), (1, 10))
    assert plan_of(layers, DEEPSEEK_DECODE, 3).order[-1] == (2, 10)


def test_a_layer_without_shared_experts_leaves_their_op_out() -> None:
    plan = plan_of(layers_of("mixtral", 2), PREFILL)
    assert "shared_experts" not in {name for stage in range(len(plan.stages)) for name in names(plan, stage)}


OWN = replace(
    PREFILL,
    name="own",
    sparse=(*PREFILL.sparse[:3], "|", *PREFILL.sparse[3:]),
    offset=1,
)
"""Prefill with one more yield, after attention, and the second sub-batch a stage later."""


@pytest.mark.parametrize("phase", [tbo.Phase.PREFILL, tbo.Phase.DECODE])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_an_order_of_the_users_own_gives_the_same_numbers(family: str, phase: tbo.Phase) -> None:
    model = build(family)
    ids, mask, following = case(decode_steps=2)
    expected = expected_of_steps(model, ids, mask, following, even_rows(5, 2))
    trace = tbo.Trace()
    handle = tbo.wrap(model, overlap="always", schedules={phase: OWN}, instruments=(trace,))
    assert worst_difference(hidden_of_steps(model, ids, mask, following), expected, mask) == 0
    assert report(handle).engaged
    assert "op_comm_prepare_mlp" in {plan_stage.op for plan_stage in first_of_stages(trace)}


def first_of_stages(trace: tbo.Trace) -> list[Where]:
    """The first op of each stage a sub-batch has run."""
    return [
        where
        for before, where in pairwise(trace.ops)
        if (before.sub_batch, before.stage) != (where.sub_batch, where.stage)
    ]


def test_two_phases_may_have_orders_of_one_name() -> None:
    """A changed copy of a built-in order has its name, but must not be taken for it, or it for the copy."""
    model = build("qwen3_moe", mlp_only_layers=[])
    ids, mask, following = case(decode_steps=1)
    later = replace(QWEN_DECODE, offset=3)
    trace = tbo.Trace()
    tbo.wrap(model, overlap="always", schedules={tbo.Phase.VERIFY: later}, instruments=(trace,))

    def first_stages(tokens: Tensor) -> list[tuple[int, int]]:
        hidden_of_steps(model, ids, mask, following[:, :0])
        trace.stages.clear()
        output: Any = model.model(ids, use_cache=True)
        trace.stages.clear()
        name = "cache" if getattr(output, "cache", None) is not None else "past_key_values"
        model.model(tokens, **{name: getattr(output, name)})
        return trace.stages[:6]

    with torch.no_grad():
        decode, verify = first_stages(ids[:, :1]), first_stages(ids[:, :3])
    assert decode == [(0, 0), (0, 1), (0, 2), (1, 0), (0, 3), (1, 1)]
    assert verify == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (0, 4)]


def without(schedule: Schedule, *left_out: str) -> tuple[str, ...]:
    return tuple(name for name in schedule.sparse if name not in left_out)


OPS = (
    "Its ops are: op_combine_a, op_combine_b, op_comm_postprocess_layer, op_comm_prepare_attn, op_comm_prepare_mlp,"
    " op_core, op_dispatch_a, op_dispatch_b, op_experts, op_gate, op_mlp, op_output, op_prepare, op_select_experts,"
    " op_shared_experts; '|' is a yield."
)

BAD: dict[str, tuple[str, Schedule, str]] = {
    "misspelt op": (
        "qwen3_moe",
        replace(PREFILL, name="mine", sparse=("op_prepare_attn", *PREFILL.sparse[1:])),
        "schedule 'mine' names 'op_prepare_attn', which HuggingFaceLayer does not have. " + OPS,
    ),
    "another attribute": (
        "qwen3_moe",
        replace(PREFILL, name="mine", sparse=("adapter", *PREFILL.sparse)),
        "schedule 'mine' names 'adapter', which HuggingFaceLayer does not have. " + OPS,
    ),
    "shared experts forgotten": (
        "deepseek_v3",
        replace(PREFILL, name="mine", sparse=without(PREFILL, "op_shared_experts")),
        (
            "schedule 'mine' has no op_shared_experts, but this layer has shared experts. Use the prefill or"
            " deepseek-decode schedule, or add the op to yours."
        ),
    ),
    "qwen order for shared experts": (
        "deepseek_v3",
        QWEN_DECODE,
        (
            "schedule 'qwen-decode' has no op_shared_experts, but this layer has shared experts. Use the prefill or"
            " deepseek-decode schedule, or add the op to yours."
        ),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_an_order_that_does_not_fit_the_layers(name: str) -> None:
    family, schedule, message = BAD[name]
    with pytest.raises(tbo.PlanError) as caught:
        tbo.wrap(build(family), schedules={tbo.Phase.DECODE: schedule})
    assert str(caught.value) == message


WRONG: dict[str, tuple[Schedule, str]] = {
    "an op missing": (replace(PREFILL, sparse=without(PREFILL, "op_gate")), "router_output"),
    "a wait missing": (replace(PREFILL, sparse=without(PREFILL, "op_combine_b", "op_output")), "mlp_output"),
    "a wait before its start": (
        replace(PREFILL, sparse=("op_dispatch_b", *without(PREFILL, "op_dispatch_b"))),
        "op_dispatch_b",
    ),
    "an offset beyond the plan": (replace(PREFILL, offset=99), "would start 99 stages late"),
    "a negative offset": (replace(PREFILL, offset=-1), "offset"),
    "two yields in a row": (replace(PREFILL, sparse=(*PREFILL.sparse[:7], "|", *PREFILL.sparse[7:])), "yield"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_order_that_would_go_wrong_is_refused_at_wrap(name: str) -> None:
    schedule, word = WRONG[name]
    model = build("qwen3_moe")
    with pytest.raises(tbo.PlanError, match=word):
        tbo.wrap(model, schedules={tbo.Phase.PREFILL: schedule})
    tbo.wrap(model).unwrap()


def test_an_order_that_hides_nothing_is_noted() -> None:
    """Legal, but said: without a yield between start and wait nothing overlaps."""
    schedule = replace(PREFILL, name="tight", sparse=without(PREFILL, "|"))
    model = build("qwen3_moe", mlp_only_layers=[])
    handle = tbo.wrap(model, schedules={tbo.Phase.PREFILL: schedule})
    assert any(
        note.startswith("warning: ") and "op_dispatch_b: waits in the stage in which op_dispatch_a starts" in note
        for note in handle.notes
    )
