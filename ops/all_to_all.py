"""Dispatch and combine over all-to-all exchanges of `torch.distributed`: gloo on the CPU, NCCL on CUDA.

A token's row is sent once for each of its experts (top-k copies at most). Ranks first tell each other how many rows go
to which of their experts, so that nothing has to travel with a row to say where it belongs.

On the CPU everything is issued in the `_a` halves: the thread that issues is the one that computes, and what it issues
in `_b` it then waits for without having hidden anything. On CUDA (`tbo.ops.all_to_all_cuda`) counts start in `_a` and
rows leave in `_b`, where the host first waits for the counts.

Shape letters: T tokens of this rank, K top-k, E experts (all), L local experts, W ranks, H hidden, S rows sent,
R rows received.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from tbo.core import Pending
from tbo.errors import DispatcherError, InternalError
from tbo.kernels.permute import gather_rows, group_by_expert, weighted_sum
from tbo.ops.communication_stats import CommunicationStats, TransferRecord
from tbo.ops.dispatch import Dispatcher, Limits, Received, Ticket, Transfer, check_routing, refuse_wrong_outputs

if TYPE_CHECKING:
    from tbo.ops.peers import Peers
    from tbo.ops.rendezvous import Group

T = TypeVar("T")

CHANNEL = "ep"


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """One dispatch's rows on their way out.

    Attributes:
        order_P: pair numbers grouped by expert, those that reach none last.
        counts_E: rows this rank sends to each expert.
        weights_TK: routing weights, 0 where a pair reaches no expert.
    """

    order_P: Tensor
    counts_E: Tensor
    weights_TK: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AllToAllTicket(Ticket):
    """The way back of one dispatch.

    Attributes:
        order_S: pair number of each row sent.
        arrival_R: for each row the experts got, its place among the rows as they arrived.
        sent, received: rows to and from each rank.
        weights_TK: routing weights, 0 where a pair reaches no expert.
    """

    order_S: Tensor
    arrival_R: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    weights_TK: Tensor


def route(topk_ids_TK: Tensor, topk_weights_TK: Tensor, num_experts: int) -> Routed:
    """Groups the pairs of this rank by expert; ranks hold consecutive experts, so this is also by rank."""
    grouping = group_by_expert(topk_ids_TK, num_experts)
    return Routed(
        order_P=grouping.order_P,
        counts_E=grouping.counts_E,
        weights_TK=topk_weights_TK.masked_fill(topk_ids_TK < 0, 0.0),
    )


def arrange_by_expert(
    arrived_RH: Tensor, counts_WL: Tensor, dtype: torch.dtype, weights_dtype: torch.dtype
) -> tuple[Received, Tensor]:
    """Rows that arrived by (source rank, local expert), put in order of (local expert, source rank).

    Args:
        arrived_RH: the rows as they arrived (and as they were transported).
        counts_WL: rows from each rank for each local expert, on the rows' device.
        dtype: what the rows are.
        weights_dtype: dtype of the ones that stand for the sender's weights.

    Returns:
        What the experts get, and for each of their rows its place in `arrived_RH`.
    """
    num_ranks, num_local = counts_WL.shape
    expert_of_block = torch.arange(num_local, device=arrived_RH.device).repeat(num_ranks)
    expert_of_row_R = expert_of_block.repeat_interleave(counts_WL.reshape(-1), output_size=arrived_RH.shape[0])
    arrival_R = torch.argsort(expert_of_row_R, stable=True)
    received = Received(
        rows_RH=arrived_RH.index_select(0, arrival_R).view(dtype),
        expert_ids_RK=expert_of_row_R.index_select(0, arrival_R).unsqueeze(1),
        expert_weights_RK=torch.ones(arrived_RH.shape[0], 1, dtype=weights_dtype, device=arrived_RH.device),
        group_ends_L=counts_WL.sum(0).cumsum(0).int(),
    )
    return received, arrival_R


def as_they_arrived(rows_RH: Tensor, arrival_R: Tensor) -> Tensor:
    """Undoes `arrange_by_expert`: each output at the place where its row arrived, ready for transport."""
    rows_RH = as_transported(rows_RH.detach())
    return torch.empty_like(rows_RH, memory_format=torch.contiguous_format).index_copy_(0, arrival_R, rows_RH)


def as_transported(rows: Tensor) -> Tensor:
    """One-byte floats travel as bytes: gloo does not know them, and indexing them is not built everywhere either."""
    is_byte_float = rows.is_floating_point() and rows.element_size() == 1
    return rows.contiguous().view(torch.uint8) if is_byte_float else rows


def rows_per_rank(counts_E: Tensor, num_local: int) -> list[int]:
    """Rows for each rank, given rows for each expert (on the host)."""
    return counts_E.view(-1, num_local).sum(1).tolist()


def own_ticket(ticket: Ticket, rows_RH: Tensor) -> AllToAllTicket:
    """The ticket, once it is sure that it is ours and fits the outputs."""
    if not isinstance(ticket, AllToAllTicket):
        raise InternalError(f"the all_to_all dispatcher was given a {type(ticket).__name__}")
    refuse_wrong_outputs(rows_RH, sum(ticket.received))
    return ticket


def bytes_off_rank(rows_per_rank: Sequence[int], own_rank: int, row: Tensor) -> int:
    """Bytes of all rows but those that stay on this rank; `row` is any tensor of such rows."""
    return (sum(rows_per_rank) - rows_per_rank[own_rank]) * row.shape[1] * row.element_size()


class AllToAllDispatcher:
    """The dispatcher of one sub-batch over a gloo group. Rows on a device go through the host. See `Dispatcher`."""

    limits = Limits(channel=CHANNEL, issues_in="a", blocks_host="a")

    def __init__(self, *, num_experts: int, sub_batch: int, peers: Peers) -> None:
        self._num_experts = num_experts
        self._num_local = num_experts // peers.world_size
        self._sub_batch = sub_batch
        self._peers = peers
        self._group: Group = peers.data[sub_batch]
        self.stats = CommunicationStats()

    def dispatch_a(
        self, rows_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[Received, Ticket]]:
        """See `Dispatcher`. Waits for the other ranks' counts."""
        check_routing(rows_TH, topk_ids_TK, topk_weights_TK, self._num_experts)
        device, dtype, weights_dtype = rows_TH.device, rows_TH.dtype, topk_weights_TK.dtype
        routed = route(topk_ids_TK, topk_weights_TK, self._num_experts)
        counts_E = routed.counts_E.cpu()
        counts_WL = self._exchange_counts(counts_E)
        sent, received = rows_per_rank(counts_E, self._num_local), counts_WL.sum(1).tolist()
        order_S = routed.order_P[: sum(sent)]
        rows_SH = gather_rows(as_transported(rows_TH.detach()), order_S, topk_ids_TK.shape[1]).cpu()
        arrived_RH = rows_SH.new_empty(sum(received), rows_SH.shape[1])
        num_tokens = rows_TH.shape[0]

        def unpack() -> tuple[Received, Ticket]:
            handed_over, arrival_R = arrange_by_expert(
                arrived_RH.to(device), counts_WL.to(device), dtype, weights_dtype
            )
            ticket = AllToAllTicket(
                num_tokens=num_tokens,
                order_S=order_S,
                arrival_R=arrival_R,
                sent=tuple(sent),
                received=tuple(received),
                weights_TK=routed.weights_TK,
            )
            return handed_over, ticket

        return self._transfer("dispatch", rows_SH, arrived_RH, sent, received, unpack)

    def dispatch_b(self, pending: Pending[tuple[Received, Ticket]]) -> tuple[Received, Ticket]:
        """See `Dispatcher`."""
        return pending.wait()

    def combine_a(self, rows_RH: Tensor, ticket: Ticket) -> Pending[Tensor]:
        """See `Dispatcher`."""
        way_back = own_ticket(ticket, rows_RH)
        device, dtype = rows_RH.device, rows_RH.dtype
        back_RH = as_they_arrived(rows_RH, way_back.arrival_R).cpu()
        returned_SH = back_RH.new_empty(sum(way_back.sent), back_RH.shape[1])

        def unpack() -> Tensor:
            return weighted_sum(returned_SH.to(device).view(dtype), way_back.order_S, way_back.weights_TK)

        return self._transfer("combine", back_RH, returned_SH, list(way_back.received), list(way_back.sent), unpack)

    def combine_b(self, pending: Pending[Tensor]) -> Tensor:
        """See `Dispatcher`."""
        return pending.wait()

    def _exchange_counts(self, counts_E: Tensor) -> Tensor:
        """Rows that each rank has for each local expert of this one, ``[W, L]``."""
        began = time.perf_counter()
        received_E = torch.empty_like(counts_E)
        exchange = self._peers.exchange(self._group, received_E, counts_E, [], [])
        self._peers.wait(exchange, f"the row counts of dispatch, sub-batch {self._sub_batch}")
        self.stats.add_counts(time.perf_counter() - began)
        return received_E.view(-1, self._num_local)

    def _transfer(
        self,
        what: str,
        rows: Tensor,
        arrived: Tensor,
        sent: list[int],
        received: list[int],
        unpack: Callable[[], T],
    ) -> Pending[T]:
        """Issues an exchange of rows; `sent` and `received` count them for each rank."""
        sent_bytes = bytes_off_rank(sent, self._peers.rank, rows)
        received_bytes = bytes_off_rank(received, self._peers.rank, rows)
        exchange = self._peers.exchange(self._group, arrived, rows, received, sent)
        issued = time.perf_counter()

        def arrive() -> None:
            asked = time.perf_counter()
            self._peers.wait(exchange, f"the rows of {what}, sub-batch {self._sub_batch}")
            done = time.perf_counter()
            record = TransferRecord(
                what=what,
                sub_batch=self._sub_batch,
                issued=issued,
                done=done,
                blocked=done - asked,
                sent_bytes=sent_bytes,
                received_bytes=received_bytes,
            )
            self.stats.add(record)

        return Transfer(arrive, unpack, (rows, arrived), sent_bytes=sent_bytes, received_bytes=received_bytes)


