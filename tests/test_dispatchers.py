"""Dispatchers move every token to its experts and back, whatever the counts; a link delays them to a model's time."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import run_ranks, values
from tbo.errors import DispatcherError, InternalError, PeerError
from tbo.ops.dispatch import NAMES, Received, Ticket, create_dispatchers, status
from tbo.ops.local import LocalDispatcher
from tbo.ops.peers import Peers

EXPERTS = 8
HIDDEN = 16


@dataclass(frozen=True, slots=True)
class Case:
    """One dispatch on every rank: `tokens[rank]` rows, routed by `routing`."""

    name: str
    tokens: tuple[int, ...] = (5, 0, 7, 1)
    top_k: int = 2
    routing: str = "random"
    dtype: torch.dtype = torch.float32
    weights_dtype: torch.dtype = torch.float32
    strided: bool = False


CASES = (
    Case("plain"),
    Case("no tokens on any rank", tokens=(0, 0, 0, 0)),
    Case("one rank has all tokens", tokens=(0, 33, 0, 0)),
    Case("many tokens", tokens=(300, 105, 7, 211), top_k=4),
    Case("all to one expert of one rank", routing="one expert"),
    Case("one expert several times in a token's top-k", routing="duplicates", top_k=4),
    Case("top-1", top_k=1),
    Case("padding rows reach no expert", routing="padding"),
    Case("no pair of any rank reaches an expert", routing="none"),
    Case("bfloat16 rows, float32 weights", dtype=torch.bfloat16),
    Case("bfloat16 rows and weights", dtype=torch.bfloat16, weights_dtype=torch.bfloat16),
    Case("float16 rows", dtype=torch.float16),
    Case("float64 rows", dtype=torch.float64),
    Case("float8 rows", dtype=torch.float8_e4m3fn),
    Case("strided rows, ids and weights", strided=True),
)


def routing_of(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, ids and weights whose products and sums are exact in every dtype, so that outputs must be equal."""
    random = torch.Generator().manual_seed(100 * rank + len(case.name))
    count, top_k = case.tokens[rank], case.top_k
    rows_TH = torch.randint(-2, 3, (count, HIDDEN), generator=random).to(case.dtype)
    ids_TK = torch.randint(0, EXPERTS, (count, top_k), generator=random)
    if case.routing == "one expert":
        ids_TK = torch.full_like(ids_TK, 5)
    elif case.routing == "duplicates":
        ids_TK = ids_TK[:, :1].expand(count, top_k).clone()
    elif case.routing == "padding":
        ids_TK[1::2] = -1
        ids_TK[::3, 0] = -1
    elif case.routing == "none":
        ids_TK = torch.full_like(ids_TK, -1)
    weights_TK = torch.tensor([0.5, 0.25, 1.0])[torch.randint(0, 3, (count, top_k), generator=random)]
    # What stands beside an id of -1 must not matter.
    weights_TK = weights_TK.masked_fill(ids_TK < 0, float("nan")).to(case.weights_dtype)
    if case.strided:
        return rows_TH.t().contiguous().t(), ids_TK.t().contiguous().t(), weights_TK.t().contiguous().t()
    return rows_TH, ids_TK, weights_TK


def expert(rows: Tensor, ids: Tensor) -> Tensor:
    """Expert e multiplies by e % 4 - 1 and adds e % 3: exact, and different for neighbours."""
    factors, terms = (ids % 4 - 1).to(torch.float32), (ids % 3).to(torch.float32)
    return (rows.float() * factors + terms).to(rows.dtype)


def expected_output(rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    output_TH = torch.zeros(rows_TH.shape, dtype=torch.float64)
    for k in range(ids_TK.shape[1]):
        chosen_T1 = ids_TK[:, k : k + 1]
        term_TH = weights_TK[:, k : k + 1].double() * expert(rows_TH, chosen_T1).double()
        output_TH += torch.where(chosen_T1 < 0, 0.0, term_TH)
    return output_TH.to(rows_TH.dtype)


def run_experts(received: Received, first_expert: int) -> Tensor:
    """What op_experts does: rows times weights, summed over K."""
    terms = [
        expert(received.rows_RH, received.expert_ids_RK[:, k : k + 1] + first_expert).double()
        * received.expert_weights_RK[:, k : k + 1].double()
        for k in range(received.expert_ids_RK.shape[1])
    ]
    return torch.stack(terms).sum(0).to(received.rows_RH.dtype)


def check_order(received: Received, num_local: int) -> None:
    """Rows are contiguous by local expert, and the end offsets say where."""
    ids = received.expert_ids_RK[:, 0]
    assert received.expert_ids_RK.shape == (len(received.rows_RH), 1)
    assert torch.equal(ids, ids.sort(stable=True).values)
    assert received.group_ends_L is not None
    assert received.group_ends_L.dtype is torch.int32
    assert received.group_ends_L.tolist() == [int((ids <= local).sum()) for local in range(num_local)]
    assert torch.equal(received.expert_weights_RK, torch.ones_like(received.expert_weights_RK))


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.double(), right.double())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_case_gives_the_exact_sum(world_size: int) -> None:
    assert values(run_ranks(world_size, run_all_cases)) == [len(CASES)] * world_size


