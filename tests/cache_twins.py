"""The same steps on two equal caches, one split between sub-batches and one not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from tbo.models.cache_rows import split_cache

B, HEADS, D, LAYERS = 5, 2, 4, 3
HALVES = [slice(0, 3), slice(3, 5)]
UNEVEN = [slice(0, 1), slice(1, 5)]
THREE = [slice(0, 2), slice(2, 2), slice(2, 4), slice(4, 5)]

CACHES: dict[str, Callable[[], Cache]] = {
    "dynamic, layers appear as they are used": DynamicCache,
    "dynamic": lambda: Cache(layers=[DynamicLayer() for _ in range(LAYERS)]),
    "sliding": lambda: Cache(layers=[DynamicSlidingWindowLayer(sliding_window=4) for _ in range(LAYERS)]),
    "indexed": lambda: Cache(layers=[DynamicIndexedLayer() for _ in range(LAYERS)]),
    "mixed": lambda: Cache(layers=[DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=6), DynamicLayer()]),
    "static": lambda: Cache(layers=[StaticLayer(max_cache_len=24) for _ in range(LAYERS)]),
    "static sliding": lambda: Cache(layers=[StaticSlidingWindowLayer(24, sliding_window=4) for _ in range(LAYERS)]),
    "static indexed": lambda: Cache(layers=[StaticIndexedLayer(max_cache_len=24) for _ in range(LAYERS)]),
}
GROWING = ["dynamic, layers appear as they are used", "dynamic", "sliding", "indexed", "mixed"]


class Twins:
    """The same steps on a cache that is split and on one that is not."""

    def __init__(self, name: str, batch_size: int = B) -> None:
        self.split: Any = CACHES[name]()
        self.whole: Any = CACHES[name]()
        self.batch_size = batch_size
        self.random = torch.Generator().manual_seed(11)

    def draw(self, positions: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        def one(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=self.random)

        return [
            (
                one(self.batch_size, HEADS, positions, D),
                one(self.batch_size, HEADS, positions, D + 1),
                one(self.batch_size, positions, D),
            )
            for _ in range(LAYERS)
        ]

    def step(self, rows: Sequence[slice] | None, positions: int = 1) -> None:
        new = self.draw(positions)
        expected = [write(self.whole, layer, states) for layer, states in enumerate(new)]
        if rows is None:
            actual = [write(self.split, layer, states) for layer, states in enumerate(new)]
            assert_equal(actual, expected)
            return
        parts = split_cache(self.split, rows, self.batch_size)
        for part, cache in reversed(list(zip(rows, parts.parts, strict=True))):  # parts do not depend on order
            assert (cache is None) == (part.start == part.stop)
            if cache is not None:
                assert cache.get_seq_length() == self.whole.get_seq_length() - positions
                actual = [write(cache, layer, cut(states, part)) for layer, states in enumerate(new)]
                assert_equal(actual, [cut(states, part) for states in expected])
        parts.finish()
        self.check()

    def check(self) -> None:
        assert len(self.split.layers) == len(self.whole.layers)
        assert self.split.get_mask_sizes(2, 0) == self.whole.get_mask_sizes(2, 0)
        assert self.split.is_sliding == self.whole.is_sliding
        for layer, other in zip(self.split.layers, self.whole.layers, strict=True):
            assert layer.get_seq_length() == other.get_seq_length()
            assert_equal(state_of(layer), state_of(other))

    def both(self, action: Callable[[Any], Any]) -> None:
        action(self.split)
        action(self.whole)
        self.check()


def write(cache: Any, layer: int, states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    keys, values = cache.update(states[0], states[1], layer)
    if hasattr(cache.layers[layer], "update_indexer"):
        return keys, values, cache.update_indexer(states[2], layer)
    return keys, values


def cut(tensors: Sequence[torch.Tensor], rows: slice) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[rows] for tensor in tensors)


def state_of(layer: Any) -> tuple[Any, ...]:
    names = ("keys", "values", "indexer_keys", "cumulative_length", "cumulative_length_int", "is_initialized")
    return tuple(getattr(layer, name, None) for name in names)


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
