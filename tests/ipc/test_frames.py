"""The frames between fronts and the engine's process: what is read is what was said; what is broken is refused."""

from __future__ import annotations

import json
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import errors
from quire.config import EngineConfig
from quire.core.outputs import BranchOutput, EngineStats
from quire.core.request import NO_DRAFT_COUNTS, DraftCounts
from quire.core.validation import EngineLimits
from quire.errors import EngineDead, InputError, QuireError, StartupError
from quire.ipc import frames
from quire.ipc.frames import (
    Frame,
    FrameCodec,
    error_from_json,
    error_to_json,
    read_client_message,
    read_engine_message,
    write_client_message,
    write_engine_message,
)
from quire.ipc.handshake import (
    EngineInitMessage,
    read_engine_init,
    read_heartbeat,
    read_ready,
    write_engine_init,
    write_heartbeat,
    write_ready,
)
from quire.ipc.heartbeat import Health
from quire.ipc.messages import (
    MAX_SHARED_PAGES,
    AbortRequests,
    AddRequests,
    AdminRequest,
    CacheUpdate,
    EngineExited,
    EngineMetrics,
    EngineReady,
    HandOver,
    ImportPages,
    ListPrefixes,
    NewRequest,
    QueueSizes,
    RegisterPrefix,
    ReleaseHandOver,
    ReleasePrefix,
    Reply,
    RequestProgress,
    StepOutputs,
    StopBranch,
)
from quire.memory.answers import Account, Sharing, TypeUsage, Usage
from quire.memory.page_keys import KeyChain, PromptKeys
from quire.protocol.columns import MAX_FRAME_BYTES, WireError
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.method import Method
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.shared_host import SharedHostMemory, SharedPage
from quire.protocol.step_plan import MappingStats, RankUsage, TopLogprobs
from quire.protocol.structured_output import ANY_OUTPUT, Structured

unsigned = st.integers(0, 2**32 - 1)
small = st.integers(0, 2**31 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(), max_size=12)
tokens = st.lists(small, max_size=5).map(tuple)
tops = st.lists(
    st.builds(TopLogprobs, small, finite, small, tokens, st.lists(finite, max_size=3).map(tuple)), max_size=3
)
drafts = st.builds(DraftCounts, small, small)
outputs = st.builds(
    BranchOutput, st.just(""), st.integers(0, 300), tokens, st.just(""), st.just(()), st.none(), st.none(),
    st.just(False),
    finite, st.none(), small, st.just(()), drafts,
)  # fmt: skip
ended = st.builds(
    BranchOutput, st.just(""), st.integers(0, 300), tokens, st.just(""), tops.map(tuple),
    st.sampled_from(["stop", "length", "abort", "error"]), st.none() | small | texts, st.booleans(), finite,
    st.none() | tops.map(tuple), small, st.lists(finite, max_size=3).map(tuple), st.just(NO_DRAFT_COUNTS) | drafts,
)  # fmt: skip
progress = st.builds(RequestProgress, unsigned, unsigned, st.none() | finite, st.none() | finite, unsigned, unsigned)


def some_facts() -> EngineMetrics:
    stats = EngineStats()
    stats.steps, stats.rows, stats.prompt_tokens, stats.generated_tokens, stats.computed_tokens = 5, 4, 3, 2, 1
    stats.num_drafts, stats.draft_tokens, stats.accepted_tokens, stats.accepted_per_pos = 6, 7, 8, [9] * 16
    stats.step_seconds, stats.idle_seconds, stats.finished = 0.25, 0.5, {"stop": 3}
    account = Account(
        Usage(1, 2, 3, 4, 5, 6), Sharing(*range(13)), (TypeUsage("full", 1, 2, 3), TypeUsage("window-6", 4, 5, 6))
    )
    return EngineMetrics(
        account,
        stats,
        {"swap": 1, "recompute": 0},
        1.5,
        MappingStats(4096, 5, 4, 3, 0.25, 0.5),
        (RankUsage(0.5, 2**31),),
        2,
    )


def facts_equal(one: EngineMetrics | None, other: EngineMetrics | None) -> bool:
    if one is None or other is None:
        return one is other
    same = all(getattr(one.stats, name) == getattr(other.stats, name) for name in EngineStats.__slots__)
    return same and one._replace(stats=other.stats) == other


