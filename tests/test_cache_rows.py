"""A cache split between sub-batches holds, bit for bit, what the unsplit cache holds, whatever else is done to it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    QuantizedCache,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from tbo.errors import SplitError, WrapError
from tbo.models.cache_layers import SplitLayer
from tbo.models.cache_rows import (
    remember,
    restore,
    share_cache_by_tokens,
    split_cache,
    why_not_by_tokens,
    why_not_splittable,
)
from tbo.models.cache_undo import condemn
from tiny_models import build

pytestmark = pytest.mark.timeout(60)

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
        self.split, self.whole = CACHES[name](), CACHES[name]()
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

    def both(self, action: Callable[[Cache], Any]) -> None:
        action(self.split)
        action(self.whole)
        self.check()


def write(cache: Cache, layer: int, states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
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


@pytest.mark.parametrize("name", CACHES)
def test_any_sequence_of_cuts_and_plain_steps_equals_the_whole_cache(name: str) -> None:
    twins = Twins(name)
    twins.step(HALVES, 3)
    for rows in (HALVES, None, HALVES, THREE, UNEVEN, None, UNEVEN):
        twins.step(rows)
    twins.step(HALVES, 2)


@pytest.mark.parametrize("name", CACHES)
def test_beam_search_between_split_steps(name: str) -> None:
    twins = Twins(name)
    twins.step(HALVES, 3)
    for order in ([4, 0, 0, 1, 3], [0, 0, 0, 0, 0], [1, 2, 3, 4, 0]):
        twins.both(lambda cache, order=order: cache.reorder_cache(torch.tensor(order)))
        twins.step(HALVES)


@pytest.mark.parametrize("name", GROWING)
def test_rows_repeated_and_selected_between_split_steps(name: str) -> None:
    twins = Twins(name)
    twins.step(HALVES, 3)
    twins.both(lambda cache: cache.batch_repeat_interleave(2))
    twins.batch_size = 2 * B
    twins.step([slice(0, 4), slice(4, 10)])
    twins.both(lambda cache: cache.batch_select_indices(torch.tensor([9, 2, 4])))
    twins.batch_size = 3
    twins.step([slice(0, 1), slice(1, 3)])


@pytest.mark.parametrize("name", ["dynamic, layers appear as they are used", "dynamic", "indexed"])
def test_cropping_between_split_steps(name: str) -> None:
    twins = Twins(name)
    twins.step(HALVES, 6)
    twins.both(lambda cache: cache.crop(-2))
    twins.step(HALVES)
    twins.step(None)
    twins.both(lambda cache: cache.crop(-1))
    twins.step(UNEVEN)


def test_cropping_a_sliding_window_that_records_its_past() -> None:
    twins = Twins("sliding")
    twins.both(lambda cache: cache.activate_past_recording())
    twins.step(HALVES, 6)
    twins.both(lambda cache: cache.crop(-2))
    twins.step(HALVES, 2)
    twins.both(lambda cache: cache.crop(0))


@pytest.mark.parametrize("name", ["static", "static sliding", "static indexed"])
def test_a_reset_static_cache_is_used_again(name: str) -> None:
    twins = Twins(name)
    twins.step(HALVES, 3)
    twins.both(lambda cache: cache.reset())
    twins.step(UNEVEN, 2)


def test_a_dynamic_cache_resets_as_transformers_does() -> None:
    twins = Twins("dynamic")
    twins.step(HALVES, 3)
    twins.both(lambda cache: cache.reset())
    twins.step(HALVES)


def test_a_growing_cache_is_not_copied_between_steps_of_one_cut() -> None:
    twins = Twins("dynamic")
    twins.step(HALVES, 3)
    parts = split_cache(twins.split, HALVES, B).parts
    first = parts[0].layers[0].keys
    again = split_cache(twins.split, HALVES, B).parts
    assert again[0].layers[0] is parts[0].layers[0]
    assert again[0].layers[0].keys is first


def test_writing_into_the_merged_tensor_reaches_the_parts() -> None:
    twins = Twins("dynamic")
    twins.step(HALVES, 3)
    for cache in (twins.split, twins.whole):
        cache.layers[1].keys[4].fill_(7.0)
    twins.step(HALVES)


def test_a_copied_cache_is_independent() -> None:
    twins = Twins("mixed")
    twins.step(HALVES, 3)
    deep, shallow = copy.deepcopy(twins.split), copy.copy(twins.split.layers[0])
    twins.step(HALVES)
    assert deep.get_seq_length() == shallow.get_seq_length() == 3
    assert shallow.keys.shape == (B, HEADS, 3, D)
    assert isinstance(deep.layers[0], SplitLayer)


@pytest.mark.parametrize("name", ["static", "static indexed"])
def test_a_static_cache_is_written_through_and_advances_once(name: str) -> None:
    twins = Twins(name)
    twins.step(None, 2)
    layer: Any = twins.split.layers[0]
    keys, counter = layer.keys.data_ptr(), layer.cumulative_length
    twins.step(HALVES, 3)
    assert layer.keys.data_ptr() == keys
    assert layer.cumulative_length is counter
    assert int(counter) == 5


@pytest.mark.parametrize("name", CACHES)
def test_layers_before_the_first_split_one_stay_whole(name: str) -> None:
    twins = Twins(name)
    twins.step(None, 2)
    new = twins.draw(1)
    expected = [write(twins.whole, layer, states) for layer, states in enumerate(new)]
    before = twins.split.layers[0]
    assert_equal(write(twins.split, 0, new[0]), expected[0])
    split = split_cache(twins.split, HALVES, B, first_layer=1)
    for rows, cache in zip(HALVES, split.parts, strict=True):
        assert_equal(
            [write(cache, layer, cut(new[layer], rows)) for layer in (1, 2)],
            [cut(states, rows) for states in expected[1:]],
        )
    split.finish()
    assert twins.split.layers[0] is before
    twins.check()


def test_no_cache_and_one_part() -> None:
    assert split_cache(None, HALVES, B).parts == (None, None)
    cache = DynamicCache()
    assert split_cache(cache, [slice(0, B), slice(B, B)], B).parts == (cache, None)
    assert split_cache(cache, [slice(0, 0), slice(0, 0)], 0).parts == (None, None)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [slice(0, 2)],
        [slice(0, 2), slice(3, 5)],
        [slice(0, 3), slice(2, 5)],
        [slice(1, 5)],
        [slice(0, 6)],
        [slice(0, 5, 2)],
    ],
)
def test_rows_that_do_not_cover_the_batch_are_refused(rows: list[slice]) -> None:
    with pytest.raises(SplitError, match="do not cover 0:5 once and in order"):
        split_cache(DynamicCache(), rows, B)


@pytest.mark.parametrize("name", ["dynamic", "sliding", "static"])
@pytest.mark.parametrize("first", [HALVES, None])
def test_a_cache_of_another_batch_is_refused(name: str, first: list[slice] | None) -> None:
    twins = Twins(name)
    twins.step(first, 2)
    with pytest.raises(SplitError, match=r"layer 0: keys of the cache holds 5 rows, the batch has 6"):
        split_cache(twins.split, [slice(0, 3), slice(3, 6)], 6)


class _MyCache(DynamicCache):
    pass


class _MyLayer(DynamicLayer):
    pass


class PagedAttentionCache:
    pass


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (
            EncoderDecoderCache(DynamicCache(), DynamicCache()),
            "EncoderDecoderCache cannot be split: it holds an encoder",
        ),
        (QuantizedCache.__new__(QuantizedCache), "QuantizedCache cannot be split: it keeps keys and values quantized"),
        (PagedAttentionCache(), "PagedAttentionCache cannot be split: its blocks belong to no row"),
        (_MyCache(), "_MyCache is a cache class tbo does not know"),
        (Cache(layers=[DynamicLayer(), _MyLayer()]), "layer 1 of the cache is a _MyLayer"),
        (object(), "object is not a transformers Cache"),
    ],
)
def test_caches_that_cannot_be_split_are_named(cache: Any, reason: str) -> None:
    assert (why_not_splittable(cache) or "").startswith(reason)
    if isinstance(cache, Cache):
        with pytest.raises(SplitError, match=type(cache).__name__ if cache.__class__ is not Cache else "_MyLayer"):
            split_cache(cache, HALVES, B)


def test_an_offloaded_cache_is_named() -> None:
    cache = DynamicCache()
    cache.offloading = True
    assert "offloading" in (why_not_splittable(cache) or "")


# Tokens of one sequence


@pytest.mark.parametrize("name", ["dynamic, layers appear as they are used", "dynamic", "static"])
def test_later_tokens_see_earlier_ones(name: str) -> None:
    twins = Twins(name, batch_size=1)
    twins.step(None, 2)
    new = twins.draw(5)
    expected = [write(twins.whole, layer, states) for layer, states in enumerate(new)]
    split = share_cache_by_tokens(twins.split, [3, 0, 2])
    assert split.parts == (twins.split, None, twins.split)
    for layer, states in enumerate(new):
        write(twins.split, layer, [tensor[:, :, :3] for tensor in states])
        assert_equal(write(twins.split, layer, [tensor[:, :, 3:] for tensor in states]), expected[layer])
    split.finish()
    twins.check()


def test_tokens_without_a_cache_share_a_temporary_one() -> None:
    first, second = share_cache_by_tokens(None, [2, 3]).parts
    assert first is second is not None
    assert first.get_seq_length() == 0


def test_windows_and_states_cannot_be_shared_by_tokens() -> None:
    for name in ("sliding", "static sliding", "indexed"):
        assert "layer 0 of the cache is a" in (why_not_by_tokens(CACHES[name]()) or "")
        with pytest.raises(SplitError, match="it forgets positions"):
            share_cache_by_tokens(CACHES[name](), [2, 3])
    with pytest.raises(SplitError, match=r"lengths \[2, -1\]"):
        share_cache_by_tokens(None, [2, -1])


# A failed step


def fail_midway(twins: Twins, rows: Sequence[slice] | None, positions: int) -> Cache:
    """A step of which only some layers, and not all sub-batches, get to write. Returns the mark's cache."""
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
    return twins.split


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
    part = split_cache(cache, HALVES, B).parts[1]
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
    old = twins.split.layers[0].parts[0].keys
    mark = remember(twins.split)
    twins.step(HALVES)
    import gc

    assert not any(
        item is not None and isinstance(item, list) and any(x is old for x in item)
        for item in gc.get_referrers(old)
        if item is not locals()
    )
    assert mark.cache is twins.split