def run_all_cases() -> int:
    peers = Peers(None, sub_batches=2, timeout=20.0)
    num_local = EXPERTS // peers.world_size
    dispatcher = create_dispatchers("all_to_all", num_experts=EXPERTS, sub_batches=2, peers=peers)[1]
    for index, case in enumerate(CASES):
        rows_TH, ids_TK, weights_TK = routing_of(case, peers.rank)
        with torch.inference_mode(index % 2 == 0):
            received, ticket = dispatcher.dispatch_b(dispatcher.dispatch_a(rows_TH, ids_TK.int(), weights_TK))
            check_order(received, num_local)
            assert received.rows_RH.dtype is case.dtype
            outputs_RH = run_experts(received, peers.rank * num_local)
            if case.strided:
                outputs_RH = outputs_RH.t().contiguous().t()
            output_TH = dispatcher.combine_b(dispatcher.combine_a(outputs_RH, ticket))
        assert same(output_TH, expected_output(rows_TH, ids_TK, weights_TK)), case.name
    return len(CASES)


@pytest.mark.timeout(60)
def test_rows_arrive_by_expert_then_source_rank_then_order() -> None:
    arrived = values(run_ranks(2, tagged_rows))
    # Four experts, two a rank; a row's tag is 10 * rank + token.
    assert arrived[0] == ([0.0, 11.0, 12.0, 0.0, 1.0, 2.0, 10.0], [3, 7])
    assert arrived[1] == ([1.0, 11.0, 12.0, 2.0, 10.0], [3, 5])


def tagged_rows() -> tuple[list[float], list[int]]:
    peers = Peers(None, sub_batches=1, timeout=20.0)
    (dispatcher,) = create_dispatchers("auto", num_experts=4, sub_batches=1, peers=peers)
    ids = [[0, 1], [1, 2], [1, 3]] if peers.rank == 0 else [[1, 3], [0, 2], [0, 2]]
    rows_TH = (10.0 * peers.rank + torch.arange(3.0)).unsqueeze(1)
    received, _ = dispatcher.dispatch_b(dispatcher.dispatch_a(rows_TH, torch.tensor(ids), torch.ones(3, 2)))
    assert received.group_ends_L is not None
    return received.rows_RH[:, 0].tolist(), received.group_ends_L.tolist()


@pytest.mark.timeout(60)
def test_sub_batches_in_flight_at_once_do_not_mix() -> None:
    assert values(run_ranks(4, interleaved_sub_batches)) == [True] * 4


def interleaved_sub_batches() -> bool:
    peers = Peers(None, sub_batches=3, timeout=20.0)
    dispatchers = create_dispatchers("all_to_all", num_experts=EXPERTS, sub_batches=3, peers=peers)
    first = peers.rank * EXPERTS // 4
    for round_ in range(20):
        cases = [Case(f"{'x' * (3 * round_ + i)}", tokens=((7 * round_ + i) % 9, 3, i, 0)) for i in range(3)]
        inputs = [routing_of(case, peers.rank) for case in cases]
        pending = [d.dispatch_a(*routed) for d, routed in zip(dispatchers, inputs, strict=True)]
        combining = []
        for dispatcher, dispatched in zip(dispatchers, pending, strict=True):
            received, ticket = dispatcher.dispatch_b(dispatched)
            combining.append(dispatcher.combine_a(run_experts(received, first), ticket))
        for dispatcher, combined, routed in zip(dispatchers, combining, inputs, strict=True):
            assert same(dispatcher.combine_b(combined), expected_output(*routed))
    return True


@pytest.mark.timeout(60)
def test_statistics_count_what_crosses_ranks() -> None:
    first, second = values(run_ranks(2, count_transfers))
    row = HIDDEN * 4
    # Rank 0 sends 2 of its 3 rows away, rank 1 sends its one row to itself.
    assert first == (2, 2 * row + 0, 0 + 2 * row)
    assert second == (2, 0 + 2 * row, 2 * row + 0)


