"""The heartbeat: a thread that tells the other ranks where this one is, and watches for word of a failure.

Only this thread talks to the store once the groups stand. The thread that runs a step reads plain attributes, so a
store whose host hangs can never hang the step, and an undisturbed wait costs nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tbo.ops.failure import DEAD_AFTER, Beat, Failure, Kind, Sighting

if TYPE_CHECKING:
    from torch.distributed import Store

_LOOK_EVERY = 0.25
_BEAT_EVERY = 0.5
_HURRY = 0.05
_RECORD_LIMIT = 2.0
_STOP_LIMIT = 3.0
_SPREAD_LIMIT = 2.0
_LINGER = 1.0
_VALUES_A_SECOND = 64
"""Reports a rank reads in a second at most: with many ranks they are read less often, for the store's host's sake."""


class Heartbeat:
    """Reports for one rank of a group, in a daemon thread, on a store connection of its own.

    Attributes:
        failure: the failure some rank recorded, once known here.
        sightings: last report of each *other* rank.
        lost_since: monotonic time at which the store stopped answering, None while it answers.
        last_round: monotonic time of the last complete round.
        waits_for, started: set by the step's thread, sent with the next report.
        hurry: set by the step's thread while it looks for the culprit of a closed connection.
    """

    def __init__(
        self, store: Store, *, rank: int, world_size: int, hosts_store: bool, describe: Callable[[], str]
    ) -> None:
        self._store = store
        self._hosts_store = hosts_store
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._describe = describe
        self._count = 0
        self._left = ""
        self._to_record: Failure | None = None
        self._recorded = threading.Event()
        self._wake = threading.Event()
        self._stopping = False
        self._stay_until = float("inf")
        self._said_goodbye = threading.Event()
        self._pid = os.getpid()
        self._next_beat = 0.0
        self._next_reading = 0.0
        self._thread = threading.Thread(target=self._live, name=f"tbo heartbeat of rank {rank}", daemon=True)
        self.failure: Failure | None = None
        self.sightings: dict[int, Sighting] = {}
        self.lost_since: float | None = None
        self.last_round = time.monotonic()
        self.waits_for = ""
        self.started = 0
        self.hurry = False

    def announce(self) -> None:
        """Sends the first report, from the calling thread. Must be done on all ranks before any of them starts."""
        self._beat()

    def start(self) -> None:
        """Goes on reporting in the background."""
        self._thread.start()

    def record(self, failure: Failure) -> Failure:
        """Makes a failure known to all ranks and returns the one that counts: the first that was recorded.

        Takes 2 s at most; if the store does not answer by then, `failure` itself counts here.
        """
        self._to_record = failure
        self._wake.set()
        if self._thread.is_alive():
            self._recorded.wait(_RECORD_LIMIT)
        if self.failure is None:
            self.failure = failure
        return self.failure

    def look_now(self) -> None:
        """Asks for a round without delay."""
        self._wake.set()

    def stop(self, reason: str, *, process_ends: bool) -> bool:
        """Reports that this rank leaves, and ends the thread. Takes 3 s at most; safe to repeat.

        The store dies with its host. So there the thread stays, in the background, until the others have left; when
        the process ends it stays 1 s more at most, or 2 s until the others have read of a failure.

        Args:
            reason: told to ranks that still wait for this one.
            process_ends: do not return before the thread is over.

        Returns:
            Whether the thread is over.
        """
        if os.getpid() != self._pid:
            # A forked child shares the connection but must not speak for its parent, and has no such thread.
            return True
        self._left = self._left or reason
        if process_ends:
            self._stay_until = time.monotonic() + (_LINGER if self.failure is None else _SPREAD_LIMIT)
        self._stopping = True
        self._wake.set()
        if threading.current_thread() is self._thread:
            # Garbage is collected on any thread, so this one can be asked to end by itself, but not to await that.
            return False
        if process_ends or not self._hosts_store:
            self._thread.join(_STOP_LIMIT)
        else:
            self._said_goodbye.wait(_STOP_LIMIT)
        return not self._thread.is_alive()

    def _live(self) -> None:
        try:
            while not self._stopping:
                self._round()
                self._wake.wait(_HURRY if self.hurry else _LOOK_EVERY)
                self._wake.clear()
            self._beat()
            self._said_goodbye.set()
            if self._hosts_store:
                self._linger()
        except Exception:  # noqa: BLE001 - whatever it is, this rank hears of no failure any more and must not wait on
            # A lost connection does not come back: no second try, each of which would log a stack trace.
            self.lost_since = time.monotonic()
            self._recorded.set()
            self._said_goodbye.set()

    def _round(self) -> None:
        now = time.monotonic()
        if self._to_record is not None:
            self._store.compare_set("failure", "", self._to_record.encode())
            self._to_record = None
        if self.failure is None and self._store.check(["failure"]):
            self.failure = Failure.decode(self._store.get("failure"))
            self._store.set(f"told/{self._rank}", "")
        if self.failure is not None:
            self._recorded.set()
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_EVERY
            self._beat()
        if self.hurry or now >= self._next_reading:
            self._next_reading = now + max(_BEAT_EVERY, len(self._others) / _VALUES_A_SECOND)
            self._read_others()
        self.last_round = time.monotonic()

    def _beat(self) -> None:
        self._count += 1
        try:
            at = self._describe()
        except Exception as error:  # noqa: BLE001 - it reads a plan that another thread is running
            at = f"a place that could not be read ({type(error).__name__})"
        beat = Beat(count=self._count, at=at, waits_for=self.waits_for, started=self.started, left=self._left)
        self._store.set(f"beat/{self._rank}", beat.encode())

    def _read_others(self) -> None:
        if not self._others:
            return
        now = time.monotonic()
        for rank, encoded in zip(
            self._others, self._store.multi_get([f"beat/{rank}" for rank in self._others]), strict=True
        ):
            beat = Beat.decode(encoded)
            known = self.sightings.get(rank)
            if known is None or known.beat.count != beat.count:
                self.sightings[rank] = Sighting(beat=beat, seen=now)

    def _linger(self) -> None:
        """Keeps the store's host alive while others need it: for word of a failure, or to leave in good order too.

        Torch logs a stack trace on every rank that loses the store.
        """
        while time.monotonic() < self._stay_until:
            self._read_others()
            present = [rank for rank in self._others if self._is_present(rank)]
            if not present or (self.failure is not None and self._store.check([f"told/{rank}" for rank in present])):
                return
            self._wake.wait(_LOOK_EVERY if self._stay_until == float("inf") else _HURRY)
            self._wake.clear()

    def _is_present(self, rank: int) -> bool:
        sighting = self.sightings[rank]
        known_dead = self.failure is not None and self.failure.kind is Kind.DIED and self.failure.rank == rank
        quiet = time.monotonic() - sighting.seen > DEAD_AFTER
        return not (known_dead or quiet or sighting.beat.left)
