"""Columns of little-endian numbers, of which the wire formats of messages consist, and a reader of them.

The reader checks each count against the remaining bytes before it allocates anything of that size."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise, repeat
from typing import Any

from quire.protocol.step_plan import TopLogprobs

MAX_FRAME_BYTES, MAX_STEP_SLICES = 2**28, 2**16  # a step has fewer slices: a kernel launch takes no more
MAX_PIXEL_BYTES = 2**27  # bytes of the preprocessed images of a request
COUNT = struct.Struct("<I")
WIDTHS = {ord("b"): 1, ord("i"): 4, ord("q"): 8}  # bytes of a number, by the code that precedes a column
LENGTHS_ZERO, LENGTHS_ONE, LENGTHS_LISTED = 0, 1, 2
"""The lengths of runs: all are 0, all are 1, or a column of lengths follows."""

tuple_new = tuple.__new__  # makes a NamedTuple from a tuple at half the cost of its constructor


class WireError(ValueError):
    """A frame that can't be read, or a message that can't be encoded, at field `field` and byte `offset`."""

    def __init__(self, field: str, why: str, offset: int | None = None) -> None:
        super().__init__(f"{field}{'' if offset is None else f' at byte {offset}'}: {why}")
        self.field, self.offset = field, offset


def pack_struct(form: struct.Struct, field: str, *values: Any) -> bytes:
    try:
        return form.pack(*values)
    except struct.error as error:
        raise WireError(field, str(error)) from error


def write_ints(values: Sequence[int], field: str, width: str = "i") -> bytes:
    """Return a column: the code of the first width, from `width` on, that holds all values; then the values."""
    try:
        return struct.pack(f"<c{len(values)}{width}", width.encode(), *values)
    except struct.error as error:
        if width == "q":
            raise WireError(field, str(error)) from error
        return write_ints(values, field, "i" if width == "b" else "q")


def write_floats(values: Sequence[float], field: str) -> bytes:
    return pack_struct(struct.Struct(f"<{len(values)}d"), field, *values)


def write_run_lengths(runs: Sequence[Sequence[Any]], field: str) -> bytes:
    """Return the lengths of runs."""
    if not any(runs):
        return b"\0"
    lengths = list(map(len, runs))
    return b"\1" if lengths.count(1) == len(runs) else write_ints(lengths, field)


def write_runs(runs: Sequence[Sequence[int]], field: str) -> Iterator[bytes]:
    """Yield the lengths of runs of integers, then all integers."""
    kind, numbers = flatten_runs(runs)
    if kind != LENGTHS_LISTED:
        yield bytes((kind,))
    else:
        yield write_ints(list(map(len, runs)), field)
    if kind != LENGTHS_ZERO:
        yield write_ints(numbers, field)


def flatten_runs(runs: Sequence[Sequence[int]]) -> tuple[int, Sequence[int]]:
    """Return the kind of the runs' lengths (LENGTHS_ZERO, LENGTHS_ONE, LENGTHS_LISTED) and all their numbers."""
    if not any(runs):
        return LENGTHS_ZERO, ()
    try:
        return LENGTHS_ONE, [number for (number,) in runs]
    except ValueError:
        return LENGTHS_LISTED, list(chain.from_iterable(runs))


def write_top_logprobs(top_logprobs: Sequence[TopLogprobs]) -> Iterator[bytes]:
    if not top_logprobs:
        return
    tokens, logprobs, ranks, ids, alternatives = zip(*top_logprobs)
    yield write_ints(tokens, "top tokens")
    yield write_floats(logprobs, "top logprobs")
    yield write_ints(ranks, "top ranks")
    yield from write_runs(ids, "top ids")
    yield write_run_lengths(alternatives, "numbers of top alternatives")
    yield write_floats(list(chain.from_iterable(alternatives)), "top alternatives")


def write_vectors(vectors: Sequence[Sequence[float]], field: str) -> Iterator[bytes]:
    """Yield the lengths of runs of floats, then all floats."""
    yield write_ints(list(map(len, vectors)), field)
    try:
        yield struct.pack(f"<{sum(map(len, vectors))}d", *chain.from_iterable(vectors))
    except (struct.error, OverflowError) as error:
        raise WireError(field, str(error)) from error


