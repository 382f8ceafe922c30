"""What the ranks of the demo tell the process that started them. Imports no torch: the parent needs none to read it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Variant(StrEnum):
    """The three ways in which the same questions are answered."""

    PLAIN = "plain model"
    NEVER = "same ops, not overlapped"
    ALWAYS = "overlapped"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One timed step on one rank.

    Attributes:
        seconds: how long it took.
        link_seconds: time the modelled link was busy with this rank's transfers in it; 0 for the plain model.
        hidden: share of that time that ran behind computation, 0 to 1, or None where nothing was sent.
        note: empty, or why the step did not overlap although it was meant to.
    """

    seconds: float
    link_seconds: float = 0.0
    hidden: float | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantResult:
    """What one rank got and measured in one way of running.

    Attributes:
        tokens: each answer's token ids, without padding.
        steps: the timed steps.
    """

    variant: Variant
    tokens: tuple[tuple[int, ...], ...]
    steps: tuple[StepTime, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """Everything one rank has to show.

    Attributes:
        questions, answers: text; an answer that reached the token limit ends in " ...".
        tokens_per_step: tokens of this rank in a timed step.
    """

    rank: int
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    tokens_per_step: int
    results: tuple[VariantResult, ...]

    def of(self, variant: Variant) -> VariantResult:
        """The result of one variant."""
        return next(result for result in self.results if result.variant is variant)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progressed:
    """A rank went on: `done` of `total` (None: not known) of `what`."""

    rank: int
    what: str
    done: int
    total: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A rank is through."""

    result: RankResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A rank failed.

    Attributes:
        message: the exception in one paragraph.
        blames_peer: it stopped only because another rank did.
    """

    rank: int
    message: str
    blames_peer: bool


Message = Progressed | Finished | Failed
