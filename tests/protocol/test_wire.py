"""The wire form: what is read is what was said, to the bit; what is broken is refused at no more cost than its size."""

from __future__ import annotations

import math
import random
import struct
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.protocol import wire
from quire.protocol.columns import MAX_FRAME_BYTES, WireError
from quire.protocol.device_params import DEVICE_NUMBERS, DeviceSamplingParams
from quire.protocol.images import ImageItem
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import (  # fmt: skip
    LAST_SAMPLED,
    ImageEncoding,
    PageCopy,
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
    TopLogprobs,
)
from quire.protocol.wire import PAGE_OP_FORMATS, VERSION, Message, decode_frame, encode_frame

small, large = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
numbers = st.one_of(st.integers(-1, 300), large)
runs = st.one_of(st.just(()), st.lists(numbers, max_size=5).map(tuple))
floats = st.floats(allow_nan=True, allow_infinity=True)
texts = st.one_of(st.just(""), st.text(st.characters(), max_size=5))  # halves of surrogate pairs too
samplings = st.builds(
    DeviceSamplingParams, **{one.name: floats if one.kind is float else small for one in DEVICE_NUMBERS},
    stop_token_ids=runs, allowed_token_ids=st.none() | runs,
    logit_bias=st.lists(st.tuples(numbers, floats), max_size=3).map(tuple),
    bad_word_ids=st.lists(runs, max_size=3).map(tuple), candidates_only=st.booleans(), prompt_logprobs=small,
    logprob_token_ids=runs, pooling=st.sampled_from(("", "mean", "last")),
)  # fmt: skip
counts = st.integers(0, 2**32 - 1)
media = st.builds(ImageItem, st.binary(min_size=32, max_size=32), counts, counts, counts, counts)
slot_inits = st.builds(
    SlotInit,
    small,
    large,
    small,
    st.none() | samplings,
    large,
    small,
    runs,
    small,
    st.lists(media, max_size=3).map(tuple),
)
rows = st.builds(SeqSlice, numbers, runs, numbers, numbers, runs, runs)
decoding = st.tuples(st.integers(1, 300), st.integers(-1, 999), small).map(lambda t: SeqSlice(t[0], (t[1],), t[2], 1))
page_ops = st.one_of(
    st.builds(TableWrite, numbers, numbers, numbers, runs),
    *(st.builds(kind.op_type, *[numbers] * kind.num_ints) for kind in PAGE_OP_FORMATS[1:]),
)
tops = st.builds(TopLogprobs, numbers, floats, numbers, runs, st.lists(floats, max_size=3).map(tuple))
few_tops, few_floats = st.lists(tops, max_size=3).map(tuple), st.lists(floats, max_size=3).map(tuple)
samples = st.builds(SliceResult, runs, few_tops, few_tops, texts, few_floats)
drawn = small.map(lambda token: SliceResult((token,)))


def some(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=6).map(tuple)


masks = st.integers(0, 3).flatmap(
    lambda words: some(st.builds(TokenBitmask, numbers, st.binary(min_size=4 * words, max_size=4 * words)))
)
plans = st.builds(
    StepPlan, some(slot_inits), some(page_ops), some(rows) | some(decoding), some(page_ops), masks, some(rows)
)
results = st.builds(StepResult, some(samples) | some(drawn), floats)


def same(a: object, b: object) -> bool:
    """Equal in value and type, NaNs too; rows that were read are made."""
    a, b = (each.as_tuple if isinstance(each, SeqSlices) else each for each in (a, b))
    if isinstance(a, DeviceSamplingParams) and isinstance(b, DeviceSamplingParams):
        a, b = astuple(a), astuple(b)
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))  # type: ignore[arg-type]
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return struct.pack("<d", a) == struct.pack("<d", b)
    return type(a) is type(b) and a == b


