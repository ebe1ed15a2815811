"""The wire form of plans and results: typed, versioned frames of bytes, to be sent to other processes or kept in a log.

A frame says what it is, then how many there are of everything, then columns of numbers, little-endian: what all rows
have for `slot`, what all have for `start`, ... A reader checks each count against the bytes that remain before it makes
anything of that size (see columns.py), so a frame that is forged costs what an honest one of its length does: what
Python takes for as many numbers, up to a hundred times the frame. No pickle."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any, NamedTuple

from quire.vocabulary.columns import (
    COUNT,
    MOST_BYTES,
    Reader,
    WireError,
    new,
    pack,
    read_text,
    read_tops,
    read_vectors,
    split,
    write_counts,
    write_floats,
    write_ints,
    write_runs,
    write_tops,
    write_vectors,
)
from quire.vocabulary.media import Medium
from quire.vocabulary.plan import (
    Birth,
    Copy,
    Encode,
    Entry,
    In,
    Journal,
    Mask,
    Out,
    Poison,
    Sampled,
    Sampling,
    StepPlan,
    StepResult,
    Table,
)  # fmt: skip
from quire.vocabulary.rows import read_rows, write_rows

VERSION = 7
PLAN, RESULT = 1, 2

Message = StepPlan | StepResult


class Kind(NamedTuple):
    """How a journal's entry is said: `numbers` integers, then, if it has a `run`, one tuple of integers."""

    entry: type[Entry]
    numbers: int
    run: bool = False


ENTRIES = (Kind(Table, 3, run=True), Kind(Copy, 3), Kind(Out, 3), Kind(In, 3), Kind(Poison, 2), Kind(Encode, 7))
"""The kinds of entries; an entry's place here is its code on the wire, so new ones go last."""
CODES = {kind.entry: code for code, kind in enumerate(ENTRIES)}

HEAD = struct.Struct("<BB")  # version, kind
PLAN_HEAD = struct.Struct("<IIIII")  # births, entries of the journal, rows, entries of `ahead`, masks
RESULT_HEAD = struct.Struct("<I?dd")  # samples, whether some are pooled, seconds, idle
# slot, seq, parent, seed, prompt_len, top, tokens of history, has sampling, pictures
BIRTH = struct.Struct("<iqiqiiIBI")
MEDIUM = struct.Struct("<32s4I")  # key, start, tokens, rows, parts
KEY_BYTES = 32
# temperature, top_p, min_p, the penalties; top_k, min_tokens, prompt_logprobs; counts of stop tokens, allowed ones,
# biases, bad words, named tokens; flags
SAMPLING = struct.Struct("<6d3i5IB")
CHOSEN, RESTRICTED = 1, 2  # flags of sampling: a method chooses; allowed_token_ids is not None
POOLING = {"": 0, "mean": 4, "last": 8}  # and of these one
POOLED = {flag: pooling for pooling, flag in POOLING.items()}


def encode(message: Message) -> bytes:
    """The frame of a message. WireError for a number beyond what its field holds, or beyond MOST_BYTES in all."""
    frame = b"".join(_plan(message) if isinstance(message, StepPlan) else _result(message))
    if len(frame) > MOST_BYTES:
        raise WireError("frame", f"{len(frame)} bytes, at most {MOST_BYTES} are sent")
    return frame


