"""Ops: plain functions whose signature is their declaration.

A parameter's name is the state key it reads (a default makes the read optional); `writes` names the keys it returns.
Nothing else passes between ops, so a plan can be checked before anything runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

from tbo.errors import InternalError, OpDeclarationError

T = TypeVar("T")


class _Marker:
    """A named singleton: it prints as its name and compares by identity."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


YIELD: Final = _Marker("YIELD")
"""Stands between two ops of a layer: here the scheduler switches to another sub-batch."""

REQUIRED: Final = _Marker("REQUIRED")
"""The default of a read that has none."""


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a running plan.

    Attributes:
        sub_batch: index of the sub-batch, from 0.
        stage: index of the stage, counted through all layers.
        layer: index of the layer among the plan's layers.
        op: the op's name.
    """

    sub_batch: int
    stage: int
    layer: int
    op: str

    def __str__(self) -> str:
        return f"sub-batch {self.sub_batch}, layer {self.layer}, stage {self.stage}, {self.op}"


@dataclass(frozen=True, slots=True)
class Read:
    """One state key an op reads; `default` is REQUIRED when the op cannot do without it."""

    key: str
    default: Any
    keyword_only: bool


@dataclass(frozen=True, slots=True)
class Op:
    """A function with its declaration. Made by `op`; calling it calls the function.

    Attributes:
        fn: the function, bound once the op is taken from an instance.
        name: what plans, errors and timelines call it.
        reads: the state keys its parameters name, in order.
        writes: the state keys it returns.
        single: the returned value itself is the one written key (`writes="x"`), not a tuple of one.
        starts: the channel on which this op begins a communication; its first written key is the handle.
        waits: the key of the handle whose communication this op ends.
        mutates: read keys whose value it changes in place.
        passes: written key -> the read key whose storage it may share.
    """

    fn: Callable[..., Any]
    name: str
    reads: tuple[Read, ...]
    writes: tuple[str, ...]
    single: bool
    starts: str | None
    waits: str | None
    mutates: tuple[str, ...]
    passes: Mapping[str, str]
    needs_instance: bool

    def __get__(self, instance: object, owner: type | None = None) -> Op:
        if instance is None or not self.needs_instance:
            return self
        return replace(self, fn=self.fn.__get__(instance, owner), needs_instance=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function itself, so that an op can be tested like any function."""
        return self.fn(*args, **kwargs)


def op(
    *,
    writes: str | tuple[str, ...] = (),
    starts: str | None = None,
    waits: str | None = None,
    mutates: str | tuple[str, ...] = (),
    passes: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Any]], Op]:
    """Declares a function as an op.

    Args:
        writes: the state key the function returns, or a tuple of keys it returns a tuple for.
        starts: name of the channel on which the function begins a communication. The first key of `writes` is then
            the handle of what is in flight.
        waits: the key of the handle whose communication the function ends; the function must read it.
        mutates: read keys changed in place. A plan accepts this only from a key's last reader.
        passes: for each written key that may share storage with a read key: written key -> read key.

    Raises:
        OpDeclarationError: the declaration contradicts the signature.

    Example:
        >>> @op(writes="total")
        ... def op_add(left, right=0):
        ...     return left + right
        >>> [read.key for read in op_add.reads], op_add.writes
        (['left', 'right'], ('total',))
    """

    def declare(fn: Callable[..., Any]) -> Op:
        name = _name_of(fn)
        reads, needs_instance = _reads_of(fn, name)
        single = isinstance(writes, str)
        declared = Op(
            fn=fn,
            name=name,
            reads=reads,
            writes=_keys(writes),
            single=single,
            starts=starts,
            waits=waits,
            mutates=_keys(mutates),
            passes=dict(passes or {}),
            needs_instance=needs_instance,
        )
        _check_declaration(declared)
        return declared

    return declare


def _keys(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _name_of(fn: Callable[..., Any]) -> str:
    if isinstance(fn, functools.partial):
        raise OpDeclarationError(
            f"an op cannot be a functools.partial ({fn.func!r}): it keeps its arguments alive for as long as the plan",
            remedy="Declare a function whose parameters name the state keys.",
        )
    name = getattr(fn, "__name__", None)
    if not isinstance(name, str):
        raise OpDeclarationError(
            f"{fn!r} is not a function", remedy="Put @tbo.op(...) on a function or a method, below other decorators."
        )
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise OpDeclarationError(
            f"{name} is a coroutine or generator; the scheduler calls ops as plain functions",
            remedy="Cut it into ops with tbo.YIELD between them.",
        )
    return name


def _reads_of(fn: Callable[..., Any], name: str) -> tuple[tuple[Read, ...], bool]:
    parameters = list(inspect.signature(fn).parameters.values())
    needs_instance = bool(parameters) and parameters[0].name == "self"
    reads = []
    for parameter in parameters[needs_instance:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            shown = str(parameter.replace(annotation=parameter.empty))
            raise OpDeclarationError(
                f"{name}: parameter {shown!r} does not name one state key",
                remedy="Name every key the op reads as an ordinary parameter (no *args, **kwargs or positional-only).",
            )
        default = REQUIRED if parameter.default is parameter.empty else parameter.default
        reads.append(Read(parameter.name, default, parameter.kind is parameter.KEYWORD_ONLY))
    return tuple(reads), needs_instance


def _check_declaration(declared: Op) -> None:
    read_keys = {read.key for read in declared.reads}
    name = declared.name
    if len(set(declared.writes)) != len(declared.writes):
        raise OpDeclarationError(f"{name} writes a key twice: {declared.writes}", remedy="Name each written key once.")
    if declared.starts is not None and not declared.writes:
        raise OpDeclarationError(
            f"{name} starts a communication on {declared.starts!r} but writes no handle",
            remedy="Return what is in flight and name it first in writes=.",
        )
    if declared.waits is not None and declared.waits not in read_keys:
        raise OpDeclarationError(
            f"{name} waits for {declared.waits!r} but does not read it", remedy=f"Add a parameter {declared.waits!r}."
        )
    if unread := [key for key in declared.mutates if key not in read_keys]:
        raise OpDeclarationError(
            f"{name} mutates {unread[0]!r} but does not read it", remedy=f"Add a parameter {unread[0]!r}."
        )
    for written, source in declared.passes.items():
        if written not in declared.writes or source not in read_keys:
            raise OpDeclarationError(
                f"{name}: passes={{{written!r}: {source!r}}} does not lead from a read key to a written key",
                remedy="Write it as {written key: read key}.",
            )


class Pending(Generic[T]):
    """One communication in flight: what a start op returns and its wait op finishes.

    It holds what the transfer borrowed (`holds`) until `wait`, so that no buffer is reused under it.

    Args:
        finish: completes the transfer and returns its result; called once.
        holds: whatever must stay alive until then.
    """

    __slots__ = ("_finish", "_holds")

    def __init__(self, finish: Callable[[], T], holds: tuple[object, ...] = ()) -> None:
        self._finish: Callable[[], T] | None = finish
        self._holds = holds

    def wait(self) -> T:
        """Returns the result once the transfer is complete. A second call is refused."""
        if self._finish is None:
            raise InternalError("a communication was waited for twice")
        finish, self._finish = self._finish, None
        try:
            return finish()
        finally:
            self._holds = ()
