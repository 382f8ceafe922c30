"""A modelled link: delays completion to what a link of given speed would take. Never a measurement; always say so.

Real transfers on a laptop are memory copies, too fast to hide anything behind computation. Under a link they complete
when its bandwidth and latency would have let them, so that overlap can be shown and tested anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from tbo.core import Pending
from tbo.errors import DispatcherError
from tbo.ops.communication_stats import CommunicationStats, TransferRecord
from tbo.ops.dispatch import Dispatcher, Limits, Received, Ticket, Transfer

T = TypeVar("T")

_SPIN_SECONDS = 300e-6
"""A sleep can end late by about this; the last part of a delay is spun away, so that it ends on time."""

_BYTES_PER_GIGABYTE = 1e9


def sleep_until(moment: float) -> None:
    """Returns at `moment` of `time.perf_counter`, late by some 50 microseconds at most; at once if it has passed."""
    left = moment - time.perf_counter()
    if left > _SPIN_SECONDS:
        time.sleep(left - _SPIN_SECONDS)
    while time.perf_counter() < moment:
        # Gives up the interpreter lock: the heartbeat goes on during the spin.
        time.sleep(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """Where a link reads the time, and how it lets time pass; a test puts in a virtual one."""

    now: Callable[[], float] = time.perf_counter
    sleep_until: Callable[[float], None] = sleep_until


class LinkQueue:
    """One rank's end of the link: transfers go one after another, in the order in which they were issued."""

    __slots__ = ("free_at",)

    def __init__(self) -> None:
        self.free_at = float("-inf")

    def __deepcopy__(self, memo: object) -> LinkQueue:
        # A copied model is another user of the same link, not a second link.
        return self


@dataclass(frozen=True, slots=True)
class Link:
    """The settings of a modelled link, and the queue all its users on this rank share.

    Each rank has one full-duplex link to a network that is never the bottleneck. A transfer takes
    ``latency + max(sent, received) / bandwidth`` from when it was issued or, if the link was busy then, from when the
    link was free. Bytes that stay on the rank cost nothing.

    Args:
        gigabytes_per_second: bandwidth of one direction, in 10^9 bytes a second.
        latency: seconds a transfer takes besides its bytes.

    Raises:
        DispatcherError: the bandwidth is not positive or the latency negative.
    """

    gigabytes_per_second: float
    latency: float = 0.0
    clock: Clock = field(default_factory=Clock, kw_only=True, repr=False, compare=False)
    queue: LinkQueue = field(default_factory=LinkQueue, kw_only=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.gigabytes_per_second > 0 or not self.latency >= 0:
            raise DispatcherError(
                f"a link of {self.gigabytes_per_second} GB/s with a latency of {self.latency} s cannot exist",
                remedy="Pass a positive bandwidth in GB/s and a latency in seconds, 0 or more.",
            )

    def __str__(self) -> str:
        return f"modelled link, {self.gigabytes_per_second:g} GB/s, latency {self.latency * 1e6:g} us"

    def seconds(self, sent_bytes: int, received_bytes: int) -> float:
        """How long a transfer occupies the link."""
        return self.latency + max(sent_bytes, received_bytes) / (self.gigabytes_per_second * _BYTES_PER_GIGABYTE)

    def reserve(self, sent_bytes: int, received_bytes: int) -> tuple[float, float]:
        """Queues a transfer that is issued now: when it was issued and when it will be complete."""
        issued = self.clock.now()
        self.queue.free_at = max(issued, self.queue.free_at) + self.seconds(sent_bytes, received_bytes)
        return issued, self.queue.free_at

    def wrap(self, dispatchers: Sequence[Dispatcher]) -> list[LinkedDispatcher]:
        """The same dispatchers over this link, the first serving sub-batch 0."""
        return [LinkedDispatcher(inner, self, index) for index, inner in enumerate(dispatchers)]


class LinkedDispatcher:
    """A dispatcher whose transfers complete when the modelled link would have them complete."""

    def __init__(self, inner: Dispatcher, link: Link, sub_batch: int) -> None:
        self._inner = inner
        self._link = link
        self._sub_batch = sub_batch
        self.stats = CommunicationStats(modelled=True)

    @property
    def limits(self) -> Limits:
        """Those of the dispatcher within."""
        return self._inner.limits

    def dispatch_a(
        self, rows_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[Received, Ticket]]:
        """See `Dispatcher`."""
        counted = self._inner.stats.counts_seconds
        pending = self._inner.dispatch_a(rows_TH, topk_ids_TK, topk_weights_TK)
        self.stats.add_counts(self._inner.stats.counts_seconds - counted)
        return self._delayed(pending, "dispatch")

    def dispatch_b(self, pending: Pending[tuple[Received, Ticket]]) -> tuple[Received, Ticket]:
        """See `Dispatcher`."""
        return pending.wait()

    def combine_a(self, rows_RH: Tensor, ticket: Ticket) -> Pending[Tensor]:
        """See `Dispatcher`."""
        return self._delayed(self._inner.combine_a(rows_RH, ticket), "combine")

    def combine_b(self, pending: Pending[Tensor]) -> Tensor:
        """See `Dispatcher`."""
        return pending.wait()

    def _delayed(self, pending: Pending[T], what: str) -> Pending[T]:
        if not isinstance(pending, Transfer):
            # Nothing leaves the rank, so no link is used.
            return pending
        transfer: Transfer[T] = pending
        link, sent, received = self._link, transfer.sent_bytes, transfer.received_bytes
        issued, done = link.reserve(sent, received)

        def arrive() -> None:
            asked = link.clock.now()
            transfer.arrive()
            link.clock.sleep_until(done)
            record = TransferRecord(
                what=what,
                sub_batch=self._sub_batch,
                issued=issued,
                done=done,
                blocked=link.clock.now() - asked,
                sent_bytes=sent,
                received_bytes=received,
            )
            self.stats.add(record, busy=link.seconds(sent, received))

        return Transfer(arrive, transfer.wait, sent_bytes=sent, received_bytes=received)
