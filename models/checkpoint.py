"""Loading a checkpoint rank by rank: everything but the experts whole, of the experts only this rank's.

The whole model never exists anywhere: it is built without values, given room for this rank's experts only, and filled
from the files.

Shapes: E experts of this rank.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tbo.errors import CheckpointError, UnsupportedModelError
from tbo.models.checkpoint_files import CheckpointFiles
from tbo.models.checkpoint_plan import LoadPlan
from tbo.models.expert_parallel import check_expert_tensor, guard_saving
from tbo.models.expert_shard import ExpertShard, expert_modules, expert_tensors, mark_sharded, rank_and_size
from tbo.models.parts import num_experts

__all__ = ["LoadRecord", "load_expert_parallel"]

_LOG: Final = logging.getLogger("tbo")

Progress = Callable[[int, int, str], None]
"""Called after every tensor with the tensors done, their number, and the name of the one just loaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRecord:
    """What loading took, kept as `tbo_loaded` on the model.

    Attributes:
        bytes_read: of tensor values read from the files.
        tensors_read: reads; a stacked tensor of which only some experts were read counts as one.
        foreign_tensors: tensors of other ranks' experts that were left unread.
        seconds: from the call to the finished model.
    """

    bytes_read: int
    tensors_read: int
    foreign_tensors: int
    seconds: float


def load_expert_parallel(
    path: str | os.PathLike[str],
    ep_group: Any = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    rank: int | None = None,
    world_size: int | None = None,
    attn_implementation: str | None = None,
    progress: Progress | bool = False,
) -> Any:
    """Loads a Hugging Face mixture-of-experts checkpoint with only this rank's experts.

    The model equals ``from_pretrained`` followed by `shard_experts`, bit for bit, but other ranks' experts are never
    read. Unlike there, a checkpoint that does not fit is refused.

    Args:
        path: a local directory with ``config.json`` and safetensors.
        ep_group: the ranks the experts are spread over; every one of them calls this. Nothing is sent.
        dtype: of the weights; None: what the checkpoint's configuration says. Weights a family keeps in float32 stay.
        device: where the weights go.
        rank: instead of `ep_group`, with `world_size`: this rank's place.
        world_size: see `rank`.
        attn_implementation: as in ``from_pretrained``.
        progress: called after every tensor, or True for a progress bar.

    Returns:
        The transformers model, in evaluation mode; `tbo_loaded` on it is a `LoadRecord`.

    Raises:
        CheckpointError: the checkpoint is missing or broken, is quantised, or does not fit its configuration.
        UnsupportedModelError: not a mixture-of-experts model that tbo knows.
        WrapError: the experts cannot be shared equally, or the group is wrong.
    """
    began = time.perf_counter()
    rank, world_size = rank_and_size(ep_group, rank, world_size)
    directory = Path(path)
    with CheckpointFiles(directory) as files:
        config = _read_config(directory)
        model, shards = _without_values(config, dtype, attn_implementation, rank, world_size)
        by_tensor = {
            f"{name}.{key}": shards[name] for name, module in expert_modules(model) for key, _ in expert_tensors(module)
        }
        plan = LoadPlan(model, files, by_tensor)
        plan.faults.refuse(directory, model)
        _untie_where_both_are_stored(model, plan)
        _make_room(model, torch.device(device))
        with _reporting(progress if callable(progress) else None, bar=progress is True) as report:
            _fill(model, plan, files, report)
        _finish(model, plan, directory)
        bytes_read, tensors_read = files.bytes_read, files.tensors_read
    if world_size > 1:
        _mark_sharded(model, shards, ep_group)
    seconds = time.perf_counter() - began
    record = LoadRecord(bytes_read=bytes_read, tensors_read=tensors_read, foreign_tensors=plan.foreign, seconds=seconds)
    model.tbo_loaded = record
    _LOG.info("rank %d of %d loaded %s: %s", rank, world_size, directory, record)
    return model


def _mark_sharded(model: Any, shards: Mapping[str, ExpertShard], ep_group: Any) -> None:
    for name, module in expert_modules(model):
        mark_sharded(name, module, shards[name])
    guard_saving(model, ep_group)


