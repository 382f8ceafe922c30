"""The generic cut: which forwards it divides, what it hands over, and which it leaves whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tbo.models.attention import WholeAttention, cut_attention
from tbo.models.attention_explicit import LatentAttention, PlainAttention
from tbo.models.attention_liveness import halves_of


def attention_interface(query: Tensor) -> Tensor:
    return query * 2


class Straight(nn.Module):
    def forward(self, hidden_states: Tensor, past_key_values: Any = None, **kwargs: Any) -> tuple[Tensor, Any]:
        query = hidden_states + 1
        number = hidden_states.numel()
        if past_key_values is not None:
            query = past_key_values.update(query, number)
        output = attention_interface(query)
        return output + hidden_states, kwargs


class Uncached(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        query = hidden_states + 1
        output = attention_interface(query)
        return output - 3


class ReturnsEarly(nn.Module):
    def forward(self, hidden_states: Tensor, past_key_values: Any = None) -> Tensor:
        if past_key_values is None:
            return hidden_states
        query = past_key_values.update(hidden_states)
        output = attention_interface(query)
        return output.neg()


class AssignsOnOnePath(nn.Module):
    def forward(self, hidden_states: Tensor, gated: bool = False) -> Tensor:
        if gated:
            gate = hidden_states * 2
        output = attention_interface(hidden_states)
        return output * gate if gated else output  # type: ignore[possibly-undefined]


class AssignsOnBothPaths(nn.Module):
    def forward(self, hidden_states: Tensor, gated: bool = False) -> Tensor:
        if gated:  # noqa: SIM108 - both paths assign, which is the case
            gate = hidden_states * 2
        else:
            gate = hidden_states
        output = attention_interface(hidden_states)
        return output * gate


class AttendsTwice(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        output = attention_interface(hidden_states)
        output = attention_interface(output)
        return output.neg()


class Closes(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        output = attention_interface(hidden_states)
        return output + type(super()).__name__.count("super")


def test_only_what_the_second_half_needs_is_handed_over() -> None:
    halves = halves_of(Straight.forward)
    assert halves is not None
    assert halves.kind == "at the cache write"
    assert halves.live == ("hidden_states", "kwargs", "query")
    module = Straight()
    carried = halves.prepare(module, torch.ones(2), extra=5)
    output, kwargs = halves.core(module, *carried)
    assert output.tolist() == [5.0, 5.0]
    assert kwargs == {"extra": 5}


def test_without_a_cache_write_the_cut_is_at_the_attention_call() -> None:
    halves = halves_of(Uncached.forward)
    assert halves is not None
    assert halves.kind == "at the attention call"
    assert halves.live == ("query",)
    assert halves.core(None, *halves.prepare(None, torch.ones(1))).item() == 1.0


def test_a_name_assigned_on_both_paths_is_safe() -> None:
    halves = halves_of(AssignsOnBothPaths.forward)
    assert halves is not None
    assert halves.live == ("gate", "hidden_states")


@pytest.mark.parametrize("unsafe", [ReturnsEarly, AssignsOnOnePath, AttendsTwice, Closes, nn.Linear])
def test_what_cannot_be_cut_safely_is_not_cut(unsafe: type[nn.Module]) -> None:
    assert halves_of(unsafe.forward) is None
    module = nn.Linear(2, 2) if unsafe is nn.Linear else unsafe()
    assert isinstance(cut_attention(module), WholeAttention)


def test_a_class_named_like_a_known_one_is_not_taken_for_it() -> None:
    class MixtralAttention(Uncached):
        def forward(self, hidden_states: Tensor) -> Tensor:
            output = attention_interface(hidden_states)
            return output.neg()

    cut = cut_attention(MixtralAttention())
    assert not isinstance(cut, PlainAttention | LatentAttention)
    assert cut.kind == "at the attention call"
