"""One long row, cut between tokens: equal, bit for bit, to the plain model fed the same parts one after another.

And where a cut would change what a token sees, the row stays whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers.masking_utils import flash_attention_mask

import tbo
from tbo.batch import Reason
from tiny_models import build, token_batch
from wrapped_models import cache_argument, cache_of, hidden, report

# The latent families start with a dense layer, which runs on the whole row, where a product rounds otherwise than on
# a part; without it, every layer runs on parts.
SPLIT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"first_k_dense_replace": 0},
    "deepseek_v3": {"first_k_dense_replace": 0},
    "dots1": {"first_k_dense_replace": 0},
    "ernie4_5_moe": {"moe_layer_start_index": 0},
    "glm4_moe": {"first_k_dense_replace": 0},
    "granitemoe": {},
    "hunyuan_v1_moe": {},
    "minimax_m2": {},
    "mixtral": {},
    "olmoe": {},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {},
}
WHOLE = ("deepseek_v4", "glm_moe_dsa", "gpt_oss", "llama4_text", "minimax", "qwen3_next")
LENGTH = 13
PROMPT = token_batch(1, LENGTH, left_padding=False)[0]
FOLLOWING = token_batch(1, 3, seed=1, left_padding=False)[0]


def new_cache(model: Any, kind: str) -> Any:
    return StaticCache(config=model.config, max_cache_len=24) if kind == "static" else DynamicCache(config=model.config)


@torch.no_grad()
def fed(model: Any, lengths: tuple[int, ...], kind: str = "dynamic", mask: Tensor | None = None) -> list[Tensor]:
    """Hidden states of a prompt fed in chunks, and of three tokens after it."""
    cache = new_cache(model, kind)
    chunks, end = [], 0
    for given in [*PROMPT.split(lengths, dim=1), *FOLLOWING.split(1, dim=1)]:
        end += given.shape[1]
        seen = None
        if mask is not None:
            seen = torch.cat([mask, mask.new_ones(1, 3)], dim=1)[:, :end]
        output = model.model(given, attention_mask=seen, **cache_argument(model.model, cache))
        assert cache_of(output) is cache
        chunks.append(output.last_hidden_state)
    return [torch.cat(chunks[: len(lengths)], dim=1), *chunks[len(lengths) :]]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", SPLIT)
def test_a_prompt_in_parts_equals_chunked_prefill(family: str, attention: str) -> None:
    model = build(family, attention=attention, **SPLIT[family])
    expected = fed(model, (7, 6))
    handle = tbo.wrap(model, overlap="always")
    hidden(model, PROMPT)
    last = report(handle)
    assert (last.split, last.tokens_per_sub_batch, last.phase) == ("tokens", (7, 6), tbo.Phase.PREFILL)
    assert equal(fed(model, (LENGTH,)), expected)
    assert (report(handle).phase, report(handle).tokens_per_sub_batch) == (tbo.Phase.DECODE, (1, 0))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("sub_batches", [2, 3])
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_caches_padding_and_three_parts(family: str, padding: int, sub_batches: int, kind: str) -> None:
    model = build(family, **SPLIT[family])
    lengths = (7, 6) if sub_batches == 2 else (5, 4, 4)
    mask = None
    if padding:
        mask = torch.ones(1, LENGTH, dtype=torch.long)
        mask[:, :padding] = 0
    expected = fed(model, lengths, kind, mask)
    handle = tbo.wrap(model, overlap="always", sub_batches=sub_batches)
    actual = fed(model, (LENGTH,), kind, mask)
    assert equal([actual[0][:, padding:], *actual[1:]], [expected[0][:, padding:], *expected[1:]])
    hidden(model, PROMPT)
    assert report(handle).tokens_per_sub_batch == lengths


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_chunk_after_a_filled_cache_is_cut_too(kind: str) -> None:
    """`generate(prefill_chunk_size=...)` with chunks longer than what counts as speculative tokens."""
    model = build("qwen3_moe")
    prompt = token_batch(1, 22, left_padding=False)[0]

    def chunks(lengths: tuple[int, ...]) -> Tensor:
        cache = new_cache(model, kind)
        parts = prompt.split(lengths, dim=1)
        return torch.cat([hidden(model, part, **cache_argument(model.model, cache)) for part in parts], dim=1)

    expected = chunks((6, 5, 6, 5))
    handle = tbo.wrap(model, overlap="always")
    assert torch.equal(chunks((11, 11)), expected)
    assert (report(handle).split, report(handle).tokens_per_sub_batch) == ("tokens", (6, 5))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_prompt_of_two_tokens(kind: str) -> None:
    """A part of one token without a mask would see all of a static cache.

    The plain model has no mask for a single token, so that it rounds otherwise than with one.
    """
    model = build("qwen3_moe")

    def steps(lengths: tuple[int, ...]) -> Tensor:
        cache = new_cache(model, kind)
        parts = PROMPT[:, :2].split(lengths, dim=1)
        return torch.cat([hidden(model, part, **cache_argument(model.model, cache)) for part in parts], dim=1)

    expected = steps((1, 1))
    handle = tbo.wrap(model, overlap="always", sub_batches=3)
    torch.testing.assert_close(steps((2,)), expected, rtol=0, atol=2e-6)
    assert report(handle).tokens_per_sub_batch == (1, 1, 0)


def test_without_a_cache_later_tokens_see_earlier_ones_all_the_same() -> None:
    model = build("qwen3_moe")
    expected = fed(model, (7, 6))[0]
    handle = tbo.wrap(model, overlap="always")
    assert torch.equal(hidden(model, PROMPT, use_cache=False), expected)
    assert report(handle).split == "tokens"


def test_a_dense_first_layer_runs_on_the_whole_row() -> None:
    model = build("deepseek_v3")
    plain = hidden(model, PROMPT)
    handle = tbo.wrap(model, overlap="always")
    torch.testing.assert_close(hidden(model, PROMPT), plain, rtol=0, atol=4e-6)
    assert report(handle).split == "tokens"


@pytest.mark.parametrize("family", WHOLE)
def test_windows_states_and_indexers_keep_a_row_whole(family: str) -> None:
    model = build(family)
    expected = hidden(model, PROMPT)
    handle = tbo.wrap(model, overlap="always")
    assert torch.equal(hidden(model, PROMPT), expected)
    last = report(handle)
    assert (last.engaged, last.reason, last.tokens_per_sub_batch) == (False, Reason.NOTHING_TO_SPLIT, (LENGTH,))


def test_a_row_of_drafted_tokens_stays_whole() -> None:
    model = build("qwen3_moe")
    cache = DynamicCache()
    handle = tbo.wrap(model, overlap="always")
    hidden(model, PROMPT, **cache_argument(model.model, cache))
    hidden(model, FOLLOWING, **cache_argument(model.model, cache))
    assert (report(handle).phase, report(handle).reason) == (tbo.Phase.VERIFY, Reason.NOTHING_TO_SPLIT)


def square(allowed: Tensor) -> Tensor:
    return allowed[None, None]


def causal() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def test_a_mask_of_the_callers_own_is_cut_if_it_looks_only_back() -> None:
    """Token 9 sees nothing of the first part; the rest is causal."""
    model = build("qwen3_moe")
    mask = causal()
    mask[9, :7] = False
    expected = hidden(model, PROMPT, attention_mask=square(mask))
    handle = tbo.wrap(model, overlap="always")
    torch.testing.assert_close(hidden(model, PROMPT, attention_mask=square(mask)), expected, rtol=0, atol=4e-6)
    assert report(handle).split == "tokens"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_that_looks_ahead_keeps_the_row_whole(attention: str) -> None:
    """The first tokens, of an image say, see each other both ways, across the place of the cut."""
    model = build("qwen3_moe", attention=attention)
    allowed = causal()
    allowed[:9, :9] = True
    mask = square(allowed)
    if attention == "eager":
        mask = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = hidden(model, PROMPT, attention_mask=mask)
    handle = tbo.wrap(model, overlap="always")
    assert torch.equal(hidden(model, PROMPT, attention_mask=mask), expected)
    assert report(handle).reason is Reason.ARGUMENT_NOT_SPLITTABLE


@pytest.mark.parametrize(("before", "after"), [("eager", "sdpa"), ("sdpa", "eager")])
def test_the_attention_implementation_may_change_after_wrapping(before: str, after: str) -> None:
    model = build("qwen3_moe", attention=after)
    expected = fed(model, (7, 6))
    model.set_attn_implementation(before)
    tbo.wrap(model, overlap="always")
    model.set_attn_implementation(after)
    assert equal(fed(model, (LENGTH,)), expected)


PACKED = (7, 5, 9, 4)
SEQUENCES = [token_batch(1, length, seed=index, left_padding=False)[0] for index, length in enumerate(PACKED)]
ROW = torch.cat(SEQUENCES, dim=1)
POSITIONS = torch.cat([torch.arange(length) for length in PACKED])[None]
ENDS = torch.tensor([0, *PACKED]).cumsum(0).int()


def packed(model: Any, row: Tensor, positions: Tensor, ends: Tensor | None = None) -> Tensor:
    lengths = (
        {} if ends is None else {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9}
    )
    return hidden(model, row, position_ids=positions, use_cache=False, **lengths)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_packed_rows_are_cut_between_sequences(family: str, attention: str) -> None:
    """The cut that balances 7, 5 | 9, 4 best; each part equals the plain model on that part."""
    model = build(family, attention=attention, **SPLIT[family])
    first, second = ((ROW[:, part], POSITIONS[:, part]) for part in (slice(12), slice(12, None)))
    expected = torch.cat([packed(model, *first), packed(model, *second)], dim=1)
    handle = tbo.wrap(model, overlap="always")
    assert torch.equal(packed(model, ROW, POSITIONS), expected)
    assert (report(handle).split, report(handle).tokens_per_sub_batch) == ("sequences", (12, 13))


def test_packed_rows_without_a_good_boundary_are_cut_inside_a_sequence() -> None:
    """3 and 22 tokens: the cut falls into the second, whose later part sees the earlier one."""
    model = build("qwen3_moe")
    positions = torch.cat([torch.arange(3), torch.arange(22)])[None]
    expected = packed(model, ROW, positions)
    handle = tbo.wrap(model, overlap="always")
    torch.testing.assert_close(packed(model, ROW, positions), expected, rtol=0, atol=4e-6)
    assert report(handle).split == "tokens"


def test_positions_that_restart_under_a_plain_mask_do_not_part_sequences() -> None:
    """With a cache, or with a mask of the caller's own, transformers packs nothing: all tokens see all before."""
    model = build("qwen3_moe")
    ones = torch.ones_like(ROW)
    expected = hidden(model, ROW, position_ids=POSITIONS, attention_mask=ones, use_cache=False)
    with_cache = hidden(model, ROW, position_ids=POSITIONS, use_cache=True)
    assert (expected - packed(model, ROW, POSITIONS)).abs().max() > 0.1
    handle = tbo.wrap(model, overlap="always")
    actual = hidden(model, ROW, position_ids=POSITIONS, attention_mask=ones, use_cache=False)
    torch.testing.assert_close(actual, expected, rtol=0, atol=4e-6)
    assert report(handle).engaged
    torch.testing.assert_close(hidden(model, ROW, position_ids=POSITIONS), with_cache, rtol=0, atol=4e-6)
    assert report(handle).engaged


