"""The frames between clients and an engine in a process of its own: typed, versioned, numbered and bounded. No pickle,
and no JSON in every step.

A frame is a header (version, kind, number in its direction, length of the body) and a body. Step outputs and prompts
are columns of numbers (quire.protocol.columns); rare messages are JSON. A reader refuses what no writer of this version
sends, naming the field, before it allocates anything of that size."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeVar

from quire.core.outputs import BranchOutput, EngineStats
from quire.core.request import NO_DRAFT_COUNTS, DraftCounts
from quire.errors import (
    EngineDead,
    InputError,
    NotIdle,
    Overloaded,
    PrefixesFull,
    PrefixTaken,
    PromptTooLong,
    StartupError,
    UnknownPrefix,
)
from quire.ipc.image_frames import read_images, write_images
from quire.ipc.messages import (
    ADMIN_OPERATIONS,
    MAX_ID_CHARS,
    MAX_NUMBER,
    MAX_REQUESTS,
    MAX_SHARED_PAGES,
    MAX_TAGS,
    SLEEP_MODES,
    AbortRequests,
    AddRequests,
    AdminRequest,
    CacheUpdate,
    ClientMessage,
    EngineExited,
    EngineMessage,
    EngineMetrics,
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
    SnapshotRequest,
    StepOutputs,
    StopBranch,
)
from quire.memory.answers import Account, Sharing, TypeUsage, Usage
from quire.protocol.columns import (
    COUNT,
    MAX_FRAME_BYTES,
    FrameReader,
    WireError,
    read_top_logprobs,
    read_vectors,
    tuple_new,
    write_floats,
    write_ints,
    write_run_lengths,
    write_runs,
    write_top_logprobs,
    write_vectors,
)
from quire.protocol.sampling_params import PARAMS, SamplingParams
from quire.protocol.shared_host import SharedPage
from quire.protocol.step_plan import MappingStats, RankUsage
from quire.protocol.structured_output import Structured

VERSION = 1
HEAD = struct.Struct("<BBHII")  # version, kind, 0, number, bytes of the body
MAX_JSON_BYTES = 1 << 24
MAX_ERROR_CHARS = 1 << 16  # characters of an error's text
MAX_CLIENT_CHARS = 64  # characters of a client's name
KINDS = (
    INIT, ADD, ABORT, STOP, REGISTER_PREFIX, RELEASE_PREFIX, LIST_PREFIXES, PING, READY, START_FAILED, REPLY,
    STEP_OUTPUTS, ENGINE_EXITED, PONG, SNAPSHOT, ADMIN, CACHE_UPDATE, HAND_OVER, IMPORT_PAGES, RELEASE_HAND_OVER,
) = range(1, 21)  # fmt: skip
JSON_KINDS: dict[type[ClientMessage], int] = {
    ReleasePrefix: RELEASE_PREFIX, ListPrefixes: LIST_PREFIXES, SnapshotRequest: SNAPSHOT, AdminRequest: ADMIN,
    ReleaseHandOver: RELEASE_HAND_OVER,
}  # fmt: skip
INPUT_ERRORS: dict[str, type[InputError]] = {
    kind.__name__: kind for kind in (InputError, PromptTooLong, PrefixTaken, PrefixesFull, UnknownPrefix, NotIdle)
}
# Parameters that only the client needs. Structured output is sent as its source, and compiled in the engine's process.
NOT_SENT_PARAMS = (
    "stop", "bad_words", "method", "stop_automaton", "structured_outputs", "grammar",
    *(declared.name for declared in PARAMS if declared.param.owner == "text"),
)  # fmt: skip
DEFAULTS = {field.name: field.default for field in fields(SamplingParams) if field.name not in NOT_SENT_PARAMS}
STOP_HEAD = struct.Struct("<III")  # request number, branch, bytes of the reason
CACHE_HEAD = struct.Struct("<BII")  # bytes of a key, numbers of stored and of dropped keys
MAX_KEY_BYTES = 64
HAND_OVER_HEAD = struct.Struct("<IIQ")  # request number, cached tokens, bytes of the pages
# now; the five queue sizes; computed; numbers of progress, of outputs, of outputs with details, of counts of drafts;
# bytes of the metrics
STEP_HEAD = struct.Struct("<d5IIIIIII")
PROGRESS = struct.Struct("<IIddII")  # number, max_tokens, scheduled, first_token, cached_tokens, preemptions
DETAILS = struct.Struct("<BBBqI")  # finish reason, done, kind of the stop reason, the reason as a number, its bytes
FINISH_REASONS = (None, "stop", "length", "abort", "error")
NO_REASON, NUMBER, TEXT = range(3)
COUNTERS = (
    "accepted_tokens", "computed_tokens", "draft_tokens", "generated_tokens", "num_drafts", "prompt_tokens", "restarts",
    "rows", "steps",
)  # fmt: skip
T = TypeVar("T")


class Frame(NamedTuple):
    """A frame that was read."""

    kind: int
    body: memoryview


class FrameCodec:
    """The frames of one direction of a connection: numbers those that it encodes, and checks the numbers of those that
    it decodes, whose kind must be in `kinds`, and whose body has at most `max_bytes`."""

    def __init__(self, kinds: range = KINDS, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.kinds, self._max_bytes = kinds, max_bytes
        self._written = self._read = 0
        self._buffer = bytearray()

    def encode(self, kind: int, body: bytes) -> bytes:
        """Return the bytes of the next frame. Raise WireError if the body has more than MAX_FRAME_BYTES."""
        if len(body) > MAX_FRAME_BYTES:
            raise WireError("frame", f"{len(body)} bytes, at most {MAX_FRAME_BYTES} are allowed")
        self._written += 1
        return HEAD.pack(VERSION, kind, 0, self._written & 0xFFFFFFFF, len(body)) + body

    def decode(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that the received `data` completes. Raise WireError for a malformed header."""
        if not self._buffer and len(data) >= HEAD.size:
            kind, length = self._check_head(HEAD.unpack_from(data))
            if len(data) == HEAD.size + length:  # the common case: one whole frame
                self._read += 1
                yield Frame(kind, memoryview(data)[HEAD.size :])
                return
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= HEAD.size:
                kind, length = self._check_head(HEAD.unpack_from(self._buffer, at))
                end = at + HEAD.size + length
                if len(self._buffer) < end:
                    break
                body, at = bytes(memoryview(self._buffer)[end - length : end]), end
                self._read += 1
                yield Frame(kind, memoryview(body))
        finally:
            del self._buffer[:at]

    def _check_head(self, head: tuple[int, ...]) -> tuple[int, int]:
        version, kind, zero, number, length = head
        if version != VERSION:
            raise WireError("version", f"{version}, expected {VERSION}")
        if kind not in self.kinds or zero:
            raise WireError("kind", f"{kind} is not a kind of frame")
        if number != (self._read + 1) & 0xFFFFFFFF:
            raise WireError("number", f"{number}, expected {self._read + 1}")
        if length > self._max_bytes:
            raise WireError("length", f"{length} bytes, at most {self._max_bytes} are allowed")
        return kind, length