def create(*, num_experts: int, sub_batches: int, peers: Peers | None) -> Sequence[Dispatcher]:
    """One dispatcher for each sub-batch, each on a data group of its own.

    Raises:
        DispatcherError: no ranks, too few data groups, or experts that cannot be shared equally.
    """
    if peers is None:
        raise DispatcherError(
            "the all_to_all dispatcher has no ranks to exchange tokens with",
            remedy="Pass ep_group, or use dispatcher='local'.",
        )
    if num_experts < 1 or num_experts % peers.world_size:
        raise DispatcherError(
            f"{num_experts} experts cannot be shared equally by the {peers.world_size} ranks of this group",
            remedy="Use a group whose size divides the number of experts.",
        )
    if sub_batches > len(peers.data):
        raise DispatcherError(
            f"{sub_batches} sub-batches need as many data groups, but the ranks set up {len(peers.data)}",
            remedy="Set up the group with sub_batches as large as the plan's.",
        )
    if peers.transport == "nccl":
        from tbo.ops.all_to_all_cuda import CudaAllToAllDispatcher

        return [CudaAllToAllDispatcher(num_experts=num_experts, sub_batch=i, peers=peers) for i in range(sub_batches)]
    return [AllToAllDispatcher(num_experts=num_experts, sub_batch=i, peers=peers) for i in range(sub_batches)]
