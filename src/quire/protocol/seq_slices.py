"""A step's slices as one array of integers: their wire format, from which model inputs are built too.

The array has the num_samples, slots and starts of all slices; then their tokens, score tokens and draft tokens, each
concatenated, after the number of each slice unless that is 0 or 1 for all. So a step of one token for each slice, as
most are, is four columns of one array. SeqSlice objects are made only on demand.
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

HEAD = struct.Struct("<cBBBI")  # width of the numbers; length kinds of tokens, scores and drafts; number of numbers
DTYPE_BY_WIDTH: dict[bytes, np.dtype[Any]] = {b"i": np.dtype("<i4"), b"q": np.dtype("<i8")}  # by the code of the width
FIXED_COLUMNS = 3  # num_samples, slots and starts


class RaggedColumn(NamedTuple):
    """A tuple of integers for each slice, at [start, end) of the array. `length_kind`: all are empty (LENGTHS_ZERO),
    all have one integer (LENGTHS_ONE), or their lengths begin at `lengths_start` (LENGTHS_LISTED)."""

    length_kind: int
    lengths_start: int
    start: int
    end: int


class SeqSlices(Sequence[SeqSlice]):
    """`size` slices. `numbers`: the array, as int64 if decoded, as a list if made from SeqSlice objects. Lists cost
    less for few slices, arrays for many. `tokens`, `score_tokens` and `draft_tokens` say where these are in it."""

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
        """Return slices of any form as SeqSlices."""
        if isinstance(slices, SeqSlices):
            return slices
        slots, tokens, starts, samples, scores, drafts = zip(*slices) if slices else ((),) * 6
        numbers = [*samples, *slots, *starts]
        token_column = _append_column(numbers, tokens) if any(tokens) else EMPTY_COLUMN
        score_column = _append_column(numbers, scores) if any(scores) else EMPTY_COLUMN
        draft_column = _append_column(numbers, drafts) if any(drafts) else EMPTY_COLUMN
        return cls(numbers, len(slices), token_column, score_column, draft_column, tuple(slices))

    @classmethod
    def from_arrays(
        cls, fixed: np.ndarray, lengths: np.ndarray, tokens: np.ndarray, score_lengths: np.ndarray, scores: np.ndarray
    ) -> SeqSlices:
        """Return R slices without draft tokens from int64 arrays: `fixed` [3, R] (num_samples, slots and starts), the
        numbers of their tokens [R], all tokens, the numbers of their score tokens [R], and all score tokens."""
        count = len(lengths)
        parts, offset, columns = [fixed.reshape(-1)], FIXED_COLUMNS * count, []
        for sizes, values in ((lengths, tokens), (score_lengths, scores)):
            kind = int(sizes[0]) if (sizes == sizes[0]).all() and sizes[0] <= LENGTHS_ONE else LENGTHS_LISTED
            start = offset + count * (kind == LENGTHS_LISTED)
            columns.append(RaggedColumn(kind, offset, start, start + len(values)))
            parts += [sizes, values] if kind == LENGTHS_LISTED else [values]
            offset = start + len(values)
        token_column, score_column = columns
        return cls(np.concatenate(parts), count, token_column, score_column, EMPTY_COLUMN)

    # As lists

    @property
    def num_samples(self) -> list[int]:
        """Of each slice."""
        return self._to_list(0, self.size)

    @property
    def slots(self) -> list[int]:
        """Of each slice."""
        return self._to_list(self.size, 2 * self.size)

    @property
    def starts(self) -> list[int]:
        """Of each slice."""
        return self._to_list(2 * self.size, FIXED_COLUMNS * self.size)

    def values(self, column: RaggedColumn) -> list[int]:
        """Return the concatenated integers of a column."""
        return self._to_list(column.start, column.end)

    def _to_list(self, first: int, last: int) -> list[int]:
        part = self.numbers[first:last]
        return part if isinstance(part, list) else part.tolist()

    @property
    def ends(self) -> list[int]:
        """The position after the tokens of each slice."""
        if self.tokens.length_kind != LENGTHS_LISTED:
            return [start + self.tokens.length_kind for start in self.starts]  # LENGTHS_ZERO is 0, LENGTHS_ONE is 1
        return list(map(add, self.starts, self._to_list(self.tokens.lengths_start, self.tokens.start)))

    @property
    def has_score_tokens(self) -> bool:
        """True if a slice has tokens to score."""
        return self.score_tokens.length_kind != LENGTHS_ZERO

    @property
    def has_draft_tokens(self) -> bool:
        """True if a slice has draft tokens."""
        return self.draft_tokens.length_kind != LENGTHS_ZERO

    @property
    def is_decode_only(self) -> bool:
        """True if every slice computes one token and samples, and nothing is scored."""
        return self.tokens.length_kind == LENGTHS_ONE and not self.has_score_tokens and 0 not in self.num_samples

    @property
    def sampling_slices(self) -> SeqSlices:
        """The slices that sample."""
        if 0 not in self.num_samples:
            return self
        return SeqSlices.from_slices(tuple(one for one in self if one.num_samples))

    # As arrays, int64

    def to_array(self) -> np.ndarray:
        """Return all numbers."""
        return np.asarray(self.numbers, dtype=np.int64)

    def lengths(self, column: RaggedColumn) -> np.ndarray:
        """Return the number of integers of each slice [R] in a column."""
        if column.length_kind != LENGTHS_LISTED:
            return np.full(self.size, column.length_kind, dtype=np.int64)
        return np.asarray(self.numbers[column.lengths_start : column.start], dtype=np.int64)

    @property
    def token_counts(self) -> np.ndarray:
        """The number of tokens of each slice [R]."""
        return self.lengths(self.tokens)

    @property
    def decode_columns(self) -> np.ndarray:
        """Slots, starts and tokens [3, R] of slices with one token each."""
        assert self.tokens.length_kind == LENGTHS_ONE, "a slice has more or fewer tokens than one"
        return np.asarray(self.numbers[self.size : 4 * self.size], dtype=np.int64).reshape(3, self.size)

    # As SeqSlice objects

    @property
    def as_tuple(self) -> tuple[SeqSlice, ...]:
        """The slices, made on first use."""
        if self._tuple is None:
            fixed = self.slots, self._column_tuples(self.tokens), self.starts, self.num_samples
            columns = zip(*fixed, self._column_tuples(self.score_tokens), self._column_tuples(self.draft_tokens))
            self._tuple = tuple(map(tuple_new, repeat(SeqSlice), columns))
        return self._tuple

    def _column_tuples(self, column: RaggedColumn) -> Iterable[tuple[int, ...]]:
        if column.length_kind == LENGTHS_ZERO:
            return repeat((), self.size)
        values = self.values(column)
        if column.length_kind == LENGTHS_ONE:
            return zip(values)
        return split_runs(tuple(values), self._to_list(column.lengths_start, column.start))

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
        """SeqSlices are equal to the tuple of their slices."""
        return self.as_tuple == (other.as_tuple if isinstance(other, SeqSlices) else other)

    def __hash__(self) -> int:
        return hash(self.as_tuple)

    def __repr__(self) -> str:
        return repr(self.as_tuple)


EMPTY_COLUMN = RaggedColumn(LENGTHS_ZERO, 0, 0, 0)


def split_slices(row_counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each row, of slices that have `row_counts` [S] rows: the index of its slice, and its number in the
    slice, from 0."""
    of = np.repeat(np.arange(len(row_counts)), row_counts)
    return of, np.arange(len(of)) - (row_counts.cumsum() - row_counts)[of]


