"""The benchmarks run and say what they should; never a limit on a measured time, which belongs to the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import cpu_overlap, scheduler_overhead
from benchmarks.measure import Spread, interleaved
from benchmarks.predict import Prediction, predict
from benchmarks.working_layer import WorkingLayer, prefill_plan, run_with
from tbo.ops.link import Clock, Link

pytestmark = pytest.mark.timeout(100)

CHECKOUT = Path(__file__).parent.parent


@pytest.fixture
def threads() -> Iterator[None]:
    """The benchmarks compute on one thread; what other tests use is put back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def prefill_prediction(core: float, experts: float, transfer: float, shared: float = 0.0, **options: Any) -> Prediction:
    layer = WorkingLayer(work={}, transfer_seconds=transfer)
    return predict(
        prefill_plan(layer, **options),
        compute={"op_core": core, "op_experts": experts, "op_shared_experts": shared},
        transfers={"op_dispatch_a": transfer, "op_combine_a": transfer},
    )


# ---------------------------------------------------------------- the prediction


@pytest.mark.parametrize(
    ("sub_batches", "step", "waited"),
    [
        # compute: core 0-1, experts 2-3; link: dispatch 1-2, combine 3-4.
        (1, 4.0, 2.0),
        # compute: core 0-1 1-2, experts 2-3 3-4; link: dispatch 1-2 2-3, combine 3-4 4-5, which is waited for.
        (2, 5.0, 1.0),
        # compute: core 0-3, experts 3-6; link: dispatch 1-4, combine 4-7: the first queues behind the last dispatch.
        (3, 7.0, 1.0),
    ],
)
def test_hand_worked_layer_with_equal_parts(sub_batches: int, step: float, waited: float) -> None:
    prediction = prefill_prediction(1.0, 1.0, 1.0, layers=1, sub_batches=sub_batches)
    assert prediction == Prediction(
        step=step, compute=2.0 * sub_batches, communication=2.0 * sub_batches, waited=waited
    )
    assert prediction.bound == 2.0 * sub_batches


@pytest.mark.parametrize(("transfer", "step"), [(0.25, 4.25), (0.5, 4.5)])
def test_hand_worked_drain_behind_the_shared_experts(transfer: float, step: float) -> None:
    """Only the last combine, from 4 on, can show: both sub-batches' shared experts run until 4.25 meanwhile.

    Compute: core 0-1 1-2, experts 2-3 3-4, shared 4-4.125 4.125-4.25.
    """
    assert prefill_prediction(1.0, 1.0, transfer, 0.125, layers=1, sub_batches=2).step == step


def test_in_sequence_nothing_is_hidden_but_behind_the_shared_experts() -> None:
    """The shared experts of 0.25 run while the combine of 1.0 is in flight."""
    prediction = prefill_prediction(1.0, 1.0, 1.0, 0.25, layers=3, sub_batches=2, sequential=True)
    assert prediction.serial == 6 * (2.25 + 2.0)
    assert prediction.step == 6 * 4.0


seconds = st.integers(0, 8).map(lambda eighths: eighths / 8)


@given(
    core=seconds,
    experts=seconds,
    shared=seconds,
    transfer=seconds,
    layers=st.integers(1, 4),
    sub_batches=st.integers(1, 4),
    sequential=st.booleans(),
)
def test_the_prediction_is_what_a_run_takes_on_a_virtual_clock(
    core: float, experts: float, shared: float, transfer: float, layers: int, sub_batches: int, sequential: bool
) -> None:
    """The real ops, the real `run` and the real `Link`; only the clock is virtual. Eighths add up exactly."""
    options: dict[str, Any] = {"layers": layers, "sub_batches": sub_batches, "sequential": sequential}
    prediction = prefill_prediction(core, experts, transfer, shared, **options)
    now = [0.0]

    def advance(by: float) -> None:
        now[0] += by

    def sleep_until(moment: float) -> None:
        now[0] = max(now[0], moment)

    layer = WorkingLayer(
        work={
            "op_core": lambda: advance(core),
            "op_experts": lambda: advance(experts),
            "op_shared_experts": lambda: advance(shared),
        },
        transfer_seconds=transfer,
    )
    run_with(prefill_plan(layer, **options), Link(1.0, clock=Clock(now=lambda: now[0], sleep_until=sleep_until)))
    assert now[0] == prediction.step
    assert prediction.compute == layers * sub_batches * (core + experts + shared)
    assert prediction.communication == layers * sub_batches * 2 * transfer
    assert prediction.bound <= prediction.step <= prediction.serial


