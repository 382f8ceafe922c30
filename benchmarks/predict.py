"""How long a step of a plan must take: the plan played on a virtual clock.

The model of a CPU: one thread computes; a start queues its transfer on one link, which serves transfers in the order
in which they were issued; a wait blocks until its transfer is complete. So the result holds all that the order itself
costs (pipeline fill and drain, transfers queueing behind each other), and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tbo.core import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Predicted times of one step, in seconds.

    Attributes:
        step: from the first op to the end of the last one or of the last transfer.
        compute: what all ops take together.
        communication: what all transfers take together.
        waited: how long waits blocked.
    """

    step: float
    compute: float
    communication: float
    waited: float

    @property
    def bound(self) -> float:
        """No order can be faster: one of the two resources is busy all the time."""
        return max(self.compute, self.communication)

    @property
    def serial(self) -> float:
        """The time without any overlap."""
        return self.compute + self.communication


def predict(plan: Plan, *, compute: Mapping[str, float], transfers: Mapping[str, float]) -> Prediction:
    """Plays a plan on a virtual clock.

    Args:
        plan: the plan, in either order.
        compute: seconds each op computes, by its name; 0 for names that are absent.
        transfers: seconds the transfer of each starting op occupies the link, by the op's name.

    Raises:
        KeyError: an op starts a transfer whose duration is not given.
    """
    now = link_free = busy = sent = waited = 0.0
    arrives: dict[tuple[int, str], float] = {}
    for sub_batch, stage in plan.order:
        for step in plan.stages[stage].steps:
            op = step.op
            if op.waits is not None:
                arrival = arrives.pop((sub_batch, op.waits))
                waited += max(0.0, arrival - now)
                now = max(now, arrival)
            seconds = compute.get(op.name, 0.0)
            now += seconds
            busy += seconds
            if op.starts is not None:
                link_free = max(link_free, now) + transfers[op.name]
                sent += transfers[op.name]
                arrives[sub_batch, op.writes[0]] = link_free
    return Prediction(step=max(now, link_free), compute=busy, communication=sent, waited=waited)
