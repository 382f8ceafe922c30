"""What `cpu_overlap` runs: a sparse layer whose heavy ops really compute and whose transfers occupy a modelled link."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tbo.core import Instrument, Pending, Plan, compile_plan, op, run
from tbo.models.orders import PREFILL, layers_ops
from tbo.ops.link import Link

SIDE = 192
"""Rows and columns of the multiplied matrices: they fit a core's own cache, so that a wait leaves them there."""

GIGABYTE = 1e9


class Compute(Protocol):
    """A way to keep one thread busy."""

    def work(self, seconds: float) -> Callable[[], None]:
        """A function that computes for about so long."""
        ...


class Spin:
    """Passes time exactly, so that only the order, the waits and the scheduler are measured."""

    def work(self, seconds: float) -> Callable[[], None]:
        """A function that spins for so long."""

        def spin() -> None:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                pass

        return spin


class Matmuls:
    """Multiplies matrices, as often as takes the time on an average moment of this machine."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._left = torch.randn(SIDE, SIDE, generator=generator)
        self._right = torch.randn(SIDE, SIDE, generator=generator)
        self._out = torch.empty(SIDE, SIDE)
        self._per_second = self._measure_rate()

    def work(self, seconds: float) -> Callable[[], None]:
        """A function that multiplies a fixed number of times."""
        count = max(1, round(seconds * self._per_second))
        return lambda: self._multiply(count)

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._out)

    def _measure_rate(self) -> float:
        self._multiply(50)
        rates = []
        for _ in range(9):
            start = time.perf_counter()
            self._multiply(20)
            rates.append(20 / (time.perf_counter() - start))
        return statistics.median(rates)


@dataclass(frozen=True, kw_only=True)
class WorkingLayer:
    """The ops of a sparse layer with shared experts: some multiply, some send, the rest only pass values on.

    Attributes:
        work: op name -> does the op's computation.
        transfer_seconds: what one dispatch or one combine occupies the link.
    """

    work: Mapping[str, Callable[[], None]]
    transfer_seconds: float
    is_sparse: bool = True
    has_shared: bool = True

    def _send(self, link: Link) -> Pending[None]:
        size = round(self.transfer_seconds * link.gigabytes_per_second * GIGABYTE)
        _, done = link.reserve(size, size)
        return Pending(lambda: link.clock.sleep_until(done))

    @op(writes=("attn_input", "residual"))
    def op_comm_prepare_attn(self, hidden_states: int) -> tuple[int, int]:
        """Stands for the input norm."""
        return hidden_states, hidden_states

    @op(writes="attention")
    def op_prepare(self, attn_input: int) -> int:
        """Stands for the projections."""
        return attn_input

    @op(writes="attn_output")
    def op_core(self, attention: int) -> int:
        """Attention."""
        self.work["op_core"]()
        return attention

    @op(writes="mlp_input")
    def op_comm_prepare_mlp(self, attn_output: int, residual: int) -> int:
        """Stands for the second norm."""
        return attn_output + residual

    @op(writes="router_output")
    def op_gate(self, mlp_input: int) -> int:
        """Stands for the router."""
        return mlp_input

    @op(writes="topk_ids")
    def op_select_experts(self, router_output: int) -> int:
        """Stands for the choice of experts."""
        return router_output

    @op(writes="dispatch", starts="ep")
    def op_dispatch_a(self, mlp_input: int, topk_ids: int, link: Link) -> Pending[None]:
        """Sends."""
        return self._send(link)

    @op(writes="received", waits="dispatch")
    def op_dispatch_b(self, dispatch: Pending[None]) -> int:
        """Waits."""
        dispatch.wait()
        return 1

    @op(writes="expert_output")
    def op_experts(self, received: int) -> int:
        """The routed experts."""
        self.work["op_experts"]()
        return received

    @op(writes="combine", starts="ep")
    def op_combine_a(self, expert_output: int, link: Link) -> Pending[None]:
        """Sends back."""
        return self._send(link)

    @op(writes="routed_output", waits="combine")
    def op_combine_b(self, combine: Pending[None]) -> int:
        """Waits."""
        combine.wait()
        return 1

    @op(writes="shared_output")
    def op_shared_experts(self, mlp_input: int) -> int:
        """The shared experts."""
        self.work["op_shared_experts"]()
        return mlp_input

    @op(writes="mlp_output")
    def op_output(self, routed_output: int, shared_output: int) -> int:
        """Stands for the sum."""
        return routed_output + shared_output

    @op(writes="hidden_states")
    def op_comm_postprocess_layer(self, mlp_output: int) -> int:
        """Stands for the residual."""
        return mlp_output


def prefill_plan(layer: WorkingLayer, *, layers: int, sub_batches: int, sequential: bool = False) -> Plan:
    """The prefill order over equal layers."""
    return compile_plan(
        layers_ops([layer] * layers, PREFILL),
        inputs=("hidden_states", "link"),
        outputs=("hidden_states",),
        sub_batches=sub_batches,
        order="sequential" if sequential else "interleaved",
    )


def run_with(plan: Plan, link: Link, instruments: Sequence[Instrument] = ()) -> None:
    """One step; all sub-batches share the link."""
    run(plan, ({"hidden_states": 1, "link": link} for _ in range(plan.sub_batches)), instruments)