def a_plan(count: int = 12) -> StepPlan:
    """A step with a bit of everything."""
    sampling = DeviceSamplingParams(
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=0.5, frequency_penalty=-0.5,
        repetition_penalty=1.1, min_tokens=3, stop_token_ids=(2, 7), allowed_token_ids=(5, 6, 7),
        logit_bias=((9, -100.0),), bad_word_ids=((1,), (2, 3)), prompt_logprobs=2, logprob_token_ids=(6, 5, 96),
    )  # fmt: skip
    return StepPlan(
        (
            SlotInit(
                3, 70, -1, sampling, 2**62 + 1, 4, (1, 2, 3, 4), 2,
                (ImageItem(b"k" * 32, 1, 2, 2), ImageItem(bytes(32), 3, 1, 9, 4)),
            ),
            SlotInit(4, 71, 3, None, -5, 4),
        ),
        (TableWrite(3, 0, 0, (17, 18)), PageCopy(0, 17, 19), SwapOut(1, 5, 6), SwapIn(0, 6, 2**33), Poison(1, 8),
        TableWrite(4, 1, 7, ()),
         ImageEncoding(1, 3, 1, 5, 2, 2)),
        (
            SeqSlice(3, (1, 2, 3, 4), 0, 3, (2, 3, 4)), SeqSlice(4, (), 9, 0, (), (8, 9)),
            *(SeqSlice(10 + i, (LAST_SAMPLED,), 100 * i, 1) for i in range(count)),
        ),
        (PageCopy(0, 1, 2),),
        (TokenBitmask(3, b"\x01\x02\x03\x04\xff\xff\xff\x7f"), TokenBitmask(10, bytes(8))),
        (SeqSlice(4, (6, 7), 8, 2), SeqSlice(10, (5,), 3, 0)),
    )  # fmt: skip


def a_result(count: int = 12) -> StepResult:
    top = TopLogprobs(5, -0.25, 1, (5, 6), (-0.25, -math.inf))
    return StepResult(
        (
            SliceResult((5, 6), (top, top._replace(logprob=math.nan))), SliceResult((), (), (top, top, top)),
            SliceResult((0,), error="не конечны: ∞"), *(SliceResult((i,)) for i in range(count)),
        ),
        0.012,
        0.001,
    )  # fmt: skip


@given(plans)
@example(StepPlan((), (), ()))
@example(a_plan())
@example(StepPlan((), (), (SeqSlice(1, (), 0, 0),) * 3))
def test_plans_are_read_as_they_were_said(plan: StepPlan) -> None:
    assert same(decode_frame(encode_frame(plan)), plan)


@given(results)
@example(StepResult((), 0.0))
@example(a_result())
@example(StepResult((SliceResult(()),) * 300, math.nan))
@example(StepResult((SliceResult((), pooled=(0.5, -2.0)), SliceResult((3,)), SliceResult((), pooled=(1.0,))), 0.0))
@example(StepResult((SliceResult((), (TopLogprobs(1, 0.0, 1),)),) * 2, math.inf))
def test_results_are_read_as_they_were_said(result: StepResult) -> None:
    assert same(decode_frame(encode_frame(result)), result)


def test_small_steps_are_small() -> None:
    assert len(encode_frame(StepPlan((SlotInit(255, 10**6, 3, None, 2**63 - 1, 32000),), (), ()))) < 64
    decodes = StepPlan((), (), tuple(SeqSlice(i, (LAST_SAMPLED,), 32000 + i, 1) for i in range(256)))
    assert len(encode_frame(decodes)) < 17 * 256


GOLDEN = (
    "07 01 00000000 00000000 02000000 00000000 00000000"  # version, a plan; no new slots, no page ops, two slices, ...
    " 69 01 00 00 08000000"  # numbers of 4 bytes; a token a row, no scores, no drafts; eight numbers
    " 01000000 02000000  03000000 04000000  e8030000 00000000  ffffffff 07000000"  # samples, slots, starts, tokens
)
"""Two rows as bytes, which change with the version alone."""


def test_rows_are_these_bytes() -> None:
    plan = StepPlan((), (), (SeqSlice(3, (LAST_SAMPLED,), 1000, 1), SeqSlice(4, (7,), 0, 2)))
    assert encode_frame(plan) == bytes.fromhex(GOLDEN)
    more = encode_frame(plan._replace(slices=(SeqSlice(3, (5, 6), 2**31, 0, (8,)), SeqSlice(4, (), 0, 0, (), (9, 9)))))
    assert more[22:30] == struct.pack("<cBBBI", b"q", 2, 2, 2, 6 + 2 + 2 + 2 + 1 + 2 + 2)
    assert struct.unpack("<17q", more[30:]) == (0, 0, 3, 4, 2**31, 0, 2, 0, 5, 6, 1, 0, 8, 0, 2, 9, 9)


