"""What the scheduler costs: `run` beside the same calls in a bare loop and beside two executors that interpret.

The ops have the signatures of a mixture-of-experts decoder layer and do next to nothing, so that the time is the
executor's own. All subjects call the same bound methods; those that pass values along must end with equal outputs.

    python -m benchmarks.scheduler_overhead [--layers 60] [--repeats 31] [--json]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.measure import Spread, interleaved, machine, no_collector, print_json, show
from tbo.core import YIELD, Plan, Trace, compile_plan, op, run

SUB_BATCHES = 2
BARE = "bare loop over the same calls"
RUN = "tbo.run"
WATCHED = "tbo.run with a Trace"
INTERPRETED = "interpreted loop over a dict"
STATE_BAG = "state bag, keyword splat"


class TinyLayer:
    """One layer's ops with the reads and writes of real ones; each adds one number."""

    @op(writes=("attn_input", "residual"))
    def op_comm_prepare_attn(self, hidden_states: int) -> tuple[int, int]:
        """One read, two writes."""
        return hidden_states + 1, hidden_states

    @op(writes="attention")
    def op_prepare(self, attn_input: int, kwargs: int) -> int:
        """Reads an input of the plan."""
        return attn_input + kwargs

    @op(writes="attn_output")
    def op_core(self, attention: int) -> int:
        """One read, one write."""
        return attention + 1

    @op(writes=("mlp_input", "residual"))
    def op_comm_prepare_mlp(self, attn_output: int, residual: int) -> tuple[int, int]:
        """Two reads, two writes."""
        return attn_output + residual, residual

    @op(writes="router_output")
    def op_gate(self, mlp_input: int) -> int:
        """Reads what others read later."""
        return mlp_input + 1

    @op(writes=("topk_ids", "topk_weights"))
    def op_select_experts(self, router_output: int) -> tuple[int, int]:
        """One read, two writes."""
        return router_output, router_output + 1

    @op(writes="dispatch", starts="ep")
    def op_dispatch_a(self, mlp_input: int, topk_ids: int, topk_weights: int) -> int:
        """Three reads."""
        return mlp_input + topk_ids + topk_weights

    @op(writes=("received", "ticket"), waits="dispatch")
    def op_dispatch_b(self, dispatch: int) -> tuple[int, int]:
        """One read, two writes."""
        return dispatch, dispatch + 1

    @op(writes="expert_output")
    def op_experts(self, received: int) -> int:
        """One read, one write."""
        return received + 1

    @op(writes="combine", starts="ep")
    def op_combine_a(self, expert_output: int, ticket: int) -> int:
        """Two reads."""
        return expert_output + ticket

    @op(writes="shared_output")
    def op_shared_experts(self, mlp_input: int) -> int:
        """The last reader of its input."""
        return mlp_input + 1

    @op(writes="routed_output", waits="combine")
    def op_combine_b(self, combine: int) -> int:
        """One read, one write."""
        return combine + 1

    @op(writes="mlp_output")
    def op_output(self, routed_output: int, shared_output: int) -> int:
        """Two reads."""
        return routed_output + shared_output

    @op(writes="hidden_states")
    def op_comm_postprocess_layer(self, mlp_output: int, residual: int) -> int:
        """Ends small, so that numbers stay small over 60 layers."""
        return (mlp_output + residual) % 1009

    def ops(self) -> list[Any]:
        """The prefill order."""
        return [
            *(self.op_comm_prepare_attn, self.op_prepare, self.op_core, self.op_comm_prepare_mlp),
            *(self.op_gate, self.op_select_experts, self.op_dispatch_a, YIELD),
            *(self.op_dispatch_b, self.op_experts, self.op_combine_a, YIELD),
            *(self.op_shared_experts, self.op_combine_b, self.op_output, self.op_comm_postprocess_layer),
        ]


class Bag:
    """A state whose keys are attributes, as serving engines pass between their split ops."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.__dict__["data"] = dict(given)

    def __getattr__(self, key: str) -> Any:
        return self.__dict__["data"][key]

    def __setattr__(self, key: str, value: Any) -> None:
        self.__dict__["data"][key] = value

    def pop(self, key: str) -> Any:
        """Takes a key out."""
        return self.__dict__["data"].pop(key)

    def update(self, values: Mapping[str, Any]) -> None:
        """Sets several keys."""
        for key, value in values.items():
            setattr(self, key, value)


@dataclass(frozen=True, slots=True)
class Call:
    """One op of the plan for executors that interpret: what to call, with which keys, in whose state."""

    function: Callable[..., Any]
    reads: tuple[tuple[str, bool], ...]
    writes: tuple[str, ...]
    single: bool
    sub_batch: int


def calls_of(plan: Plan) -> list[Call]:
    """The plan's ops in running order."""
    return [
        Call(step.op.fn, tuple(step.arguments.items()), step.op.writes, step.op.single, sub_batch)
        for sub_batch, stage in plan.order
        for step in plan.stages[stage].steps
    ]


