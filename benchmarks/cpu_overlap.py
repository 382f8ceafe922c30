"""Measured over predicted step time on a CPU, with a modelled link at several ratios of communication to compute.

The plan is the prefill order over several layers; its heavy ops multiply real matrices on one thread (or, with
``--compute spin``, only pass time), its transfers occupy a modelled `Link`. The prediction is the schedule's own floor:
`benchmarks.predict` with the op durations of the same repeat, measured with nothing on the link. Beside it stands the
ratio to max(compute, communication), which so few layers do not always reach, because the pipeline must fill and drain.

    python -m benchmarks.cpu_overlap [--layers 6] [--repeats 15] [--compute matmul|spin] [--json]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table

from benchmarks.measure import Spread, machine, no_collector, print_json, show
from benchmarks.predict import Prediction, predict
from benchmarks.working_layer import Compute, Matmuls, Spin, WorkingLayer, prefill_plan, run_with
from tbo.core import Instrument, Where
from tbo.ops.link import Clock, Link

RATIOS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)

SHARES = {"op_core": 0.45, "op_experts": 0.45, "op_shared_experts": 0.10}
"""How a layer's computation is spread over its heavy ops; the others take no time worth speaking of."""


class OpTimes(Instrument):
    """Seconds each op takes, added up by name."""

    def __init__(self) -> None:
        self._began = 0.0
        self._seconds: dict[str, list[float]] = {}

    def before_op(self, where: Where, state: Mapping[str, Any]) -> None:
        """Starts the clock."""
        self._began = time.perf_counter()

    def after_op(self, where: Where, state: Mapping[str, Any]) -> None:
        """Stops it."""
        self._seconds.setdefault(where.op, []).append(time.perf_counter() - self._began)

    def means(self) -> dict[str, float]:
        """By op name; means, because what counts is their sum."""
        return {name: statistics.fmean(seconds) for name, seconds in self._seconds.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One ratio: times in seconds, ratios paired within each repeat.

    `processor_share` is the processor time of computing alone over its wall time: below 1, other processes held the
    processor, and the other columns say more about them than about the schedule.
    """

    sub_batches: int
    nominal_ratio: float
    compute: Spread
    communication: float
    predicted: Spread
    measured: Spread
    measured_over_predicted: Spread
    measured_over_bound: Spread
    predicted_over_bound: Spread
    speed_up: Spread
    processor_share: Spread


@dataclass(frozen=True, kw_only=True, slots=True)
class _Repeat:
    prediction: Prediction
    processor_share: float
    measured: float
    in_sequence: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is measured: times in seconds; `layer_seconds` is one layer's computation for the whole batch."""

    layers: int
    sub_batches: int
    ratio: float
    layer_seconds: float
    repeats: int


def timed(step: Callable[[], None]) -> float:
    """Wall seconds of one step."""
    with no_collector():
        start = time.perf_counter()
        step()
        return time.perf_counter() - start


def timed_twice(step: Callable[[], None]) -> tuple[float, float]:
    """Wall and own processor seconds of one step."""
    start = time.thread_time()
    wall = timed(step)
    return wall, time.thread_time() - start


def measure(setting: Setting, compute: Compute) -> Row:
    """Measures one ratio; every repeat has its own op durations, prediction and un-overlapped run.

    Op durations are taken before and after the measured step, because a busy machine changes its pace.
    """
    part_seconds = setting.layer_seconds / setting.sub_batches
    transfer_seconds = setting.ratio * part_seconds / 2  # a layer has two transfers
    layer = WorkingLayer(
        work={name: compute.work(share * part_seconds) for name, share in SHARES.items()},
        transfer_seconds=transfer_seconds,
    )
    plan = prefill_plan(layer, layers=setting.layers, sub_batches=setting.sub_batches)
    sequence = prefill_plan(layer, layers=setting.layers, sub_batches=setting.sub_batches, sequential=True)
    instant = Clock(sleep_until=lambda _: None)
    transfers = {"op_dispatch_a": transfer_seconds, "op_combine_a": transfer_seconds}
    repeats = []
    for _ in range(setting.repeats):
        times = OpTimes()

        def compute_alone(times: OpTimes = times) -> None:
            run_with(plan, Link(1.0, clock=instant), [times])

        before = timed_twice(compute_alone)
        measured = timed(lambda: run_with(plan, Link(1.0)))
        after = timed_twice(compute_alone)
        in_sequence = timed(lambda: run_with(sequence, Link(1.0)))
        prediction = predict(plan, compute=times.means(), transfers=transfers)
        share = (before[1] + after[1]) / (before[0] + after[0])
        repeats.append(
            _Repeat(prediction=prediction, processor_share=share, measured=measured, in_sequence=in_sequence)
        )
    return _row(setting, repeats)


def _row(setting: Setting, repeats: Sequence[_Repeat]) -> Row:
    def spread(value: Callable[[_Repeat], float]) -> Spread:
        return Spread.of([value(repeat) for repeat in repeats])

    return Row(
        sub_batches=setting.sub_batches,
        nominal_ratio=setting.ratio,
        compute=spread(lambda repeat: repeat.prediction.compute),
        communication=repeats[0].prediction.communication,
        predicted=spread(lambda repeat: repeat.prediction.step),
        measured=spread(lambda repeat: repeat.measured),
        measured_over_predicted=spread(lambda repeat: repeat.measured / repeat.prediction.step),
        measured_over_bound=spread(lambda repeat: repeat.measured / repeat.prediction.bound),
        predicted_over_bound=spread(lambda repeat: repeat.prediction.step / repeat.prediction.bound),
        speed_up=spread(lambda repeat: repeat.in_sequence / repeat.measured),
        processor_share=spread(lambda repeat: repeat.processor_share),
    )


def table_of(rows: Sequence[Row], layers: int) -> Table:
    """The rows for people."""
    table = Table(title=f"Prefill order, {layers} layers, modelled link: step times in ms")
    columns = (
        *("sub-\nbatches", "C", "M", "M / C", "predicted", "measured", "measured / predicted"),
        *("measured / max(C, M)", "predicted /\nmax(C, M)", "in sequence /\noverlapped", "own\nCPU"),
    )
    for name in columns:
        table.add_column(name, justify="right")
    for index, row in enumerate(rows):
        is_last = index + 1 == len(rows) or rows[index + 1].sub_batches != row.sub_batches
        table.add_row(
            str(row.sub_batches),
            f"{row.compute.median * 1e3:.1f}",
            f"{row.communication * 1e3:.1f}",
            f"{row.nominal_ratio:g}",
            f"{row.predicted.median * 1e3:.1f}",
            f"{row.measured.median * 1e3:.1f}",
            row.measured_over_predicted.text(3),
            row.measured_over_bound.text(3),
            f"{row.predicted_over_bound.median:.3f}",
            row.speed_up.text(2),
            f"{row.processor_share.median:.0%}",
            end_section=is_last,
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Measured over predicted step time with a modelled link.")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sub-batches", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS))
    parser.add_argument("--layer-ms", type=float, default=12.0, help="one layer's computation for the whole batch")
    parser.add_argument("--compute", choices=("matmul", "spin"), default="matmul", help="what the heavy ops do")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    compute = Spin() if options.compute == "spin" else Matmuls()
    settings = [
        Setting(
            layers=options.layers,
            sub_batches=sub_batches,
            ratio=ratio,
            layer_seconds=options.layer_ms / 1e3,
            repeats=options.repeats,
        )
        for sub_batches in options.sub_batches
        for ratio in options.ratios
    ]
    with Progress(transient=True, disable=options.json) as progress:
        rows = [measure(setting, compute) for setting in progress.track(settings, description="measuring")]
    if options.json:
        print_json(rows, layers=options.layers, compute=options.compute, modelled_link=True, torch=torch.__version__)
        return
    legend = f"C computation ({options.compute}, one thread), M communication (modelled link), M / C as set."
    repeats = (
        "In sequence: the same plan, not overlapped. Own CPU: of the time computing; below 100 %, others disturbed."
        f" Median of {options.repeats} repeats (the middle half)."
    )
    facts = "  ".join(f"{key} {value}" for key, value in {**machine(), "torch": torch.__version__}.items())
    show(table_of(rows, options.layers), (legend, repeats, facts))


if __name__ == "__main__":
    main()
