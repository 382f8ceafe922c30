"""What several test files do on a rank with a wrapped model.

Ranks differ on purpose: in batch size, length, content, and in when they get to each op.
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ranks import Result, values
from tbo import InjectFault, Instrument
from tbo.wrapping.handle import Handle
from tiny_models import token_batch

ROWS = (5, 3, 4, 2)
POSITIONS = (10, 7, 12, 5)

COMMUNICATION = ("op_dispatch_a", "op_dispatch_b", "op_combine_a", "op_combine_b")


def case_of_rank(rank: int, decode_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts, mask and following tokens that no other rank has."""
    ids, mask = token_batch(ROWS[rank], POSITIONS[rank], seed=10 + rank)
    following, _ = token_batch(ROWS[rank], decode_steps, seed=20 + rank, left_padding=False)
    return ids, mask, following


def random_sleeps(seed: int, longest: float = 4e-4) -> list[Instrument]:
    """Delays around experts and communication, so that ranks reach them in every order."""
    generator = random.Random(seed)

    def sleep() -> None:
        time.sleep(generator.random() * longest)

    return [InjectFault(op, sleep) for op in (*COMMUNICATION, "op_experts")]


def record_exchanges(handle: Handle) -> list[str]:
    """A list that grows with every collective the handle's rank starts: v for a vote, else the sub-batch's number."""
    peers = handle._peers
    assert peers is not None
    started: list[str] = []
    names = {id(peers.control): "v"} | {id(group): str(index) for index, group in enumerate(peers.data)}
    start = peers.exchange

    def recorded(group: Any, *args: Any) -> Any:
        started.append(names[id(group)])
        return start(group, *args)

    vars(peers)["exchange"] = recorded
    return started


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """A case that raised on this rank."""

    trace: str


def each(cases: Iterable[Any], function: Callable[..., Any], *args: Any) -> dict[Any, Any]:
    """The function's result for each case, or what it raised: one case that fails must not hide the others."""
    results: dict[Any, Any] = {}
    for case in cases:
        try:
            results[case] = function(case, *args)
        except Exception:  # noqa: BLE001 - reported by the test of that case
            results[case] = Broken(trace=traceback.format_exc())
    return results


def on_every_rank(ranks: Sequence[Result], case: Any) -> list[Any]:
    """One case's results by rank, of ranks that each returned a dict of `each`; fails with what a rank raised."""
    results = [value[case] for value in values(ranks)]
    broken = [f"rank {rank}:\n{result.trace}" for rank, result in enumerate(results) if isinstance(result, Broken)]
    assert not broken, "\n".join(broken)
    return results
