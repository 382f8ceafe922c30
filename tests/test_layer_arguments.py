"""Cutting the arguments of decoder layers: by rows, by tokens, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import tbo
from tbo.models.layer_arguments import (
    MASKS,
    POSITIONAL,
    Cut,
    RowCut,
    TokenCut,
    hides,
    split_layer_kwargs,
    why_no_part,
)
from tiny_models import build
from wrapped_models import refused

B, S, KV = 5, 7, 9
ROWS = RowCut(rows=(slice(0, 3), slice(3, 5)), batch_size=B, length=S)
EMPTY = RowCut(rows=(slice(0, 1), slice(1, 1)), batch_size=1, length=S)


def by_tokens(**changes: Any) -> TokenCut:
    fields: dict[str, Any] = {
        "tokens": (slice(0, 4), slice(4, 7)),
        "past": 2,
        "buffer": None,
        "shared": True,
        "fills_mask": True,
        "device": torch.device("cpu"),
    }
    return TokenCut(**(fields | changes))


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


@pytest.mark.parametrize("cut", [ROWS, by_tokens()])
def test_merging_undoes_cutting(cut: Cut) -> None:
    hidden = numbered(B if cut is ROWS else 1, S, 4)
    assert torch.equal(cut.merge(cut.hidden(hidden)), hidden)


@pytest.mark.parametrize("name", sorted(POSITIONAL - {"position_ids", "input_ids"}))
@pytest.mark.parametrize("tail", [(), (4,), (2, 4)])
def test_rows_of_positional_tensors(name: str, tail: tuple[int, ...]) -> None:
    value = numbered(B, S, *tail)
    first, second = ROWS.argument(name, value)
    assert torch.equal(first, value[:3])
    assert torch.equal(second, value[3:])
    shared = numbered(1, S, *tail)
    assert all(part is shared for part in ROWS.argument(name, shared))


def test_tuples_lists_and_dicts_of_rotary_tables_keep_their_kind() -> None:
    table = numbered(B, S, 4)
    by_kind = {"sliding": (table, table), "full": (table,)}
    for value in ((table, table), [table], by_kind):
        assert [type(part) for part in ROWS.argument("position_embeddings", value)] == [type(value)] * 2
    assert torch.equal(ROWS.argument("position_embeddings", by_kind)[1]["sliding"][1], table[3:])
    assert torch.equal(
        by_tokens().argument("position_embeddings", (numbered(1, S, 4),))[1][0], numbered(1, S, 4)[:, 4:]
    )


@pytest.mark.parametrize("name", sorted(MASKS))
@pytest.mark.parametrize("shape", [(B, KV), (B, 1, S, KV)])
def test_rows_of_masks(name: str, shape: tuple[int, ...]) -> None:
    mask = numbered(*shape)
    assert torch.equal(ROWS.argument(name, mask)[1], mask[3:])
    assert ROWS.argument(name, mask[:1])[1].shape[0] == 1
    assert ROWS.argument(name, None) == [None, None]


def test_an_empty_part_has_no_rows() -> None:
    assert [len(part) for part in EMPTY.argument("position_ids", numbered(1, S))] == [1, 0]
    assert [len(part) for part in EMPTY.argument("attention_mask", numbered(1, KV))] == [1, 0]


def test_flags_numbers_and_scalars_go_to_every_part() -> None:
    scalar = torch.tensor(3)
    for value in (True, None, 9, "name", scalar, (1, 2)):
        assert ROWS.argument("anything", value) == [value, value]
    whole = torch.arange(S)
    assert all(part is whole for part in ROWS.argument("cache_position", whole))
    assert [part.tolist() for part in by_tokens().argument("cache_position", whole)] == [[0, 1, 2, 3], [4, 5, 6]]


UNKNOWN = "tbo does not know whether it belongs to tokens, rows or the whole batch"
REMEDY = "Call the model without it, or wrap with overlap='never'."


@pytest.mark.parametrize(
    ("cut", "name", "value", "shown", "why"),
    [
        (ROWS, "bias", numbered(B, S), "[5, 7]", UNKNOWN),
        (ROWS, "seq_idx", numbered(1, S), "[1, 7]", UNKNOWN),
        (ROWS, "extras", {"a": [numbered(2)]}, "dict", UNKNOWN),
        (by_tokens(), "bias", numbered(1, S), "[1, 7]", UNKNOWN),
        (ROWS, "cu_seq_lens_q", numbered(3), "[3]", "a padded batch cannot carry packed sequence lengths"),
        (
            ROWS,
            "attention_mask",
            numbered(4, KV),
            "[4, 9]",
            "its first dimension is neither 1 nor the batch size 5",
        ),
        (ROWS, "attention_mask", numbered(B), "[5]", "its first dimension is neither 1 nor the batch size 5"),
        (ROWS, "attention_mask", object(), "object", "it is neither a tensor nor made of tensors"),
        (by_tokens(), "attention_mask", object(), "object", "it is no mask over tokens"),
    ],
)
def test_what_cannot_be_cut_is_named(cut: Cut, name: str, value: Any, shown: str, why: str) -> None:
    refused(
        tbo.WrapError,
        f"the layer argument {name!r} ({shown}) cannot be cut into sub-batches: {why}. {REMEDY}",
        lambda: cut.argument(name, value),
    )


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("position_ids", (B, B, S)),  # three kinds of positions, of time, height and width, beside three rows
        ("position_ids", (S,)),
        ("position_embeddings", (B, 4)),  # tables without a batch dimension, as long as the batch is wide
        ("prev_topk_indices", (B, S - 1, 2)),
        ("input_ids", (B, S + 1)),
    ],
)
def test_positions_laid_out_otherwise_are_not_taken_for_rows(name: str, shape: tuple[int, ...]) -> None:
    for cut in (ROWS, by_tokens()):
        refused(
            tbo.WrapError,
            f"the layer argument {name!r} ({list(shape)}) cannot be cut into sub-batches: it does not have one entry"
            f" for each of {S} positions in dimension 1. {REMEDY}",
            lambda cut=cut: cut.argument(name, numbered(*shape)),  # type: ignore[misc]
        )


def test_tokens_of_a_mask_and_the_keys_they_may_see() -> None:
    """Two positions are in the cache already; a part sees them, earlier parts and itself."""
    mask = numbered(1, 1, S, 2 + S)
    first, second = by_tokens().argument("attention_mask", mask)
    assert torch.equal(first, mask[:, :, :4, : 2 + 4])
    assert torch.equal(second, mask[:, :, 4:, :])
    flat = numbered(1, 2 + S)
    assert [part.shape[1] for part in by_tokens().argument("attention_mask", flat)] == [6, 9]


def test_tokens_of_a_mask_over_a_preallocated_cache() -> None:
    mask = numbered(1, 1, S, 16)
    assert [tuple(part.shape) for part in by_tokens(buffer=16).argument("attention_mask", mask)] == [
        (1, 1, 4, 16),
        (1, 1, 3, 16),
    ]


def test_packed_parts_see_only_themselves() -> None:
    cut = by_tokens(past=0, shared=False)
    mask = numbered(1, 1, S, S)
    assert torch.equal(cut.argument("attention_mask", mask)[1], mask[:, :, 4:, 4:])
    assert cut.argument("attention_mask", None) == [None, None]
    ends = torch.tensor([0, 2, 4, 5, 7]).int()
    assert [part.tolist() for part in cut.argument("cu_seq_lens_q", ends)] == [[0, 2, 4], [0, 1, 3]]
    assert cut.argument("cu_seq_lens_q", ends)[1].dtype == torch.int32
    assert cut.argument("max_length_q", 9) == [9, 9]


@pytest.mark.parametrize(
    ("past", "buffer", "columns"), [(0, None, 7), (2, None, 9), (0, 16, 16)], ids=["new", "after 2", "static"]
)
def test_a_missing_mask_is_filled_in_where_a_part_is_not_aligned_with_the_first_key(
    past: int, buffer: int | None, columns: int
) -> None:
    first, second = by_tokens(past=past, buffer=buffer).argument("attention_mask", None)
    assert first is None
    assert second.shape == (1, 1, 3, columns)
    assert second[0, 0].sum(dim=1).tolist() == [past + 5, past + 6, past + 7]
    assert bool(second[0, 0, 0, : past + 5].all())
    assert by_tokens(past=past, fills_mask=False).argument("attention_mask", None) == [None, None]


def test_one_query_on_a_preallocated_cache_needs_a_mask_even_in_the_first_part() -> None:
    first, _ = by_tokens(tokens=(slice(0, 1), slice(1, 2)), past=0, buffer=6).argument("attention_mask", None)
    assert first.tolist() == [[[[True, False, False, False, False, False]]]]
    grown, _ = by_tokens(tokens=(slice(0, 1), slice(1, 2)), past=0).argument("attention_mask", None)
    assert grown is None


def test_caches_are_found_by_type_under_any_name() -> None:
    config = build("mixtral").config
    caches = [DynamicCache(), None]
    for name, cache in (("cache", DynamicCache()), ("past_key_values", StaticCache(config=config, max_cache_len=8))):
        parts = split_layer_kwargs({name: cache, "use_cache": True}, ROWS, caches, {})
        assert [part[name] for part in parts] == caches
        assert [part["use_cache"] for part in parts] == [True, True]


def test_what_layers_share_is_cut_once() -> None:
    mask, memo = numbered(B, KV), dict[tuple[str, int], list[Any]]()
    calls = [split_layer_kwargs({"attention_mask": mask}, ROWS, [None, None], memo) for _ in range(3)]
    assert len({id(parts[0]["attention_mask"]) for parts in calls}) == 1
    other = split_layer_kwargs({"attention_mask": mask.clone()}, ROWS, [None, None], memo)
    assert other[0]["attention_mask"] is not calls[0][0]["attention_mask"]


class BlockMask:
    """Has the name of flex attention's own."""


def test_the_argument_without_parts_is_named() -> None:
    assert why_no_part({"attention_mask": numbered(B, KV), "use_cache": True}) is None
    assert why_no_part({"attention_mask": BlockMask()}) == (
        "attention_mask is a flex-attention BlockMask, which has no rows to take"
    )


def test_what_a_mask_hides() -> None:
    allowed = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    added = torch.zeros(1, 1, 4, 4).masked_fill(~allowed, torch.finfo(torch.float32).min)
    infinite = torch.zeros(1, 1, 4, 4).masked_fill(~allowed, float("-inf"))
    for mask in (allowed, added, infinite, added.to(torch.bfloat16).clamp(min=torch.finfo(torch.bfloat16).min)):
        assert hides(mask, slice(2), slice(2, None))
        assert not hides(mask, slice(2, None), slice(2))
        assert not hides(mask, slice(3), slice(2, None))
        assert hides(mask, slice(0), slice(4))
    assert not hides(added - 5, slice(2, None), slice(2))
