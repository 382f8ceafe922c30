"""Places where a batch may be cut.

A *cut* is a place between two tokens, written (sequence, offset): before token `offset` of that sequence. A sequence
that reads prefix blocks which another one writes in this step is *bound* to it, and no cut may come between the two:
a reader ahead of its writer would attend to blocks that hold nothing yet.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

from tbo.batch.balance import best_cuts
from tbo.errors import SplitError

Cut: TypeAlias = tuple[int, int]
DependsOn: TypeAlias = Sequence[Sequence[int]]
"""For each sequence, the sequences whose blocks, written in this step, it reads as its prefix. Empty: none reads."""


def check_batch(lengths: Sequence[int], n: int, depends_on: DependsOn) -> tuple[int, ...]:
    """The lengths as a tuple.

    Raises:
        SplitError: a negative length, fewer than one part, or a dependency on no other sequence of the batch.
    """
    if n < 1:
        raise SplitError(f"a batch cannot be split into {n} parts", remedy="Ask for 1 part or more.")
    if any(length < 0 for length in lengths):
        raise SplitError(f"sequence lengths {tuple(lengths)} are not all 0 or more", remedy="Give token counts.")
    check_depends_on(len(lengths), depends_on)
    return tuple(lengths)


def check_depends_on(num_sequences: int, depends_on: DependsOn) -> None:
    """Raises SplitError unless every dependency names another sequence of the batch."""
    if depends_on and len(depends_on) != num_sequences:
        raise SplitError(
            f"depends_on has {len(depends_on)} entries for {num_sequences} sequences",
            remedy="Give one tuple of sequence indices for each sequence, () where it reads no other's blocks.",
        )
    for reader, writer in bound_pairs(depends_on):
        if reader == writer or not 0 <= writer < num_sequences:
            raise SplitError(
                f"sequence {reader} cannot depend on sequence {writer} in a batch of {num_sequences}",
                remedy="Name another sequence of the batch, or leave its tuple empty.",
            )


def bound_pairs(depends_on: DependsOn) -> Iterator[tuple[int, int]]:
    """(reader, writer) of every dependency."""
    return ((reader, writer) for reader, writers in enumerate(depends_on) for writer in writers)


def separates(cut: Cut, one: int, other: int) -> bool:
    """Whether the cut comes between two sequences, or inside either of them."""
    sequence, offset = cut
    first, last = min(one, other), max(one, other)
    return first < sequence <= last or (first == sequence and offset > 0)


def free_boundaries(num_sequences: int, depends_on: DependsOn) -> list[int]:
    """Sequence boundaries that separate no bound pair, both ends of the batch included, going upwards.

    Boundary `b` is the place before sequence `b`.
    """
    opened = [0] * (num_sequences + 1)
    for reader, writer in bound_pairs(depends_on):
        opened[min(reader, writer) + 1] += 1
        opened[max(reader, writer) + 1] -= 1
    return [boundary for boundary, depth in enumerate(accumulate(opened)) if depth == 0]


def balanced_cuts(weights: Sequence[int], n: int, depends_on: DependsOn) -> list[Cut]:
    """The `n - 1` free sequence boundaries that share the sequences' weights out most evenly."""
    boundaries = free_boundaries(len(weights), depends_on)
    sums = list(accumulate(weights, initial=0))
    return [(boundaries[index], 0) for index in best_cuts([sums[boundary] for boundary in boundaries], n)]


def nearest_boundaries(num_sequences: int, targets: Sequence[int], depends_on: DependsOn) -> list[Cut]:
    """For each target boundary the nearest free one; the later of two as near, so that empty parts come last."""
    boundaries = free_boundaries(num_sequences, depends_on)
    return [(boundaries[_nearest(boundaries, target)], 0) for target in targets]


def nearest_tokens(lengths: Sequence[int], targets: Sequence[int], depends_on: DependsOn) -> list[Cut]:
    """For each target token the cut before it, or, where that separates a bound pair, the nearest free boundary.

    Between two free boundaries either every cut is free or none is, so no nearer free cut than a boundary exists.
    """
    starts = list(accumulate(lengths, initial=0))
    boundaries = free_boundaries(len(lengths), depends_on)
    cuts: list[Cut] = []
    for target in targets:
        cut = cut_before(starts, target)
        if any(separates(cut, reader, writer) for reader, writer in bound_pairs(depends_on)):
            cut = (boundaries[_nearest([starts[boundary] for boundary in boundaries], target)], 0)
        cuts.append(cut)
    return cuts


def _nearest(places: Sequence[int], target: int) -> int:
    """Index of the place nearest to the target; the later of two as near."""
    above = min(bisect_left(places, target), len(places) - 1)
    below = max(above - 1, 0)
    return below if target - places[below] < places[above] - target else above


def cut_before(starts: Sequence[int], token: int) -> Cut:
    """The cut before a token of the batch, given each sequence's first token and, last, the number of tokens.

    Sequences without tokens that lie at the cut go to the part before it.
    """
    sequence = bisect_right(starts, token) - 1
    return sequence, token - starts[sequence]


def spans(lengths: Sequence[int], cuts: Sequence[Cut]) -> Iterator[tuple[Cut, Cut]]:
    """Begin and end of every part that the cuts make, the batch's own ends included."""
    return pairwise([(0, 0), *cuts, (len(lengths), 0)])
