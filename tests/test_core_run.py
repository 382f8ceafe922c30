"""Running plans: whole traces, data flow, and when values are freed; each with and without instruments."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tbo.core import YIELD, Instrument, Plan, Trace, compile_plan, op, run
from tbo.errors import PlanError
from toy_ops import DEEPSEEK_DECODE, DENSE, PREFILL, REST, WATCHES, layer, mix, toy, trace_lines

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=WATCHES)
def instruments(request: pytest.FixtureRequest) -> tuple[Instrument, ...]:
    return tuple(kind() for kind in WATCHES[request.param])


class Value:
    """Something a weak reference can watch."""

    def __init__(self, name: str) -> None:
        self.name = name


def compiled(*layers: str, **options: Any) -> Plan:
    return compile_plan(
        [layer(text) for text in layers], inputs=["hidden_states"], outputs=["hidden_states"], **options
    )


def inputs_of(plan: Plan) -> list[dict[str, int]]:
    return [{"hidden_states": 100 + sub_batch} for sub_batch in range(plan.sub_batches)]


# ---------------------------------------------------------------- whole traces


def traced(plan: Plan) -> Trace:
    trace = Trace()
    run(plan, inputs_of(plan), [trace])
    return trace


def test_whole_trace_of_prefill() -> None:
    """Two layers, two sub-batches: while one's dispatch or combine is in flight, the other computes."""
    trace = traced(compiled(PREFILL, PREFILL))
    start = ["prepare_attn", "prepare", "core", "prepare_mlp", "gate", "select", "dispatch_a"]
    middle = ["dispatch_b", "experts", "combine_a"]
    end = ["shared", "combine_b", "output", "postprocess"]
    assert trace_lines(trace.ops) == [
        *(f"0:0 {op}" for op in start),
        *(f"1:0 {op}" for op in start),
        *(f"0:1 {op}" for op in middle),
        *(f"1:1 {op}" for op in middle),
        *(f"0:2 {op}" for op in end + start),
        *(f"1:2 {op}" for op in end + start),
        *(f"0:3 {op}" for op in middle),
        *(f"1:3 {op}" for op in middle),
        *(f"0:4 {op}" for op in end),
        *(f"1:4 {op}" for op in end),
    ]
    assert trace.stages == [(sub_batch, stage) for stage in range(5) for sub_batch in range(2)]
    # Stage 2 holds the end of layer 0 and the start of layer 1, in both sub-batches.
    assert [where.layer for where in trace.ops] == [0] * 20 + ([0] * 4 + [1] * 7) * 2 + [1] * 14


def test_whole_trace_of_decode_with_offset_two() -> None:
    assert trace_lines(traced(compiled(DEEPSEEK_DECODE, offset=2)).ops) == [
        *("0:0 prepare_attn", "0:0 prepare"),
        *("0:1 core", "0:1 prepare_mlp", "0:1 gate", "0:1 select"),
        *("0:2 dispatch_a", "0:2 shared"),
        *("1:0 prepare_attn", "1:0 prepare"),
        *("0:3 dispatch_b", "0:3 experts", "0:3 combine_a"),
        *("1:1 core", "1:1 prepare_mlp", "1:1 gate", "1:1 select"),
        "0:4 combine_b",
        *("1:2 dispatch_a", "1:2 shared"),
        *("0:5 output", "0:5 postprocess"),
        *("1:3 dispatch_b", "1:3 experts", "1:3 combine_a"),
        "1:4 combine_b",
        *("1:5 output", "1:5 postprocess"),
    ]


def test_whole_trace_of_three_sub_batches_with_offsets_of_their_own() -> None:
    """The third starts one stage late; a dense layer rides in the last stage."""
    plan = compiled("prepare_attn prepare | core prepare_mlp mlp postprocess", DENSE, sub_batches=3, offset=(0, 0, 1))
    dense = ["prepare_attn", "prepare", "core", "prepare_mlp", "mlp", "postprocess"]
    last = ["core", "prepare_mlp", "mlp", "postprocess", *dense]
    assert trace_lines(traced(plan).ops) == [
        *("0:0 prepare_attn", "0:0 prepare"),
        *("1:0 prepare_attn", "1:0 prepare"),
        *(f"0:1 {op}" for op in last),
        *(f"1:1 {op}" for op in last),
        *("2:0 prepare_attn", "2:0 prepare"),
        *(f"2:1 {op}" for op in last),
    ]


def test_whole_trace_in_sequence() -> None:
    plan = compiled("prepare_attn prepare | core prepare_mlp mlp postprocess", order="sequential")
    one = ["0 prepare_attn", "0 prepare", "1 core", "1 prepare_mlp", "1 mlp", "1 postprocess"]
    assert trace_lines(traced(plan).ops) == [f"{sub_batch}:{line}" for sub_batch in range(2) for line in one]


