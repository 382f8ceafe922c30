"""The scheduler: ops, plans, the loop that runs them, and what may watch it. Standard library only."""

from tbo.core.compile import compile_plan
from tbo.core.instruments import InjectFault, Instrument, Trace
from tbo.core.op import YIELD, Op, Pending, Where, op
from tbo.core.order import order, sequential_order
from tbo.core.plan import Plan, Stage, Step
from tbo.core.run import Progress, run

__all__ = [
    "YIELD",
    "InjectFault",
    "Instrument",
    "Op",
    "Pending",
    "Plan",
    "Progress",
    "Stage",
    "Step",
    "Trace",
    "Where",
    "compile_plan",
    "op",
    "order",
    "run",
    "sequential_order",
]
