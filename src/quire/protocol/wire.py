"""The wire format of plans and results: typed, versioned frames of bytes, for other processes and for plan logs.

A frame has its version and kind, then all counts, then columns of little-endian numbers: the `slot` of all slices, the
`start` of all slices, ... The reader checks each count against the remaining bytes before it allocates anything of that
size (see columns.py). So a forged frame costs no more than a valid one of its length: the memory of as many Python
numbers, up to a hundred times the frame. No pickle."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

from quire.protocol.columns import (
    COUNT,
    MAX_FRAME_BYTES,
    FrameReader,
    WireError,
    pack_struct,
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
from quire.protocol.device_params import DEVICE_NUMBERS, DeviceSamplingParams
from quire.protocol.images import ImageItem
from quire.protocol.seq_slices import read_slices, write_slices
from quire.protocol.step_plan import (  # fmt: skip
    ImageEncoding,
    PageCopy,
    PageOp,
    PageOps,
    Poison,
    SeqSlice,
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
    """The format of a page operation: `num_ints` integers, then, with `has_run`, one tuple of integers."""

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
"""The formats of page operations. The index is the code on the wire, so new ones go last."""
PAGE_OP_CODES = {op_format.op_type: code for code, op_format in enumerate(PAGE_OP_FORMATS)}

HEAD = struct.Struct("<BB")  # version, kind
PLAN_HEAD = struct.Struct("<IIIII")  # counts: new slots, page operations, slices, overlapped page operations, masks
RESULT_HEAD = struct.Struct("<I?dd")  # slice results, whether some are pooled, seconds, idle seconds
# slot, seq_id, parent_slot, seed, prompt_len, num_logprobs, length of history, whether sampling follows, images
SLOT_INIT = struct.Struct("<iqiqiiIBI")
IMAGE_ITEM = struct.Struct("<32s4I")  # the fields of ImageItem
KEY_BYTES = 32
# the first eight of DEVICE_NUMBERS, prompt_logprobs; counts of stop tokens, allowed tokens, biases, bad words,
# logprob_token_ids; flags
SAMPLING = struct.Struct("<6d3i5IB")
NUMBERS = [declared.name for declared in DEVICE_NUMBERS[:8]]
ADDED_NUMBERS = DEVICE_NUMBERS[8:]
CANDIDATES_ONLY, HAS_ALLOWED_TOKENS = 1, 2  # flags: candidates_only; allowed_token_ids is not None
POOLING_FLAGS = {"": 0, "mean": 4, "last": 8}  # and one of these flags
HAS_ADDED = 16  # flag: the count of ADDED_NUMBERS and their values as floats follow, since one is not its default
POOLING_BY_FLAG = {flag: pooling for pooling, flag in POOLING_FLAGS.items()}


def encode_frame(message: Message) -> bytes:
    """Return the frame of a message. Raise WireError if a number is too large for its field, or the frame too large."""
    frame = b"".join(_write_plan(message) if isinstance(message, StepPlan) else _write_result(message))
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError("frame", f"{len(frame)} bytes, at most {MAX_FRAME_BYTES} are sent")
    return frame


def _write_plan(plan: StepPlan) -> Iterator[bytes]:
    new_slots, page_ops, slices, overlapped, masks, draft_slices = plan
    yield HEAD.pack(VERSION, PLAN)
    yield PLAN_HEAD.pack(len(new_slots), len(page_ops), len(slices), len(overlapped), len(masks))
    for slot_init in new_slots:
        yield from _write_slot_init(slot_init)
    if page_ops:
        yield from _write_page_ops(page_ops)
    if slices:
        yield write_slices(slices)
    if overlapped:
        yield from _write_page_ops(overlapped)
    if masks:
        size = len(masks[0].allowed)
        if size % 4 or any(len(mask.allowed) != size for mask in masks):
            raise WireError("masks", f"the first has {size} bytes; all must have the same multiple of 4")
        yield COUNT.pack(size // 4)
        yield write_ints([mask.slot for mask in masks], "mask slots")
        yield from (mask.allowed for mask in masks)
    if draft_slices:  # at the end, so that plans without them are as they were before drafts were known
        yield COUNT.pack(len(draft_slices))
        yield write_slices(draft_slices)


def _write_result(result: StepResult) -> Iterator[bytes]:
    slice_results, seconds, idle = result
    tokens, tops, prompt_tops, errors, pooled = zip(*slice_results) if slice_results else ((),) * 5
    has_pooled = any(pooled)
    yield HEAD.pack(VERSION, RESULT)
    yield pack_struct(RESULT_HEAD, "result head", len(slice_results), has_pooled, seconds, idle)
    if not slice_results:
        return
    texts = [error.encode("utf-8", "surrogatepass") for error in errors] if any(errors) else errors
    # One byte or more for each proves their number to the reader.
    yield write_ints(list(map(len, texts)), "error lengths", "b")
    if any(errors):
        yield from texts
    yield from write_runs(tokens, "sampled tokens")
    for runs in (tops, prompt_tops):
        yield write_run_lengths(runs, "numbers of tops")
        yield from write_top_logprobs(list(chain.from_iterable(runs)))
    if has_pooled:
        yield from write_vectors(pooled, "pooled")


def _write_slot_init(slot_init: SlotInit) -> Iterator[bytes]:
    slot, seq_id, parent, sampling, seed, prompt_len, history, num_logprobs, images = slot_init
    has_sampling = sampling is not None
    yield pack_struct(
        SLOT_INIT, "slot init", slot, seq_id, parent, seed, prompt_len, num_logprobs, len(history), has_sampling,
        len(images),
    )  # fmt: skip
    if sampling is not None:
        yield from _write_sampling(sampling)
    if history:
        yield write_ints(history, "slot init history")
    if images:
        yield from write_image_items(images)


def write_image_items(images: Iterable[ImageItem]) -> Iterator[bytes]:
    for image in images:
        if len(image.key) != KEY_BYTES:
            raise WireError("image", f"its key has {len(image.key)} bytes, not {KEY_BYTES}")
        yield pack_struct(IMAGE_ITEM, "image", *image)


def _write_sampling(sampling: DeviceSamplingParams) -> Iterator[bytes]:
    allowed, bias, words = sampling.allowed_token_ids, sampling.logit_bias, sampling.bad_word_ids
    added = [getattr(sampling, declared.name) for declared in ADDED_NUMBERS]
    has_added = added != [declared.default for declared in ADDED_NUMBERS]
    yield pack_struct(
        SAMPLING, "sampling", *(getattr(sampling, name) for name in NUMBERS), sampling.prompt_logprobs,
        len(sampling.stop_token_ids), len(allowed or ()), len(bias), len(words), len(sampling.logprob_token_ids),
        CANDIDATES_ONLY * sampling.candidates_only | HAS_ALLOWED_TOKENS * (allowed is not None)
        | POOLING_FLAGS[sampling.pooling] | HAS_ADDED * has_added,
    )  # fmt: skip
    if has_added:
        yield COUNT.pack(len(added)) + write_floats(added, "added numbers")
    yield write_ints(sampling.stop_token_ids, "stop tokens")
    yield write_ints(allowed or (), "allowed tokens")
    yield write_ints([token for token, _ in bias], "biased tokens")
    yield write_floats([value for _, value in bias], "biases")
    yield write_ints(list(map(len, words)), "bad word lengths")
    yield write_ints(list(chain.from_iterable(words)), "bad words")
    yield write_ints(sampling.logprob_token_ids, "named tokens")


def _write_page_ops(page_ops: PageOps) -> Iterator[bytes]:
    codes = [PAGE_OP_CODES[type(op)] for op in page_ops]
    numbers: list[int] = []
    op: Any
    for code, op in zip(codes, page_ops):
        if PAGE_OP_FORMATS[code].has_run:
            *ints, run = op
            numbers += ints
            numbers.append(len(run))
            numbers += run
        else:
            numbers += op
    yield bytes(codes)
    yield COUNT.pack(len(numbers))
    yield write_ints(numbers, "page op numbers")


def decode_frame(frame: bytes | bytearray | memoryview) -> Message:
    """Return the message of a frame. WireError names the field and the byte where it is invalid."""
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError("frame", f"{len(frame)} bytes, at most {MAX_FRAME_BYTES} are read", 0)
    reader = FrameReader(frame)
    version, kind = reader.unpack(HEAD, "head")
    if version != VERSION:
        raise WireError("version", f"it is {version}, only {VERSION} is read", 0)
    if kind not in (PLAN, RESULT):
        raise WireError("kind", f"{kind} is neither a plan nor a result", 1)
    message = _read_plan(reader) if kind == PLAN else _read_result(reader)
    reader.check_at_end()
    return message


def _read_plan(reader: FrameReader) -> StepPlan:
    num_inits, num_ops, num_slices, num_overlapped, num_masks = reader.unpack(PLAN_HEAD, "plan head")
    if num_inits * SLOT_INIT.size > reader.end - reader.offset:
        raise reader.error("slot inits", f"{num_inits} are announced, {reader.end - reader.offset} bytes remain")
    new_slots = tuple([_read_slot_init(reader) for _ in range(num_inits)])
    page_ops = _read_page_ops(reader, num_ops) if num_ops else ()
    slices = read_slices(reader, num_slices) if reader.check_count(num_slices, "slices") else ()
    overlapped = _read_page_ops(reader, num_overlapped) if num_overlapped else ()
    masks = _read_masks(reader, num_masks) if num_masks else ()
    draft_slices: Sequence[SeqSlice] = ()
    if reader.offset < reader.end:
        [num_drafts] = reader.unpack(COUNT, "draft slices")
        if not reader.check_count(num_drafts, "draft slices"):
            raise reader.error("draft slices", "their count is 0")
        draft_slices = read_slices(reader, num_drafts)
    return StepPlan(new_slots, page_ops, slices, overlapped, masks, draft_slices)


def _read_masks(reader: FrameReader, count: int) -> tuple[TokenBitmask, ...]:
    reader.check_count(count, "masks")
    [words] = reader.unpack(COUNT, "masks")
    slots = reader.read_ints(count, "mask slots")
    return tuple([TokenBitmask(slot, reader.read_bytes(4 * words, "masks")) for slot in slots])


def _read_result(reader: FrameReader) -> StepResult:
    count, has_pooled, seconds, idle = reader.unpack(RESULT_HEAD, "result head")
    if not reader.check_count(count, "samples"):
        return StepResult((), seconds, idle)
    lengths = reader.read_lengths(count, "error lengths")
    errors = [reader.read_text(length, "error") for length in lengths] if any(lengths) else repeat("", count)
    tokens = reader.read_runs(count, "sampled tokens")
    tops = read_top_logprobs(reader, count)
    prompt_tops = read_top_logprobs(reader, count)
    pooled = read_vectors(reader, count, "pooled") if has_pooled else repeat((), count)
    fields = zip(tokens, tops, prompt_tops, errors, pooled)
    return StepResult(tuple(map(tuple_new, repeat(SliceResult), fields)), seconds, idle)


def _read_slot_init(reader: FrameReader) -> SlotInit:
    slot, seq_id, parent, seed, prompt_len, num_logprobs, history_len, has_sampling, num_images = reader.unpack(
        SLOT_INIT, "slot init"
    )
    if has_sampling > 1:
        raise reader.error("slot init", f"the flag of sampling parameters is {has_sampling}, neither 0 nor 1")
    sampling = _read_sampling(reader) if has_sampling else None
    history = reader.read_ints(history_len, "slot init history") if history_len else ()
    images = read_image_items(reader, num_images) if num_images else ()
    return SlotInit(slot, seq_id, parent, sampling, seed, prompt_len, history, num_logprobs, images)


def read_image_items(reader: FrameReader, count: int) -> tuple[ImageItem, ...]:
    return tuple([ImageItem(*fields) for fields in reader.unpack_each(IMAGE_ITEM, count, "images")])


def _read_sampling(reader: FrameReader) -> DeviceSamplingParams:
    *numbers, prompt_logprobs, num_stop, num_allowed, num_biases, num_bad_words, num_logprob_ids, flags = reader.unpack(
        SAMPLING, "sampling"
    )
    pooling = POOLING_BY_FLAG.get(flags & ~(CANDIDATES_ONLY | HAS_ALLOWED_TOKENS | HAS_ADDED))
    if pooling is None or (num_allowed and not flags & HAS_ALLOWED_TOKENS):
        raise reader.error("sampling", f"its flags are {flags}")
    by_name: dict[str, Any] = dict(zip(NUMBERS, numbers))
    if flags & HAS_ADDED:
        [count] = reader.unpack(COUNT, "added numbers")
        if count > len(ADDED_NUMBERS):
            raise reader.error("added numbers", f"there are {count}, and {len(ADDED_NUMBERS)} are known")
        for declared, value in zip(ADDED_NUMBERS, reader.read_floats(count, "added numbers")):
            if declared.kind is int and not value.is_integer():
                raise reader.error("added numbers", f"{declared.name} is {value}, not an integer")
            by_name[declared.name] = declared.kind(value)
    stop = reader.read_ints(num_stop, "stop tokens")
    allowed = reader.read_ints(num_allowed, "allowed tokens")
    bias = tuple(zip(reader.read_ints(num_biases, "biased tokens"), reader.read_floats(num_biases, "biases")))
    lengths = reader.read_lengths(num_bad_words, "bad word lengths")
    words = tuple(split_runs(reader.read_ints(sum(lengths), "bad words"), lengths))
    return DeviceSamplingParams(
        **by_name, stop_token_ids=stop, allowed_token_ids=allowed if flags & HAS_ALLOWED_TOKENS else None,
        logit_bias=bias, bad_word_ids=words, candidates_only=bool(flags & CANDIDATES_ONLY),
        prompt_logprobs=prompt_logprobs, logprob_token_ids=reader.read_ints(num_logprob_ids, "named tokens"),
        pooling=pooling,
    )  # fmt: skip


def _read_page_ops(reader: FrameReader, count: int) -> PageOps:
    at, codes = reader.offset, reader.read_bytes(count, "page op kinds")
    if max(codes) >= len(PAGE_OP_FORMATS):
        raise WireError("page op kinds", f"{max(codes)} is no kind of page operation", at)
    [count_numbers] = reader.unpack(COUNT, "page ops")
    numbers = reader.read_ints(count_numbers, "page op numbers")
    page_ops: list[Any] = []
    start = 0
    for code in codes:
        op_type, num_ints, has_run = PAGE_OP_FORMATS[code]
        end = start + num_ints
        fields: tuple[Any, ...] = numbers[start:end]
        if has_run:
            length = numbers[end] if end < count_numbers else -1
            fields = (*fields, numbers[end + 1 : end + 1 + length])
            end = end + 1 + length if length >= 0 else count_numbers + 1
        if end > count_numbers:
            raise reader.error(
                "page op numbers", f"page operation {len(page_ops)} goes beyond the {count_numbers} that there are"
            )
        page_ops.append(tuple_new(op_type, fields))
        start = end
    if start != count_numbers:
        raise reader.error("page op numbers", f"{count_numbers - start} belong to no page operation")
    return tuple(page_ops)
