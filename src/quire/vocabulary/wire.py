"""The wire form of plans and results: typed, versioned frames of bytes, to be sent to other processes or kept in a log.

A frame says what it is, then how many there are of everything, then columns of numbers, little-endian: what all rows
have for `slot`, what all have for `start`, ... A reader checks each count against the bytes that remain before it makes
anything of that size, so a frame that is forged costs what an honest one of its length does: what Python takes for as
many numbers, up to a hundred times the frame. No pickle."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise, repeat
from typing import Any, NamedTuple

from quire.vocabulary.plan import (
    Birth,
    Copy,
    Entry,
    In,
    Journal,
    Out,
    Poison,
    Row,
    Sampled,
    Sampling,
    StepPlan,
    StepResult,
    Table,
    Top,
)  # fmt: skip

VERSION = 2
PLAN, RESULT = 1, 2
MOST_BYTES, MOST_ROWS = 2**28, 2**16  # of a frame; of a step, more than a launch takes

Message = StepPlan | StepResult


class WireError(ValueError):
    """A frame that can't be read, or a message that can't be said in one: `field` is where, `at` the byte."""

    def __init__(self, field: str, why: str, at: int | None = None) -> None:
        super().__init__(f"{field}{'' if at is None else f' at byte {at}'}: {why}")
        self.field, self.at = field, at


class Kind(NamedTuple):
    """How a journal's entry is said: `numbers` integers, then, if it has a `run`, one tuple of integers."""

    entry: type[Entry]
    numbers: int
    run: bool = False


ENTRIES = (Kind(Table, 3, run=True), Kind(Copy, 3), Kind(Out, 3), Kind(In, 3), Kind(Poison, 2))
"""The kinds of entries; an entry's place here is its code on the wire, so new ones go last."""
CODES = {kind.entry: code for code, kind in enumerate(ENTRIES)}

HEAD = struct.Struct("<BB")  # version, kind
PLAN_HEAD = struct.Struct("<IIII")  # births, entries of the journal, rows, entries of `ahead`
RESULT_HEAD = struct.Struct("<Id")  # samples, seconds
COUNT = struct.Struct("<I")
BIRTH = struct.Struct("<iqiqiiIB")  # slot, seq, parent, seed, prompt_len, top, tokens of history, has sampling
# temperature, top_p, min_p, the penalties; top_k, min_tokens, prompt_logprobs; counts of stop tokens, allowed ones,
# biases, bad words, named tokens; flags
SAMPLING = struct.Struct("<6d3i5IB")
CHOSEN, RESTRICTED = 1, 2  # flags of sampling: a method chooses; allowed_token_ids is not None
WIDTHS = {ord("b"): 1, ord("i"): 4, ord("q"): 8}  # bytes of a number, by the code before a column
ZEROS, ONES = 0, 1  # codes in place of a column of counts

_new = tuple.__new__  # makes a NamedTuple of a tuple at half the cost of its constructor


def encode(message: Message) -> bytes:
    """The frame of a message. WireError for a number beyond what its field holds, or beyond MOST_BYTES in all."""
    frame = b"".join(_plan(message) if isinstance(message, StepPlan) else _result(message))
    if len(frame) > MOST_BYTES:
        raise WireError("frame", f"{len(frame)} bytes, at most {MOST_BYTES} are sent")
    return frame


def _plan(plan: StepPlan) -> Iterator[bytes]:
    births, journal, rows, ahead = plan
    yield HEAD.pack(VERSION, PLAN)
    yield PLAN_HEAD.pack(len(births), len(journal), len(rows), len(ahead))
    for birth in births:
        yield from _birth(birth)
    if journal:
        yield from _journal(journal)
    if rows:
        slots, tokens, starts, samples, scores, drafts = zip(*rows)
        yield _ints(slots, "row slots")
        yield _ints(starts, "row starts")
        yield _ints(samples, "row samples", "b")
        yield from _runs(tokens, "row tokens")
        yield from _runs(scores, "row scores")
        yield from _runs(drafts, "row drafts")
    if ahead:
        yield from _journal(ahead)


