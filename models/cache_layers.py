"""Cache layers that hold, or are, the rows of one sub-batch.

Two ways to give each sub-batch its rows without copying the cache every step:

- `SplitLayer` takes a growing layer's place in `cache.layers` and holds one layer per sub-batch. Growing layers
  replace their tensors at every step anyway, so the sub-batches' tensors only meet again when somebody asks for the
  whole batch: a plain step, beam search, the user.
- `StaticRows` is a view of some rows of a preallocated layer. Its writes land in the layer itself.

Shapes: B sequences (rows), S cached positions, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from tbo.errors import SplitError

STATIC_LENGTHS: Final = ("cumulative_length", "indexer_cumulative_length", "cumulative_length_int")
"""What a preallocated layer counts its filled positions with."""

_OWN: Final = ("_parts", "_rows")


def has_rows(value: object) -> bool:
    """Whether a cache layer's attribute is a tensor whose dimension 0 is the batch."""
    return isinstance(value, Tensor) and value.dim() >= 2


class SplitLayer(DynamicLayer):
    """Stands in `cache.layers` for a layer whose rows are held by one layer per sub-batch.

    To everybody else it is one layer of the whole batch: an attribute that is a tensor with rows reads as the merged
    tensor, any other attribute is the same in all parts. Reading leaves the parts in place, as views of what was
    read, so that a write into the merged tensor reaches them; assigning a tensor or updating the whole batch leaves
    a single part.
    """

    _parts: list[Any]
    _rows: tuple[slice, ...]

    def __init__(self, parts: Sequence[Any], rows: Sequence[slice]) -> None:
        self._parts = list(parts)
        self._rows = tuple(rows)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The layers of the sub-batches that have rows, in order."""
        return tuple(self._parts)

    @property
    def rows(self) -> tuple[slice, ...]:
        """The rows of each of `parts`."""
        return self._rows

    def cut(self, rows: Sequence[slice]) -> None:
        """Makes the parts hold these rows; nothing is copied when they already do.

        Raises:
            SplitError: the layer holds another number of rows.
        """
        if tuple(rows) == self._rows and len(rows) == len(self._parts):
            return
        whole = self.merge()
        if len(rows) > 1:
            self._parts = [_rows_of(whole, part) for part in rows]
        self._rows = tuple(rows)

    def merge(self) -> Any:
        """Joins the parts; the one layer left is returned and owned by this object."""
        if len(self._parts) > 1:
            whole = copy.copy(self._parts[0])
            for name in [name for name, value in vars(whole).items() if has_rows(value)]:
                setattr(whole, name, torch.cat([getattr(part, name) for part in self._parts]))
            self._parts = [whole]
            self._rows = ()
        return self._parts[0]

    def restore(self, parts: Sequence[Any], rows: Sequence[slice]) -> None:
        """Puts back what `parts` and `rows` were."""
        self._parts = list(parts)
        self._rows = tuple(rows)

    def _whole(self) -> Any:
        """The merged layer, about to be given another batch size or order."""
        whole = self.merge()
        self._rows = ()
        return whole

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """A plain step: the whole batch is written at once."""
        keys, values = self._whole().update(*args, **kwargs)
        return keys, values

    def reorder_cache(self, *args: Any, **kwargs: Any) -> None:
        """Beam search: rows change places, across parts too."""
        self._whole().reorder_cache(*args, **kwargs)

    def batch_repeat_interleave(self, *args: Any, **kwargs: Any) -> None:
        """Every row becomes several."""
        self._whole().batch_repeat_interleave(*args, **kwargs)

    def batch_select_indices(self, *args: Any, **kwargs: Any) -> None:
        """Some rows stay."""
        self._whole().batch_select_indices(*args, **kwargs)

    def get_seq_length(self) -> int:
        """Cached positions, read from one part: all sub-batches of a padded batch are equally long."""
        return int(self._parts[0].get_seq_length())

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Removes positions from every part."""
        for part in self._parts:
            part.crop(*args, **kwargs)

    def reset(self) -> None:
        """Empties every part."""
        for part in self._parts:
            part.reset()

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        first = getattr(self._parts[0], name)
        if len(self._parts) == 1 or not has_rows(first):
            return first
        whole = torch.cat([getattr(part, name) for part in self._parts])
        for part, rows in zip(self._parts, self._rows, strict=True):
            setattr(part, name, whole[rows])
        return whole

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
            return
        if has_rows(value):
            self._whole()
        for part in self._parts:
            setattr(part, name, value)

    def __copy__(self) -> SplitLayer:
        return type(self)([copy.copy(part) for part in self._parts], self._rows)


