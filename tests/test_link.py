"""A link delays transfers to a modelled time, and statistics say how much of it was hidden."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import run_ranks, values
from tbo.core import Pending
from tbo.errors import DispatcherError
from tbo.ops.communication_stats import CommunicationStats, TransferRecord, total
from tbo.ops.dispatch import Dispatcher, Limits, Ticket, Transfer, create_dispatchers
from tbo.ops.link import Clock, Link, LinkedDispatcher, sleep_until
from tbo.ops.local import LocalDispatcher
from tbo.ops.peers import Peers

ROUTED = (torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3))


class VirtualTime:
    """Time that passes only when someone sleeps or computes."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> Clock:
        return Clock(now=lambda: self.now, sleep_until=self.sleep_until)

    def sleep_until(self, moment: float) -> None:
        self.now = max(self.now, moment)

    def compute(self, seconds: float) -> None:
        self.now += seconds


class Instant:
    """A dispatcher whose transfers arrive at once and have a given size."""

    limits = Limits(channel="ep")

    def __init__(self, sent: int, received: int) -> None:
        self._sent, self._received = sent, received
        self.stats = CommunicationStats()

    def dispatch_a(self, rows_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Pending[Any]:
        return self._transfer((rows_TH, Ticket(num_tokens=1)))

    def dispatch_b(self, pending: Pending[Any]) -> Any:
        return pending.wait()

    def combine_a(self, rows_RH: Tensor, ticket: Ticket) -> Pending[Tensor]:
        return self._transfer(rows_RH)

    def combine_b(self, pending: Pending[Tensor]) -> Tensor:
        return pending.wait()

    def _transfer(self, result: Any) -> Transfer[Any]:
        return Transfer(lambda: None, lambda: result, sent_bytes=self._sent, received_bytes=self._received)


def linked(*sizes: tuple[int, int], latency: float = 0.0) -> tuple[VirtualTime, Sequence[LinkedDispatcher]]:
    """Dispatchers over one link of 1 GB/s, which is a byte a nanosecond."""
    passing = VirtualTime()
    return passing, Link(1.0, latency, clock=passing.clock()).wrap([Instant(*size) for size in sizes])


ROWS = torch.ones(1, 1)


def start(dispatcher: Dispatcher) -> Pending[Any]:
    return dispatcher.combine_a(ROWS, Ticket(num_tokens=1))


def test_a_transfer_takes_latency_and_the_larger_direction() -> None:
    passing, (dispatcher,) = linked((1_000_000, 3_000_000), latency=0.5)
    assert dispatcher.combine_b(start(dispatcher)) is ROWS
    assert passing.now == pytest.approx(0.503)
    assert dispatcher.stats.hidden_share == 0.0
    assert dispatcher.stats.blocked_seconds == pytest.approx(0.503)


def test_computation_hides_a_transfer_and_the_statistics_say_how_much() -> None:
    passing, (dispatcher,) = linked((0, 4_000_000))
    pending = start(dispatcher)
    passing.compute(0.003)
    dispatcher.combine_b(pending)
    assert passing.now == pytest.approx(0.004)
    assert dispatcher.stats.hidden_share == pytest.approx(0.75)

    pending = start(dispatcher)
    passing.compute(1.0)
    dispatcher.combine_b(pending)
    assert passing.now == pytest.approx(1.004)
    assert dispatcher.stats.busy_seconds == pytest.approx(0.008)
    assert dispatcher.stats.blocked_seconds == pytest.approx(0.001)
    assert dispatcher.stats.modelled
    assert [record.issued for record in dispatcher.stats.records] == pytest.approx([0.0, 0.004])
    assert [record.done for record in dispatcher.stats.records] == pytest.approx([0.004, 0.008])


def test_all_dispatchers_of_a_rank_share_one_link() -> None:
    passing, (first, second) = linked((2_000_000, 0), (0, 2_000_000))
    pending = [start(first), start(second)]
    second.combine_b(pending[1])
    # The second transfer goes after the first, not beside it.
    assert passing.now == pytest.approx(0.004)
    first.combine_b(pending[0])
    assert passing.now == pytest.approx(0.004)
    both = total([first.stats, second.stats])
    assert both.modelled
    assert both.transfers == 2
    assert both.busy_seconds == pytest.approx(0.004)
    assert both.hidden_share == pytest.approx(0.0)
    assert [record.sub_batch for record in both.records] == [0, 1]
    first.stats.reset()
    assert first.stats.hidden_share is None


def test_a_local_dispatcher_uses_no_link() -> None:
    passing = VirtualTime()
    link = Link(1e-9, 100.0, clock=passing.clock())
    (dispatcher,) = create_dispatchers("local", num_experts=8, sub_batches=1, peers=None, link=link)
    _, ticket = dispatcher.dispatch_b(dispatcher.dispatch_a(*ROUTED))
    dispatcher.combine_b(dispatcher.combine_a(ROUTED[0], ticket))
    assert passing.now == 0.0
    assert dispatcher.limits == LocalDispatcher.limits


def test_a_link_is_a_setting() -> None:
    assert Link(50, latency=1e-5) == Link(50.0, 1e-5)
    assert str(Link(50, latency=1e-5)) == "modelled link, 50 GB/s, latency 10 us"
    link = Link(50)
    assert copy.deepcopy(link).queue is link.queue
    for bad in (0, -1, float("nan")):
        with pytest.raises(DispatcherError, match="cannot exist"):
            Link(bad)
    with pytest.raises(DispatcherError, match=r"a latency of -1 s cannot exist"):
        Link(1, latency=-1)


def test_a_sleep_ends_on_time() -> None:
    late = []
    for _ in range(15):
        moment = time.perf_counter() + 0.002
        sleep_until(moment)
        late.append(time.perf_counter() - moment)
    assert min(late) >= 0
    # The best of fifteen: another process may take the core at any time.
    assert min(late) < 0.0005
    sleep_until(time.perf_counter() - 1)


@pytest.mark.timeout(60)
def test_a_link_delays_real_exchanges() -> None:
    for seconds, blocked, hidden in values(run_ranks(2, exchange_over_a_link)):
        # Two transfers of 20 ms each, nothing to hide them behind, then two behind 50 ms of other work.
        assert 0.04 <= seconds < 0.2
        assert blocked >= 0.039
        assert hidden > 0.9


def exchange_over_a_link() -> tuple[float, float, float]:
    peers = Peers(None, sub_batches=1, timeout=20.0)
    row_bytes = 8 * 4
    link = Link(2 * row_bytes / 0.02 / 1e9)
    (dispatcher,) = create_dispatchers("all_to_all", num_experts=2, sub_batches=1, peers=peers, link=link)
    ids_TK, weights_TK = torch.full((2, 1), 1 - peers.rank), torch.ones(2, 1)
    rows_TH = torch.ones(2, 8)
    began = time.perf_counter()
    received, ticket = dispatcher.dispatch_b(dispatcher.dispatch_a(rows_TH, ids_TK, weights_TK))
    dispatcher.combine_b(dispatcher.combine_a(received.rows_RH, ticket))
    seconds, blocked = time.perf_counter() - began, dispatcher.stats.blocked_seconds
    dispatcher.stats.reset()
    pending = dispatcher.dispatch_a(rows_TH, ids_TK, weights_TK)
    time.sleep(0.05)
    received, ticket = dispatcher.dispatch_b(pending)
    combining = dispatcher.combine_a(received.rows_RH, ticket)
    time.sleep(0.05)
    dispatcher.combine_b(combining)
    return seconds, blocked, dispatcher.stats.hidden_share or 0.0


def test_totals_of_nothing() -> None:
    assert total([]).hidden_share is None
    stats = CommunicationStats()
    record = TransferRecord(
        what="dispatch", sub_batch=0, issued=1.0, done=3.0, blocked=0.5, sent_bytes=1, received_bytes=2
    )
    stats.add(record)
    assert total([stats, CommunicationStats()]).hidden_share == pytest.approx(0.75)