def _read_config(directory: Path) -> Any:
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{directory} has no config.json", remedy="Pass a directory that save_pretrained or a download has made."
        )
    try:
        config = AutoConfig.from_pretrained(directory)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{directory / 'config.json'} cannot be used: {error}",
            remedy="Check the file, and that this transformers release knows the model type.",
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(
            f"the checkpoint in {directory} is quantised, and its experts cannot be read one by one",
            remedy="Save it in bfloat16 first (from_pretrained with dequantize, then save_pretrained).",
        )
    return config


def _without_values(
    config: Any, dtype: torch.dtype | None, attn_implementation: str | None, rank: int, world_size: int
) -> tuple[Any, dict[str, ExpertShard]]:
    """The model on the meta device, with room for this rank's experts, and its share of each layer's."""
    options: dict[str, Any] = {"dtype": dtype or config.dtype or torch.get_default_dtype()}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **options)
    except ValueError as error:
        raise UnsupportedModelError(
            f"a {type(config).__name__} builds no causal language model: {str(error).splitlines()[0]}",
            remedy="Load a decoder model.",
        ) from error
    shards: dict[str, ExpertShard] = {}
    for name, experts in expert_modules(model):
        total = num_experts(experts)
        shards[name] = ExpertShard.of_rank(total, rank=rank, world_size=world_size, where=name)
        for key, tensor in expert_tensors(experts):
            check_expert_tensor(f"{name}.{key}", tensor, total)
            tensor.data = torch.empty_like(tensor.data[shards[name].experts])
        if world_size > 1:
            experts.num_experts = shards[name].count  # type: ignore[assignment]  # modules take any attribute
    _keep_float32(model, options["dtype"])
    return model, shards


def _keep_float32(model: Any, dtype: torch.dtype) -> None:
    """Gives weights that a family never lowers their float32, as `from_pretrained` does."""
    patterns = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]  # noqa: SLF001  # no public one
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and any(re.search(pattern, name) for pattern in patterns):
            tensor.data = torch.empty_like(tensor, dtype=torch.float32)


def _untie_where_both_are_stored(model: Any, plan: LoadPlan) -> None:
    """Tied weights that the checkpoint holds twice are loaded apart; they are tied again if they are equal."""
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        if target in plan.present and source in plan.present:
            path, _, key = target.rpartition(".")
            owner = model.get_submodule(path)
            setattr(owner, key, nn.Parameter(torch.empty_like(getattr(owner, key))))


def _make_room(model: nn.Module, device: torch.device) -> None:
    """Memory for every parameter and buffer; what is tied stays one."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):  # noqa: SLF001  # a buffer keeps whether it is persistent
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    room = torch.empty_like(tensor, device=device)
                    made[id(tensor)] = nn.Parameter(room, tensor.requires_grad) if held is module._parameters else room  # noqa: SLF001
                held[name] = made[id(tensor)]  # type: ignore[assignment]  # either kind of dict gets its own kind


@torch.no_grad()
def _fill(model: Any, plan: LoadPlan, files: CheckpointFiles, report: Progress) -> None:
    own: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for done, target in enumerate(plan.targets, start=1):
        pieces = [files.read(piece.key, piece.experts) for piece in target.pieces]
        for name, tensor in target.make(pieces, model).items():
            own[name].copy_(tensor)
            own[name]._is_hf_initialized = True  # type: ignore[attr-defined]  # noqa: SLF001  # transformers' mark
        report(done, len(plan.targets), target.name)


def _finish(model: Any, plan: LoadPlan, directory: Path) -> None:
    """Computes what no checkpoint holds, and sets what `from_pretrained` sets."""
    model.initialize_weights()  # leaves everything that was loaded
    missing = set(model.state_dict()) - plan.present
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    model._weight_conversions = plan.used_conversions  # noqa: SLF001  # save_pretrained reverses them
    model.name_or_path = model.config.name_or_path = str(directory)
    model.eval()
    if model.can_generate() and (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)


@contextmanager
def _reporting(progress: Progress | None, *, bar: bool) -> Iterator[Progress]:
    if progress is not None:
        yield progress
    elif bar:
        from rich.progress import Progress as Bar

        with Bar() as shown:
            task = shown.add_task("Loading weights", total=None)
            yield lambda done, total, _: shown.update(task, completed=done, total=total)
    else:
        yield lambda *_: None
