"""Kineto traces of our own, small enough to work out by hand, and the subcommands run as the command line does."""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tbo.timeline.span import Kind, Span

Event = dict[str, Any]
EPOCH_US = 1_740_461_679_000_000

NOTIFY = "void deep_ep::internode::notify_dispatch<false, 8>(int const*, long*)"
DISPATCH = "void deep_ep::internode::dispatch<false, 8, true, 8>(int4*, float*)"
COMBINE = "void deep_ep::internode::combine<false, 8, __nv_bfloat16>(int4*, float*)"
GEMM = "void cutlass::device_kernel<ours::GemmKernel>(ours::Params)"


def kernel(name: str, ts: float, dur: float, tid: int | str = 7, **more: Any) -> Event:
    """A kernel of device 0; `more` overrides fields, `args` among them."""
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": {}, **more}


def memory(name: str, ts: float, dur: float, tid: int = 7) -> Event:
    return kernel(name, ts, dur, tid, cat="gpu_memset" if "set" in name else "gpu_memcpy")


def launch(correlation: int, ts: float, tid: int = 1166) -> Event:
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "pid": 1166,
        "tid": tid,
        "ts": ts,
        "dur": 1,
        "args": {"correlation": correlation},
    }


def annotation(name: str, ts: float, dur: float, tid: int = 1166) -> Event:
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1166, "tid": tid, "ts": ts, "dur": dur}


def twelve_spans() -> list[Event]:
    """Touching, nested, identical and zero-length spans, worked out in microseconds.

    C = [0, 20) [30, 40) [60, 70): 40        M = [5, 25) [35, 55): 40        window [0, 80)
    overlapped [5, 20) [35, 40): 20          exposed [20, 25) [40, 55): 20   compute only 20, idle 20
    """
    return [
        kernel(GEMM, 0, 10),
        kernel(GEMM, 10, 10),
        kernel(GEMM, 30, 10),
        kernel(GEMM, 30, 10, 8),
        kernel(GEMM, 32, 4, 9),
        memory("Memset (Device)", 50, 0),
        memory("Memcpy DtoD (Device -> Device)", 60, 10),
        kernel(NOTIFY, 5, 7, 27),
        kernel(DISPATCH, 12, 13, 27),
        kernel(DISPATCH, 35, 20, 27),
        kernel(COMBINE, 38, 7, 28),
        kernel(DISPATCH, 80, 0, 27),
    ]


def shifted(events: list[Event], microseconds: float) -> list[Event]:
    return [{**event, "ts": event["ts"] + microseconds} for event in events]


def renamed(events: list[Event], names: Mapping[Any, str]) -> list[Event]:
    return [{**event, "name": names.get(event["name"], event["name"])} for event in events]


def write_trace(path: Path, events: list[Event], *, bare: bool = False, **header: Any) -> Path:
    """Writes a trace; with `.gz` at the name's end, gzipped."""
    text = json.dumps(events if bare else {"schemaVersion": 1, **header, "traceEvents": events, "traceName": "x"})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def span(kind: Kind, start_us: int, end_us: int, *, op: str = "op", lane: str = "", rank: int = 0, **more: Any) -> Span:
    """A span in microseconds, on a lane named after its kind."""
    return Span(
        op=op, lane=lane or kind.value, kind=kind, start_ns=1000 * start_us, end_ns=1000 * end_us, rank=rank, **more
    )


def run_command(name: str, *arguments: object) -> int:
    """A subcommand's exit code; what a user does wrong is raised."""
    module: Any = importlib.import_module(f"tbo.timeline.commands.{name}")
    parser = argparse.ArgumentParser(prog=f"tbo timeline {name}")
    module.add_arguments(parser)
    return int(module.run(parser.parse_args([str(argument) for argument in arguments])))
