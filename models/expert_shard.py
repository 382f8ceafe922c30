"""The record of which experts a rank holds, and the guards around a module that holds only some.

A model with a part of its experts looks whole: it has the same classes and the same names. Called by itself it would
compute with the wrong experts and say nothing, and its state dict would be a checkpoint with most experts missing.
So every sharded module carries its record, a forward that raises, and a state dict that raises.

Shapes: E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch.distributed as dist
from torch import Tensor, nn

from tbo.errors import CheckpointError, UnsupportedModelError, WrapError
from tbo.models.parts import find_decoder, find_moe, num_experts

_RECORD: Final = "tbo_shard"
_GATHERING: Final = "tbo_gathering"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShard:
    """The experts of one layer that a rank holds: ``first .. first + count`` of `total`."""

    first: int
    count: int
    total: int

    @property
    def experts(self) -> slice:
        """Their places among all experts."""
        return slice(self.first, self.first + self.count)

    @property
    def ranks(self) -> int:
        """Over how many ranks the experts are spread."""
        return self.total // self.count

    @property
    def rank(self) -> int:
        """The rank that holds them."""
        return self.first // self.count

    @staticmethod
    def of_rank(total: int, *, rank: int, world_size: int, where: str) -> ExpertShard:
        """An equal share of consecutive experts.

        Raises:
            WrapError: the experts cannot be shared out equally.
        """
        if world_size > total:
            raise WrapError(
                f"{where} has {total} experts, fewer than the {world_size} ranks of the expert-parallel group",
                remedy=f"Use a group of at most {total} ranks.",
            )
        if total % world_size:
            fitting = [size for size in range(1, total + 1) if total % size == 0]
            raise WrapError(
                f"the {total} experts of {where} cannot be shared equally by {world_size} ranks",
                remedy=f"Use a group of {', '.join(map(str, fitting))} ranks.",
            )
        count = total // world_size
        return ExpertShard(first=rank * count, count=count, total=total)


def rank_and_size(ep_group: Any, rank: int | None, world_size: int | None) -> tuple[int, int]:
    """This rank's place in the expert-parallel group.

    Args:
        ep_group: a process group; None when `rank` and `world_size` say it instead, without any process group.
        rank: see `ep_group`.
        world_size: see `ep_group`.

    Raises:
        WrapError: both or neither are given, the numbers make no sense, or this process is not in the group.
    """
    if ep_group is None:
        if rank is None or world_size is None:
            raise WrapError(
                "neither an expert-parallel group nor a rank and world size were given",
                remedy="Pass ep_group=torch.distributed.group.WORLD, or rank= and world_size= both.",
            )
        if world_size < 1 or not 0 <= rank < world_size:
            raise WrapError(
                f"rank {rank} of {world_size} ranks does not exist", remedy="Ranks count from 0 to world_size - 1."
            )
        return rank, world_size
    if rank is not None or world_size is not None:
        raise WrapError(
            "an expert-parallel group was given together with a rank or world size",
            remedy="Pass one or the other; the group knows its ranks.",
        )
    if not dist.is_available() or not dist.is_initialized():
        raise WrapError(
            "an expert-parallel group was given, but torch.distributed is not initialised",
            remedy="Call torch.distributed.init_process_group first, or pass rank= and world_size=.",
        )
    if ep_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise WrapError(
            "this process is not a member of the expert-parallel group",
            remedy="Call this only on the ranks that new_group was given.",
        )
    if not isinstance(ep_group, dist.ProcessGroup):
        raise WrapError(
            f"ep_group is a {type(ep_group).__name__}, not a process group",
            remedy="Pass what torch.distributed.new_group returned, group.WORLD, or device_mesh.get_group().",
        )
    return dist.get_rank(ep_group), dist.get_world_size(ep_group)


def expert_modules(model: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """The stacked experts of every sparse layer, with their names in the model.

    Raises:
        UnsupportedModelError: the model has no decoder that can be found, or no sparse layer.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found = [moe.experts for layer in find_decoder(model).layers if (moe := find_moe(layer)) is not None]
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no mixture-of-experts layer",
            remedy="Expert parallelism needs a mixture-of-experts model.",
        )
    return tuple((names[id(experts)], experts) for experts in found)


def shard_of_module(experts: nn.Module) -> ExpertShard | None:
    """The record on one module of experts; None when it holds all."""
    record = vars(experts).get(_RECORD)
    return record if isinstance(record, ExpertShard) else None


def shard_of(model: nn.Module) -> ExpertShard | None:
    """The record of a model's first sparse layer; None when it holds all its experts.

    Raises:
        UnsupportedModelError: not a mixture-of-experts model.
        WrapError: only some of its layers are sharded, because sharding failed halfway.
    """
    modules = expert_modules(model)
    records = [shard_of_module(experts) for _, experts in modules]
    if None in records and any(records):
        (name, _), *_ = (module for module, record in zip(modules, records, strict=True) if record is None)
        raise WrapError(
            f"only some layers of the model are sharded: {name} still holds all its experts",
            remedy="Sharding must have failed halfway: load the model again.",
        )
    return records[0]


def is_sharded(model: nn.Module) -> bool:
    """Whether a model holds only some of its experts.

    Raises:
        UnsupportedModelError: not a mixture-of-experts model.
        WrapError: only some of its layers are sharded.
    """
    return shard_of(model) is not None


def total_experts(experts: nn.Module) -> int:
    """How many experts a layer has on all ranks together."""
    record = shard_of_module(experts)
    return num_experts(experts) if record is None else record.total


def mark_sharded(name: str, experts: Any, shard: ExpertShard) -> None:
    """Puts the record and the guards on a module that holds, or is about to hold, the shard's experts.

    Args:
        name: the module's name in the model.
        experts: the module.
        shard: its share. The router beside it keeps the total.
    """
    vars(experts)[_RECORD] = shard
    vars(experts)["forward"] = RefusedForward(name=name, shard=shard)
    experts.register_state_dict_pre_hook(_refuse_state_dict)
    experts.num_experts = shard.count


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedForward:
    """The forward of sharded experts. The ops do not call it: they know that the ids they pass are local ones."""

    name: str
    shard: ExpertShard

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Called by the model's own code."""
        shard = self.shard
        raise WrapError(
            f"{self.name} holds experts {shard.first} to {shard.first + shard.count - 1} of {shard.total}: the model's"
            " own forward would compute with the wrong ones",
            remedy="Call tbo.wrap(model, ep_group=...) with the group the experts are spread over, then the model.",
        )


def _refuse_state_dict(experts: nn.Module, prefix: str, _keep_vars: object) -> None:
    shard = shard_of_module(experts)
    if shard is not None and not vars(experts).get(_GATHERING, False):
        raise CheckpointError(
            f"{prefix.rstrip('.') or 'the module'} holds {shard.count} of {shard.total} experts: its state dict would"
            " be a checkpoint with the others missing",
            remedy="Call model.save_pretrained(...) or tbo.models.expert_saving.gather_state_dict on every rank.",
        )


class LocalStateDict:
    """While entered, state dicts hold this rank's experts instead of being refused. For gathering only."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [experts for _, experts in expert_modules(model)]

    def __enter__(self) -> None:
        for experts in self._modules:
            vars(experts)[_GATHERING] = True

    def __exit__(self, *_: object) -> None:
        for experts in self._modules:
            del vars(experts)[_GATHERING]


def expert_tensors(experts: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module of experts, whose dimension 0 is E."""
    yield from experts.named_parameters(recurse=False)
    yield from experts.named_buffers(recurse=False)
