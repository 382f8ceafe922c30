"""Waiting that ends: either what was waited for is there, or a message says which rank is to blame.

Bounds, in seconds: a failure that was recorded is raised within half a second; a connection that closed without a word
within 4; that a rank has left and will never come within 2; a store whose host died within 3, or 6 if it hangs;
silence after `timeout`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn

from tbo.core import Progress
from tbo.errors import PeerError
from tbo.ops import failure as blame
from tbo.ops.failure import Failure
from tbo.ops.heartbeat import Heartbeat

TICK = 0.25
"""Seconds of one short wait."""

_CULPRIT_PATIENCE = 4.0
_STORE_PATIENCE = 2.0
_STORE_SILENCE = 6.0
_PAUSE = 0.05


class ConnectionClosedError(Exception):
    """A collective broke in the transport, which knows neither the culprit nor the cause."""


class Vigil:
    """One rank's knowledge of whether its group still works.

    Args:
        heartbeat: brings word of the other ranks.
        timeout: seconds of silence before absent ranks are named.
        store_address: for messages.
        store_rank: the rank of the group that hosts the store; None if it is hosted elsewhere.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        *,
        rank: int,
        timeout: float,
        progress: Progress | None,
        store_address: str,
        store_rank: int | None,
    ) -> None:
        self.unusable: Failure | None = None
        self._heartbeat = heartbeat
        self._rank = rank
        self._timeout = timeout
        self._progress = progress
        self._store_address = store_address
        self._store_rank = store_rank

    def check(self) -> None:
        """Raises PeerError if the group failed; a few attribute reads if it did not."""
        if self.unusable is not None:
            raise PeerError(
                f"the groups of this expert-parallel group cannot be used any more: {self.unusable.text}. "
                "Restart all ranks",
                rank=self.unusable.rank,
            )
        if self._heartbeat.failure is not None:
            self._give_up(self._heartbeat.failure)
        if self._heartbeat.lost_since is not None:
            self._give_up(self._store_lost())

    def fail(self, error: BaseException) -> None:
        """Records this rank's own failure for the others. It counts here even if another rank's was recorded first."""
        if self.unusable is None:
            self.unusable = blame.raised(self._rank, error, self._progress)
            self._heartbeat.record(self.unusable)

    def wait(self, finished: Callable[[], bool], number: int, what: str) -> None:
        """Waits until `finished` says so.

        Args:
            finished: waits `TICK` at most itself and tells whether it is over.
            number: of the collective waited for, in the order in which all ranks start them.
            what: names it in messages.

        Raises:
            PeerError: who is to blame that it does not come.
        """
        try:
            if not finished():
                self._wait_watching(finished, number, what)
        except ConnectionClosedError as error:
            self.blame_closed_connection(what, error)
        except PeerError:
            raise
        except BaseException as error:
            # An interrupt abandons a collective that other ranks are in: they must hear of it.
            self.fail(error)
            raise

    def blame_closed_connection(self, what: str, cause: BaseException) -> NoReturn:
        """Finds out whose connection closed: by its own word, else by whose reports stopped."""
        heartbeat = self._heartbeat
        began = time.monotonic()
        heartbeat.hurry = True
        while True:
            heartbeat.look_now()
            time.sleep(_PAUSE)
            now = time.monotonic()
            if heartbeat.failure is not None:
                self._give_up(heartbeat.failure, cause)
            if heartbeat.lost_since is not None and now - began > TICK:
                self._give_up(self._store_lost(), cause)
            overdue = now - began > _CULPRIT_PATIENCE
            found = blame.connection_closed(dict(heartbeat.sightings), waits_for=what, now=now, overdue=overdue)
            if found is not None:
                self._give_up(heartbeat.record(found), cause)

    def _wait_watching(self, finished: Callable[[], bool], number: int, what: str) -> None:
        heartbeat = self._heartbeat
        began = time.monotonic() - TICK
        heartbeat.waits_for = what
        try:
            while not finished():
                if heartbeat.failure is not None:
                    self._give_up(heartbeat.failure)
                gone = blame.left_before(dict(heartbeat.sightings), waits_for=what, number=number)
                if gone is not None:
                    self._give_up(heartbeat.record(gone))
                now = time.monotonic()
                if self._store_is_gone(began, now):
                    self._give_up(self._store_lost())
                if now - began > self._timeout:
                    found = blame.silence(
                        dict(heartbeat.sightings),
                        waits_for=what,
                        number=number,
                        seconds=now - began,
                        now=now,
                        rank=self._rank,
                    )
                    self._give_up(heartbeat.record(found))
        finally:
            heartbeat.waits_for = ""

    def _store_is_gone(self, began: float, now: float) -> bool:
        lost_since = self._heartbeat.lost_since
        if lost_since is not None:
            # The host may have ended in good order once its part was sent: what is on its way still arrives.
            return now - max(lost_since, began) > _STORE_PATIENCE
        return now - max(self._heartbeat.last_round, began) > _STORE_SILENCE

    def _store_lost(self) -> Failure:
        return blame.store_lost(self._store_address, self._store_rank, dict(self._heartbeat.sightings))

    def _give_up(self, failure: Failure, cause: BaseException | None = None) -> NoReturn:
        self.unusable = failure
        place = "" if self._progress is None else f", in {self._progress.describe()},"
        raise PeerError(f"{failure.text}. Rank {self._rank}{place} stopped because of it", rank=failure.rank) from cause
