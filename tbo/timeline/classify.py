"""What a kernel of a loaded trace is, by its name and, where a rule asks for it, by its lane.

Rules are tried in order; the first that fits decides. A user's rules stand before the built-in ones. They are read
from the nearest ``pyproject.toml`` or from a file of one's own:

    [[tool.tbo.timeline.rules]]          # in a file of one's own: [[rules]]
    pattern = "my_all_to_all"            # a regular expression, found anywhere in the name
    kind = "transfer"                    # compute, transfer, notify, in_flight or memory
    lane = "stream 27"                   # optional: a regular expression for the lane
    name = "our exchange"                # optional: how reports call the rule
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tbo.errors import UserError
from tbo.timeline.rules_table import TABLE
from tbo.timeline.span import Kind

NO_RULE: Final = "no rule: computation"
MEMORY_RULE: Final = "copy or fill on a device"
EXAMPLE: Final = 'Write [[rules]] with pattern = "my_kernel" and kind = "transfer".'

_FIELDS: Final = frozenset({"pattern", "kind", "lane", "name"})
_KINDS: Final = tuple(kind for kind in Kind if kind is not Kind.HOST)


class ClassifyError(UserError):
    """A classification rule, or a file of them, that cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line of the table.

    Attributes:
        name: as reports call it.
        kind: what a kernel it takes is.
        pattern: must be found in the kernel's name.
        lane: must be found in the lane's name; None: any lane.
    """

    name: str
    kind: Kind
    pattern: re.Pattern[str]
    lane: re.Pattern[str] | None = None

    def takes(self, name: str, lane: str) -> bool:
        """Whether a kernel is this rule's."""
        return self.pattern.search(name) is not None and (self.lane is None or self.lane.search(lane) is not None)


BUILT_IN: Final = tuple(Rule(name=name, kind=kind, pattern=re.compile(pattern)) for name, kind, pattern in TABLE)


@dataclass(slots=True, kw_only=True)
class Classifier:
    """Ordered rules, and a memory of what each of them took.

    Attributes:
        rules: in order; those of the user first.
        counts: events by the name of the rule that took them.
    """

    rules: Sequence[Rule] = BUILT_IN
    counts: Counter[str] = field(default_factory=Counter)
    _known: dict[tuple[str, str, bool], tuple[Kind, str]] = field(default_factory=dict)

    def classify(self, name: str, lane: str, *, is_memory: bool = False) -> Kind:
        """The kind of one event, which is counted.

        Args:
            name: the kernel's.
            lane: where it ran.
            is_memory: the trace calls it a copy or fill; what no rule takes is then memory instead of computation.
        """
        key = (name, lane, is_memory)
        if key not in self._known:
            self._known[key] = self._decide(name, lane, is_memory=is_memory)
        kind, rule = self._known[key]
        self.counts[rule] += 1
        return kind

    def is_unclassified(self, name: str, lane: str, *, is_memory: bool = False) -> bool:
        """Whether no rule takes it."""
        return self._known.get((name, lane, is_memory), (Kind.COMPUTE, NO_RULE))[1] == NO_RULE

    def fresh(self) -> Classifier:
        """The same rules with nothing counted: one for each trace."""
        return Classifier(rules=self.rules)

    def _decide(self, name: str, lane: str, *, is_memory: bool) -> tuple[Kind, str]:
        for rule in self.rules:
            if rule.takes(name, lane):
                return rule.kind, rule.name
        return (Kind.MEMORY, MEMORY_RULE) if is_memory else (Kind.COMPUTE, NO_RULE)


def make_classifier(user_rules: Iterable[Rule] = ()) -> Classifier:
    """The built-in table behind a user's rules."""
    return Classifier(rules=(*user_rules, *BUILT_IN))


def find_rules(start: Path) -> tuple[Rule, ...]:
    """The rules of the nearest ``pyproject.toml`` at or above a folder; none if it has none.

    Raises:
        ClassifyError: a rule there cannot be used.
    """
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            table = _read_toml(file).get("tool", {}).get("tbo", {}).get("timeline", {})
            return _rules_of(table, file) if "rules" in table else ()
    return ()


def read_rules(file: Path) -> tuple[Rule, ...]:
    """The rules of a TOML or JSON file; in a ``pyproject.toml``, those of ``[tool.tbo.timeline]``.

    Raises:
        ClassifyError: the file is missing or broken, or a rule in it cannot be used.
    """
    document = _read_json(file) if file.suffix == ".json" else _read_toml(file)
    if file.name == "pyproject.toml":
        document = document.get("tool", {}).get("tbo", {}).get("timeline", {})
    if "rules" not in document:
        raise ClassifyError(f"{file} holds no rules", remedy=EXAMPLE)
    return _rules_of(document, file)


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise ClassifyError(f"{file} is not TOML: {error}", remedy=EXAMPLE) from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(_read_text(file))
    except json.JSONDecodeError as error:
        raise ClassifyError(f"{file} is not JSON: {error}", remedy='Write {"rules": [...]}.') from error
    if not isinstance(document, dict):
        raise ClassifyError(f"{file} holds no object", remedy='Write {"rules": [...]}.')
    return document


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ClassifyError(
            f"the rules in {file} cannot be read: {reason}", remedy="Name a TOML or JSON file that holds rules."
        ) from error


def _rules_of(document: Mapping[str, Any], file: Path) -> tuple[Rule, ...]:
    entries = document["rules"]
    if not isinstance(entries, list):
        raise ClassifyError(f"`rules` in {file} is no list", remedy=EXAMPLE)
    return tuple(_make_rule(entry, f"rule {number} of {file}") for number, entry in enumerate(entries, 1))


def _make_rule(entry: object, where: str) -> Rule:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise ClassifyError(f"{where} is no table of texts", remedy=EXAMPLE)
    if unknown := entry.keys() - _FIELDS:
        raise ClassifyError(
            f"{where} has the unknown field {', '.join(sorted(unknown))}",
            remedy=f"Fields are {', '.join(sorted(_FIELDS))}.",
        )
    if missing := {"pattern", "kind"} - entry.keys():
        raise ClassifyError(f"{where} has no {' and no '.join(sorted(missing))}", remedy=EXAMPLE)
    if entry["kind"] not in _KINDS:
        raise ClassifyError(f"{where} has the unknown kind {entry['kind']!r}", remedy=f"Kinds are {', '.join(_KINDS)}.")
    return Rule(
        name=entry.get("name", f"yours: {entry['pattern']}"),
        kind=Kind(entry["kind"]),
        pattern=_compile(entry["pattern"], where),
        lane=_compile(entry["lane"], where) if "lane" in entry else None,
    )


def _compile(pattern: str, where: str) -> re.Pattern[str]:
    if not pattern:
        raise ClassifyError(f"{where} has an empty pattern, which every name fits", remedy="Write what to look for.")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ClassifyError(
            f"{where}: {pattern!r} is no regular expression: {error}",
            remedy="Escape characters such as ( and * with a backslash.",
        ) from error
