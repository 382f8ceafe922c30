"""Op declarations: what is accepted, and the exact words of every refusal."""

from __future__ import annotations

import functools
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tbo.core import YIELD, Op, Pending, Where, op
from tbo.core.op import REQUIRED
from tbo.errors import InternalError, OpDeclarationError, UserError

pytestmark = pytest.mark.timeout(60)


class Value:
    """Something a weak reference can watch."""


# ---------------------------------------------------------------- what is accepted


def test_the_signature_declares_the_reads() -> None:
    @op(writes=("left_out", "right_out"))
    def op_both(left: int, right: int = 7, *, scale: int = 2) -> tuple[int, int]:
        return left * scale, right * scale

    assert [(read.key, read.default, read.keyword_only) for read in op_both.reads] == [
        ("left", REQUIRED, False),
        ("right", 7, False),
        ("scale", 2, True),
    ]
    assert op_both.name == "op_both"
    assert op_both.writes == ("left_out", "right_out")
    assert not op_both.single


def test_none_is_a_default_like_any_other() -> None:
    @op(writes="out")
    def op_maybe(value: Any = None) -> Any:
        return value

    assert op_maybe.reads[0].default is None


def test_one_written_key_is_the_value_itself_and_a_tuple_of_one_is_not() -> None:
    assert op(writes="out")(lambda: 1).single
    assert not op(writes=("out",))(lambda: (1,)).single
    assert op()(lambda: None).writes == ()


def test_an_op_can_be_called_like_its_function() -> None:
    @op(writes="total")
    def op_add(left: int, right: int = 1) -> int:
        return left + right

    assert op_add(2) == 3
    assert op_add(2, right=5) == 7


class Layer:
    """A holder of ops, as models have them."""

    def __init__(self, scale: int) -> None:
        self.scale = scale

    @op(writes="out")
    def op_scale(self, value: int) -> int:
        return self.scale * value

    op_shared = op(writes="out")(lambda value: value + 100)

    @staticmethod
    @op(writes="out")
    def op_static(value: int) -> int:
        return -value


def test_a_method_is_bound_to_its_instance_and_reads_no_self() -> None:
    bound: Op = Layer(3).op_scale
    assert [read.key for read in bound.reads] == ["value"]
    assert not bound.needs_instance
    assert bound(5) == 15
    assert Layer(4).op_scale(5) == 20


def test_a_method_taken_from_the_class_still_needs_an_instance() -> None:
    assert Layer.op_scale.needs_instance


def test_a_plain_op_that_is_a_class_attribute_is_not_bound() -> None:
    assert Layer(3).op_shared(1) == 101
    assert Layer(3).op_static(1) == -1


def test_yield_and_places_print_for_people() -> None:
    assert repr(YIELD) == "YIELD"
    assert str(Where(1, 7, 3, "op_dispatch_b")) == "sub-batch 1, layer 3, stage 7, op_dispatch_b"


# ---------------------------------------------------------------- what is refused


def declared(fn: Callable[..., Any], **declaration: Any) -> Callable[[], Op]:
    return lambda: op(**declaration)(fn)


class Callee:
    """Callable, but no function."""

    def __call__(self, value: Any) -> Any:
        return value

    def __repr__(self) -> str:
        return "<callee>"


def fn_any(*args: Any) -> None: ...
def fn_more(**kwargs: Any) -> None: ...
def fn_position(value: Any, /) -> None: ...
def fn_one(value: Any) -> Any: ...
async def fn_coroutine(value: Any) -> Any: ...


def fn_generator(value: Any) -> Iterator[Any]:
    yield value


async def fn_stream(value: Any) -> AsyncIterator[Any]:
    yield value


NAME_KEYS = "Name every key the op reads as an ordinary parameter (no *args, **kwargs or positional-only)."
NAME_HANDLE = "Return what is in flight and name it first in writes=."
TURN = "Write it as {written key: read key}."
CUT = "is a coroutine or generator; the scheduler calls ops as plain functions. Cut it into ops with tbo.YIELD between"

