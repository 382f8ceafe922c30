"""What the documentation says is so: its code runs, its tables are the code's, its links lead somewhere."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

import tbo
from benchmarks.predict import predict
from ranks import run_ranks, values
from tbo import cli, errors
from tbo.batch import (
    MAX_SUB_BATCHES,
    ORDER_OF_PHASE,
    RULE_OF_PHASE,
    TOKEN_THRESHOLD,
    Phase,
    Reason,
    SplitRule,
    Thresholds,
)
from tbo.demo.options import RANKS
from tbo.models.attention_explicit import LATENT, PLAIN
from tbo.models.experts import InputWeightedExperts
from tbo.models.family_table import FAMILIES, REFUSED, FamilyTraits
from tbo.models.orders import DEEPSEEK_DECODE, PREFILL, QWEN_DECODE, Schedule
from tbo.models.residuals import AlphaBeta, HyperConnections, PreNorm, ResidualRule, ScaledPreNorm
from tbo.models.routing import RouterCall, RouterOutput
from tbo.ops.dispatch import NAMES, status
from tbo.ops.failure import Kind
from tbo.wrapping.batching import VERIFY_MOST_TOKENS
from tbo.wrapping.report import Mode
from tbo.wrapping.wrap import DEFAULT_TIMEOUT

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
DOCS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
ALL_TEXT = "\n".join(DOCS.values())

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: str, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(DOCS[page]) if kind == language]


def rows(page: str, first_heading: str) -> list[list[str]]:
    """The cells of the table whose first column has this heading, without backticks."""
    lines = DOCS[page].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {first_heading} |"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return found


def first_column(page: str, first_heading: str) -> list[str]:
    return [row[0] for row in rows(page, first_heading)]


def anchors(text: str) -> set[str]:
    """GitHub's names for the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_code(text: str) -> str:
    return re.sub(r"`[^`]*`", "", FENCE.sub("", text))


@pytest.mark.parametrize("page", DOCS)
def test_links_within_the_project_lead_somewhere(page: str) -> None:
    for link in LINK.findall(without_code(DOCS[page])):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page} links to {link}, which does not exist"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{page} links to {link}: no such heading"


def test_the_index_leads_to_every_page() -> None:
    linked = set(LINK.findall(DOCS["docs/index.md"]))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"} <= linked
    assert "docs/index.md" in LINK.findall(DOCS["README.md"])


def test_only_the_projects_words_are_used() -> None:
    own = "\n".join(text for page, text in DOCS.items() if page == "README.md" or page.startswith("docs/"))
    assert not re.findall(r"micro-?batch\w*|u-?batch\w*|sub ?batch\b|mini-?batch\w*", own, re.IGNORECASE)


# -- code ----------------------------------------------------------------------------------------------------------


def run_readme() -> tuple[list[str], str]:
    """On each rank: all Python blocks one after another, as one script. Returns their outputs and the last report."""
    dist.init_process_group = lambda *_, **__: None  # run_ranks has done it
    namespace: dict[str, Any] = {}
    outputs = []
    for code in blocks("README.md", "python"):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, "README.md", "exec"), namespace)  # noqa: S102 - our own page
        outputs.append(printed.getvalue())
    return outputs, str(namespace["handle"].last)


def test_the_readmes_code_runs_and_prints_what_it_says() -> None:
    (said,) = blocks("README.md", "text")
    for outputs, report in values(run_ranks(2, run_readme, timeout=60)):
        assert outputs[0] == said
        assert "votes: rank 0" in report


def test_the_scheduler_pages_code_runs() -> None:
    code = "\n".join(blocks("docs/core.md", "python"))
    assert code.count("assert") >= 5
    exec(compile(code, "docs/core.md", "exec"), {})  # noqa: S102 - our own page


def test_the_tutorial_is_the_example_file_piece_by_piece() -> None:
    file = (ROOT / "examples" / "own_model.py").read_text(encoding="utf-8")
    pieces = "\n".join(blocks("docs/tutorial.md", "python"))
    assert [line for line in pieces.splitlines() if line] == [line for line in file.splitlines() if line]


