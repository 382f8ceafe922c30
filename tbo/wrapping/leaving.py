"""Leaving: a rank whose own generation is over keeps serving its peers until all have left.

Expert parallelism ties the ranks together: every rank computes its experts for all. `generate` on ranks with
different prompts, lengths and search methods ends at different steps, so the wrapped model's `generate` goes on voting
after its own result is ready, with no tokens of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from tbo.errors import PeerError

if TYPE_CHECKING:
    from tbo.ops.peers import Peers
    from tbo.wrapping.step import StepRunner


class Leaving:
    """Replaces `generate` on the model's instance and keeps serving after it.

    Args:
        model: the wrapped model.
        runner: serves steps.
        peers: the other ranks.
    """

    def __init__(self, model: nn.Module, runner: StepRunner, peers: Peers) -> None:
        self._model = model
        self._runner = runner
        self._peers = peers
        self._depth = 0

    def install(self) -> None:
        """Puts the serving `generate` on the instance; a model without `generate` is left alone."""
        generate = getattr(self._model, "generate", None)
        if generate is not None:
            self._model.generate = self._serving(generate)  # type: ignore[assignment]

    def uninstall(self) -> None:
        """Takes it off again."""
        vars(self._model).pop("generate", None)

    def _serving(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(generate)
        def serving_generate(*args: Any, **kwargs: Any) -> Any:
            kwargs.setdefault("disable_compile", True)
            self._depth += 1
            try:
                result = generate(*args, **kwargs)
            except BaseException as error:
                if not isinstance(error, PeerError):
                    self._peers.fail(error)
                raise
            finally:
                self._depth -= 1
            if self._depth == 0:  # a search method that calls generate again is not over yet
                self._serve(finished=False)
            return result

        return serving_generate

    def _serve(self, *, finished: bool) -> None:
        while True:
            outcome = self._runner.serve(finished=finished)
            if outcome.everyone_finished if finished else outcome.everyone_left:
                return

    def finish(self) -> None:
        """Serves until every rank has finished. Collective: a rank cannot know whether the others ran steps since."""
        self._serve(finished=True)
