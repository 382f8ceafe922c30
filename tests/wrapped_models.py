"""What the tests of a wrapped model on one rank share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache

import tbo
from tbo.wrapping.handle import Handle


def report(handle: Handle) -> tbo.StepReport:
    """What the last step did; there must have been one."""
    assert handle.last is not None
    return handle.last


def cache_of(output: Any) -> Cache:
    """A model output's cache: ``past_key_values`` up to transformers 5.23, ``cache`` from 5.24."""
    cache = getattr(output, "cache", None)
    found: Cache = output.past_key_values if cache is None else cache
    return found


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """The cache as a keyword argument of the model's forward."""
    names = inspect.signature(type(model).forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


@torch.no_grad()
def hidden(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    """Last hidden states of one call of the decoder."""
    found: Tensor = model.model(ids, **kwargs).last_hidden_state
    return found


def refused(error: type[tbo.UserError], message: str, call: Callable[[], Any]) -> None:
    """The call raises exactly this error with exactly this message."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value) == message
