"""How much time communication took and how much of it the host stood waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

_KEPT = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferRecord:
    """One transfer: times in seconds on the dispatcher's clock, bytes to and from other ranks.

    Attributes:
        what: ``dispatch`` or ``combine``.
        sub_batch: whose rows.
        issued: when it was handed to the transport.
        done: when it was complete: the modelled time under a `Link`, else when the wait for it ended.
        blocked: seconds the host waited for it.
    """

    what: str
    sub_batch: int
    issued: float
    done: float
    blocked: float
    sent_bytes: int
    received_bytes: int


class CommunicationStats:
    """Sums over the transfers of one dispatcher since the last `reset`.

    Attributes:
        modelled: times come from a `Link`, not from a real one. Say so wherever they are shown.
        transfers: how many.
        sent_bytes, received_bytes: to and from other ranks.
        in_flight_seconds: from issue to completion, added up over transfers. Without a link, completion counts from the
            wait's end, because the transport does not say when it was earlier.
        busy_seconds: time the modelled link carried this dispatcher's transfers; 0 without a link.
        blocked_seconds: time the host stood waiting for rows; what was not hidden of their transfer.
        counts_seconds: time the host stood waiting for other ranks to say how many rows they send. A link models rows
            only, so this part is real, and it holds what ranks wait for the slowest of them.
        records: the last 1,024 transfers.
    """

    __slots__ = (
        "blocked_seconds",
        "busy_seconds",
        "counts_seconds",
        "in_flight_seconds",
        "modelled",
        "received_bytes",
        "records",
        "sent_bytes",
        "transfers",
    )

    def __init__(self, *, modelled: bool = False) -> None:
        self.modelled = modelled
        self.records: deque[TransferRecord] = deque(maxlen=_KEPT)
        self.reset()

    def reset(self) -> None:
        """Forgets everything so far."""
        self.transfers = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self.in_flight_seconds = 0.0
        self.busy_seconds = 0.0
        self.blocked_seconds = 0.0
        self.counts_seconds = 0.0
        self.records.clear()

    def add(self, record: TransferRecord, *, busy: float = 0.0) -> None:
        """Counts one transfer that is over; `busy` is the time a modelled link spent on it."""
        self.transfers += 1
        self.sent_bytes += record.sent_bytes
        self.received_bytes += record.received_bytes
        self.in_flight_seconds += record.done - record.issued
        self.busy_seconds += busy
        self.blocked_seconds += record.blocked
        self.records.append(record)

    def add_counts(self, seconds: float) -> None:
        """Counts a wait for row counts."""
        self.counts_seconds += seconds

    @property
    def hidden_share(self) -> float | None:
        """Share of the rows' communication, 0 to 1, in which the host did not stand waiting. None if nothing was sent.

        Under a link the whole is the time the link was busy; without one it is the time in flight, which the wait
        itself prolongs, so that the share then is an estimate.
        """
        whole = self.busy_seconds if self.modelled else self.in_flight_seconds
        return None if whole <= 0.0 else min(1.0, max(0.0, 1.0 - self.blocked_seconds / whole))


def total(parts: Iterable[CommunicationStats]) -> CommunicationStats:
    """The sum over several dispatchers, such as those of all sub-batches; records in order of issue."""
    parts = list(parts)
    result = CommunicationStats(modelled=any(part.modelled for part in parts))
    for part in parts:
        result.transfers += part.transfers
        result.sent_bytes += part.sent_bytes
        result.received_bytes += part.received_bytes
        result.in_flight_seconds += part.in_flight_seconds
        result.busy_seconds += part.busy_seconds
        result.blocked_seconds += part.blocked_seconds
        result.counts_seconds += part.counts_seconds
    result.records.extend(sorted((record for part in parts for record in part.records), key=lambda r: r.issued))
    return result