def _result(result: StepResult) -> Iterator[bytes]:
    samples, seconds = result
    yield HEAD.pack(VERSION, RESULT)
    yield _pack(RESULT_HEAD, "result head", len(samples), seconds)
    if not samples:
        return
    tokens, tops, scores, errors = zip(*samples)
    texts = [error.encode("utf-8", "surrogatepass") for error in errors] if any(errors) else errors
    yield _ints(list(map(len, texts)), "error lengths", "b")  # one a sample, always: a reader knows how many there are
    if any(errors):
        yield from texts
    yield from _runs(tokens, "sampled tokens")
    for each in (tops, scores):
        yield _counts(each, "numbers of tops")
        yield from _tops(list(chain.from_iterable(each)))


def _tops(tops: Sequence[Top]) -> Iterator[bytes]:
    if not tops:
        return
    tokens, logprobs, ranks, ids, alternatives = zip(*tops)
    yield _ints(tokens, "top tokens")
    yield _floats(logprobs, "top logprobs")
    yield _ints(ranks, "top ranks")
    yield from _runs(ids, "top ids")
    yield _counts(alternatives, "numbers of top alternatives")
    yield _floats(list(chain.from_iterable(alternatives)), "top alternatives")


def _birth(birth: Birth) -> Iterator[bytes]:
    slot, seq, parent, sampling, seed, prompt_len, history, top = birth
    yield _pack(BIRTH, "birth", slot, seq, parent, seed, prompt_len, top, len(history), sampling is not None)
    if sampling is not None:
        yield from _sampling(sampling)
    if history:
        yield _ints(history, "birth history")


def _sampling(asked: Sampling) -> Iterator[bytes]:
    allowed, bias, words = asked.allowed_token_ids, asked.logit_bias, asked.bad_word_ids
    yield _pack(
        SAMPLING, "sampling", asked.temperature, asked.top_p, asked.min_p, asked.presence_penalty,
        asked.frequency_penalty, asked.repetition_penalty, asked.top_k, asked.min_tokens, asked.prompt_logprobs,
        len(asked.stop_token_ids), len(allowed or ()), len(bias), len(words), len(asked.logprob_token_ids),
        CHOSEN * asked.chosen | RESTRICTED * (allowed is not None),
    )  # fmt: skip
    yield _ints(asked.stop_token_ids, "stop tokens")
    yield _ints(allowed or (), "allowed tokens")
    yield _ints([token for token, _ in bias], "biased tokens")
    yield _floats([by for _, by in bias], "biases")
    yield _ints(list(map(len, words)), "bad word lengths")
    yield _ints(list(chain.from_iterable(words)), "bad words")
    yield _ints(asked.logprob_token_ids, "named tokens")


def _journal(journal: Journal) -> Iterator[bytes]:
    codes = [CODES[type(entry)] for entry in journal]
    numbers: list[int] = []
    each: Any
    for code, each in zip(codes, journal):
        if ENTRIES[code].run:
            *few, run = each
            numbers += few
            numbers.append(len(run))
            numbers += run
        else:
            numbers += each
    yield bytes(codes)
    yield COUNT.pack(len(numbers))
    yield _ints(numbers, "journal numbers")


def _pack(form: struct.Struct, field: str, *values: Any) -> bytes:
    try:
        return form.pack(*values)
    except struct.error as error:
        raise WireError(field, str(error)) from error


def _ints(values: Sequence[int], field: str, width: str = "i") -> bytes:
    """A column: the code of a width that holds all values, `width` if it does, and the values."""
    try:
        return struct.pack(f"<c{len(values)}{width}", width.encode(), *values)
    except struct.error as error:
        if width == "q":
            raise WireError(field, str(error)) from error
        return _ints(values, field, "i" if width == "b" else "q")


def _floats(values: Sequence[float], field: str) -> bytes:
    return _pack(struct.Struct(f"<{len(values)}d"), field, *values)


def _counts(runs: Sequence[Sequence[Any]], field: str) -> bytes:
    """How long each of some runs is."""
    if not any(runs):
        return b"\0"
    lengths = list(map(len, runs))
    return b"\1" if lengths.count(1) == len(runs) else _ints(lengths, field)


def _runs(runs: Sequence[Sequence[int]], field: str) -> Iterator[bytes]:
    """Runs of integers: how long each is, and all of them end to end."""
    counts = _counts(runs, field)
    yield counts
    if counts != b"\0":
        yield _ints(list(chain.from_iterable(runs)), field)


