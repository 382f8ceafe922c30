"""The figures: on a real trace, on one worked out by hand, and on random ones against a bitmap."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tbo.timeline.kineto import load
from tbo.timeline.metrics import Rules, measure, table
from tbo.timeline.span import Edge, Kind, Timeline, make_timeline
from tbo.timeline.stats import NoCommunicationError, report
from trace_cases import COMBINE, DISPATCH, GEMM, NOTIFY, kernel, renamed, run_command, span, twelve_spans, write_trace

pytestmark = pytest.mark.timeout(100)

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
REAL = DATA / "deepseek_dualpipe_train.json"
needs_real_trace = pytest.mark.skipif(
    not REAL.is_file(), reason="DeepSeek's trace has no licence, so it is not in the repository"
)


@pytest.fixture(scope="module")
def real() -> Timeline:
    return load(REAL)


@pytest.fixture(scope="module")
def truth() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DATA / "deepseek_dualpipe_train.truth.json").read_text())
    return document


def figures_us(printed: str) -> tuple[float, ...]:
    (rank,) = json.loads(printed)["ranks"]
    names = ("compute", "communication", "overlapped", "exposed", "compute_only", "idle", "window")
    return tuple(rank[f"{name}_ns"] / 1000 for name in names)


# ---------------------------------------------------------------- the real trace


@needs_real_trace
@pytest.mark.parametrize(
    ("options", "expected", "ratio"),
    [
        ((), (124366, 113030, 108881, 4149, 15485, 497, 129012), 0.963293),
        (("--exclude-memory",), (124338, 113030, 108868, 4162, 15470, 512, 129012), 0.963178),
        (("--transfer-only",), (124366, 80452, 77509, 2943, 46857, 1703, 129012), 0.963419),
        (("--by-lane", "27"), (124286, 114521, 110292, 4229, 13994, 497, 129012), 0.963072),
    ],
    ids=["default", "without memory", "transfer only", "by lane"],
)
def test_acceptance_1_stats_of_the_real_trace(
    options: tuple[str, ...], expected: tuple[int, ...], ratio: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("stats", REAL, "--json", *options) == 0
    printed = capsys.readouterr().out
    assert figures_us(printed) == expected
    assert sum(expected[2:6]) == expected[6]
    assert json.loads(printed)["ranks"][0]["overlap_ratio"] == pytest.approx(ratio, abs=5e-7)


@needs_real_trace
def test_stages_of_the_real_trace(real: Timeline, truth: dict[str, Any]) -> None:
    expected = truth["stages (gpu events, compute us, transfer us, notify us, exposed us)"]
    rows = {row.key: row for row in table(real, lambda span: span.stage)}
    assert rows.keys() == expected.keys()
    for name, (count, compute, transfer, notify, exposed) in expected.items():
        row = rows[name]
        # mlp(W) computes on two streams at once: 25,513 us of kernels in 20,251 us.
        union = 20251 if name == "mlp(W)" else compute
        assert (row.count, row.total_ns) == (count, 1000 * (compute + transfer + notify))
        assert (row.compute_ns, row.transfer_ns, row.notify_ns) == (1000 * union, 1000 * transfer, 1000 * notify)
        assert row.exposed_ns == 1000 * exposed


@needs_real_trace
def test_communication_kernels_and_lanes_of_the_real_trace(real: Timeline, truth: dict[str, Any]) -> None:
    rows = {row.key: row for row in table(real, lambda span: span.op)}
    assert {
        name: (rows[name].count, rows[name].total_ns // 1000, rows[name].exposed_ns // 1000)
        for name in ("combine", "dispatch", "cached_notify", "notify_dispatch")
    } == {
        "combine": (8, 49448, 2158),
        "dispatch": (8, 31004, 785),
        "cached_notify": (12, 23610, 1105),
        "notify_dispatch": (4, 8968, 101),
    }
    lanes = {lane["lane"].removeprefix("stream "): lane for lane in report(real, Rules())["ranks"][0]["lanes"]}
    for name, stream in truth["streams"].items():
        lane = lanes[name]
        found = (lane["count"], lane["busy_ns"], lane["alone_ns"], lane["first_ns"], lane["last_ns"])
        expected = [stream[field] for field in ("busy", "alone", "first", "last")]
        assert found == (stream["n"], *(1000 * time for time in expected))
    assert lanes["27"]["label"] == "20 SMs"
    assert real.rule_counts == {
        "no rule: computation": 931,
        "copy or fill on a device": 20,
        "DeepEP V1 notify": 16,
        "DeepEP V1 transfer": 16,
    }


@needs_real_trace
def test_gaps_of_the_real_trace(capsys: pytest.CaptureFixture[str], truth: dict[str, Any]) -> None:
    assert run_command("gaps", REAL, "--json", "--min-us", "0", "--top", "10000") == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    exposed = [gap for gap in rank["gaps"] if gap["what"] == "exposed"]
    spans = truth["exposed spans"]
    assert len(exposed) == spans["n"]
    long = [gap["duration_ns"] for gap in exposed if gap["duration_ns"] >= 10_000]
    assert [len(long), sum(long) // 1000] == spans[">=10us"]
    places = [[gap["start_ns"] // 1000, gap["end_ns"] // 1000] for gap in exposed]
    assert places[:4] == spans["top"]
    assert (exposed[0]["communication"], exposed[1]["cause"]) == ("dispatch(B): combine", "waiting for peer")
    assert sum(gap["duration_ns"] for gap in rank["gaps"] if gap["what"] == "idle") == 497_000


# ---------------------------------------------------------------- worked out by hand


def test_acceptance_2_twelve_spans_worked_out_by_hand(tmp_path: Path) -> None:
    timeline = load(write_trace(tmp_path / "twelve.json", twelve_spans()))
    metrics = measure(timeline)
    assert (metrics.compute_ns, metrics.communication_ns, metrics.window_ns) == (40_000, 40_000, 80_000)
    assert (metrics.overlapped_ns, metrics.exposed_ns) == (20_000, 20_000)
    assert (metrics.compute_only_ns, metrics.idle_ns) == (20_000, 20_000)
    assert (metrics.overlap_ratio, metrics.bubble, metrics.ideal) == (0.5, 0.5, 0.5)
    assert metrics.exposed_by_kind == {Kind.TRANSFER: 20_000, Kind.NOTIFY: 0, Kind.IN_FLIGHT: 0}
    assert metrics.spans == 12
    by_lane = measure(timeline, rules=Rules(by_lane=frozenset({"stream 8"})))
    assert (by_lane.communication_ns, by_lane.exposed_ns) == (10_000, 0)


def random_timeline(seed: int) -> Timeline:
    chance = random.Random(seed)
    spans = []
    for _ in range(chance.randrange(1, 25)):
        start = chance.randrange(120)
        kind = chance.choice(list(Kind))
        spans.append(span(kind, start, start + chance.choice((0, 1, 5, 40))))
    return make_timeline(spans, source="plan")


def test_acceptance_2_a_thousand_random_traces_equal_the_bitmap() -> None:
    for seed in range(1000):
        timeline = random_timeline(seed)
        computing, communicating = [False] * 200, [False] * 200
        for each in timeline.spans:
            if each.kind is Kind.HOST:
                continue
            cells = communicating if each.kind in {Kind.TRANSFER, Kind.NOTIFY, Kind.IN_FLIGHT} else computing
            for cell in range(each.start_ns // 1000, each.end_ns // 1000):
                cells[cell] = True
        metrics = measure(timeline)
        pairs = list(zip(computing, communicating, strict=True))
        assert metrics.overlapped_ns == 1000 * pairs.count((True, True)), seed
        assert metrics.exposed_ns == 1000 * pairs.count((False, True)), seed
        assert metrics.compute_only_ns == 1000 * pairs.count((True, False)), seed
        parts = metrics.overlapped_ns + metrics.exposed_ns + metrics.compute_only_ns + metrics.idle_ns
        assert parts == metrics.window_ns, seed
        assert sum(metrics.exposed_by_kind.values()) == metrics.exposed_ns, seed


# ---------------------------------------------------------------- names

NAMES = {
    "DeepEP V1 within a node": (
        "void deep_ep::intranode::notify_dispatch<8>(int const*)",
        "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)",
        "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(__nv_bfloat16*)",
    ),
    "DeepEP V1 low latency": (
        "void deep_ep::internode_ll::clean_low_latency_buffer<256>(long*)",
        "void deep_ep::internode_ll::dispatch<true, false, 7168>(void*)",
        "void deep_ep::internode_ll::combine<false, 7168, 9>(void*)",
    ),
    "DeepEP V1 mangled": (
        "_ZN7deep_ep9intranode20cached_notify_combineILi8EEEvPPvPiiiii",
        "_ZN7deep_ep9internode8dispatchILb0ELi8EEEvP4int4Pf",
        "_ZN7deep_ep9internode7combineILb0ELi8EEEvP4int4Pf",
    ),
    "DeepEP V2": (
        "void deep_ep::elastic::barrier_impl<8, true>(void*)",
        "void deep_ep::elastic::hybrid_dispatch_impl<7168, 8>(void*)",
        "void deep_ep::elastic::combine_impl<7168, 8>(void*)",
    ),
    "DeepEP V2 epilogues": (
        "barrier_impl",
        "void deep_ep::elastic::dispatch_copy_epilogue_impl<true>(void*)",
        "void deep_ep::elastic::combine_reduce_epilogue_impl<true>(void*)",
    ),
    "FlashInfer": ("moeA2APrepareDispatchKernel(int*)", "moeA2ADispatchKernel(int*)", "moeA2ACombineKernel(int*)"),
    "NVSHMEM": (
        "void barrier_on_stream_kernel_threadgroup<(threadgroup_t)1>(int, int)",
        "nvshmemi_proxy_rma_entrypoint(void*)",
        "void nvshmemi_alltoall_on_stream<int>(void*)",
    ),
    "MSCCL++": ("void mscclpp::barrier(int)", "void mscclpp::collective::allgather<8>(void*)", "mscclpp_alltoall"),
    "torch symmetric memory": (
        "void (anonymous namespace)::barrier_kernel(unsigned int**)",
        "allToAllV(void*, void*, long*)",
        "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 2>(c10::BFloat16**)",
    ),
}

WITHOUT_NOTIFY = {
    "NCCL": ("ncclDevKernel_AllReduce_Sum_i32_RING_LL", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"),
    "NCCL up to 2.18": ("ncclKernel_AllReduce_RING_LL_Sum_int32_t", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t"),
    "NCCL symmetric": ("ncclSymkDevKernel_AllReduce_LDMC_sum_bf16", "ncclSymDevKernel_AllGather_LL"),
    "RCCL": ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "mscclKernel_Sum_half_Simple_false"),
}


@pytest.mark.parametrize("library", NAMES)
def test_acceptance_3_names_of_other_libraries_leave_every_number_unchanged(tmp_path: Path, library: str) -> None:
    plain = load(write_trace(tmp_path / "plain.json", twelve_spans()))
    names = dict(zip((NOTIFY, DISPATCH, COMBINE), NAMES[library], strict=True))
    other = load(write_trace(tmp_path / "other.json", renamed(twelve_spans(), names)))
    assert measure(other) == measure(plain)
    assert [each.kind for each in other.spans] == [each.kind for each in plain.spans]
    assert sum(other.rule_counts.values()) == 12


@pytest.mark.parametrize("library", WITHOUT_NOTIFY)
def test_acceptance_3_names_of_nccl_leave_the_ratio_unchanged(tmp_path: Path, library: str) -> None:
    plain = measure(load(write_trace(tmp_path / "plain.json", twelve_spans())))
    waits, transfers = WITHOUT_NOTIFY[library]
    names = {NOTIFY: waits, DISPATCH: transfers, COMBINE: transfers}
    other = measure(load(write_trace(tmp_path / "other.json", renamed(twelve_spans(), names))))
    assert (other.communication_ns, other.overlapped_ns) == (plain.communication_ns, plain.overlapped_ns)
    assert (other.exposed_ns, other.idle_ns, other.window_ns) == (plain.exposed_ns, plain.idle_ns, plain.window_ns)


@pytest.mark.parametrize(
    "name", ["deep_ep::layout::get_dispatch_layout<8>(int*)", "my::dispatch_table", "ln_fwd_kernel"]
)
def test_what_only_sounds_like_communication_is_computation(tmp_path: Path, name: str) -> None:
    timeline = load(write_trace(tmp_path / "t.json", [kernel(name, 0, 1), kernel(DISPATCH, 0, 1)]))
    assert [each.kind for each in timeline.spans] == [Kind.COMPUTE, Kind.TRANSFER]


@pytest.mark.parametrize("command", [("check", "--min-overlap", "0.5"), ("stats",), ("stats", "--json"), ("gaps",)])
def test_acceptance_3_an_unknown_communication_kernel(tmp_path: Path, command: tuple[str, ...]) -> None:
    names = dict.fromkeys((NOTIFY, DISPATCH, COMBINE), "void secret::exchange<8>(int)")
    path = write_trace(tmp_path / "unknown.json", renamed(twelve_spans(), names))
    with pytest.raises(NoCommunicationError, match=r"no communication found in unknown\.json") as caught:
        run_command(command[0], path, *command[1:])
    assert "secret::exchange (5 times)" in str(caught.value)
    assert "--classify" in caught.value.remedy
    assert "nan" not in str(caught.value).lower()


def test_no_communication_on_a_single_stream_has_no_candidates(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "one.json", [kernel(GEMM, 0, 1)])
    with pytest.raises(NoCommunicationError, match="all kernels run on one stream"):
        run_command("stats", path)


# ---------------------------------------------------------------- printing


def test_stats_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "twelve.json", twelve_spans())
    assert run_command("stats", path, "--by", "op") == 0
    printed = capsys.readouterr().out
    assert "overlapped        0.020  overlap ratio 50.00 %" in printed
    assert "Events by rule: no rule: computation: 5; DeepEP V1 transfer: 4" in printed
    assert "Critical path: not known" in printed
    assert max(len(line) for line in printed.splitlines()) <= 100


def test_critical_path_follows_dependencies() -> None:
    spans = [
        span(Kind.COMPUTE, 0, 10, op="gate"),
        span(Kind.COMPUTE, 10, 18, op="other"),
        span(Kind.TRANSFER, 10, 30, op="dispatch"),
        span(Kind.COMPUTE, 32, 40, op="experts"),
    ]
    alone = make_timeline(spans, source="plan")
    assert report(alone, Rules())["ranks"][0]["critical_path"] is None
    edges = (Edge(before=0, after=2), Edge(before=2, after=3))
    timeline = Timeline(spans=alone.spans, lanes=alone.lanes, source="plan", edges=edges)
    assert report(timeline, Rules())["ranks"][0]["critical_path"] == {
        "spans": 3,
        "total_ns": 40_000,
        "by_kind_ns": {"compute": 18_000, "transfer": 20_000},
        "waiting_ns": 2_000,
    }