# Whole models


def _steps(vocabulary: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    lengths = (21, 1, 1, 1, 1, 1)
    return [torch.randint(3, vocabulary, (B, length), generator=random) for length in lengths]


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "gpt_oss", "qwen3_next", "minimax", "glm_moe_dsa", "deepseek_v4", "llama4_text"],
)
@torch.no_grad()
def test_split_caches_serve_a_model_like_caches_of_their_own(family: str) -> None:
    model = build(family)
    eager = {"attention_mask": None}
    shared: Any = None
    own: list[Any] = [None, None]
    for index, ids in enumerate(_steps(model.config.vocab_size)):
        if index == 0:
            shared = type(model(ids[:1], use_cache=True).past_key_values)()
            if family != "minimax":
                shared = DynamicCache(config=model.config)
        split = split_cache(shared, HALVES, B)
        for number, rows in enumerate(HALVES):
            expected = model(ids[rows], past_key_values=own[number], use_cache=True, **eager)
            own[number] = expected.past_key_values
            actual = model(ids[rows], past_key_values=split.parts[number], use_cache=True, **eager)
            assert_equal(actual.logits, expected.logits)
        split.finish()
    again = model(ids, past_key_values=shared, use_cache=True, **eager).logits
    expected_again = torch.cat(
        [
            model(ids[rows], past_key_values=own[number], use_cache=True, **eager).logits
            for number, rows in enumerate(HALVES)
        ]
    )
    torch.testing.assert_close(again, expected_again, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_static_cache_serves_a_model_in_parts() -> None:
    model = build("gpt_oss")
    shared, other = (StaticCache(config=model.config, max_cache_len=40) for _ in range(2))
    for ids in _steps(model.config.vocab_size):
        split = split_cache(shared, HALVES, B)
        actual = torch.cat(
            [model(ids[rows], past_key_values=cache).logits for rows, cache in zip(HALVES, split.parts, strict=True)]
        )
        split.finish()
        torch.testing.assert_close(actual, model(ids, past_key_values=other).logits, rtol=1e-4, atol=1e-4)
