"""The examples run as their users run them, and compute the right thing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks, values

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(name: str) -> Any:
    return load(name).main()


def test_own_model_gives_the_same_on_one_rank_and_on_two() -> None:
    alone = run_example("own_model")
    together = values(run_ranks(2, run_example, "own_model"))
    assert alone.shape == (100, 64)
    assert together[1].shape == (101, 64)
    torch.testing.assert_close(together[0], alone, atol=1e-5, rtol=1e-5)
    assert not dist.is_initialized()


def test_own_model_computes_what_a_plain_loop_computes() -> None:
    module = load("own_model")
    actual = module.main()
    torch.manual_seed(0)
    layers = [module.Layer(0, 1) for _ in range(module.LAYERS)]
    hidden = torch.randn(100, module.HIDDEN, generator=torch.Generator().manual_seed(0))
    for layer in layers:
        weights, ids = (hidden @ layer.router).softmax(-1).topk(module.TOP_K)
        chosen = torch.einsum("th,tkhi->tki", hidden, layer.experts[ids]).relu()
        hidden = hidden + (chosen * weights[..., None]).sum(1)
    torch.testing.assert_close(actual, hidden, atol=1e-5, rtol=1e-5)


def test_a_wrapped_model_generates_the_same_tokens_on_one_rank_and_on_two() -> None:
    alone = run_example("wrap_a_model")
    together = values(run_ranks(2, run_example, "wrap_a_model"))
    assert together[0] == alone
    assert len(together[1]) == len(alone) + 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_runs_as_a_script(name: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