def decode(frame: bytes | bytearray | memoryview) -> Message:
    """The message of a frame. WireError names the field and the byte where it can't be one."""
    if len(frame) > MOST_BYTES:
        raise WireError("frame", f"{len(frame)} bytes, at most {MOST_BYTES} are read", 0)
    reader = _Reader(frame)
    version, kind = reader.take(HEAD, "head")
    if version != VERSION:
        raise WireError("version", f"it is {version}, only {VERSION} is read", 0)
    if kind not in (PLAN, RESULT):
        raise WireError("kind", f"{kind} is neither a plan nor a result", 1)
    message = _read_plan(reader) if kind == PLAN else _read_result(reader)
    if reader.at != reader.end:
        raise reader.error("frame", f"{reader.end - reader.at} bytes follow its end")
    return message


class _Reader:
    """A frame, read up to byte `at`."""

    __slots__ = ("at", "end", "frame")

    def __init__(self, frame: bytes | bytearray | memoryview) -> None:
        self.frame, self.at, self.end = frame, 0, len(frame)

    def error(self, field: str, why: str) -> WireError:
        return WireError(field, why, self.at)

    def bounded(self, count: int, field: str) -> int:
        if count <= MOST_ROWS:
            return count
        raise self.error(field, f"{count} are announced, at most {MOST_ROWS} are read")

    def skip(self, size: int, field: str) -> int:
        """Go on by `size` bytes; returns where they begin."""
        at = self.at
        if size > self.end - at:
            raise self.error(field, f"{size} bytes are announced, {self.end - at} remain")
        self.at = at + size
        return at

    def take(self, form: struct.Struct, field: str) -> tuple[Any, ...]:
        return form.unpack_from(self.frame, self.skip(form.size, field))

    def ints(self, count: int, field: str) -> tuple[int, ...]:
        """A column of `count` integers."""
        at = self.skip(1, field)
        size = WIDTHS.get(self.frame[at])
        if size is None:
            raise WireError(field, f"{self.frame[at]} is no width of a number", at)
        start = self.skip(size * count, field)
        return struct.unpack_from(f"<{count}{self.frame[at]:c}", self.frame, start)

    def floats(self, count: int, field: str) -> tuple[float, ...]:
        return struct.unpack_from(f"<{count}d", self.frame, self.skip(8 * count, field))

    def counts(self, runs: int, field: str) -> int | Sequence[int]:
        """How long each of `runs` runs is, one number if all are as long. There must be other proof of `runs`."""
        at = self.skip(1, field)
        if self.frame[at] in (ZEROS, ONES):
            return self.frame[at]
        self.at = at
        return self.lengths(runs, field)

    def lengths(self, runs: int, field: str) -> Sequence[int]:
        at = self.at
        lengths = self.ints(runs, field)
        if lengths and min(lengths) < 0:
            raise WireError(field, f"a length is {min(lengths)}", at)
        return lengths

    def runs(self, count: int, field: str) -> Iterable[tuple[int, ...]]:
        """`count` runs of integers. There must be other proof of `count`."""
        lengths = self.counts(count, field)
        if lengths == ZEROS:
            return repeat((), count)
        if lengths == ONES:
            return zip(self.ints(count, field))
        assert not isinstance(lengths, int)
        return _split(self.ints(sum(lengths), field), lengths)


