"""One layer of each kind, its own forward against its ops, before a wrapped model serves anything.

A family whose layers changed in a new transformers release must not give wrong tokens: it is refused here, by name.
The model's own forward builds the arguments (masks, rotary tables); only the layers under test compute.

Shapes: T tokens, H hidden size, K experts a token.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tbo.core import Pending, compile_plan, run
from tbo.errors import UnsupportedModelError, WrapError
from tbo.models.layer import CARRIES, INPUTS, HuggingFaceLayer
from tbo.models.orders import PREFILL, layers_ops
from tbo.models.parts import Decoder
from tbo.ops.communication_stats import CommunicationStats
from tbo.ops.dispatch import Limits, Received, Ticket
from tbo.ops.local import LocalDispatcher
from tbo.wrapping.hook import by_name

ROWS, POSITIONS = 2, 5
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference, relative to the largest output, that counts as rounding."""


class NoExperts:
    """A dispatcher that reaches no expert: its combined rows are zeros.

    With it, everything in a layer but the routed experts can be checked when they are already spread over ranks.
    """

    limits = Limits(channel="ep")

    def __init__(self) -> None:
        self.stats = CommunicationStats()

    def dispatch_a(self, rows_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Pending[Any]:
        """Sends nothing."""
        return Pending(lambda: rows_TH)

    def dispatch_b(self, pending: Pending[Any]) -> tuple[Received, Ticket]:
        """Nothing arrives."""
        rows_TH = pending.wait()
        ids_RK = rows_TH.new_empty((0, 1), dtype=torch.int64)
        received = Received(
            rows_RH=rows_TH[:0], expert_ids_RK=ids_RK, expert_weights_RK=rows_TH.new_empty((0, 1)), group_ends_L=None
        )
        return received, _Zeros(num_tokens=rows_TH.shape[0], like_TH=rows_TH)

    def combine_a(self, rows_RH: Tensor, ticket: Ticket) -> Pending[Any]:
        """Returns nothing."""
        return Pending(lambda: ticket)

    def combine_b(self, pending: Pending[Any]) -> Tensor:
        """Zeros for every token."""
        return torch.zeros_like(pending.wait().like_TH)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Zeros(Ticket):
    like_TH: Tensor


def self_check(decoder: Decoder, layers: Sequence[HuggingFaceLayer], *, num_experts: int, sharded: bool) -> str:
    """Compares one layer of each kind with its ops.

    Args:
        decoder: the decoder, not yet wrapped.
        layers: its layers as ops.
        num_experts: of a sparse layer.
        sharded: the routed experts are already spread over ranks, and are left out of the comparison.

    Returns:
        One sentence on what was compared.

    Raises:
        UnsupportedModelError: a layer's ops give another result than the layer, or the model does not call it.
        WrapError: a layer's own result is not a number.
    """
    chosen = _one_of_each_kind(layers)
    dispatcher = NoExperts() if sharded else LocalDispatcher(num_experts=num_experts)
    differences: dict[int, float] = {}

    def probe(index: int) -> Any:
        layer = layers[index]
        own_forward = type(layer.layer).forward
        signature = inspect.signature(own_forward.__get__(layer.layer))

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            kwargs = by_name(signature, args) | kwargs
            if index not in chosen:
                return layer.adapter.layer_output(hidden_states, kwargs.get("prev_topk_indices"))
            expected = own_forward(layer.layer, hidden_states, **kwargs)
            differences[index] = _compare(index, layer, hidden_states, kwargs, expected, dispatcher)
            return expected

        return forward

    with _probed(layers, probe), _evaluating(decoder.base), torch.no_grad(), _without_experts(layers, sharded=sharded):
        device = next(decoder.base.parameters()).device
        vocabulary = int(getattr(decoder.config, "vocab_size", ROWS * POSITIONS))
        ids = (torch.arange(ROWS * POSITIONS, device=device) % vocabulary).reshape(ROWS, POSITIONS)
        decoder.base(input_ids=ids, use_cache=False)
    if missed := chosen - differences.keys():
        raise UnsupportedModelError(
            f"{type(decoder.base).__name__} does not call its layer {min(missed)} in its forward",
            remedy="Leave this model unwrapped; its layers are not run one after another.",
        )
    worst = max(differences.values())
    what = "all but the routed experts, which are spread over ranks" if sharded else "whole layers"
    equal = "1 kind of layer equals its ops" if len(chosen) == 1 else f"{len(chosen)} kinds of layer equal their ops"
    return f"self-check: {equal} ({what}; largest relative difference {worst:.1e})"


def _one_of_each_kind(layers: Sequence[HuggingFaceLayer]) -> set[int]:
    """Layers made of other classes, somewhere inside, are of other kinds: a release or a user may mix them."""
    seen: dict[tuple[tuple[str, type], ...], int] = {}
    for index, layer in enumerate(layers):
        seen.setdefault(tuple((name, type(module)) for name, module in layer.layer.named_modules()), index)
    return set(seen.values())


def _compare(
    index: int, layer: HuggingFaceLayer, hidden_states: Tensor, kwargs: dict[str, Any], expected: Any, dispatcher: Any
) -> float:
    wanted = expected[0] if isinstance(expected, tuple) else expected
    if not bool(wanted.isfinite().all()):
        raise WrapError(
            f"layer {index} ({type(layer.layer).__name__}) gives NaN or infinity for a plain row of tokens",
            remedy="Look for such values in its weights, or use a wider dtype.",
        )
    plan = compile_plan(
        layers_ops([layer], PREFILL),
        inputs=INPUTS,
        outputs=("hidden_states",),
        carries=CARRIES,
        sub_batches=1,
        first_layer=index,
    )
    state = {
        "hidden_states": hidden_states,
        "layer_kwargs": {layer.layer: kwargs},
        "dispatcher": dispatcher,
        "carried_topk": kwargs.get("prev_topk_indices"),
    }
    actual = run(plan, [state])[0]["hidden_states"]
    scale = float(wanted.abs().max()) or 1.0
    difference = float((actual - wanted).abs().max()) / scale if actual.shape == wanted.shape else float("inf")
    if not difference <= TOLERANCE.get(wanted.dtype, 1e-2):  # also true if only the ops give NaN
        raise UnsupportedModelError(
            f"layer {index} ({type(layer.layer).__name__}) and its ops differ by {difference:.1e} of its largest value",
            remedy="Do not use tbo with this model and transformers release; please report both.",
        )
    return difference


@contextlib.contextmanager
def _probed(layers: Sequence[HuggingFaceLayer], probe: Any) -> Iterator[None]:
    try:
        for index, layer in enumerate(layers):
            layer.layer.forward = probe(index)
        yield
    finally:
        for layer in layers:
            vars(layer.layer).pop("forward", None)


@contextlib.contextmanager
def _evaluating(base: nn.Module) -> Iterator[None]:
    """Dropout off, and each module's own flag back afterwards."""
    training = [module for module in base.modules() if module.training]
    base.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def _without_experts(layers: Sequence[HuggingFaceLayer], *, sharded: bool) -> Iterator[None]:
    """While experts are sharded, the layers' own forward sees zeros where their output would be."""
    modules = [layer.adapter.moe.experts for layer in layers if layer.is_sparse] if sharded else []
    before = [vars(module).get("forward") for module in modules]
    try:
        for module in modules:
            module.forward = _zeros
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            del module.forward
            if own is not None:
                module.forward = own


def _zeros(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.zeros_like(hidden_states)
