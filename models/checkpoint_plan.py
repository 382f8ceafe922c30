"""Which tensors of a checkpoint a rank reads, and what they become in its model.

Names differ between checkpoint and model: experts lie one by one or stacked, and some families were renamed. The
table of those differences is transformers' own (`conversion_mapping`), applied forward as `from_pretrained` does; a
converter that merges all experts of a layer is simply given fewer of them here.

Shapes: E experts of this rank, W experts of all ranks.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from tbo.errors import CheckpointError
from tbo.models.checkpoint_files import CheckpointFiles
from tbo.models.expert_shard import ExpertShard

_SHOWN: Final = 8
_NEVER_LOADED: Final = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Buffers that old checkpoints carry and models compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One read: a tensor of the checkpoint, or the experts of it that belong here."""

    key: str
    pattern: str
    experts: slice | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What one or more tensors of the model are made of.

    Attributes:
        name: the (first) tensor's name in the model.
        pieces: what is read for it, in order.
        converter: transformers' recipe; None for a tensor that only had another name.
    """

    name: str
    pieces: tuple[Piece, ...]
    converter: WeightConverter | None

    def make(self, tensors: Sequence[Tensor], model: nn.Module) -> dict[str, Tensor]:
        """The model's tensors out of the pieces' tensors."""
        if self.converter is None:
            return {self.name: tensors[0]}
        recipe = copy.deepcopy(self.converter)
        for piece, tensor in zip(self.pieces, tensors, strict=True):
            recipe.add_tensor(self.name, piece.key, piece.pattern, tensor)  # type: ignore[arg-type]  # as when saving
        made: Mapping[str, Any] = recipe.convert(self.name, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass(kw_only=True, slots=True)
class Faults:
    """What does not fit between a checkpoint and a model."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def refuse(self, directory: object, model: nn.Module) -> None:
        """Raises one error that names them.

        Raises:
            CheckpointError: there are any.
        """
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "of the wrong shape": self.misshapen}
        found = [f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds.items() if names]
        if found:
            raise CheckpointError(
                f"the checkpoint in {directory} does not fit {type(model).__name__}: {'; '.join(found)}",
                remedy="Check that config.json and the weights belong together.",
            )