# -- the picture ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    path = ROOT / "docs" / "pictures" / "draw_interleaving.py"
    spec = importlib.util.spec_from_file_location("draw_interleaving", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def test_the_committed_picture_is_what_the_script_draws(drawing: ModuleType) -> None:
    assert drawing.PICTURE.read_text(encoding="utf-8") == drawing.draw(), "run docs/pictures/draw_interleaving.py"


def test_the_pictures_times_by_hand(drawing: ModuleType) -> None:
    """Attention 5, experts 4, shared 3, dispatch 5, combine 6; two layers, two sub-batches."""
    interleaved, sequential = (drawing.play(plan) for plan in drawing.interleaved_and_sequential())
    assert drawing.total_of(sequential) == 2 * 2 * (5 + 5 + 4 + 6)  # the shared experts run during the combine
    assert drawing.hidden_of(sequential) == (2 * 2 * 3, 2 * 2 * (5 + 6))
    ends = [(span.sub_batch, span.what.removeprefix("op_"), span.end) for span in interleaved if span.lane == "link"]
    assert ends == [
        (0, "dispatch_a", 10),
        (1, "dispatch_a", 15),
        (0, "combine_a", 21),
        (1, "combine_a", 27),
        (0, "dispatch_a", 32),
        (1, "dispatch_a", 40),
        (0, "combine_a", 46),
        (1, "combine_a", 52),
    ]
    waits = [(span.start, span.end) for span in interleaved if span.what == drawing.WAIT]
    assert waits == [(14, 15), (39, 40), (50, 52)]
    assert drawing.total_of(interleaved) == 2 * 2 * (5 + 4 + 3) + 4
    assert drawing.hidden_of(interleaved) == (44 - 4, 44)


def test_the_picture_and_the_benchmarks_prediction_agree(drawing: ModuleType) -> None:
    for plan in drawing.interleaved_and_sequential():
        predicted = predict(plan, compute=drawing.COMPUTE, transfers=drawing.TRANSFERS)
        assert predicted.step == drawing.total_of(drawing.play(plan))


def test_the_pictures_sub_batches_differ_in_more_than_colour(drawing: ModuleType) -> None:
    text = drawing.draw()
    assert text.count('class="block s1"') == text.count('fill="url(#hatch)"') == 21
    assert text.count('class="number"') == 2 * 20
    assert "prefers-color-scheme: dark" in text


# -- names and tables ----------------------------------------------------------------------------------------------


def test_every_public_name_is_on_the_index_page() -> None:
    names = {name for row in rows("docs/index.md", "names") for name in re.findall(r"\w+", row[0])}
    classes = set(first_column("docs/index.md", "class"))
    assert set(tbo.__all__) - names - classes == set()
    assert names - {"the", "exceptions"} <= set(tbo.__all__)


def test_every_exception_is_explained() -> None:
    classes = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    documented = first_column("docs/index.md", "class")
    assert set(documented) == {name for name, value in classes.items() if issubclass(value, errors.TboError)}
    start, end = documented.index("OpDeclarationError"), documented.index("RanksDisagreeError")
    for index, name in enumerate(documented):
        is_mistake = issubclass(classes[name], errors.UserError)
        assert is_mistake == (start <= index <= end or name == "UserError")


def test_every_folder_has_its_sentence() -> None:
    packages = {f"tbo/{path.parent.name}" for path in (ROOT / "tbo").glob("*/__init__.py")}
    folders = set(first_column("docs/index.md", "folder"))
    assert folders == packages | {"ops", "models", "kernels", "tests", "benchmarks", "examples", "docs"}


def test_every_reason_has_its_code_and_text() -> None:
    documented = rows("docs/batch.md", "code")
    assert [(name, int(number), text) for name, number, text, _ in documented] == [
        (reason.name, int(reason), reason.text) for reason in Reason
    ]


def test_reasons_marked_as_unused_by_wrap_are() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tbo" / "wrapping").glob("*.py"))
    unused = {name for name, _, _, mark in rows("docs/batch.md", "code") if mark == "-"}
    assert unused == {"OVER_A_LIMIT", "CANNOT_SPLIT", "PREFIX_READ"}
    assert not [name for name in unused if f"Reason.{name}" in code]
    assert "prefix_reads" not in code


def test_thresholds_and_numbers_in_the_text() -> None:
    defaults = Thresholds()
    documented = {name: value for name, value, _ in rows("docs/batch.md", "field")}
    assert documented == {field.name: str(getattr(defaults, field.name)) for field in dataclasses.fields(Thresholds)}
    assert f"from {2 * defaults.prefill_min_tokens_per_sub_batch} tokens on" in DOCS["docs/batch.md"]
    assert f"less than {TOKEN_THRESHOLD * 100:.0f} % of the tokens" in DOCS["docs/batch.md"]
    assert f"({DEFAULT_TIMEOUT:.0f} s by default)" in DOCS["docs/ops.md"]
    assert f"timeout={DEFAULT_TIMEOUT}" in DOCS["docs/wrapping.md"]
    assert f"1 to {MAX_SUB_BATCHES} |" in DOCS["docs/wrapping.md"]
    assert f"more than {VERIFY_MOST_TOKENS} new positions" in DOCS["docs/wrapping.md"]


def test_every_phase_with_its_split_rule_and_order() -> None:
    documented = {name: (rule, order) for name, _, rule, order in rows("docs/batch.md", "`tbo.Phase`")}
    assert documented == {
        phase.name: (RULE_OF_PHASE[phase].value.replace("_", " "), ORDER_OF_PHASE[phase]) for phase in Phase
    }
    assert set(first_column("docs/batch.md", "rule")) == {rule.value.replace("_", " ") for rule in SplitRule}


def test_every_dispatcher_with_its_state() -> None:
    documented = {name: state for name, _, state in rows("docs/ops.md", "name")}
    assert tuple(documented) == NAMES
    assert {name for name, state in documented.items() if "refused by name" in state} == {
        name for name in NAMES if "not built yet" in status(name).why
    }
    # Where the code says it was never run, so do the pages; once it was, this test asks for both to be changed.
    never_run = "Not run yet" in (ROOT / "ops" / "all_to_all_cuda.py").read_text(encoding="utf-8")
    assert never_run == ("never run" in DOCS["README.md"]) == ("never run" in documented["all_to_all"])


def test_every_kind_of_failure_and_every_mode() -> None:
    assert len(rows("docs/ops.md", "what happens")) == len(Kind)
    assert first_column("docs/wrapping.md", "mode") == [mode.value for mode in Mode]


@pytest.mark.parametrize("schedule", [PREFILL, DEEPSEEK_DECODE, QWEN_DECODE], ids=lambda schedule: schedule.name)
def test_the_schedules_are_the_codes(schedule: Schedule) -> None:
    name = next(name for name in ("PREFILL", "DEEPSEEK_DECODE", "QWEN_DECODE") if getattr(tbo, name) is schedule)
    head, text = DOCS["docs/models.md"].split(f"`tbo.{name}`, offset ")[1].split(":\n\n", 1)
    assert int(head.split(".")[0]) == schedule.offset
    assert tuple(re.findall(r"op_\w+|\|", text.split("\n\n")[0])) == schedule.sparse


RESIDUALS: dict[type[Any], str] = {
    PreNorm: "",
    ScaledPreNorm: "scaled residual",
    AlphaBeta: "residual after the norm, weighed",
    HyperConnections: "several residual streams",
}


def differences(traits: FamilyTraits) -> Iterator[str]:
    rule: ResidualRule = traits.residual
    yield RESIDUALS[type(rule)]
    if traits.router_call is not RouterCall.ROWS:
        yield f"router takes {traits.router_call.value}"
    if traits.router_output is not RouterOutput.LOGITS_WEIGHTS_IDS:
        yield f"router returns {traits.router_output.value}"
    if isinstance(traits.experts, InputWeightedExperts):
        yield "weights before the experts"
    if traits.shared_on_rows:
        yield "shared experts on rows"
    if traits.kept_from_attention:
        yield f"attention is not given {', '.join(sorted(traits.kept_from_attention))}"
    if traits.carries_topk:
        yield "top-k indices go on to the next layer"


def cut_of(layer_class: str) -> str:
    attention = layer_class.removesuffix("DecoderLayer") + "Attention"
    return "plain" if attention in PLAIN else "latent" if attention in LATENT else "generic"


def test_the_families_are_the_codes() -> None:
    expected = [
        [
            traits.family,
            layer_class,
            cut_of(layer_class),
            "yes" if traits.token_split else "no",
            "; ".join(filter(None, differences(traits))),
        ]
        for layer_class, traits in FAMILIES.items()
    ]
    assert rows("docs/models.md", "family") == expected
    assert f"{len(FAMILIES)} families" in DOCS["README.md"]
    # One table for each way a page can differ from the code: a trait without words here would go unsaid.
    assert not any(traits.batch_size_dependent for traits in FAMILIES.values())


def test_the_refused_layers_are_the_codes() -> None:
    assert rows("docs/models.md", "decoder layer") == [[name, why] for name, why in REFUSED.items()]


def test_every_argument_of_wrap_compile_plan_and_op() -> None:
    documented = set(re.findall(r"\w+", " ".join(first_column("docs/wrapping.md", "argument"))))
    assert documented == parameters(tbo.wrap) - {"model"}
    documented = set(re.findall(r"\w+", " ".join(first_column("docs/core.md", "argument of `tbo.op`"))))
    assert documented == parameters(tbo.op)
    documented = set(re.findall(r"\w+", " ".join(first_column("docs/core.md", "argument of `tbo.compile_plan`"))))
    assert documented == parameters(tbo.compile_plan) - {"layers_ops"}


def parameters(function: Any) -> set[str]:
    code = function.__code__
    return set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def test_every_command_and_option() -> None:
    parser = cli.build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    assert {f"tbo {name}" for name in commands.choices} == set(first_column("docs/demo.md", "command"))
    for name, command in commands.choices.items():
        for action in command._actions:
            option = action.option_strings[-1]
            assert option == "--help" or option in DOCS["docs/demo.md"], f"tbo {name} {option}"
    assert f"processes: {' or '.join(map(str, RANKS))}" in DOCS["docs/demo.md"]


def test_every_extra_and_every_make_target() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name for cell in first_column("README.md", "extra") for name in cell.split(", ")}
    assert extras == set(project["optional-dependencies"])
    assert f"## [{tbo.__version__}]" in DOCS["CHANGELOG.md"]
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for target in [*re.findall(r"`make ([a-z][a-z-]*)", ALL_TEXT), "demo", "test"]:
        assert target in targets, f"make {target}"