@given(some(rows) | some(decoding))
@example(())
def test_rows_are_the_same_as_arrays_and_one_by_one(given: tuple[SeqSlice, ...]) -> None:
    for found in (
        SeqSlices.from_slices(given),
        SeqSlices.from_slices(decode_frame(encode_frame(StepPlan((), (), given))).slices),
    ):  # type: ignore[union-attr]
        assert same(found.as_tuple, given)
        assert found == given == found
        assert len(found) == len(given)
        assert hash(found) == hash(given)
        for listed, column in ((found.slots, "slot"), (found.starts, "start"), (found.num_samples, "num_samples")):
            assert listed == [getattr(row, column) for row in given]
        assert found.ends == [row.start + len(row.tokens) for row in given]
        assert found.to_array().dtype == found.token_counts.dtype == np.int64
        assert found.token_counts.tolist() == [len(row.tokens) for row in given]
        for runs, column in (
            (found.tokens, "tokens"),
            (found.score_tokens, "score_tokens"),
            (found.draft_tokens, "draft_tokens"),
        ):
            assert found.values(runs) == [number for row in given for number in getattr(row, column)]
        decodes = all(len(row.tokens) == 1 and row.num_samples and not row.score_tokens for row in given)
        assert found.is_decode_only == (decodes and bool(given))
        if found.is_decode_only:
            assert found.decode_columns.T.tolist() == [[row.slot, row.start, row.tokens[0]] for row in given]


@pytest.mark.parametrize(
    ("head", "numbers", "why"),
    [
        ((b"b", 1, 0, 0, 8), (1,) * 8, "98 is no width of a number"),
        ((b"i", 1, 0, 0, 5), (1,) * 5, "5 numbers are too few for 2 rows"),
        ((b"i", 3, 0, 0, 8), (1,) * 8, "2 numbers remain for 2 runs of kind 3"),
        ((b"i", 1, 0, 0, 9), (1,) * 9, "1 numbers belong to no row"),
        ((b"i", 2, 0, 0, 9), (1,) * 6 + (2, -1, 5), r"1 numbers remain for rows that have \[2, -1\]"),
        ((b"q", 2, 0, 0, 9), (1,) * 6 + (2**62, 2**62, 5), "1 numbers remain for rows"),
        ((b"i", 1, 0, 0, 2**32 - 1), (1,) * 8, "17179869180 bytes are announced, 32 remain"),
    ],
)
def test_rows_that_are_none_are_refused(head: tuple[Any, ...], numbers: tuple[int, ...], why: str) -> None:
    begun = wire.HEAD.pack(VERSION, wire.PLAN) + wire.PLAN_HEAD.pack(0, 0, 2, 0, 0)
    said = struct.pack("<cBBBI", *head) + struct.pack(
        f"<{len(numbers)}{'i' if head[0] == b'b' else head[0].decode()}", *numbers
    )
    with pytest.raises(WireError, match=f"rows at byte .*: {why}"):
        decode_frame(begun + said)


@pytest.mark.parametrize(
    ("code", "numbers", "why"),
    [
        (99, (), "page op kinds at byte 22: 99 is no kind of page operation"),
        (1, (0, 5), "page op numbers at byte 36: page operation 0 goes beyond the 2 that there are"),
        (1, (0, 5, 6, 7), "page op numbers at byte 44: 1 belong to no page operation"),
    ],
)
def test_page_operations_that_are_none_are_refused(code: int, numbers: tuple[int, ...], why: str) -> None:
    frame = wire.HEAD.pack(VERSION, wire.PLAN) + wire.PLAN_HEAD.pack(0, 1, 0, 0, 0)
    frame += bytes([code]) + struct.pack(f"<Ic{len(numbers)}i", len(numbers), b"i", *numbers)
    with pytest.raises(WireError, match=why):
        decode_frame(frame)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (StepPlan((), (), (SeqSlice(2**63, (1,), 0, 1),)), "rows"),
        (StepPlan((), (), (SeqSlice(1, (1, -(2**63) - 1), 0, 1),)), "rows"),
        (StepPlan((), (PageCopy(0, 2**64, 1),), ()), "page op numbers"),
        (StepPlan((), (), (), (), (TokenBitmask(1, bytes(5)),)), "masks"),
        (StepPlan((), (), (), (), (TokenBitmask(1, bytes(4)), TokenBitmask(2, bytes(8)))), "masks"),
        (StepPlan((), (), (), (), (TokenBitmask(2**63, bytes(4)),)), "mask slots"),
        (StepPlan((SlotInit(1, 1, -1, None, 2**63, 5),), (), ()), "slot init"),
        (StepPlan((SlotInit(1, 1, -1, None, 0, 5, images=(ImageItem(b"short", 0, 1, 1),)),), (), ()), "image"),
        (StepPlan((SlotInit(1, 1, -1, None, 0, 5, images=(ImageItem(bytes(32), -1, 1, 1),)),), (), ()), "image"),
        (StepPlan((SlotInit(2**31, 1, -1, None, 0, 5),), (), ()), "slot init"),
        (StepPlan((SlotInit(1, 1, -1, DeviceSamplingParams(top_k=2**31), 0, 5),), (), ()), "sampling"),
        (StepPlan((), (), (SeqSlice(1, ("x",), 0, 1),)), "rows"),  # type: ignore[arg-type]
        (StepResult((SliceResult((1,), (TopLogprobs(1, "x", 1),)),), 0.0), "top logprobs"),  # type: ignore[arg-type]
    ],
)
def test_what_has_no_wire_form_is_refused(message: Message, field: str) -> None:
    with pytest.raises(WireError, match=field) as error:
        encode_frame(message)
    assert error.value.field == field


