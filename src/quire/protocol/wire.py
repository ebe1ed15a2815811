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

from quire.protocol.columns import (
    COUNT,
    MAX_FRAME_BYTES,
    FrameReader,
    WireError,
    pack_struct,
    read_text,
    read_top_logprobs,
    read_vectors,
    split_runs,
    tuple_new,
    write_floats,
    write_ints,
    write_run_lengths,
    write_runs,
    write_top_logprobs,
    write_vectors,
)
from quire.protocol.images import ImageItem
from quire.protocol.seq_slices import read_slices, write_slices
from quire.protocol.step_plan import (  # fmt: skip
    DeviceSamplingParams,
    ImageEncoding,
    PageCopy,
    PageOp,
    PageOps,
    Poison,
    SliceResult,
    SlotInit,
    StepPlan,
    StepResult,
    SwapIn,
    SwapOut,
    TableWrite,
    TokenBitmask,
)

VERSION = 7
PLAN, RESULT = 1, 2

Message = StepPlan | StepResult


class PageOpFormat(NamedTuple):
    """How a journal's entry is said: `num_ints` integers, then, if it has a `has_run`, one tuple of integers."""

    op_type: type[PageOp]
    num_ints: int
    has_run: bool = False


PAGE_OP_FORMATS = (
    PageOpFormat(TableWrite, 3, has_run=True),
    PageOpFormat(PageCopy, 3),
    PageOpFormat(SwapOut, 3),
    PageOpFormat(SwapIn, 3),
    PageOpFormat(Poison, 2),
    PageOpFormat(ImageEncoding, 7),
)
"""The kinds of entries; an entry's place here is its code on the wire, so new ones go last."""
PAGE_OP_CODES = {kind.op_type: code for code, kind in enumerate(PAGE_OP_FORMATS)}

HEAD = struct.Struct("<BB")  # version, kind
PLAN_HEAD = struct.Struct("<IIIII")  # births, entries of the journal, rows, entries of `ahead`, masks
RESULT_HEAD = struct.Struct("<I?dd")  # samples, whether some are pooled, seconds, idle
# slot, seq, parent, seed, prompt_len, top, tokens of history, has sampling, pictures
SLOT_INIT = struct.Struct("<iqiqiiIBI")
IMAGE_ITEM = struct.Struct("<32s4I")  # key, start, tokens, rows, parts
KEY_BYTES = 32
# temperature, top_p, min_p, the penalties; top_k, min_tokens, prompt_logprobs; counts of stop tokens, allowed ones,
# biases, bad words, named tokens; flags
SAMPLING = struct.Struct("<6d3i5IB")
CANDIDATES_ONLY, HAS_ALLOWED_TOKENS = 1, 2  # flags of sampling: a method chooses; allowed_token_ids is not None
POOLING_FLAGS = {"": 0, "mean": 4, "last": 8}  # and of these one
POOLING_BY_FLAG = {flag: pooling for pooling, flag in POOLING_FLAGS.items()}


def encode_frame(message: Message) -> bytes:
    """The frame of a message. WireError for a number beyond what its field holds, or beyond MOST_BYTES in all."""
    frame = b"".join(_write_plan(message) if isinstance(message, StepPlan) else _write_result(message))
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError("frame", f"{len(frame)} bytes, at most {MAX_FRAME_BYTES} are sent")
    return frame


