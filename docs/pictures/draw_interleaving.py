"""Draws docs/pictures/interleaving.svg: two sub-batches on two lanes, one after the other and interleaved.

    python docs/pictures/draw_interleaving.py

The plan is the one a wrapped model's prefill step runs: two decoder layers of a transformers model, cut into ops,
compiled in both orders. It is played on a virtual clock with the made-up durations below, so every number in the
picture can be checked by hand. `tests/test_docs.py` holds the committed picture to what this script draws.
"""  # noqa: INP001 - a script

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from tbo.core import Plan, compile_plan
from tbo.models.layer import CARRIES, INPUTS, HuggingFaceLayer
from tbo.models.orders import PREFILL, layers_ops
from tbo.models.parts import find_decoder
from tbo.wrapping.plans import OrderName

PICTURE: Final = Path(__file__).with_name("interleaving.svg")

COMPUTE: Final = {"op_core": 5, "op_experts": 4, "op_shared_experts": 3}
TRANSFERS: Final = {"op_dispatch_a": 5, "op_combine_a": 6}
"""Units of time for one sub-batch; every other op takes none."""
LABELS: Final = {
    "op_core": "attention",
    "op_experts": "experts",
    "op_shared_experts": "shared",
    "op_dispatch_a": "dispatch",
    "op_combine_a": "combine",
}
WAIT: Final = "wait"

UNIT, LEFT, LANE_HEIGHT, LANE_GAP = 12, 84, 34, 8
WIDTH, PANEL_HEIGHT, TOP, HEIGHT = 1080, 142, 30, 370


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One block of the picture, in units: what ran on which lane, for which sub-batch."""

    lane: str
    sub_batch: int
    what: str
    start: int
    end: int


def interleaved_and_sequential() -> tuple[Plan, Plan]:
    """The prefill plan of two sparse layers and two sub-batches, in both orders."""
    config = Qwen2MoeConfig(
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    with torch.device("meta"):  # the plan needs the layers' structure, not their weights
        decoder = find_decoder(AutoModelForCausalLM.from_config(config))
    layers = [HuggingFaceLayer(layer, decoder.config) for layer in decoder.layers]

    def plan(order: OrderName) -> Plan:
        return compile_plan(
            layers_ops(layers, PREFILL),
            inputs=INPUTS,
            outputs=("hidden_states",),
            carries=CARRIES,
            sub_batches=2,
            offset=PREFILL.offset,
            order=order,
        )

    return plan("interleaved"), plan("sequential")


def play(plan: Plan) -> list[Span]:
    """Runs the plan on a virtual clock: one thread computes, one link takes transfers in the order of their issue."""
    now = link_free = 0
    arrives: dict[tuple[int, str], int] = {}
    spans: list[Span] = []
    for sub_batch, stage in plan.order:
        for step in plan.stages[stage].steps:
            op = step.op
            if op.waits is not None:
                arrival = arrives.pop((sub_batch, op.waits))
                if arrival > now:
                    spans.append(Span(lane="compute", sub_batch=sub_batch, what=WAIT, start=now, end=arrival))
                    now = arrival
            units = COMPUTE.get(op.name, 0)
            if units:
                spans.append(Span(lane="compute", sub_batch=sub_batch, what=op.name, start=now, end=now + units))
                now += units
            if op.starts is not None:
                start = max(link_free, now)
                link_free = start + TRANSFERS[op.name]
                spans.append(Span(lane="link", sub_batch=sub_batch, what=op.name, start=start, end=link_free))
                arrives[sub_batch, op.writes[0]] = link_free
    return spans


def total_of(spans: list[Span]) -> int:
    """Units from the first block to the end of the last."""
    return max(span.end for span in spans)


def hidden_of(spans: list[Span]) -> tuple[int, int]:
    """Units of communication that ran behind computation, and units of communication in all."""
    communication = sum(span.end - span.start for span in spans if span.lane == "link")
    return communication - sum(span.end - span.start for span in spans if span.what == WAIT), communication


STYLE: Final = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
.title { font-weight: 600; font-size: 14px; }
.small { font-size: 11px; }
.op { font-size: 10px; }
.number { font-weight: 700; }
.page { fill: #ffffff; stroke: #d1d9e0; }
.lane { fill: #f2f4f7; }
.block { stroke: #1f2328; stroke-width: 1; }
.s0 { fill: #a9d0f5; }
.s1 { fill: #ffd8a8; }
.hatch { stroke: #b36b00; stroke-width: 1.2; stroke-opacity: 0.45; }
.wait { fill: none; stroke: #59636e; stroke-dasharray: 3 3; }
.axis { stroke: #59636e; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  .page { fill: #151b23; stroke: #3d444d; }
  .lane { fill: #212830; }
  .block { stroke: #f0f6fc; }
  .s0 { fill: #1f4f86; }
  .s1 { fill: #7a4a12; }
  .hatch { stroke: #ffb454; }
  .wait, .axis { stroke: #9198a1; }
}
""".strip()