def write_json(value: Any) -> bytes:
    """Return a body of JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def read_json(body: bytes | memoryview) -> dict[str, Any]:
    """Return the object in a body of JSON. Raise WireError for anything else."""
    if len(body) > MAX_JSON_BYTES:
        raise WireError("JSON", f"{len(body)} bytes, at most {MAX_JSON_BYTES} are allowed")
    try:
        data = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise WireError("JSON", str(error)[:200]) from error
    if not isinstance(data, dict):
        raise WireError("JSON", f"a {type(data).__name__}, not an object")
    return data


def read_field(data: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return a field of an object. Raise WireError unless it is of type `kind`."""
    value = data.get(name)
    if type(value) is not kind:
        raise WireError(name, f"a {type(value).__name__}, not a {kind.__name__}")
    return value


def read_uint32(data: Mapping[str, Any], name: str) -> int:
    """Return an integer field. Raise WireError unless it is from 0 to 2**32 - 1."""
    value = read_field(data, name, int)
    if not 0 <= value <= MAX_NUMBER:
        raise WireError(name, f"{value} is not from 0 to {MAX_NUMBER}")
    return value


def write_client_message(message: ClientMessage) -> tuple[int, bytes]:
    """Return the kind and body of a client's message. Raise InputError for parameters that can't be sent."""
    match message:
        case AddRequests(key, requests, params, salt, pixels, client, hands_over):
            head = write_json({
                "key": key, "salt": salt, "client": client, "numbers": [request.number for request in requests],
                "ids": [request.id for request in requests], "params": params_to_json(params), "hands_over": hands_over,
            })  # fmt: skip
            prompts = write_runs([request.prompt for request in requests], "prompts")
            media = [request.media for request in requests]
            images = write_images(media, pixels) if any(media) else ()
            return ADD, b"".join((COUNT.pack(len(head)), head, *prompts, *images))
        case AbortRequests(None):
            return ABORT, COUNT.pack(0xFFFFFFFF)
        case AbortRequests(numbers):
            assert numbers is not None, "the case above has None"
            return ABORT, COUNT.pack(len(numbers)) + write_ints(numbers, "numbers", "q")
        case StopBranch(number, branch, reason):
            text = reason.encode("utf-8", "surrogatepass")
            return STOP, STOP_HEAD.pack(number, branch, len(text)) + text
        case RegisterPrefix(key, number, name, tokens):
            head = write_json({"key": key, "number": number, "name": name})
            return REGISTER_PREFIX, b"".join((COUNT.pack(len(head)), head, *write_runs([tokens], "tokens")))
        case ImportPages(key, pages):
            return IMPORT_PAGES, COUNT.pack(key) + _write_pages(pages)
        case ReleasePrefix() | ListPrefixes() | SnapshotRequest() | AdminRequest() | ReleaseHandOver():
            return JSON_KINDS[type(message)], write_json(message._asdict())


