"""A step's batch, and how it is cut along with a split.

Every field of a `Batch` says, where it is defined, how it is cut: per token, per sequence, or shared. There is no
list of known names anywhere else to forget a field in, and a field that does not say is refused.

Letters in shapes: T tokens of this rank, B sequences, S positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from itertools import accumulate
from typing import Any, TypeVar, cast, dataclass_transform

import torch

from tbo.batch.cuts import bound_pairs, check_batch, separates
from tbo.batch.parts import Part
from tbo.batch.phase import Phase
from tbo.errors import SplitError

__all__ = ["Batch", "Phase", "TokenBatch", "per_sequence", "per_token", "shared", "take"]

_MARK = "tbo.mark"
_REMEDY = "Declare it with per_token(dim=...), per_sequence(dim=...) or shared()."


class _Kind(Enum):
    TOKEN = "token"  # noqa: S105 - a token of text
    SEQUENCE = "sequence"
    SHARED = "shared"
    LAYOUT = "layout"


@dataclass(frozen=True, slots=True)
class _Mark:
    kind: _Kind
    dim: int = 0


def _marked(mark: _Mark, default: object) -> Any:
    return field(metadata={_MARK: mark}) if default is MISSING else field(default=default, metadata={_MARK: mark})


def per_token(*, dim: int = 0, default: object = MISSING) -> Any:
    """Marks a field whose dimension `dim` has one entry a token; each sub-batch gets those of its tokens.

    The value is a tensor, a tuple, list or mapping of tensors that are each cut alike, a tuple or list of plain values
    with one a token, or None.
    """
    return _marked(_Mark(_Kind.TOKEN, dim), default)


def per_sequence(*, dim: int = 0, default: object = MISSING) -> Any:
    """Marks a field whose dimension `dim` has one entry a sequence; values as for `per_token`.

    A sequence that is cut in two keeps its entry in both sub-batches.
    """
    return _marked(_Mark(_Kind.SEQUENCE, dim), default)


def shared(*, default: object = MISSING) -> Any:
    """Marks a field that every sub-batch gets whole: the same object, not a copy."""
    return _marked(_Mark(_Kind.SHARED), default)


def _layout(*, default: object = MISSING) -> Any:
    """Marks the fields that say which tokens there are; `take` works them out from the part."""
    return _marked(_Mark(_Kind.LAYOUT), default)


def _marks(cls: type[Any]) -> dict[str, _Mark]:
    marks: dict[str, _Mark] = {}
    for declared in fields(cls):
        mark = declared.metadata.get(_MARK)
        if not isinstance(mark, _Mark):
            raise SplitError(f"field '{declared.name}' of {cls.__name__} does not say how it is cut", remedy=_REMEDY)
        marks[declared.name] = mark
    return marks


@dataclass_transform(
    kw_only_default=True,
    frozen_default=True,
    eq_default=False,
    field_specifiers=(per_token, per_sequence, shared, _layout),
)
class _Declared:
    """Makes every subclass a frozen keyword-only dataclass and refuses a field without a mark."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Compared and hashed by identity: tensors have no truth value, and metadata cached for one sub-batch must
        # never be found for another one that happens to look alike.
        dataclass(frozen=True, kw_only=True, eq=False, repr=False)(cls)
        _marks(cls)


