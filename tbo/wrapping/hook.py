"""What stands in for a decoder layer's `forward`, on the instance."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from tbo.errors import WrapError

if TYPE_CHECKING:
    from tbo.wrapping.step import StepRunner


def by_name(signature: inspect.Signature, args: tuple[Any, ...]) -> dict[str, Any]:
    """A layer's positional arguments behind the hidden states, by name."""
    names = list(signature.parameters)[1 : 1 + len(args)]
    return dict(zip(names, args, strict=True))


class LayerHook:
    """Hands each call of one layer to the step runner.

    It lives in the layer's instance dictionary, so that the class, the state dict's names and every other instance
    stay as they are, and removing it restores the model exactly.
    """

    def __init__(self, runner: StepRunner, index: int, layer: nn.Module) -> None:
        # torch.compile breaks its graph here: what a step does depends on votes, caches and clocks.
        self._run: Callable[..., Any] = torch.compiler.disable(runner.layer)
        self._index = index
        self._original: Callable[..., Any] = type(layer).forward
        self._layer = layer
        self._installed = False
        self.__signature__ = inspect.signature(self._original.__get__(layer))

    def install(self) -> None:
        """Puts the hook on the layer's instance."""
        self._installed = True
        self._layer.forward = self

    def remove(self) -> None:
        """Takes it off; the class's own forward shows again.

        Software that has wrapped the hook since keeps it, and then reaches the class's own forward through it.
        """
        self._installed = False
        if vars(self._layer).get("forward") is self:
            del self._layer.forward

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Called as the layer's forward."""
        if args:
            kwargs = by_name(self.__signature__, args) | kwargs
        if not self._installed:
            return self.original(hidden_states, kwargs)
        return self._run(self._index, hidden_states, kwargs)

    def original(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> Any:
        """The layer's own forward."""
        return self._original(self._layer, hidden_states, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise WrapError(
            "a wrapped model cannot be copied: the copy's layers would run in the original's steps",
            remedy="Copy the model first, or call handle.unwrap().",
        )

    def __reduce__(self) -> NoReturn:
        raise WrapError(
            "a wrapped model cannot be pickled",
            remedy="Save with save_pretrained() or state_dict(), or call handle.unwrap() first.",
        )
