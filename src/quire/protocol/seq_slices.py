"""A step's rows as one run of integers: what they are on the wire, and what a model's inputs are made of.

The run has all rows' samples, slots and starts; then their tokens, scores and drafts, each end to end, with how many
each row has in front where that isn't 0 or 1 for all. So a step of one token a row, as most are, is four columns of
one array, and nobody makes a Row of it who doesn't ask for one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import add
from typing import Any, NamedTuple, SupportsIndex, overload

import numpy as np

from quire.protocol.columns import (
    LENGTHS_LISTED,
    LENGTHS_ONE,
    LENGTHS_ZERO,
    FrameReader,
    WireError,
    flatten_runs,
    pack_struct,
    split_runs,
    tuple_new,
)
from quire.protocol.step_plan import SeqSlice

HEAD = struct.Struct("<cBBBI")  # the width of all numbers; kinds of tokens, scores and drafts; numbers in all
DTYPE_BY_WIDTH: dict[bytes, np.dtype[Any]] = {b"i": np.dtype("<i4"), b"q": np.dtype("<i8")}  # by the width's code
FIXED_COLUMNS = 3  # numbers that each row has


class RaggedColumn(NamedTuple):
    """A tuple of integers for each row: no row has any (`length_kind` ZEROS), each has one (ONES), or they have as many
    as are from `lengths_start` on (LISTED). The integers are those from `start` to before `end`."""

    length_kind: int
    lengths_start: int
    start: int
    end: int


class SeqSlices(Sequence[SeqSlice]):
    """`size` rows: `numbers` is the run, an int64 array if it was read and a list if it is of rows that were made here;
    `tokens`, `score_tokens` and `draft_tokens` say where these are. Of few rows lists cost less, of many arrays."""

    __slots__ = ("_tuple", "draft_tokens", "numbers", "score_tokens", "size", "tokens")

    def __init__(
        self, numbers: np.ndarray | list[int], size: int, tokens: RaggedColumn, scores: RaggedColumn,
        drafts: RaggedColumn,
        slices: tuple[SeqSlice, ...] | None = None,
    ) -> None:  # fmt: skip
        self.numbers, self.size, self._tuple = numbers, size, slices
        self.tokens, self.score_tokens, self.draft_tokens = tokens, scores, drafts

    @classmethod
    def from_slices(cls, slices: Sequence[SeqSlice]) -> SeqSlices:
        """Rows as a run, whatever they were."""
        if isinstance(slices, SeqSlices):
            return slices
        slots, tokens, starts, samples, scores, drafts = zip(*slices) if slices else ((),) * 6
        numbers = [*samples, *slots, *starts]
        some = _append_column(numbers, tokens) if any(tokens) else EMPTY_COLUMN
        scored = _append_column(numbers, scores) if any(scores) else EMPTY_COLUMN
        drafted = _append_column(numbers, drafts) if any(drafts) else EMPTY_COLUMN
        return cls(numbers, len(slices), some, scored, drafted, tuple(slices))

    # In Python's numbers

    @property
    def num_samples(self) -> list[int]:
        """Each row's."""
        return self._to_list(0, self.size)

    @property
    def slots(self) -> list[int]:
        """Each row's."""
        return self._to_list(self.size, 2 * self.size)

    @property
    def starts(self) -> list[int]:
        """Each row's."""
        return self._to_list(2 * self.size, FIXED_COLUMNS * self.size)

    def values(self, column: RaggedColumn) -> list[int]:
        """Their integers end to end."""
        return self._to_list(column.start, column.end)

    def _to_list(self, first: int, last: int) -> list[int]:
        part = self.numbers[first:last]
        return part if isinstance(part, list) else part.tolist()

    @property
    def ends(self) -> list[int]:
        """The position behind each row's tokens."""
        if self.tokens.length_kind != LENGTHS_LISTED:
            return [start + self.tokens.length_kind for start in self.starts]  # ZEROS is 0, and ONES 1
        return list(map(add, self.starts, self._to_list(self.tokens.lengths_start, self.tokens.start)))

    @property
    def has_score_tokens(self) -> bool:
        """Some row has tokens to score."""
        return self.score_tokens.length_kind != LENGTHS_ZERO

    @property
    def is_decode_only(self) -> bool:
        """Every row computes one token and samples what follows it; nothing is scored."""
        return self.tokens.length_kind == LENGTHS_ONE and not self.has_score_tokens and 0 not in self.num_samples

    @property
    def sampling_slices(self) -> SeqSlices:
        """The rows that sample."""
        return SeqSlices.from_slices(tuple(row for row in self if row.num_samples)) if 0 in self.num_samples else self

    # As arrays, int64

    def to_array(self) -> np.ndarray:
        """All numbers."""
        return np.asarray(self.numbers, dtype=np.int64)

    @property
    def token_counts(self) -> np.ndarray:
        """How many tokens each row has [R]."""
        if self.tokens.length_kind != LENGTHS_LISTED:
            return np.full(self.size, self.tokens.length_kind, dtype=np.int64)
        return np.asarray(self.numbers[self.tokens.lengths_start : self.tokens.start], dtype=np.int64)

    @property
    def decode_columns(self) -> np.ndarray:
        """Slots, starts and tokens [3, R] of rows of one token each."""
        assert self.tokens.length_kind == LENGTHS_ONE, "some row has more or less than one token"
        return np.asarray(self.numbers[self.size : 4 * self.size], dtype=np.int64).reshape(3, self.size)

    # As rows

    @property
    def as_tuple(self) -> tuple[SeqSlice, ...]:
        """The rows, made when they are first asked for."""
        if self._tuple is None:
            fixed = self.slots, self._column_tuples(self.tokens), self.starts, self.num_samples
            columns = zip(*fixed, self._column_tuples(self.score_tokens), self._column_tuples(self.draft_tokens))
            self._tuple = tuple(map(tuple_new, repeat(SeqSlice), columns))
        return self._tuple

    def _column_tuples(self, column: RaggedColumn) -> Iterable[tuple[int, ...]]:
        if column.length_kind == LENGTHS_ZERO:
            return repeat((), self.size)
        values = self.values(column)
        return (
            zip(values)
            if column.length_kind == LENGTHS_ONE
            else split_runs(tuple(values), self._to_list(column.lengths_start, column.start))
        )

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[SeqSlice]:
        return iter(self.as_tuple)

    @overload
    def __getitem__(self, at: SupportsIndex) -> SeqSlice: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[SeqSlice, ...]: ...
    def __getitem__(self, at: Any) -> Any:
        return self.as_tuple[at]

    def __eq__(self, other: object) -> bool:
        """Rows are equal to the tuple of them."""
        return self.as_tuple == (other.as_tuple if isinstance(other, SeqSlices) else other)

    def __hash__(self) -> int:
        return hash(self.as_tuple)

    def __repr__(self) -> str:
        return repr(self.as_tuple)