class Batch(_Declared):
    """What one rank computes in one step. Subclass it and declare every further field with a mark.

    A subclass becomes a frozen keyword-only dataclass by itself: no decorator.

    Attributes:
        phase: what kind of tokens these are.
        lengths: tokens of each sequence in this step; tokens lie one sequence after the other.
        prefix_lengths: tokens of each sequence already in the cache before this step's; default: none.
        depends_on: for each sequence, the sequences of this batch whose blocks, written in this step, it reads as its
            prefix; default: none does. Sub-batches never separate the two.

    Raises:
        SplitError: at the class, a field has no mark; at an instance, the numbers do not fit each other.
    """

    phase: Phase = _layout()
    lengths: tuple[int, ...] = _layout()
    prefix_lengths: tuple[int, ...] = _layout(default=())
    depends_on: tuple[tuple[int, ...], ...] = _layout(default=())

    def __post_init__(self) -> None:
        check_batch(self.lengths, 1, self.depends_on)
        if not self.prefix_lengths:
            object.__setattr__(self, "prefix_lengths", (0,) * len(self.lengths))
        if len(self.prefix_lengths) != len(self.lengths) or any(length < 0 for length in self.prefix_lengths):
            raise SplitError(
                f"prefix lengths {self.prefix_lengths} do not fit {len(self.lengths)} sequences",
                remedy="Give one length, 0 or more, for each sequence.",
            )
        if self.phase is Phase.IDLE and self.num_tokens:
            raise SplitError(
                f"an idle batch has {self.num_tokens} tokens", remedy="Give the phase that the tokens belong to."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.phase.name}, {self.num_sequences} sequences, {self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        """Tokens in this step, T."""
        return sum(self.lengths)

    @property
    def num_sequences(self) -> int:
        """Sequences, B."""
        return len(self.lengths)

    @property
    def starts(self) -> tuple[int, ...]:
        """First token of each sequence and, last, the number of tokens: B + 1 numbers, (0,) for an empty batch."""
        return tuple(accumulate(self.lengths, initial=0))


class TokenBatch(Batch):
    """The smallest useful batch.

    Attributes:
        input_ids: token ids, `[T]`.
        positions: position of each token in its sequence, `[T]`.
    """

    input_ids: torch.Tensor | None = per_token(default=None)
    positions: torch.Tensor | None = per_token(default=None)


AnyBatch = TypeVar("AnyBatch", bound=Batch)


def take(batch: AnyBatch, part: Part) -> AnyBatch:
    """The sub-batch of `batch` that `part` describes.

    Tensors are views. The phase stays, also for a part without tokens: it runs the same stages. Of a sequence that is
    cut in two, the later part has the earlier part's tokens added to its prefix length.

    Args:
        batch: the whole step's batch.
        part: a part of a split of this batch.

    Raises:
        SplitError: the part is not of this batch, it separates a prefix's reader from its writer, or a field has no
            mark or not one entry for each token or sequence. The message names the field.
    """
    marks = _marks(type(batch))
    undeclared = sorted(vars(batch).keys() - marks.keys())
    if undeclared:
        raise SplitError(
            f"{type(batch).__name__} holds '{undeclared[0]}', which is not one of its fields, so no sub-batch would "
            "get it",
            remedy=_REMEDY,
        )
    _check_part(batch, part)
    values = _take_layout(batch, part)
    for name, mark in marks.items():
        if mark.kind is not _Kind.LAYOUT:
            values[name] = _take_field(batch, name, mark, part)
    return type(batch)(**values)


def _check_part(batch: Batch, part: Part) -> None:
    inside = batch.lengths[part.sequences]
    whole_lengths = list(part.lengths)
    if whole_lengths:
        whole_lengths[0] += part.offset
        whole_lengths[-1] += part.remaining
        token_start = batch.starts[part.sequence_start] + part.offset if inside else -1
    else:
        token_start = part.token_start
    if tuple(whole_lengths) != inside or token_start != part.token_start or part.token_stop > batch.num_tokens:
        raise SplitError(
            f"part {part.index} has {part.lengths} tokens of sequences {part.sequence_start} to {part.sequence_stop}, "
            f"which does not fit a batch with lengths {batch.lengths}",
            remedy="Split this very batch's lengths, and take parts of that split only.",
        )
    begin = (part.sequence_start, part.offset)
    end = (part.sequence_stop, 0) if not part.remaining else (part.sequence_stop - 1, inside[-1] - part.remaining)
    for reader, writer in bound_pairs(batch.depends_on):
        if separates(begin, reader, writer) or separates(end, reader, writer):
            raise SplitError(
                f"part {part.index} separates sequence {reader} from sequence {writer}, whose blocks it reads as its "
                "prefix while this step writes them",
                remedy="Give the batch's depends_on to the split function: it then cuts elsewhere.",
            )


def _take_layout(batch: Batch, part: Part) -> dict[str, Any]:
    prefix_lengths = list(batch.prefix_lengths[part.sequences])
    if prefix_lengths:
        prefix_lengths[0] += part.offset
    first = part.sequence_start
    depends_on = tuple(tuple(writer - first for writer in writers) for writers in batch.depends_on[part.sequences])
    return {
        "phase": batch.phase,
        "lengths": part.lengths,
        "prefix_lengths": tuple(prefix_lengths),
        "depends_on": depends_on,
    }


def _take_field(batch: Batch, name: str, mark: _Mark, part: Part) -> object:
    value = getattr(batch, name)
    if mark.kind is _Kind.SHARED:
        return value
    if mark.kind is _Kind.TOKEN:
        return _cut(value, mark, part.tokens, batch.num_tokens, name)
    return _cut(value, mark, part.sequences, batch.num_sequences, name)


def _cut(value: object, mark: _Mark, where: slice, count: int, name: str) -> object:
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        if not -value.dim() <= mark.dim < value.dim() or value.shape[mark.dim] != count:
            raise _misfit(name, mark, count, f"a tensor of shape {tuple(value.shape)}")
        return value.narrow(mark.dim, where.start, where.stop - where.start)
    if isinstance(value, Mapping):
        members = cast("Mapping[object, object]", value)
        return {key: _cut(member, mark, where, count, name) for key, member in members.items()}
    if isinstance(value, tuple | list):
        items = cast("tuple[object, ...] | list[object]", value)
        if any(isinstance(item, torch.Tensor) for item in items):
            return type(items)(_cut(item, mark, where, count, name) for item in items)
        if mark.dim == 0 and len(items) == count:
            return items[where]
        raise _misfit(name, mark, count, f"{len(items)} values")
    raise _misfit(name, mark, count, f"a {type(value).__name__}")


def _misfit(name: str, mark: _Mark, count: int, found: str) -> SplitError:
    return SplitError(
        f"field '{name}' has {found}, but its dimension {mark.dim} must have one entry for each of {count} "
        f"{mark.kind.value}s",
        remedy="Give it that shape, or mark it shared() if it is not per token or per sequence.",
    )
