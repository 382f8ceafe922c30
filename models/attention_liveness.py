"""The generic cut: an unmodified attention forward as two plain functions.

The forward's source is cut after the statement that writes the cache (or, where none does, before the call of the
attention function). The first function returns the names the second still needs. Both run in the module's own
globals under its own file name and line numbers, so tracebacks and debuggers show transformers' source.

Softmax attention of every kind has such a statement; linear attention has not, and is not cut.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

from torch import Tensor, nn

from tbo.models.attention_cut import AttentionResult, result_of

_CACHE_PARAMETERS: Final = ("past_key_values", "cache")
_ATTENTION_CALL: Final = "attention_interface"


@dataclass(frozen=True, kw_only=True, slots=True)
class Halves:
    """A forward cut in two.

    Attributes:
        prepare: takes what the forward takes, returns the values of `live`.
        core: takes the module and the values of `live`, returns what the forward returns.
        live: names the second half needs from the first.
        kind: where the cut is.
    """

    prepare: Callable[..., tuple[Any, ...]]
    core: Callable[..., Any]
    live: tuple[str, ...]
    kind: str


class LivenessCut:
    """An attention module run through the two halves of its class's forward."""

    def __init__(self, module: nn.Module, halves: Halves) -> None:
        self.module = module
        self.halves = halves

    @property
    def kind(self) -> str:
        """Where the forward is cut."""
        return self.halves.kind

    def prepare(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The forward up to the cut."""
        return self.halves.prepare(self.module, hidden_states=hidden, **kwargs)

    def core(self, carried: tuple[Any, ...]) -> AttentionResult:
        """The forward after the cut."""
        return result_of(self.halves.core(self.module, *carried))


@functools.cache
def halves_of(forward: FunctionType) -> Halves | None:
    """Cuts a forward in two; None when that cannot be done safely.

    Not safe: source that cannot be read, closures, no statement to cut at, a return before it, or a name the
    second half needs that the first assigns only on some paths. Cached, so that the layers of a model share two
    functions, which `torch.compile` then traces once.
    """
    if forward.__closure__:
        return None
    try:
        lines, first_line = inspect.getsourcelines(forward)
    except (OSError, TypeError):
        return None
    function = ast.parse(textwrap.dedent("".join(lines))).body[0]
    if not isinstance(function, ast.FunctionDef):
        return None
    ast.increment_lineno(function, first_line - 1)
    place = _place_to_cut(function)
    if place is None:
        return None
    index, kind = place
    first, second = function.body[:index], function.body[index:]
    parameters = _parameters(function)
    live = tuple(sorted((_loaded(second) & (parameters | _stored(first))) - {"self"}))
    if any(isinstance(node, ast.Return) for node in _nodes(first)) or not set(live) <= parameters | _always(first):
        return None
    file = inspect.getsourcefile(forward) or f"<{forward.__qualname__}>"
    prepare, core = _compile(function, first, second, live, file, forward.__globals__)
    return Halves(prepare=prepare, core=core, live=live, kind=kind)


def _place_to_cut(function: ast.FunctionDef) -> tuple[int, str] | None:
    """The index of the second half's first statement, and where that is in words."""
    caches = _parameters(function) & set(_CACHE_PARAMETERS)
    attends = [i for i, statement in enumerate(function.body) if _calls_attention(statement)]
    if len(attends) != 1 or not isinstance(function.body[attends[0]], ast.Assign):
        return None
    writes = [i for i, statement in enumerate(function.body[: attends[0]]) if _writes_cache(statement, caches)]
    return (writes[-1] + 1, "at the cache write") if writes else (attends[0], "at the attention call")


def _calls_attention(statement: ast.stmt) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == _ATTENTION_CALL
        for node in ast.walk(statement)
    )


def _writes_cache(statement: ast.stmt, caches: Iterable[str]) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "update"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in caches
        for node in ast.walk(statement)
    )


def _compile(
    function: ast.FunctionDef,
    first: Sequence[ast.stmt],
    second: Sequence[ast.stmt],
    live: Sequence[str],
    file: str,
    module_globals: dict[str, Any],
) -> tuple[Callable[..., tuple[Any, ...]], Callable[..., Any]]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for argument in [*named, *filter(None, (arguments.vararg, arguments.kwarg))]:
        argument.annotation = None  # evaluating them needs names that may exist for type checkers only
    handed = ast.Return(value=ast.Tuple(elts=[ast.Name(id=name, ctx=ast.Load()) for name in live], ctx=ast.Load()))
    received = ast.arguments(
        posonlyargs=[], args=[ast.arg(arg=name) for name in ("self", *live)], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    halves: list[ast.stmt] = [
        _function("prepare", arguments, [*first, handed], function),
        _function("core", received, list(second), function),
    ]
    tree = ast.fix_missing_locations(ast.Module(body=halves, type_ignores=[]))
    made: dict[str, Any] = {}
    # The source is transformers' own, cut and otherwise unchanged; no outside text reaches this call.
    exec(compile(tree, file, "exec"), module_globals, made)  # noqa: S102
    return made["prepare"], made["core"]


def _function(name: str, arguments: ast.arguments, body: list[ast.stmt], like: ast.FunctionDef) -> ast.FunctionDef:
    made = copy.copy(like)  # not built anew: the fields a definition must have differ between Python releases
    made.name, made.args, made.body, made.decorator_list, made.returns = name, arguments, body, [], None
    return made


def _parameters(function: ast.FunctionDef) -> set[str]:
    arguments = function.args
    names = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return names | {argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument is not None}


def _nodes(statements: Iterable[ast.stmt]) -> Iterable[ast.AST]:
    return (node for statement in statements for node in ast.walk(statement))


def _loaded(statements: Iterable[ast.stmt]) -> set[str]:
    return {node.id for node in _nodes(statements) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _stored(statements: Iterable[ast.stmt]) -> set[str]:
    return {node.id for node in _nodes(statements) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _always(statements: Iterable[ast.stmt]) -> set[str]:
    """Names these statements assign on every path."""
    assigned: set[str] = set()
    for statement in statements:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            assigned |= _stored([statement])
        elif isinstance(statement, ast.If):
            assigned |= _always(statement.body) & _always(statement.orelse)
    return assigned