def draw() -> str:
    """The picture as SVG text."""
    interleaved, sequential = (play(plan) for plan in interleaved_and_sequential())
    alt = (
        f"Two lanes, compute and link. One sub-batch after the other takes {total_of(sequential)} units; interleaved,"
        f" the same ops take {total_of(interleaved)}."
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">',
        f"<title>{alt}</title>",
        f"<style>{STYLE}</style>",
        '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">',
        '<line class="hatch" x1="0" y1="0" x2="0" y2="7"/></pattern></defs>',
        f'<rect class="page" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="8"/>',
        *_panel("Not overlapped: one sub-batch after the other", sequential, TOP),
        *_panel("Interleaved", interleaved, TOP + PANEL_HEIGHT),
        *_legend(TOP + 2 * PANEL_HEIGHT),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _text(x: float, y: int, content: str, kind: str = "small", anchor: str = "start") -> str:
    where = f'x="{x:g}" y="{y}"' + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text class="{kind}" {where}>{content}</text>'


def _box(x: int, y: int, width: int, height: int, kind: str) -> list[str]:
    """A rectangle; sub-batch 1 is also hatched, so that colour is never the only difference."""
    shape = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    hatch = [f'<rect fill="url(#hatch)" {shape}/>'] if kind.endswith("s1") else []
    return [f'<rect class="{kind}" {shape}/>', *hatch]


def _panel(title: str, spans: list[Span], top: int) -> list[str]:
    total, (hidden, communication) = total_of(spans), hidden_of(spans)
    share = f"{hidden} of {communication} units of communication hidden ({hidden / communication:.0%})"
    lines = [_text(16, top, f"{title}: {total} units", "title"), _text(WIDTH - 16, top, share, anchor="end")]
    lanes = {"compute": top + 14, "link": top + 14 + LANE_HEIGHT + LANE_GAP}
    for lane, y in lanes.items():
        lines += [_text(16, y + 21, lane, "name"), *_box(LEFT, y, total * UNIT, LANE_HEIGHT, "lane")]
    for span in spans:
        lines += _block(span, lanes[span.lane])
    bottom = lanes["link"] + LANE_HEIGHT + 4
    for tick in sorted({*range(0, total, 10), total}):
        x = LEFT + tick * UNIT
        lines.append(f'<line class="axis" x1="{x}" y1="{bottom}" x2="{x}" y2="{bottom + 5}"/>')
        if tick == total or total - tick > 2:  # a label closer than that would run into the last one
            lines.append(_text(x, bottom + 17, str(tick), anchor="middle"))
    return lines


def _block(span: Span, y: int) -> list[str]:
    x, width = LEFT + span.start * UNIT, (span.end - span.start) * UNIT
    middle = x + width / 2
    if span.what == WAIT:
        label = [_text(middle, y + 21, "wait", anchor="middle")] if width > 2 * UNIT else []
        return [*_box(x, y, width, LANE_HEIGHT, "wait"), *label]
    return [
        *_box(x, y, width, LANE_HEIGHT, f"block s{span.sub_batch}"),
        _text(middle, y + 15, str(span.sub_batch), "number", "middle"),
        _text(middle, y + 28, LABELS[span.what], "op", "middle"),
    ]


def _legend(top: int) -> list[str]:
    lines: list[str] = []
    for x, kind, meaning in (
        (16, "block s0", "0: sub-batch 0"),
        (156, "block s1", "1: sub-batch 1, hatched"),
        (352, "wait", "compute stands still"),
    ):
        lines += [*_box(x, top, 36, 17, kind), _text(x + 44, top + 13, meaning)]
    durations = ", ".join(f"{LABELS[name]} {units}" for name, units in (COMPUTE | TRANSFERS).items())
    what = "The plan of two decoder layers in the prefill order, played on a virtual clock."
    lines.append(_text(16, top + 40, f"{what} Units for a sub-batch, made up: {durations}; other ops 0."))
    return lines


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(PICTURE)  # noqa: T201 - a script
