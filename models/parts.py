"""Where the pieces of a Hugging Face mixture-of-experts model are.

Pieces are kept as names and looked up when they are used, so that adapters put on later (LoRA, quantisation) are seen.
Nothing here relies on transformers' own expert-parallel plans: their values changed between releases, and some
families have none.

Shapes: E experts held by this rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

from torch import Tensor, nn

from tbo.errors import UnsupportedModelError

_DECODER_HOLDERS: Final = ("model", "language_model", "text_model", "base_model", "transformer")
"""Submodules that lead from a model to its decoder, in the order they are tried."""

_HOLDERS_DEPTH: Final = 5
"""PEFT wraps a multimodal wrapper of a causal model of a decoder: four steps, and one to spare."""

_BLOCK_NAMES: Final = ("mlp", "feed_forward", "block_sparse_moe")
ROUTERS: Final = ("gate", "router")
_SHARED_NAMES: Final = ("shared_experts", "shared_expert", "shared_mlp")
_SHARED_GATE_NAME: Final = "shared_expert_gate"
EXPERTS: Final = "experts"
_STACKED_WEIGHTS: Final = ("down_proj", "gate_up_proj", "up_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """The stack of decoder layers inside a model.

    Attributes:
        base: the module whose forward embeds tokens and loops over the layers.
        layers: the layers that loop runs, in order.
        path: where `base` is inside the model, such as ``model.language_model``; empty for the model itself.
        config: `base`'s own (text) configuration.
    """

    base: nn.Module
    layers: tuple[nn.Module, ...]
    path: str
    config: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeParts:
    """The pieces of one sparse layer, by the names they have in it.

    Attributes:
        layer: the decoder layer.
        block_name: its mixture-of-experts block.
        router_name: the router inside the block.
        experts_name: the stacked experts inside the block.
        shared_name: the experts every token passes, or None.
        shared_gate_name: a gate on the shared experts' output, or None.
    """

    layer: nn.Module
    block_name: str
    router_name: str
    experts_name: str
    shared_name: str | None
    shared_gate_name: str | None

    @property
    def block(self) -> nn.Module:
        """The mixture-of-experts block."""
        return self.layer.get_submodule(self.block_name)

    @property
    def router(self) -> nn.Module:
        """Chooses each token's experts."""
        return self.block.get_submodule(self.router_name)

    @property
    def experts(self) -> nn.Module:
        """The routed experts, stacked on dimension 0."""
        return self.block.get_submodule(self.experts_name)

    @property
    def shared(self) -> nn.Module | None:
        """The experts every token passes."""
        return None if self.shared_name is None else self.block.get_submodule(self.shared_name)

    @property
    def shared_gate(self) -> nn.Module | None:
        """Scales the shared experts' output token by token."""
        return None if self.shared_gate_name is None else self.block.get_submodule(self.shared_gate_name)


def find_decoder(model: nn.Module) -> Decoder:
    """Finds the decoder layers of a causal model, its base model, or a multimodal or PEFT wrapper of one.

    ``get_decoder()`` is not used: some models (Llama4ForCausalLM) return themselves from it.

    Raises:
        UnsupportedModelError: no decoder was found, or its configuration does not fit its layers.
    """
    for path, module in _holders(model):
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers) > 0:
            return _decoder(path, module, layers)
    looked = ", ".join(f"{path or 'the model itself'} ({type(module).__name__})" for path, module in _holders(model))
    raise UnsupportedModelError(
        f"{type(model).__name__} has no decoder that tbo can find: no non-empty ModuleList `layers` in {looked}",
        remedy=f"Pass a transformers decoder model; submodules named {', '.join(_DECODER_HOLDERS)} are searched.",
    )


