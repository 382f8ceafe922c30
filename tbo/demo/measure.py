"""Runs one rank's questions in three ways and times the steps: plain, the same ops not overlapped, overlapped.

The three take turns, so that a machine that slows down or speeds up in between does so for all. The model whose experts
are spread over the ranks therefore shares all other weights with a plain one that keeps every expert.

Shapes: B questions, S positions.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tbo
from tbo.demo.messages import StepTime, Variant, VariantResult
from tbo.demo.model import Prepared
from tbo.demo.options import DemoOptions
from tbo.demo.weights import Report

ROUNDS = 2
"""How often the three variants take turns."""

WARM_UPS = 1
LastReport = Callable[[], tbo.StepReport | None]
"""What the last step of a wrapped model did; None for a plain one."""

RANK_TIMEOUT = 240.0
"""Seconds a rank may be silent inside the wrapped model before its peers name it and stop."""


def run_variants(prepared: Prepared, options: DemoOptions, report: Report) -> tuple[VariantResult, ...]:
    """Answers and times everything on this rank; all ranks call it together.

    Raises:
        TboError: whatever `tbo.wrap` or a step raises.
    """
    tokens: dict[Variant, tuple[tuple[int, ...], ...]] = {}
    steps: dict[Variant, list[StepTime]] = {variant: [] for variant in Variant}
    plain = _Rounds(_sharing_weights(prepared.model), prepared, options, report)
    wrapped = _Rounds(prepared.model, prepared, options, report)

    def visit(variant: Variant, rounds: _Rounds, last: LastReport) -> None:
        if variant not in tokens or options.phase == "decode":
            answers, decode_steps = rounds.generate(variant, last)
            tokens.setdefault(variant, answers)
            if options.phase == "decode":
                steps[variant] += decode_steps
        if options.phase == "prefill":
            steps[variant] += rounds.prefill(variant, last)

    link = tbo.Link(options.link_gbps, latency=options.link_latency_us * 1e-6)
    for _ in range(ROUNDS):
        visit(Variant.PLAIN, plain, lambda: None)
        for variant in (Variant.NEVER, Variant.ALWAYS):
            report(f"{variant}: wrapping", 0, None)
            with tbo.wrap(
                prepared.model,
                dist.group.WORLD,
                sub_batches=options.sub_batches,
                overlap="always" if variant is Variant.ALWAYS else "never",
                link=link,
                timeout=RANK_TIMEOUT,
            ) as handle:
                visit(variant, wrapped, lambda handle=handle: handle.last)  # type: ignore[misc]
    return tuple(
        VariantResult(variant=variant, tokens=tokens[variant], steps=tuple(steps[variant])) for variant in Variant
    )


def _sharing_weights(model: Any) -> Any:
    """A copy of a model on the same weights in memory. Sharding the original later leaves the copy whole."""
    same_memory: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.data, requires_grad=False) for parameter in model.parameters()
    }
    return copy.deepcopy(model, same_memory)


class _Rounds:
    """One rank's questions, asked again and again."""

    def __init__(self, model: Any, prepared: Prepared, options: DemoOptions, report: Report) -> None:
        self._model = model
        self._prepared = prepared
        self._options = options
        self._report = report
        self._inputs = {"input_ids": prepared.input_ids, "attention_mask": prepared.attention_mask}

    def generate(self, variant: Variant, last: LastReport) -> tuple[tuple[tuple[int, ...], ...], list[StepTime]]:
        """The answers' tokens, and the time of each step after the prompt's."""
        clock = _StepClock(lambda done: self._report(f"{variant}: answering", done, self._options.max_new_tokens), last)
        dist.barrier()
        with torch.no_grad():
            sequences_BS = self._model.generate(
                **self._inputs,
                max_new_tokens=self._options.max_new_tokens,
                do_sample=False,
                pad_token_id=self._prepared.pad_token_id,
                streamer=clock,
            )
        answers_BS = sequences_BS[:, self._prepared.input_ids.shape[1] :]
        end = self._model.generation_config.eos_token_id
        return tuple(_until_end(row, end) for row in answers_BS.tolist()), clock.steps[1:]

    def prefill(self, variant: Variant, last: LastReport) -> list[StepTime]:
        """The time of the prompts' step, repeated; the ranks begin each together."""
        steps = []
        repetitions = self._options.repetitions
        for repetition in range(WARM_UPS + repetitions):
            self._report(f"{variant}: timing prefill", max(0, repetition - WARM_UPS), repetitions)
            dist.barrier()
            began = time.perf_counter()
            with torch.no_grad():
                self._model(**self._inputs, logits_to_keep=1)
            steps.append(_step_time(time.perf_counter() - began, last()))
        return steps[WARM_UPS:]


class _StepClock:
    """Given to `generate` as its streamer: told of the prompt first, then of each step's tokens."""

    def __init__(self, report: Callable[[int], None], last: LastReport) -> None:
        self.steps: list[StepTime] = []
        self._report = report
        self._last = last
        self._before: float | None = None

    def put(self, value: Tensor) -> None:
        """Called by `generate`."""
        now = time.perf_counter()
        if self._before is not None:
            self.steps.append(_step_time(now - self._before, self._last()))
        self._report(len(self.steps))
        self._before = time.perf_counter()

    def end(self) -> None:
        """Called by `generate`."""


def _step_time(seconds: float, report: tbo.StepReport | None) -> StepTime:
    if report is None:
        return StepTime(seconds=seconds)
    note = "" if report.engaged else report.reason.text
    return StepTime(seconds=seconds, link_seconds=report.communication_seconds, hidden=report.hidden_share, note=note)


def _until_end(tokens: Sequence[int], end: int) -> tuple[int, ...]:
    """Up to and with the end token; what follows is padding."""
    return tuple(tokens[: tokens.index(end) + 1]) if end in tokens else tuple(tokens)
