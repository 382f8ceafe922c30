"""What a wrapped model cannot serve, found before it computes anything.

Two outcomes: a reason to run the step un-split (outputs are being captured, a layer has hooks), or an error that
names what would go wrong silently.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.utils import output_capturing

from tbo.batch import Reason
from tbo.errors import WrapError
from tbo.wrapping.hook import LayerHook

if TYPE_CHECKING:
    from tbo.models.layer import HuggingFaceLayer
    from tbo.models.parts import Decoder

_WRAP_LAST = "Call unwrap() before changing the model, and wrap it afterwards; modules inside these may be exchanged."
_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module would run hooks besides its forward.

    Those that transformers puts on every layer once outputs have been asked for do not count: they sleep.
    """
    tables = (getattr(module, table) for table in _HOOK_TABLES)
    return any(not _is_recorder(hook) for table in tables if table for hook in table.values())


def _is_recorder(hook: object) -> bool:
    return getattr(hook, "__module__", None) == output_capturing.__name__


def _recorded_outputs() -> Collection[str]:
    """What transformers records in the call of the model that is running: "hidden_states", "attentions", ..."""
    collector = getattr(output_capturing, "_active_collector", None)
    return (None if collector is None else collector.get()) or ()


def inline_reason(layers: Sequence[HuggingFaceLayer]) -> Reason | None:
    """Why every layer must finish before the next is called, or None.

    Hooks on a layer, and transformers' recording of hidden states, attentions and router logits, see each layer's
    result as it returns; deferred layers return nothing of worth.
    """
    if _recorded_outputs():
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


def refuse_unrecordable(layers: Sequence[HuggingFaceLayer]) -> None:
    """Refuses to record what only the forward of a module that is cut into ops would return.

    Raises:
        WrapError: names the output and the module.
    """
    recorded = _recorded_outputs()
    if not recorded:
        return
    for name, module in (pair for layer in layers for pair in _bypassed(layer)):
        for hook in module._forward_hooks.values():  # noqa: SLF001 - no public way to ask
            output = _output_of(hook) if _is_recorder(hook) else None
            if output in recorded:
                raise WrapError(
                    f"output_{output} is recorded from {name} ({type(module).__name__}), whose forward is cut into ops"
                    " where experts are spread over ranks",
                    remedy=f"Call the model without output_{output}=True, or record it on one rank.",
                )


def _output_of(hook: Any) -> str:
    """Which output one of transformers' recorders is for; it keeps that in its closure."""
    names = hook.__code__.co_freevars
    return str(hook.__closure__[names.index("key")].cell_contents) if "key" in names else ""


def refuse_foreign_forwards(layers: Sequence[HuggingFaceLayer]) -> None:
    """Refuses modules on whose instance other software has put a forward, because the ops would call past it.

    Raises:
        WrapError: names the layer and module.
    """
    for index, layer in enumerate(layers):
        for name, module in (("", layer.layer), *_bypassed(layer)):
            forward = vars(module).get("forward")
            if isinstance(forward, LayerHook):
                raise WrapError(
                    f"layer {index} is already wrapped, through another model that has it",
                    remedy="Call unwrap() on that model's handle first.",
                )
            if forward is not None:
                raise WrapError(
                    f"layer {index}: {name or 'the layer'} ({type(module).__name__}) already has a forward of its own,"
                    " put on by other software",
                    remedy="Unwrap or remove that first; tbo would call past it.",
                )


def refuse_changed(decoder: Decoder, layers: Sequence[HuggingFaceLayer]) -> None:
    """Refuses a model whose layers, or modules cut into ops, were exchanged since it was wrapped.

    Raises:
        WrapError: names the layer and module.
    """
    now: Any = decoder.base.layers
    if len(now) < len(layers) or any(one is not layer.layer for one, layer in zip(now, layers, strict=False)):
        raise WrapError("the model's list of layers was changed after it was wrapped", remedy=_WRAP_LAST)
    for index, layer in enumerate(layers):
        for name, module in _bypassed(layer):
            same = module is layer.attention.module if name == "attention" else type(module) is layer.block_class
            if not same or "forward" in vars(module):
                raise WrapError(
                    f"layer {index}: {name} ({type(module).__name__}) was exchanged, or given another forward, after"
                    " the model was wrapped; tbo would call past it",
                    remedy=_WRAP_LAST,
                )


def stops_early(decoder: Decoder, layers: Sequence[HuggingFaceLayer]) -> bool:
    """Whether the model will not call all its layers: `generate` drafts so under ``assistant_early_exit``."""
    return int(decoder.config.num_hidden_layers) < len(layers)


def _bypassed(layer: HuggingFaceLayer) -> Iterator[tuple[str, nn.Module]]:
    attention = layer.adapter.attention_module()
    yield "attention", attention
    if layer.is_sparse:
        yield "the MoE block", layer.adapter.block_module()


def refuse_offloading(layers: Sequence[HuggingFaceLayer]) -> None:
    """Refuses layers that accelerate moves between devices, whole or module by module, around their forward.

    Raises:
        WrapError: names the layer and module.
    """
    for index, layer in enumerate(layers):
        for name, module in layer.layer.named_modules():
            if getattr(module, "_hf_hook", None) is not None:
                raise WrapError(
                    f"layer {index}: {name or 'the layer'} ({type(module).__name__}) carries an accelerate hook that"
                    " moves weights around its forward, which the ops do not call",
                    remedy="Load the model onto one device: without offloading, and without a device_map over several.",
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


def checkpoints(layers: Sequence[HuggingFaceLayer]) -> bool:
    """Whether gradient checkpointing will compute some layer's forward again, alone, in the backward pass."""
    return any(recomputes(layer.layer) for layer in layers)


def recomputes(layer: nn.Module) -> bool:
    """Whether gradient checkpointing is on in this layer."""
    return layer.training and bool(getattr(layer, "gradient_checkpointing", False))


def refuse_training(hidden_states: Tensor, layers: Sequence[HuggingFaceLayer]) -> None:
    """Refuses a step that gradients would have to cross ranks in.

    Raises:
        WrapError: gradients or gradient checkpointing are on.
    """
    if checkpoints(layers):
        raise WrapError(
            "gradient checkpointing is on in a model whose experts are spread over ranks",
            remedy="Call model.eval(); training across ranks is not served.",
        )
    if torch.is_grad_enabled() and (hidden_states.requires_grad or _has_trained_parameters(layers)):
        raise WrapError(
            "gradients are enabled on a model whose experts are spread over ranks; they would stop at the exchange",
            remedy="Call the model under torch.no_grad(); training across ranks is not served.",
        )


def _has_trained_parameters(layers: Sequence[HuggingFaceLayer]) -> bool:
    return any(parameter.requires_grad for layer in layers for parameter in layer.layer.parameters())