# ---------------------------------------------------------------- what they share


def test_spread_of_samples() -> None:
    spread = Spread.of([5.0, 1.0, 4.0, 2.0, 3.0])
    assert spread == Spread(median=3.0, quarter=2.0, three_quarters=4.0, smallest=1.0, largest=5.0, repeats=5)
    assert spread.text(1, scale=10) == "30.0 (20.0 to 40.0)"
    assert Spread.of([7.0]).text(0) == "7 (7 to 7)"


def test_subjects_take_turns() -> None:
    order: list[str] = []

    def subject(name: str) -> float:
        order.append(name)
        return float(len(order))

    samples = interleaved({"a": lambda: subject("a"), "b": lambda: subject("b")}, 3)
    assert order == ["a", "b"] * 3
    assert samples == {"a": [1.0, 3.0, 5.0], "b": [2.0, 4.0, 6.0]}


# ---------------------------------------------------------------- smoke


def test_scheduler_overhead_runs_as_documented() -> None:
    command = [sys.executable, "-m", "benchmarks.scheduler_overhead", "--layers", "2", "--repeats", "2", "--steps", "1"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=True)
    for subject in ("bare loop over the same calls", "tbo.run", "interpreted loop over a dict", "state bag"):
        assert subject in done.stdout
    assert "56 ops a step: 2 layers, 2 sub-batches" in done.stdout


def test_scheduler_overhead_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    scheduler_overhead.main(["--layers", "3", "--repeats", "2", "--steps", "1", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["ops"] == 3 * 14 * 2
    assert [row["subject"] for row in report["rows"]] == [
        *("bare loop over the same calls", "tbo.run", "tbo.run with a Trace"),
        *("interpreted loop over a dict", "state bag, keyword splat"),
    ]
    for row in report["rows"]:
        assert row["per_op"]["repeats"] == 2
        assert row["per_step"]["median"] > row["per_op"]["median"] > 0


def test_executors_that_disagree_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_overhead, "run_interpreted", lambda calls, inputs: [0, 0])
    with pytest.raises(SystemExit, match="computes something else"):
        scheduler_overhead.main(["--layers", "1", "--repeats", "1", "--steps", "1"])


TINY = ["--layers", "2", "--repeats", "2", "--layer-ms", "0.4", "--ratios", "0.5", "2"]


@pytest.mark.usefixtures("threads")
def test_cpu_overlap_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    cpu_overlap.main([*TINY, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["modelled_link"] is True
    assert [(row["sub_batches"], row["nominal_ratio"]) for row in report["rows"]] == [
        *((2, 0.5), (2, 2.0), (3, 0.5), (3, 2.0)),
    ]
    for row in report["rows"]:
        assert row["communication"] == pytest.approx(2 * 0.4e-3 * row["nominal_ratio"])
        assert row["predicted_over_bound"]["smallest"] >= 1
        assert 0 < row["processor_share"]["median"] < 1.05
        assert row["measured"]["smallest"] >= row["communication"]  # the link cannot be outrun


@pytest.mark.usefixtures("threads")
def test_cpu_overlap_as_a_table_says_the_link_is_modelled(capsys: pytest.CaptureFixture[str]) -> None:
    cpu_overlap.main([*TINY, "--compute", "spin"])
    shown = capsys.readouterr().out
    assert "modelled link" in shown
    assert "measured / predicted" in shown