def read_client_message(frame: Frame) -> ClientMessage:
    """Read a client's message. Raise WireError if it is malformed, InputError for invalid parameters."""
    read = READERS.get(frame.kind)
    if read is None:
        raise WireError("kind", f"{frame.kind} is not a kind that clients send")
    return read(frame.body)


def _split(body: memoryview) -> tuple[dict[str, Any], FrameReader]:
    """Return the JSON at the start of a body, and a reader for the rest."""
    reader = FrameReader(body)
    (size,) = reader.unpack(COUNT, "size")
    return read_json(reader.read_bytes(size, "head")), reader


def _read_add(body: memoryview) -> AddRequests:
    head, reader = _split(body)
    ids, numbers = read_field(head, "ids", list), read_field(head, "numbers", list)
    if not 0 < len(ids) == len(numbers) <= MAX_REQUESTS:
        raise WireError("ids", f"{len(ids)} ids for {len(numbers)} numbers; at most {MAX_REQUESTS} are allowed")
    if not all(type(id) is str and 0 < len(id) <= MAX_ID_CHARS for id in ids):
        raise WireError("ids", f"one is not a string of 1 to {MAX_ID_CHARS} characters")
    if not all(type(one) is int and 0 <= one <= MAX_NUMBER for one in numbers):
        raise WireError("numbers", f"one is not an integer from 0 to {MAX_NUMBER}")
    prompts = list(reader.read_runs(len(ids), "prompts"))
    media, pixels = read_images(reader, prompts) if reader.offset < reader.end else ([()] * len(ids), ())
    reader.check_at_end()
    new_requests = tuple(map(NewRequest, numbers, ids, prompts, media))
    if len(client := read_field(head, "client", str)) > MAX_CLIENT_CHARS:
        raise WireError("client", f"{len(client)} characters, at most {MAX_CLIENT_CHARS} are allowed")
    params = params_from_json(read_field(head, "params", dict))
    return AddRequests(
        read_uint32(head, "key"), new_requests, params, read_field(head, "salt", str), pixels, client,
        read_field(head, "hands_over", bool),
    )  # fmt: skip


def read_add_key(frame: Frame) -> int:
    """Return the key of an AddRequests whose parameters are invalid."""
    return read_uint32(_split(frame.body)[0], "key")


def _read_abort(body: memoryview) -> AbortRequests:
    reader = FrameReader(body)
    (count,) = reader.unpack(COUNT, "count")
    numbers = None if count == 0xFFFFFFFF else reader.read_ints(count, "numbers")
    reader.check_at_end()
    return AbortRequests(numbers)


def _read_stop(body: memoryview) -> StopBranch:
    reader = FrameReader(body)
    request, branch, size = reader.unpack(STOP_HEAD, "stop")
    stop = StopBranch(request, branch, reader.read_text(size, "reason"))
    reader.check_at_end()
    return stop


def _read_register_prefix(body: memoryview) -> RegisterPrefix:
    head, reader = _split(body)
    [tokens] = reader.read_runs(1, "tokens")
    reader.check_at_end()
    return RegisterPrefix(read_uint32(head, "key"), read_uint32(head, "number"), read_field(head, "name", str), tokens)