def _append_column(numbers: list[int], runs: Sequence[Sequence[int]]) -> RaggedColumn:
    """Append runs, not all of them empty, to `numbers`, after their lengths unless all have length 1."""
    first, last, (kind, values) = len(numbers), len(numbers) + len(runs), flatten_runs(runs)
    if kind == LENGTHS_ONE:
        numbers += values
        return RaggedColumn(LENGTHS_ONE, first, first, last)
    numbers += (*map(len, runs), *values)
    return RaggedColumn(LENGTHS_LISTED, first, last, len(numbers))


def write_slices(slices: Sequence[SeqSlice]) -> bytes:
    """Return the wire format of at least one slice. Raise WireError for a number of more than 64 bits."""
    columns = SeqSlices.from_slices(slices)
    numbers, width = columns.numbers, b"i"
    try:
        packed = struct.pack(f"<{len(numbers)}i", *numbers)
    except struct.error:
        width, packed = b"q", pack_struct(struct.Struct(f"<{len(numbers)}q"), "rows", *numbers)
    tokens, scores, drafts = columns.tokens, columns.score_tokens, columns.draft_tokens
    return HEAD.pack(width, tokens.length_kind, scores.length_kind, drafts.length_kind, len(numbers)) + packed


def read_slices(reader: FrameReader, count: int) -> SeqSlices:
    """Read `count` slices. Raise WireError if they are invalid."""
    at = reader.offset
    width, *kinds, total = reader.unpack(HEAD, "rows")
    dtype = DTYPE_BY_WIDTH.get(width)
    if dtype is None:
        raise WireError("rows", f"{width[0]} is no width of a number", at)
    start = reader.skip(dtype.itemsize * total, "rows")
    offset, columns = FIXED_COLUMNS * count, []
    if offset > total:
        raise WireError("rows", f"{total} numbers are too few for {count} rows", at)
    numbers = np.frombuffer(reader.frame, dtype, total, start).astype(np.int64)
    for kind in kinds:
        columns.append(_read_column(numbers, offset, count, kind, at) if kind else EMPTY_COLUMN)
        offset = columns[-1].end or offset
    if offset != total:
        raise WireError("rows", f"{total - offset} numbers belong to no row", at)
    tokens, scores, drafts = columns
    return SeqSlices(numbers, count, tokens, scores, drafts)


def _read_column(numbers: np.ndarray, place: int, count: int, code: int, at: int) -> RaggedColumn:
    """Return the column of `count` slices, not all of them empty, from number `place` on."""
    end, remain = place + count, len(numbers) - place - count
    if code > LENGTHS_LISTED or remain < 0:
        raise WireError("rows", f"{count + remain} numbers remain for {count} runs of kind {code}", at)
    if code == LENGTHS_ONE:
        return RaggedColumn(LENGTHS_ONE, place, place, end)
    lengths = numbers[place:end]
    if lengths.min() < 0 or lengths.max() > remain or lengths.sum() > remain:
        raise WireError("rows", f"{remain} numbers remain for rows that have {lengths[:8].tolist()} ...", at)
    return RaggedColumn(LENGTHS_LISTED, place, end, end + int(lengths.sum()))