def test_other_versions_and_kinds_are_refused() -> None:
    frame = encode_frame(a_plan())
    with pytest.raises(WireError, match=f"version at byte 0: it is 9, only {VERSION} is read"):
        decode_frame(b"\x09" + frame[1:])
    with pytest.raises(WireError, match="kind at byte 1: 3 is neither a plan nor a result"):
        decode_frame(frame[:1] + b"\x03" + frame[2:])
    with pytest.raises(WireError, match="head at byte 0: 2 bytes are announced, 0 remain"):
        decode_frame(b"")
    with pytest.raises(WireError, match=rf"frame at byte {len(frame)}: 1 bytes follow its end"):
        decode_frame(frame + b"\0")
    with pytest.raises(WireError, match="bytes, at most"):
        decode_frame(memoryview(bytearray(MAX_FRAME_BYTES + 1)))


def mutated(frame: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    data = bytearray(frame)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data)) if data else 0
        way = rng.randrange(6)
        if way == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            del data[at:]
        elif way == 2:
            del data[at : at + rng.randrange(1, 9)]
        elif way == 3:
            other = rng.choice(others)
            start = rng.randrange(len(other))
            data[at : at + rng.randrange(9)] = other[start : start + rng.randrange(64)]
        elif way == 4:  # where counts are
            number = rng.choice((0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, len(data)))
            at = rng.choice((at, 2, 6, 10, 14, 18))
            data[at : at + 4] = struct.pack("<I", number)
        else:
            data[at : at + 1] = rng.choice((b"b", b"i", b"q", b"\0", b"\1", b"\xff"))
    return bytes(data)


def attack(count: int, seed: int) -> dict[str, int]:
    """Read so many broken frames; what came of them. Anything but a message or a WireError passes through."""
    rng = random.Random(seed)
    frames = [
        encode_frame(message) for message in (a_plan(), a_plan(0), a_result(), a_result(0), a_plan(60), a_result(60))
    ]
    frames.append(encode_frame(StepPlan((), (), a_plan(40).slices[2:])))
    frames.append(encode_frame(StepResult(tuple(SliceResult((i,)) for i in range(40)), 0.0)))
    seen = {"refused": 0, "read": 0}
    for _ in range(count):
        frame = mutated(rng.choice(frames), frames, rng)
        began = time.thread_time()
        try:
            message = decode_frame(frame)
            assert same(decode_frame(encode_frame(message)), message)
            seen["read"] += 1
        except WireError as error:
            seen["refused"] += error.offset is not None and 0 <= error.offset <= len(frame)
        assert time.thread_time() - began < 5, f"{frame.hex()} takes too long"
    assert sum(seen.values()) == count, "an error isn't in its frame"
    return seen


def test_broken_frames_are_refused_or_read() -> None:
    """In no more memory than their size allows."""
    tracemalloc.start()
    try:
        seen = attack(2000, seed=1)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert seen["refused"] > 1000
    assert seen["read"] > 100


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_many_broken_frames() -> None:
    print(attack(100_000, seed=3))


def test_a_number_that_was_added_is_sent_where_it_is_not_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [
        StepPlan((SlotInit(1, 7, -1, DeviceSamplingParams(min_p=share, top_k=3), 3, 4),), (), ())
        for share in (0.0, 0.25)
    ]
    before = [encode_frame(plan) for plan in plans]
    monkeypatch.setattr(wire, "ADDED_NUMBERS", DEVICE_NUMBERS[2:4])  # as if these two were new
    after = [encode_frame(plan) for plan in plans]
    assert after[0] == before[0]
    assert len(after[1]) == len(before[1]) + 20
    monkeypatch.setattr(wire, "ADDED_NUMBERS", DEVICE_NUMBERS[2:5])  # and one more later
    assert [decode_frame(frame) for frame in (*before, *after)] == plans * 2
    monkeypatch.setattr(wire, "ADDED_NUMBERS", DEVICE_NUMBERS[2:3])
    with pytest.raises(WireError, match=r"added numbers.*there are 2, and 1 are known"):
        decode_frame(after[1])
    monkeypatch.setattr(wire, "ADDED_NUMBERS", DEVICE_NUMBERS[6:8])
    with pytest.raises(WireError, match=r"added numbers.*top_k is 0\.25, not an integer"):
        decode_frame(after[1])
