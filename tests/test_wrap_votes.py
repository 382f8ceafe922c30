"""What ranks agree on: one overlapped step or none, equal settings, one group, and experts spread over exactly it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tbo
from ranks import Result, run_ranks
from tbo import Phase
from tbo.batch import Overlap
from tbo.errors import RanksDisagreeError, UserError, WrapError
from tbo.models.expert_parallel import shard_experts
from tbo.models.orders import PREFILL
from tiny_models import build, token_batch
from wrapped_ranks import each, on_every_rank

RANKS = 4


def step(
    *, rows: int = 3, captured: bool = False, hooked: bool = False, overlap: Overlap = "always"
) -> tuple[str, tbo.StepReport]:
    """One prefill of a freshly wrapped model, checked against the plain one: the explanation and the report."""
    model: Any = build("qwen3_moe")
    ids, mask = token_batch(rows, 8, seed=dist.get_rank())
    expected = model(ids, attention_mask=mask, output_hidden_states=True)
    fired: list[int] = []
    if hooked:
        model.model.layers[2].register_forward_hook(lambda *_: fired.append(1))
    handle = tbo.wrap(model, dist.group.WORLD, timeout=30, overlap=overlap)
    fired.clear()  # wrapping runs a probe through the layers
    try:
        actual = model(ids, attention_mask=mask, output_hidden_states=captured)
        assert fired == [1] * hooked
        difference = (actual.logits - expected.logits)[mask.bool()].abs().max()
        if captured:
            for one, other in zip(actual.hidden_states, expected.hidden_states, strict=True):
                assert (one - other)[mask.bool()].abs().max() < 1e-5
        assert difference < 2e-5
        assert handle.last is not None
        return tbo.explain(model), handle.last
    finally:
        handle.unwrap()


def vetoed(**options: Any) -> tuple[str, str, list[tuple[int, ...]], str]:
    """A step in which rank 2 alone has these options, and rank 3 a single row."""
    rank = dist.get_rank()
    text, report = step(**(options if rank == 2 else {}), rows=1 if rank == 3 else 3)
    assert not report.engaged
    assert report.reason_rank == 2
    return report.reason.name, report.mode.name, [vote.rows for vote in report.votes], text


def rank_captures() -> Any:
    return vetoed(captured=True)


def rank_has_hooks() -> Any:
    return vetoed(hooked=True)


def rank_never_overlaps() -> Any:
    return vetoed(overlap="never")


def one_rank_asks() -> Any:
    """Three ranks leave it to the thresholds, which say no; the fourth asks, and all overlap."""
    _, report = step(overlap="always" if dist.get_rank() == 1 else "auto")
    return report.engaged, report.reason.name, [vote.wants.name for vote in report.votes]


def nobody_asks() -> Any:
    text, report = step(overlap="auto")
    return report.engaged, report.reason.name, report.reason_rank, "too few tokens" in text


def idle_ranks_do_not_veto() -> Any:
    """Ranks 0 and 3 have nothing to do, and serve an overlapped step with two empty sub-batches."""
    rank = dist.get_rank()
    handle = tbo.wrap(build("deepseek_v3"), dist.group.WORLD, timeout=30, overlap="always")
    if rank in (1, 2):
        ids, mask = token_batch(2, 5, seed=rank)
        handle.model(ids, attention_mask=mask)
    handle.finish()
    report = handle.last
    handle.unwrap()
    assert report is not None
    return report.engaged, report.mode.name, report.phase.name, [vote.rows for vote in report.votes]


def disagreement(**options: Any) -> str:
    """What a rank reads if rank 1 wraps otherwise than the others."""
    family_options = {key: options.pop(key) for key in ("num_experts_per_tok", "dtype") if key in options}
    ours = dist.get_rank() == 1
    model: Any = build("mixtral", **(family_options if ours else {}))
    ids, _ = token_batch(3, 8)

    def wrap_and_step() -> None:
        tbo.wrap(model, dist.group.WORLD, timeout=30, **(options if ours else {}))
        model(ids)

    with pytest.raises(RanksDisagreeError) as error:
        wrap_and_step()
    return str(error.value)


def other_sub_batches() -> Any:
    return disagreement(sub_batches=3)


def other_configuration() -> Any:
    return disagreement(num_experts_per_tok=1)


def other_dtype() -> Any:
    return disagreement(dtype=torch.bfloat16)


def other_order() -> Any:
    return disagreement(order="sequential")


def other_schedule() -> Any:
    """Only the plans differ, which the first vote finds."""
    return disagreement(schedules={Phase.DECODE: PREFILL}, sub_batches=2)


def part_of_the_world() -> Any:
    """Ranks 1 and 3 share experts; 0 and 2 are not in their group, and their models stay their own."""
    rank = dist.get_rank()
    group: Any = dist.new_group([1, 3])
    model: Any = build("mixtral")
    ids, mask = token_batch(2 + rank, 7, seed=rank)
    expected = model(ids, attention_mask=mask).logits
    if rank in (0, 2):
        with pytest.raises(WrapError, match="not a process group this rank belongs to"):
            tbo.wrap(model, group)
        assert torch.equal(model(ids, attention_mask=mask).logits, expected)
        return None
    handle = tbo.wrap(model, group, timeout=30, overlap="always")
    actual = model(ids, attention_mask=mask).logits
    handle.finish()
    assert (actual - expected)[mask.bool()].abs().max() < 2e-5
    assert handle.last is not None
    votes, held = len(handle.last.votes), model.model.layers[0].mlp.experts.num_experts
    handle.unwrap()
    with pytest.raises(WrapError, match=r"holds experts \d to \d of 8: the model's own forward would compute"):
        model(ids, attention_mask=mask)
    return votes, held


def refused(model: Any) -> str:
    """What wrapping says where it must be refused; the cases after it show that the ranks can still wrap another."""
    with pytest.raises(UserError) as error:
        tbo.wrap(model, dist.group.WORLD, timeout=30)
    return str(error.value)


def experts_that_cannot_be_shared() -> Any:
    return refused(build("mixtral", num_local_experts=6))


def more_ranks_than_experts() -> Any:
    return refused(build("mixtral", num_local_experts=2))


def sharded_over_another_number() -> Any:
    model = build("mixtral")
    shard_experts(model, rank=dist.get_rank() % 2, world_size=2)
    return refused(model)


def sharded_in_another_order() -> Any:
    model = build("mixtral")
    shard_experts(model, rank=RANKS - 1 - dist.get_rank(), world_size=RANKS)
    return refused(model)


CASES: dict[str, Callable[[], Any]] = {
    case.__name__: case
    for case in (
        rank_captures,
        rank_has_hooks,
        rank_never_overlaps,
        one_rank_asks,
        nobody_asks,
        idle_ranks_do_not_veto,
        other_sub_batches,
        other_configuration,
        other_dtype,
        other_order,
        other_schedule,
        part_of_the_world,
        experts_that_cannot_be_shared,
        more_ranks_than_experts,
        sharded_over_another_number,
        sharded_in_another_order,
    )
}


@torch.no_grad()
def play() -> dict[str, Any]:
    return each(CASES, lambda name: CASES[name]())


@functools.cache
def played() -> list[Result]:
    return run_ranks(RANKS, play, timeout=110)


def alike(case: str) -> Any:
    """What every rank of a case found, which must be the same."""
    first, *others = on_every_rank(played(), case)
    assert others == [first] * (RANKS - 1)
    return first


pytestmark = pytest.mark.timeout(120)
ROWS_OF_RANKS = [(16, 8), (16, 8), (16, 8), (4, 4)]


@pytest.mark.parametrize(
    ("case", "reason", "words"),
    [
        ("rank_captures", "OUTPUTS_CAPTURED", "rank 2: hidden states, router logits or attentions are captured"),
        ("rank_has_hooks", "LAYER_HOOKS", "rank 2: a layer has hooks"),
        ("rank_never_overlaps", "POLICY_NEVER", "rank 2: overlap='never' was asked for"),
    ],
)
def test_one_rank_keeps_all_from_overlapping_and_every_report_names_it(case: str, reason: str, words: str) -> None:
    results = on_every_rank(played(), case)
    for rank, (code, mode, rows, text) in enumerate(results):
        assert code == reason
        assert rows == ROWS_OF_RANKS
        assert words in text
        # Only the rank whose layers must finish one by one runs them so; the others run the same ops as one plan.
        assert mode == ("INLINE" if rank == 2 and case != "rank_never_overlaps" else "DEFERRED")


def test_one_rank_that_asks_is_enough_and_without_any_the_reason_is_told() -> None:
    assert alike("one_rank_asks") == (True, "NONE", ["IF_OTHERS", "YES", "IF_OTHERS", "IF_OTHERS"])
    assert alike("nobody_asks") == (False, "TOO_FEW_TOKENS", 0, True)


def test_idle_ranks_do_not_veto_and_run_empty_sub_batches() -> None:
    rows = [(0, 0), (5, 5), (5, 5), (0, 0)]
    modes = ("SERVED", "DEFERRED", "DEFERRED", "SERVED")
    assert on_every_rank(played(), "idle_ranks_do_not_veto") == [(True, mode, "PREFILL", rows) for mode in modes]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other_sub_batches", "sub_batches is 2 on ranks 0, 2, 3, 3 on rank 1"),
        ("other_configuration", "num_experts_per_tok is 2 on ranks 0, 2, 3, 1 on rank 1"),
        ("other_dtype", "dtype is torch.float32 on ranks 0, 2, 3, torch.bfloat16 on rank 1"),
        ("other_order", "order is interleaved on ranks 0, 2, 3, sequential on rank 1"),
        ("other_schedule", "ranks disagree on the compiled plans (ranks 0, 2, 3: "),
    ],
)
def test_ranks_that_differ_are_told_so_on_every_rank(case: str, words: str) -> None:
    assert words in alike(case)


def test_a_group_that_is_part_of_the_world() -> None:
    assert on_every_rank(played(), "part_of_the_world") == [None, (2, 4), None, (2, 4)]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("experts_that_cannot_be_shared", "6 experts cannot be shared equally by the 4 ranks"),
        ("more_ranks_than_experts", "2 experts cannot be shared equally by the 4 ranks"),
        (
            "sharded_over_another_number",
            "the model holds the experts of rank {half} of 2, but this is rank {rank} of 4",
        ),
        ("sharded_in_another_order", "the model holds the experts of rank {last} of 4, but this is rank {rank} of 4"),
    ],
)
def test_experts_that_do_not_fit_the_group_are_refused(case: str, words: str) -> None:
    for rank, message in enumerate(on_every_rank(played(), case)):
        assert words.format(rank=rank, half=rank % 2, last=RANKS - 1 - rank) in message
