"""Generated stage functions: one straight line of calls per stage.

Generated code, because a call that pops its arguments out of the state hands the last reader the only reference (an
interpreting loop would hold a second one in its argument list), and because it costs a tenth of such a loop.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from tbo.core.op import Op
    from tbo.core.plan import Step

State: TypeAlias = dict[str, Any]
StageFunction: TypeAlias = Callable[[State], None]
WatchedStageFunction: TypeAlias = Callable[[State, Callable[[int], None], Callable[[int], None]], None]

FILE_PREFIX = "<tbo stage"
FIRST_LINE = 2


def lines_of(ops_and_dead: Sequence[tuple[Op, Sequence[str]]]) -> list[int]:
    """The line of each op's call in the generated function: a call, then one line per dropped key."""
    lines = []
    line = FIRST_LINE
    for _, dead in ops_and_dead:
        lines.append(line)
        line += 1 + len(dead)
    return lines


def stage_function(stage: int, steps: Sequence[Step]) -> StageFunction:
    """The function that runs one stage on one sub-batch's state."""
    body = []
    for number, step in enumerate(steps):
        body.append(_call(number, step))
        body += [f"del s[{key!r}]" for key in step.dead]
    return _build(stage, "s", body, steps)


def watched_stage_function(stage: int, steps: Sequence[Step]) -> WatchedStageFunction:
    """As `stage_function`, calling ``before(n)`` and ``after(n)`` around the n-th op of the stage.

    Both stand on the op's own line, so that an error is located alike in both kinds of function.
    """
    body = []
    for number, step in enumerate(steps):
        body.append(f"before({number}); {_call(number, step)}; after({number})")
        body += [f"del s[{key!r}]" for key in step.dead]
    return _build(stage, "s, before, after", body, steps)


def _call(number: int, step: Step) -> str:
    """``s['out'] = f3(s.pop('x'), s['y'], key=s['key'])``: the last reader pops."""
    parts = []
    by_keyword = False
    for read in step.op.reads:
        if read.key not in step.arguments:
            by_keyword = True  # the op's own default stands here, so what follows needs its name
            continue
        value = f"s.pop({read.key!r})" if step.arguments[read.key] else f"s[{read.key!r}]"
        parts.append(f"{read.key}={value}" if by_keyword or read.keyword_only else value)
    call = f"f{number}({', '.join(parts)})"
    writes = step.op.writes
    if not writes:
        return call
    if step.op.single:
        return f"s[{writes[0]!r}] = {call}"
    targets = ", ".join(f"s[{key!r}]" for key in writes)
    return f"{targets}, = {call}" if len(writes) == 1 else f"{targets} = {call}"


def _build(stage: int, parameters: str, body: Sequence[str], steps: Sequence[Step]) -> Callable[..., None]:
    functions = tuple(step.op.fn for step in steps)
    names = ", ".join(f"f{number}" for number in range(len(functions)))
    source = f"def stage({parameters}, {names}):\n  " + "\n  ".join(body) + "\n"
    return types.FunctionType(_compiled(source), {}, f"stage_{stage}", functions)


@lru_cache(maxsize=4096)
def _compiled(source: str) -> types.CodeType:
    """Layers of one kind have the same text, so a 60-layer plan compiles a handful of functions."""
    module = compile(source, f"{FILE_PREFIX}>", "exec")
    return next(constant for constant in module.co_consts if isinstance(constant, types.CodeType))
