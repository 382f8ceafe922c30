"""The compiled plans of one wrapped model: each made once, on first use or at wrap time."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from tbo.batch import Phase
from tbo.core import Plan, compile_plan
from tbo.models.layer import CARRIES, INPUTS
from tbo.models.orders import PREFILL, Schedule, layers_ops

if TYPE_CHECKING:
    from tbo.models.layer import HuggingFaceLayer

OrderName = Literal["interleaved", "sequential"]


class PlanBook:
    """Plans by phase and sub-batch count.

    Layers before the first sparse one are not in any plan: they run un-split, as the model's own code.

    Args:
        layers: the ops of every decoder layer.
        schedules: the schedule of each phase.
        sub_batches: how many sub-batches an overlapped step has.
        order: how the sub-batches take turns.
        limits: in-flight limit of each channel, from the dispatchers.

    Raises:
        PlanError: a schedule does not fit the layers or breaks a limit.
    """

    def __init__(
        self,
        layers: Sequence[HuggingFaceLayer],
        schedules: Mapping[Phase, Schedule],
        *,
        sub_batches: int,
        order: OrderName,
        limits: Mapping[str, int],
    ) -> None:
        self._layers = tuple(layers)
        self._schedules = dict(schedules)
        self._order: OrderName = order
        self._limits = dict(limits)
        self._steps: dict[tuple[Schedule, int], Plan] = {}
        self._singles: dict[int, Plan] = {}
        self.first_sparse = next(index for index, layer in enumerate(self._layers) if layer.is_sparse)
        plans = [self.steps(phase, sub_batches) for phase in self._schedules] + [self.steps(Phase.PREFILL, 1)]
        self.fingerprint = zlib.crc32(repr([plan.fingerprint for plan in plans]).encode())
        self.warnings = tuple(dict.fromkeys(warning for plan in plans for warning in plan.warnings))

    def steps(self, phase: Phase, sub_batches: int) -> Plan:
        """The plan of all layers from the first sparse one on. An un-split step has one order, whatever its phase."""
        schedule = self._schedules[phase] if sub_batches > 1 else PREFILL
        key = (schedule, sub_batches)
        if key not in self._steps:
            self._steps[key] = compile_plan(
                layers_ops(self._layers[self.first_sparse :], schedule),
                inputs=INPUTS,
                outputs=("hidden_states",),
                carries=CARRIES,
                limits=self._limits,
                sub_batches=sub_batches,
                offset=schedule.offset,
                order=self._order,
                first_layer=self.first_sparse,
            )
        return self._steps[key]

    def single(self, index: int) -> Plan:
        """The un-split plan of one layer, for layers that must finish before the next is called."""
        if index not in self._singles:
            self._singles[index] = compile_plan(
                layers_ops([self._layers[index]], PREFILL),
                inputs=INPUTS,
                outputs=("hidden_states", "carried_topk"),
                carries=CARRIES,
                sub_batches=1,
                first_layer=index,
            )
        return self._singles[index]