def test_a_plan_runs_the_same_way_every_time() -> None:
    plan = compiled(PREFILL, DENSE, PREFILL, sub_batches=3)
    first = traced(plan)
    for _ in range(3):
        again = traced(plan)
        assert (again.ops, again.stages) == (first.ops, first.stages)


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("text", [PREFILL, DEEPSEEK_DECODE])
@pytest.mark.parametrize(("sub_batches", "offset"), [(1, 0), (2, 0), (2, 2), (3, 1), (3, (0, 3, 1)), (4, 0)])
def test_interleaved_equals_sequential(
    text: str, sub_batches: int, offset: int | tuple[int, ...], instruments: tuple[Instrument, ...]
) -> None:
    options: dict[str, Any] = {"sub_batches": sub_batches, "offset": offset}
    plan = compiled(text, DENSE, text, **options)
    oracle = compiled(text, DENSE, text, order="sequential", **options)
    results = run(plan, inputs_of(plan), instruments)
    assert results == run(oracle, inputs_of(oracle))
    assert len({result["hidden_states"] for result in results}) == sub_batches


def test_reads_get_their_own_values_in_any_order_of_parameters(instruments: tuple[Instrument, ...]) -> None:
    make = toy("make", ["x"], ("first", "second"), body=lambda x: (x + 1, x + 2))
    join = toy("join", ["second", "x", "first"], ("joined",), body=lambda *values: (values,))
    plan = compile_plan([[make, YIELD, join]], inputs=["x"], outputs=["joined", "x"])
    assert run(plan, [{"x": 10}, {"x": 20}], instruments) == [
        {"joined": (12, 10, 11), "x": 10},
        {"joined": (22, 20, 21), "x": 20},
    ]


def test_optional_reads_take_their_default_where_nothing_was_written(instruments: tuple[Instrument, ...]) -> None:
    """The positions after a missing one are passed by name, so nothing slips into its place."""

    @op(writes="y")
    def op_join(a: str = "no a", b: str = "no b", c: str = "no c", *, d: str = "no d") -> tuple[str, ...]:
        return (a, b, c, d)

    plans = {
        (): ("no a", "no b", "no c", "no d"),
        ("a", "b", "c", "d"): ("A", "B", "C", "D"),
        ("a",): ("A", "no b", "no c", "no d"),
        ("c",): ("no a", "no b", "C", "no d"),
        ("a", "c"): ("A", "no b", "C", "no d"),
        ("b", "d"): ("no a", "B", "no c", "D"),
    }
    for given, expected in plans.items():
        plan = compile_plan([[op_join]], inputs=given, outputs=["y"], sub_batches=1)
        assert run(plan, [{key: key.upper() for key in given}], instruments) == [{"y": expected}]


def test_a_carried_key_reaches_later_layers_and_a_local_one_does_not(instruments: tuple[Instrument, ...]) -> None:
    """Layer 0 writes both keys; layer 1 sees the carried one and the default of the other."""
    write = toy("write", ["x"], ("topk", "local"), body=lambda x: (x, x))
    use = toy("use", ["topk?", "local?"], "seen", body=lambda topk=REST, local=REST: (topk, local))
    for carries, expected in ((["topk"], (5, REST)), (["topk", "local"], (5, 5)), ([], (REST, REST))):
        plan = compile_plan([[write], [use]], inputs=["x"], outputs=["seen"], carries=carries, sub_batches=1)
        assert run(plan, [{"x": 5}], instruments) == [{"seen": expected}]


def test_a_key_written_again_is_the_new_value_from_then_on(instruments: tuple[Instrument, ...]) -> None:
    count = toy("count", ["n"], "n", body=lambda n: n + 1)
    plan = compile_plan([[count, count], [count, YIELD, count]], inputs=["n"], outputs=["n"], carries=["n"])
    assert run(plan, [{"n": 0}, {"n": 10}], instruments) == [{"n": 4}, {"n": 14}]


def test_an_output_of_an_early_layer_lasts_to_the_end(instruments: tuple[Instrument, ...]) -> None:
    early = toy("early", ["x"], "aux")
    plan = compile_plan([[early, YIELD], [toy("late", ["x"], "y")]], inputs=["x"], outputs=["aux", "y"])
    expected = [{"aux": mix("early", 0, x), "y": mix("late", 0, x)} for x in (1, 2)]
    assert run(plan, [{"x": 1}, {"x": 2}], instruments) == expected


def test_sub_batches_have_states_of_their_own(instruments: tuple[Instrument, ...]) -> None:
    given = {"x": 1}
    plan = compile_plan([[toy("count", ["x"], "x", body=lambda x: x + 1)]], inputs=["x"], outputs=["x"])
    assert run(plan, [given, given], instruments) == [{"x": 2}, {"x": 2}]
    assert given == {"x": 1}


ONE_EACH = "Give one mapping for each sub-batch, or compile the plan for another number."


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            [{"x": 1, "z": 2}, {"z": 1, "extra": 2}],
            "sub-batch 1 has no input 'x' (given: z, extra). Give every sub-batch the keys x, z.",
        ),
        ([{}], "sub-batch 0 has no input 'x' (given: nothing). Give every sub-batch the keys x, z."),
        (
            [{"x": 1, "z": 2}],
            "1 inputs for a plan of 2 sub-batches. " + ONE_EACH,
        ),
        (
            [{"x": 1, "z": 2}] * 3,
            "3 inputs for a plan of 2 sub-batches. " + ONE_EACH,
        ),
    ],
    ids=["a key missing", "nothing", "too few", "too many"],
)
def test_inputs_that_do_not_fit_are_refused_in_these_words(inputs: list[dict[str, int]], message: str) -> None:
    plan = compile_plan([[toy("join", ["x", "z"], "y")]], inputs=["x", "z"], outputs=["y"])
    with pytest.raises(PlanError) as caught:
        run(plan, inputs)
    assert str(caught.value) == message


