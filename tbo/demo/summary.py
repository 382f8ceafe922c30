"""What the demo shows at its end: answers, whether they are equal, and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tbo.demo.messages import RankResult, StepTime, Variant
from tbo.demo.options import DemoOptions

WRAPPED = (Variant.NEVER, Variant.ALWAYS)

_TABLE_WIDTH = 76


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where an answer first differs from the plain model's. A token past the end of an answer is None."""

    variant: Variant
    rank: int
    question: str
    position: int
    plain_token: int | None
    token: int | None

    def __str__(self) -> str:
        """One sentence."""
        return (
            f"{self.variant}, rank {self.rank}, question {self.question!r}: token {self.position} is {self.token}, the"
            f" plain model's is {self.plain_token}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One variant's step times over all ranks, in seconds, each that of the rank that took longest.

    Attributes:
        link: median time the modelled link was busy in a step, on the rank where it was longest; 0 if none was used.
        hidden: median share of it that was hidden, averaged over ranks; None where nothing was sent.
        note: why steps did not overlap, if any did not.
    """

    variant: Variant
    steps: tuple[float, ...]
    link: float
    hidden: float | None
    note: str

    @property
    def middle(self) -> float:
        """The median step."""
        return median(self.steps)


def first_difference(results: Sequence[RankResult]) -> Difference | None:
    """Compares every wrapped variant's tokens with the plain model's, on every rank."""
    for result in results:
        plain = result.of(Variant.PLAIN).tokens
        for variant in WRAPPED:
            answers = zip(result.questions, plain, result.of(variant).tokens, strict=True)
            for question, expected, actual in answers:
                for position in range(max(len(expected), len(actual))):
                    wanted = expected[position] if position < len(expected) else None
                    got = actual[position] if position < len(actual) else None
                    if wanted != got:
                        return Difference(
                            variant=variant,
                            rank=result.rank,
                            question=question,
                            position=position,
                            plain_token=wanted,
                            token=got,
                        )
    return None


def timing(results: Sequence[RankResult], variant: Variant) -> Timing:
    """Joins the ranks' times. Steps that only some ranks made (others had finished answering) are left out."""
    per_rank = [result.of(variant).steps for result in results]
    together: list[tuple[StepTime, ...]] = list(zip(*per_rank, strict=False))
    shares = [step.hidden for steps in together for step in steps if step.hidden is not None]
    return Timing(
        variant=variant,
        steps=tuple(max(step.seconds for step in steps) for steps in together),
        link=median(max(step.link_seconds for step in steps) for steps in together),
        hidden=median(shares) if shares else None,
        note=next((step.note for steps in together for step in steps if step.note), ""),
    )


def answers(results: Sequence[RankResult]) -> RenderableType:
    """Every rank's questions with their answers."""
    blocks: list[RenderableType] = []
    for result in results:
        grid = Table.grid(padding=(0, 1))
        for question, answer in zip(result.questions, result.answers, strict=True):
            grid.add_row(Text("Q", style="dim"), Text(question, style="bold"))
            grid.add_row(Text("A", style="dim"), Text(" ".join(answer.split())))
        blocks += [Text(f"rank {result.rank}", style="cyan"), Padding(grid, (0, 0, 1, 2))]
    return Group(*blocks)


def equality(results: Sequence[RankResult], difference: Difference | None) -> Text:
    """Says whether the wrapped model's tokens are the plain model's."""
    if difference is not None:
        return Text(f"ANSWERS DIFFER from the plain model's. First difference: {difference}.", style="bold red")
    answers_given = sum(len(result.questions) for result in results)
    tokens = sum(len(ids) for result in results for ids in result.of(Variant.PLAIN).tokens)
    return Text(
        f"All {answers_given} answers equal the plain model's, token for token ({tokens} tokens),"
        " overlapped and not overlapped.",
        style="green",
    )


def times(results: Sequence[RankResult], options: DemoOptions, threads: int, *, width: int = 80) -> RenderableType:
    """The step times, the verdict, and how they were measured; a table where `width` columns have room for one."""
    timings = [timing(results, variant) for variant in Variant]
    plain, apart, overlapped = timings
    title = f"time per {options.phase} step"
    lines = [
        _stacked(title, timings) if width < _TABLE_WIDTH else _table(title, timings),
        Text(""),
        _verdict(apart, overlapped, options),
    ]
    if overlapped.note:
        lines.append(Text(f"Some steps did not overlap: {overlapped.note}.", style="yellow"))
    lines.append(Text(_how_measured(results, options, threads, len(plain.steps)), style="dim"))
    return Group(*lines)


def _table(title: str, timings: Sequence[Timing]) -> RenderableType:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("median", "spread", "link, modelled", "hidden"):
        table.add_column(heading, justify="right")
    for row in timings:
        table.add_row(str(row.variant), *_cells(row))
    return table


def _stacked(title: str, timings: Sequence[Timing]) -> RenderableType:
    lines: list[RenderableType] = [Text(title, style="italic")]
    for row in timings:
        middle, spread, link, hidden = _cells(row)
        lines.append(Text(str(row.variant), style="bold"))
        lines.append(Padding(Text(f"{middle} ({spread})"), (0, 0, 0, 2)))
        if hidden:
            lines.append(Padding(Text(f"link, modelled: {link}; hidden: {hidden}"), (0, 0, 0, 2)))
    return Group(*lines)


def _cells(row: Timing) -> tuple[str, str, str, str]:
    """Median, spread, time of the link, hidden share."""
    middle, spread = _milliseconds(row.middle), f"{_number(min(row.steps))} to {_number(max(row.steps))}"
    if row.variant is Variant.PLAIN:
        return middle, spread, "none", ""
    return middle, spread, _milliseconds(row.link), "nothing sent" if row.hidden is None else f"{row.hidden:.0%}"


def _verdict(apart: Timing, overlapped: Timing, options: DemoOptions) -> Text:
    ratio = apart.middle / overlapped.middle
    if ratio >= 1:
        return Text(f"Overlapping made the {options.phase} step {ratio:.2f} times as fast.", style="green")
    text = f"Overlapping LOST here: the {options.phase} step took {1 / ratio:.2f} times as long."
    if options.phase == "decode":
        text += " That is usual for decode steps of a few tokens, and why overlap='auto' leaves them alone."
    else:
        text += " Splitting cost more than there was to hide; try a slower link."
    return Text(text, style="yellow")


def _how_measured(results: Sequence[RankResult], options: DemoOptions, threads: int, steps: int) -> str:
    tokens = ", ".join(str(result.tokens_per_step) for result in results)
    return (
        f"{options.ranks} ranks on this machine, {threads} thread{'s' if threads > 1 else ''} each; tokens a step:"
        f" {tokens}. The link is modelled, not measured: {options.link_gbps:g} GB/s each way,"
        f" {options.link_latency_us:g} us a transfer. A step's time is that of the rank that took longest;"
        f" {steps} steps of each kind, by turns. The plain model holds all experts on every rank"
        " and sends nothing."
    )


def show(console: Console, results: Sequence[RankResult], options: DemoOptions, threads: int) -> bool:
    """Prints everything; whether the answers are equal."""
    difference = first_difference(results)
    console.print(answers(results))
    console.print(equality(results, difference))
    console.print()
    console.print(times(results, options, threads, width=console.width))
    return difference is None


def _number(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"


def _milliseconds(seconds: float) -> str:
    return f"{_number(seconds)} ms"
