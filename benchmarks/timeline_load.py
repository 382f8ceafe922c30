"""What reading a large trace costs: seconds and peak memory of `tbo timeline stats` on a generated one.

By default 852,040 events, of which 58,980 are of a device: 167 MB of JSON, gzipped. Each repetition is a process of
its own, since peak memory belongs to a process.

    python -m benchmarks.timeline_load [--steps 60] [--repeats 3] [--json]
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

STEPS = 60
KERNELS_PER_STEP = 983
OPS_PER_STEP = 4387
RUNTIME_PER_STEP = 2910
FLOWS_PER_STEP = 4892
RANGES_PER_STEP = 45
STAGES = ("combine(B)", "attn(F)", "mlp(B)", "dispatch(F)", "dispatch(B)", "mlp(W)", "mlp(F)", "attn(B)", "combine(F)")
STEP_US = 130_000
KERNEL_NAMES = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>(int)",
    "void cutlass::device_kernel<ours::grouped_gemm::GemmKernel<128, 128>>(ours::Params)",
    "void layer_norm::ln_fwd_kernel<layer_norm::Kernel_traits<__nv_bfloat16, float>>(layer_norm::FwdParams)",
)
EXCHANGE_NAMES = (
    "void deep_ep::internode::notify_dispatch<false, 8>(int const*, long*, int)",
    "void deep_ep::internode::dispatch<false, 8, true, 8>(int4*, float*, long*)",
    "void deep_ep::internode::combine<false, 8, __nv_bfloat16, 8>(int4*, float*)",
)

# Started in a process of its own: prints seconds and kilobytes. `ru_maxrss` would hold the peak of the process that
# started this one, which a test runner's is far above: Linux carries it across exec.
MEASURE = """
import argparse, contextlib, io, re, sys, time
start = time.perf_counter()
from tbo.timeline.commands import stats
parser = argparse.ArgumentParser()
stats.add_arguments(parser)
with contextlib.redirect_stdout(io.StringIO()):
    assert stats.run(parser.parse_args([sys.argv[1], "--json"])) == 0
print(time.perf_counter() - start, re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""


def generate(path: Path, steps: int = STEPS) -> int:
    """Writes a gzipped trace and returns how many events it holds."""
    count = 0
    with gzip.open(path, "wt", compresslevel=1, encoding="utf-8") as file:
        file.write('{"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 64},\n')
        file.write('"baseTimeNanoseconds": 1790857026000000000, "traceEvents": [\n')
        separator = ""
        for step in range(steps):
            for line in _step(step):
                file.write(separator + line)
                separator = ",\n"
                count += 1
        count += _finish(file)
    return count


def _finish(file: IO[str]) -> int:
    names = [
        f'{{"name": "thread_name", "ph": "M", "ts": 0, "pid": 0, "tid": {tid}, "args": {{"name": "stream {tid} "}}}}'
        for tid in range(40)
    ]
    file.write(",\n" + ",\n".join(names) + '\n], "traceName": "generated.json"}\n')
    return len(names)


def _step(step: int) -> Iterator[str]:
    zero = step * STEP_US
    host = '"pid": 1166, "tid": 1166'
    for index in range(RANGES_PER_STEP):
        at, name = zero + index * 2800, STAGES[index % len(STAGES)]
        yield f'{{"ph": "X", "cat": "user_annotation", "name": "{name}", {host}, "ts": {at}.125, "dur": 2790.500}}'
    for index in range(OPS_PER_STEP):
        at = zero + index * 20
        arguments = f'"External id": {index}, "Ev Idx": {index}, "Fwd thread id": 1, "Sequence number": {index}'
        yield (
            f'{{"ph": "X", "cat": "cpu_op", "name": "autograd::engine::evaluate_function: MulBackward0", {host}, '
            f'"ts": {at}.250, "dur": 15.125, "args": {{{arguments}}}}}'
        )
    for index in range(RUNTIME_PER_STEP):
        at = zero + index * 30
        yield (
            f'{{"ph": "X", "cat": "cuda_runtime", "name": "cudaEventQuery", {host}, "ts": {at}.500, "dur": 1.000, '
            f'"args": {{"External id": {index}, "cbid": 147, "correlation": {10_000_000 + step * 10_000 + index}}}}}'
        )
    for index in range(KERNELS_PER_STEP):
        yield from _kernel(step, index, zero)
    for index in range(FLOWS_PER_STEP):
        at = zero + index * 20
        yield f'{{"ph": "f", "id": {index}, {host}, "ts": {at}.750, "cat": "ac2g", "name": "ac2g", "bp": "e"}}'


def _kernel(step: int, index: int, zero: int) -> Iterator[str]:
    correlation = 1 + step * KERNELS_PER_STEP + index
    exchange = index % 25 == 0
    names, stream, duration = (EXCHANGE_NAMES, 27, 2500) if exchange else (KERNEL_NAMES, 7, 110)
    at = zero + index * 125
    yield (
        f'{{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1166, "tid": 1166, '
        f'"ts": {zero + index * 80}.125, "dur": 4.500, "args": {{"cbid": 211, "correlation": {correlation}}}}}'
    )
    yield (
        f'{{"ph": "X", "cat": "kernel", "name": "{names[index % 3]}", "pid": 0, "tid": {stream}, "ts": {at}.375, '
        f'"dur": {duration}.875, "args": {{"External id": {correlation}, "queued": 0, "device": 0, "context": 1, '
        f'"stream": {stream}, "correlation": {correlation}, "registers per thread": 31, "shared memory": 0, '
        f'"blocks per SM": 31.030304, "warps per SM": 124.121216, "grid": [20, 1, 1], "block": [128, 1, 1], '
        f'"est. achieved occupancy %": 100}}}}'
    )


def measure(path: Path) -> tuple[float, float]:
    """Seconds and peak megabytes of `stats` in a fresh process."""
    command = [sys.executable, "-c", MEASURE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    seconds, kilobytes = done.stdout.split()
    return float(seconds), int(kilobytes) / 1024


def main() -> None:
    """Generates, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=STEPS, help="60 make 852,040 events (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="processes measured (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "generated.json.gz"
        begin = time.perf_counter()
        events = generate(path, options.steps)
        generating = time.perf_counter() - begin
        size = path.stat().st_size / 1e6
        runs = [measure(path) for _ in range(options.repeats)]
    seconds, peak = min(run[0] for run in runs), max(run[1] for run in runs)
    if options.json:
        print(json.dumps({"events": events, "gz_mb": size, "seconds": seconds, "peak_mib": peak}))
        return
    print(f"{events:,} events, {size:.1f} MB gzipped, generated in {generating:.1f} s")
    print(f"stats: {seconds:.2f} s (fastest of {options.repeats}), {peak:.0f} MiB at its peak")


if __name__ == "__main__":
    main()
