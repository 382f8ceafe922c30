"""A cache split between sub-batches holds, bit for bit, what the unsplit cache holds, whatever else is done to it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer, QuantizedCache

from cache_twins import CACHES, GROWING, HALVES, HEADS, THREE, UNEVEN, B, D, Twins, assert_equal, cut, write
from tbo.errors import SplitError
from tbo.models.cache_layers import SplitLayer
from tbo.models.cache_rows import share_cache_by_tokens, split_cache, why_not_by_tokens, why_not_splittable
from tiny_models import build

pytestmark = pytest.mark.timeout(60)


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
        beams = torch.tensor(order)
        twins.both(lambda cache, beams=beams: cache.reorder_cache(beams))  # type: ignore[misc]  # a bound default
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
    parts: Any = split_cache(twins.split, HALVES, B).parts
    first = parts[0].layers[0].keys
    again: Any = split_cache(twins.split, HALVES, B).parts
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
    deep: Any = copy.deepcopy(twins.split)
    shallow: Any = copy.copy(twins.split.layers[0])
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
        (
            Cache(layers=[DynamicLayer(), _MyLayer()]),  # type: ignore[no-untyped-call]
            "layer 1 of the cache is a _MyLayer",
        ),
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
    assert first is second
    assert first is not None
    assert first.get_seq_length() == 0


def test_windows_and_states_cannot_be_shared_by_tokens() -> None:
    for name in ("sliding", "static sliding", "indexed"):
        assert "layer 0 of the cache is a" in (why_not_by_tokens(CACHES[name]()) or "")
        with pytest.raises(SplitError, match="it forgets positions"):
            share_cache_by_tokens(CACHES[name](), [2, 3])
    with pytest.raises(SplitError, match=r"lengths \[2, -1\]"):
        share_cache_by_tokens(None, [2, -1])


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
    steps = _steps(model.config.vocab_size)
    for index, ids in enumerate(steps):
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
    ids = steps[-1]
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
