"""One step of a wrapped model: decide, record the layers' calls, cut, run, merge.

The model's own forward still builds embeddings, masks, rotary tables and cache, and calls its layers one by one.
The first layer's call decides how the step runs (all ranks alike, by vote); recorded layers return their input
untouched, and the last layer's call runs them all as one plan.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tbo.batch import Outcome, Reason
from tbo.core import Instrument, Progress, run
from tbo.errors import PeerError, WrapError
from tbo.models.cache_rows import CacheMark, remember, restore
from tbo.ops.communication_stats import total
from tbo.ops.dispatch import Dispatcher
from tbo.wrapping import guards
from tbo.wrapping.batching import Batching, StepBatch
from tbo.wrapping.plans import PlanBook
from tbo.wrapping.report import Mode, StepReport
from tbo.wrapping.voting import Voting

if TYPE_CHECKING:
    from tbo.models.layer import HuggingFaceLayer
    from tbo.models.parts import Decoder
    from tbo.ops.peers import Peers
    from tbo.wrapping.hook import LayerHook


@dataclass(slots=True)
class _Step:
    """A step between its first and its last layer."""

    mode: Mode
    batch: StepBatch
    outcome: Outcome
    mark: CacheMark | None
    began: float
    first_hidden: Tensor
    thread: int
    recorded: list[dict[str, Any]] = field(default_factory=list)
    next_layer: int = 0


class StepRunner:
    """Runs the steps of one wrapped model on one rank.

    Args:
        decoder: whose layers these are.
        layers: the ops of every decoder layer.
        plans: compiled plans.
        batching: cuts batches.
        voting: agrees with the other ranks.
        dispatchers: one for each sub-batch.
        peers: the other ranks, or None on one rank.
        instruments: handed to every run.
        progress: the place in the running plan, which the heartbeat reports.
    """

    def __init__(  # noqa: PLR0913 - put together in one place, by name
        self,
        *,
        decoder: Decoder,
        layers: Sequence[HuggingFaceLayer],
        plans: PlanBook,
        batching: Batching,
        voting: Voting,
        dispatchers: Sequence[Dispatcher],
        peers: Peers | None,
        instruments: Sequence[Instrument],
        progress: Progress,
    ) -> None:
        self.layers = tuple(layers)
        self.hooks: tuple[LayerHook, ...] = ()
        self.last: StepReport | None = None
        self._decoder = decoder
        self._plans = plans
        self._batching = batching
        self._voting = voting
        self._dispatchers = tuple(dispatchers)
        self._peers = peers
        self._instruments = tuple(instruments)
        self._progress = progress
        self._step: _Step | None = None
        self._running = False
        self._count = 0
        self._first_sparse = plans.first_sparse
        self.notes = tuple(f"warning: {warning}" for warning in plans.warnings)

    def layer(self, index: int, hidden_states: Tensor, kwargs: dict[str, Any]) -> Any:
        """One decoder layer's call, as the model makes it."""
        if self._running:
            raise WrapError(
                f"layer {index} was called while a step of the same model is running",
                remedy="Do not call the model from an instrument, a hook or another thread; wrap a second model.",
            )
        if guards.recomputes(self.layers[index].layer) and torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - torch's own checkpointing asks it, too
            return self.hooks[index].original(hidden_states, kwargs)  # in the backward pass, of a plain step
        try:
            return self._layer(index, hidden_states, kwargs)
        except BaseException as error:
            self._undo(error)
            raise

    def _layer(self, index: int, hidden_states: Tensor, kwargs: dict[str, Any]) -> Any:
        if index == 0:
            self._step = self._begin(hidden_states, kwargs)
        step = self._step
        if step is None or index != step.next_layer:
            expected = "no step has begun" if step is None else f"layer {step.next_layer} is next"
            raise WrapError(
                f"layer {index} was called out of turn ({expected})",
                remedy="Call the whole model, and not from within itself; to call single layers, unwrap it first.",
            )
        if step.thread != threading.get_ident():
            raise WrapError(
                f"layer {index} was called by another thread than the layers before it",
                remedy="Call a wrapped model from one thread at a time; wrap a second model for another.",
            )
        step.next_layer += 1
        last = index == len(self.layers) - 1
        if step.mode is Mode.PLAIN or (step.mode is Mode.DEFERRED and index < self._first_sparse):
            output = self._run_original(step, index, hidden_states, kwargs)
            if index == self._first_sparse - 1:
                step.first_hidden = self._hidden_of(output)
        elif step.mode is Mode.INLINE:
            output = self._run_inline(index, hidden_states, kwargs)
        else:
            output = self._record(step, index, hidden_states, kwargs, run_now=last)
        if last:
            self._finish(step)
        return output

    def _begin(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> _Step:
        began = time.perf_counter()
        if self._peers is not None:
            self._peers.check()
        self._refuse_abandoned()
        guards.refuse_changed(self._decoder, self.layers)
        early = guards.stops_early(self._decoder, self.layers)
        if early and self._peers is not None:
            raise WrapError(
                f"the model would call {self._decoder.config.num_hidden_layers} of its {len(self.layers)} layers, but a"
                " step of several ranks ends with the last one",
                remedy="Generate without assistant_early_exit, and leave config.num_hidden_layers as it was.",
            )
        guards.refuse_silent_hooks(self.layers)
        if self._peers is not None:
            guards.refuse_training(hidden_states, self.layers)
            guards.refuse_unrecordable(self.layers)
        inline = Reason.TRAINING if guards.checkpoints(self.layers) else guards.inline_reason(self.layers)
        batch = self._batching.describe(hidden_states, kwargs)
        outcome = self._voting.vote(batch, must_run_inline=inline)
        if early:
            mode = Mode.PLAIN
        elif outcome.engaged:
            mode = Mode.DEFERRED
        elif self._peers is not None:  # the experts are sharded, so the model's own sparse layers would be wrong
            mode = Mode.INLINE if inline else Mode.DEFERRED
        else:
            mode = Mode.PLAIN
        mark = remember(batch.cache) if batch.cache is not None and mode is not Mode.PLAIN else None
        for dispatcher in self._dispatchers:
            dispatcher.stats.reset()
        return _Step(mode, batch, outcome, mark, began, hidden_states, threading.get_ident())

    def _refuse_abandoned(self) -> None:
        if self._step is not None and self._peers is not None:
            raise WrapError(
                "the model's last call ended before its last layer, in the middle of a step all ranks had begun",
                remedy="Look at the error that call raised; the process group cannot be used again.",
            )

    def _hidden_of(self, output: Any) -> Tensor:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    def _run_original(self, step: _Step, index: int, hidden_states: Tensor, kwargs: dict[str, Any]) -> Any:
        if hidden_states.numel() == 0 and step.mode is Mode.DEFERRED:
            # Attention code of most families refuses an empty batch, which our ops pass on.
            return self.layers[index].adapter.layer_output(hidden_states, kwargs.get("prev_topk_indices"))
        return self.hooks[index].original(hidden_states, kwargs)

    def _run_inline(self, index: int, hidden_states: Tensor, kwargs: dict[str, Any]) -> Any:
        layer = self.layers[index]
        state = {
            "hidden_states": hidden_states,
            "layer_kwargs": {layer.layer: kwargs},
            "dispatcher": self._dispatchers[0],
            "carried_topk": kwargs.get("prev_topk_indices"),
        }
        (result,) = self._run(self._plans.single(index), [state])
        return layer.adapter.layer_output(result["hidden_states"], result["carried_topk"])

    def _record(self, step: _Step, index: int, hidden_states: Tensor, kwargs: dict[str, Any], *, run_now: bool) -> Any:
        if hidden_states is not step.first_hidden:
            raise WrapError(
                f"the model changed the hidden states between layers {index - 1} and {index}, which deferred layers"
                " would not see",
                remedy="Wrap with overlap='never', and report the model: its family needs an adapter.",
            )
        step.recorded.append(kwargs)
        if not run_now:
            return self.layers[index].adapter.layer_output(hidden_states, None)
        hidden, carried = self._run_deferred(step)
        return self.layers[index].adapter.layer_output(hidden, carried)

    def _run_deferred(self, step: _Step) -> tuple[Tensor, Any]:
        count = step.outcome.sub_batches if step.outcome.engaged else 1
        layers = self.layers[self._first_sparse :]
        prepared = self._batching.cut(step.batch, step.first_hidden, layers, step.recorded, count)
        plan = self._plans.steps(step.outcome.phase, count)
        states = (
            {
                "hidden_states": hidden,
                "layer_kwargs": layer_kwargs,
                "dispatcher": dispatcher,
                "carried_topk": carried,
            }
            for hidden, layer_kwargs, carried, dispatcher in zip(
                prepared.hidden, prepared.layer_kwargs, prepared.carried, self._dispatchers, strict=False
            )
        )
        results = self._run(plan, states)
        prepared.finish_cache()
        return prepared.merge([result["hidden_states"] for result in results]), None

    def _run(self, plan: Any, states: Any) -> list[dict[str, Any]]:
        self._running = True
        rank = None if self._peers is None else self._peers.rank
        try:
            return run(plan, states, self._instruments, rank=rank, progress=self._progress)
        finally:
            self._running = False

    def serve(self, *, finished: bool) -> Outcome:
        """One step without tokens of its own: votes, and computes this rank's experts for whoever is active.

        Args:
            finished: the rank will never call the model again; otherwise only its own generation is over.
        """
        began = time.perf_counter()
        try:
            self._refuse_abandoned()
            outcome = self._voting.vote_idle(finished=finished)
            if not outcome.everyone_left:  # one that is active runs its layers, even if its batch is empty
                self._serve_step(outcome, began)
        except BaseException as error:
            self._undo(error)
            raise
        return outcome

    def _serve_step(self, outcome: Outcome, began: float) -> None:
        count = outcome.sub_batches if outcome.engaged else 1
        empty = self._batching.empty_hidden()
        for dispatcher in self._dispatchers:
            dispatcher.stats.reset()
        layer_kwargs: dict[Any, Any] = {}
        states = (
            {"hidden_states": empty, "layer_kwargs": layer_kwargs, "dispatcher": dispatcher, "carried_topk": None}
            for dispatcher in self._dispatchers[:count]
        )
        with torch.no_grad():
            self._run(self._plans.steps(outcome.phase, count), states)
        self._report(outcome, Mode.SERVED, "none", (0,) * count, began)

    def _finish(self, step: _Step) -> None:
        self._step = None
        count = step.outcome.sub_batches if step.outcome.engaged else 1
        rule, tokens = step.batch.parts(count)
        self._report(step.outcome, step.mode, rule, tokens, step.began)

    def _report(self, outcome: Outcome, mode: Mode, rule: str, tokens: tuple[int, ...], began: float) -> None:
        self._count += 1
        stats = total(dispatcher.stats for dispatcher in self._dispatchers)
        self.last = StepReport(
            step=self._count,
            engaged=outcome.engaged,
            reason=outcome.reason,
            reason_rank=outcome.reason_rank,
            mode=mode,
            phase=outcome.phase,
            split=rule,
            tokens_per_sub_batch=tokens,
            votes=outcome.votes,
            communication_seconds=stats.busy_seconds if stats.modelled else stats.in_flight_seconds,
            exposed_seconds=stats.blocked_seconds,
            modelled=stats.modelled,
            seconds=time.perf_counter() - began,
        )

    def _undo(self, error: BaseException) -> None:
        """After a failure: the caller's cache is as before the step, and every rank hears of it."""
        step, self._step = self._step, None
        if step is not None and step.mark is not None:
            restore(step.mark)
        if step is not None and step.mode is not Mode.PLAIN:
            traceback.clear_frames(error.__traceback__)  # whoever keeps the error must not keep the step's tensors
        if self._peers is not None and not isinstance(error, PeerError):
            self._peers.fail(error)
