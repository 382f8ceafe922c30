"""What a split is: a frozen record of every sub-batch.

A `Split` is computed once and handed along: it holds everything that anybody asks about it later, so nothing works a
cut out a second time (two implementations that disagree by one token are a deadlock). Sub-batches without tokens are
legal, explicit parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from tbo.batch.cuts import Cut, spans
from tbo.errors import SplitError


class SplitRule(Enum):
    """How the cuts were found."""

    SEQUENCES = "sequences"
    HALF = "half"
    TOKENS = "tokens"
    ATTENTION_COST = "attention_cost"
    ROWS = "rows"
    GIVEN = "given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One sub-batch of a split.

    Attributes:
        index: the sub-batch's number.
        token_start, token_stop: its tokens in the batch.
        sequence_start, sequence_stop: the sequences it holds; one that is cut belongs to the parts on both sides.
        lengths: its tokens of each of those sequences.
        offset: tokens of its first sequence that earlier parts hold: their keys and values are prefix to this part.
        remaining: tokens of its last sequence that later parts hold: that sequence does not end here.
    """

    index: int
    token_start: int
    token_stop: int
    sequence_start: int
    sequence_stop: int
    lengths: tuple[int, ...]
    offset: int = 0
    remaining: int = 0

    @property
    def rows(self) -> int:
        """Number of tokens: each is one row of the hidden states."""
        return self.token_stop - self.token_start

    @property
    def tokens(self) -> slice:
        """Its tokens as a slice of a per-token dimension."""
        return slice(self.token_start, self.token_stop)

    @property
    def sequences(self) -> slice:
        """Its sequences as a slice of a per-sequence dimension (the row dimension of a padded batch)."""
        return slice(self.sequence_start, self.sequence_stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A batch cut into sub-batches: the parts hold every token once, in order.

    Attributes:
        rule: how the cuts were found.
        reason: one sentence for a person: why the cuts are where they are.
        lengths: tokens of each sequence of the whole batch.
        parts: the sub-batches, empty ones included.

    Raises:
        SplitError: the parts do not hold every token once, in order.
    """

    rule: SplitRule
    reason: str
    lengths: tuple[int, ...]
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        held = [0] * len(self.lengths)
        reached = 0
        for index, part in enumerate(self.parts):
            sequences = range(len(self.lengths))[part.sequences]
            fits = (
                part.index == index
                and part.token_start == reached
                and part.rows == sum(part.lengths)
                and len(sequences) == len(part.lengths)
                and part.offset == (held[sequences[0]] if sequences else 0)
            )
            if not fits:
                raise _broken(f"part {index} ({part}) does not go on at token {reached}")
            reached = part.token_stop
            for sequence, length in zip(sequences, part.lengths, strict=True):
                held[sequence] += length
        if tuple(held) != self.lengths:
            raise _broken(f"its parts hold {tuple(held)} tokens of sequences that have {self.lengths}")

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole batch."""
        return sum(self.lengths)

    @property
    def rows(self) -> tuple[int, ...]:
        """Tokens of each part: what this rank's vote says."""
        return tuple(part.rows for part in self.parts)


def assemble(lengths: tuple[int, ...], cuts: Sequence[Cut], rule: SplitRule, reason: str) -> Split:
    """The split that the cuts make: one part more than there are cuts."""
    starts = list(accumulate(lengths, initial=0))
    parts: list[Part] = []
    for index, (begin, end) in enumerate(spans(lengths, cuts)):
        (first, offset), (last, taken) = begin, end
        stop = last + (taken > 0)
        if begin == end:
            # A part without tokens holds no sequence, not even the one it would lie inside.
            offset, taken, stop = 0, 0, first
        held = list(lengths[first:stop])
        if taken:
            held[-1] = taken
        if offset:
            held[0] -= offset
        token_start = starts[begin[0]] + begin[1]
        parts.append(
            Part(
                index=index,
                token_start=token_start,
                token_stop=token_start + sum(held),
                sequence_start=first,
                sequence_stop=stop,
                lengths=tuple(held),
                offset=offset,
                remaining=lengths[last] - taken if taken else 0,
            )
        )
    return Split(rule=rule, reason=reason, lengths=lengths, parts=tuple(parts))


def _broken(what: str) -> SplitError:
    return SplitError(
        f"a split does not hold every token once, in order: {what}", remedy="Make splits with the split_* functions."
    )
