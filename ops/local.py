"""The dispatcher of a single rank: nothing moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tbo.core import Pending
from tbo.errors import DispatcherError, InternalError
from tbo.kernels.permute import gather_rows, group_by_expert, weighted_sum
from tbo.ops.communication_stats import CommunicationStats
from tbo.ops.dispatch import Limits, Received, Ticket, check_routing, refuse_wrong_outputs

if TYPE_CHECKING:
    from tbo.ops.peers import Peers


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalTicket(Ticket):
    """Where rows that were grouped because some pairs reach no expert go back; None if the tokens stayed as they are.

    Attributes:
        num_rows: outputs expected.
        order_R: pair number of each row.
        weights_TK: routing weights, 0 where a pair reaches no expert.
    """

    num_rows: int
    order_R: Tensor | None
    weights_TK: Tensor | None


class LocalDispatcher:
    """Hands the tokens over as they are, so that experts compute exactly what the plain model computes.

    Only if a pair reaches no expert (id -1) are rows grouped by expert, without those pairs: the experts of a plain
    model take -1 for an index.
    """

    limits = Limits(channel="ep", capturable=True)

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self.stats = CommunicationStats()

    def dispatch_a(
        self, rows_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[Received, Ticket]]:
        """See `Dispatcher`."""
        check_routing(rows_TH, topk_ids_TK, topk_weights_TK, self._num_experts)
        on_cpu = rows_TH.device.type == "cpu"
        if on_cpu and topk_ids_TK.numel() and int(topk_ids_TK.min()) < 0:
            handed_over = self._without_dropped_pairs(rows_TH, topk_ids_TK, topk_weights_TK)
        else:
            received = Received(
                rows_RH=rows_TH,
                expert_ids_RK=topk_ids_TK.long(),
                expert_weights_RK=topk_weights_TK,
                group_ends_L=None,
            )
            num_tokens = rows_TH.shape[0]
            handed_over = (
                received,
                LocalTicket(num_tokens=num_tokens, num_rows=num_tokens, order_R=None, weights_TK=None),
            )
        return Pending(lambda: handed_over)

    def dispatch_b(self, pending: Pending[tuple[Received, Ticket]]) -> tuple[Received, Ticket]:
        """See `Dispatcher`."""
        return pending.wait()

    def combine_a(self, rows_RH: Tensor, ticket: Ticket) -> Pending[Tensor]:
        """See `Dispatcher`. Tokens that stayed as they are come back weighed and summed by the experts."""
        if not isinstance(ticket, LocalTicket):
            raise InternalError(f"the local dispatcher was given a {type(ticket).__name__}")
        refuse_wrong_outputs(rows_RH, ticket.num_rows)
        order_R, weights_TK = ticket.order_R, ticket.weights_TK
        if order_R is None or weights_TK is None:
            return Pending(lambda: rows_RH)
        return Pending(lambda: weighted_sum(rows_RH, order_R, weights_TK))

    def combine_b(self, pending: Pending[Tensor]) -> Tensor:
        """See `Dispatcher`."""
        return pending.wait()

    def _without_dropped_pairs(
        self, rows_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> tuple[Received, Ticket]:
        grouping = group_by_expert(topk_ids_TK, self._num_experts)
        order_R = grouping.order_P[: int(grouping.counts_E.sum())]
        ids_R1 = topk_ids_TK.reshape(-1, 1).long().index_select(0, order_R)
        received = Received(
            rows_RH=gather_rows(rows_TH, order_R, topk_ids_TK.shape[1]),
            expert_ids_RK=ids_R1,
            expert_weights_RK=torch.ones_like(ids_R1, dtype=topk_weights_TK.dtype),
            group_ends_L=grouping.counts_E.cumsum(0).int(),
        )
        ticket = LocalTicket(
            num_tokens=rows_TH.shape[0],
            num_rows=len(order_R),
            order_R=order_R,
            weights_TK=topk_weights_TK.masked_fill(topk_ids_TK < 0, 0.0),
        )
        return received, ticket


def create(*, num_experts: int, sub_batches: int, peers: Peers | None) -> list[LocalDispatcher]:
    """One dispatcher for each sub-batch.

    Raises:
        DispatcherError: there are several ranks, whose experts would never be reached.
    """
    if peers is not None and peers.world_size > 1:
        raise DispatcherError(
            f"the local dispatcher serves one rank, but this expert-parallel group has {peers.world_size}",
            remedy="Use dispatcher='all_to_all' or 'auto'.",
        )
    return [LocalDispatcher(num_experts) for _ in range(sub_batches)]