EMPTY_COLUMN = RaggedColumn(LENGTHS_ZERO, 0, 0, 0)


def _append_column(numbers: list[int], runs: Sequence[Sequence[int]]) -> RaggedColumn:
    """Append runs, of which some aren't empty, to numbers, behind their lengths where these are needed."""
    first, last, (kind, values) = len(numbers), len(numbers) + len(runs), flatten_runs(runs)
    if kind == LENGTHS_ONE:
        numbers += values
        return RaggedColumn(LENGTHS_ONE, first, first, last)
    numbers += (*map(len, runs), *values)
    return RaggedColumn(LENGTHS_LISTED, first, last, len(numbers))


def write_slices(slices: Sequence[SeqSlice]) -> bytes:
    """The wire form of rows, of which there are some. WireError for a number of more than 64 bits."""
    said = SeqSlices.from_slices(slices)
    numbers, width = said.numbers, b"i"
    try:
        packed = struct.pack(f"<{len(numbers)}i", *numbers)
    except struct.error:
        width, packed = b"q", pack_struct(struct.Struct(f"<{len(numbers)}q"), "rows", *numbers)
    return (
        HEAD.pack(
            width, said.tokens.length_kind, said.score_tokens.length_kind, said.draft_tokens.length_kind, len(numbers)
        )
        + packed
    )


def read_slices(reader: FrameReader, count: int) -> SeqSlices:
    """The `count` rows that a reader comes to. WireError for what is none."""
    at = reader.offset
    width, *kinds, total = reader.unpack(HEAD, "rows")
    kind = DTYPE_BY_WIDTH.get(width)
    if kind is None:
        raise WireError("rows", f"{width[0]} is no width of a number", at)
    start = reader.skip(kind.itemsize * total, "rows")
    place, runs = FIXED_COLUMNS * count, []
    if place > total:
        raise WireError("rows", f"{total} numbers are too few for {count} rows", at)
    numbers = np.frombuffer(reader.frame, kind, total, start).astype(np.int64)
    for code in kinds:
        runs.append(_read_column(numbers, place, count, code, at) if code else EMPTY_COLUMN)
        place = runs[-1].end or place
    if place != total:
        raise WireError("rows", f"{total - place} numbers belong to no row", at)
    tokens, scores, drafts = runs
    return SeqSlices(numbers, count, tokens, scores, drafts)


def _read_column(numbers: np.ndarray, place: int, count: int, code: int, at: int) -> RaggedColumn:
    """The runs of `count` rows, of which some have integers, from number `place` on."""
    end, remain = place + count, len(numbers) - place - count
    if code > LENGTHS_LISTED or remain < 0:
        raise WireError("rows", f"{count + remain} numbers remain for {count} runs of kind {code}", at)
    if code == LENGTHS_ONE:
        return RaggedColumn(LENGTHS_ONE, place, place, end)
    lengths = numbers[place:end]
    if lengths.min() < 0 or lengths.max() > remain or lengths.sum() > remain:
        raise WireError("rows", f"{remain} numbers remain for rows that have {lengths[:8].tolist()} ...", at)
    return RaggedColumn(LENGTHS_LISTED, place, end, end + int(lengths.sum()))
