"""Which ops a layer runs, in which order, and where the scheduler may switch: declared once, as data.

A `Schedule` is a value like any other: pass your own to `tbo.wrap(..., schedules={...})`. `|` marks a yield below.

The end of a layer and the start of the next share a stage in the prefill and DeepSeek orders. A yield there cost 10 %
on an H200: one sub-batch's combine was awaited before the other's attention had been issued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tbo.batch import Phase
from tbo.core import YIELD
from tbo.errors import PlanError

_YIELD_TEXT = "|"


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip(",") for name in text.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The order of ops in sparse and dense layers, and how far apart the sub-batches run.

    Attributes:
        name: for people and reports.
        sparse: op names of a mixture-of-experts layer, with ``"|"`` for a yield.
        dense: op names of a dense layer between sparse ones.
        offset: how many stages each sub-batch starts after the one before it.
    """

    name: str
    sparse: tuple[str, ...]
    dense: tuple[str, ...]
    offset: int


PREFILL: Final = Schedule(
    name="prefill",
    sparse=_names(
        "op_comm_prepare_attn, op_prepare, op_core, op_comm_prepare_mlp, op_gate, op_select_experts, op_dispatch_a |"
        " op_dispatch_b, op_experts, op_combine_a |"
        " op_shared_experts, op_combine_b, op_output, op_comm_postprocess_layer"
    ),
    dense=_names("op_comm_prepare_attn, op_prepare, op_core, op_comm_prepare_mlp, op_mlp, op_comm_postprocess_layer"),
    offset=0,
)
"""Three stages a layer, 2 L + 1 for L layers. Hides dispatch behind attention and combine behind experts."""

DEEPSEEK_DECODE: Final = Schedule(
    name="deepseek-decode",
    sparse=_names(
        "op_comm_prepare_attn, op_prepare |"
        " op_core, op_comm_prepare_mlp, op_gate, op_select_experts |"
        " op_dispatch_a, op_shared_experts |"
        " op_dispatch_b, op_experts, op_combine_a |"
        " op_combine_b |"
        " op_output, op_comm_postprocess_layer"
    ),
    dense=_names("op_comm_prepare_attn, op_prepare | op_core, op_comm_prepare_mlp, op_mlp, op_comm_postprocess_layer"),
    offset=2,
)
"""5 L + 1 stages. For families with shared experts, which run while the dispatch is in flight."""

QWEN_DECODE: Final = Schedule(
    name="qwen-decode",
    sparse=_names(
        "op_comm_prepare_attn, op_prepare |"
        " op_core, op_comm_prepare_mlp, op_gate, op_select_experts |"
        " op_dispatch_a |"
        " op_dispatch_b, op_experts, op_combine_a |"
        " op_combine_b, op_output, op_comm_postprocess_layer |"
    ),
    dense=_names("op_comm_prepare_attn, op_prepare | op_core, op_comm_prepare_mlp, op_mlp, op_comm_postprocess_layer"),
    offset=2,
)
"""5 L stages. For families without shared experts; the layer ends with a yield."""


def default_schedules(*, has_shared_experts: bool) -> dict[Phase, Schedule]:
    """The schedule of each phase: verify runs as decode, mixed as prefill."""
    decode = DEEPSEEK_DECODE if has_shared_experts else QWEN_DECODE
    return {Phase.PREFILL: PREFILL, Phase.MIXED: PREFILL, Phase.DECODE: decode, Phase.VERIFY: decode}


def ops_of_layer(layer: Any, schedule: Schedule) -> list[Any]:
    """The ops of one layer in a schedule's order.

    `op_shared_experts` is left out of a layer that has none. A schedule that names no `op_shared_experts` cannot
    serve a layer that has them, and a misspelt op is refused.

    Args:
        layer: an object with the ops as attributes, and ``is_sparse`` and ``has_shared``.
        schedule: the order.

    Raises:
        PlanError: the schedule does not fit the layer.
    """
    names = schedule.sparse if layer.is_sparse else schedule.dense
    if layer.is_sparse and layer.has_shared and "op_shared_experts" not in names:
        raise PlanError(
            f"schedule {schedule.name!r} has no op_shared_experts, but this layer has shared experts",
            remedy="Use the prefill or deepseek-decode schedule, or add the op to yours.",
        )
    ops: list[Any] = []
    for name in names:
        if name == _YIELD_TEXT:
            ops.append(YIELD)
        elif name != "op_shared_experts" or layer.has_shared:
            ops.append(_op_named(layer, name, schedule))
    return ops


def _op_named(layer: Any, name: str, schedule: Schedule) -> Any:
    found = getattr(layer, name, None) if name.startswith("op_") else None
    if found is None:
        known = sorted(attribute for attribute in dir(layer) if attribute.startswith("op_"))
        raise PlanError(
            f"schedule {schedule.name!r} names {name!r}, which {type(layer).__name__} does not have",
            remedy=f"Its ops are: {', '.join(known)}; '|' is a yield.",
        )
    return found


def check_schedules(schedules: Any) -> dict[Phase, Schedule]:
    """Checks what a user passed as ``schedules=``.

    Raises:
        PlanError: not a mapping, or a key is not a phase or a value not a schedule.
    """
    if not isinstance(schedules, Mapping):
        raise PlanError(
            f"schedules is a {type(schedules).__name__}", remedy="Map tbo.Phase members to tbo.Schedule values."
        )
    for phase, schedule in schedules.items():
        if not isinstance(phase, Phase) or not isinstance(schedule, Schedule):
            raise PlanError(
                f"schedules maps {phase!r} to {type(schedule).__name__}",
                remedy="Map tbo.Phase members to tbo.Schedule values.",
            )
    return dict(schedules)


def layers_ops(layers: Sequence[Any], schedule: Schedule) -> list[list[Any]]:
    """The ops of each layer, as `compile_plan` takes them."""
    return [ops_of_layer(layer, schedule) for layer in layers]
