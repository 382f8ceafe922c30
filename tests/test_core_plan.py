"""Compiling plans: stages, data flow, communication and fingerprints of plans that are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tbo.core import YIELD, Plan, compile_plan
from tbo.core.codegen import _compiled
from tbo.errors import PlanError
from toy_ops import DEEPSEEK_DECODE, DENSE, PREFILL, QWEN_DECODE, layer, toy

pytestmark = pytest.mark.timeout(60)

SEND = toy("send", ["x"], "sent", starts="ep")
RECEIVE = toy("receive", ["sent"], "y", waits="sent")
X_TO_Y = toy("x_to_y", ["x"], "y")
X_TO_OWN = toy("x_to_own", ["x"], "own")
OWN_TO_Y = toy("own_to_y", ["own"], "y")


# ---------------------------------------------------------------- stages


def compiled(*layers: str, **options: Any) -> Plan:
    return compile_plan(
        [layer(text) for text in layers], inputs=["hidden_states"], outputs=["hidden_states"], **options
    )


@pytest.mark.parametrize("layers", [1, 2, 5, 61])
@pytest.mark.parametrize(("text", "of_layers"), [(PREFILL, (2, 1)), (DEEPSEEK_DECODE, (5, 1)), (QWEN_DECODE, (5, 0))])
def test_stage_counts_of_the_reference_orders(text: str, of_layers: tuple[int, int], layers: int) -> None:
    per_layer, more = of_layers
    assert len(compiled(*[text] * layers).stages) == per_layer * layers + more


def test_stages_of_two_prefill_layers_share_the_seam() -> None:
    start = ["prepare_attn", "prepare", "core", "prepare_mlp", "gate", "select", "dispatch_a"]
    middle = ["dispatch_b", "experts", "combine_a"]
    end = ["shared", "combine_b", "output", "postprocess"]
    assert [[step.op.name for step in stage.steps] for stage in compiled(PREFILL, PREFILL).stages] == [
        start,
        middle,
        [*end, *start],
        middle,
        end,
    ]


def test_dense_layers_join_the_stages_of_their_neighbours() -> None:
    """Sparse, dense, sparse: the dense layer runs between the first's output and the second's attention."""
    plan = compiled(PREFILL, DENSE, PREFILL)
    assert len(plan.stages) == 5
    assert [(step.layer, step.op.name) for step in plan.stages[2].steps] == [
        (0, "shared"),
        (0, "combine_b"),
        (0, "output"),
        (0, "postprocess"),
        (1, "prepare_attn"),
        (1, "prepare"),
        (1, "core"),
        (1, "prepare_mlp"),
        (1, "mlp"),
        (1, "postprocess"),
        (2, "prepare_attn"),
        (2, "prepare"),
        (2, "core"),
        (2, "prepare_mlp"),
        (2, "gate"),
        (2, "select"),
        (2, "dispatch_a"),
    ]


def test_a_plan_of_dense_layers_is_one_stage() -> None:
    assert [len(stage.steps) for stage in compiled(DENSE, DENSE).stages] == [12]


def test_stage_names_and_description() -> None:
    plan = compiled("prepare_attn prepare | core prepare_mlp mlp postprocess", DENSE)
    assert [stage.name for stage in plan.stages] == [
        "layer 0 prepare_attn .. layer 0 prepare",
        "layer 0 core .. layer 1 postprocess",
    ]
    assert compile_plan([[X_TO_Y]], inputs=["x"], outputs=["y"]).stages[0].name == "layer 0 x_to_y"
    plan = compile_plan([[X_TO_OWN, YIELD, OWN_TO_Y]], inputs=["x"], outputs=["y"], offset=1)
    assert plan.describe() == (
        "2 stages, 2 sub-batches\n  stage 0: x_to_own\n  stage 1: own_to_y\norder: 0:0 0:1 1:0 1:1"
    )


def test_layers_are_numbered_as_in_the_model() -> None:
    """The first three layers of the model are not in the plan; places and messages count them."""
    plan = compiled(PREFILL, DENSE, first_layer=3)
    assert [step.layer for step in plan.stages[2].steps] == [3] * 4 + [4] * 6
    with pytest.raises(
        PlanError, match=r"layer 4, stage 0, own_to_y: reads 'own', last written by layer 3, stage 0, x_"
    ):
        compile_plan([[X_TO_OWN], [OWN_TO_Y]], inputs=["x"], outputs=["y"], first_layer=3)


def test_offsets_may_be_given_for_each_sub_batch() -> None:
    plan = compile_plan([[X_TO_OWN, YIELD, OWN_TO_Y]], inputs=["x"], outputs=["y"], sub_batches=3, offset=(0, 1, 0))
    assert plan.order == ((0, 0), (2, 0), (0, 1), (1, 0), (2, 1), (1, 1))


# ---------------------------------------------------------------- data flow in the compiled plan


def test_the_last_reader_takes_the_value_and_unread_writes_are_dropped() -> None:
    plan = compile_plan(
        [[toy("make", ["x"], ("own", "unread")), toy("use", ["own", "x"], "z"), toy("end", ["own", "z"], "y")]],
        inputs=["x"],
        outputs=["y"],
    )
    make, use, end = plan.stages[0].steps
    assert (make.arguments, make.dead) == ({"x": False}, ("unread",))
    assert (use.arguments, use.dead) == ({"own": False, "x": True}, ())
    assert (end.arguments, end.dead) == ({"own": True, "z": True}, ())


def test_a_local_key_of_another_layer_is_not_an_optional_read() -> None:
    reader = toy("reader", ["x", "own?"], "y")
    plan = compile_plan([[X_TO_OWN, OWN_TO_Y], [reader]], inputs=["x"], outputs=["y"])
    assert plan.stages[0].steps[-1].arguments == {"x": True}
    plan = compile_plan([[X_TO_OWN], [reader]], inputs=["x"], outputs=["y"], carries=["own"])
    assert plan.stages[0].steps[-1].arguments == {"x": True, "own": True}


def test_an_unread_input_is_a_warning() -> None:
    plan = compile_plan([[X_TO_Y]], inputs=["x", "mask"], outputs=["y"])
    assert plan.warnings == ("input 'mask' is read by no op",)


# ---------------------------------------------------------------- communication


def test_a_wait_in_the_stage_of_its_start_is_a_warning() -> None:
    plan = compile_plan([[X_TO_Y], [SEND, RECEIVE]], inputs=["x"], outputs=["y"])
    (warning,) = plan.warnings
    assert warning == (
        "layer 1, stage 0, receive: waits in the stage in which send starts, so nothing can hide the communication;"
        " put a YIELD between them"
    )


# A DeepSeek decode layer starts its dispatch in its stage 2 and ends its combine in stage 4, of 5. With offset 2 the
# second sub-batch starts (round 4) right after the first has ended. With offset 3 the first starts its next layer's
# dispatch (round 7) just before the second ends its combine in the same round; with offsets (2, 0) that is round 4.
@pytest.mark.parametrize(
    ("text", "sub_batches", "offset", "peak"),
    [
        (PREFILL, 1, 0, 1),
        (PREFILL, 2, 0, 2),
        (PREFILL, 3, 0, 3),
        (PREFILL, 2, 1, 2),
        (DEEPSEEK_DECODE, 1, 0, 1),
        (DEEPSEEK_DECODE, 2, 0, 2),
        (DEEPSEEK_DECODE, 2, 1, 2),
        (DEEPSEEK_DECODE, 2, 2, 1),
        (DEEPSEEK_DECODE, 2, 3, 2),
        (DEEPSEEK_DECODE, 2, (2, 0), 2),
        (DEEPSEEK_DECODE, 3, 2, 2),
        (DEEPSEEK_DECODE, 3, (0, 2, 2), 2),
        (QWEN_DECODE, 2, 2, 1),
        (QWEN_DECODE, 2, 0, 2),
        (QWEN_DECODE, 3, 1, 2),
    ],
)
def test_most_in_flight_over_all_sub_batches(
    text: str, sub_batches: int, offset: int | tuple[int, ...], peak: int
) -> None:
    plan = compiled(text, text, text, sub_batches=sub_batches, offset=offset, limits={"ep": peak})
    assert plan.in_flight == {"ep": peak}
    with pytest.raises(
        PlanError, match=f"puts {peak} communications in flight on channel 'ep', which holds {peak - 1}"
    ):
        compiled(text, text, text, sub_batches=sub_batches, offset=offset, limits={"ep": peak - 1})


@pytest.mark.parametrize("sub_batches", [1, 2, 3])
def test_in_sequence_one_is_in_flight(sub_batches: int) -> None:
    plan = compiled(PREFILL, DENSE, PREFILL, sub_batches=sub_batches, order="sequential", limits={"ep": 1})
    assert plan.in_flight == {"ep": 1}


def test_channels_are_counted_apart_even_where_handles_share_a_key() -> None:
    reduce_start = toy("reduce_start", ["x"], "sent", starts="tp")
    plan = compile_plan([[SEND, YIELD, RECEIVE], [reduce_start, YIELD, RECEIVE]], inputs=["x"], outputs=["y"])
    assert plan.in_flight == {"ep": 2, "tp": 2}
    plan = compile_plan(
        [[SEND, YIELD, RECEIVE, reduce_start, YIELD, RECEIVE]], inputs=["x"], outputs=["y"], limits={"ep": 2, "tp": 2}
    )
    assert plan.in_flight == {"ep": 2, "tp": 2}


# ---------------------------------------------------------------- fingerprints


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    """Ranks compare it, so it must not depend on hash seeds, addresses or the process."""
    plan = compile_plan([[SEND, YIELD, RECEIVE]], inputs=["x"], outputs=["y"])
    assert plan.fingerprint == 68642213746849368
    assert 0 <= plan.fingerprint < 1 << 56


def test_equal_plans_have_equal_fingerprints() -> None:
    assert compiled(PREFILL, DENSE).fingerprint == compiled(PREFILL, DENSE).fingerprint
    assert compiled(PREFILL, offset=0).fingerprint == compiled(PREFILL, offset=(0, 0)).fingerprint


OTHER_PLANS: dict[str, Callable[[], Plan]] = {
    "a layer fewer": lambda: compiled(PREFILL),
    "layers swapped": lambda: compiled(DENSE, PREFILL),
    "sparse for dense": lambda: compiled(PREFILL, PREFILL),
    "a third sub-batch": lambda: compiled(PREFILL, DENSE, sub_batches=3),
    "an offset": lambda: compiled(PREFILL, DENSE, offset=1),
    "in sequence": lambda: compiled(PREFILL, DENSE, order="sequential"),
    "a yield moved": lambda: compiled(PREFILL.replace("| shared", "shared |"), DENSE),
    "ops swapped": lambda: compiled(PREFILL.replace("shared combine_b", "combine_b shared"), DENSE),
}


@pytest.mark.parametrize("name", OTHER_PLANS)
def test_plans_that_differ_have_different_fingerprints(name: str) -> None:
    assert OTHER_PLANS[name]().fingerprint != compiled(PREFILL, DENSE).fingerprint


def test_the_channel_is_part_of_the_fingerprint() -> None:
    def plan(channel: str) -> Plan:
        start = toy("send", ["x"], "sent", starts=channel)
        return compile_plan([[start, YIELD, RECEIVE]], inputs=["x"], outputs=["y"])

    assert plan("ep").fingerprint != plan("tp").fingerprint


# ---------------------------------------------------------------- generated code


def test_layers_of_one_kind_share_their_generated_code() -> None:
    _compiled.cache_clear()
    calls = compiled(*[PREFILL] * 60).calls
    functions = {stage: function for _, function, stage in calls}
    assert len(functions) == 121
    # First stage, experts, seam between two layers, last stage.
    assert _compiled.cache_info().misses == 4
    assert len({function.__code__ for function in functions.values()}) == 4
    assert functions[1].__code__ is functions[119].__code__
    assert [function.__name__ for function in functions.values()][:2] == ["stage_0", "stage_1"]


def test_generated_code_of_a_stage_binds_its_own_ops() -> None:
    seen: list[str] = []
    first = toy("first", ["x"], "y", body=lambda _: seen.append("first"))
    second = toy("second", ["x"], "y", body=lambda _: seen.append("second"))
    for chosen in (first, second, first):
        plan = compile_plan([[chosen]], inputs=["x"], outputs=["y"], sub_batches=1)
        plan.calls[0][1]({"x": 1})
    assert seen == ["first", "second", "first"]
