"""Read traces: requests from a user's file. Errors name the line and the limit.

A file is either JSONL, one request a line, or ShareGPT's JSON, of which the first turn of each conversation is used (as
in PagedAttention §6.1). Only lengths are used: the tokens are random ids, as in every workload.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, NoReturn

from quire.bench.workloads import MAX_LENGTH, MAX_REQUESTS, RequestSpec, Workload
from quire.config import EngineConfig
from quire.errors import InputError, StartupError

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

KEYS = frozenset({"arrival", "prompt_len", "output_len", "prefix_id", "prefix_len"})
LATEST = 1e9  # seconds: 31 years, which rejects Unix times
MAX_ID = 200  # characters of a prefix's name
LEAST, MOST_PROMPT, MOST_TOTAL = 4, 1024, 2048  # tokens: the usual filters of ShareGPT's first turns
SPACE = re.compile(r"[ \t\r\n]*")
CHUNK = 2**20
FIRST = "Take the first ones only: --trace-requests N"

Count = Callable[[str], int]


class Limits(NamedTuple):
    """Maximum size of a file, of a line of JSONL, and of a conversation of ShareGPT's format, and maximum number of
    either."""

    file_bytes: int = 2**30
    line_bytes: int = 2**14
    item_chars: int = 2**23
    requests: int = MAX_REQUESTS


LIMITS = Limits()


class Position(NamedTuple):
    """A position in a file, for error messages."""

    file: str
    line: int = 0

    def refuse(self, why: str, remedy: str = "") -> NoReturn:
        where = f"{self.file[-200:]}, line {self.line}" if self.line else self.file[-200:]
        raise StartupError(f"{where}: {why}", remedy)


@dataclass(frozen=True)
class Traced(Workload):
    """A trace as a workload: its lengths don't depend on a seed."""

    name: str
    entries: list[RequestSpec] = field(repr=False)

    @property
    def requests(self) -> int:  # type: ignore[override]  # a field of Workload, derived here
        return len(self.entries)

    @property
    def arrivals(self) -> tuple[float, ...] | None:  # type: ignore[override]  # likewise
        """Return the arrival times; None for ShareGPT's format, which has none."""
        times = tuple(entry.arrival for entry in self.entries if entry.arrival is not None)
        return times if len(times) == len(self.entries) else None

    def specs(self, seed: int = 0) -> list[RequestSpec]:
        return self.entries


def load_trace(
    path: str | Path, max_len: int = MAX_LENGTH, first: int | None = None, count: Count | None = None,
    limits: Limits = LIMITS,
) -> list[RequestSpec]:  # fmt: skip
    """Return the requests of a file, for a model whose sequences may have `max_len` tokens.

    JSONL: {"arrival": seconds, "prompt_len": n, "output_len": n}, optionally with "prefix_id" and "prefix_len": then
    the prompt starts with that many tokens of the text of that name. Empty lines are skipped.
    ShareGPT: [{"conversations": [{"from": ..., "value": ...}, ...]}, ...]: the first two messages are prompt and
    output, their tokens counted by `count`; kept if both have at least LEAST tokens, the prompt at most MOST_PROMPT,
    and both together at most MOST_TOTAL and `max_len`.

    Only the `first` requests are read, all by default. Raise StartupError for other files."""
    place = Position(str(path))
    if first is not None and not 1 <= first <= limits.requests:
        place.refuse(f"its first {first} requests are asked for", f"From 1 to {limits.requests:,} can be")
    with _open(path, place, limits) as file:
        opening = file.read(CHUNK).lstrip()[:1]
        file.seek(0)
        if opening == b"[":
            if count is None:
                place.refuse("it is in ShareGPT's format, and there is no tokenizer", "Give --tokenizer FOLDER")
            found = _first_turns(file, place, min(max_len, MOST_TOTAL), count, limits)
        else:
            found = _requests(file, place, max_len, limits)
        entries = list(islice(found, limits.requests + 1 if first is None else first))
    if len(entries) > limits.requests:
        place.refuse(f"it has more than {limits.requests:,} requests", FIRST)
    if not entries:
        place.refuse("it has no requests that can be used", "See docs/performance.md for what a trace is")
    return entries


