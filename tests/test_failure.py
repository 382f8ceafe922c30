"""Who is to blame: verdicts over what ranks last reported, without a process or a clock."""

from __future__ import annotations

from tbo.ops.failure import Beat, Failure, Kind, Sighting, connection_closed, disagreements, silence, store_lost

LAST_OP = "sub-batch 1, layer 3, stage 7, op_dispatch_b"


def sighting(
    *, seen: float = 100.0, started: int = 5, left: str = "", at: str = LAST_OP, waits_for: str = ""
) -> Sighting:
    return Sighting(beat=Beat(count=3, at=at, waits_for=waits_for, started=started, left=left), seen=seen)


def test_who_is_blamed_for_a_closed_connection() -> None:
    fresh, old, gone = sighting(), sighting(seen=97.0), sighting(seen=99.0, left="it was done")
    assert connection_closed({1: fresh, 2: fresh}, waits_for="rows", now=100.0, overdue=False) is None

    dead = connection_closed({1: fresh, 2: old}, waits_for="rows", now=100.0, overdue=False)
    assert dead == Failure(
        kind=Kind.DIED,
        rank=2,
        text="a connection closed during rows and no rank had recorded a failure (killed?): "
        f"rank 2 stopped reporting 3.0 s ago, last in {LAST_OP}",
    )

    left = connection_closed({1: gone, 2: old}, waits_for="rows", now=100.0, overdue=False)
    assert left is not None
    assert (left.kind, left.rank) == (Kind.LEFT, 1)
    # Leaving may be the consequence of a failure whose record is still on its way.
    just_gone = sighting(seen=99.9, left="it was done")
    assert connection_closed({1: just_gone}, waits_for="rows", now=100.0, overdue=False) is None

    nobody = connection_closed({1: fresh}, waits_for="rows", now=100.0, overdue=True)
    assert nobody is not None
    assert nobody.rank is None


def test_who_is_blamed_for_silence() -> None:
    here, absent = sighting(started=6), sighting(started=5, at="outside a step")
    found = silence({1: here, 2: absent, 3: absent}, waits_for="rows", number=6, seconds=2.0, now=100.5, rank=0)
    assert found.rank == 2
    assert found.text == (
        "rank 0 waited 2.0 s for rows, but ranks 2, 3 never came to it: "
        "rank 2 is alive, last in outside a step, and rank 3 is alive, last in outside a step"
    )
    stuck = silence({1: here}, waits_for="rows", number=6, seconds=2.0, now=100.5, rank=0)
    assert stuck.rank is None
    assert "all ranks had started it" in stuck.text


def test_who_is_named_when_the_store_is_lost() -> None:
    elsewhere = store_lost("somewhere:1", None, {0: sighting()})
    assert elsewhere.rank is None
    assert "a rank outside of this group" in elsewhere.text
    inside = store_lost("somewhere:1", 0, {0: sighting(left="it was done")})
    assert inside.rank == 0
    assert inside.text == (
        "rank 0, which hosts the store (somewhere:1), died or stopped answering; "
        f"it was last in {LAST_OP} and left, because it was done"
    )


def test_failures_and_reports_survive_the_store() -> None:
    failure = Failure(kind=Kind.SILENT, rank=None, text='quotes " and ünicode')
    assert Failure.decode(failure.encode().encode()) == failure
    beat = sighting().beat
    assert Beat.decode(beat.encode().encode()) == beat


def test_equal_facts_make_no_disagreement() -> None:
    assert disagreements([{"a": "1"}, {"a": "1"}]) == []
