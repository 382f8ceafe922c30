"""Rules of a user: found, read, tried first, and refused where they make no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from tbo.timeline.classify import ClassifyError, find_rules, make_classifier, read_rules
from tbo.timeline.kineto import load
from tbo.timeline.metrics import measure
from tbo.timeline.span import Kind
from trace_cases import DISPATCH, GEMM, kernel, run_command, write_trace

pytestmark = pytest.mark.timeout(60)

RULES = """\
[[rules]]
pattern = "secret::exchange"
kind = "transfer"
name = "ours"

[[rules]]
pattern = "device_kernel"
kind = "notify"
lane = "^stream 27$"
"""


def test_rules_of_a_user_come_first_and_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(RULES)
    events = [kernel(GEMM, 0, 10), kernel(GEMM, 0, 5, 27), kernel("secret::exchange(int)", 5, 5, 27)]
    path = write_trace(tmp_path / "t.json", events)
    timeline = load(path, make_classifier(read_rules(file)))
    assert [span.kind for span in timeline.spans] == [Kind.NOTIFY, Kind.COMPUTE, Kind.TRANSFER]
    assert timeline.rule_counts == {"yours: device_kernel": 1, "no rule: computation": 1, "ours": 1}
    assert measure(timeline).overlap_ratio == 1.0
    assert run_command("check", path, "--classify", file, "--min-overlap", "1") == 0


def test_json_and_pyproject_hold_rules_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rules.json"
    file.write_text('{"rules": [{"pattern": "gemm", "kind": "compute"}]}')
    assert read_rules(file)[0].kind is Kind.COMPUTE
    folder = tmp_path / "project" / "deep"
    folder.mkdir(parents=True)
    project = tmp_path / "project" / "pyproject.toml"
    project.write_text('[tool.tbo.timeline]\nrules = [{pattern = "device_kernel", kind = "transfer"}]\n')
    assert [rule.name for rule in find_rules(folder)] == ["yours: device_kernel"]
    assert read_rules(project) == find_rules(folder)
    monkeypatch.chdir(folder)
    path = write_trace(tmp_path / "t.json", [kernel(GEMM, 0, 1)])
    assert run_command("check", path, "--min-overlap", "0", "--max-exposed-us", "1") == 0


def test_a_project_without_rules_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert find_rules(tmp_path) == ()
    classifier = make_classifier(())
    assert classifier.classify(DISPATCH, "stream 7") is Kind.TRANSFER
    assert classifier.classify("Memset (Device)", "stream 7", is_memory=True) is Kind.MEMORY
    assert classifier.classify("Memcpy PtoP (Device -> Device)", "stream 7", is_memory=True) is Kind.TRANSFER


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[rules]]\npattern = "a("\nkind = "transfer"', r"rule 1 of .*rules.toml: 'a\(' is no regular expression"),
        ('[[rules]]\npattern = ""\nkind = "transfer"', "rule 1 of .* has an empty pattern"),
        ('[[rules]]\npattern = "a"\nkind = "host"', "rule 1 of .* has the unknown kind 'host'. Kinds are compute"),
        ('[[rules]]\npattern = "a"', "rule 1 of .* has no kind"),
        (
            '[[rules]]\npattern = "a"\nkind = "notify"\nstream = "7"',
            "has the unknown field stream. Fields are kind, lane",
        ),
        ('[[rules]]\npattern = 7\nkind = "notify"', "rule 1 of .* is no table of texts"),
        ("rules = 7", "`rules` in .* is no list"),
        ("[tool]", "holds no rules"),
        ("rules = [", "is not TOML"),
    ],
)
def test_rules_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(text)
    with pytest.raises(ClassifyError, match=message):
        read_rules(file)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[]", "holds no object"), (None, "cannot be read")]
)
def test_files_that_hold_no_rules(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "rules.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ClassifyError, match=message):
        read_rules(file)
