"""The rules by which a step's batch is cut into sub-batches.

A rule runs once a step. Its `Split` is handed along, and nothing works a cut out a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from tbo.batch.balance import even_sizes
from tbo.batch.cuts import (
    DependsOn,
    balanced_cuts,
    bound_pairs,
    check_batch,
    cut_before,
    nearest_boundaries,
    nearest_tokens,
    separates,
)
from tbo.batch.parts import Part, Split, SplitRule, assemble
from tbo.batch.phase import Phase
from tbo.errors import SplitError

__all__ = [
    "RULE_OF_PHASE",
    "TOKEN_THRESHOLD",
    "Part",
    "Split",
    "SplitRule",
    "choose_split",
    "split_at",
    "split_attention_cost",
    "split_half",
    "split_rows",
    "split_sequences",
    "split_tokens",
]

TOKEN_THRESHOLD = 0.48
"""Least share of the tokens that the smaller of two parts may hold before a sequence is cut in two."""


def split_sequences(lengths: Sequence[int], n: int, *, depends_on: DependsOn = ()) -> Split:
    """Cuts between sequences, where the parts' token counts are as even as they can be.

    Args:
        lengths: tokens of each sequence in this step.
        n: number of parts, at least 1.
        depends_on: prefix reads inside this step; no cut separates a reader from its writer, and a batch in which all
            are bound together goes to one part.

    Raises:
        SplitError: `n`, a length or a dependency is not valid.
    """
    checked = check_batch(lengths, n, depends_on)
    reason = "cut between sequences, where the token counts are most even"
    return assemble(checked, balanced_cuts(checked, n, depends_on), SplitRule.SEQUENCES, reason)


def split_attention_cost(
    lengths: Sequence[int], n: int, *, prefix_lengths: Sequence[int] = (), depends_on: DependsOn = ()
) -> Split:
    """Cuts between sequences, where the parts' attention work is as even as it can be.

    Attention of `length` new tokens over a cached prefix costs `length * (length / 2 + prefix)` query-key pairs.

    Args:
        lengths: tokens of each sequence in this step.
        n: number of parts, at least 1.
        prefix_lengths: tokens of each sequence that the cache already holds; empty: none.
        depends_on: as in `split_sequences`.

    Raises:
        SplitError: `n`, a length or a dependency is not valid.
    """
    checked = check_batch(lengths, n, depends_on)
    prefixes = tuple(prefix_lengths) or (0,) * len(checked)
    if len(prefixes) != len(checked) or any(prefix < 0 for prefix in prefixes):
        raise SplitError(
            f"prefix lengths {prefixes} do not fit {len(checked)} sequences",
            remedy="Give one length, 0 or more, for each sequence.",
        )
    doubled_costs = [length * (length + 2 * prefix) for length, prefix in zip(checked, prefixes, strict=True)]
    reason = "cut between sequences, where the attention costs are most even"
    return assemble(checked, balanced_cuts(doubled_costs, n, depends_on), SplitRule.ATTENTION_COST, reason)


def split_half(lengths: Sequence[int], n: int, *, depends_on: DependsOn = ()) -> Split:
    """Cuts into equal numbers of sequences, larger parts first: for decode, and for verify with w tokens a sequence.

    Args:
        lengths: tokens of each sequence in this step (1 in decode, w in verify).
        n: number of parts, at least 1.
        depends_on: as in `split_sequences`; a cut moves to the nearest place that separates no reader and writer.

    Raises:
        SplitError: `n`, a length or a dependency is not valid.
    """
    checked = check_batch(lengths, n, depends_on)
    cuts = nearest_boundaries(len(checked), _even_places(len(checked), n), depends_on)
    return assemble(checked, cuts, SplitRule.HALF, "cut into equal numbers of sequences")


def split_tokens(
    lengths: Sequence[int], n: int, *, threshold: float = TOKEN_THRESHOLD, depends_on: DependsOn = ()
) -> Split:
    """Cuts between sequences if that is even enough, else into equal numbers of tokens, inside a sequence if need be.

    Args:
        lengths: tokens of each sequence in this step.
        n: number of parts, at least 1.
        threshold: share of the tokens under which the smaller of two parts is too small, 0 to 0.5; 0 never cuts a
            sequence. For `n` parts the share is `threshold * 2 / n`: the same fraction of an even share.
        depends_on: as in `split_sequences`; a sequence bound to another one is not cut either.

    Raises:
        SplitError: `n`, a length, a dependency or the threshold is not valid.
    """
    if not 0 <= threshold <= 0.5:
        raise SplitError(f"token split threshold {threshold} is not a share of two", remedy="Give 0 to 0.5.")
    whole = split_sequences(lengths, n, depends_on=depends_on)
    total, smallest, needed = whole.num_tokens, min(whole.rows), threshold * 2 / n
    if smallest >= needed * total:
        return whole
    cuts = nearest_tokens(whole.lengths, _even_places(total, n), depends_on)
    reason = (
        f"cut into equal numbers of tokens: cut between sequences, the smallest part would hold "
        f"{smallest / total:.1%} of the tokens, under {needed:.1%}"
    )
    by_tokens = assemble(whole.lengths, cuts, SplitRule.TOKENS, reason)
    # Bound sequences can push these cuts further away than the ones between sequences are.
    return by_tokens if _unevenness(by_tokens) < _unevenness(whole) else whole


def split_rows(batch_size: int, n: int, *, tokens_per_row: int = 1) -> Split:
    """Cuts a padded batch `[batch_size, tokens_per_row, ...]` along its rows, larger parts first.

    Slice the row dimension by `part.sequences`; `part.rows` counts tokens, padding included.

    Raises:
        SplitError: a number is not valid.
    """
    if batch_size < 0:
        raise SplitError(f"a batch of {batch_size} rows cannot be split", remedy="Give 0 rows or more.")
    lengths = check_batch((tokens_per_row,) * batch_size, n, ())
    cuts = [(row, 0) for row in _even_places(batch_size, n)]
    return assemble(lengths, cuts, SplitRule.ROWS, "cut into equal numbers of rows of the padded batch")


def split_at(lengths: Sequence[int], tokens: Iterable[int], *, depends_on: DependsOn = ()) -> Split:
    """Cuts before the given tokens of the batch; makes one part more than there are cuts.

    Raises:
        SplitError: a cut lies outside the batch, out of order, or separates a prefix's reader from its writer.
    """
    places = list(tokens)
    checked = check_batch(lengths, len(places) + 1, depends_on)
    starts = list(accumulate(checked, initial=0))
    if places != sorted(places) or any(not 0 <= place <= starts[-1] for place in places):
        raise SplitError(
            f"cuts before tokens {places} do not go upwards through a batch of {starts[-1]} tokens",
            remedy="Give positions from 0 to the number of tokens, none before the one it follows.",
        )
    cuts = [cut_before(starts, place) for place in places]
    for place, cut in zip(places, cuts, strict=True):
        for reader, writer in bound_pairs(depends_on):
            if separates(cut, reader, writer):
                raise SplitError(
                    f"a cut before token {place} separates sequence {reader} from sequence {writer}, whose blocks it "
                    "reads as its prefix while this step writes them",
                    remedy="Cut elsewhere, or use split_sequences or split_tokens, which avoid such cuts.",
                )
    return assemble(checked, cuts, SplitRule.GIVEN, "cut where the caller asked")


RULE_OF_PHASE: Mapping[Phase, SplitRule] = MappingProxyType(
    {
        Phase.PREFILL: SplitRule.TOKENS,
        Phase.MIXED: SplitRule.TOKENS,
        Phase.DECODE: SplitRule.HALF,
        Phase.VERIFY: SplitRule.HALF,
        Phase.IDLE: SplitRule.HALF,
    }
)
"""The rule `choose_split` uses for each phase. TOKENS is SEQUENCES unless those parts are too uneven."""


def choose_split(
    phase: Phase,
    lengths: Sequence[int],
    n: int,
    *,
    rule: SplitRule | None = None,
    prefix_lengths: Sequence[int] = (),
    depends_on: DependsOn = (),
    threshold: float = TOKEN_THRESHOLD,
) -> Split:
    """Splits by the phase's rule (`RULE_OF_PHASE`), or by `rule`.

    Args:
        phase: what the step computes; an idle step has no tokens and gives `n` empty parts.
        lengths: tokens of each sequence in this step.
        n: number of parts, at least 1.
        rule: another rule than the phase's.
        prefix_lengths: for `SplitRule.ATTENTION_COST`, as in `split_attention_cost`.
        depends_on: prefix reads inside this step, as in `split_sequences`.
        threshold: for `SplitRule.TOKENS`, as in `split_tokens`.

    Raises:
        SplitError: an argument is not valid, or an idle step has tokens.
    """
    if phase is Phase.IDLE and sum(lengths) > 0:
        raise SplitError(f"an idle step has {sum(lengths)} tokens", remedy="Give the phase the tokens belong to.")
    match rule or RULE_OF_PHASE[phase]:
        case SplitRule.SEQUENCES:
            return split_sequences(lengths, n, depends_on=depends_on)
        case SplitRule.HALF:
            return split_half(lengths, n, depends_on=depends_on)
        case SplitRule.TOKENS:
            return split_tokens(lengths, n, threshold=threshold, depends_on=depends_on)
        case SplitRule.ATTENTION_COST:
            return split_attention_cost(lengths, n, prefix_lengths=prefix_lengths, depends_on=depends_on)
        case SplitRule.ROWS | SplitRule.GIVEN as other:
            raise SplitError(f"no phase is split by the rule '{other.value}'", remedy="Call split_rows or split_at.")


def _even_places(count: int, n: int) -> list[int]:
    return list(accumulate(even_sizes(count, n)))[:-1]


def _unevenness(split: Split) -> int:
    return sum(rows * rows for rows in split.rows)