def count_transfers() -> tuple[int, int, int]:
    peers = Peers(None, sub_batches=1, timeout=20.0)
    (dispatcher,) = create_dispatchers("all_to_all", num_experts=2, sub_batches=1, peers=peers)
    ids_TK = torch.tensor([[0], [1], [1]] if peers.rank == 0 else [[1]])
    rows_TH = torch.ones(len(ids_TK), HIDDEN)
    received, ticket = dispatcher.dispatch_b(dispatcher.dispatch_a(rows_TH, ids_TK, torch.ones(len(ids_TK), 1)))
    dispatcher.combine_b(dispatcher.combine_a(received.rows_RH, ticket))
    stats = dispatcher.stats
    assert not stats.modelled
    assert stats.counts_seconds > 0
    assert 0 < stats.blocked_seconds <= stats.in_flight_seconds
    assert [record.what for record in stats.records] == ["dispatch", "combine"]
    counted = stats.transfers, stats.sent_bytes, stats.received_bytes
    stats.reset()
    assert (stats.transfers, stats.in_flight_seconds, len(stats.records)) == (0, 0.0, 0)
    return counted


@pytest.mark.timeout(60)
@pytest.mark.parametrize("action", ["nan", "kill"])
def test_a_failure_between_start_and_wait_stops_every_rank(action: str) -> None:
    results = run_ranks(3, fail_between_start_and_wait, action, together=False)
    for result in results:
        if action == "kill" and result.rank == 1:
            assert result.exit_code == -signal.SIGKILL
            continue
        assert result.error is None, result.trace
        assert result.exit_code == 0, result.output
        message, seconds = result.value
        assert seconds < 10
        words = "the routing weights of token 2 hold NaN" if action == "nan" else "rank 1 stopped reporting"
        assert words in message


def fail_between_start_and_wait(action: str) -> tuple[str, float]:
    peers = Peers(None, sub_batches=2, timeout=60.0)
    first, second = create_dispatchers("all_to_all", num_experts=3, sub_batches=2, peers=peers)
    rows_TH, ids_TK, weights_TK = torch.ones(3, 4), torch.tensor([[0], [1], [2]]), torch.ones(3, 1)
    began = time.monotonic()
    try:
        pending = first.dispatch_a(rows_TH, ids_TK, weights_TK)
        if peers.rank == 1:
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            weights_TK[2] = float("nan")
        second.dispatch_b(second.dispatch_a(rows_TH, ids_TK, weights_TK))
        first.dispatch_b(pending)
    except DispatcherError as error:
        peers.fail(error)
        return str(error), time.monotonic() - began
    except PeerError as error:
        return str(error), time.monotonic() - began
    return "nothing happened", 0.0


GOOD = (torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("rows", "ids", "weights", "message"),
    [
        (
            torch.zeros(2, 4),
            torch.tensor([[0, 1], [2, 8]]),
            torch.ones(2, 2),
            "token 1 is routed to expert 8, but there",
        ),
        (torch.zeros(1, 4), torch.tensor([[0, -2]]), torch.ones(1, 2), "token 0 is routed to expert -2"),
        (GOOD[0], GOOD[1], torch.tensor([[1.0] * 3, [1.0, float("nan"), 1.0]]), "weights of token 1 hold NaN"),
        (torch.zeros(3, 4), GOOD[1], GOOD[2], r"rows \[3, 4\], topk_ids \[2, 3\], topk_weights \[2, 3\] do not belong"),
        (GOOD[0], GOOD[1], torch.ones(2, 2), "do not belong together"),
        (torch.zeros(2, 2, 4), GOOD[1], GOOD[2], "do not belong together"),
        (GOOD[0], torch.zeros(2, 0, dtype=torch.int64), torch.ones(2, 0), "do not belong together"),
        (GOOD[0], GOOD[1].float(), GOOD[2], r"topk_ids are torch\.float32"),
        (GOOD[0], GOOD[1], GOOD[2].long(), r"topk_weights torch\.int64"),
        (GOOD[0], GOOD[1].to("meta"), GOOD[2], "topk_ids on meta"),
    ],
)
def test_routing_that_cannot_be_right_is_refused(rows: Tensor, ids: Tensor, weights: Tensor, message: str) -> None:
    with pytest.raises(DispatcherError, match=message):
        LocalDispatcher(8).dispatch_a(rows, ids, weights)


