"""The options of the subcommands that read traces, with their defaults: changing one is a decision."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(60)

COUNTING: dict[str, Any] = {"--classify": None, "--exclude-memory": False, "--transfer-only": False, "--by-lane": None}

# Acceptance 12: the help of every command is frozen.
SURFACE: dict[str, dict[str, Any]] = {
    "stats": {"files": None, "--by": "stage", **COUNTING, "--json": False},
    "gaps": {"file": None, "--min-us": 10.0, "--top": 20, **COUNTING, "--json": False},
    "diff": {"before": None, "after": None, "--min-us": 0.0, "--top": 20, **COUNTING, "--json": False},
    "check": {
        "file": None,
        "--min-overlap": None,
        "--max-exposed-us": None,
        "--max-idle": None,
        "--max-bubble": None,
        **COUNTING,
        "--json": False,
    },
    "export": {"files": None, "--output": None, "--merge": False, "--align": "auto", "--classify": None},
}

SUMMARIES = {
    "stats": "how much communication is hidden, by stage, op and lane",
    "gaps": "the longest stretches of exposed communication and idleness, and why",
    "diff": "what changed between two runs, op by op",
    "check": "fail where a trace does not keep its limits, for continuous integration",
    "export": "write a timeline for Perfetto or a browser; merge ranks",
}


def parser_of(name: str) -> argparse.ArgumentParser:
    module: Any = importlib.import_module(f"tbo.timeline.commands.{name}")
    parser = argparse.ArgumentParser(prog=f"tbo timeline {name}", description=module.DESCRIPTION)
    module.add_arguments(parser)
    return parser


@pytest.mark.parametrize("name", SURFACE)
def test_acceptance_12_the_options_are_these(name: str) -> None:
    module: Any = importlib.import_module(f"tbo.timeline.commands.{name}")
    actions = [action for action in parser_of(name)._actions if action.dest != "help"]
    found = {action.option_strings[-1] if action.option_strings else action.dest: action.default for action in actions}
    assert found == SURFACE[name]
    assert (name, SUMMARIES[name]) == (module.NAME, module.SUMMARY)
    assert "Exit code: 0" in " ".join(module.DESCRIPTION.split())
    for action in actions:
        assert action.help
        assert not action.option_strings or "(default: " in action.help
    parser_of(name).format_help()  # a stray % in a help text fails here


def test_reading_traces_imports_no_torch() -> None:
    import subprocess
    import sys

    modules = ", ".join(f"tbo.timeline.commands.{name}" for name in SURFACE)
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, timeout=50
    )
    assert done.stdout.strip() == "False"
