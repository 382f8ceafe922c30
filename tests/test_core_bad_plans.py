"""Bad plans: every refusal in its exact words, and next to it the nearest plan that is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tbo.core import YIELD, Plan, compile_plan, op
from tbo.errors import PlanError, UserError
from toy_ops import DEEPSEEK_DECODE, layer, toy

pytestmark = pytest.mark.timeout(60)


@dataclass(frozen=True, kw_only=True)
class Bad:
    """A plan with one mistake, and what the refusal says."""

    layers: list[list[Any]]
    says: str
    inputs: tuple[str, ...] = ("x",)
    outputs: tuple[str, ...] = ("y",)
    options: dict[str, Any] = field(default_factory=dict)


def op_plain_function(x: int) -> int:
    return x


class Method:
    """An op declared as a method."""

    @op(writes="y")
    def op_method(self, x: int) -> int:
        return x


X_TO_Y = toy("x_to_y", ["x"], "y")
X_TO_OWN = toy("x_to_own", ["x"], "own")
OWN_TO_Y = toy("own_to_y", ["own"], "y")
Y_TO_OWN = toy("y_to_own", ["y"], "own")
VIEW_OF_OWN = toy("view_of_own", ["own"], "view", passes={"view": "own"})
VIEW_OF_X = toy("view_of_x", ["x"], "view", passes={"view": "x"})
CHANGE_X = toy("change_x", ["x"], "y", mutates="x")
CHANGE_OWN = toy("change_own", ["own"], "y", mutates="own")
CHANGE_VIEW = toy("change_view", ["view"], "y", mutates="view")
READ_VIEW = toy("read_view", ["view"])
SEND = toy("send", ["x"], "sent", starts="ep")
SEND_OWN = toy("send_own", ["own"], "sent", starts="ep")
SEND_ON = toy("send_on", ["y"], "sent_on", starts="ep")
RECEIVE = toy("receive", ["sent"], "y", waits="sent")
RECEIVE_ON = toy("receive_on", ["sent_on"], "z", waits="sent_on")
RECEIVE_IF_ANY = toy("receive_if_any", ["sent?"], "y", waits="sent")
OVERWRITE = toy("overwrite", ["x"], "sent")

BAD_PLANS = {
    # stages and offsets
    "no layers": Bad(layers=[], says="the plan has no ops. Give at least one layer with at least one op."),
    "only empty layers": Bad(
        layers=[[], []], says="the plan has no ops. Give at least one layer with at least one op."
    ),
    "begins with a yield": Bad(
        layers=[[YIELD, X_TO_Y]],
        says="layer 0: a yield with no op before it, at stage 0."
        " Remove one of the two yields in a row, or the yield the plan begins with.",
    ),
    "two yields in a row": Bad(
        layers=[[X_TO_Y], [X_TO_OWN, YIELD, YIELD, OWN_TO_Y]],
        says="layer 1: a yield with no op before it, at stage 1."
        " Remove one of the two yields in a row, or the yield the plan begins with.",
    ),
    "a yield on each side of a layer's end": Bad(
        layers=[[X_TO_Y, YIELD], [YIELD, X_TO_Y]],
        says="layer 1: a yield with no op before it, at stage 1."
        " Remove one of the two yields in a row, or the yield the plan begins with.",
    ),
    "an undeclared function": Bad(
        layers=[[X_TO_Y, YIELD, op_plain_function]],
        says=f"layer 0, stage 1: {op_plain_function!r} is not an op. Declare it with @tbo.op(...), or use tbo.YIELD.",
    ),
    "a method without its instance": Bad(
        layers=[[Method.op_method]],
        says="layer 0, stage 0: op_method is a method taken from its class. Take it from an instance: layer.op_method.",
    ),
    "no sub-batch": Bad(layers=[[X_TO_Y]], options={"sub_batches": 0}, says="sub_batches=0. Use at least 1."),
    "an offset too few": Bad(
        layers=[[X_TO_Y]],
        options={"sub_batches": 3, "offset": (0, 0)},
        says="2 offsets for 3 sub-batches. Give one offset for each sub-batch.",
    ),
    "a negative offset": Bad(
        layers=[[X_TO_Y]],
        options={"offset": -1},
        says="sub-batch 1 has offset -1. Offsets count stages from 0 up.",
    ),
    "an offset as long as the plan": Bad(
        layers=[[X_TO_OWN, YIELD, OWN_TO_Y]],
        options={"sub_batches": 3, "offset": 1},
        says="sub-batch 2 would start 2 stages late in a plan of 2 stages, so nothing overlaps."
        " Use an offset below 2, or order='sequential' if that is what you want.",
    ),
    "the first sub-batch too late": Bad(
        layers=[[X_TO_OWN, YIELD, OWN_TO_Y]],
        options={"offset": (5, 1)},
        says="sub-batch 0 would start 4 stages late in a plan of 2 stages, so nothing overlaps."
        " Use an offset below 2, or order='sequential' if that is what you want.",
    ),
    "an unknown order": Bad(
        layers=[[X_TO_Y]],
        options={"order": "zigzag"},
        says="order='zigzag' is unknown. Use 'interleaved' or 'sequential'.",
    ),
    # data flow
    "a misspelt read": Bad(
        layers=[[X_TO_OWN, YIELD, toy("misspelt", ["ovn"], "y")]],
        says="layer 0, stage 1, misspelt: reads 'ovn', which no op before it writes and which is not an input"
        " (inputs: x). Did you mean 'own'? Write it earlier, add it to inputs, or give the parameter a default.",
    ),
    "a read without inputs": Bad(
        layers=[[X_TO_Y]],
        inputs=(),
        says="layer 0, stage 0, x_to_y: reads 'x', which no op before it writes and which is not an input"
        " (inputs: none). Write it earlier, add it to inputs, or give the parameter a default.",
    ),
    "a read before its write": Bad(
        layers=[[OWN_TO_Y, X_TO_OWN]],
        says="layer 0, stage 0, own_to_y: reads 'own', which no op before it writes and which is not an input"
        " (inputs: x). Write it earlier, add it to inputs, or give the parameter a default.",
    ),
    "a read across layers": Bad(
        layers=[[X_TO_OWN, OWN_TO_Y], [X_TO_Y, YIELD, OWN_TO_Y]],
        says="layer 1, stage 1, own_to_y: reads 'own', last written by layer 0, stage 0, x_to_own, in another layer."
        " Add 'own' to carries, or write it in this layer.",
    ),
    "an input that an earlier layer overwrote": Bad(
        layers=[[toy("rewrite", ["x"], "x")], [X_TO_Y]],
        says="layer 1, stage 0, x_to_y: reads 'x', last written by layer 0, stage 0, rewrite, in another layer."
        " Add 'x' to carries, or write it in this layer.",
    ),
    "an output nobody writes": Bad(
        layers=[[X_TO_Y]],
        outputs=("y", "hidden"),
        says="output 'hidden' is never written. Let an op write it, or take it out of outputs.",
    ),
    "a misspelt output": Bad(
        layers=[[toy("finish", ["x"], "hidden_states")]],
        outputs=("hidden_state",),
        says="output 'hidden_state' is never written. Did you mean 'hidden_states'?"
        " Let an op write it, or take it out of outputs.",
    ),
    "an input listed twice": Bad(
        layers=[[X_TO_Y]], inputs=("x", "z", "x"), says="input 'x' is listed twice. List each input once."
    ),
    # aliasing
    "changes an input": Bad(
        layers=[[CHANGE_X]],
        says="layer 0, stage 0, change_x: mutates 'x', which is or aliases the input 'x'."
        " The caller may still use it: write a new value instead.",
    ),
    "changes a view of an input": Bad(
        layers=[[VIEW_OF_X, YIELD, CHANGE_VIEW]],
        says="layer 0, stage 1, change_view: mutates 'view', which is or aliases the input 'x'."
        " The caller may still use it: write a new value instead.",
    ),
    "changes what is read later": Bad(
        layers=[[X_TO_OWN, CHANGE_OWN, YIELD, OWN_TO_Y]],
        says="layer 0, stage 0, change_own: mutates 'own', but layer 0, stage 1, own_to_y reads the same storage later."
        " Make the mutating op the last reader, or write a new value.",
    ),
    "changes what a view shows later": Bad(
        layers=[[X_TO_OWN, VIEW_OF_OWN, CHANGE_OWN, READ_VIEW]],
        says="layer 0, stage 0, change_own: mutates 'own', but layer 0, stage 0, read_view reads the same storage"
        " later. Make the mutating op the last reader, or write a new value.",
    ),
    "changes an output": Bad(
        layers=[[X_TO_OWN, CHANGE_OWN]],
        outputs=("y", "own"),
        says="layer 0, stage 0, change_own: mutates 'own', but the plan's output 'own' reads the same storage later."
        " Make the mutating op the last reader, or write a new value.",
    ),
    "changes what is being sent": Bad(
        layers=[[X_TO_OWN, SEND_OWN, YIELD, CHANGE_OWN, RECEIVE]],
        says="layer 0, stage 1, change_own: mutates 'own' while the communication from layer 0, stage 0, send_own may"
        " still read it. Make the change after the wait, or write a new value.",
    ),
    "changes a view of what is being sent": Bad(
        layers=[[X_TO_OWN, VIEW_OF_OWN, SEND_OWN, YIELD, CHANGE_VIEW, RECEIVE]],
        says="layer 0, stage 1, change_view: mutates 'view' while the communication from layer 0, stage 0, send_own may"
        " still read it. Make the change after the wait, or write a new value.",
    ),
    # communication
    "starts twice": Bad(
        layers=[[SEND, YIELD, SEND, RECEIVE]],
        says="layer 0, stage 1, send: starts 'sent' again while the one from layer 0, stage 0, send is in flight."
        " Wait for the first, or write the second handle under another key.",
    ),
    "waits for what never started": Bad(
        layers=[[toy("make", ["x"], ("sent", "y")), SEND_ON, YIELD, RECEIVE, RECEIVE_ON]],
        says="layer 0, stage 1, receive: waits for 'sent', which is not in flight (in flight here: sent_on)."
        " Start it earlier in the same sub-batch, and wait for it once.",
    ),
    "waits for an input": Bad(
        layers=[[RECEIVE]],
        inputs=("sent",),
        says="layer 0, stage 0, receive: waits for 'sent', which is not in flight (in flight here: none)."
        " Start it earlier in the same sub-batch, and wait for it once.",
    ),
    "waits twice": Bad(
        layers=[[SEND, YIELD, RECEIVE, YIELD, RECEIVE]],
        says="layer 0, stage 2, receive: waits for 'sent', which is not in flight (layer 0, stage 1, receive has waited"
        " for it already). Start it earlier in the same sub-batch, and wait for it once.",
    ),
    "never waits": Bad(
        layers=[[X_TO_Y], [SEND, YIELD, X_TO_Y]],
        says="layer 1, stage 0, send: starts 'sent', which no op waits for."
        " Add an op with waits='sent' later in the plan.",
    ),
    "loses a handle": Bad(
        layers=[[SEND, YIELD, OVERWRITE, RECEIVE]],
        says="layer 0, stage 1, receive: waits for 'sent' from layer 0, stage 0, send, which layer 0, stage 1,"
        " overwrite has overwritten. Write the other value under another key.",
    ),
    "waits in another layer without seeing the handle": Bad(
        layers=[[SEND, YIELD], [RECEIVE_IF_ANY]],
        says="layer 1, stage 1, receive_if_any: waits for 'sent' from layer 0, stage 0, send, but does not see it in"
        " this layer. Add 'sent' to carries, or wait in the layer that starts it.",
    ),
    # what is in flight
    "two sub-batches on a channel for one": Bad(
        layers=[[SEND, YIELD, RECEIVE]],
        options={"limits": {"ep": 1}},
        says="sub-batch 1, layer 0, stage 0, send: puts 2 communications in flight on channel 'ep', which holds 1."
        " Use fewer sub-batches, another offset, or an order that waits before it starts again.",
    ),
    "the second layer's dispatch meets the first's combine": Bad(
        layers=[layer(DEEPSEEK_DECODE), layer(DEEPSEEK_DECODE)],
        inputs=("hidden_states",),
        outputs=("hidden_states",),
        options={"limits": {"ep": 1}, "offset": 3},
        says="sub-batch 0, layer 1, stage 7, dispatch_a: puts 2 communications in flight on channel 'ep', which holds"
        " 1. Use fewer sub-batches, another offset, or an order that waits before it starts again.",
    ),
    "a limit on a misspelt channel": Bad(
        layers=[[SEND, YIELD, RECEIVE]],
        options={"limits": {"eps": 2}},
        says="limits name channel 'eps', on which nothing starts. Did you mean 'ep'?",
    ),
    "a limit on an unknown channel": Bad(
        layers=[[SEND, YIELD, RECEIVE]],
        options={"limits": {"tensor-parallel": 2}},
        says="limits name channel 'tensor-parallel', on which nothing starts. Channels of this plan: ep.",
    ),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_bad_plan_is_refused_in_these_words(name: str) -> None:
    bad = BAD_PLANS[name]
    with pytest.raises(PlanError) as caught:
        compile_plan(bad.layers, inputs=bad.inputs, outputs=bad.outputs, **bad.options)
    assert str(caught.value) == bad.says
    assert isinstance(caught.value, UserError)
    assert caught.value.remedy


# ---------------------------------------------------------------- the nearest plans that are right


GOOD_PLANS: dict[str, Callable[[], Plan]] = {
    "a yield at the end": lambda: compile_plan([[X_TO_Y, YIELD]], inputs=["x"], outputs=["y"]),
    "offset one below the stages": lambda: compile_plan(
        [[X_TO_OWN, YIELD, OWN_TO_Y]], inputs=["x"], outputs=["y"], offset=1
    ),
    "any offset in sequence": lambda: compile_plan(
        [[X_TO_Y]], inputs=["x"], outputs=["y"], offset=9, order="sequential"
    ),
    "carried across layers": lambda: compile_plan(
        [[X_TO_OWN], [OWN_TO_Y]], inputs=["x"], outputs=["y"], carries=["own"]
    ),
    "an input in every layer": lambda: compile_plan([[X_TO_Y], [X_TO_Y]], inputs=["x"], outputs=["y"]),
    "an input before it is overwritten": lambda: compile_plan(
        [[X_TO_Y], [toy("rewrite", ["x"], "x")]], inputs=["x"], outputs=["x", "y"]
    ),
    "an output of an early layer": lambda: compile_plan([[X_TO_Y], [X_TO_OWN]], inputs=["x"], outputs=["y"]),
    "an input as output": lambda: compile_plan([[X_TO_Y]], inputs=["x"], outputs=["x"]),
    "the last reader changes its own value": lambda: compile_plan(
        [[X_TO_OWN, CHANGE_OWN]], inputs=["x"], outputs=["y"]
    ),
    "a change passed on": lambda: compile_plan(
        [[X_TO_OWN, toy("relu", ["own"], "own", mutates="own", passes={"own": "own"}), OWN_TO_Y]],
        inputs=["x"],
        outputs=["y"],
    ),
    "a change after the wait": lambda: compile_plan(
        [[X_TO_OWN, SEND_OWN, YIELD, RECEIVE, CHANGE_OWN]], inputs=["x"], outputs=["y"]
    ),
    "a wait in a later layer": lambda: compile_plan(
        [[SEND, YIELD], [RECEIVE]], inputs=["x"], outputs=["y"], carries=["sent"]
    ),
    "one handle key again after its wait": lambda: compile_plan(
        [[SEND, YIELD, RECEIVE], [SEND, YIELD, RECEIVE]], inputs=["x"], outputs=["y"]
    ),
    "waits and starts in one op": lambda: compile_plan(
        [[SEND, YIELD, toy("forward", ["sent"], ("sent",), waits="sent", starts="ep"), YIELD, RECEIVE]],
        inputs=["x"],
        outputs=["y"],
    ),
    "a limit without communication": lambda: compile_plan([[X_TO_Y]], inputs=["x"], outputs=["y"], limits={"ep": 1}),
}


@pytest.mark.parametrize("name", GOOD_PLANS)
def test_the_nearest_good_plan_compiles(name: str) -> None:
    assert GOOD_PLANS[name]().warnings == ()