def _read_release_prefix(body: memoryview) -> ReleasePrefix:
    data = read_json(body)
    return ReleasePrefix(read_uint32(data, "key"), read_field(data, "name", str))


def _read_admin_request(body: memoryview) -> AdminRequest:
    data = read_json(body)
    what = read_field(data, "what", str)
    if what not in ADMIN_OPERATIONS:
        raise WireError("what", f"{what[:60]!r} is not an operation")
    mode, tags = read_field(data, "mode", str), read_field(data, "tags", list)
    if mode not in SLEEP_MODES or len(tags) > MAX_TAGS or not all(type(tag) is str for tag in tags):
        raise WireError("mode", "unknown mode, or tags that are not strings")
    return AdminRequest(read_uint32(data, "key"), what, read_uint32(data, "level"), mode, tuple(tags))


def _read_import_pages(body: memoryview) -> ImportPages:
    reader = FrameReader(body)
    (key,) = reader.unpack(COUNT, "key")
    return ImportPages(key, _read_pages(reader))


READERS: dict[int, Callable[[memoryview], ClientMessage]] = {
    ADD: _read_add, ABORT: _read_abort, STOP: _read_stop, REGISTER_PREFIX: _read_register_prefix,
    RELEASE_PREFIX: _read_release_prefix, ADMIN: _read_admin_request, IMPORT_PAGES: _read_import_pages,
    RELEASE_HAND_OVER: lambda body: ReleaseHandOver(read_uint32(read_json(body), "number")),
    LIST_PREFIXES: lambda body: ListPrefixes(read_uint32(read_json(body), "key")),
    SNAPSHOT: lambda body: SnapshotRequest(read_uint32(read_json(body), "key")),
}  # fmt: skip


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that the engine needs and that are not the defaults, as JSON. Raise InputError for a
    method, which is a program."""
    if params.method is not None:
        raise InputError("a method can't be sent to an engine in another process", "method")
    given = {name: getattr(params, name) for name in DEFAULTS}
    if (form := params.structured) is not None:
        given["structured"] = form.kind, form.source, form.after, form.opening, form.budget
    return {name: value for name, value in given.items() if value != DEFAULTS[name]}


def params_from_json(data: dict[str, Any]) -> SamplingParams:
    """Read parameters, with the checks of SamplingParams."""
    if unknown := next((name for name in data if name not in DEFAULTS), None):
        raise WireError("params", f"{unknown[:60]!r} is not a parameter")
    words = data.get("bad_word_ids", ())
    if not isinstance(words, list | tuple) or not all(isinstance(word, list) for word in words):
        raise WireError("bad_word_ids", "not lists of token ids")
    form = data.get("structured")
    if form is not None:
        lists = isinstance(form, list | tuple) and all(isinstance(tokens, list | tuple) for tokens in form[2:4])
        if not lists or len(form) != 5:
            raise WireError("structured", "not kind, source, markers and budget")
        form = Structured(*form)
    return SamplingParams(**{**data, "bad_word_ids": tuple(map(tuple, words)), "structured": form})


def write_engine_message(message: EngineMessage) -> tuple[int, bytes]:
    """Return the kind and body of an engine's message."""
    match message:
        case StepOutputs():
            return STEP_OUTPUTS, write_step_outputs(message)
        case Reply(key, error, value):
            error_data = None if error is None else error_to_json(error)
            return REPLY, write_json({"key": key, "error": error_data, "value": value})
        case CacheUpdate():
            return CACHE_UPDATE, _write_cache_update(message)
        case HandOver(number, cached_tokens, page_bytes, pages):
            return HAND_OVER, HAND_OVER_HEAD.pack(number, cached_tokens, page_bytes) + _write_pages(pages)
        case EngineExited(error):
            return ENGINE_EXITED, write_json(error_to_json(error))


def read_engine_message(frame: Frame) -> EngineMessage:
    """Read an engine's message. Raise WireError if it is malformed."""
    if frame.kind == STEP_OUTPUTS:
        return read_step_outputs(frame.body)
    if frame.kind == CACHE_UPDATE:
        return _read_cache_update(frame.body)
    if frame.kind == HAND_OVER:
        reader = FrameReader(frame.body)
        number, cached_tokens, page_bytes = reader.unpack(HAND_OVER_HEAD, "hand-over")
        return HandOver(number, cached_tokens, page_bytes, _read_pages(reader))
    data = read_json(frame.body)
    if frame.kind == ENGINE_EXITED:
        return EngineExited(error_from_json(data))
    if frame.kind != REPLY:
        raise WireError("kind", f"{frame.kind} is not a kind that engines send after the start")
    error, value = data.get("error"), data.get("value")
    return Reply(
        read_uint32(data, "key"),
        None if error is None else error_from_json(read_field(data, "error", dict)),
        _read_reply_value(value),
    )