def _write_plan(plan: StepPlan) -> Iterator[bytes]:
    births, journal, rows, ahead, masks = plan
    yield HEAD.pack(VERSION, PLAN)
    yield PLAN_HEAD.pack(len(births), len(journal), len(rows), len(ahead), len(masks))
    for birth in births:
        yield from _write_slot_init(birth)
    if journal:
        yield from _write_page_ops(journal)
    if rows:
        yield write_slices(rows)
    if ahead:
        yield from _write_page_ops(ahead)
    if masks:
        size = len(masks[0].allowed)
        if size % 4 or any(len(mask.allowed) != size for mask in masks):
            raise WireError("masks", f"{size} bytes each are no words, or not all have as many")
        yield COUNT.pack(size // 4)
        yield write_ints([mask.slot for mask in masks], "mask slots")
        yield from (mask.allowed for mask in masks)


def _write_result(result: StepResult) -> Iterator[bytes]:
    samples, seconds, idle = result
    tokens, tops, scores, errors, pooled = zip(*samples) if samples else ((),) * 5
    some = any(pooled)
    yield HEAD.pack(VERSION, RESULT)
    yield pack_struct(RESULT_HEAD, "result head", len(samples), some, seconds, idle)
    if not samples:
        return
    texts = [error.encode("utf-8", "surrogatepass") for error in errors] if any(errors) else errors
    yield write_ints(list(map(len, texts)), "error lengths", "b")  # one a sample: a reader knows how many there are
    if any(errors):
        yield from texts
    yield from write_runs(tokens, "sampled tokens")
    for each in (tops, scores):
        yield write_run_lengths(each, "numbers of tops")
        yield from write_top_logprobs(list(chain.from_iterable(each)))
    if some:
        yield from write_vectors(pooled, "pooled")


def _write_slot_init(slot_init: SlotInit) -> Iterator[bytes]:
    slot, seq, parent, sampling, seed, prompt_len, history, top, media = slot_init
    has = sampling is not None
    yield pack_struct(SLOT_INIT, "birth", slot, seq, parent, seed, prompt_len, top, len(history), has, len(media))
    if sampling is not None:
        yield from _write_sampling(sampling)
    if history:
        yield write_ints(history, "birth history")
    for medium in media:
        if len(medium.key) != KEY_BYTES:
            raise WireError("medium", f"its key has {len(medium.key)} bytes, not {KEY_BYTES}")
        yield pack_struct(IMAGE_ITEM, "medium", *medium)


def _write_sampling(sampling: DeviceSamplingParams) -> Iterator[bytes]:
    allowed, bias, words = sampling.allowed_token_ids, sampling.logit_bias, sampling.bad_word_ids
    yield pack_struct(
        SAMPLING, "sampling", sampling.temperature, sampling.top_p, sampling.min_p, sampling.presence_penalty,
        sampling.frequency_penalty, sampling.repetition_penalty, sampling.top_k, sampling.min_tokens,
        sampling.prompt_logprobs,
        len(sampling.stop_token_ids), len(allowed or ()), len(bias), len(words), len(sampling.logprob_token_ids),
        CANDIDATES_ONLY * sampling.candidates_only | HAS_ALLOWED_TOKENS * (allowed is not None)
        | POOLING_FLAGS[sampling.pooling],
    )  # fmt: skip
    yield write_ints(sampling.stop_token_ids, "stop tokens")
    yield write_ints(allowed or (), "allowed tokens")
    yield write_ints([token for token, _ in bias], "biased tokens")
    yield write_floats([by for _, by in bias], "biases")
    yield write_ints(list(map(len, words)), "bad word lengths")
    yield write_ints(list(chain.from_iterable(words)), "bad words")
    yield write_ints(sampling.logprob_token_ids, "named tokens")


def _write_page_ops(page_ops: PageOps) -> Iterator[bytes]:
    codes = [PAGE_OP_CODES[type(entry)] for entry in page_ops]
    numbers: list[int] = []
    each: Any
    for code, each in zip(codes, page_ops):
        if PAGE_OP_FORMATS[code].has_run:
            *few, run = each
            numbers += few
            numbers.append(len(run))
            numbers += run
        else:
            numbers += each
    yield bytes(codes)
    yield COUNT.pack(len(numbers))
    yield write_ints(numbers, "journal numbers")


def decode_frame(frame: bytes | bytearray | memoryview) -> Message:
    """The message of a frame. WireError names the field and the byte where it can't be one."""
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError("frame", f"{len(frame)} bytes, at most {MAX_FRAME_BYTES} are read", 0)
    reader = FrameReader(frame)
    version, kind = reader.unpack(HEAD, "head")
    if version != VERSION:
        raise WireError("version", f"it is {version}, only {VERSION} is read", 0)
    if kind not in (PLAN, RESULT):
        raise WireError("kind", f"{kind} is neither a plan nor a result", 1)
    message = _read_plan(reader) if kind == PLAN else _read_result(reader)
    if reader.offset != reader.end:
        raise reader.error("frame", f"{reader.end - reader.offset} bytes follow its end")
    return message


def _read_plan(reader: FrameReader) -> StepPlan:
    births, entries, count, later, masked = reader.unpack(PLAN_HEAD, "plan head")
    if births * SLOT_INIT.size > reader.end - reader.offset:
        raise reader.error("births", f"{births} are announced, {reader.end - reader.offset} bytes remain")
    born = tuple([_read_slot_init(reader) for _ in range(births)])
    journal = _read_page_ops(reader, entries) if entries else ()
    rows = read_slices(reader, count) if reader.check_count(count, "rows") else ()
    ahead = _read_page_ops(reader, later) if later else ()
    return StepPlan(born, journal, rows, ahead, _read_masks(reader, masked) if masked else ())


def _read_masks(reader: FrameReader, count: int) -> tuple[TokenBitmask, ...]:
    reader.check_count(count, "masks")
    [words] = reader.unpack(COUNT, "masks")
    slots = reader.read_ints(count, "mask slots")
    at = [reader.skip(4 * words, "masks") for _ in slots]
    return tuple([TokenBitmask(slot, bytes(reader.frame[start : start + 4 * words])) for slot, start in zip(slots, at)])


def _read_result(reader: FrameReader) -> StepResult:
    count, some, seconds, idle = reader.unpack(RESULT_HEAD, "result head")
    if not reader.check_count(count, "samples"):
        return StepResult((), seconds, idle)
    lengths = reader.read_lengths(count, "error lengths")
    errors = [read_text(reader, length) for length in lengths] if any(lengths) else repeat("", count)
    tokens = reader.read_runs(count, "sampled tokens")
    tops = read_top_logprobs(reader, count)
    scores = read_top_logprobs(reader, count)
    pooled = read_vectors(reader, count, "pooled") if some else repeat((), count)
    return StepResult(
        tuple(map(tuple_new, repeat(SliceResult), zip(tokens, tops, scores, errors, pooled))), seconds, idle
    )


def _read_slot_init(reader: FrameReader) -> SlotInit:
    slot, seq, parent, seed, prompt_len, top, history, has, pictures = reader.unpack(SLOT_INIT, "birth")
    if has > 1:
        raise reader.error("birth", f"{has} neither says that it has sampling parameters nor that it hasn't")
    sampling = _read_sampling(reader) if has else None
    tokens = reader.read_ints(history, "birth history") if history else ()
    if pictures * IMAGE_ITEM.size > reader.end - reader.offset:
        raise reader.error("media", f"{pictures} are announced, {reader.end - reader.offset} bytes remain")
    media = tuple([ImageItem(*reader.unpack(IMAGE_ITEM, "medium")) for _ in range(pictures)])
    return SlotInit(slot, seq, parent, sampling, seed, prompt_len, tokens, top, media)


def _read_sampling(reader: FrameReader) -> DeviceSamplingParams:
    *factors, top_k, min_tokens, scored, stops, some, biased, barred, named, flags = reader.unpack(SAMPLING, "sampling")
    temperature, top_p, min_p, presence, frequency, repetition = factors
    pooling = POOLING_BY_FLAG.get(flags & ~(CANDIDATES_ONLY | HAS_ALLOWED_TOKENS))
    if pooling is None or (some and not flags & HAS_ALLOWED_TOKENS):
        raise reader.error("sampling", f"its flags are {flags}")
    stop = reader.read_ints(stops, "stop tokens")
    allowed = reader.read_ints(some, "allowed tokens")
    bias = tuple(zip(reader.read_ints(biased, "biased tokens"), reader.read_floats(biased, "biases")))
    lengths = reader.read_lengths(barred, "bad word lengths")
    words = tuple(split_runs(reader.read_ints(sum(lengths), "bad words"), lengths))
    return DeviceSamplingParams(
        temperature, top_p, top_k, min_p, presence, frequency, repetition, min_tokens, stop,
        allowed if flags & HAS_ALLOWED_TOKENS else None, bias, words, bool(flags & CANDIDATES_ONLY), scored,
        reader.read_ints(named, "named tokens"), pooling,
    )  # fmt: skip


def _read_page_ops(reader: FrameReader, count: int) -> PageOps:
    at = reader.skip(count, "journal kinds")
    codes = bytes(reader.frame[at : at + count])
    if max(codes) >= len(PAGE_OP_FORMATS):
        raise WireError("journal kinds", f"{max(codes)} is no kind of entry", at)
    [numbers] = reader.unpack(COUNT, "journal")
    values = reader.read_ints(numbers, "journal numbers")
    entries: list[Any] = []
    place = 0
    for code in codes:
        entry, size, run = PAGE_OP_FORMATS[code]
        end = place + size
        fields: tuple[Any, ...] = values[place:end]
        if run:
            length = values[end] if end < numbers else -1
            fields = (*fields, values[end + 1 : end + 1 + length])
            end = end + 1 + length if length >= 0 else numbers + 1
        if end > numbers:
            raise reader.error("journal numbers", f"entry {len(entries)} goes beyond the {numbers} that there are")
        entries.append(tuple_new(entry, fields))
        place = end
    if place != numbers:
        raise reader.error("journal numbers", f"{numbers - place} belong to no entry")
    return tuple(entries)
