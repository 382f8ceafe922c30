"""The handle `tbo.wrap` returns."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NoReturn, Self

from torch import nn

from tbo.errors import PeerError, WrapError

if TYPE_CHECKING:
    from types import TracebackType

    from tbo.ops.peers import Peers
    from tbo.wrapping.leaving import Leaving
    from tbo.wrapping.report import StepReport
    from tbo.wrapping.step import StepRunner

HANDLE_ATTRIBUTE = "_tbo_handle"


class Handle:
    """A wrapped model's controls. Also a context manager that finishes and unwraps.

    Made by `tbo.wrap`; the model itself is used as before.
    """

    def __init__(
        self,
        model: nn.Module,
        runner: StepRunner | None,
        *,
        leaving: Leaving | None,
        peers: Peers | None,
        notes: tuple[str, ...],
    ) -> None:
        self.model = model
        self.notes = notes
        self._runner = runner
        self._leaving = leaving
        self._peers = peers
        self._wrapped = True
        if runner is not None:
            for hook in runner.hooks:
                hook.install()
        if leaving is not None:
            leaving.install()
        setattr(model, HANDLE_ATTRIBUTE, self)

    @property
    def last(self) -> StepReport | None:
        """What the last step did and why; None before the first step."""
        return None if self._runner is None else self._runner.last

    def finish(self) -> None:
        """Serves the other ranks until all have finished. For hand-written loops over ``model(...)``.

        Collective, like a barrier: every rank calls it once its part of the work is over, also one that had none, and
        it returns when all have. Then another round of work may follow. Leaving a ``with`` block calls it once more. On
        one rank it does nothing. `generate` serves by itself, so ranks that call it equally often need no `finish`.

        Raises:
            PeerError: another rank failed, died or fell silent.
        """
        if self._leaving is not None:
            self._leaving.finish()

    def unwrap(self) -> None:
        """Gives the model its own layers back.

        An unsharded model is restored exactly. A sharded one holds only this rank's experts, so its own forward would
        be wrong: its layers then raise, and say so.
        """
        if not self._wrapped:
            return
        self._wrapped = False
        if self._runner is not None:
            for hook in self._runner.hooks:
                hook.remove()
        if self._leaving is not None:
            self._leaving.uninstall()
        if self._peers is not None:
            self._peers.close("the model was unwrapped")
        with contextlib.suppress(AttributeError):
            delattr(self.model, HANDLE_ATTRIBUTE)

    def explain(self) -> str:
        """What was set up, and whether the last step overlapped, how much was hidden, and if not, why not."""
        lines = list(self.notes)
        if self._runner is not None:
            lines.append("no step has run yet" if self.last is None else str(self.last))
        return "\n".join(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif self._peers is not None and not isinstance(error, PeerError):
            self._peers.fail(error)  # the others may be in a step by now, and shall hear why
        self.unwrap()

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


def explain(model: nn.Module) -> str:
    """What `tbo` did with the model's last step: see `Handle.explain`.

    Raises:
        WrapError: the model is not wrapped.
    """
    handle = vars(model).get(HANDLE_ATTRIBUTE)
    if not isinstance(handle, Handle):
        raise WrapError(f"{type(model).__name__} is not wrapped", remedy="Call tbo.wrap(model, ...) first.")
    return handle.explain()
