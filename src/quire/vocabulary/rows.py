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

from quire.vocabulary.columns import LISTED, ONES, ZEROS, Reader, WireError, flat, new, pack, split
from quire.vocabulary.plan import Row

HEAD = struct.Struct("<cBBBI")  # the width of all numbers; kinds of tokens, scores and drafts; numbers in all
TYPES: dict[bytes, np.dtype[Any]] = {b"i": np.dtype("<i4"), b"q": np.dtype("<i8")}  # by the width's code
FIXED = 3  # numbers that each row has


class Runs(NamedTuple):
    """A tuple of integers for each row: no row has any (`kind` ZEROS), each has one (ONES), or they have as many as are
    from `lengths` on (LISTED). The integers are those from `first` to before `last`."""

    kind: int
    lengths: int
    first: int
    last: int


class Rows(Sequence[Row]):
    """`size` rows: `numbers` is the run, an int64 array if it was read and a list if it is of rows that were made here;
    `tokens`, `scores` and `drafts` say where these are. Of few rows lists cost less, of many arrays."""

    __slots__ = ("_all", "drafts", "numbers", "scores", "size", "tokens")

    def __init__(
        self, numbers: np.ndarray | list[int], size: int, tokens: Runs, scores: Runs, drafts: Runs,
        rows: tuple[Row, ...] | None = None,
    ) -> None:  # fmt: skip
        self.numbers, self.size, self._all = numbers, size, rows
        self.tokens, self.scores, self.drafts = tokens, scores, drafts

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Rows:
        """Rows as a run, whatever they were."""
        if isinstance(rows, Rows):
            return rows
        slots, tokens, starts, samples, scores, drafts = zip(*rows) if rows else ((),) * 6
        numbers = [*samples, *slots, *starts]
        some = _put(numbers, tokens) if any(tokens) else NONE
        scored = _put(numbers, scores) if any(scores) else NONE
        drafted = _put(numbers, drafts) if any(drafts) else NONE
        return cls(numbers, len(rows), some, scored, drafted, tuple(rows))

    # In Python's numbers

    @property
    def samples(self) -> list[int]:
        """Each row's."""
        return self._list(0, self.size)

    @property
    def slots(self) -> list[int]:
        """Each row's."""
        return self._list(self.size, 2 * self.size)

    @property
    def starts(self) -> list[int]:
        """Each row's."""
        return self._list(2 * self.size, FIXED * self.size)

    def values(self, runs: Runs) -> list[int]:
        """Their integers end to end."""
        return self._list(runs.first, runs.last)

    def _list(self, first: int, last: int) -> list[int]:
        part = self.numbers[first:last]
        return part if isinstance(part, list) else part.tolist()

    @property
    def ends(self) -> list[int]:
        """The position behind each row's tokens."""
        if self.tokens.kind != LISTED:
            return [start + self.tokens.kind for start in self.starts]  # ZEROS is 0, and ONES 1
        return list(map(add, self.starts, self._list(self.tokens.lengths, self.tokens.first)))

    @property
    def scored(self) -> bool:
        """Some row has tokens to score."""
        return self.scores.kind != ZEROS

    @property
    def decode(self) -> bool:
        """Every row computes one token and samples what follows it; nothing is scored."""
        return self.tokens.kind == ONES and not self.scored and 0 not in self.samples

    @property
    def sampling(self) -> Rows:
        """The rows that sample."""
        return Rows.of(tuple(row for row in self if row.sample)) if 0 in self.samples else self

    # As arrays, int64

    def array(self) -> np.ndarray:
        """All numbers."""
        return np.asarray(self.numbers, dtype=np.int64)

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens each row has [R]."""
        if self.tokens.kind != LISTED:
            return np.full(self.size, self.tokens.kind, dtype=np.int64)
        return np.asarray(self.numbers[self.tokens.lengths : self.tokens.first], dtype=np.int64)

    @property
    def singles(self) -> np.ndarray:
        """Slots, starts and tokens [3, R] of rows of one token each."""
        assert self.tokens.kind == ONES, "some row has more or less than one token"
        return np.asarray(self.numbers[self.size : 4 * self.size], dtype=np.int64).reshape(3, self.size)

    # As rows

    @property
    def all(self) -> tuple[Row, ...]:
        """The rows, made when they are first asked for."""
        if self._all is None:
            fixed = self.slots, self._tuples(self.tokens), self.starts, self.samples
            columns = zip(*fixed, self._tuples(self.scores), self._tuples(self.drafts))
            self._all = tuple(map(new, repeat(Row), columns))
        return self._all

    def _tuples(self, runs: Runs) -> Iterable[tuple[int, ...]]:
        if runs.kind == ZEROS:
            return repeat((), self.size)
        values = self.values(runs)
        return zip(values) if runs.kind == ONES else split(tuple(values), self._list(runs.lengths, runs.first))

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Row]:
        return iter(self.all)

    @overload
    def __getitem__(self, at: SupportsIndex) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, at: Any) -> Any:
        return self.all[at]

    def __eq__(self, other: object) -> bool:
        """Rows are equal to the tuple of them."""
        return self.all == (other.all if isinstance(other, Rows) else other)

    def __hash__(self) -> int:
        return hash(self.all)

    def __repr__(self) -> str:
        return repr(self.all)


NONE = Runs(ZEROS, 0, 0, 0)


def _put(numbers: list[int], runs: Sequence[Sequence[int]]) -> Runs:
    """Append runs, of which some aren't empty, to numbers, behind their lengths where these are needed."""
    first, last, (kind, values) = len(numbers), len(numbers) + len(runs), flat(runs)
    if kind == ONES:
        numbers += values
        return Runs(ONES, first, first, last)
    numbers += (*map(len, runs), *values)
    return Runs(LISTED, first, last, len(numbers))


