"""The frames that fronts and an engine in a process of its own exchange: typed, versioned, numbered, bounded; no JSON a
step, and no pickle.

A frame is a head (version, kind, number in its direction, length of the body) and a body. What comes every step, and
prompts, are columns of numbers (quire.vocabulary.columns); what is rare is JSON. A reader refuses what no writer of
this version sends, naming the field, before it makes anything of that size.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

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
from quire.link.media_frames import read_media, write_media
from quire.link.messages import (
    CARES,
    MODES,
    MOST_ID,
    MOST_NUMBER,
    MOST_REQUESTS,
    MOST_TAGS,
    Abort,
    Add,
    Answer,
    Asked,
    Care,
    Died,
    FromEngine,
    FromFront,
    Look,
    Prefixes,
    Register,
    Release,
    Stepped,
    Stop,
)
from quire.link.stepped import read_stepped, write_stepped
from quire.vocabulary.columns import MOST_BYTES, Reader, WireError, write_ints, write_runs
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.structured import Structured

VERSION = 1
HEAD = struct.Struct("<BBHII")  # version, kind, 0, number, bytes of the body
MOST_JSON = 1 << 24  # bytes
MOST_TEXT = 1 << 16  # characters of an error
MOST_CLIENT = 64  # characters of a client's name
COUNT = struct.Struct("<I")
STOP = struct.Struct("<III")  # number, branch, bytes of the reason
KINDS = (
    HELLO, ADD, ABORT, STOPPED, REGISTER, RELEASE, PREFIXES, PING, READY, FAILED, ANSWER, STEPPED, DIED, PONG, LOOK,
    CARE,
) = range(1, 17)  # fmt: skip
ERRORS: dict[str, type[InputError]] = {
    kind.__name__: kind for kind in (InputError, PromptTooLong, PrefixTaken, PrefixesFull, UnknownPrefix, NotIdle)
}
# Of parameters: the front's own. The form of an output goes as it is, to be compiled there.
UNSENT = ("stop", "bad_words", "method", "stop_automaton", "structured_outputs", "grammar")
DEFAULTS = {field.name: field.default for field in fields(SamplingParams) if field.name not in UNSENT}
T = TypeVar("T")


class Frame(NamedTuple):
    """A frame as it was read."""

    kind: int
    body: memoryview


class Frames:
    """The frames of one direction of a connection: numbers those that are written, and checks those that are read,
    which are of these `kinds`."""

    def __init__(self, kinds: range = KINDS) -> None:
        self.kinds = kinds
        self._written = self._read = 0
        self._buffer = bytearray()

    def write(self, kind: int, body: bytes) -> bytes:
        """The next frame. WireError beyond MOST_BYTES."""
        if len(body) > MOST_BYTES:
            raise WireError("frame", f"{len(body)} bytes, at most {MOST_BYTES} are sent")
        self._written += 1
        return HEAD.pack(VERSION, kind, 0, self._written & 0xFFFFFFFF, len(body)) + body

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Frames that `data`, which came, completes. WireError for what is none."""
        if not self._buffer and len(data) >= HEAD.size:
            kind, length = self._head(HEAD.unpack_from(data))
            if len(data) == HEAD.size + length:  # as most come: one, and whole
                self._read += 1
                yield Frame(kind, memoryview(data)[HEAD.size :])
                return
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= HEAD.size:
                kind, length = self._head(HEAD.unpack_from(self._buffer, at))
                end = at + HEAD.size + length
                if len(self._buffer) < end:
                    break
                body, at = bytes(memoryview(self._buffer)[end - length : end]), end
                self._read += 1
                yield Frame(kind, memoryview(body))
        finally:
            del self._buffer[:at]

    def _head(self, head: tuple[int, ...]) -> tuple[int, int]:
        version, kind, zero, number, length = head
        if version != VERSION:
            raise WireError("version", f"it is {version}, only {VERSION} is read")
        if kind not in self.kinds or zero:
            raise WireError("kind", f"{kind} is no kind of frame")
        if number != (self._read + 1) & 0xFFFFFFFF:
            raise WireError("number", f"it is {number}, and {self._read + 1} comes next")
        if length > MOST_BYTES:
            raise WireError("length", f"{length} bytes are announced, at most {MOST_BYTES} are read")
        return kind, length


# JSON bodies


def write_json(value: Any) -> bytes:
    """A body of JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def read_json(body: memoryview) -> dict[str, Any]:
    """The object in a body of JSON. WireError for anything else."""
    if len(body) > MOST_JSON:
        raise WireError("JSON", f"{len(body)} bytes, at most {MOST_JSON} are read")
    try:
        found = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise WireError("JSON", str(error)[:200]) from error
    if not isinstance(found, dict):
        raise WireError("JSON", f"a {type(found).__name__}, no object")
    return found


def field(data: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """A field of an object that must be of that type. WireError if it isn't."""
    value = data.get(name)
    if type(value) is not kind:
        raise WireError(name, f"a {type(value).__name__}, no {kind.__name__}")
    return value