def test_infinite_weights_that_cancel_are_not_taken_for_nan() -> None:
    weights = torch.tensor([[float("inf"), float("-inf")]])
    LocalDispatcher(8).dispatch_a(torch.zeros(1, 4), torch.tensor([[0, 1]]), weights)


def test_local_hands_over_the_tokens_as_they_are() -> None:
    (dispatcher,) = create_dispatchers("auto", num_experts=8, sub_batches=1, peers=None)
    rows_TH, ids_TK, weights_TK = torch.randn(3, 4), torch.tensor([[0, 7]] * 3), torch.rand(3, 2)
    received, ticket = dispatcher.dispatch_b(dispatcher.dispatch_a(rows_TH, ids_TK, weights_TK))
    assert received.rows_RH is rows_TH
    assert torch.equal(received.expert_ids_RK, ids_TK)
    assert received.expert_weights_RK is weights_TK
    assert received.group_ends_L is None
    assert dispatcher.combine_b(dispatcher.combine_a(rows_TH, ticket)) is rows_TH


@pytest.mark.parametrize("case", [case for case in CASES if case.tokens == CASES[0].tokens], ids=lambda case: case.name)
def test_local_gives_the_exact_sum(case: Case) -> None:
    rows_TH, ids_TK, weights_TK = routing_of(case, 2)
    dispatcher = LocalDispatcher(EXPERTS)
    received, ticket = dispatcher.dispatch_b(dispatcher.dispatch_a(rows_TH, ids_TK, weights_TK))
    assert bool((received.expert_ids_RK >= 0).all())
    output_TH = dispatcher.combine_b(dispatcher.combine_a(run_experts(received, 0), ticket))
    assert same(output_TH, expected_output(rows_TH, ids_TK, weights_TK))


def test_outputs_that_do_not_fit_their_ticket_are_refused() -> None:
    dispatcher = LocalDispatcher(8)
    _, ticket = dispatcher.dispatch_b(dispatcher.dispatch_a(*GOOD))
    with pytest.raises(DispatcherError, match=r"the experts returned \[3, 4\] for 2 rows"):
        dispatcher.combine_a(torch.zeros(3, 4), ticket)
    with pytest.raises(InternalError, match="was given a Ticket"):
        dispatcher.combine_a(torch.zeros(2, 4), Ticket(num_tokens=2))
    pending = dispatcher.combine_a(torch.zeros(2, 4), ticket)
    dispatcher.combine_b(pending)
    with pytest.raises(InternalError, match="waited for twice"):
        dispatcher.combine_b(pending)


def test_dispatchers_are_found_by_name_or_refused_by_name() -> None:
    assert NAMES[:3] == ("auto", "local", "all_to_all")
    for name in NAMES:
        assert status(name).usable == (name in {"auto", "local", "all_to_all"}), name
    with pytest.raises(DispatcherError, match=r"there is no dispatcher 'ucx'\. Use one of: auto, local, all_to_all, "):
        create_dispatchers("ucx", num_experts=8, sub_batches=2, peers=None)
    with pytest.raises(DispatcherError, match="there is no dispatcher 'ucx'"):
        status("ucx")
    with pytest.raises(DispatcherError, match=r"'deepep' .* is not built yet in this version\. Use 'auto'"):
        create_dispatchers("deepep", num_experts=8, sub_batches=2, peers=None)
    with pytest.raises(DispatcherError, match="has no ranks to exchange tokens with"):
        create_dispatchers("all_to_all", num_experts=8, sub_batches=2, peers=None)


@pytest.mark.timeout(60)
def test_groups_that_do_not_fit_are_refused() -> None:
    assert values(run_ranks(2, make_dispatchers_that_do_not_fit)) == [True, True]


def make_dispatchers_that_do_not_fit() -> bool:
    peers = Peers(dist.group.WORLD, sub_batches=1, timeout=5.0)
    with pytest.raises(DispatcherError, match="7 experts cannot be shared equally by the 2 ranks"):
        create_dispatchers("all_to_all", num_experts=7, sub_batches=1, peers=peers)
    with pytest.raises(DispatcherError, match="2 sub-batches need as many data groups, but the ranks set up 1"):
        create_dispatchers("all_to_all", num_experts=8, sub_batches=2, peers=peers)
    with pytest.raises(DispatcherError, match=r"the local dispatcher serves one rank, but .* has 2"):
        create_dispatchers("local", num_experts=8, sub_batches=1, peers=peers)
    return True
