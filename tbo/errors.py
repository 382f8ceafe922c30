"""Every exception `tbo` raises on purpose.

Three kinds, so that a caller can tell them apart: the user's mistake (`UserError`: what is wrong, where, and what to
do), a failure while a step runs (`OpError` here, `PeerError` on another rank), and a fault of ours (`InternalError`).
Standard library only: the scheduler core imports this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tbo.core.op import Where


class TboError(Exception):
    """Base of every exception raised by `tbo`."""


class UserError(TboError):
    """A mistake in how `tbo` is used. The message says what is wrong and where; `remedy` says what to do.

    Args:
        problem: what is wrong and where, without a closing full stop.
        remedy: one sentence the user can act on.
    """

    def __init__(self, problem: str, *, remedy: str) -> None:
        super().__init__(f"{problem}. {remedy}")
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_user_error, (type(self), self.problem, self.remedy))


def _rebuild_user_error(kind: type[UserError], problem: str, remedy: str) -> UserError:
    """Exceptions cross process borders in tests and launchers; keyword arguments need this."""
    return kind(problem, remedy=remedy)


class OpDeclarationError(UserError):
    """An `@tbo.op` declaration that cannot be scheduled."""


class PlanError(UserError):
    """A plan that would compute wrong values, deadlock or overrun a communication buffer."""


class SplitError(UserError):
    """A batch that cannot be split as asked."""


class WrapError(UserError):
    """A model, option or call that `tbo.wrap` does not serve."""


class UnsupportedModelError(WrapError):
    """A model family, or one of its modules, that no adapter serves."""


class DispatcherError(UserError):
    """A dispatcher that is unknown, cannot run here, or whose declared limits a step would break."""


class CheckpointError(UserError):
    """A checkpoint that is missing, broken, or does not fit the model."""


class MissingPackageError(UserError):
    """An optional package that is needed here is not installed."""


class RanksDisagreeError(UserError):
    """Ranks of one expert-parallel group were set up differently."""


class OpError(TboError):
    """An op raised. Says where in the plan, on which rank, and what the sub-batch's state held.

    Attributes:
        where: sub-batch, stage, layer and op.
        rank: the rank in the expert-parallel group, or None when there is only one.
        cause: the exception the op raised (also `__cause__`).
    """

    def __init__(self, where: Where, rank: int | None, state: Mapping[str, str], cause: BaseException) -> None:
        self.where = where
        self.rank = rank
        self.cause = cause
        self.state = dict(state)
        on = "" if rank is None else f"rank {rank}, "
        held = ", ".join(f"{key}: {text}" for key, text in state.items()) or "nothing"
        super().__init__(f"{on}{where}: {type(cause).__name__}: {cause} [state held {held}]")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.where, self.rank, self.state, self.cause), self.__dict__)


class PeerError(TboError):
    """Another rank failed, died, left or fell silent; this rank stopped instead of waiting for ever.

    Attributes:
        rank: the rank at fault in the expert-parallel group, or None when it is not known.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class InternalError(TboError):
    """A fault of `tbo` itself."""

    def __str__(self) -> str:
        return f"{super().__str__()}. This is a bug in tbo: please report it with this traceback."
