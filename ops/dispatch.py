"""Dispatchers: they move tokens to the ranks of their experts, and the experts' outputs back.

What all of them share: the records they hand over, the limits they declare, the checks of what routing gives them, and
how they are found by name. Each transport has a file of its own, loaded when it is asked for.

Shape letters: T tokens of this rank, K top-k, E experts (all), L local experts, H hidden, R received rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from tbo.core import Pending
from tbo.errors import DispatcherError
from tbo.ops.communication_stats import CommunicationStats

if TYPE_CHECKING:
    from tbo.ops.link import Link
    from tbo.ops.peers import Peers

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """What the experts of this rank get to compute.

    Either exchanged rows (one a pair of a token and a local expert, contiguous by expert, within an expert by source
    rank and then in the source's order; K is 1 and the weights are ones, because the sender weighs) or, if nothing
    moved, the tokens themselves with their whole routing.

    Attributes:
        rows_RH: the rows.
        expert_ids_RK: *local* expert ids, int64; -1 names none.
        expert_weights_RK: weights to multiply the outputs with.
        group_ends_L: end offset of each local expert's rows, int32; None if the rows are the tokens themselves.
    """

    rows_RH: Tensor
    expert_ids_RK: Tensor
    expert_weights_RK: Tensor
    group_ends_L: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """What combine needs and dispatch knows. Belongs to one dispatch of one dispatcher; each adds what it needs."""

    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a dispatcher can and cannot do. None means no limit.

    Attributes:
        channel: the shared buffer or link on which its communications queue.
        in_flight: how many communications the channel takes at once, all sub-batches together.
        max_tokens: tokens of one rank in one dispatch, un-split steps included.
        hidden_sizes, dtypes, world_sizes: those it takes.
        issues_in: the half that hands rows to the transport, the same for dispatch and combine.
        blocks_host: the half of dispatch in which the host waits for other ranks' counts.
        capturable: may run in a CUDA graph.
    """

    channel: str
    in_flight: int | None = None
    max_tokens: int | None = None
    hidden_sizes: frozenset[int] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    world_sizes: frozenset[int] | None = None
    issues_in: Literal["a", "b"] = "a"
    blocks_host: Literal["a", "b"] | None = None
    capturable: bool = False


class Transfer(Pending[T], Generic[T]):
    """A pending transfer that knows its size and can be waited for without unpacking, for whoever models or draws it.

    Args:
        arrive: waits until the rows are there.
        unpack: makes the result out of them.
        holds: what the transport reads and writes until then.

    Attributes:
        sent_bytes, received_bytes: to and from *other* ranks.
    """

    __slots__ = ("_arrive", "received_bytes", "sent_bytes")

    def __init__(
        self,
        arrive: Callable[[], None],
        unpack: Callable[[], T],
        holds: tuple[object, ...] = (),
        *,
        sent_bytes: int,
        received_bytes: int,
    ) -> None:
        super().__init__(unpack, holds)
        self._arrive: Callable[[], None] | None = arrive
        self.sent_bytes = sent_bytes
        self.received_bytes = received_bytes

    def arrive(self) -> None:
        """Waits until the rows are there; only the first call does anything."""
        arrive, self._arrive = self._arrive, None
        if arrive is not None:
            arrive()

    def wait(self) -> T:
        """Waits for the rows and unpacks them."""
        self.arrive()
        return super().wait()


class Dispatcher(Protocol):
    """Moves one sub-batch's tokens. No gradient passes through; training across ranks is refused elsewhere."""

    @property
    def limits(self) -> Limits:
        """What it can do, fixed for its lifetime."""
        ...

    @property
    def stats(self) -> CommunicationStats:
        """Counters since their last `reset`."""
        ...

    def dispatch_a(
        self, rows_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[Received, Ticket]]:
        """Starts sending each token to its experts' ranks.

        Args:
            rows_TH: the tokens, any strides.
            topk_ids_TK: expert ids of the whole model, -1 for a pair (of a padding row, say) that reaches no expert.
            topk_weights_TK: routing weights in float32 or the model's dtype.

        Raises:
            DispatcherError: shapes, dtypes, devices or values that routing cannot have given.
        """
        ...

    def dispatch_b(self, pending: Pending[tuple[Received, Ticket]]) -> tuple[Received, Ticket]:
        """Ends it: what this rank's experts compute, and the ticket for the way back."""
        ...

    def combine_a(self, rows_RH: Tensor, ticket: Ticket) -> Pending[Tensor]:
        """Starts sending the experts' outputs, in the order of `Received.rows_RH`, back to their tokens' ranks."""
        ...

    def combine_b(self, pending: Pending[Tensor]) -> Tensor:
        """Ends it: ``[T, H]``, summed over the top-k with the routing weights, in the dtype of the outputs."""
        ...


_BUILT = MappingProxyType({"local": "tbo.ops.local", "all_to_all": "tbo.ops.all_to_all"})
"""Name -> the module whose `create` makes this kind's dispatchers."""

_PLANNED = MappingProxyType(
    {
        "deepep": "DeepEP's normal mode over NVLink and RDMA",
        "deepep_low_latency": "DeepEP's low-latency mode, for decode",
        "deepep_elastic": "DeepEP V2",
        "flashinfer": "FlashInfer's all-to-all within one NVLink node",
        "all_gather": "all-gather and reduce-scatter, for data-parallel attention without expert parallelism",
        "loopback": "one GPU that plays one rank of a group, for benchmarks",
    }
)
"""Name -> what it will be. Known, so that asking for one is answered with more than "unknown"."""

NAMES: tuple[str, ...] = ("auto", *_BUILT, *_PLANNED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Whether a dispatcher can be used here, and if not, why."""

    name: str
    usable: bool
    why: str


def status(name: str) -> Status:
    """What `tbo doctor` says about a dispatcher.

    Raises:
        DispatcherError: no dispatcher of that name exists or is planned.
    """
    if name == "auto":
        return Status(name=name, usable=True, why="local on one rank, all_to_all on several")
    if name in _PLANNED:
        return Status(name=name, usable=False, why=f"not built yet in this version: {_PLANNED[name]}")
    if name == "local":
        return Status(name=name, usable=True, why="one rank, nothing moves")
    if name == "all_to_all":
        if not torch.distributed.is_available():
            return Status(name=name, usable=False, why="this torch was built without torch.distributed")
        transports = "gloo" + (" and NCCL" if torch.distributed.is_nccl_available() else "")
        return Status(name=name, usable=True, why=f"torch.distributed over {transports}")
    raise _unknown(name)


def create_dispatchers(
    name: str, *, num_experts: int, sub_batches: int, peers: Peers | None, link: Link | None = None
) -> tuple[Dispatcher, ...]:
    """One dispatcher for each sub-batch, all on one channel.

    Args:
        name: one of `NAMES`.
        num_experts: experts of the whole model.
        sub_batches: how many are made.
        peers: the ranks that share them; None for one rank.
        link: delays completions to those of a modelled link.

    Raises:
        DispatcherError: unknown or not built, or the group and the experts do not fit it.
    """
    chosen = name
    if name == "auto":
        chosen = "local" if peers is None or peers.world_size == 1 else "all_to_all"
    if chosen not in _BUILT:
        if chosen not in _PLANNED:
            raise _unknown(name)
        raise DispatcherError(
            f"dispatcher {name!r} ({_PLANNED[chosen]}) is not built yet in this version",
            remedy=f"Use 'auto', or one of: {', '.join(_BUILT)}.",
        )
    module = importlib.import_module(_BUILT[chosen])
    dispatchers: Sequence[Any] = module.create(num_experts=num_experts, sub_batches=sub_batches, peers=peers)
    return tuple(dispatchers if link is None else link.wrap(dispatchers))


def check_routing(rows_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, num_experts: int) -> None:
    """Refuses what would send a token to a wrong expert or weigh it wrongly.

    Values are checked on the CPU only: on a GPU every look at them would make the host wait.

    Raises:
        DispatcherError: names what is wrong, and the first token it is wrong for.
    """
    _check_form(rows_TH, topk_ids_TK, topk_weights_TK)
    if rows_TH.device.type != "cpu" or topk_ids_TK.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in torch.aminmax(topk_ids_TK))
    if lowest < -1 or highest >= num_experts:
        wrong_TK = (topk_ids_TK < -1) | (topk_ids_TK >= num_experts)
        token, place = (int(index) for index in wrong_TK.nonzero()[0])
        raise DispatcherError(
            f"token {token} is routed to expert {int(topk_ids_TK[token, place])}, but there are experts 0 to "
            f"{num_experts - 1} (and -1 for none)",
            remedy="Check the router's output, and that num_experts is the whole model's.",
        )
    # One reduction instead of a mask: a sum is NaN if anything in it is; the mask is only needed to say where.
    if bool(topk_weights_TK.sum().isnan()):
        wrong_TK = topk_weights_TK.isnan() & (topk_ids_TK >= 0)
        if bool(wrong_TK.any()):
            raise DispatcherError(
                f"the routing weights of token {int(wrong_TK.nonzero()[0, 0])} hold NaN",
                remedy="Look for NaN in the hidden states before the router.",
            )


def _check_form(rows_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> None:
    shapes = (
        f"rows {list(rows_TH.shape)}, topk_ids {list(topk_ids_TK.shape)}, topk_weights {list(topk_weights_TK.shape)}"
    )
    fits = rows_TH.dim() == topk_ids_TK.dim() == 2 and topk_ids_TK.shape == topk_weights_TK.shape
    if not fits or rows_TH.shape[0] != topk_ids_TK.shape[0] or topk_ids_TK.shape[1] == 0:
        raise DispatcherError(
            f"{shapes} do not belong together", remedy="Pass rows [T, H] with topk_ids and topk_weights [T, K]."
        )
    if topk_ids_TK.dtype not in (torch.int32, torch.int64) or not topk_weights_TK.is_floating_point():
        raise DispatcherError(
            f"topk_ids are {topk_ids_TK.dtype} and topk_weights {topk_weights_TK.dtype}",
            remedy="Pass ids as int32 or int64 and weights as a floating dtype.",
        )
    devices = {str(tensor.device) for tensor in (rows_TH, topk_ids_TK, topk_weights_TK)}
    if len(devices) > 1:
        raise DispatcherError(
            f"rows are on {rows_TH.device}, topk_ids on {topk_ids_TK.device}, topk_weights on {topk_weights_TK.device}",
            remedy="Put them on one device.",
        )


def refuse_wrong_outputs(rows_RH: Tensor, expected_rows: int) -> None:
    """Raises DispatcherError if the experts' outputs are not one row for each row they were given."""
    if rows_RH.dim() != 2 or rows_RH.shape[0] != expected_rows:
        raise DispatcherError(
            f"the experts returned {list(rows_RH.shape)} for {expected_rows} rows",
            remedy="Return one output row for each received row, in the same order.",
        )


def _unknown(name: str) -> DispatcherError:
    return DispatcherError(f"there is no dispatcher {name!r}", remedy=f"Use one of: {', '.join(NAMES)}.")