# ---------------------------------------------------------------- when values are freed


class Watch:
    """Makes values and tells, by weak reference, which are alive."""

    def __init__(self) -> None:
        self.refs: dict[str, weakref.ref[Value]] = {}
        self.seen: dict[str, set[str]] = {}

    def make(self, name: str) -> Value:
        value = Value(name)
        self.refs[name] = weakref.ref(value)
        return value

    def note(self, moment: str) -> None:
        self.seen[moment] = {name for name, ref in self.refs.items() if ref() is not None}


def test_the_last_reader_holds_the_only_reference(instruments: tuple[Instrument, ...]) -> None:
    """It can free a value inside itself, before it makes the next one; an earlier reader cannot."""
    watch = Watch()

    @op(writes="own")
    def op_make(x: Value) -> Value:
        return watch.make("own")

    @op()
    def op_look(own: Value) -> None:
        del own
        watch.note("in the first reader")

    @op(writes="y")
    def op_use(own: Value) -> int:
        watch.note("in the last reader")
        del own
        watch.note("after its del")
        return 1

    plan = compile_plan([[op_make, op_look, YIELD, op_use]], inputs=["x"], outputs=["y"], sub_batches=1)
    run(plan, [{"x": Value("x")}], instruments)
    assert watch.seen == {"in the first reader": {"own"}, "in the last reader": {"own"}, "after its del": set()}


def test_a_value_is_gone_once_its_last_reader_returned(instruments: tuple[Instrument, ...]) -> None:
    """Each sub-batch looks before, in and after the op that uses its value; the other runs in between."""
    watch = Watch()

    def look(moment: str) -> Callable[[int], None]:
        return lambda n: watch.note(f"{moment} {n}")

    ops = [
        toy("make", ["n"], ("own", "unread"), body=lambda n: (watch.make(f"own {n}"), watch.make(f"unread {n}"))),
        toy("before", ["n"], body=look("before")),
        YIELD,
        toy("use", ["own"], "y", body=lambda own: watch.note(f"in use of {own.name}")),
        toy("after", ["n"], body=look("after")),
    ]
    plan = compile_plan([ops], inputs=["n"], outputs=["y"])
    run(plan, [{"n": 0}, {"n": 1}], instruments)
    assert watch.seen == {
        "before 0": {"own 0"},
        "before 1": {"own 0", "own 1"},
        "in use of own 0": {"own 0", "own 1"},
        "after 0": {"own 1"},
        "in use of own 1": {"own 1"},
        "after 1": set(),
    }


def generated(watch: Watch) -> Iterator[dict[str, Value]]:
    yield {"x": watch.make("x")}


@pytest.mark.parametrize(
    ("give", "held"),
    [
        (generated, False),
        (lambda watch: iter([{"x": watch.make("x")}]), False),
        (lambda watch: [{"x": watch.make("x")}], False),
        (lambda watch: watch.__dict__.setdefault("kept", [{"x": watch.make("x")}]), True),
    ],
    ids=["generator", "iterator", "unnamed list", "list the caller keeps"],
)
def test_inputs_nobody_else_holds_are_freed_after_their_last_reader(
    give: Callable[[Watch], Any], held: bool, instruments: tuple[Instrument, ...]
) -> None:
    watch = Watch()

    @op(writes="a")
    def op_read(x: Value) -> int:
        return 1

    @op(writes="y")
    def op_later(a: int) -> int:
        watch.note("later")
        return a

    plan = compile_plan([[op_read, op_later]], inputs=["x"], outputs=["y"], sub_batches=1)
    run(plan, give(watch), instruments)
    assert watch.seen == {"later": {"x"} if held else set()}


def test_a_handle_lives_from_its_start_to_its_wait(instruments: tuple[Instrument, ...]) -> None:
    """So what it borrowed is alive while the other sub-batches run, although no op of theirs can see it."""
    watch = Watch()
    send = toy("send", ["n"], "sent", starts="ep", body=lambda n: watch.make(f"sent {n}"))
    receive = toy("receive", ["sent"], "y", waits="sent", body=lambda sent: watch.note(f"wait for {sent.name}"))
    plan = compile_plan([[send, YIELD, receive]], inputs=["n"], outputs=["y"], sub_batches=3)
    run(plan, [{"n": 0}, {"n": 1}, {"n": 2}], instruments)
    assert watch.seen == {
        "wait for sent 0": {"sent 0", "sent 1", "sent 2"},
        "wait for sent 1": {"sent 1", "sent 2"},
        "wait for sent 2": {"sent 2"},
    }
