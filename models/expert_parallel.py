"""Spreading the experts of a model that is already loaded over the ranks of a group, in place.

Shapes: E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from tbo.errors import UnsupportedModelError, WrapError
from tbo.models.expert_saving import GatheringSave, gather_state_dict
from tbo.models.expert_shard import (
    ExpertShard,
    expert_modules,
    expert_tensors,
    is_sharded,
    mark_sharded,
    rank_and_size,
    shard_of,
    shard_of_module,
    total_experts,
)
from tbo.models.parts import num_experts

__all__ = [
    "ExpertShard",
    "gather_state_dict",
    "is_sharded",
    "shard_experts",
    "shard_of",
    "total_experts",
]

_DTYPES: Final = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def shard_experts(
    model: nn.Module, ep_group: Any = None, *, rank: int | None = None, world_size: int | None = None
) -> int:
    """Keeps this rank's experts of every sparse layer, and frees the others.

    In place: parameters stay the same objects, with dimension 0 cut to this rank's consecutive share. Routers and
    everything else stay whole. Nothing is sent. Afterwards only a wrapped model computes (`tbo.wrap`); its own
    forward and its state dict raise, and `save_pretrained`, called on every rank, gathers the experts to the group's
    first rank, which writes the same checkpoint the whole model would have.

    On one rank nothing changes.

    Args:
        model: a transformers mixture-of-experts model with its weights loaded.
        ep_group: the ranks to spread the experts over; every one of them calls this.
        rank: instead of `ep_group`, with `world_size`: this rank's place. Saving is then refused, for want of a group.
        world_size: see `rank`.

    Returns:
        Bytes the model no longer holds.

    Raises:
        UnsupportedModelError: not a mixture-of-experts model, or its experts are quantised or adapted.
        WrapError: the experts cannot be shared equally, are sharded already, are tied or have no values, or
            the group is wrong. Nothing has changed then.
    """
    rank, world_size = rank_and_size(ep_group, rank, world_size)
    modules = expert_modules(model)
    memory = _names_of_memory(model)
    shards: list[ExpertShard] = []
    for name, experts in modules:
        _check_module(name, experts)
        shards.append(ExpertShard.of_rank(num_experts(experts), rank=rank, world_size=world_size, where=name))
        for tensor_name, tensor in expert_tensors(experts):
            check_expert_tensor(f"{name}.{tensor_name}", tensor, shards[-1].total)
            _check_memory(f"{name}.{tensor_name}", tensor, memory)
    if world_size == 1:
        return 0
    freed = 0
    for (name, experts), shard in zip(modules, shards, strict=True):
        mark_sharded(name, experts, shard)
        freed += sum(_cut(tensor, shard) for _, tensor in expert_tensors(experts))
    guard_saving(model, ep_group)
    return freed


def guard_saving(model: nn.Module, ep_group: Any) -> None:
    """Makes `save_pretrained` of a sharded model gather its experts first."""
    if hasattr(model, "save_pretrained"):
        vars(model)["save_pretrained"] = GatheringSave(model, ep_group)


def check_expert_tensor(name: str, tensor: Tensor, total: int) -> None:
    """Refuses a tensor that cannot be cut between experts.

    Raises:
        UnsupportedModelError: quantised, spread by someone else, or not stacked by expert.
    """
    kind = type(tensor.data).__name__ if type(tensor) is nn.Parameter else type(tensor).__name__
    if kind != "Tensor" or tensor.dtype not in _DTYPES:
        raise UnsupportedModelError(
            f"{name} is a {kind} of {tensor.dtype}: quantised experts, or experts spread by another library, cannot"
            " be sharded",
            remedy="Load the model in bfloat16, float16 or float32 without a quantization or distributed config.",
        )
    if tensor.dim() == 0 or tensor.shape[0] != total:
        raise UnsupportedModelError(
            f"{name} has shape {list(tensor.shape)}: dimension 0 is not the {total} experts",
            remedy="Leave this model unsharded; its experts are stored unlike those that tbo knows.",
        )


def _check_module(name: str, experts: nn.Module) -> None:
    shard = shard_of_module(experts)
    if shard is not None:
        raise WrapError(
            f"{name} is sharded already: it holds experts {shard.first} to {shard.first + shard.count - 1} of"
            f" {shard.total}",
            remedy="Shard a model once; to spread it over other ranks, load it again.",
        )
    if "forward" in vars(experts) or hasattr(experts, "_hf_hook"):
        raise WrapError(
            f"{name} carries a forward of its own, of accelerate or another library, that expects all experts",
            remedy="Load the model without device_map offloading, and shard it before other adapters.",
        )
    inner = next((child for child, _ in experts.named_parameters() if "." in child), None)
    if inner is not None:
        raise UnsupportedModelError(
            f"{name} holds {inner}, a parameter of a module inside it, which may be spread over experts in any way",
            remedy="Merge or remove adapters from the experts before sharding.",
        )


def _names_of_memory(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            if tensor.device.type != "meta" and tensor.numel() > 0:
                names.setdefault(tensor.data_ptr(), []).append(name)
    return names


def _check_memory(name: str, tensor: Tensor, names: Mapping[int, list[str]]) -> None:
    """Experts without values cannot be cut, and tied ones would be cut for both owners."""
    if tensor.device.type == "meta":
        raise WrapError(
            f"{name} is on the meta device and has no values",
            remedy="Load the weights first, or use tbo.load_expert_parallel, which reads only this rank's experts.",
        )
    others = [other for other in names.get(tensor.data_ptr(), ()) if other != name]
    if others:
        raise WrapError(
            f"{name} shares its memory with {', '.join(others)}: cutting one would cut the other",
            remedy="Untie them first, for example by cloning one.",
        )


@torch.no_grad()
def _cut(tensor: Tensor, shard: ExpertShard) -> int:
    """Keeps the shard's experts; a copy, because a view would keep the memory of all. Returns bytes freed."""
    before = tensor.numel()
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.data[shard.experts].clone()
    if gradient is not None:
        tensor.grad = gradient[shard.experts].clone()
    return (before - tensor.numel()) * tensor.element_size()