def number(data: Mapping[str, Any], name: str) -> int:
    """A field that is an integer from 0 to 2**32 - 1."""
    value = field(data, name, int)
    if not 0 <= value <= MOST_NUMBER:
        raise WireError(name, f"{value} is none from 0 to {MOST_NUMBER}")
    return value


# What fronts send


def write_front(message: FromFront) -> tuple[int, bytes]:
    """The kind and body of a front's message. InputError for parameters that can't be sent."""
    match message:
        case Add(key, requests, params, salt, pixels, client):
            head = write_json({
                "key": key, "salt": salt, "client": client, "numbers": [asked.number for asked in requests],
                "ids": [asked.id for asked in requests], "params": sent_params(params),
            })  # fmt: skip
            prompts = write_runs([asked.prompt for asked in requests], "prompts")
            media = [asked.media for asked in requests]
            pictures = write_media(media, pixels) if any(media) else ()
            return ADD, b"".join((COUNT.pack(len(head)), head, *prompts, *pictures))
        case Abort(None):
            return ABORT, COUNT.pack(0xFFFFFFFF)
        case Abort(numbers):
            assert numbers is not None, "those of all are said above"
            return ABORT, COUNT.pack(len(numbers)) + write_ints(numbers, "numbers", "q")
        case Stop(number, branch, reason):
            text = reason.encode("utf-8", "surrogatepass")
            return STOPPED, STOP.pack(number, branch, len(text)) + text
        case Register(key, number, name, tokens):
            head = write_json({"key": key, "number": number, "name": name})
            return REGISTER, b"".join((COUNT.pack(len(head)), head, *write_runs([tokens], "tokens")))
        case Release(key, name):
            return RELEASE, write_json({"key": key, "name": name})
        case Prefixes(key):
            return PREFIXES, write_json({"key": key})
        case Look(key):
            return LOOK, write_json({"key": key})
        case Care():
            return CARE, write_json(message._asdict())


def read_front(frame: Frame) -> FromFront:
    """A front's message. WireError for what is none; InputError for parameters that are refused."""
    read = READERS.get(frame.kind)
    if read is None:
        raise WireError("kind", f"{frame.kind} is nothing that a front sends")
    return read(frame.body)


def _split(body: memoryview) -> tuple[dict[str, Any], Reader]:
    """The JSON that a body begins with, and the rest."""
    reader = Reader(body)
    (size,) = reader.take(COUNT, "size")
    at = reader.skip(size, "head")
    return read_json(body[at : at + size]), reader


def _read_add(body: memoryview) -> Add:
    head, reader = _split(body)
    ids, numbers = field(head, "ids", list), field(head, "numbers", list)
    if not 0 < len(ids) == len(numbers) <= MOST_REQUESTS:
        raise WireError("ids", f"{len(ids)} of them, for {len(numbers)} numbers; at most {MOST_REQUESTS} are read")
    if not all(type(id) is str and 0 < len(id) <= MOST_ID for id in ids):
        raise WireError("ids", "one is no text, or too long")
    if not all(type(one) is int and 0 <= one <= MOST_NUMBER for one in numbers):
        raise WireError("numbers", f"one is none from 0 to {MOST_NUMBER}")
    prompts = list(reader.runs(len(ids), "prompts"))
    media, pixels = read_media(reader, prompts) if reader.at < reader.end else ([()] * len(ids), ())
    _at_end(reader)
    asked = tuple(map(Asked, numbers, ids, prompts, media))
    if len(client := field(head, "client", str)) > MOST_CLIENT:
        raise WireError("client", f"it has {len(client)} characters; at most {MOST_CLIENT} are read")
    params = read_params(field(head, "params", dict))
    return Add(number(head, "key"), asked, params, field(head, "salt", str), pixels, client)


def add_key(frame: Frame) -> int:
    """The key of an Add whose parameters are refused."""
    return number(_split(frame.body)[0], "key")


def _read_abort(body: memoryview) -> Abort:
    reader = Reader(body)
    (count,) = reader.take(COUNT, "count")
    numbers = None if count == 0xFFFFFFFF else reader.ints(count, "numbers")
    _at_end(reader)
    return Abort(numbers)


