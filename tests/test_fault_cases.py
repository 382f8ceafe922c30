"""Faults that users of other overlap systems met, each tried on this one.

Numbers are the rows of the project's list of public reports (SGLang, vLLM, ATOM, Megatron, DeepEP, UCCL). `TESTED` says
where each is tested: in the test file of the part it concerns or, where no other file has it, here and, on real ranks,
in test_fault_ranks.py. `NOT_YET` says which cannot be tried at this stage, and why.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tbo
from oracle import case, even_rows, expected_of_steps, hidden_of_steps, worst_difference
from tbo import Instrument, Phase
from tbo.batch import Reason
from tbo.core import Where
from tbo.errors import DispatcherError, PlanError, UnsupportedModelError
from tbo.models.layer import EXPERT_PARALLEL_CHANNEL, HuggingFaceLayer
from tbo.models.orders import default_schedules
from tbo.models.parts import find_decoder
from tbo.ops.dispatch import Limits
from tbo.ops.local import LocalDispatcher
from tbo.wrapping.plans import PlanBook
from tiny_models import build
from wrapped_models import hidden, report

HERE = "test_fault_cases.py"
RANKS = "test_fault_ranks.py"
STEPS = f"{RANKS}::test_a_step_of_four_ranks"
SHAPES = "test_random_shapes.py::test_a_hundred_shapes_on_four_ranks"
SOAK = "test_random_shapes.py::test_a_thousand_shapes_on_four_ranks"

TESTED: dict[int, tuple[str, ...]] = {
    # Batches and splits: what a part gets, and what it must not get.
    1: (
        "test_split.py::test_fault_1_reader_of_a_prefix_stays_with_its_writer",
        "test_split.py::test_fault_1_a_cut_that_separates_reader_and_writer_is_refused_by_name",
        "test_split.py::test_no_rule_separates_a_prefix_reader_from_its_writer",
    ),
    2: ("test_batch.py::test_fault_2_metadata_cached_for_one_half_is_never_found_for_the_other",),
    3: (
        "test_batch.py::test_fault_3_positions_of_a_sequence_cut_at_80",
        "test_wrap_token_split.py::test_a_prompt_in_parts_equals_chunked_prefill",
    ),
    7: (
        "test_split.py::test_faults_7_and_9_one_token_gives_an_explicit_empty_part",
        f"{HERE}::test_fault_7_one_token_in_two_sub_batches",
    ),
    9: ("test_vote.py::test_fault_9_ranks_with_1_7_300_and_300_tokens_take_part_with_what_they_have", STEPS),
    10: ("test_split.py::test_fault_10_unbalanced_lengths_and_a_batch_of_one", STEPS),
    12: (
        "test_batch.py::test_fault_12_a_field_without_a_mark_is_refused_where_it_is_defined",
        "test_wrap_refusals.py::test_a_tensor_argument_nobody_has_classified",
    ),
    17: (
        "test_batch.py::test_fault_17_each_half_gets_its_own_rows_of_the_block_table",
        f"{HERE}::test_faults_17_and_19_decode_of_every_batch_size",
    ),
    19: (f"{HERE}::test_faults_17_and_19_decode_of_every_batch_size",),
    22: (
        "test_split.py::test_fault_22_a_rank_without_requests",
        "test_batch.py::test_fault_22_starts_of_a_rank_without_requests",
        STEPS,
    ),
    30: (
        "test_split.py::test_fault_30_planned_counts_are_the_realised_ones",
        f"{HERE}::test_fault_30_what_ran_is_what_was_voted",
    ),
    # Models that a wrapper takes for something else.
    13: (f"{HERE}::test_fault_13_a_pipeline_stage_with_placeholders_is_refused",),
    14: ("test_wrap_refusals.py::test_an_unknown_layer_class_is_refused_with_what_is_known",),
    15: (
        "test_parts.py::test_a_decoder_inside_a_multimodal_or_peft_wrapper",
        "test_wrap_one_rank.py::test_a_vision_wrapper_whose_decoder_is_deeper_inside",
    ),
    16: (
        f"{HERE}::test_fault_16_a_layer_that_returns_more_than_hidden_states_is_refused",
        "test_wrap_outputs.py::test_recorded_outputs_are_the_plain_models",
    ),
    # Ranks that go different ways, and waits without an end.
    23: ("test_dispatchers.py::test_every_case_gives_the_exact_sum", STEPS),
    24: ("test_vote.py::test_faults_24_and_26_an_idle_rank_neither_vetoes_nor_asks_and_never_goes_its_own_way", STEPS),
    25: ("test_vote.py::test_fault_25_extend_on_one_rank_and_decode_on_another_is_one_mixed_step", STEPS),
    26: ("test_vote_properties.py::test_fault_26_overlap_needs_one_that_asks_and_none_that_objects", STEPS),
    27: (SHAPES, SOAK),
    28: (
        "test_dispatchers.py::test_sub_batches_in_flight_at_once_do_not_mix",
        "test_wrap_ranks.py::test_each_rank_equals_the_sequential_plan_exactly_and_the_plain_model_within_rounding",
        SHAPES,
    ),
    31: (
        "test_core_failure.py::test_each_op_of_each_sub_batch_is_named",
        "test_wrap_failures.py::test_every_rank_stops_and_names_rank_sub_batch_layer_op_and_cause",
    ),
    32: ("test_wrap_failures.py::test_every_rank_stops_and_names_rank_sub_batch_layer_op_and_cause",),
    38: (STEPS,),
    39: (SOAK,),
    # Buffers: their lifetime and size.
    33: (
        "test_core_ops.py::test_pending_holds_its_buffers_until_the_wait_and_no_longer",
        f"{RANKS}::test_fault_33_rows_dropped_after_their_launch_still_arrive",
    ),
    35: (f"{RANKS}::test_fault_35_nothing_is_left_of_steps_that_are_over",),
    42: (f"{HERE}::test_fault_42_three_sub_batches_on_a_channel_for_two",),
    43: (
        f"{HERE}::test_fault_43_a_step_that_is_not_split_must_fit_the_cap_too",
        f"{RANKS}::test_fault_43_every_rank_refuses_what_is_too_much_for_one",
    ),
    # Steps that do not gain, and switches that do not switch.
    51: ("test_vote.py::test_fault_51_tiny_prompts_do_not_overlap_and_say_why", STEPS),
    52: (STEPS,),
    53: (
        "test_vote.py::test_fault_53_under_512_tokens_a_rank_must_not_split",
        "test_vote.py::test_fault_53_one_rank_with_enough_tokens_is_enough",
    ),
    56: (
        "test_doctor.py::test_an_old_torch_is_not_healthy",
        "test_wrap_lifecycle.py::test_the_environment_turns_tbo_off",
        f"{HERE}::test_fault_56_off_is_off",
    ),
    57: (
        "test_wrap_refusals.py::test_options",
        "test_dispatchers.py::test_dispatchers_are_found_by_name_or_refused_by_name",
        "test_peers.py::test_a_rank_that_ended_with_an_error_outside_of_tbo_is_named_with_it",
    ),
}

NOT_YET: dict[int, str] = {
    34: "needs a second CUDA stream that outputs are allocated on: GPU lanes",
    40: "needs DeepEP over 16 GPUs: node runs; its kind, random shapes, is row 39",
    41: "needs captured CUDA graphs",
    44: "there is no profile run yet that could measure a split step only; the cap itself is row 43",
    45: "needs captured CUDA graphs",
    47: "needs the persistent buffers of captured CUDA graphs",
    50: "needs captured CUDA graphs; that padding rows reach no expert is tested in test_dispatchers.py",
    54: "a matter of measured gain: the policy with a cost model; until then decode is off and prefill has a threshold",
}

ROWS = frozenset([*range(1, 58)]) - {4, 5, 6, 8, 11, 18, 20, 21, 29, 36, 37, 46, 48, 49, 55}
"""Numbers the list has; the missing ones were reports that turned out not to be faults of overlap."""


def test_every_row_is_tested_or_said_to_be_impossible_yet() -> None:
    assert TESTED.keys() | NOT_YET.keys() == ROWS
    assert not TESTED.keys() & NOT_YET.keys()


@pytest.mark.parametrize("row", TESTED)
def test_the_tests_named_exist(row: int) -> None:
    for reference in TESTED[row]:
        file, name = reference.split("::")
        tree = ast.parse((Path(__file__).parent / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, reference


# One rank: batches and splits


def test_fault_7_one_token_in_two_sub_batches() -> None:
    model = build("qwen3_moe")
    token = torch.tensor([[5]])
    expected = hidden(model, token)
    handle = tbo.wrap(model, overlap="always")
    assert torch.equal(hidden(model, token), expected)
    assert report(handle).tokens_per_sub_batch == (1, 0)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 32])
def test_faults_17_and_19_decode_of_every_batch_size(batch_size: int) -> None:
    """Every row has a prompt of its own, so that a row that reads another's cache shows."""
    model = build("qwen3_moe")
    ids, mask, following = case(batch_size, positions=6, decode_steps=3)
    expected = expected_of_steps(model, ids, mask, following, even_rows(batch_size, 2))
    handle = tbo.wrap(model, overlap="always")
    difference = worst_difference(hidden_of_steps(model, ids, mask, following), expected, mask)
    assert difference <= (4e-6 if batch_size == 1 else 0)  # one row's prompt is cut between tokens, the oracle's is not
    assert report(handle).engaged
    assert report(handle).phase is Phase.DECODE
    assert report(handle).tokens_per_sub_batch == ((batch_size + 1) // 2, batch_size // 2)


class CountRows(Instrument):
    """Tokens that each sub-batch's router saw, by layer."""

    def __init__(self) -> None:
        self.seen: dict[int, set[int]] = {}

    def after_op(self, where: Where, state: Mapping[str, Any]) -> None:
        if where.op == "op_select_experts":
            self.seen.setdefault(where.sub_batch, set()).add(len(state["topk_ids"]))


@pytest.mark.parametrize("sub_batches", [2, 3])
@pytest.mark.parametrize(("rows", "length"), [(1, 13), (5, 4), (2, 1), (7, 3)])
def test_fault_30_what_ran_is_what_was_voted(rows: int, length: int, sub_batches: int) -> None:
    model = build("qwen3_moe")
    counted = CountRows()
    handle = tbo.wrap(model, overlap="always", sub_batches=sub_batches, instruments=[counted])
    hidden(model, torch.full((rows, length), 5))
    last = report(handle)
    assert last.votes[0].rows == last.tokens_per_sub_batch
    assert counted.seen == {index: {count} for index, count in enumerate(last.tokens_per_sub_batch)}


# One rank: models


def test_fault_13_a_pipeline_stage_with_placeholders_is_refused() -> None:
    model: Any = build("qwen3_moe")
    model.model.layers[0] = nn.Identity()
    with pytest.raises(UnsupportedModelError, match="Identity"):
        tbo.wrap(model)


def test_fault_16_a_layer_that_returns_more_than_hidden_states_is_refused() -> None:
    model: Any = build("qwen3_moe")
    kind = type(model.model.layers[2])

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, list[Tensor]]:
        return kind.forward(self, hidden_states, **kwargs), [hidden_states]

    model.model.layers[2].__class__ = type("WithAuxiliaryStates", (kind,), {"forward": forward})
    with pytest.raises(UnsupportedModelError, match="WithAuxiliaryStates"):
        tbo.wrap(model)


