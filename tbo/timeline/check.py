"""Limits that a timeline must keep, for continuous integration."""

from __future__ import annotations

from dataclasses import dataclass

from tbo.errors import UserError
from tbo.timeline.metrics import Metrics


class LimitsError(UserError):
    """Limits that are missing or make no sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is asked of every rank; None asks nothing.

    Attributes:
        min_overlap: least overlap ratio, 0 to 1.
        max_exposed_us: most exposed communication, in microseconds.
        max_idle: largest share of the window in which nothing runs, 0 to 1.
        max_bubble: largest share of the window in which nothing is computed, 0 to 1.

    Raises:
        LimitsError: nothing is asked, or a limit lies outside what is possible.
    """

    min_overlap: float | None = None
    max_exposed_us: float | None = None
    max_idle: float | None = None
    max_bubble: float | None = None

    def __post_init__(self) -> None:
        shares = {
            "--min-overlap": self.min_overlap,
            "--max-idle": self.max_idle,
            "--max-bubble": self.max_bubble,
        }
        if self.max_exposed_us is None and all(share is None for share in shares.values()):
            raise LimitsError("no limit is given", remedy=f"Give --max-exposed-us, {', '.join(shares)}, or several.")
        for option, share in shares.items():
            if share is not None and not 0 <= share <= 1:
                raise LimitsError(f"{option} is {share:g}", remedy="Give a share from 0 to 1, such as 0.9.")
        if self.max_exposed_us is not None and not self.max_exposed_us >= 0:
            raise LimitsError(f"--max-exposed-us is {self.max_exposed_us:g}", remedy="Give 0 or more microseconds.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One limit and what was found.

    Attributes:
        rank: whose.
        what: the figure, with its unit.
        found: its value.
        limit: the bound.
        at_least: the value must not be below the bound; otherwise it must not be above.
    """

    rank: int
    what: str
    found: float
    limit: float
    at_least: bool

    @property
    def holds(self) -> bool:
        """Whether the limit is kept."""
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    def __str__(self) -> str:
        bound = "at least" if self.at_least else "at most"
        state = "ok" if self.holds else "FAILED"
        return f"{state}: rank {self.rank}: {self.what} {self.found:.6g}, must be {bound} {self.limit:.6g}"


def judge(metrics: Metrics, limits: Limits) -> tuple[Verdict, ...]:
    """Every limit against one rank's figures, which must include some communication."""
    window = metrics.window_ns or 1
    figures = (
        ("overlap ratio", metrics.overlap_ratio or 0.0, limits.min_overlap, True),
        ("exposed communication (us)", metrics.exposed_ns / 1000, limits.max_exposed_us, False),
        ("idle share", metrics.idle_ns / window, limits.max_idle, False),
        ("bubble", metrics.bubble or 0.0, limits.max_bubble, False),
    )
    return tuple(
        Verdict(rank=metrics.rank, what=what, found=found, limit=limit, at_least=at_least)
        for what, found, limit, at_least in figures
        if limit is not None
    )