def _write_cache_update(message: CacheUpdate) -> bytes:
    size = len(next(chain(message.stored, message.dropped)))
    head = CACHE_HEAD.pack(size, len(message.stored), len(message.dropped))
    return head + b"".join(message.stored) + b"".join(message.dropped)


def _read_cache_update(body: memoryview) -> CacheUpdate:
    reader = FrameReader(body)
    size, stored, dropped = reader.unpack(CACHE_HEAD, "keys")
    if not 0 < size <= MAX_KEY_BYTES or len(body) != CACHE_HEAD.size + size * (stored + dropped):
        raise WireError("keys", f"{stored} stored and {dropped} dropped keys of {size} bytes in {len(body)} bytes")
    keys = [reader.read_bytes(size, "keys") for _ in range(stored + dropped)]
    return CacheUpdate(keys[:stored], keys[stored:])


def _write_pages(pages: Sequence[SharedPage]) -> bytes:
    groups, host_pages, keys = zip(*pages) if pages else ((), (), ())
    columns = write_ints(groups, "groups"), write_ints(host_pages, "host pages"), bytes(map(len, keys))
    return b"".join((COUNT.pack(len(pages)), *columns, *keys))


def _read_pages(reader: FrameReader) -> list[SharedPage]:
    """Read the pages at the end of a frame."""
    (count,) = reader.unpack(COUNT, "pages")
    if count > MAX_SHARED_PAGES:
        raise reader.error("pages", f"{count} are announced, at most {MAX_SHARED_PAGES} are read")
    groups, host_pages = reader.read_ints(count, "groups"), reader.read_ints(count, "host pages")
    if min(groups, default=0) < 0 or min(host_pages, default=1) < 1:
        raise reader.error("pages", "a group or host page is negative, or host page 0")
    sizes = reader.read_bytes(count, "sizes of keys")
    if count and not 0 < min(sizes) <= max(sizes) <= MAX_KEY_BYTES:
        raise reader.error("sizes of keys", f"one is not from 1 to {MAX_KEY_BYTES}")
    keys = [reader.read_bytes(size, "keys") for size in sizes]
    reader.check_at_end()
    return list(map(SharedPage, groups, host_pages, keys))


def _read_reply_value(value: Any) -> int | str | tuple[dict[str, int], tuple[str, ...]] | None:
    match value:
        case None | int() | str():
            return value
        case [dict(held), list(ready)] if all(type(length) is int for length in held.values()):
            return held, tuple(map(str, ready))
    raise WireError("value", f"a {type(value).__name__} is not a reply value")


