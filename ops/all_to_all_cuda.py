"""The all-to-all dispatcher for rows on a CUDA device, over an NCCL group.

Counts start in `_a`. Rows leave in `_b`, where the host first waits for the counts: by then it has launched the other
sub-batch's kernels, which run while the rows travel. What a lane (this dispatcher's stream) may start is ordered by
events recorded in `_a`, not by what else was launched since.

Not run yet: no GPU was at hand when it was written. The order of streams, and why no `record_stream` is needed, is
argued where it matters.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tbo.core import Pending
from tbo.kernels.permute import gather_rows, weighted_sum
from tbo.ops.all_to_all import (
    CHANNEL,
    AllToAllTicket,
    Routed,
    arrange_by_expert,
    as_they_arrived,
    as_transported,
    own_ticket,
    route,
    rows_per_rank,
)
from tbo.ops.communication_stats import CommunicationStats
from tbo.ops.dispatch import Limits, Received, Ticket, check_routing

if TYPE_CHECKING:
    from tbo.ops.peers import Exchange, Peers


class CudaAllToAllDispatcher:
    """The dispatcher of one sub-batch on a CUDA device. See `Dispatcher` for the four calls."""

    limits = Limits(channel=CHANNEL, issues_in="b", blocks_host="b")

    def __init__(self, *, num_experts: int, sub_batch: int, peers: Peers) -> None:
        self._num_experts = num_experts
        self._num_local = num_experts // peers.world_size
        self._sub_batch = sub_batch
        self._peers = peers
        self._group = peers.data[sub_batch]
        self._lane = torch.cuda.Stream()
        # Recorded anew by each transfer: a sub-batch has one at a time.
        self._ready, self._counted, self._arrived = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()
        self.stats = CommunicationStats()

    def dispatch_a(
        self, rows_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[Received, Ticket]]:
        """See `Dispatcher`. Starts the exchange of counts and their copy to the host; waits for neither."""
        check_routing(rows_TH, topk_ids_TK, topk_weights_TK, self._num_experts)
        routed = route(topk_ids_TK, topk_weights_TK, self._num_experts)
        # Only the device knows how many pairs reach an expert, so all are gathered; those that reach none come last.
        rows_PH = gather_rows(as_transported(rows_TH.detach()), routed.order_P, topk_ids_TK.shape[1])
        counts_2E = torch.stack((routed.counts_E, torch.empty_like(routed.counts_E)))
        on_host_2E = torch.empty(counts_2E.shape, dtype=torch.int64, pin_memory=True)
        self._ready.record()
        with torch.cuda.stream(self._lane):
            self._lane.wait_event(self._ready)
            exchange = self._peers.exchange(self._group, counts_2E[1], counts_2E[0], [], [])
            self._peers.wait_on_stream(exchange)
            on_host_2E.copy_(counts_2E, non_blocking=True)
            self._counted.record()
        num_tokens, dtype, weights_dtype = rows_TH.shape[0], rows_TH.dtype, topk_weights_TK.dtype

        def finish() -> tuple[Received, Ticket]:
            self._wait_for_counts(exchange)
            sent = rows_per_rank(on_host_2E[0], self._num_local)
            received = rows_per_rank(on_host_2E[1], self._num_local)
            arrived_RH = self._exchange_rows(rows_PH[: sum(sent)], None, sent, received)
            counts_WL = counts_2E[1].view(-1, self._num_local)
            handed_over, arrival_R = arrange_by_expert(arrived_RH, counts_WL, dtype, weights_dtype)
            return handed_over, _ticket(num_tokens, routed, arrival_R, sent, received)

        return Pending(finish, (rows_PH, counts_2E, on_host_2E))

    def dispatch_b(self, pending: Pending[tuple[Received, Ticket]]) -> tuple[Received, Ticket]:
        """See `Dispatcher`. The host waits for the counts."""
        return pending.wait()

    def combine_a(self, rows_RH: Tensor, ticket: Ticket) -> Pending[Tensor]:
        """See `Dispatcher`. Lays the rows out; they leave in `combine_b`."""
        way_back = own_ticket(ticket, rows_RH)
        dtype = rows_RH.dtype
        back_RH = as_they_arrived(rows_RH, way_back.arrival_R)
        # Of known size, so it is allocated on the compute stream, ahead of the event the lane waits for.
        returned_SH = back_RH.new_empty(sum(way_back.sent), back_RH.shape[1])
        self._ready.record()

        def finish() -> Tensor:
            self._exchange_rows(back_RH, returned_SH, list(way_back.received), list(way_back.sent))
            return weighted_sum(returned_SH.view(dtype), way_back.order_S, way_back.weights_TK)

        return Pending(finish, (back_RH, returned_SH))

    def combine_b(self, pending: Pending[Tensor]) -> Tensor:
        """See `Dispatcher`. The host does not wait."""
        return pending.wait()

    def _wait_for_counts(self, exchange: Exchange) -> None:
        began = time.perf_counter()
        what = f"the row counts of dispatch, sub-batch {self._sub_batch}"
        self._peers.wait_until(self._counted.query, exchange, what)
        self.stats.add_counts(time.perf_counter() - began)

    def _exchange_rows(self, rows: Tensor, arrived: Tensor | None, sent: list[int], received: list[int]) -> Tensor:
        """Sends rows on the lane and makes the compute stream wait for what comes.

        What the lane reads was allocated on the compute stream and is held until that stream waits for the lane. What
        is allocated on the lane is read by the compute stream before the next `_a` records the event that the lane's
        next use, and so the next use of that memory, waits for.
        """
        with torch.cuda.stream(self._lane):
            self._lane.wait_event(self._ready)
            if arrived is None:
                arrived = rows.new_empty(sum(received), rows.shape[1])
            self._peers.wait_on_stream(self._peers.exchange(self._group, arrived, rows, received, sent))
            self._arrived.record()
        torch.cuda.current_stream().wait_event(self._arrived)
        return arrived


def _ticket(num_tokens: int, routed: Routed, arrival_R: Tensor, sent: list[int], received: list[int]) -> AllToAllTicket:
    return AllToAllTicket(
        num_tokens=num_tokens,
        order_S=routed.order_P[: sum(sent)],
        arrival_R=arrival_R,
        sent=tuple(sent),
        received=tuple(received),
        weights_TK=routed.weights_TK,
    )
