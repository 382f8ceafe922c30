"""Slice and merge for cache state that no row view serves: linear attention, compressors, whole-cache lists.

Every tensor with a batch dimension, inside lists and dicts too, is cut for each sub-batch and joined again after the
step. What a sub-batch writes in place lands in the whole tensor through its view and is not copied; what it replaces
costs one concatenation a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tbo.errors import InternalError
from tbo.models.cache_layers import has_rows


def slice_value(value: Any, rows: slice, batch_size: int) -> Any:
    """The rows of every tensor in a value.

    Numbers held as zero-dimensional tensors are copied, since each sub-batch advances its own.
    """
    if isinstance(value, Tensor):
        if has_rows(value) and value.shape[0] == batch_size:
            return value[rows]
        return value.clone() if value.dim() == 0 else value
    if isinstance(value, Mapping):
        return {key: slice_value(item, rows, batch_size) for key, item in value.items()}
    if isinstance(value, list):
        return [slice_value(item, rows, batch_size) for item in value]
    return value


def merge_values(whole: Any, handed: Sequence[Any], now: Sequence[Any]) -> Any:
    """Joins what the sub-batches made of a value.

    Args:
        whole: the value before the step.
        handed: what each sub-batch was given, see `slice_value`.
        now: what each sub-batch holds after the step.
    """
    first = now[0]
    if isinstance(first, Tensor):
        if isinstance(whole, Tensor) and all(value is given for value, given in zip(now, handed, strict=True)):
            return whole.copy_(first) if whole.dim() == 0 else whole
        return torch.cat(list(now)) if has_rows(first) else first
    if isinstance(first, Mapping):
        return {key: _merge_items(key, whole, handed, now) for key in first}
    if isinstance(first, list):
        return [_merge_items(index, whole, handed, now) for index in range(len(first))]
    return first


def _merge_items(key: Any, whole: Any, handed: Sequence[Any], now: Sequence[Any]) -> Any:
    return merge_values(_item(whole, key), [_item(given, key) for given in handed], [value[key] for value in now])


def _item(container: Any, key: Any) -> Any:
    """The entry of a dict or list, or None where the step has added it."""
    if isinstance(container, Mapping):
        return container.get(key)
    if isinstance(container, list) and isinstance(key, int) and key < len(container):
        return container[key]
    return None


def shallow(value: Any) -> Any:
    """Copies lists and dicts, but not the tensors in them."""
    if isinstance(value, dict):
        return {key: shallow(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shallow(item) for item in value]
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Slices:
    """An object's attributes, cut for each sub-batch.

    Attributes:
        whole: the object.
        parts: one object per sub-batch with rows.
        handed: the attributes each part started with.
        skip: attributes that are not cut.
    """

    whole: Any
    parts: tuple[Any, ...]
    handed: tuple[dict[str, Any], ...]
    skip: frozenset[str] = frozenset()

    def finish(self) -> None:
        """The step succeeded: writes the parts' state back."""
        state = vars(self.whole)
        for name in vars(self.parts[0]).keys() - self.skip:
            now = [vars(part)[name] for part in self.parts]
            state[name] = merge_values(state.get(name), [given.get(name) for given in self.handed], now)


def slice_object(whole: Any, rows: Sequence[slice], batch_size: int, *, skip: Sequence[str] = ()) -> Slices:
    """Cuts an object's attributes into rows, except those named in `skip`."""
    if len(rows) < 2:
        raise InternalError("a cache is sliced although one sub-batch holds all rows")
    parts: list[Any] = []
    handed: list[dict[str, Any]] = []
    for part_rows in rows:
        part = object.__new__(type(whole))
        given = {
            name: slice_value(value, part_rows, batch_size) for name, value in vars(whole).items() if name not in skip
        }
        vars(part).update({name: shallow(value) for name, value in given.items()})
        parts.append(part)
        handed.append(given)
    return Slices(whole=whole, parts=tuple(parts), handed=tuple(handed), skip=frozenset(skip))
