"""Ranks that end at different times, or have nothing to do: each gets the plain model's tokens, and all of them end.

Nobody passes `synced_gpus`. A plain, unsharded copy of the model on the same rank says what each call must give.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig

import tbo
from ranks import Result, run_ranks
from tbo import Phase
from tbo.wrapping.handle import Handle
from tbo.wrapping.report import Mode
from tiny_models import VOCABULARY, build, token_batch
from wrapped_models import cache_argument
from wrapped_ranks import each, on_every_rank

RANKS = 3
NEW_TOKENS = 9
EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_routed_experts": 12},
    "qwen3_moe": {"num_experts": 6, "num_local_experts": 6},
}
"""Numbers of experts that three ranks can share."""


class Twins:
    """A wrapped model and its plain copy on one rank."""

    def __init__(self, plain: Any, model: Any, handle: Handle) -> None:
        self.plain = plain
        self.model = model
        self.handle = handle
        self.rank = dist.get_rank()

    def prompts(self, rows: int, positions: int, seed: int = 0) -> dict[str, Tensor]:
        ids, mask = token_batch(rows, positions, seed=100 * self.rank + seed)
        return {"input_ids": ids, "attention_mask": mask}

    def generate(self, inputs: dict[str, Tensor], **options: Any) -> Tensor:
        """Generates on the wrapped model; checked against the plain one."""
        config = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0} | options
        expected, actual = (self._generate(model, inputs, config) for model in (self.plain, self.model))
        assert actual.tolist() == expected.tolist()
        return actual

    @staticmethod
    def _generate(model: Any, inputs: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
        torch.manual_seed(7)
        tokens: Tensor = model.generate(**inputs, generation_config=GenerationConfig(**config))
        return tokens

    @torch.no_grad()
    def loop(self, inputs: dict[str, Tensor], steps: int) -> list[Phase]:
        """A hand-written greedy loop over `model(...)`, checked against the plain model; the phases all ranks ran."""
        phases = []
        taken: list[Tensor] = []
        for model in (self.plain, self.model):
            mask = inputs["attention_mask"]
            output = model(**inputs, use_cache=True)
            tokens = [output.logits[:, -1:].argmax(-1)]
            for _ in range(steps):
                if model is self.model:
                    phases.append(self._last_phase())
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
                cache = getattr(output, "cache", None) or output.past_key_values
                output = model(tokens[-1], attention_mask=mask, **cache_argument(model, cache))
                tokens.append(output.logits[:, -1:].argmax(-1))
            taken.append(torch.cat(tokens, dim=1))
        assert taken[0].tolist() == taken[1].tolist()
        return [*phases, self._last_phase()]

    def _last_phase(self) -> Phase:
        assert self.handle.last is not None
        return self.handle.last.phase


def end_tokens(twins: Twins, inputs: dict[str, Tensor], step: int) -> list[int]:
    """Tokens that end every row at or before a step of greedy generation."""
    plain = twins.plain.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return sorted(set(plain[:, inputs["input_ids"].shape[1] + step].tolist()))


def different_ends(twins: Twins) -> Any:
    """Rows, lengths and the step at which the last row meets its end differ."""
    inputs = twins.prompts(rows=(5, 2, 1)[twins.rank], positions=(6, 11, 3)[twins.rank])
    ends = end_tokens(twins, inputs, step=(1, 4, 7)[twins.rank])
    tokens = twins.generate(inputs, eos_token_id=ends)
    return tokens.shape[1] - inputs["input_ids"].shape[1]


def search_methods(twins: Twins) -> None:
    options: dict[str, Any] = (
        {"num_beams": 3, "max_new_tokens": 5},
        {"do_sample": True, "top_k": 20, "temperature": 1.3},
        {"max_new_tokens": 2},
    )[twins.rank]
    twins.generate(twins.prompts(rows=2, positions=5), **options)


def other_caches(twins: Twins) -> None:
    """A preallocated cache, speculation by looking in the prompt (which verifies several tokens), chunked prefill."""
    if twins.rank == 0:
        twins.generate(twins.prompts(3, 6), cache_implementation="static")
    elif twins.rank == 1:
        ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
        twins.generate(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, prompt_lookup_num_tokens=3, max_new_tokens=12
        )
    else:
        twins.generate(twins.prompts(2, 13), prefill_chunk_size=5)


def unequal_numbers_of_prompts(twins: Twins) -> Any:
    """Two rounds; in each, another rank has no prompt at all and only finishes."""
    served = []
    for counts in ((3, 1, 0), (0, 2, 1), (0, 0, 2)):
        for seed in range(counts[twins.rank]):
            twins.generate(twins.prompts(rows=1 + seed, positions=4 + seed, seed=seed), max_new_tokens=2 + seed)
        twins.handle.finish()
        assert twins.handle.last is not None
        served.append(twins.handle.last.mode is Mode.SERVED)
    return served


def loops_by_hand(twins: Twins) -> None:
    twins.loop(twins.prompts(rows=2, positions=7), steps=(0, 3, 7)[twins.rank])
    twins.handle.finish()


def prefill_beside_decode(twins: Twins) -> Any:
    """Rank 0 decodes while rank 1 starts prompt after prompt and rank 2 is idle."""
    phases: list[Phase] = []
    if twins.rank == 0:
        phases = twins.loop(twins.prompts(rows=4, positions=5), steps=5)
    elif twins.rank == 1:
        for seed in range(3):
            phases += twins.loop(twins.prompts(rows=2, positions=6, seed=seed), steps=1)
    twins.handle.finish()
    return [phase.name for phase in phases]


def empty_batches(twins: Twins) -> Any:
    """A call without rows is a step without tokens, also while all others only serve."""
    if twins.rank == 1:
        with torch.no_grad():
            for rows in (0, 2, 0):
                inputs = twins.prompts(rows, 4)
                logits = twins.model(**inputs, use_cache=False).logits
                expected = twins.plain(**inputs).logits if rows else logits.new_empty(0, 4, VOCABULARY)
                torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    twins.handle.finish()
    return twins._last_phase().name


SCENARIOS: dict[str, Callable[[Twins], Any]] = {
    scenario.__name__: scenario
    for scenario in (
        different_ends,
        search_methods,
        other_caches,
        unequal_numbers_of_prompts,
        loops_by_hand,
        prefill_beside_decode,
        empty_batches,
    )
}


def play(family: str, options: dict[str, Any]) -> dict[str, Any]:
    """Every scenario on this rank, each with groups of its own, so that one that breaks does not break the next."""
    plain, model = (build(family, **EXPERTS[family]) for _ in range(2))

    def scene(name: str) -> Any:
        handle = tbo.wrap(model, dist.group.WORLD, timeout=30, **options)
        try:
            return SCENARIOS[name](Twins(plain, model, handle))
        finally:
            handle.unwrap()

    return each(SCENARIOS, scene)


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "always": ("deepseek_v3", {"overlap": "always"}),
    "three sub-batches": ("qwen3_moe", {"overlap": "always", "sub_batches": 3}),
    "never": ("qwen3_moe", {"overlap": "never"}),
}

EXPECTED: dict[str, Callable[[list[Any]], bool]] = {
    # Every rank ended early, and not together.
    "different_ends": lambda new_tokens: max(new_tokens) < NEW_TOKENS and len(set(new_tokens)) > 1,
    "search_methods": lambda nothing: nothing == [None] * 3,
    "other_caches": lambda nothing: nothing == [None] * 3,
    # Whether a rank's last step of each round served others: it did unless its own prompts were the last to end.
    "unequal_numbers_of_prompts": lambda served: (
        served == [[False, True, True], [True, False, True], [True, True, False]]
    ),
    "loops_by_hand": lambda nothing: nothing == [None] * 3,
    "prefill_beside_decode": lambda phases: (
        phases[0] == phases[1] == ["PREFILL", "DECODE", "MIXED", "DECODE", "MIXED", "DECODE"] and phases[2] == []
    ),
    "empty_batches": lambda phases: phases == ["IDLE"] * 3,
}


@functools.cache
def played(setting: str) -> list[Result]:
    return run_ranks(RANKS, play, *SETTINGS[setting], timeout=140)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_rank_gets_the_plain_models_tokens(setting: str, scenario: str) -> None:
    results = on_every_rank(played(setting), scenario)
    assert EXPECTED[scenario](results), results
