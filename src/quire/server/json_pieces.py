"""JSON as pieces of text of a few kB. No answer is copied into one string, and the event loop gets a turn between the
slices of a long list."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from quire.errors import InputError
from quire.server.answer_size import MAX_BYTES
from quire.text.input_processor import InputProcessor

MIN_LOGPROB = -9999.0  # replaces -inf, which JSON does not have
SLICE_ENTRIES = 32  # entries of a list between two checks of the clock
TURN_SECONDS = 0.004  # of writing before the event loop gets a turn
SHORT_CHARS = 1 << 14  # an amount of text that is written without a turn of the event loop
JsonPieces = list[str]
RAW_JSON = uuid.uuid4().hex  # placeholder of a RawJsonList; it is secret, so no text of a client contains it


class WriterTurns:
    """Lets writers of long answers take turns: in one turn of the event loop only one of them writes."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait_turn(self) -> None:
        """Wait for the caller's turn."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._wake)
        self._waiting.append(loop.create_future())
        await self._waiting[-1]

    def _wake(self) -> None:
        while self._waiting:
            if not (first := self._waiting.popleft()).done():  # else the writer was cancelled
                first.set_result(None)
                break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._wake)


class WritePace:
    """Awaited between the slices of an answer. It gives the event loop and other writers a turn every few milliseconds,
    and limits the answer to `max_bytes`."""

    def __init__(self, writer_turns: WriterTurns | None = None, max_bytes: float = MAX_BYTES) -> None:
        self.writer_turns, self.max_bytes = writer_turns or WriterTurns(), max_bytes
        self._turn_end = time.perf_counter() + TURN_SECONDS
        self._written = 0
        self._next_yield = SHORT_CHARS

    async def __call__(self, *written: str) -> None:
        """Count the text written since the last call, and wait for a turn if the time is over."""
        self.count(*written)
        if time.perf_counter() >= self._turn_end:
            if self._written >= self._next_yield:  # else most of the time was spent waiting for outputs
                await self.writer_turns.wait_turn()
                self._next_yield = self._written + SHORT_CHARS
            self._turn_end = time.perf_counter() + TURN_SECONDS

    def count(self, *written: str) -> None:
        """Count text without waiting. Raise InputError if the answer is too long."""
        self._written += sum(map(len, written))
        if self._written > self.max_bytes:
            raise InputError(f"the answer has more than {MAX_BYTES} bytes: ask for fewer log-probabilities or outputs")


class TokenStrings:
    """Tokens as JSON strings, cached. By default a token's text; subclasses may use other names."""

    def __init__(self, input_processor: InputProcessor) -> None:
        self._input_processor = input_processor
        self._token_jsons: dict[int, str] = {}
        self._bytes_jsons: dict[int, str] = {}
        self._logprob_names: dict[int, str] = {}

    def length(self, token: int) -> int:
        """Return the number of characters of a token's text."""
        return len(self._input_processor.decode_token(token))

    def token_json(self, token: int) -> str:
        """Return a token's text as a JSON string."""
        text = self._token_jsons.get(token)
        if text is None:
            text = self._token_jsons[token] = json.dumps(self._input_processor.decode_token(token))
        return text

    def logprob_name(self, token: int) -> str:
        """Return a token's name in a completion's log-probabilities as a JSON string: its text, or "bytes:\\xf0\\x9f"
        if it is only a part of a character."""
        name = self._logprob_names.get(token)
        if name is None:
            name, raw = self.token_json(token), self._token_bytes(token)
            if "\\ufffd" in name and raw.decode(errors="replace") != raw.decode(errors="ignore"):
                name = json.dumps("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw))
            self._logprob_names[token] = name
        return name

    def bytes_json(self, token: int) -> str:
        """Return a token's bytes as a JSON list."""
        text = self._bytes_jsons.get(token)
        if text is None:
            text = self._bytes_jsons[token] = json.dumps(list(self._token_bytes(token)), separators=(",", ":"))
        return text

    def _token_bytes(self, token: int) -> bytes:
        tokenizer = self._input_processor.tokenizer
        return tokenizer.token_bytes(token) if tokenizer is not None else b""


class TokenIdStrings(TokenStrings):
    """Names tokens "token_id:N", for return_tokens_as_token_ids."""

    def length(self, token: int) -> int:
        """Return the number of characters of "token_id:N"."""
        return len(self.token_json(token)) - 2

    def token_json(self, token: int) -> str:
        """Return "token_id:N" as a JSON string."""
        return f'"token_id:{token}"'

    logprob_name = token_json


def logprob_json(logprob: float) -> str:
    """Return a log-probability as JSON. NaN, which JSON does not have, becomes null."""
    return "null" if math.isnan(logprob) else repr(max(logprob, MIN_LOGPROB))


def json_array(slices: Iterable[str]) -> JsonPieces:
    """Return the slices of a list, which have no brackets, as a JSON list."""
    pieces = ["["]
    for at, part in enumerate(slices):
        pieces += (",", part) if at else (part,)
    return [*pieces, "]"]


class RawJsonList:
    """A list whose `entries` are JSON already: a value for `dump_pieces`."""

    def __init__(self, entries: Sequence[str]) -> None:
        self.entries = entries


def dump_pieces(value: Any) -> JsonPieces:
    """Return a value as JSON. The entries of a RawJsonList in it are not encoded again."""
    raw_lists: list[RawJsonList] = []

    def to_placeholder(raw: RawJsonList) -> str:
        raw_lists.append(raw)
        return RAW_JSON

    first, *others = json.dumps(value, separators=(",", ":"), default=to_placeholder).split(f'"{RAW_JSON}"')
    return [first, *(piece for raw, text in zip(raw_lists, others) for piece in (*json_array(raw.entries), text))]


async def ids_json(ids: Iterable[int], pace: WritePace) -> JsonPieces:
    """Return token ids as a JSON list."""
    return await _list_json(map(str, ids), 64 * SLICE_ENTRIES, pace)


async def texts_json(texts: Iterable[str], pace: WritePace) -> JsonPieces:
    """Return texts as a JSON list."""
    return await _list_json(map(json.dumps, texts), 8 * SLICE_ENTRIES, pace)


async def _list_json(entries: Iterator[str], slice_entries: int, pace: WritePace) -> JsonPieces:
    slices = []
    while part := ",".join(islice(entries, slice_entries)):
        slices.append(part)
        await pace(part)
    return json_array(slices)