def from_front(message: Any) -> Any:
    """Return a client's message as the engine reads it."""
    kind, body = write_client_message(message)
    return read_client_message(Frame(kind, memoryview(body)))


def from_engine(message: Any) -> Any:
    """Return an engine's message as a client reads it."""
    kind, body = write_engine_message(message)
    return read_engine_message(Frame(kind, memoryview(body)))


@given(
    now=finite, queues=st.builds(QueueSizes, unsigned, unsigned, unsigned, unsigned, unsigned), computed=unsigned,
    came=st.lists(progress, max_size=3), plain=st.lists(outputs | ended, max_size=6), known=st.booleans(),
)  # fmt: skip
def test_steps(
    now: float, queues: QueueSizes, computed: int, came: list[RequestProgress], plain: list[BranchOutput], known: bool
) -> None:
    facts = some_facts() if known else None
    message = StepOutputs(now, queues, computed, came, list(enumerate(plain)), facts)
    found = from_engine(message)
    assert found._replace(facts=None) == message._replace(facts=None)
    assert facts_equal(found.facts, facts)


CAT, DOG = b"c" * 32, b"d" * 32
SEEN = (ImagePixels(CAT, (1, 2, 2, 3), bytes(range(12)), (1, 1)), ImagePixels(DOG, (2, 1, 1, 3), b"pixels"))
LOOKED = (
    NewRequest(1, "a", (5, 6, 7, 8), (ImageItem(CAT, 1, 2, 2), ImageItem(DOG, 3, 1, 6, 2))), NewRequest(2, "b", (5,)),
    NewRequest(3, "c", (5, 6), (ImageItem(CAT, 0, 2, 2),)),
)  # fmt: skip
PAGES = [SharedPage(0, 1, b"a" * 32), SharedPage(3, 2**40, b"b" * 34), SharedPage(0, 300, b"c" * 32)]
MESSAGES = [
    AddRequests(8, LOOKED, SamplingParams(max_tokens=3), "salt", SEEN), AddRequests(8, LOOKED, SamplingParams(), "",
    SEEN[:1]),
    AddRequests(7, (NewRequest(1, "cmpl-1", (5, 6, 7)), NewRequest(2, "é\n", (1,))), SamplingParams(max_tokens=3),
    "salt"),
    AbortRequests(None), AbortRequests((1, 2, 2**32 - 1)), AbortRequests(()), StopBranch(3, 0, "stop\ud800 here"),
    RegisterPrefix(1, 2, "rules", (1, 2, 3)), ReleasePrefix(4, "rules"), ListPrefixes(9), AdminRequest(3, "reset"),
    AdminRequest(3, "sleep", 2, "abort"), AdminRequest(4, "wake", tags=("weights",)),
    ImportPages(2**32 - 1, PAGES), ImportPages(3, []), ReleaseHandOver(2**32 - 1),
    AddRequests(7, (NewRequest(1, "cmpl-1", (5, 6, 7)),), SamplingParams(), hands_over=True),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_fronts_send(message: Any) -> None:
    assert from_front(message) == message


@pytest.mark.parametrize(
    ("media", "pixels", "why"),
    [
        ([ImageItem(CAT, 3, 2, 2)], SEEN[:1], "can't be in a prompt of 4 tokens"),
        ([ImageItem(CAT, 1, 0, 2)], SEEN[:1], "can't be in a prompt"),
        ([ImageItem(CAT, 1, 1, 2, 0)], SEEN[:1], "can't be in a prompt"),
        ([ImageItem(CAT, 1, 2, 2), ImageItem(DOG, 2, 1, 1)], SEEN, "can't be in a prompt of 4 tokens, from 3 on"),
        ([ImageItem(CAT, 1, 2, 2)], SEEN, "those of 2 images are announced, and the requests have 1"),
        ([ImageItem(CAT, 1, 2, 2)], SEEN[1:], "some belong to no image"),
        ([ImageItem(CAT, 0, 2, 2), ImageItem(DOG, 2, 1, 1)], SEEN[:1] * 2, "two belong to the same image"),
        ([ImageItem(CAT, 1, 2, 2)], [SEEN[0]._replace(shape=(1, 2, 3, 2))], "are no image of the shape"),
        ([ImageItem(CAT, 1, 2, 2)], [SEEN[0]._replace(grid=(1,) * 4097)], "are no image of the shape"),
    ],
)
def test_pictures_that_no_front_sends(media: list[ImageItem], pixels: Sequence[ImagePixels], why: str) -> None:
    message = AddRequests(1, (NewRequest(1, "a", (5, 6, 7, 8), tuple(media)),), SamplingParams(), "", tuple(pixels))
    kind, body = write_client_message(message)
    with pytest.raises(WireError, match=why):
        read_client_message(Frame(kind, memoryview(body)))


def test_pixels_that_are_not_sent() -> None:
    for bad in (SEEN[0]._replace(data=b"short"), SEEN[0]._replace(key=b"short"), SEEN[0]._replace(shape=(12,))):
        with pytest.raises(WireError, match="pixels"):
            write_client_message(AddRequests(1, LOOKED, SamplingParams(), "", (bad,)))


PARAMS: list[dict[str, Any]] = [
    {}, {"n": 3, "best_of": 5}, {"beam_width": 4, "n": 2, "early_stopping": "never", "length_penalty": 0.3},
    {"temperature": 0.1, "top_p": 1 / 3, "top_k": 7, "min_p": 1e-5, "seed": -(2**63)}, {"max_tokens": None},
    {"stop_token_ids": [4, 5], "allowed_token_ids": (1, 2), "logit_bias": {3: -1.5, 9: 100}},
    {"bad_word_ids": ((1, 2), (3,))}, {"logprobs": 4, "prompt_logprobs": 0}, {"logprob_token_ids": [7, 8]},
    {"ignore_eos": True, "min_tokens": 2},
    {"presence_penalty": -0.1, "frequency_penalty": 2, "repetition_penalty": 1.1},
    {"structured": Structured("regex", "a+", (5, 6))}, {"structured": Structured(ANY_OUTPUT, "", (5,), (4,), 0)},
]  # fmt: skip


@pytest.mark.parametrize("given", PARAMS, ids=str)
def test_parameters(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    found = frames.params_from_json(json.loads(json.dumps(frames.params_to_json(params))))
    assert found == params
    assert found.to_device_params() == params.to_device_params()


def test_every_parameter_is_sent_but_the_fronts_own() -> None:
    assert set(frames.DEFAULTS) | set(frames.NOT_SENT_PARAMS) == {field.name for field in fields(SamplingParams)}
    words = SamplingParams(stop=["a"], bad_words=["b"], bad_word_ids=((1,),), skip_special_tokens=False)
    assert frames.params_to_json(words) == {"bad_word_ids": ((1,),)}


def test_a_method_stays_here() -> None:
    def method() -> Method:
        raise AssertionError

    with pytest.raises(InputError, match="a method can't be sent to an engine in another process"):
        write_client_message(AddRequests(1, (), SamplingParams(method=method)))


@pytest.mark.parametrize(
    "error",
    [
        InputError("a", "n"), InputError("a"), errors.PromptTooLong("b", "prompt"), errors.PrefixTaken("c", "name"),
        errors.PrefixesFull("d", "prefix"), errors.UnknownPrefix("e", "name"), errors.Overloaded("f", 7),
        EngineDead("g"), StartupError("h", "i"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_errors(error: QuireError) -> None:
    found = error_from_json(json.loads(json.dumps(error_to_json(error))))
    assert type(found) is type(error)
    assert vars(found) == vars(error)
    assert found.args == error.args


def test_other_errors_are_named() -> None:
    found = error_from_json(error_to_json(RuntimeError("the device is gone")))
    assert type(found) is EngineDead
    assert str(found) == "RuntimeError: the device is gone"
    assert "KeyboardInterrupt" in str(from_engine(EngineExited(KeyboardInterrupt())).error)


@pytest.mark.parametrize("value", [None, True, False, ({"rules": 5}, ("rules",))])
def test_answers(value: Any) -> None:
    assert from_engine(Reply(3, None, value)) == Reply(3, None, value)


FROM_ENGINES = {frames.REPLY, frames.STEP_OUTPUTS, frames.CACHE_UPDATE, frames.HAND_OVER, frames.ENGINE_EXITED}


@pytest.mark.parametrize("pages", [PAGES, []])
def test_pages_that_are_handed_over(pages: list[SharedPage]) -> None:
    assert from_engine(HandOver(3, 16, 2**40, pages)) == HandOver(3, 16, 2**40, pages)


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (SharedPage(-1, 1, b"k"), "negative"), (SharedPage(0, 0, b"k"), "host page 0"), (SharedPage(0, 1, b""), "is"),
        (SharedPage(0, 1, b"k" * 65), "one is not from 1 to 64"),
    ],
)  # fmt: skip
def test_pages_that_no_engine_has(page: SharedPage, why: str) -> None:
    with pytest.raises(WireError, match=why):
        from_engine(HandOver(3, 16, 20, [page]))
    with pytest.raises(WireError, match=why):
        from_front(ImportPages(3, [page]))


def test_a_page_more_than_is_read() -> None:
    body = bytearray(write_client_message(ImportPages(3, PAGES))[1])
    body[4:8] = frames.COUNT.pack(MAX_SHARED_PAGES + 1)
    with pytest.raises(WireError, match=f"{MAX_SHARED_PAGES + 1} are announced, at most {MAX_SHARED_PAGES} are read"):
        read_client_message(Frame(frames.IMPORT_PAGES, memoryview(body)))


@pytest.mark.parametrize(
    ("stored", "dropped"), [([b"a" * 32, b"b" * 32], [b"c" * 32]), ([], [b"d" * 34]), ([b"e" * 32], [])]
)
def test_cache_updates(stored: list[bytes], dropped: list[bytes]) -> None:
    assert from_engine(CacheUpdate(stored, dropped)) == CacheUpdate(stored, dropped)


@pytest.mark.parametrize("kind", sorted({*frames.KINDS} - FROM_ENGINES))
def test_kinds_that_no_engine_sends_are_refused(kind: int) -> None:
    with pytest.raises(WireError, match=f"kind: {kind} is not a kind that engines send"):
        read_engine_message(Frame(kind, memoryview(b'{"key":1}')))


def test_the_first_frames() -> None:
    config = EngineConfig.of(model="x", kv_tokens=64, override_generation_config={"top_k": 3}, retention="slack")
    hello = EngineInitMessage(config, (1, 2), 60.0, True, 20)
    assert read_engine_init(memoryview(write_engine_init(hello))) == hello
    keys = PromptKeys(KeyChain(b"r" * 32, 16, True), 32, 2)
    ready = EngineReady(
        EngineLimits(5, 6, 7, "the KV memory"), ("a", "b"), ("c",), {"block_size": "16"}, some_facts(), keys
    )
    found = read_ready(memoryview(write_ready(ready)))
    assert found._replace(facts=ready.facts) == ready
    assert facts_equal(found.facts, ready.facts)
    assert read_heartbeat(memoryview(write_heartbeat(Health(True, True, 4.0, "step 3"), 10.0)), 20.0) == Health(
        True, True, 14.0, "step 3"
    )


def test_settings_that_can_not_be_are_refused() -> None:
    for bad in ({"nothing": 1}, {"config": {"modell": ""}}, {"config": {}, "named": ["a"]}):
        with pytest.raises(WireError):
            read_engine_init(memoryview(json.dumps({"named": [], **bad}).encode()))


# Frames


def frames_of(count: int) -> tuple[list[bytes], list[tuple[int, bytes]]]:
    writer = FrameCodec()
    said = [write_client_message(MESSAGES[at % len(MESSAGES)]) for at in range(count)]
    return [writer.encode(kind, body) for kind, body in said], said


@given(st.lists(st.integers(1, 80), min_size=1, max_size=40))
def test_frames_come_whole_however_they_are_cut(cuts: list[int]) -> None:
    written, said = frames_of(9)
    data, reader, found, at = b"".join(written), FrameCodec(), [], 0
    for cut in [*cuts, len(data)]:
        found += [(frame.kind, bytes(frame.body)) for frame in reader.decode(data[at : at + cut])]
        at += cut
    assert found == said


@pytest.mark.parametrize(
    ("head", "why"),
    [
        ((frames.VERSION + 1, 2, 0, 1, 0), f"version: {frames.VERSION + 1}, expected {frames.VERSION}"),
        ((frames.VERSION, 0, 0, 1, 0), "kind: 0 is not a kind of frame"),
        ((frames.VERSION, 200, 0, 1, 0), "kind: 200 is not a kind of frame"),
        ((frames.VERSION, 2, 1, 1, 0), "kind"),
        ((frames.VERSION, 2, 0, 2, 0), "number: 2, expected 1"),
        ((frames.VERSION, 2, 0, 0, 0), "number: 0, expected 1"),
        ((frames.VERSION, 2, 0, 1, MAX_FRAME_BYTES + 1), "bytes, at most .* are allowed"),
    ],
)
def test_heads_that_are_refused(head: tuple[int, ...], why: str) -> None:
    with pytest.raises(WireError, match=why):
        list(FrameCodec().decode(frames.HEAD.pack(*head)))


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes after one to four random changes."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(found)) if found else 0
        match rng.randrange(5):
            case 0 if found:
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                del found[at:]
            case 2:
                del found[at : at + rng.randrange(1, 9)]
            case 3:
                number = rng.choice((0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1))
                found[at : at + 4] = struct.pack("<I", number)
            case _:
                found[at : at + 1] = rng.choice((b"b", b"i", b"q", b"\0", b"\1", b"\xff", b'"', b"{", b"[[[["))
    return bytes(found)


def bodies() -> list[tuple[Callable[[Frame], object], int, bytes]]:
    """Return the reader, kind and body of messages of every kind."""
    ends = BranchOutput(
        "", 1, (4, 5), "", (TopLogprobs(4, -0.5, 1, (4, 9), (-0.5, -2.0)),), "stop", "so", True, -3.0, (), 5
    )
    plain = [BranchOutput("", at % 3, (at,), "", (), None, None, False, -1.0) for at in range(40)]
    pooled = BranchOutput("", 0, (), "", (), "stop", None, True, 0.0, pooled=(0.5, -2.0))
    stepped = StepOutputs(1.0, QueueSizes(1, 2, 3, 0, 1), 50, [RequestProgress(1, 2, 3.0, None, 5, 6)],
                      list(enumerate([*plain, ends, ends._replace(stop_reason=7), pooled])), some_facts())  # fmt: skip
    held = {"a": 1}, ("a",)
    engine = [stepped, stepped._replace(facts=None), Reply(1, InputError("a", "n")), Reply(2, None, held),
              CacheUpdate([b"a" * 32], [b"b" * 32]), HandOver(1, 2, 3, PAGES),
              EngineExited(EngineDead("x"))]  # fmt: skip
    found: list[tuple[Callable[[Frame], object], int, bytes]] = [
        (read_engine_message, *write_engine_message(each)) for each in engine
    ]
    asked = AddRequests(7, (NewRequest(1, "cmpl-1", tuple(range(90))),), SamplingParams(**PARAMS[5]), "salt")
    found += [(read_client_message, *write_client_message(message)) for message in (asked, *MESSAGES)]
    shared = SharedHostMemory(3, 1, 2, 2**30)
    hello = write_engine_init(EngineInitMessage(EngineConfig(), (1, 2), 60.0, True, 20, shared_host=shared))
    keys = PromptKeys(KeyChain(b"r" * 32, 16), 32, 2)
    ready = write_ready(EngineReady(EngineLimits(5, 6, 7), ("a",), (), {"block_size": "16"}, some_facts(), keys))
    return [
        *found,
        (lambda frame: read_engine_init(frame.body), 1, hello),
        (lambda frame: read_ready(frame.body), 9, ready),
    ]


def attack(count: int, seed: int) -> dict[str, int]:
    """Read `count` mutated bodies. Return how many were refused and how many read; any other error is raised."""
    rng, kinds, seen = random.Random(seed), bodies(), {"refused": 0, "read": 0}
    for _ in range(count):
        read, kind, body = rng.choice(kinds)
        broken, began = mutated(body, rng), time.thread_time()
        try:
            read(Frame(kind, memoryview(broken)))
            seen["read"] += 1
        except (WireError, InputError, StartupError):
            seen["refused"] += 1
        assert time.thread_time() - began < 5, f"{broken.hex()} takes too long"
    return seen


def test_broken_frames_are_refused_or_read() -> None:
    tracemalloc.start()
    try:
        seen = attack(4000, seed=1)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    assert seen["refused"] > 1000
    assert seen["read"] > 100


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_many_broken_frames() -> None:
    seen = attack(100_000, seed=3)
    print(seen)
    assert sum(seen.values()) == 100_000