def _read_stop(body: memoryview) -> Stop:
    reader = Reader(body)
    request, branch, size = reader.take(STOP, "stop")
    at = reader.skip(size, "reason")
    _at_end(reader)
    try:
        return Stop(request, branch, bytes(body[at : at + size]).decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError as error:
        raise WireError("reason", f"no UTF-8: {error.reason}") from error


def _read_register(body: memoryview) -> Register:
    head, reader = _split(body)
    [tokens] = reader.runs(1, "tokens")
    _at_end(reader)
    return Register(number(head, "key"), number(head, "number"), field(head, "name", str), tokens)


def _read_release(body: memoryview) -> Release:
    data = read_json(body)
    return Release(number(data, "key"), field(data, "name", str))


def _read_prefixes(body: memoryview) -> Prefixes:
    return Prefixes(number(read_json(body), "key"))


def _read_look(body: memoryview) -> Look:
    return Look(number(read_json(body), "key"))


def _read_care(body: memoryview) -> Care:
    data = read_json(body)
    what = field(data, "what", str)
    if what not in CARES:
        raise WireError("what", f"{what[:60]!r} is nothing that is done")
    mode, tags = field(data, "mode", str), field(data, "tags", list)
    if mode not in MODES or len(tags) > MOST_TAGS or not all(type(tag) is str for tag in tags):
        raise WireError("mode", "it is none, or the tags are no texts")
    return Care(number(data, "key"), what, number(data, "level"), mode, tuple(tags))


def _at_end(reader: Reader) -> None:
    if reader.at != reader.end:
        raise reader.error("frame", f"{reader.end - reader.at} bytes follow its end")


READERS: dict[int, Callable[[memoryview], FromFront]] = {
    ADD: _read_add, ABORT: _read_abort, STOPPED: _read_stop, REGISTER: _read_register, RELEASE: _read_release,
    PREFIXES: _read_prefixes, LOOK: _read_look, CARE: _read_care,
}  # fmt: skip


def sent_params(params: SamplingParams) -> dict[str, Any]:
    """What the engine must know of parameters, as JSON: those that aren't the defaults. InputError for a method, which
    is a program."""
    if params.method is not None:
        raise InputError("a method can't be given to an engine in a process of its own", "method")
    given = {name: getattr(params, name) for name in DEFAULTS}
    if (form := params.structured) is not None:
        given["structured"] = form.kind, form.source, form.after, form.opening, form.budget
    return {name: value for name, value in given.items() if value != DEFAULTS[name]}


def read_params(data: dict[str, Any]) -> SamplingParams:
    """Parameters, checked as everybody's are."""
    if unknown := next((name for name in data if name not in DEFAULTS), None):
        raise WireError("params", f"there is no {unknown[:60]!r}")
    words = data.get("bad_word_ids", ())
    if not isinstance(words, list | tuple) or not all(isinstance(word, list) for word in words):
        raise WireError("bad_word_ids", "no lists of token ids")
    form = data.get("structured")
    if form is not None:
        lists = isinstance(form, list | tuple) and all(isinstance(tokens, list | tuple) for tokens in form[2:4])
        if not lists or len(form) != 5:
            raise WireError("structured", "no kind, source, markers and budget")
        form = Structured(*form)
    return SamplingParams(**{**data, "bad_word_ids": tuple(map(tuple, words)), "structured": form})


# What the engine sends


def write_engine(message: FromEngine) -> tuple[int, bytes]:
    """The kind and body of the engine's message."""
    match message:
        case Stepped():
            return STEPPED, write_stepped(message)
        case Answer(key, error, value):
            said = None if error is None else write_error(error)
            return ANSWER, write_json({"key": key, "error": said, "value": value})
        case Died(error):
            return DIED, write_json(write_error(error))


def read_engine(frame: Frame) -> FromEngine:
    """The engine's message. WireError for what is none."""
    if frame.kind == STEPPED:
        return read_stepped(frame.body)
    data = read_json(frame.body)
    if frame.kind == DIED:
        return Died(read_error(data))
    if frame.kind != ANSWER:
        raise WireError("kind", f"{frame.kind} is nothing that an engine sends now")
    error, value = data.get("error"), data.get("value")
    return Answer(number(data, "key"), None if error is None else read_error(field(data, "error", dict)), _value(value))


def _value(value: Any) -> int | str | tuple[dict[str, int], tuple[str, ...]] | None:
    match value:
        case None | int() | str():
            return value
        case [dict(held), list(ready)] if all(type(length) is int for length in held.values()):
            return held, tuple(map(str, ready))
    raise WireError("value", f"a {type(value).__name__} is no answer")


def write_error(error: BaseException) -> dict[str, Any]:
    """An error as JSON: its kind, as far as readers know it, and what it says."""
    text = str(error)[:MOST_TEXT]
    match error:
        case StartupError():
            return {"kind": "StartupError", "text": error.cause[:MOST_TEXT], "remedy": error.remedy[:MOST_TEXT]}
        case Overloaded():
            return {"kind": "Overloaded", "text": text, "retry_after": error.retry_after}
        case InputError() if type(error).__name__ in ERRORS:
            return {"kind": type(error).__name__, "text": text, "param": error.param}
        case EngineDead():
            return {"kind": "EngineDead", "text": text}
    return {"kind": "EngineDead", "text": f"{type(error).__name__}: {text}"}


def read_error(data: dict[str, Any]) -> Exception:
    """The error that JSON says."""
    kind, text, param = field(data, "kind", str), field(data, "text", str), data.get("param")
    if kind in ERRORS:
        return ERRORS[kind](text, param if isinstance(param, str) else None)
    if kind == "Overloaded":
        return Overloaded(text, number(data, "retry_after"))
    if kind == "StartupError":
        return StartupError(text, field(data, "remedy", str))
    return EngineDead(text)
