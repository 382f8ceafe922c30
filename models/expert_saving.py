"""Getting a whole checkpoint back out of a model whose experts are spread over ranks.

Shapes: E experts of all ranks, W ranks.
"""

from __future__ import annotations

import os
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tbo.errors import CheckpointError
from tbo.models.expert_shard import (
    ExpertShard,
    LocalStateDict,
    expert_modules,
    expert_tensors,
    rank_and_size,
    shard_of,
    shard_of_module,
)

_CHUNK_BYTES: Final = 64 * 2**20
"""A rank gathers about this much at a time from each peer, so that gathering fits beside the model."""


def gather_state_dict(model: nn.Module, ep_group: Any, *, destination: int | None = None) -> dict[str, Tensor]:
    """The state dict of the whole model, with the experts of all ranks.

    Every rank of the group calls this, between steps. The gathered experts are new tensors on the CPU; everything
    else is the model's own, as in `state_dict`.

    Args:
        model: a sharded model; of an unsharded one this is its state dict.
        ep_group: the group its experts are spread over.
        destination: the rank in the group that gets the result, while the others get an empty dict and need no memory
            for it; None: all get it.

    Raises:
        CheckpointError: the group is not the one the experts are spread over.
        UnsupportedModelError: not a mixture-of-experts model.
        WrapError: this process is not in the group.
    """
    shard = shard_of(model)
    if shard is None:
        return dict(model.state_dict())
    rank, world_size = rank_and_size(ep_group, None, None)
    if (rank, world_size) != (shard.rank, shard.ranks):
        raise CheckpointError(
            f"this rank holds the share of rank {shard.rank} of {shard.ranks}, but is rank {rank} of {world_size} in"
            " the group",
            remedy="Pass the group the experts were spread over.",
        )
    with LocalStateDict(model):
        state: dict[str, Tensor] = dict(model.state_dict())
    keep = destination is None or destination == rank
    for name, experts in expert_modules(model):
        module_shard = shard_of_module(experts)
        for tensor_name, tensor in expert_tensors(experts):
            key = f"{name}.{tensor_name}"
            if module_shard is not None and key in state:
                gathered = _gather(tensor.detach(), module_shard, ep_group, keep=keep)
                if gathered is not None:
                    state[key] = gathered
    return state if keep else {}


def _gather(local: Tensor, shard: ExpertShard, group: Any, *, keep: bool) -> Tensor | None:
    """All ranks' parts of one tensor, some experts at a time. As bytes: no backend knows every data type."""
    device = _device_of(group)
    whole = torch.empty((shard.total, *local.shape[1:]), dtype=local.dtype) if keep else None
    bytes_each = max(1, local[:1].numel() * local.element_size())
    step = max(1, _CHUNK_BYTES // bytes_each)
    for first in range(0, shard.count, step):
        piece = local[first : first + step].contiguous().reshape(-1).view(torch.uint8).to(device)
        pieces = [torch.empty_like(piece) for _ in range(shard.ranks)]
        dist.all_gather(pieces, piece, group=group)
        if whole is None:
            continue
        for rank, received in enumerate(pieces):
            start = rank * shard.count + first
            target = whole[start : start + min(step, shard.count - first)]
            target.copy_(received.view(local.dtype).view(target.shape))
    return whole


def _device_of(group: Any) -> torch.device:
    """Where a backend takes its tensors from."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class GatheringSave:
    """`save_pretrained` of a sharded model: every rank calls it, the group's first rank writes.

    What is written is what the whole model would have written. A copy of the model saves itself; a pickled
    one has lost its group and refuses.
    """

    def __init__(self, model: nn.Module, group: Any) -> None:
        self._model = model
        self._group = group

    def __call__(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As `PreTrainedModel.save_pretrained`; all ranks return when the files are written.

        Raises:
            CheckpointError: the model was sharded without a process group, or the first rank could not write.
        """
        model: Any = self._model
        if kwargs.get("state_dict") is not None:
            type(model).save_pretrained(model, save_directory, *args, **kwargs)
            return
        if self._group is None:
            raise CheckpointError(
                "the model's experts were spread without a process group, so they cannot be gathered to be saved",
                remedy="Pass state_dict=gather_state_dict(model, group), or shard with ep_group=.",
            )
        if args:
            raise CheckpointError(
                "save_pretrained of a sharded model takes only the directory by position",
                remedy="Pass the other arguments by name.",
            )
        state = gather_state_dict(model, self._group, destination=0)
        failure: Exception | None = None
        if dist.get_rank(self._group) == 0:
            try:
                self._write(state, save_directory, kwargs)
            except Exception as error:  # noqa: BLE001  # the other ranks wait and must hear of it first
                failure = error
        self._all_know(failure)

    def _write(self, state: dict[str, Tensor], directory: str | os.PathLike[str], kwargs: dict[str, Any]) -> None:
        model: Any = self._model
        count = sum(parameter.numel() for parameter in model.parameters())
        for name, experts in expert_modules(model):
            count += sum(state[f"{name}.{key}"].numel() - local.numel() for key, local in experts.named_parameters())
        vars(model)["num_parameters"] = lambda *_, **__: count  # the checkpoint's index states it
        try:
            type(model).save_pretrained(model, directory, **{**kwargs, "state_dict": state, "is_main_process": True})
        finally:
            del vars(model)["num_parameters"]

    def _all_know(self, failure: Exception | None) -> None:
        failed = torch.tensor([failure is not None], dtype=torch.uint8, device=_device_of(self._group))
        dist.broadcast(failed, group=self._group, group_src=0)
        if failure is not None:
            raise CheckpointError(
                f"the checkpoint could not be written: {type(failure).__name__}: {failure}",
                remedy="Look at the directory's space and permissions.",
            ) from failure
        if failed.item():
            raise CheckpointError(
                "the first rank of the group could not write the checkpoint", remedy="Its own error says why."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> GatheringSave:
        return GatheringSave(memo.get(id(self._model), self._model), self._group)

    def __reduce__(self) -> tuple[Any, ...]:
        return GatheringSave, (self._model, None)
