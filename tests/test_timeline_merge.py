"""Many ranks on one clock: aligned on what they share, refused where they share nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tbo.timeline.kineto import Trace, load, load_trace
from tbo.timeline.merge import MergeError, merge, skew
from tbo.timeline.metrics import measure
from tbo.timeline.span import Kind
from trace_cases import DISPATCH, EPOCH_US, GEMM, NOTIFY, annotation, kernel, launch, run_command, shifted, write_trace

pytestmark = pytest.mark.timeout(60)

# Barriers end together; the last rank to arrive waits least. Times in microseconds of a common clock.
ARRIVALS = {0: (100, 300), 1: (140, 260)}
ENDS = (150, 310)
LATE_US = 2


def events_of(rank: int, *, late: float = 0) -> list[dict[str, Any]]:
    """A rank's step: two barriers, a dispatch after each; `late`: how much later it sees the second one end."""
    first, second = ARRIVALS[rank]
    return [
        kernel(GEMM, 0, first, args={"correlation": 1}),
        kernel(NOTIFY, first, ENDS[0] - first, 27),
        kernel(DISPATCH, ENDS[0], 40, 27),
        kernel(NOTIFY, second, ENDS[1] + late - second, 27),
        kernel(DISPATCH, ENDS[1] + late, 40, 27),
        annotation("step", 0, 400),
        launch(1, 0),
    ]


def traces(folder: Path, *, clock_us: dict[int, int], late: float = 0, **header: Any) -> list[Trace]:
    """Each rank's trace, seen by a clock that is ahead by so much."""
    made = []
    for rank, ahead in clock_us.items():
        events = shifted(events_of(rank, late=late if rank else 0), ahead)
        information = {"backend": "nccl", "rank": rank, "world_size": 2}
        made.append(load_trace(write_trace(folder / f"r{rank}.json", events, distributedInfo=information, **header)))
    return made


def test_acceptance_11_shared_barriers_align_shifted_clocks(tmp_path: Path) -> None:
    timeline = merge(traces(tmp_path, clock_us={0: 1000, 1: 7777}, late=LATE_US))
    # The ends of the two barriers say -6777 and -6779; the truth lies between them.
    assert timeline.shifts == {0: (0, 0), 1: (-6_778_000, 1_000)}
    ends = [[s.end_ns for s in timeline.of_rank(rank) if s.kind is Kind.NOTIFY] for rank in (0, 1)]
    assert ends == [[1_150_000, 1_310_000], [1_149_000, 1_311_000]]
    found = skew(timeline)
    assert found is not None
    assert (found.barriers, found.end_ns, found.arrival_ns) == (2, 1_000, 41_000)
    assert timeline.ranks == (0, 1)


def test_acceptance_11_one_barrier_bounds_the_shift(tmp_path: Path) -> None:
    paths = []
    for rank, (start, end) in enumerate(((100, 150), (1140, 1150))):
        events = [kernel(NOTIFY, start, end - start, 27)]
        paths.append(write_trace(tmp_path / f"rank{rank}.json", events))
    timeline = merge([load_trace(path) for path in paths])
    # Rank 1 cannot have entered after rank 0 left, nor left before rank 0 entered.
    assert timeline.shifts[1] == (-1_000_000, 50_000)


def test_acceptance_11_the_base_aligns_where_no_barrier_is_shared(tmp_path: Path) -> None:
    paths = []
    for rank, base_us in ((0, EPOCH_US), (1, EPOCH_US + 500)):
        events = [kernel(GEMM, 10, 5), kernel(DISPATCH, 12, 8, 27)]
        information = {"rank": rank}
        header: dict[str, Any] = {"baseTimeNanoseconds": base_us * 1000, "distributedInfo": information}
        paths.append(write_trace(tmp_path / f"r{rank}.json", events, **header))
    timeline = merge([load_trace(path) for path in paths])
    assert timeline.shifts == {0: (0, 0), 1: (0, None)}
    starts = [timeline.of_rank(rank)[0].start_ns for rank in (0, 1)]
    assert starts[1] - starts[0] == 500_000
    assert timeline.notes[-1] == "Ranks are aligned by their clocks: how far these differ is not known."
    assert skew(timeline) is None