def _open(path: str | Path, place: Position, limits: Limits) -> BinaryIO:
    """Open a regular file of permitted size. Opening doesn't wait for the other end of a pipe."""
    try:
        opened = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        place.refuse(f"it can't be read: {getattr(error, 'strerror', None) or error}", "Give a trace: --trace FILE")
    about = os.fstat(opened)
    plain = stat.S_ISREG(about.st_mode)
    if not plain or about.st_size > limits.file_bytes:
        os.close(opened)
        what = f"it has {about.st_size:,} bytes" if plain else "it is not a plain file"
        place.refuse(what, f"A trace is a file of at most {limits.file_bytes:,} bytes")
    return os.fdopen(opened, "rb")


def _requests(file: BinaryIO, place: Position, max_len: int, limits: Limits) -> Iterator[RequestSpec]:
    """Yield one request a line. Arrivals must not decrease."""
    now = 0.0
    while line := file.readline(limits.line_bytes + 1):
        place = place._replace(line=place.line + 1)
        if place.line > limits.requests:
            place.refuse(f"there are more than {limits.requests:,} lines", FIRST)
        if len(line) > limits.line_bytes:
            place.refuse(f"it has more than {limits.line_bytes:,} bytes", "Give one request a line")
        if not line.strip():
            continue
        entry = _entry(_value(line, place), place, max_len)
        assert entry.arrival is not None, "checked above"
        if entry.arrival < now:
            place.refuse(f"arrival is {entry.arrival}, after one at {now}", "Times may not decrease")
        now = entry.arrival
        yield entry


def _value(line: bytes, place: Position) -> dict[str, Any]:
    try:
        value = json.loads(line.decode(), parse_constant=_no_constant, object_pairs_hook=_unique)
    except RecursionError:
        place.refuse("it is nested too deeply")
    except ValueError as error:  # invalid JSON, invalid UTF-8, or a number with too many digits
        place.refuse(f"it is not JSON: {str(error)[:200]}")
    if not isinstance(value, dict):
        place.refuse('expected an object: {"arrival": 0.5, "prompt_len": 100, "output_len": 20}')
    if unknown := value.keys() - KEYS:
        place.refuse(f"unknown key {min(unknown)[:60]!r}", f"Known: {', '.join(sorted(KEYS))}")
    if missing := {"arrival", "prompt_len", "output_len"} - value.keys():
        place.refuse(f"{min(missing)} is missing")
    if ("prefix_id" in value) != ("prefix_len" in value):
        place.refuse("prefix_id and prefix_len need each other")
    return value


def _entry(value: dict[str, Any], place: Position, max_len: int) -> RequestSpec:
    arrival = value["arrival"]
    if type(arrival) not in (int, float) or not 0 <= arrival <= LATEST:
        place.refuse(f"arrival is {_short(arrival)}", f"Expected seconds from the start, from 0 to {LATEST:g}")
    prompt, output = (_length(value, name, place, max_len) for name in ("prompt_len", "output_len"))
    if prompt + output > max_len:
        place.refuse(f"prompt_len and output_len are {prompt + output:,} together", f"At most {max_len:,} tokens")
    if "prefix_id" not in value:
        return RequestSpec(prompt, output, arrival=float(arrival))
    name = value["prefix_id"]
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_ID:
        place.refuse(f"prefix_id is {_short(name)}", f"Expected a text of 1 to {MAX_ID} characters")
    return RequestSpec(prompt, output, name, _length(value, "prefix_len", place, prompt), float(arrival))


def _length(value: dict[str, Any], name: str, place: Position, most: int) -> int:
    length = value[name]
    if type(length) is not int or not 1 <= length <= most:
        place.refuse(f"{name} is {_short(length)}", f"Expected a whole number from 1 to {most:,}")
    return int(length)


def _short(value: object) -> str:
    return repr(value)[:40]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _first_turns(
    file: BinaryIO, place: Position, most_total: int, count: Count, limits: Limits
) -> Iterator[RequestSpec]:
    """Yield the first turn of each conversation that passes the filters."""
    for line, item in _Items(file, place, limits.item_chars):
        here = place._replace(line=line)
        conversation = item.get("conversations")
        if not isinstance(conversation, list):
            here.refuse('expected {"conversations": [{"from": ..., "value": ...}, ...]}')
        texts = [_text(message, here) for message in conversation[:2]]
        if len(texts) < 2:
            continue
        try:
            prompt, output = map(count, texts)
        except InputError as error:
            here.refuse(str(error))
        if min(prompt, output) >= LEAST and prompt <= MOST_PROMPT and prompt + output <= most_total:
            yield RequestSpec(prompt, output)