def error_to_json(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON: its kind, or EngineDead for kinds that readers do not know, and its text."""
    text = str(error)[:MAX_ERROR_CHARS]
    match error:
        case StartupError():
            return {
                "kind": "StartupError",
                "text": error.cause[:MAX_ERROR_CHARS],
                "remedy": error.remedy[:MAX_ERROR_CHARS],
            }
        case Overloaded():
            return {"kind": "Overloaded", "text": text, "retry_after": error.retry_after}
        case InputError() if type(error).__name__ in INPUT_ERRORS:
            return {"kind": type(error).__name__, "text": text, "param": error.param}
        case EngineDead():
            return {"kind": "EngineDead", "text": text}
    return {"kind": "EngineDead", "text": f"{type(error).__name__}: {text}"}


def error_from_json(data: dict[str, Any]) -> Exception:
    """Return the error that `error_to_json` wrote."""
    kind, text, param = read_field(data, "kind", str), read_field(data, "text", str), data.get("param")
    if kind in INPUT_ERRORS:
        return INPUT_ERRORS[kind](text, param if isinstance(param, str) else None)
    if kind == "Overloaded":
        return Overloaded(text, read_uint32(data, "retry_after"))
    if kind == "StartupError":
        return StartupError(text, read_field(data, "remedy", str))
    return EngineDead(text)


def write_step_outputs(message: StepOutputs) -> bytes:
    """Return the body of a STEP_OUTPUTS frame."""
    facts = b"" if message.facts is None else write_json(metrics_to_json(message.facts))
    outputs = [output for _, output in message.outputs]
    detailed = [at for at, output in enumerate(outputs) if _has_details(output)]
    drafts = [output.drafts for output in outputs]
    if not any(map(any, drafts)):
        drafts = []
    counts = len(message.progress), len(outputs), len(detailed), len(drafts), len(facts)
    parts = [STEP_HEAD.pack(message.now, *message.queues, message.computed, *counts)]
    parts += [_write_progress(progress) for progress in message.progress]
    if outputs:
        parts.append(write_ints([number for number, _ in message.outputs], "numbers"))
        parts.append(write_ints([output.branch for output in outputs], "branches", "b"))
        parts += write_runs([output.tokens for output in outputs], "tokens")
        parts.append(write_floats([output.cumulative_logprob for output in outputs], "logprobs"))
        parts.append(write_ints([output.cached_tokens for output in outputs], "cached tokens", "b"))
    if drafts:
        parts += [write_ints(list(column), "drafts", "b") for column in zip(*drafts)]
    if detailed:
        parts.append(write_ints(detailed, "places"))
        parts += _write_details([outputs[at] for at in detailed])
    parts.append(facts)
    return b"".join(parts)


def _has_details(output: BranchOutput) -> bool:
    return output.finish_reason is not None or bool(output.top_logprobs) or output.prompt_logprobs is not None


def _write_progress(progress: RequestProgress) -> bytes:
    number, most, scheduled, first, cached, preemptions = progress
    times = (math.nan if time is None else time for time in (scheduled, first))
    return PROGRESS.pack(number, most, *times, cached, preemptions)


def _write_details(outputs: Sequence[BranchOutput]) -> Iterator[bytes]:
    for output in outputs:
        reason = output.stop_reason
        kind = NO_REASON if reason is None else TEXT if isinstance(reason, str) else NUMBER
        text = reason.encode("utf-8", "surrogatepass") if isinstance(reason, str) else b""
        value = reason if isinstance(reason, int) else 0
        yield DETAILS.pack(FINISH_REASONS.index(output.finish_reason), output.done, kind, value, len(text))
        yield text
    yield bytes((output.prompt_logprobs is not None) + 2 * bool(output.pooled) for output in outputs)
    for tops in ([output.top_logprobs for output in outputs], [output.prompt_logprobs or () for output in outputs]):
        yield write_run_lengths(tops, "numbers of tops")
        yield from write_top_logprobs(list(chain.from_iterable(tops)))
    if pooled := [output.pooled for output in outputs if output.pooled]:
        yield from write_vectors(pooled, "pooled")


def read_step_outputs(body: memoryview) -> StepOutputs:
    """Read the body of a STEP_OUTPUTS frame. Raise WireError with the field and the offset where it is malformed."""
    reader = FrameReader(body)
    now, *queued, computed, progressed, count, num_detailed, num_drafts, size = reader.unpack(STEP_HEAD, "head")
    progress = [_progress(*fields) for fields in reader.unpack_each(PROGRESS, progressed, "progress")]
    numbers: Sequence[int] = ()
    outputs: list[BranchOutput] = []
    if reader.check_count(count, "outputs"):
        numbers = reader.read_ints(count, "numbers")
        branches = reader.read_ints(count, "branches")
        tokens = reader.read_runs(count, "tokens")
        logprobs = reader.read_floats(count, "logprobs")
        cached = reader.read_ints(count, "cached tokens")
        drafts: Iterable[DraftCounts] = repeat(NO_DRAFT_COUNTS)
        if num_drafts:
            drafts = map(DraftCounts, reader.read_ints(count, "drafts"), reader.read_ints(count, "drafts"))
        columns: Any = zip(
            repeat("", count), branches, tokens, repeat(""), repeat(()), repeat(None), repeat(None), repeat(False),
            logprobs, repeat(None), cached, repeat(()), drafts,
        )  # fmt: skip
        outputs = list(map(tuple_new, repeat(BranchOutput), columns))
    if num_detailed:
        _read_details(reader, num_detailed, outputs)
    facts = metrics_from_json(read_json(reader.read_bytes(size, "facts"))) if size else None
    reader.check_at_end()
    return StepOutputs(now, QueueSizes(*queued), computed, progress, list(zip(numbers, outputs)), facts)


def _progress(number: int, most: int, scheduled: float, first: float, cached: int, preemptions: int) -> RequestProgress:
    started, answered = (None if math.isnan(time) else time for time in (scheduled, first))
    return RequestProgress(number, most, started, answered, cached, preemptions)


def _read_details(reader: FrameReader, count: int, outputs: list[BranchOutput]) -> None:
    """Complete the outputs that have more than tokens."""
    if count > len(outputs):
        raise reader.error("places", f"{count} are announced, of {len(outputs)} outputs")
    places = reader.read_ints(count, "places")
    if not all(0 <= at < len(outputs) for at in places):
        raise reader.error("places", f"one is not from 0 to {len(outputs) - 1}")
    ends = [_read_end(reader) for _ in range(count)]
    flags = reader.read_bytes(count, "flags")
    if max(flags) > 3:
        raise reader.error("flags", f"{max(flags)} is not from 0 to 3")
    tops, prompt_tops = (list(read_top_logprobs(reader, count)) for _ in range(2))
    num_pooled = sum(flag >> 1 for flag in flags)
    pooled = iter(read_vectors(reader, num_pooled, "pooled") if num_pooled else ())
    for i, place in enumerate(places):
        finish, done, reason = ends[i]
        outputs[place] = outputs[place]._replace(
            finish_reason=finish, stop_reason=reason, done=done, top_logprobs=tops[i],
            prompt_logprobs=prompt_tops[i] if flags[i] & 1 else None, pooled=next(pooled) if flags[i] & 2 else (),
        )  # fmt: skip


def _read_end(reader: FrameReader) -> tuple[str | None, bool, int | str | None]:
    finish, done, kind, value, size = reader.unpack(DETAILS, "end")
    if finish >= len(FINISH_REASONS) or done > 1 or kind > TEXT:
        raise reader.error("end", f"{finish}, {done} and {kind} are not reason, flag and kind")
    text = reader.read_text(size, "reason")
    return FINISH_REASONS[finish], bool(done), {NO_REASON: None, NUMBER: value, TEXT: text}[kind]


def metrics_to_json(facts: EngineMetrics) -> dict[str, Any]:
    """Return metrics as JSON."""
    stats = facts.stats
    counted = {name: getattr(stats, name) for name in COUNTERS}
    return {
        "usage": facts.account.usage, "sharing": facts.account.sharing,
        "types": facts.account.types, "preempted": dict(facts.preempted),
        "counted": counted, "finished": stats.finished, "step_seconds": stats.step_seconds,
        "idle_seconds": stats.idle_seconds, "seconds": facts.seconds, "mapped": facts.mapped,
        "ranks": facts.ranks, "asleep": facts.asleep, "accepted_per_pos": stats.accepted_per_pos,
    }  # fmt: skip


def metrics_from_json(data: dict[str, Any]) -> EngineMetrics:
    """Read what `metrics_to_json` wrote. Raise WireError if it is malformed."""
    try:
        counted = {name: _check_count(data["counted"][name]) for name in COUNTERS}
        finished = {str(why): _check_count(many) for why, many in data["finished"].items()}
        stats = EngineStats(
            **counted, step_seconds=float(data["step_seconds"]), idle_seconds=float(data["idle_seconds"]),
            finished=finished, accepted_per_pos=[_check_count(many) for many in data["accepted_per_pos"]],
        )  # fmt: skip
        usage, sharing = Usage(*map(_check_count, data["usage"])), Sharing(*map(_check_count, data["sharing"]))
        types = tuple(TypeUsage(str(name), *map(_check_count, sizes)) for name, *sizes in data["types"])
        preempted = {str(way): _check_count(many) for way, many in data["preempted"].items()}
        *counts, stalled, meanwhile = data["mapped"]
        there, maps, unmaps, ahead = map(_check_count, counts)
        mapped = MappingStats(there, maps, unmaps, ahead, float(stalled), float(meanwhile))
        ranks = tuple(RankUsage(float(seconds), _check_count(used)) for seconds, used in data["ranks"])
        asleep = _check_count(data["asleep"])
        return EngineMetrics(
            Account(usage, sharing, types), stats, preempted, float(data["seconds"]), mapped, ranks, asleep
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise WireError("facts", f"{type(error).__name__} {error}"[:200]) from error


def _check_count(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"a {type(value).__name__} is not a count")
    return value