def _holders(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that may hold the layers, nearest first.

    Children only, never properties: ``base_model`` is a property of every transformers model and may be a cycle.
    """
    level: list[tuple[str, nn.Module]] = [("", model)]
    for _ in range(_HOLDERS_DEPTH):
        yield from level
        level = [
            (f"{path}.{name}" if path else name, child)
            for path, module in level
            for name in _DECODER_HOLDERS
            if (child := dict(module.named_children()).get(name)) is not None
        ]


def _decoder(path: str, base: nn.Module, layers: nn.ModuleList) -> Decoder:
    config = getattr(base, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        raise UnsupportedModelError(
            f"{type(base).__name__} has layers, but no config.num_hidden_layers that says how many of them it runs",
            remedy="Pass a transformers model, whose modules carry their configuration.",
        )
    if not 0 < count <= len(layers):
        raise UnsupportedModelError(
            f"{type(base).__name__} holds {len(layers)} layers, but config.num_hidden_layers is {count}",
            remedy="Set config.num_hidden_layers to the number of layers the model runs.",
        )
    return Decoder(base=base, layers=tuple(layers[:count]), path=path, config=config)


def find_block_name(layer: nn.Module) -> str:
    """The name of a layer's feed-forward block, dense or sparse.

    Raises:
        UnsupportedModelError: the layer has none under a known name.
    """
    name = _first_child(layer, _BLOCK_NAMES)
    if name is None:
        raise UnsupportedModelError(
            f"{type(layer).__name__} has no feed-forward block under a name that tbo knows"
            f" ({', '.join(_BLOCK_NAMES)}); it has {_children(layer)}",
            remedy="Leave the model unwrapped; its layers are built unlike those that tbo knows.",
        )
    return name


def find_moe(layer: nn.Module) -> MoeParts | None:
    """The mixture-of-experts pieces of a layer; None for a dense layer.

    Raises:
        UnsupportedModelError: the layer has experts that tbo cannot address (no router beside them, or weights that are
            not stacked).
    """
    block_name = find_block_name(layer)
    block = layer.get_submodule(block_name)
    if _first_child(block, (EXPERTS,)) is None:
        return None
    router_name = _first_child(block, ROUTERS)
    if router_name is None:
        raise UnsupportedModelError(
            f"{type(block).__name__} has experts but no router under a name that tbo knows"
            f" ({', '.join(ROUTERS)}); it has {_children(block)}",
            remedy="Leave the model unwrapped, or rename the router.",
        )
    num_experts(block.get_submodule(EXPERTS))
    shared_name = _first_child(block, _SHARED_NAMES)
    return MoeParts(
        layer=layer,
        block_name=block_name,
        router_name=router_name,
        experts_name=EXPERTS,
        shared_name=shared_name,
        shared_gate_name=_first_child(block, (_SHARED_GATE_NAME,)) if shared_name is not None else None,
    )


def num_experts(experts: nn.Module) -> int:
    """How many experts a module holds now: all of them, or this rank's after sharding.

    Raises:
        UnsupportedModelError: its weights are not stacked on dimension 0.
    """
    for name in _STACKED_WEIGHTS:
        weight = getattr(experts, name, None)
        if isinstance(weight, Tensor) and weight.dim() == 3:
            return weight.shape[0]
    raise UnsupportedModelError(
        f"{type(experts).__name__} holds no stacked expert weights ({', '.join(_STACKED_WEIGHTS)} of [E, ., .])",
        remedy="Use a transformers release (>= 5.17) and a family that stack experts in one tensor.",
    )


def own_forward(module: nn.Module) -> FunctionType:
    """The function a module's class defines as its forward, under whatever decorators and generated subclasses.

    FSDP subclasses every module it shards, and transformers wraps forwards to rename arguments; neither changes what is
    computed. A subclass that overrides forward does, and shows here.
    """
    forward: FunctionType = inspect.unwrap(type(module).forward)
    return forward


def transformers_class(module: nn.Module) -> str | None:
    """The transformers model class whose forward a module runs; None for code from anywhere else.

    Remote code reuses transformers' class names for older, different layers, so the name alone says nothing.
    """
    forward = own_forward(module)
    if not forward.__module__.startswith("transformers.models."):
        return None
    return forward.__qualname__.rpartition(".")[0]


def _first_child(module: nn.Module, names: tuple[str, ...]) -> str | None:
    children = dict(module.named_children())
    return next((name for name in names if name in children), None)


def _children(module: nn.Module) -> str:
    return ", ".join(name for name, _ in module.named_children()) or "no submodules"
