"""A step's rows as one run of integers: what they are on the wire, and what a model's inputs are made of.

The run has all rows' samples, slots and starts; then their tokens, scores and drafts, each end to end, with how many
each row has in front where that isn't 0 or 1 for all. So a step of one token a row, as most are, is four columns of
one array, and nobody makes a Row of it who doesn't ask for one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple, SupportsIndex, overload

import numpy as np

from quire.vocabulary.columns import LISTED, ONES, ZEROS, Reader, WireError, flat, new, split
from quire.vocabulary.plan import Row

HEAD = struct.Struct("<cBBBI")  # the width of all numbers; kinds of tokens, scores and drafts; numbers in all
TYPES: dict[bytes, np.dtype[Any]] = {b"i": np.dtype("<i4"), b"q": np.dtype("<i8")}  # by the width's code
FIXED = 3  # numbers that each row has


class Runs(NamedTuple):
    """A tuple of integers for each row: no row has any (`kind` ZEROS), each has one (ONES), or they have as many as are
    at `lengths` (LISTED). Places of the run where the lengths are, if any, and the integers."""

    kind: int
    lengths: slice
    values: slice


class Rows(Sequence[Row]):
    """`size` rows. `numbers` int64 is the run; `tokens`, `scores` and `drafts` say where these are."""

    def __init__(self, numbers: np.ndarray, size: int, tokens: Runs, scores: Runs, drafts: Runs) -> None:
        self.numbers, self.size = numbers, size
        self.tokens, self.scores, self.drafts = tokens, scores, drafts

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Rows:
        """Rows as arrays, whatever they were. WireError for a number of more than 64 bits."""
        if isinstance(rows, Rows):
            return rows
        found = read_rows(Reader(write_rows(rows)), len(rows)) if rows else cls(NOTHING, 0, NONE, NONE, NONE)
        found.__dict__["all"] = tuple(rows)
        return found

    # As arrays

    @property
    def samples(self) -> np.ndarray:
        """Each row's, int64 [R]."""
        return self.numbers[: self.size]

    @property
    def slots(self) -> np.ndarray:
        """Each row's, int64 [R]."""
        return self.numbers[self.size : 2 * self.size]

    @property
    def starts(self) -> np.ndarray:
        """Each row's, int64 [R]."""
        return self.numbers[2 * self.size : FIXED * self.size]

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens each row has, int64 [R]."""
        kind = self.tokens.kind
        return self.numbers[self.tokens.lengths] if kind == LISTED else np.full(self.size, kind, dtype=np.int64)

    @property
    def singles(self) -> np.ndarray:
        """Slots, starts and tokens [3, R] of rows of one token each."""
        assert self.tokens.kind == ONES, "some row has more or less than one token"
        return self.numbers[self.size : 4 * self.size].reshape(3, self.size)

    @property
    def decode(self) -> bool:
        """Every row computes one token and samples what follows it; nothing is scored."""
        return self.tokens.kind == ONES and self.scores.kind == ZEROS and bool(self.samples.all())

    def values(self, runs: Runs) -> np.ndarray:
        """Their integers end to end, int64."""
        return self.numbers[runs.values]

    # As rows

    @cached_property
    def all(self) -> tuple[Row, ...]:
        """The rows, made when they are first asked for."""
        fixed = self.slots.tolist(), self._tuples(self.tokens), self.starts.tolist(), self.samples.tolist()
        return tuple(map(new, repeat(Row), zip(*fixed, self._tuples(self.scores), self._tuples(self.drafts))))

    def _tuples(self, runs: Runs) -> Iterable[tuple[int, ...]]:
        if runs.kind == ZEROS:
            return repeat((), self.size)
        values = self.values(runs).tolist()
        return zip(values) if runs.kind == ONES else split(tuple(values), self.numbers[runs.lengths].tolist())

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


NOTHING, NONE = np.empty(0, dtype=np.int64), Runs(ZEROS, slice(0), slice(0))


def write_rows(rows: Sequence[Row]) -> bytes:
    """The wire form of rows, of which there are some. WireError names the field with a number of more than 64 bits."""
    slots, tokens, starts, samples, scores, drafts = zip(*rows)
    (some, first), (scored, second), (drafted, third) = _counted(tokens), _counted(scores), _counted(drafts)
    numbers = (*samples, *slots, *starts, *first, *second, *third)
    width = b"i"
    try:
        said = struct.pack(f"<{len(numbers)}i", *numbers)
    except struct.error:
        width = b"q"
        said = _wide(samples=samples, slots=slots, starts=starts, tokens=first, scores=second, drafts=third)
    return HEAD.pack(width, some, scored, drafted, len(numbers)) + said


def _counted(runs: Sequence[tuple[int, ...]]) -> tuple[int, Sequence[int]]:
    """How long all runs are, and their numbers, behind the counts where these are needed."""
    kind, numbers = flat(runs)
    return kind, numbers if kind != LISTED else (*map(len, runs), *numbers)


def _wide(**columns: Sequence[int]) -> bytes:
    said = b""
    for name, numbers in columns.items():
        try:
            said += struct.pack(f"<{len(numbers)}q", *numbers)
        except struct.error as error:
            raise WireError(f"row {name}", str(error)) from error
    return said


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
        found = _runs(numbers, place, count, code, at) if code else NONE
        place = found.values.stop if code else place
        runs.append(found)
    if place != total:
        raise WireError("rows", f"{total - place} numbers belong to no row", at)
    return Rows(numbers, count, *runs)


def _runs(numbers: np.ndarray, place: int, count: int, code: int, at: int) -> Runs:
    """The runs of `count` rows, of which some have integers, from number `place` on."""
    end, remain = place + count, len(numbers) - place - count
    if code > LISTED or remain < 0:
        raise WireError("rows", f"{count + remain} numbers remain for {count} runs of kind {code}", at)
    if code == ONES:
        return Runs(ONES, NONE.lengths, slice(place, end))
    lengths = numbers[place:end]
    if lengths.min() < 0 or lengths.max() > remain or lengths.sum() > remain:
        raise WireError("rows", f"{remain} numbers remain for rows that have {lengths[:8].tolist()} ...", at)
    return Runs(LISTED, slice(place, end), slice(end, end + int(lengths.sum())))
