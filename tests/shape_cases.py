"""One step on four ranks, each with a batch of its own shape, phase and routing, against the plain model.

Models are wrapped once for each of `SETTINGS`, and serve all cases of a start of processes. In each case every rank's
outputs must be the plain model's, all ranks must agree on what the step was, and all must start the same collectives
in the same order, though they sleep at random between ops.

A case that hangs ends its rank after `CASE_SECONDS`, with every thread's stack and the case in the rank's output.
"""

from __future__ import annotations

import copy
import faulthandler
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import DynamicCache

import tbo
from ranks import run_ranks, values
from tbo.wrapping.handle import Handle
from tiny_models import NUM_EXPERTS, VOCABULARY, build
from wrapped_models import cache_argument
from wrapped_ranks import random_sleeps, record_exchanges

WORLD_SIZE = 4
CASE_SECONDS = 20.0
TOLERANCE = 6e-6
"""Largest absolute difference to the plain model in fp32, of hidden values up to 5. Measured over 1,000 cases: 3.0e-6.
Experts see rows of other ranks, attention other rows than in the plain model, and products round by their rows."""
LEAST_MARGIN = 2e-5
"""Tokens are drawn anew if the plain router nearly chose another expert: there, rounding decides."""

PHASES = ("prefill", "decode", "verify")
ROUTINGS = ("the router's own", "one rank", "one expert", "the next rank", "doubled")
SETTINGS: tuple[dict[str, Any], ...] = (
    {"family": "qwen3_moe", "sub_batches": 1, "overlap": "always"},
    {"family": "qwen3_moe", "sub_batches": 2, "overlap": "always"},
    {
        "family": "qwen2_moe",
        "sub_batches": 2,
        "overlap": "auto",
        "thresholds": tbo.Thresholds(prefill_min_tokens_per_sub_batch=50),
    },
    {"family": "qwen2_moe", "sub_batches": 3, "overlap": "always"},
)
"""What is wrapped once and then serves many cases. Qwen2 has a dense first layer and shared experts."""
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 2, "mlp_only_layers": []},
    "qwen2_moe": {"num_hidden_layers": 3, "mlp_only_layers": [0]},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One rank's part of a case.

    Attributes:
        phase: of `PHASES`, or "idle".
        rows, length: of the batch; a decode step has length 1.
        past: positions in the cache before it.
        layout: "padded" rows, "one row", or a "packed" row of several sequences; how an idle rank takes part.
        routing: of `ROUTINGS`.
        captured: asks for hidden states, so that its layers run one by one and nobody overlaps.
    """

    phase: str
    rows: int
    length: int
    past: int
    layout: str
    routing: str
    captured: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One step of all ranks. Equal numbers give equal tokens."""

    name: str
    number: int
    setting: int
    shares: tuple[Share, ...]

    def __str__(self) -> str:
        shares = "".join(f"\n  rank {rank}: {share}" for rank, share in enumerate(self.shares))
        return f"{self.name}: {SETTINGS[self.setting]}{shares}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """A case on one rank.

    Attributes:
        difference: to the plain model, the largest.
        exchanges: one letter for each collective, see `record_exchanges`.
        agreed: engaged, phase, reason and votes, as this rank knows them.
        split: the rule that cut its batch, or "none".
        tokens: its tokens in each sub-batch.
        said: the step's report as text.
    """

    case: Case
    difference: float
    exchanges: str
    agreed: tuple[Any, ...]
    split: str
    tokens: tuple[int, ...]
    said: str


class Routing:
    """A hook on every router, of the plain and the wrapped model: sends tokens elsewhere, and watches the margin."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.kind = ROUTINGS[0]
        self.number = 0
        self.margin = float("inf")

    def __call__(self, _module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits_TE, weights_TK, ids_TK = output
        top = logits_TE.topk(ids_TK.shape[1] + 1, dim=-1).values
        if len(top) > 0 and self.kind in (ROUTINGS[0], "doubled"):
            self.margin = min(self.margin, float((top[:, :-1] - top[:, 1:]).min()))
        return logits_TE, weights_TK, self._redirected(ids_TK)

    def _redirected(self, ids_TK: Tensor) -> Tensor:
        experts = NUM_EXPERTS // WORLD_SIZE
        if self.kind == "one rank":
            return self.number % WORLD_SIZE * experts + torch.arange(ids_TK.shape[1]).expand_as(ids_TK) % experts
        if self.kind == "the next rank":
            return (self._rank + 1) % WORLD_SIZE * experts + torch.arange(ids_TK.shape[1]).expand_as(ids_TK) % experts
        if self.kind == "one expert":
            return torch.full_like(ids_TK, self.number % NUM_EXPERTS)
        if self.kind == "doubled":
            return ids_TK[:, :1].expand_as(ids_TK).contiguous()
        return ids_TK


class Subject:
    """One rank's wrapped models, and the plain ones beside them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._routing = Routing(rank)
        self._plain = {family: self._build(family) for family in SIZES}
        self._wrapped = [self._build(setting["family"]) for setting in SETTINGS]
        self._handles: list[Handle] = []
        for model, setting in zip(self._wrapped, SETTINGS, strict=True):
            options = {name: value for name, value in setting.items() if name != "family"}
            sleeps = random_sleeps(rank, longest=1e-4)
            self._handles.append(tbo.wrap(model, dist.group.WORLD, timeout=15, instruments=sleeps, **options))
        self._exchanges = [record_exchanges(handle) for handle in self._handles]

    def _build(self, family: str) -> Any:
        model = build(family, max_position_embeddings=512, **SIZES[family])
        routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
        for router in routers:
            router.register_forward_hook(self._routing)
        return model

    def run(self, case: Case) -> Ran:
        share = case.shares[self._rank]
        self._routing.kind, self._routing.number = share.routing, case.number
        handle, model, started = self._handles[case.setting], self._wrapped[case.setting], self._exchanges[case.setting]
        started.clear()
        difference = 0.0
        if share.layout == "serves":
            assert handle._runner is not None
            outcome = handle._runner.serve(finished=False)
            agreed: tuple[Any, ...] = (outcome.engaged, outcome.phase, outcome.reason, outcome.votes)
        elif share.phase == "idle":
            output = model.model(torch.zeros(0, share.length, dtype=torch.long), use_cache=False)
            assert output.last_hidden_state.shape[:2] == (0, share.length)
            agreed = _agreed(handle)
        else:
            call, plain_call, valid, expected = self._reference(case, share)
            output = model.model(**call, output_hidden_states=share.captured)
            difference = _difference(output.last_hidden_state[valid], expected.last_hidden_state[valid])
            if share.captured:
                pairs = zip(output.hidden_states, expected.hidden_states, strict=True)
                difference = max([difference, *(_difference(one[valid], other[valid]) for one, other in pairs)])
            if share.past:
                difference = max(difference, _cache_difference(call, plain_call))
            agreed = _agreed(handle)
        last = handle.last
        return Ran(
            case=case,
            difference=difference,
            exchanges="".join(started),
            agreed=agreed,
            split="none" if share.layout == "serves" or last is None else last.split,
            tokens=() if last is None else last.tokens_per_sub_batch,
            said=str(last),
        )

    def _reference(self, case: Case, share: Share) -> tuple[dict[str, Any], dict[str, Any], Tensor, Any]:
        """Arguments for the wrapped and for the plain model, which positions count, and what the plain one gives."""
        plain = self._plain[SETTINGS[case.setting]["family"]]
        for attempt in range(100):
            generator = torch.Generator().manual_seed(1000 * case.number + 100 * self._rank + attempt)
            call, valid = _arguments(plain, share, generator)
            plain_call = copy.deepcopy(call)
            self._routing.margin = float("inf")
            expected = plain.model(**plain_call, output_hidden_states=share.captured)
            if self._routing.margin > LEAST_MARGIN:
                return call, plain_call, valid, expected
        raise AssertionError("no tokens were found whose routing is clear")


def _arguments(plain: Any, share: Share, generator: torch.Generator) -> tuple[dict[str, Any], Tensor]:
    rows, length, past = share.rows, share.length, share.past
    ids = torch.randint(3, VOCABULARY, (rows, past + length), generator=generator)
    mask = torch.ones_like(ids)
    if share.layout == "packed":
        ends = sorted(torch.randint(1, length + 1, (3,), generator=generator).tolist())
        sizes = [end - start for start, end in zip([0, *ends], [*ends, length], strict=True) if end > start]
        positions = torch.cat([torch.arange(size) for size in sizes])[None]
        return {"input_ids": ids, "position_ids": positions, "use_cache": False}, mask.bool()
    padding = torch.randint(0, max(1, (past or length) // 2) + 1, (rows, 1), generator=generator)
    if rows > 1 and past + length > 1:
        mask = (torch.arange(past + length)[None] >= padding).long()
    cache = DynamicCache(config=plain.config)
    if past:
        plain.model(ids[:, :past], attention_mask=mask[:, :past], **cache_argument(plain.model, cache))
    call = {"input_ids": ids[:, past:], "attention_mask": mask, **cache_argument(plain.model, cache)}
    return call, mask[:, past:].bool()


def _difference(actual: Tensor, expected: Tensor) -> float:
    difference = (actual - expected).abs()
    assert bool(difference.isfinite().all()), "an output is not a number"
    return float(difference.max()) if difference.numel() else 0.0


def _cache_difference(call: dict[str, Any], plain_call: dict[str, Any]) -> float:
    """Over the values that this step has written."""
    written = call["input_ids"].shape[1]

    def values_of(arguments: dict[str, Any]) -> Tensor:
        layers: Any = next(value for value in arguments.values() if isinstance(value, DynamicCache)).layers
        return torch.stack([layer.values[:, :, -written:] for layer in layers])

    return _difference(values_of(call), values_of(plain_call))


def _agreed(handle: Handle) -> tuple[Any, ...]:
    assert handle.last is not None
    return handle.last.engaged, handle.last.phase, handle.last.reason, handle.last.votes


@contextmanager
def bounded(case: Case, seconds: float = CASE_SECONDS) -> Iterator[None]:
    """Ends this process if the case takes too long, and puts the case into whatever it raises."""

    def expired() -> NoReturn:
        print(f"rank {dist.get_rank()}: not over after {seconds} s: {case}", file=sys.stderr, flush=True)  # noqa: T201
        faulthandler.dump_traceback(file=sys.stderr)
        os._exit(3)

    watchdog = threading.Timer(seconds, expired)
    watchdog.start()
    try:
        yield
    except Exception as error:
        error.add_note(str(case))
        raise
    finally:
        watchdog.cancel()


@torch.no_grad()
def run_cases(cases: Sequence[Case]) -> list[Ran]:
    subject = Subject(dist.get_rank())
    ran = []
    for case in cases:
        with bounded(case):
            ran.append(subject.run(case))
    return ran


def check(cases: Sequence[Case], timeout: float) -> list[list[Ran]]:
    """Runs the cases in one start of processes; each case's results by rank, all of them right."""
    by_rank: list[list[Ran]] = values(run_ranks(WORLD_SIZE, run_cases, cases, timeout=timeout))
    by_case = [list(ranks) for ranks in zip(*by_rank, strict=True)]
    for ranks in by_case:
        said = f"{ranks[0].case}\n{[(one.difference, one.exchanges, one.agreed[:3]) for one in ranks]}"
        assert all(one.difference <= TOLERANCE for one in ranks), said
        assert all(one.exchanges == ranks[0].exchanges for one in ranks), said
        assert all(one.agreed == ranks[0].agreed for one in ranks), said
    return by_case