def _text(message: object, place: Position) -> str:
    if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("from", "value")):
        place.refuse('expected a message {"from": ..., "value": ...}, both texts')
    return str(message["value"])


class _Items:
    """The objects of one JSON list, each with its first line; read in pieces, none of more than `most` characters."""

    def __init__(self, file: BinaryIO, place: Position, most: int) -> None:
        self._file, self._place, self._most = file, place, most
        self._utf8, self._json = codecs.getincrementaldecoder("utf-8")(), json.JSONDecoder()
        self._buffer, self._at, self._line = "", 0, 1

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        self._expect("[")
        ended = self._peek() == "]"
        while not ended:
            if self._peek() != "{":
                self._refuse("expected a conversation, an object")
            line = self._line
            yield line, self._object()
            ended = self._peek() == "]"
            if not ended:
                self._expect(",")
        self._expect("]")
        if self._peek():
            self._refuse("something follows the list")

    def _more(self) -> bool:
        """Read more text, and drop what was parsed."""
        chunk = self._file.read(CHUNK)
        try:
            text = self._utf8.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            self._refuse(f"what follows is not UTF-8: {error.reason}")
        self._buffer, self._at = self._buffer[self._at :] + text, 0
        return bool(chunk)

    def _step(self, end: int) -> None:
        self._line += self._buffer.count("\n", self._at, end)
        self._at = end

    def _peek(self) -> str:
        """Return the next character other than white space; "" at the end."""
        while True:
            space = SPACE.match(self._buffer, self._at)
            assert space is not None, "it matches anything"
            self._step(space.end())
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more():
                return ""

    def _expect(self, what: str) -> None:
        found = self._peek()
        if found != what:
            self._refuse(f"expected {what!r}, found {found!r}" if found else f"it ends where {what!r} was expected")
        self._step(self._at + 1)

    def _object(self) -> dict[str, Any]:
        while True:
            try:
                value, end = self._json.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:  # its end may not be read yet
                where = error.pos - self._at
                large = len(self._buffer) - self._at > self._most
                if large or not self._more():
                    self._step(self._at + where)
                    more = f", or a conversation has more than {self._most:,} characters" if large else ""
                    self._refuse(f"it is not JSON: {error.msg}{more}")
                continue
            except RecursionError:
                self._refuse("a conversation is nested too deeply")
            except ValueError as error:  # a number with too many digits
                self._refuse(f"it is not JSON: {str(error)[:200]}")
            if end - self._at > self._most:
                self._refuse(f"a conversation has more than {self._most:,} characters")
            self._step(end)
            return dict(value)

    def _refuse(self, why: str) -> NoReturn:
        self._place._replace(line=self._line).refuse(why)


def given(args: argparse.Namespace) -> list[Workload]:
    """Return the traces of --trace. They are checked against the model's lengths before it is loaded, but not with
    --url."""
    if not args.trace:
        return []
    from quire.cli.flags import config_from
    from quire.startup.checkpoint import read_checkpoint

    config = config_from(args)
    max_len = MAX_LENGTH
    if not getattr(args, "url", None):
        longest = read_checkpoint(config, weights=False).spec.max_len
        max_len = min(longest, config.max_model_len or longest)
    count = counter(config)
    return [
        Traced(f"trace:{Path(path).name}", load_trace(path, max_len, args.trace_requests, count)) for path in args.trace
    ]


def counter(config: EngineConfig) -> Count:
    """Return a function that counts a text's tokens with --tokenizer or the model's own tokenizer, loaded at the first
    call."""

    @cache
    def tokenizer() -> Tokenizer:
        return tokenizer_of(config)

    return lambda text: len(tokenizer().encode(text))


def tokenizer_of(config: EngineConfig) -> Tokenizer:
    """Return the tokenizer of --tokenizer, or the model's own."""
    from quire.startup.checkpoint import read_checkpoint, read_tokenizer

    found = read_tokenizer(config, None if config.tokenizer is not None else read_checkpoint(config, weights=False))
    if found is None:
        raise StartupError("texts are counted in tokens, and there is no tokenizer", "Give --tokenizer FOLDER")
    return found
