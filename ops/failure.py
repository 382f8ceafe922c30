"""What is known about a failure, and who is to blame: pure functions over what ranks last reported.

No process, store or clock of its own, so that every verdict can be tested with made-up reports. Ranks are ranks in the
expert-parallel group.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from tbo.core import Progress
from tbo.core.run import PLACE_NOTE
from tbo.errors import OpError

DEAD_AFTER = 2.0
"""Seconds without a new report after which a rank whose connection closed counts as dead; reports come every 0.5 s."""


LEFT_AFTER = 0.5
"""Seconds after which a rank's leaving counts as the cause: a failure it recorded before it left is known by then."""


class Kind(StrEnum):
    """How a rank failed its peers."""

    RAISED = "raised"
    DIED = "died"
    SILENT = "silent"
    LEFT = "left"
    STORE = "store"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The one failure all ranks of a group agree on: whoever records first decides.

    Attributes:
        kind: what happened.
        rank: the rank at fault, None when it is not known.
        text: the whole story, in sentences without a closing full stop.
    """

    kind: Kind
    rank: int | None
    text: str

    def encode(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, encoded: bytes) -> Failure:
        """From the store."""
        fields = json.loads(encoded)
        return cls(kind=Kind(fields["kind"]), rank=fields["rank"], text=fields["text"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """One report of a rank that is alive.

    Attributes:
        count: grows with every report.
        at: where its plan is, as `Progress.describe` says.
        waits_for: the communication it has been waiting for, empty while it is not waiting (or not for long).
        started: how many communications it has started since its groups were made.
        left: why it left in an orderly way; empty while it takes part.
    """

    count: int
    at: str
    waits_for: str
    started: int
    left: str

    def encode(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, encoded: bytes) -> Beat:
        """From the store."""
        return cls(**json.loads(encoded))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """A rank's last report and when (on this rank's clock) it was seen to be new."""

    beat: Beat
    seen: float


def raised(rank: int, error: BaseException, progress: Progress | None) -> Failure:
    """This rank's own failure, told for its peers."""
    if isinstance(error, OpError):
        text = str(error).removeprefix(f"rank {error.rank}, ")
    else:
        noted = (note for note in getattr(error, "__notes__", ()) if note.startswith(PLACE_NOTE))
        running = progress.describe() if progress is not None else "outside a step"
        place = next(noted, running).removeprefix(PLACE_NOTE)
        text = f"{place}: {type(error).__name__}: {error}"
    return Failure(kind=Kind.RAISED, rank=rank, text=f"rank {rank} failed: {text}".removesuffix("."))


def connection_closed(
    sightings: Mapping[int, Sighting], *, waits_for: str, now: float, overdue: bool
) -> Failure | None:
    """A connection closed and no rank left word. None while it is too early to tell who died.

    Args:
        sightings: the other ranks' last reports.
        waits_for: the communication whose connection closed.
        now: on the clock of the sightings.
        overdue: no more patience: name what can be named.
    """
    left = [rank for rank, sighting in sightings.items() if sighting.beat.left and now - sighting.seen > LEFT_AFTER]
    if left:
        return _left(left[0], sightings[left[0]].beat, waits_for)
    dead = [rank for rank, sighting in sightings.items() if now - sighting.seen > DEAD_AFTER]
    if dead:
        story = ", and ".join(_last_words(rank, sightings[rank], now) for rank in dead)
        text = f"a connection closed during {waits_for} and no rank had recorded a failure (killed?): {story}"
        return Failure(kind=Kind.DIED, rank=dead[0], text=text)
    if not overdue:
        return None
    text = (
        f"a connection closed during {waits_for}, yet every rank still reports: the network or a rank's groups failed"
    )
    return Failure(kind=Kind.DIED, rank=None, text=text)


def left_before(sightings: Mapping[int, Sighting], *, waits_for: str, number: int) -> Failure | None:
    """A rank left without having started communication `number`, so nobody need wait for it any longer."""
    for rank, sighting in sightings.items():
        if sighting.beat.left and sighting.beat.started < number:
            return _left(rank, sighting.beat, waits_for)
    return None


def silence(
    sightings: Mapping[int, Sighting], *, waits_for: str, number: int, seconds: float, now: float, rank: int
) -> Failure:
    """Nothing came for `seconds`: names the ranks that have not started communication `number`."""
    absent = [peer for peer, sighting in sightings.items() if sighting.beat.started < number]
    head = f"rank {rank} waited {seconds:.1f} s for {waits_for}"
    if not absent:
        stories = "; ".join(_last_words(peer, sighting, now) for peer, sighting in sightings.items())
        others = {sighting.beat.waits_for for sighting in sightings.values()} - {"", waits_for}
        why = "but others wait for something else" if others else "all ranks had started it, so the transport is stuck"
        return Failure(kind=Kind.SILENT, rank=None, text=f"{head}; {why} ({stories})")
    story = ", and ".join(_last_words(peer, sightings[peer], now) for peer in absent)
    never = "rank" if len(absent) == 1 else "ranks"
    text = f"{head}, but {never} {_listed(absent)} never came to it: {story}"
    return Failure(kind=Kind.SILENT, rank=absent[0], text=text)


def store_lost(address: str, store_rank: int | None, sightings: Mapping[int, Sighting]) -> Failure:
    """The store that ranks report to does not answer any more.

    Args:
        address: of the store.
        store_rank: the rank of this group that hosts it; None if it is hosted elsewhere.
        sightings: the other ranks' last reports.
    """
    if store_rank is None:
        text = (
            f"the process that hosts the store ({address}) died or stopped answering; "
            "it is a launcher such as torchrun, or a rank outside of this group"
        )
        return Failure(kind=Kind.STORE, rank=None, text=text)
    text = f"rank {store_rank}, which hosts the store ({address}), died or stopped answering"
    if store_rank in sightings:
        beat = sightings[store_rank].beat
        text += f"; it was last in {beat.at}" + (f" and left, because {beat.left}" if beat.left else "")
    return Failure(kind=Kind.STORE, rank=store_rank, text=text)


def disagreements(facts_of_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """One line for each fact on which ranks differ: which ranks hold which value."""
    names: dict[str, None] = {}
    for facts in facts_of_rank:
        names.update(dict.fromkeys(facts))
    lines = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_of_rank):
            holders.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            each = ", ".join(
                f"{value} on {'rank' if len(ranks) == 1 else 'ranks'} {_listed(ranks)}"
                for value, ranks in holders.items()
            )
            lines.append(f"{name} is {each}")
    return lines


def _left(rank: int, beat: Beat, waits_for: str) -> Failure:
    text = f"rank {rank} left while others waited for {waits_for}: {beat.left}; it last reported {beat.at}"
    return Failure(kind=Kind.LEFT, rank=rank, text=text)


def _last_words(rank: int, sighting: Sighting, now: float) -> str:
    quiet = now - sighting.seen
    state = f"stopped reporting {quiet:.1f} s ago" if quiet > DEAD_AFTER else "is alive"
    waiting = f", waiting for {sighting.beat.waits_for}" if sighting.beat.waits_for else ""
    return f"rank {rank} {state}, last in {sighting.beat.at}{waiting}"


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