def varlen(module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **options: Any) -> tuple[Tensor, None]:
    """Stands in for flash attention: packed lengths are all it goes by."""
    groups = getattr(module, "num_key_value_groups", 1)
    output = torch.empty(*query.shape[:3], value.shape[-1], dtype=query.dtype)
    ends = options["cu_seq_lens_q"].tolist()
    assert ends[-1] == query.shape[2]
    for start, end in itertools.pairwise(ends):
        output[:, :, start:end] = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end].repeat_interleave(groups, 1),
            value[:, :, start:end].repeat_interleave(groups, 1),
            is_causal=True,
            scale=options.get("scaling"),
        )
    return output.transpose(1, 2).contiguous(), None


@pytest.fixture
def attention_by_lengths() -> Iterator[str]:
    AttentionInterface.register("varlen_stand_in", varlen)
    AttentionMaskInterface.register("varlen_stand_in", flash_attention_mask)
    yield "varlen_stand_in"
    del AttentionInterface._global_mapping["varlen_stand_in"]
    del AttentionMaskInterface._global_mapping["varlen_stand_in"]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_attention_by_packed_lengths_is_cut_between_sequences(family: str, attention_by_lengths: str) -> None:
    model = build(family, **SPLIT[family])
    plain = torch.cat([hidden(model, sequence, use_cache=False) for sequence in SEQUENCES], dim=1)
    model.set_attn_implementation(attention_by_lengths)
    first = packed(model, ROW[:, :12], POSITIONS[:, :12], ENDS[:3])
    second = packed(model, ROW[:, 12:], POSITIONS[:, 12:], ENDS[2:] - 12)
    model.set_attn_implementation("sdpa")  # the stand-in cannot do without packed lengths, which the self-check lacks
    handle = tbo.wrap(model, overlap="always")
    model.set_attn_implementation(attention_by_lengths)
    actual = packed(model, ROW, POSITIONS, ENDS)
    assert torch.equal(actual, torch.cat([first, second], dim=1))
    torch.testing.assert_close(actual, plain, rtol=0, atol=5e-6)
    assert (report(handle).split, report(handle).tokens_per_sub_batch) == ("sequences", (12, 13))


def test_attention_by_packed_lengths_without_a_good_boundary_stays_whole(attention_by_lengths: str) -> None:
    model = build("qwen3_moe")
    handle = tbo.wrap(model, overlap="always")
    model.set_attn_implementation(attention_by_lengths)
    ends = torch.tensor([0, 3, 25]).int()
    packed(model, ROW, POSITIONS, ends)
    assert report(handle).reason is Reason.NOTHING_TO_SPLIT