def _plan(plan: StepPlan) -> Iterator[bytes]:
    births, journal, rows, ahead, masks = plan
    yield HEAD.pack(VERSION, PLAN)
    yield PLAN_HEAD.pack(len(births), len(journal), len(rows), len(ahead), len(masks))
    for birth in births:
        yield from _birth(birth)
    if journal:
        yield from _journal(journal)
    if rows:
        yield write_rows(rows)
    if ahead:
        yield from _journal(ahead)
    if masks:
        size = len(masks[0].allowed)
        if size % 4 or any(len(mask.allowed) != size for mask in masks):
            raise WireError("masks", f"{size} bytes each are no words, or not all have as many")
        yield COUNT.pack(size // 4)
        yield write_ints([mask.slot for mask in masks], "mask slots")
        yield from (mask.allowed for mask in masks)


def _result(result: StepResult) -> Iterator[bytes]:
    samples, seconds, idle = result
    tokens, tops, scores, errors, pooled = zip(*samples) if samples else ((),) * 5
    some = any(pooled)
    yield HEAD.pack(VERSION, RESULT)
    yield pack(RESULT_HEAD, "result head", len(samples), some, seconds, idle)
    if not samples:
        return
    texts = [error.encode("utf-8", "surrogatepass") for error in errors] if any(errors) else errors
    yield write_ints(list(map(len, texts)), "error lengths", "b")  # one a sample: a reader knows how many there are
    if any(errors):
        yield from texts
    yield from write_runs(tokens, "sampled tokens")
    for each in (tops, scores):
        yield write_counts(each, "numbers of tops")
        yield from write_tops(list(chain.from_iterable(each)))
    if some:
        yield from write_vectors(pooled, "pooled")


def _birth(birth: Birth) -> Iterator[bytes]:
    slot, seq, parent, sampling, seed, prompt_len, history, top, media = birth
    has = sampling is not None
    yield pack(BIRTH, "birth", slot, seq, parent, seed, prompt_len, top, len(history), has, len(media))
    if sampling is not None:
        yield from _sampling(sampling)
    if history:
        yield write_ints(history, "birth history")
    for medium in media:
        if len(medium.key) != KEY_BYTES:
            raise WireError("medium", f"its key has {len(medium.key)} bytes, not {KEY_BYTES}")
        yield pack(MEDIUM, "medium", *medium)


def _sampling(asked: Sampling) -> Iterator[bytes]:
    allowed, bias, words = asked.allowed_token_ids, asked.logit_bias, asked.bad_word_ids
    yield pack(
        SAMPLING, "sampling", asked.temperature, asked.top_p, asked.min_p, asked.presence_penalty,
        asked.frequency_penalty, asked.repetition_penalty, asked.top_k, asked.min_tokens, asked.prompt_logprobs,
        len(asked.stop_token_ids), len(allowed or ()), len(bias), len(words), len(asked.logprob_token_ids),
        CHOSEN * asked.chosen | RESTRICTED * (allowed is not None) | POOLING[asked.pooling],
    )  # fmt: skip
    yield write_ints(asked.stop_token_ids, "stop tokens")
    yield write_ints(allowed or (), "allowed tokens")
    yield write_ints([token for token, _ in bias], "biased tokens")
    yield write_floats([by for _, by in bias], "biases")
    yield write_ints(list(map(len, words)), "bad word lengths")
    yield write_ints(list(chain.from_iterable(words)), "bad words")
    yield write_ints(asked.logprob_token_ids, "named tokens")


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
    yield write_ints(numbers, "journal numbers")


def decode(frame: bytes | bytearray | memoryview) -> Message:
    """The message of a frame. WireError names the field and the byte where it can't be one."""
    if len(frame) > MOST_BYTES:
        raise WireError("frame", f"{len(frame)} bytes, at most {MOST_BYTES} are read", 0)
    reader = Reader(frame)
    version, kind = reader.take(HEAD, "head")
    if version != VERSION:
        raise WireError("version", f"it is {version}, only {VERSION} is read", 0)
    if kind not in (PLAN, RESULT):
        raise WireError("kind", f"{kind} is neither a plan nor a result", 1)
    message = _read_plan(reader) if kind == PLAN else _read_result(reader)
    if reader.at != reader.end:
        raise reader.error("frame", f"{reader.end - reader.at} bytes follow its end")
    return message


def _read_plan(reader: Reader) -> StepPlan:
    births, entries, count, later, masked = reader.take(PLAN_HEAD, "plan head")
    if births * BIRTH.size > reader.end - reader.at:
        raise reader.error("births", f"{births} are announced, {reader.end - reader.at} bytes remain")
    born = tuple([_read_birth(reader) for _ in range(births)])
    journal = _read_journal(reader, entries) if entries else ()
    rows = read_rows(reader, count) if reader.bounded(count, "rows") else ()
    ahead = _read_journal(reader, later) if later else ()
    return StepPlan(born, journal, rows, ahead, _read_masks(reader, masked) if masked else ())


def _read_masks(reader: Reader, count: int) -> tuple[Mask, ...]:
    reader.bounded(count, "masks")
    [words] = reader.take(COUNT, "masks")
    slots = reader.ints(count, "mask slots")
    at = [reader.skip(4 * words, "masks") for _ in slots]
    return tuple([Mask(slot, bytes(reader.frame[start : start + 4 * words])) for slot, start in zip(slots, at)])


def _read_result(reader: Reader) -> StepResult:
    count, some, seconds, idle = reader.take(RESULT_HEAD, "result head")
    if not reader.bounded(count, "samples"):
        return StepResult((), seconds, idle)
    lengths = reader.lengths(count, "error lengths")
    errors = [read_text(reader, length) for length in lengths] if any(lengths) else repeat("", count)
    tokens = reader.runs(count, "sampled tokens")
    tops = read_tops(reader, count)
    scores = read_tops(reader, count)
    pooled = read_vectors(reader, count, "pooled") if some else repeat((), count)
    return StepResult(tuple(map(new, repeat(Sampled), zip(tokens, tops, scores, errors, pooled))), seconds, idle)


def _read_birth(reader: Reader) -> Birth:
    slot, seq, parent, seed, prompt_len, top, history, has, pictures = reader.take(BIRTH, "birth")
    if has > 1:
        raise reader.error("birth", f"{has} neither says that it has sampling parameters nor that it hasn't")
    sampling = _read_sampling(reader) if has else None
    tokens = reader.ints(history, "birth history") if history else ()
    if pictures * MEDIUM.size > reader.end - reader.at:
        raise reader.error("media", f"{pictures} are announced, {reader.end - reader.at} bytes remain")
    media = tuple([Medium(*reader.take(MEDIUM, "medium")) for _ in range(pictures)])
    return Birth(slot, seq, parent, sampling, seed, prompt_len, tokens, top, media)


def _read_sampling(reader: Reader) -> Sampling:
    *factors, top_k, min_tokens, scored, stops, some, biased, barred, named, flags = reader.take(SAMPLING, "sampling")
    temperature, top_p, min_p, presence, frequency, repetition = factors
    pooling = POOLED.get(flags & ~(CHOSEN | RESTRICTED))
    if pooling is None or (some and not flags & RESTRICTED):
        raise reader.error("sampling", f"its flags are {flags}")
    stop = reader.ints(stops, "stop tokens")
    allowed = reader.ints(some, "allowed tokens")
    bias = tuple(zip(reader.ints(biased, "biased tokens"), reader.floats(biased, "biases")))
    lengths = reader.lengths(barred, "bad word lengths")
    words = tuple(split(reader.ints(sum(lengths), "bad words"), lengths))
    return Sampling(
        temperature, top_p, top_k, min_p, presence, frequency, repetition, min_tokens, stop,
        allowed if flags & RESTRICTED else None, bias, words, bool(flags & CHOSEN), scored,
        reader.ints(named, "named tokens"), pooling,
    )  # fmt: skip


def _read_journal(reader: Reader, count: int) -> Journal:
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
        entries.append(new(entry, fields))
        place = end
    if place != numbers:
        raise reader.error("journal numbers", f"{numbers - place} belong to no entry")
    return tuple(entries)