def run_bare(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
    """The calls alone, with arguments that never change."""
    for function, arguments in calls:
        function(*arguments)


def run_interpreted(calls: Sequence[Call], inputs: Sequence[Mapping[str, Any]]) -> list[int]:
    """Does what `run` does with the plan as data: takes arguments out of a dict, calls, writes back."""
    states = [dict(given) for given in inputs]
    for call in calls:
        state = states[call.sub_batch]
        result = call.function(*[state.pop(key) if last else state[key] for key, last in call.reads])
        if call.single:
            state[call.writes[0]] = result
        else:
            state.update(zip(call.writes, result, strict=True))
    return [state["hidden_states"] for state in states]


def run_state_bag(calls: Sequence[Call], inputs: Sequence[Mapping[str, Any]]) -> list[int]:
    """Keyword arguments out of a bag of attributes, results back into it as a dict."""
    states = [Bag(given) for given in inputs]
    for call in calls:
        state = states[call.sub_batch]
        result = call.function(**{key: state.pop(key) if last else getattr(state, key) for key, last in call.reads})
        state.update(dict(zip(call.writes, (result,) if call.single else result, strict=True)))
    return [state.hidden_states for state in states]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One subject's cost. Times in seconds; `above_bare` is paired with the bare loop of the same repeat."""

    subject: str
    per_op: Spread
    above_bare: Spread
    per_step: Spread


def timed(function: Callable[[], object], steps: int) -> Callable[[], float]:
    """Seconds of one step, over `steps` in a row, of this thread's processor time: other processes count less."""

    def measure() -> float:
        with no_collector():
            start = time.thread_time()
            for _ in range(steps):
                function()
            return (time.thread_time() - start) / steps

    return measure


def measure(layers: int, repeats: int, steps: int) -> tuple[list[Row], Spread, int]:
    """The rows, the seconds compiling takes, and the ops of one step."""

    def compiled() -> Plan:
        plan = compile_plan(
            [TinyLayer().ops() for _ in range(layers)],
            inputs=("hidden_states", "kwargs"),
            outputs=("hidden_states",),
            sub_batches=SUB_BATCHES,
        )
        _ = plan.calls  # the stage functions are generated when first asked for
        return plan

    plan = compiled()
    calls = calls_of(plan)
    bare = [(call.function, (1,) * len(call.reads)) for call in calls]
    inputs = [{"hidden_states": 3, "kwargs": 1}, {"hidden_states": 5, "kwargs": 2}]
    outputs = [result["hidden_states"] for result in run(plan, inputs)]
    for interpreter in (run_interpreted, run_state_bag):
        if interpreter(calls, inputs) != outputs:
            raise SystemExit(f"{interpreter.__name__} computes something else: the comparison would be worthless")
    samples = interleaved(
        {
            BARE: timed(lambda: run_bare(bare), steps),
            RUN: timed(lambda: run(plan, inputs), steps),
            WATCHED: timed(lambda: run(plan, inputs, [Trace()]), steps),
            INTERPRETED: timed(lambda: run_interpreted(calls, inputs), steps),
            STATE_BAG: timed(lambda: run_state_bag(calls, inputs), steps),
        },
        repeats,
    )
    rows = [
        Row(
            subject=subject,
            per_op=Spread.of([seconds / len(calls) for seconds in steps_of]),
            above_bare=Spread.of(
                [(own - base) / len(calls) for own, base in zip(steps_of, samples[BARE], strict=True)]
            ),
            per_step=Spread.of(steps_of),
        )
        for subject, steps_of in samples.items()
    ]
    compiling = interleaved({"compile": timed(compiled, 1)}, min(repeats, 9))["compile"]
    return rows, Spread.of(compiling), len(calls)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Cost of the scheduler per op and per step.")
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--steps", type=int, default=10, help="steps in a row for each measurement")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    rows, compiling, ops = measure(options.layers, options.repeats, options.steps)
    if options.json:
        print_json(rows, layers=options.layers, sub_batches=SUB_BATCHES, ops=ops, compile_seconds=compiling.median)
        return
    table = Table(title=f"{ops} ops a step: {options.layers} layers, {SUB_BATCHES} sub-batches")
    table.add_column("")
    for name in ("us an op", "us an op above bare calls", "ms a step"):
        table.add_column(name, justify="right")
    for row in rows:
        above = "" if row.subject == BARE else row.above_bare.text(3, scale=1e6)
        table.add_row(row.subject, row.per_op.text(3, scale=1e6), above, row.per_step.text(3, scale=1e3))
    how = f"Processor time, median of {options.repeats} repeats (the middle half)."
    compiled = f"Compiling the plan takes {compiling.text(1, scale=1e3)} ms."
    show(table, (how, compiled, "  ".join(f"{key} {value}" for key, value in machine().items())))


if __name__ == "__main__":
    main()