def test_acceptance_11_without_either_merging_is_refused(tmp_path: Path) -> None:
    paths = [
        write_trace(tmp_path / f"rank{rank}.json", [kernel(GEMM, 10, 5), kernel(DISPATCH, 12, 8, 27)])
        for rank in (0, 1)
    ]
    with pytest.raises(MergeError, match=r"rank0.json and .*rank1.json cannot be aligned: they share no barrier, and"):
        run_command("export", *paths, "--merge", "-o", tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_a_short_barrier_bounds_what_long_ones_suggest(tmp_path: Path) -> None:
    """Two long barriers seem to end together, yet nobody can have left the short one before the other entered it."""
    times = {0: ((0, 100), (300, 400), (510, 512)), 1: ((0, 100), (300, 400), (500, 500))}
    paths = [
        write_trace(tmp_path / f"rank{rank}.json", [kernel(NOTIFY, start, end - start, 27) for start, end in spans])
        for rank, spans in times.items()
    ]
    assert merge([load_trace(path) for path in paths]).shifts[1] == (10_000, 10_000)


def test_barriers_that_contradict_each_other_align_nothing(tmp_path: Path) -> None:
    first = load_trace(write_trace(tmp_path / "rank0.json", [kernel(NOTIFY, 0, 5), kernel(NOTIFY, 100, 5)]))
    second = load_trace(write_trace(tmp_path / "rank1.json", [kernel(NOTIFY, 0, 5), kernel(NOTIFY, 900, 5)]))
    with pytest.raises(MergeError, match="cannot be aligned: they share no barrier"):
        merge([first, second], "barrier")


def test_the_way_of_aligning_can_be_chosen(tmp_path: Path) -> None:
    given = traces(tmp_path, clock_us={0: 0, 1: 40}, baseTimeNanoseconds=EPOCH_US * 1000)
    assert merge(given, "barrier").shifts[1] == (-40_000, 0)
    assert merge(given, "clock").shifts[1] == (0, None)
    with pytest.raises(MergeError, match="their times are not both since 1970"):
        merge(traces(tmp_path, clock_us={0: 0, 1: 40}), "clock")


def test_acceptance_11_merged_ranks_never_collide_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both traces use device 0, streams 7 and 27, and correlation 1."""
    traces(tmp_path, clock_us={0: 1000, 1: 7777})
    out = tmp_path / "merged.json"
    assert run_command("export", tmp_path / "r1.json", tmp_path / "r0.json", "--merge", "-o", out) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out}: 10 spans, 2 ranks",
        "rank 0: clock moved by 0.000 us, +- 0.000 us",
        "rank 1: clock moved by -6777.000 us, +- 0.000 us",
    ]
    events = json.loads(out.read_text())["traceEvents"]
    threads = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    assert len(set(threads)) == len({tid for _, tid in threads}) == 4
    assert {pid for pid, _ in threads} == {0, 1}
    merged = load(out)
    assert measure(merged, rank=1).exposed_ns == measure(load(tmp_path / "r1.json"), rank=1).exposed_ns
    assert run_command("stats", out) == 0
    assert "Ranks at 2 barriers: arrivals at most 0.040 apart, ends at most 0.000." in capsys.readouterr().out


def test_edges_of_merged_timelines_keep_their_spans_and_ids(tmp_path: Path) -> None:
    from dataclasses import replace

    from tbo.timeline.span import Edge

    given = traces(tmp_path, clock_us={0: 0, 1: 5000})
    linked = [
        replace(trace, timeline=replace(trace.timeline, edges=(Edge(before=1, after=2), Edge(before=3, after=4))))
        for trace in given
    ]
    timeline = merge(linked)
    pairs = [(timeline.spans[e.before], timeline.spans[e.after]) for e in timeline.edges]
    assert [(a.rank, a.op, b.rank, b.op) for a, b in pairs] == [
        (rank, "notify_dispatch", rank, "dispatch") for rank in (0, 0, 1, 1)
    ]
    assert len({(e.before, e.after) for e in timeline.edges}) == 4


def test_two_traces_of_one_rank_are_refused(tmp_path: Path) -> None:
    given = traces(tmp_path, clock_us={0: 0})
    with pytest.raises(MergeError, match="both are of rank 0"):
        merge([*given, *given])
    with pytest.raises(MergeError, match="nothing to merge"):
        merge([])


def test_ranks_come_from_the_name_or_else_the_place(tmp_path: Path) -> None:
    names = ("trace_rank-3.json", "trace_rank-1.json")
    given = [load_trace(write_trace(tmp_path / name, [kernel(NOTIFY, 0, 1)])) for name in names]
    assert merge(given).ranks == (1, 3)
    given = [load_trace(write_trace(tmp_path / name, [kernel(NOTIFY, 0, 1)])) for name in ("b.json", "a.json")]
    assert merge(given).ranks == (0, 1)
