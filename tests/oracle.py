"""What a wrapped model must compute: the plain model's own layers, run on each part of the batch by itself.

Independent of the code under test: nothing of `tbo` is used here. Layers before the first sparse one run on the whole
batch, as rule 5 says; from there on each part passes each layer alone, with a cache of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from tiny_models import token_batch, visited_layers


def first_sparse_layer(model: Any) -> int:
    """Index of the first layer with experts."""
    return next(
        index
        for index, layer in enumerate(model.model.layers)
        if any(name.endswith("experts") for name, _ in layer.named_modules())
    )


def even_rows(batch_size: int, parts: int) -> list[slice]:
    """Rows of each part, larger parts first; written out, not taken from tbo."""
    sizes = [batch_size // parts + (index < batch_size % parts) for index in range(parts)]
    starts = [sum(sizes[:index]) for index in range(parts)]
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]


@contextmanager
def plain_by_parts(model: PreTrainedModel, rows: Sequence[slice]) -> Iterator[None]:
    """Every call of the model runs its sparse layers on each part of the rows by itself."""
    first = first_sparse_layer(model)
    layers: Any = model.model.layers
    caches = [DynamicCache(config=model.config) for _ in rows]
    batch_size = rows[-1].stop

    def visit(index: int, own: Callable[..., Any], hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        if index < first:
            return own(hidden, **kwargs)
        outputs = []
        for part, cache in zip(rows, caches, strict=True):
            taken = {name: _take(value, part, batch_size, cache) for name, value in kwargs.items()}
            outputs.append(own(hidden[part], **taken))
        whole = next((value for value in kwargs.values() if isinstance(value, Cache)), None)
        if whole is not None:
            _show_length(whole, caches, index)
        if isinstance(outputs[0], tuple):
            return tuple(torch.cat(list(items)) for items in zip(*outputs, strict=True))
        return torch.cat(outputs)

    with visited_layers(list(layers), visit):
        yield


def _take(value: Any, rows: slice, batch_size: int, cache: Cache) -> Any:
    if isinstance(value, Cache):
        return cache
    if isinstance(value, Tensor):
        return value[rows] if value.dim() > 1 and value.shape[0] == batch_size else value
    if isinstance(value, tuple):
        return tuple(_take(item, rows, batch_size, cache) for item in value)
    if isinstance(value, dict):
        return {key: _take(item, rows, batch_size, cache) for key, item in value.items()}
    return value


def _show_length(whole: Cache, parts: Sequence[Cache], index: int) -> None:
    """The model reads lengths from its own cache to build the next step's masks."""
    merged = copy.copy(parts[0].layers[index])
    for name, value in vars(merged).items():
        if isinstance(value, Tensor) and value.dim() > 1:
            setattr(merged, name, torch.cat([vars(part.layers[index])[name] for part in parts]))
    whole.layers[index] = merged


@torch.no_grad()
def hidden_of_steps(model: Any, ids: Tensor, mask: Tensor, following: Tensor) -> list[Tensor]:
    """Last hidden states of a padded prompt and of each following token, fed one at a time through the cache."""
    output = model.model(ids, attention_mask=mask, use_cache=True)
    hidden = [output.last_hidden_state]
    for step in range(following.shape[1]):
        mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
        # Named past_key_values up to transformers 5.23, cache from 5.24.
        name = "cache" if getattr(output, "cache", None) is not None else "past_key_values"
        output = model.model(
            following[:, step : step + 1], attention_mask=mask, use_cache=True, **{name: getattr(output, name)}
        )
        hidden.append(output.last_hidden_state)
    return hidden


def expected_of_steps(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, following: Tensor, rows: Sequence[slice]
) -> list[Tensor]:
    """What `hidden_of_steps` must give on a model wrapped with these parts."""
    if first_sparse_layer(model) == 0:
        parts = [
            hidden_of_steps(model, ids[part], mask[part], following[part]) for part in rows if part.stop > part.start
        ]
        return [torch.cat(list(step)) for step in zip(*parts, strict=True)]
    with plain_by_parts(model, [part for part in rows if part.stop > part.start]):
        return hidden_of_steps(model, ids, mask, following)


def worst_difference(actual: Sequence[Tensor], expected: Sequence[Tensor], mask: Tensor) -> float:
    """Largest difference over all valid positions and steps. A padded position's own output is garbage in both."""
    valid = mask.bool()
    first = (actual[0] - expected[0])[valid].abs().max().item()
    later = [(one - other).abs().max().item() for one, other in zip(actual[1:], expected[1:], strict=True)]
    return max([first, *later])


def case(batch_size: int = 5, positions: int = 10, decode_steps: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and following tokens; every part of two or three has a padded row."""
    ids, mask = token_batch(batch_size, positions)
    if batch_size > 4:
        ids[4, :3], mask[4, :3] = 0, 0
    following, _ = token_batch(batch_size, decode_steps, seed=1, left_padding=False)
    return ids, mask, following
