"""A failed step leaves no trace in a cache, or leaves it refusing every use."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from cache_twins import CACHES, HALVES, HEADS, LAYERS, UNEVEN, B, D, Twins, cut, write
from tbo.errors import WrapError
from tbo.models.cache_rows import remember, restore, share_cache_by_tokens, split_cache
from tbo.models.cache_undo import condemn

pytestmark = pytest.mark.timeout(60)


def fail_midway(twins: Twins, rows: Sequence[slice] | None, positions: int) -> None:
    """A step of which only some layers, and not all sub-batches, get to write."""
    new = twins.draw(positions)
    mark = remember(twins.split)
    if rows is None:
        for layer in range(LAYERS - 1):
            write(twins.split, layer, new[layer])
    else:
        parts = split_cache(twins.split, rows, twins.batch_size).parts
        for layer in range(LAYERS - 1):
            write(parts[0], layer, cut(new[layer], rows[0]))
        write(parts[-1], 0, cut(new[0], rows[-1]))
    assert restore(mark)


@pytest.mark.parametrize("name", [name for name in CACHES if name != "static sliding"])
@pytest.mark.parametrize("before", [None, HALVES])
@pytest.mark.parametrize("failing", [None, HALVES, UNEVEN])
def test_a_failed_step_leaves_no_trace(name: str, before: list[slice] | None, failing: list[slice] | None) -> None:
    twins = Twins(name)
    fail_midway(twins, failing, 3)
    assert twins.split.get_seq_length() == 0
    twins.step(before, 3)
    for _ in range(3):
        fail_midway(twins, failing, 1)
        assert twins.split.get_seq_length() == twins.whole.get_seq_length()
        twins.step(before)
    fail_midway(twins, failing, 2)
    twins.step(HALVES)


@pytest.mark.parametrize("rows", [None, HALVES])
def test_an_empty_static_window_is_restored_and_a_written_one_is_unusable(rows: list[slice] | None) -> None:
    twins = Twins("static sliding")
    fail_midway(twins, rows, 2)
    twins.step(HALVES, 3)
    mark = remember(twins.split)
    write(twins.split, 0, twins.draw(1)[0])
    assert not restore(mark)
    for use in (
        lambda cache: cache.get_seq_length(),
        lambda cache: cache.get_mask_sizes(1, 0),
        lambda cache: write(cache, 0, twins.draw(1)[0]),
        lambda cache: cache.is_sliding,
        lambda cache: cache.layers[0].keys,
        lambda cache: cache.crop(-1),
        lambda cache: cache.reset(),
        remember,
        lambda cache: split_cache(cache, HALVES, B),
        lambda cache: share_cache_by_tokens(cache, [1]),
    ):
        with pytest.raises(WrapError, match="this cache cannot be used any more: a step failed halfway and layer 0"):
            use(twins.split)
    assert "UnusableLayer" in repr(copy.deepcopy(twins.split))


def test_a_failed_first_step_leaves_the_cache_open_to_another_batch() -> None:
    for name in CACHES:
        twins = Twins(name)
        fail_midway(twins, HALVES, 3)
        twins.batch_size = 2
        twins.step([slice(0, 1), slice(1, 2)], 2)


def test_linear_state_written_in_place_makes_the_cache_unusable_and_untouched_state_does_not() -> None:
    cache = Cache(layers=[LinearAttentionLayer(), DynamicLayer()])
    cache.update_conv_state(torch.randn(B, 6, 4), 0)
    cache.update_recurrent_state(torch.randn(B, 2, 3, 3), 0)
    cache.update(torch.randn(B, HEADS, 4, D), torch.randn(B, HEADS, 4, D), 1)
    mark = remember(cache)
    cache.update(torch.randn(B, HEADS, 1, D), torch.randn(B, HEADS, 1, D), 1)
    assert restore(mark)
    assert cache.get_seq_length(1) == 4
    mark = remember(cache)
    part: Any = split_cache(cache, HALVES, B).parts[1]
    part.update_recurrent_state(torch.randn(2, 2, 3, 3), 0)
    assert not restore(mark)
    with pytest.raises(WrapError, match="LinearAttentionLayer, was overwritten in place"):
        cache.has_previous_state(0)


def test_condemning_an_empty_cache_holds() -> None:
    cache = DynamicCache()
    condemn(cache, "it was a test")
    with pytest.raises(WrapError, match="it was a test"):
        cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)


def test_remembering_holds_no_growing_keys() -> None:
    twins = Twins("dynamic")
    twins.step(HALVES, 3)
    twins.step(HALVES)
    old = weakref.ref(twins.split.layers[0].parts[0].keys)
    mark = remember(twins.split)
    twins.step(HALVES)
    assert old() is None
    assert mark.cache is twins.split