class LoadPlan:
    """Assigns every tensor of a checkpoint to a tensor of the model, before anything is read.

    Args:
        model: on the meta device, with E experts where `shards` says so.
        files: the checkpoint.
        shards: this rank's share for each expert tensor of the model, by name.
    """

    def __init__(self, model: Any, files: CheckpointFiles, shards: Mapping[str, ExpertShard]) -> None:
        self._model = model
        self._files = files
        self._shards = shards
        self._expected: dict[str, Tensor] = dict(model.state_dict())
        self.faults = Faults()
        self._conversions = get_model_conversion_mapping(model)
        self._renamings = [item for item in self._conversions if isinstance(item, WeightRenaming)]
        self._converters = [item for item in self._conversions if isinstance(item, WeightConverter)]
        self._incomplete: set[str] = set()
        self.foreign = 0
        self.targets = self._assign()
        self.present = frozenset(self._check_shapes())
        self._find_missing()

    @property
    def used_conversions(self) -> list[Any]:
        """The conversions this checkpoint needed; transformers reverses them when the model is saved."""
        return [item for item in self._conversions if item.was_used()]

    def _assign(self) -> tuple[Target, ...]:
        pieces: dict[str, list[Piece]] = {}
        converters: dict[str, WeightConverter] = {}
        experts_seen: dict[tuple[str, str], dict[int, str]] = {}
        for key in sorted(self._files.keys, key=dot_natural_key):
            name, pattern = self._rename(key)
            if name not in self._expected:
                if not self._ignored(key, name, "_keys_to_ignore_on_load_unexpected", _NEVER_LOADED):
                    self.faults.unexpected.append(key)
                continue
            own = pieces.setdefault(name, [])
            if pattern is not None:
                converters[name] = next(item for item in self._converters if pattern in item.source_patterns)
            shard = self._shards.get(name)
            if shard is None or pattern is None or "*" not in pattern:
                own.append(Piece(key=key, pattern=pattern or key, experts=None if shard is None else shard.experts))
                continue
            expert = self._expert_of(key, pattern)
            experts_seen.setdefault((name, pattern), {})[expert] = key
            if expert in range(*shard.experts.indices(shard.total)):
                own.append(Piece(key=key, pattern=pattern, experts=None))
            else:
                self.foreign += 1
        self._check_experts(experts_seen, converters)
        return tuple(
            Target(name=name, pieces=tuple(own), converter=converters.get(name)) for name, own in pieces.items() if own
        )

    def _rename(self, key: str) -> tuple[str, str | None]:
        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self._expected)
        if name not in self._expected and key in self._expected:
            return key, None
        return name, pattern

    def _expert_of(self, key: str, pattern: str) -> int:
        """The number that stands for the pattern's star."""
        for renaming in self._renamings:
            key, _ = renaming.rename_source_key(key)
        found = re.search(pattern.replace("*.", r"(\d+)\."), key)
        if found is None:
            raise CheckpointError(
                f"no expert number can be read from the name {key} with the pattern {pattern}",
                remedy="Load the model with from_pretrained and shard it with tbo.shard_experts instead.",
            )
        return int(found.group(1))

    def _check_experts(
        self, seen: Mapping[tuple[str, str], Mapping[int, str]], converters: Mapping[str, WeightConverter]
    ) -> None:
        """Every expert of every layer must be there, also those that other ranks read: all ranks refuse alike."""
        for name in {name for name, _ in seen}:
            for pattern in converters[name].source_patterns:
                keys = seen.get((name, pattern), {})
                absent = [expert for expert in range(self._shards[name].total) if expert not in keys]
                if not keys:
                    self.faults.missing.append(f"{pattern} for {name}")
                else:
                    number, example = next(iter(keys.items()))
                    head, tail = example.rsplit(f".{number}.", 1)
                    self.faults.missing.extend(f"{head}.{expert}.{tail}" for expert in absent)
                if absent:
                    self._incomplete.add(name)
                self.faults.unexpected.extend(key for expert, key in keys.items() if expert >= self._shards[name].total)

    def _check_shapes(self) -> Iterator[str]:
        """Makes every target once without values; yields the names of all tensors that will be loaded."""
        for target in self.targets:
            if target.name in self._incomplete:
                yield target.name
                continue
            try:
                made = target.make([self._without_values(piece) for piece in target.pieces], self._model)
            except (RuntimeError, ValueError) as error:
                self.faults.misshapen.append(f"{target.name} (its parts do not fit together: {error})")
                yield target.name
                continue
            for name, tensor in made.items():
                yield name
                wanted = self._expected.get(name)
                if wanted is None:
                    self.faults.unexpected.append(name)
                elif tensor.shape != wanted.shape:
                    shapes = f"{list(tensor.shape)}, the model {list(wanted.shape)}"
                    self.faults.misshapen.append(f"{name} (the checkpoint has {shapes})")

    def _without_values(self, piece: Piece) -> Tensor:
        shape = self._files.shape(piece.key)
        if piece.experts is not None and shape:
            shape = (len(range(*piece.experts.indices(shape[0]))), *shape[1:])
        return torch.empty(shape, device="meta")

    def _find_missing(self) -> None:
        tied: Mapping[str, str] = getattr(self._model, "all_tied_weights_keys", {})
        partners = {
            name: {source, *(key for key, value in tied.items() if value == source)}
            for target, source in tied.items()
            for name in (target, source)
        }
        for name in self._expected:
            if name in self.present or partners.get(name, set()) & self.present:
                continue
            if not self._ignored(name, name, "_keys_to_ignore_on_load_missing", ()):
                self.faults.missing.append(name)

    def _ignored(self, key: str, name: str, attribute: str, also: Sequence[str]) -> bool:
        patterns = [*(getattr(self._model, attribute, None) or ()), *also]
        return any(re.search(pattern, text) for pattern in patterns for text in (key, name))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
