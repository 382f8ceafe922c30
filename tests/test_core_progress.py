"""Progress: another thread reads which op runs, as the heartbeat does so that a killed rank's last op is known."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tbo.core import YIELD, Instrument, Progress, compile_plan, run
from tbo.errors import OpError
from toy_ops import WATCHES, toy

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=WATCHES)
def instruments(request: pytest.FixtureRequest) -> tuple[Instrument, ...]:
    return tuple(kind() for kind in WATCHES[request.param])


def test_progress_tells_another_thread_the_running_op(instruments: tuple[Instrument, ...]) -> None:
    """As the heartbeat asks: while ops run, in each sub-batch, also behind a dropped key in the same stage."""
    progress = Progress()
    heard: list[str] = []

    def ask(_: Any) -> tuple[int, int]:
        listener = threading.Thread(target=lambda: heard.append(progress.describe()))
        listener.start()
        listener.join(timeout=10)
        return (0, 0)

    ops = {name: toy(name, ["x"], (f"{name}_dropped", f"{name}_too"), body=ask) for name in ("op_a", "op_b", "op_c")}
    plan = compile_plan([[ops["op_a"], ops["op_b"], YIELD], [ops["op_c"]]], inputs=["x"], outputs=["x"], offset=1)
    assert progress.describe() == "outside a step"
    run(plan, [{"x": 1}, {"x": 2}], instruments, progress=progress)
    assert heard == [
        "sub-batch 0, layer 0, stage 0, op_a",
        "sub-batch 0, layer 0, stage 0, op_b",
        "sub-batch 0, layer 1, stage 1, op_c",
        "sub-batch 1, layer 0, stage 0, op_a",
        "sub-batch 1, layer 0, stage 0, op_b",
        "sub-batch 1, layer 1, stage 1, op_c",
    ]
    assert progress.describe() == "outside a step"


def test_progress_of_a_failed_step_is_outside_again(instruments: tuple[Instrument, ...]) -> None:
    progress = Progress()
    fail = toy("op_fail", ["x"], "y", body=lambda _: 1 // 0)
    plan = compile_plan([[fail]], inputs=["x"], outputs=["y"], sub_batches=1)
    with pytest.raises(OpError):
        run(plan, [{"x": 1}], instruments, progress=progress)
    assert progress.describe() == "outside a step"


def test_progress_asked_by_a_thread_that_runs_nothing_names_the_stage() -> None:
    """Between two ops there is no op's frame: the stage's first op stands for it."""
    progress = Progress()
    plan = compile_plan([[toy("op_first", ["x"], "y"), toy("op_second", ["y"], "z")]], inputs=["x"], outputs=["z"])
    progress.plan, progress.at = plan, plan.calls[1]
    assert progress.describe() == "sub-batch 1, layer 0, stage 0, op_first"