class FrameReader:
    """Reads a frame; `offset` is the next byte."""

    __slots__ = ("end", "frame", "offset")

    def __init__(self, frame: bytes | bytearray | memoryview) -> None:
        self.frame, self.offset, self.end = frame, 0, len(frame)

    def error(self, field: str, why: str) -> WireError:
        return WireError(field, why, self.offset)

    def check_count(self, count: int, field: str) -> int:
        if count <= MAX_STEP_SLICES:
            return count
        raise self.error(field, f"{count} are announced, at most {MAX_STEP_SLICES} are read")

    def skip(self, size: int, field: str) -> int:
        """Skip `size` bytes. Return the offset of the first."""
        at = self.offset
        if size > self.end - at:
            raise self.error(field, f"{size} bytes are announced, {self.end - at} remain")
        self.offset = at + size
        return at

    def read_bytes(self, size: int, field: str) -> bytes:
        at = self.skip(size, field)
        return bytes(self.frame[at : at + size])

    def read_text(self, size: int, field: str) -> str:
        at = self.offset
        try:
            return self.read_bytes(size, field).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise WireError(field, f"no UTF-8: {error.reason}", at + error.start) from error

    def unpack(self, form: struct.Struct, field: str) -> tuple[Any, ...]:
        return form.unpack_from(self.frame, self.skip(form.size, field))

    def unpack_each(self, form: struct.Struct, count: int, field: str) -> Iterator[tuple[Any, ...]]:
        """Read `count` structs."""
        return form.iter_unpack(self.read_bytes(form.size * count, field))

    def check_at_end(self) -> None:
        if self.offset != self.end:
            raise self.error("frame", f"{self.end - self.offset} bytes follow its end")

    def read_ints(self, count: int, field: str) -> tuple[int, ...]:
        """Read a column of `count` integers."""
        at = self.skip(1, field)
        size = WIDTHS.get(self.frame[at])
        if size is None:
            raise WireError(field, f"{self.frame[at]} is no width of a number", at)
        start = self.skip(size * count, field)
        return struct.unpack_from(f"<{count}{self.frame[at]:c}", self.frame, start)

    def read_floats(self, count: int, field: str) -> tuple[float, ...]:
        return struct.unpack_from(f"<{count}d", self.frame, self.skip(8 * count, field))

    def read_run_lengths(self, runs: int, field: str) -> int | Sequence[int]:
        """Read the lengths of `runs` runs: one number if all are equal. The caller must have checked `runs`."""
        at = self.skip(1, field)
        if self.frame[at] in (LENGTHS_ZERO, LENGTHS_ONE):
            return self.frame[at]
        self.offset = at
        return self.read_lengths(runs, field)

    def read_lengths(self, runs: int, field: str) -> Sequence[int]:
        at = self.offset
        lengths = self.read_ints(runs, field)
        if lengths and min(lengths) < 0:
            raise WireError(field, f"a length is {min(lengths)}", at)
        return lengths

    def read_runs(self, count: int, field: str) -> Iterable[tuple[int, ...]]:
        """Read `count` runs of integers. The caller must have checked `count`."""
        lengths = self.read_run_lengths(count, field)
        if lengths == LENGTHS_ZERO:
            return repeat((), count)
        if lengths == LENGTHS_ONE:
            return zip(self.read_ints(count, field))
        assert not isinstance(lengths, int)
        return split_runs(self.read_ints(sum(lengths), field), lengths)


def split_runs(values: tuple[Any, ...], lengths: Iterable[int]) -> list[tuple[Any, ...]]:
    return [values[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def read_vectors(reader: FrameReader, count: int, field: str) -> list[tuple[float, ...]]:
    """Read `count` runs of floats. The caller must have checked `count`."""
    lengths = reader.read_lengths(count, field)
    total = sum(lengths)
    return split_runs(reader.read_floats(total, field), lengths)


def read_top_logprobs(reader: FrameReader, samples: int) -> Iterable[tuple[TopLogprobs, ...]]:
    """Read the top log-probabilities of each sample. The caller must have checked the number `samples`."""
    numbers = reader.read_run_lengths(samples, "numbers of tops")
    count = numbers * samples if isinstance(numbers, int) else sum(numbers)
    if not count:
        return repeat((), samples)
    tokens = reader.read_ints(count, "top tokens")
    logprobs = reader.read_floats(count, "top logprobs")
    ranks = reader.read_ints(count, "top ranks")
    ids = reader.read_runs(count, "top ids")
    lengths = reader.read_run_lengths(count, "numbers of top alternatives")
    each: Sequence[int] = (lengths,) * count if isinstance(lengths, int) else lengths
    alternatives = split_runs(reader.read_floats(sum(each), "top alternatives"), each)
    tops: tuple[TopLogprobs, ...] = tuple(
        map(tuple_new, repeat(TopLogprobs), zip(tokens, logprobs, ranks, ids, alternatives))
    )
    return zip(tops) if isinstance(numbers, int) else split_runs(tops, numbers)