BAD_DECLARATIONS = {
    "star args": (declared(fn_any), f"fn_any: parameter '*args' does not name one state key. {NAME_KEYS}"),
    "star kwargs": (declared(fn_more), f"fn_more: parameter '**kwargs' does not name one state key. {NAME_KEYS}"),
    "positional only": (
        declared(fn_position),
        f"fn_position: parameter 'value' does not name one state key. {NAME_KEYS}",
    ),
    "not a function": (
        declared(Callee()),
        "<callee> is not a function. Put @tbo.op(...) on a function or a method, below other decorators.",
    ),
    "coroutine": (declared(fn_coroutine), f"fn_coroutine {CUT} them."),
    "generator": (declared(fn_generator), f"fn_generator {CUT} them."),
    "async generator": (declared(fn_stream), f"fn_stream {CUT} them."),
    "written twice": (
        declared(fn_one, writes=("out", "out")),
        "fn_one writes a key twice: ('out', 'out'). Name each written key once.",
    ),
    "start without handle": (
        declared(fn_one, starts="ep"),
        "fn_one starts a communication on 'ep' but writes no handle. " + NAME_HANDLE,
    ),
    "wait without read": (
        declared(fn_one, writes="out", waits="handle"),
        "fn_one waits for 'handle' but does not read it. Add a parameter 'handle'.",
    ),
    "mutation without read": (
        declared(fn_one, writes="out", mutates=("value", "other")),
        "fn_one mutates 'other' but does not read it. Add a parameter 'other'.",
    ),
    "passes backwards": (
        declared(fn_one, writes="out", passes={"value": "out"}),
        "fn_one: passes={'value': 'out'} does not lead from a read key to a written key. " + TURN,
    ),
    "passes an unknown key": (
        declared(fn_one, writes="out", passes={"out": "other"}),
        "fn_one: passes={'out': 'other'} does not lead from a read key to a written key. " + TURN,
    ),
}


@pytest.mark.parametrize("case", BAD_DECLARATIONS)
def test_a_bad_declaration_is_refused_in_these_words(case: str) -> None:
    make, message = BAD_DECLARATIONS[case]
    with pytest.raises(OpDeclarationError) as caught:
        make()
    assert str(caught.value) == message
    assert isinstance(caught.value, UserError)


def test_a_partial_is_refused_because_it_would_keep_its_arguments() -> None:
    with pytest.raises(OpDeclarationError) as caught:
        op(writes="out")(functools.partial(fn_one, value=1))
    assert str(caught.value) == (
        f"an op cannot be a functools.partial ({fn_one!r}): it keeps its arguments alive for as long as the plan."
        " Declare a function whose parameters name the state keys."
    )


# ---------------------------------------------------------------- pending communications


def test_pending_returns_what_finishing_returns() -> None:
    assert Pending(lambda: "rows").wait() == "rows"


def test_pending_holds_its_buffers_until_the_wait_and_no_longer() -> None:
    buffer = Value()
    alive = weakref.ref(buffer)
    during: list[bool] = []
    pending = Pending(lambda: during.append(alive() is not None), holds=(buffer,))
    del buffer
    assert alive() is not None
    pending.wait()
    assert during == [True]
    assert alive() is None


def test_pending_lets_go_of_its_buffers_when_finishing_fails() -> None:
    def finish() -> None:
        raise ValueError("broken link")

    buffer = Value()
    alive = weakref.ref(buffer)
    pending = Pending(finish, holds=(buffer,))
    del buffer
    with pytest.raises(ValueError, match="broken link"):
        pending.wait()
    assert alive() is None


def test_a_second_wait_is_a_fault_of_ours() -> None:
    pending = Pending(lambda: 1)
    pending.wait()
    with pytest.raises(InternalError) as caught:
        pending.wait()
    assert str(caught.value) == (
        "a communication was waited for twice. This is a bug in tbo: please report it with this traceback."
    )