def _split(values: tuple[Any, ...], lengths: Iterable[int]) -> list[tuple[Any, ...]]:
    return [values[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def _read_plan(reader: _Reader) -> StepPlan:
    births, entries, count, later = reader.take(PLAN_HEAD, "plan head")
    if births * BIRTH.size > reader.end - reader.at:
        raise reader.error("births", f"{births} are announced, {reader.end - reader.at} bytes remain")
    born = tuple([_read_birth(reader) for _ in range(births)])
    journal = _read_journal(reader, entries) if entries else ()
    rows: tuple[Row, ...] = ()
    if reader.bounded(count, "rows"):
        slots = reader.ints(count, "row slots")
        starts = reader.ints(count, "row starts")
        samples = reader.ints(count, "row samples")
        tokens = reader.runs(count, "row tokens")
        scores = reader.runs(count, "row scores")
        drafts = reader.runs(count, "row drafts")
        rows = tuple(map(_new, repeat(Row), zip(slots, tokens, starts, samples, scores, drafts)))
    return StepPlan(born, journal, rows, _read_journal(reader, later) if later else ())


def _read_result(reader: _Reader) -> StepResult:
    count, seconds = reader.take(RESULT_HEAD, "result head")
    if not reader.bounded(count, "samples"):
        return StepResult((), seconds)
    lengths = reader.lengths(count, "error lengths")
    errors = [_read_text(reader, length) for length in lengths] if any(lengths) else repeat("", count)
    tokens = reader.runs(count, "sampled tokens")
    tops = _read_tops(reader, count)
    scores = _read_tops(reader, count)
    return StepResult(tuple(map(_new, repeat(Sampled), zip(tokens, tops, scores, errors))), seconds)


def _read_text(reader: _Reader, length: int) -> str:
    at = reader.skip(length, "error")
    try:
        return bytes(reader.frame[at : at + length]).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise WireError("error", f"no UTF-8: {error.reason}", at + error.start) from error


def _read_tops(reader: _Reader, samples: int) -> Iterable[tuple[Top, ...]]:
    """The tops of so many samples. There must be other proof of that number."""
    numbers = reader.counts(samples, "numbers of tops")
    count = numbers * samples if isinstance(numbers, int) else sum(numbers)
    if not count:
        return repeat((), samples)
    tokens = reader.ints(count, "top tokens")
    logprobs = reader.floats(count, "top logprobs")
    ranks = reader.ints(count, "top ranks")
    ids = reader.runs(count, "top ids")
    lengths = reader.counts(count, "numbers of top alternatives")
    each: Sequence[int] = (lengths,) * count if isinstance(lengths, int) else lengths
    alternatives = _split(reader.floats(sum(each), "top alternatives"), each)
    tops: tuple[Top, ...] = tuple(map(_new, repeat(Top), zip(tokens, logprobs, ranks, ids, alternatives)))
    return zip(tops) if isinstance(numbers, int) else _split(tops, numbers)


def _read_birth(reader: _Reader) -> Birth:
    slot, seq, parent, seed, prompt_len, top, history, has = reader.take(BIRTH, "birth")
    if has > 1:
        raise reader.error("birth", f"{has} neither says that it has sampling parameters nor that it hasn't")
    sampling = _read_sampling(reader) if has else None
    tokens = reader.ints(history, "birth history") if history else ()
    return Birth(slot, seq, parent, sampling, seed, prompt_len, tokens, top)


def _read_sampling(reader: _Reader) -> Sampling:
    *factors, top_k, min_tokens, scored, stops, some, biased, barred, named, flags = reader.take(SAMPLING, "sampling")
    temperature, top_p, min_p, presence, frequency, repetition = factors
    if flags & ~(CHOSEN | RESTRICTED) or (some and not flags & RESTRICTED):
        raise reader.error("sampling", f"its flags are {flags}")
    stop = reader.ints(stops, "stop tokens")
    allowed = reader.ints(some, "allowed tokens")
    bias = tuple(zip(reader.ints(biased, "biased tokens"), reader.floats(biased, "biases")))
    lengths = reader.lengths(barred, "bad word lengths")
    words = tuple(_split(reader.ints(sum(lengths), "bad words"), lengths))
    return Sampling(
        temperature, top_p, top_k, min_p, presence, frequency, repetition, min_tokens, stop,
        allowed if flags & RESTRICTED else None, bias, words, bool(flags & CHOSEN), scored,
        reader.ints(named, "named tokens"),
    )  # fmt: skip


def _read_journal(reader: _Reader, count: int) -> Journal:
    at = reader.skip(count, "journal kinds")
    codes = bytes(reader.frame[at : at + count])
    if max(codes) >= len(ENTRIES):
        raise WireError("journal kinds", f"{max(codes)} is no kind of entry", at)
    [numbers] = reader.take(COUNT, "journal")
    values = reader.ints(numbers, "journal numbers")
    entries: list[Any] = []
    place = 0
    for code in codes:
        entry, size, run = ENTRIES[code]
        end = place + size
        fields: tuple[Any, ...] = values[place:end]
        if run:
            length = values[end] if end < numbers else -1
            fields = (*fields, values[end + 1 : end + 1 + length])
            end = end + 1 + length if length >= 0 else numbers + 1
        if end > numbers:
            raise reader.error("journal numbers", f"entry {len(entries)} goes beyond the {numbers} that there are")
        entries.append(_new(entry, fields))
        place = end
    if place != numbers:
        raise reader.error("journal numbers", f"{numbers - place} belong to no entry")
    return tuple(entries)
