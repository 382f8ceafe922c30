"""Instruments: observers the scheduler knows nothing about.

An instrument overrides the hooks it needs. A run without instruments takes a path that does not contain the hooks at
all, so unused they cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tbo.core.op import Where

if TYPE_CHECKING:
    from tbo.core.plan import Plan


class Instrument:
    """Base of all instruments; every hook does nothing until overridden.

    What a hook raises counts as the failure of the op or stage it was called for. `before_step` and `after_step`
    stand for no op: what they raise leaves `run` as it is, or becomes a note where the step has failed already.
    """

    def before_step(self, plan: Plan) -> None:
        """Called once before the plan's first stage."""

    def after_step(self, plan: Plan, error: BaseException | None) -> None:
        """Called once at the end, with the error if the step failed: what an op raised, not yet an `OpError`."""

    def before_stage(self, sub_batch: int, stage: int) -> None:
        """Called before a sub-batch runs a stage."""

    def after_stage(self, sub_batch: int, stage: int) -> None:
        """Called after a sub-batch ran a stage."""

    def before_op(self, where: Where, state: Mapping[str, Any]) -> None:
        """Called before an op, with the sub-batch's state as the op will find it."""

    def after_op(self, where: Where, state: Mapping[str, Any]) -> None:
        """Called after an op; what it wrote is in the state, what it read last is gone."""


class Trace(Instrument):
    """Remembers the order of everything, for tests and for people.

    Attributes:
        ops: where each op ran, in order.
        stages: ``(sub_batch, stage)`` in order.
    """

    def __init__(self) -> None:
        self.ops: list[Where] = []
        self.stages: list[tuple[int, int]] = []

    def before_stage(self, sub_batch: int, stage: int) -> None:
        """Notes the stage."""
        self.stages.append((sub_batch, stage))

    def before_op(self, where: Where, state: Mapping[str, Any]) -> None:
        """Notes the op."""
        self.ops.append(where)


class InjectFault(Instrument):
    """Runs `action` before (or after) one op: what a test or a drill breaks on purpose.

    Args:
        op: name of the op.
        action: what to do there: raise, sleep, kill the process.
        sub_batch: only on this sub-batch, if given.
        layer: only in this layer, if given.
        after: act after the op instead of before it.
    """

    def __init__(
        self,
        op: str,
        action: Callable[[], None],
        *,
        sub_batch: int | None = None,
        layer: int | None = None,
        after: bool = False,
    ) -> None:
        self._op = op
        self._action = action
        self._sub_batch = sub_batch
        self._layer = layer
        self._after = after

    def _act(self, where: Where, *, after: bool) -> None:
        here = where.op == self._op and after == self._after
        if here and self._sub_batch in (None, where.sub_batch) and self._layer in (None, where.layer):
            self._action()

    def before_op(self, where: Where, state: Mapping[str, Any]) -> None:
        """Acts if this is the place."""
        self._act(where, after=False)

    def after_op(self, where: Where, state: Mapping[str, Any]) -> None:
        """Acts if this is the place."""
        self._act(where, after=True)


def overridden(instruments: Sequence[Instrument], hook: str) -> list[Callable[..., None]]:
    """The bound hooks that some instrument really implements."""
    return [
        getattr(instrument, hook)
        for instrument in instruments
        if getattr(type(instrument), hook) is not getattr(Instrument, hook)
    ]