def write_rows(rows: Sequence[Row]) -> bytes:
    """The wire form of rows, of which there are some. WireError for a number of more than 64 bits."""
    said = Rows.of(rows)
    numbers, width = said.numbers, b"i"
    try:
        packed = struct.pack(f"<{len(numbers)}i", *numbers)
    except struct.error:
        width, packed = b"q", pack(struct.Struct(f"<{len(numbers)}q"), "rows", *numbers)
    return HEAD.pack(width, said.tokens.kind, said.scores.kind, said.drafts.kind, len(numbers)) + packed


def read_rows(reader: Reader, count: int) -> Rows:
    """The `count` rows that a reader comes to. WireError for what is none."""
    at = reader.at
    width, *kinds, total = reader.take(HEAD, "rows")
    kind = TYPES.get(width)
    if kind is None:
        raise WireError("rows", f"{width[0]} is no width of a number", at)
    start = reader.skip(kind.itemsize * total, "rows")
    place, runs = FIXED * count, []
    if place > total:
        raise WireError("rows", f"{total} numbers are too few for {count} rows", at)
    numbers = np.frombuffer(reader.frame, kind, total, start).astype(np.int64)
    for code in kinds:
        runs.append(_runs(numbers, place, count, code, at) if code else NONE)
        place = runs[-1].last or place
    if place != total:
        raise WireError("rows", f"{total - place} numbers belong to no row", at)
    tokens, scores, drafts = runs
    return Rows(numbers, count, tokens, scores, drafts)


def _runs(numbers: np.ndarray, place: int, count: int, code: int, at: int) -> Runs:
    """The runs of `count` rows, of which some have integers, from number `place` on."""
    end, remain = place + count, len(numbers) - place - count
    if code > LISTED or remain < 0:
        raise WireError("rows", f"{count + remain} numbers remain for {count} runs of kind {code}", at)
    if code == ONES:
        return Runs(ONES, place, place, end)
    lengths = numbers[place:end]
    if lengths.min() < 0 or lengths.max() > remain or lengths.sum() > remain:
        raise WireError("rows", f"{remain} numbers remain for rows that have {lengths[:8].tolist()} ...", at)
    return Runs(LISTED, place, end, end + int(lengths.sum()))