# One rank: buffers and switches


def book(limit: int, order: Any = "interleaved") -> PlanBook:
    decoder = find_decoder(build("qwen3_moe"))
    layers = [HuggingFaceLayer(layer, decoder.config) for layer in decoder.layers]
    schedules = default_schedules(has_shared_experts=False)
    return PlanBook(layers, schedules, sub_batches=3, order=order, limits={EXPERT_PARALLEL_CHANNEL: limit})


def test_fault_42_three_sub_batches_on_a_channel_for_two() -> None:
    """Refused, with the remedy; one after another they fit."""
    with pytest.raises(PlanError, match="puts 3 communications in flight on channel 'ep', which holds 2"):
        book(2)
    book(3)
    book(1, order="sequential")


def test_fault_43_a_step_that_is_not_split_must_fit_the_cap_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 tokens in each of two sub-batches fit a cap of 128, the same 200 un-split do not."""
    monkeypatch.setattr(LocalDispatcher, "limits", Limits(channel=EXPERT_PARALLEL_CHANNEL, max_tokens=128))
    model = build("qwen3_moe")
    ids = torch.full((20, 10), 5)
    counted = CountRows()
    handle = tbo.wrap(model, overlap="always", instruments=[counted])
    hidden(model, ids)
    assert counted.seen == {0: {100}, 1: {100}}
    counted.seen.clear()
    with pytest.raises(DispatcherError) as caught:
        hidden(model, ids, output_hidden_states=True)
    assert str(caught.value) == (
        "rank 0 has 200 tokens in a step that is not split (not overlapped: rank 0 (tokens per sub-batch: [100, 100]):"
        " hidden states, router logits or attentions are captured layer by layer in this call), and the dispatcher"
        " takes 128 at once. Use smaller batches on that rank, or a dispatcher that takes more."
    )
    assert counted.seen == {}
    hidden(model, ids)
    assert report(handle).engaged


@pytest.mark.parametrize("off", ["overlap='never'", "TBO_DISABLE=1"])
def test_fault_56_off_is_off(off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if off == "TBO_DISABLE=1":
        monkeypatch.setenv("TBO_DISABLE", "1")
    model = build("qwen3_moe")
    ids = torch.full((8, 100), 5)
    expected = hidden(model, ids)
    trace = tbo.Trace()
    handle = tbo.wrap(
        model,
        overlap="always" if off == "TBO_DISABLE=1" else "never",
        thresholds=tbo.Thresholds(prefill_min_tokens_per_sub_batch=1, decode=True),
        instruments=[trace],
    )
    assert torch.equal(hidden(model, ids), expected)
    assert trace.ops == []
    assert handle.last is None or (not handle.last.engaged and handle.last.reason is Reason.POLICY_NEVER)
    assert off in handle.explain()
