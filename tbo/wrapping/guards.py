"""What a wrapped model cannot serve, found before it computes anything.

Two outcomes: a reason to run the step un-split (outputs are being captured, a layer has hooks), or an error that
names what would go wrong silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.utils import output_capturing

from tbo.batch import Reason
from tbo.errors import WrapError

if TYPE_CHECKING:
    from tbo.models.layer import HuggingFaceLayer

_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module would run hooks besides its forward."""
    return any(getattr(module, table) for table in _HOOK_TABLES)


def inline_reason(layers: Sequence[HuggingFaceLayer]) -> Reason | None:
    """Why every layer must finish before the next is called, or None.

    Hooks on a layer, and transformers' recording of hidden states, attentions and router logits, see each layer's
    result as it returns; deferred layers return nothing of worth.
    """
    collector = getattr(output_capturing, "_active_collector", None)
    if collector is not None and collector.get():
        return Reason.OUTPUTS_CAPTURED
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:  # noqa: SLF001 - no public way to ask
        return Reason.LAYER_HOOKS
    return Reason.LAYER_HOOKS if any(has_hooks(layer.layer) for layer in layers) else None


def refuse_silent_hooks(layers: Sequence[HuggingFaceLayer]) -> None:
    """Refuses hooks on modules whose forward is replaced by ops, because they would never fire.

    Raises:
        WrapError: names the layer and module.
    """
    for index, layer in enumerate(layers):
        for name, module in _bypassed(layer):
            if has_hooks(module):
                raise WrapError(
                    f"layer {index}: {name} ({type(module).__name__}) has a forward hook, which would not fire because"
                    " its forward is cut into ops",
                    remedy=f"Hook the decoder layer or a module inside {name}, or unwrap the model.",
                )


def _bypassed(layer: HuggingFaceLayer) -> Iterator[tuple[str, nn.Module]]:
    attention = layer.adapter.attention_module()
    yield "attention", attention
    if layer.is_sparse:
        yield "the MoE block", layer.adapter.block_module()


def refuse_offloading(layers: Sequence[HuggingFaceLayer]) -> None:
    """Refuses layers that accelerate moves between devices around their forward.

    Raises:
        WrapError: names the layer.
    """
    for index, layer in enumerate(layers):
        if getattr(layer.layer, "_hf_hook", None) is not None:
            raise WrapError(
                f"layer {index} carries an accelerate hook that moves its weights around its forward, which the ops"
                " do not call",
                remedy="Load the model without device_map dispatch of whole layers.",
            )


def refuse_mixed_devices(layers: Sequence[HuggingFaceLayer]) -> torch.device:
    """All layers must live on one device; returns it.

    Raises:
        WrapError: names the first layer elsewhere.
    """
    device: torch.device | None = None
    for index, layer in enumerate(layers):
        for name, parameter in layer.layer.named_parameters():
            if parameter.device.type == "meta":
                raise WrapError(
                    f"layer {index}: {name} is on the meta device and has no values",
                    remedy="Load the weights before wrapping.",
                )
            device = device or parameter.device
            if parameter.device != device:
                raise WrapError(
                    f"layer {index}: {name} is on {parameter.device}, earlier layers are on {device}",
                    remedy="Put all decoder layers on one device.",
                )
    if device is None:
        raise WrapError("the decoder layers have no parameters", remedy="Load the model before wrapping it.")
    return device


def refuse_training(hidden_states: Tensor, *, across_ranks: bool, layers: Sequence[HuggingFaceLayer]) -> bool:
    """Training: on one rank it works, with checkpointing through plain layers; across ranks it is refused.

    Returns:
        Whether the step must use the plain layers because of gradient checkpointing.

    Raises:
        WrapError: gradients would have to cross ranks.
    """
    wants_gradients = torch.is_grad_enabled() and hidden_states.requires_grad
    if across_ranks and wants_gradients:
        raise WrapError(
            "gradients are enabled on a model whose experts are spread over ranks; they would stop at the exchange",
            remedy="Call the model under torch.no_grad(); training across ranks is not served.",
        )
    first = layers[0].layer
    return bool(getattr(first, "gradient_checkpointing", False)) and first.training
