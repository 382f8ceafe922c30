"""Ops for tests of the scheduler: built from a list of keys, and values that remember where they come from."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tbo.core import YIELD, Instrument, Op, Trace, Where, op

REST = "rest"
"""The default of every optional read of a toy op."""


def mix(*parts: Any) -> int:
    """A number that depends on all parts and their order: equal numbers mean the same values met the same ops."""
    return zlib.crc32(repr(parts).encode())


def toy(
    name: str,
    reads: Sequence[str] = (),
    writes: str | tuple[str, ...] = (),
    *,
    body: Callable[..., Any] | None = None,
    **declared: Any,
) -> Op:
    """An op that mixes what it reads. ``reads`` may end in "?" (optional) and begin with "*" (keyword only)."""
    keys = [key.strip("*?") for key in reads]

    def fn(*args: Any, **kwargs: Any) -> Any:
        if body is not None:
            return body(*args, **kwargs)
        rest = [kwargs.get(key, REST) for key in keys[len(args) :]]
        written = [mix(name, index, *args, *rest) for index in range(len(writes))]
        return written[0] if isinstance(writes, str) else tuple(written)

    parameters = [
        inspect.Parameter(
            key.strip("*?"),
            inspect.Parameter.KEYWORD_ONLY if key.startswith("*") else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=REST if key.endswith("?") else inspect.Parameter.empty,
        )
        for key in reads
    ]
    fn.__name__ = name
    fn.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return op(writes=writes, **declared)(fn)


_TOYS = {
    declared.name: declared
    for declared in (
        toy("prepare_attn", ["hidden_states"], ("attn_input", "residual")),
        toy("prepare", ["attn_input"], "attention"),
        toy("core", ["attention"], "attn_output"),
        toy("prepare_mlp", ["attn_output", "residual"], ("mlp_input", "residual")),
        toy("mlp", ["mlp_input"], "mlp_output"),
        toy("gate", ["mlp_input"], "router_output"),
        toy("select", ["router_output"], ("ids", "weights")),
        toy("dispatch_a", ["mlp_input", "ids", "weights"], "dispatch", starts="ep"),
        toy("dispatch_b", ["dispatch"], ("rows", "ticket"), waits="dispatch"),
        toy("experts", ["rows"], "expert_output"),
        toy("combine_a", ["expert_output", "ticket"], "combine", starts="ep"),
        toy("combine_b", ["combine"], "routed_output", waits="combine"),
        toy("shared", ["mlp_input"], "shared_output"),
        toy("output", ["routed_output", "shared_output?"], "mlp_output"),
        toy("postprocess", ["mlp_output", "residual"], "hidden_states"),
    )
}

# The three orders of the reference system with their yields, and a dense layer.
PREFILL = (
    "prepare_attn prepare core prepare_mlp gate select dispatch_a | dispatch_b experts combine_a |"
    " shared combine_b output postprocess"
)
DEEPSEEK_DECODE = (
    "prepare_attn prepare | core prepare_mlp gate select | dispatch_a shared | dispatch_b experts combine_a |"
    " combine_b | output postprocess"
)
QWEN_DECODE = (
    "prepare_attn prepare | core prepare_mlp gate select | dispatch_a | dispatch_b experts combine_a |"
    " combine_b output postprocess |"
)
DENSE = "prepare_attn prepare core prepare_mlp mlp postprocess"


def layer(text: str) -> list[Any]:
    """``"gate select | experts"`` as ops and yields."""
    return [YIELD if word == "|" else _TOYS[word] for word in text.split()]


def trace_lines(ops: Iterable[Where]) -> list[str]:
    """A trace as ``"1:2 gate"``: sub-batch, stage, op."""
    return [f"{where.sub_batch}:{where.stage} {where.op}" for where in ops]


class EveryHook(Instrument):
    """Overrides all six hooks, so that a run takes the watched path in every respect, and notes each call."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def before_step(self, plan: Any) -> None:
        self.events.append(f"before step of {plan.sub_batches}")

    def after_step(self, plan: Any, error: BaseException | None) -> None:
        self.events.append("after step" if error is None else f"after step: {error!r}")

    def before_stage(self, sub_batch: int, stage: int) -> None:
        self.events.append(f"before stage {sub_batch}:{stage}")

    def after_stage(self, sub_batch: int, stage: int) -> None:
        self.events.append(f"after stage {sub_batch}:{stage}")

    def before_op(self, where: Where, state: Any) -> None:
        self.events.append(f"before {where.sub_batch}:{where.op} {sorted(state)}")

    def after_op(self, where: Where, state: Any) -> None:
        self.events.append(f"after {where.sub_batch}:{where.op} {sorted(state)}")


WATCHES: dict[str, tuple[type[Instrument], ...]] = {
    "unwatched": (),
    "trace": (Trace,),
    "every hook": (EveryHook, Trace),
}
"""Instruments every test of `run` is repeated with: the two generated paths must not differ."""