class SplitSlidingLayer(SplitLayer, DynamicSlidingWindowLayer):
    """`SplitLayer` of sliding-window layers."""


class SplitIndexedLayer(SplitLayer, DynamicIndexedLayer):
    """`SplitLayer` of layers that also cache the keys of a sparse-attention indexer."""


SPLIT_LAYERS: Final[Mapping[type, type[SplitLayer]]] = MappingProxyType(
    {
        DynamicLayer: SplitLayer,
        DynamicSlidingWindowLayer: SplitSlidingLayer,
        DynamicIndexedLayer: SplitIndexedLayer,
    }
)
"""Growing layers (exactly these classes) and what stands in for them."""


def _rows_of(whole: Any, rows: slice) -> Any:
    part = copy.copy(whole)
    for name, value in vars(whole).items():
        if isinstance(value, Tensor) and has_rows(value):
            setattr(part, name, value[rows])
    return part


def check_rows(layer: Any, batch_size: int, where: str) -> None:
    """Refuses a layer that holds another batch.

    Raises:
        SplitError: names `where`.
    """
    if isinstance(layer, SplitLayer):
        if layer.rows and layer.rows[-1].stop == batch_size:
            return
        layer = layer.merge()
    for name, value in vars(layer).items():
        if isinstance(value, Tensor) and has_rows(value) and value.shape[0] != batch_size:
            raise SplitError(
                f"{where}: {name} of the cache holds {value.shape[0]} rows, the batch has {batch_size}",
                remedy="Use a cache of this batch, or a new one.",
            )


class StaticRows(StaticLayer):
    """Some rows of a preallocated layer, for one sub-batch and one step.

    Keys and values are views, so updates write through. The count of filled positions is this object's own until
    `finish`, because all sub-batches write the same positions and the layer advances once.
    """

    def __init__(self, layer: Any, rows: slice, batch_size: int) -> None:
        self._layer = layer
        self._own_rows = rows
        self._batch_size = batch_size
        for name, value in vars(layer).items():
            setattr(self, name, self._mine(value))

    def _mine(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value[self._own_rows] if has_rows(value) else value.clone()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the layer for the whole batch, once, then takes the rows."""
        if not self._layer.is_initialized:
            self._layer.lazy_initialization(self._as_batch(key_states), self._as_batch(value_states))
        self._adopt(lengths=("cumulative_length",))

    def lazy_initialization_indexer(self, indexer_key_states: Tensor) -> None:
        """Likewise for the keys of a sparse-attention indexer."""
        if not self._layer.is_indexer_initialized:
            self._layer.lazy_initialization_indexer(self._as_batch(indexer_key_states))
        self._adopt(lengths=("indexer_cumulative_length",))

    def _as_batch(self, states: Tensor) -> Tensor:
        """Only shape, dtype and device are read; expanding allocates nothing."""
        return states[:1].expand(self._batch_size, *states.shape[1:])

    def _adopt(self, *, lengths: Sequence[str]) -> None:
        """Takes what the layer allocated; counters that already ran in this step stay.

        Since transformers 5.24 a counter may be allocated with its buffer: then there is none yet that could have run.
        """
        for name, value in vars(self._layer).items():
            if name in STATIC_LENGTHS and name not in lengths and vars(self).get(name) is not None:
                continue
            setattr(self, name, self._mine(value))

    def finish(self) -> None:
        """The step succeeded: the layer's counters become this object's."""
        for name in STATIC_LENGTHS:
            if name not in vars(self):
                continue
            value = vars(self)[name]
            if isinstance(value, Tensor):
                getattr(self._layer, name).copy_(value)  # in place: compiled graphs hold its address
            else:
                setattr(self._layer, name, value)


class StaticSlidingRows(StaticRows, StaticSlidingWindowLayer):
    """`StaticRows` of a sliding-window layer."""


class StaticIndexedRows(StaticRows, StaticIndexedLayer):
    """`StaticRows` of a layer that also caches the keys of a sparse-attention indexer."""


STATIC_ROWS: Final[Mapping[type, type[StaticRows]]] = MappingProxyType(
    {
        StaticLayer: StaticRows,
        StaticSlidingWindowLayer: StaticSlidingRows,
        StaticIndexedLayer: StaticIndexedRows,
    }
)
"""Preallocated layers (exactly these classes) and the views of their rows."""
