"""JSON written as pieces of text of a few kB each: no answer is built twice, and none is written in one go, since the
event loop turns between two slices of a long list.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice

from quire.errors import InputError
from quire.server.answer_size import MAX_BYTES
from quire.text.input_processor import InputProcessor

MIN_LOGPROB = -9999.0  # what -inf becomes: JSON has no infinities
SLICE_ENTRIES = 32  # entries of a list between two looks at the clock
TURN_SECONDS = 0.004  # seconds that a list is written for before the event loop turns
SHORT_CHARS = 1 << 14  # characters that are not worth a turn
JsonPieces = list[str]


class WriterTurns:
    """Who writes long answers takes turns: in one turn of the event loop one of them writes, however many there are."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait_turn(self) -> None:
        """Returns when it is the caller's turn."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._wake)
        self._waiting.append(loop.create_future())
        await self._waiting[-1]

    def _wake(self) -> None:
        while self._waiting:
            if not (first := self._waiting.popleft()).done():  # else its writer has left
                first.set_result(None)
                break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._wake)


class WritePace:
    """Awaited between slices of work, it lets the event loop and other writers turn every few milliseconds, and refuses
    to write more than `max_bytes` bytes for one answer."""

    def __init__(self, writer_turns: WriterTurns | None = None) -> None:
        self.writer_turns, self.max_bytes = writer_turns or WriterTurns(), float(MAX_BYTES)
        self._turn_end = time.perf_counter() + TURN_SECONDS
        self._written = 0
        self._next_yield = SHORT_CHARS

    async def __call__(self, *written: str) -> None:
        """`written` was written since the last call."""
        self.count(*written)
        if time.perf_counter() >= self._turn_end:
            if self._written >= self._next_yield:  # else most of the time was spent waiting for something to write
                await self.writer_turns.wait_turn()
                self._next_yield = self._written + SHORT_CHARS
            self._turn_end = time.perf_counter() + TURN_SECONDS

    def count(self, *written: str) -> None:
        """As a call, without a turn. InputError when the answer becomes too long."""
        self._written += sum(map(len, written))
        if self._written > self.max_bytes:
            raise InputError(f"the answer has more than {MAX_BYTES} bytes: ask for fewer log-probabilities or outputs")


class TokenStrings:
    """Tokens as JSON text, each written once: as they are, or as "token_id:N" where a client asks for that."""

    def __init__(self, input_processor: InputProcessor) -> None:
        self._input_processor = input_processor
        self._token_jsons: dict[int, str] = {}
        self._bytes_jsons: dict[int, str] = {}
        self._logprob_names: dict[int, str] = {}

    def length(self, token: int) -> int:
        """Characters of a token's text."""
        return len(self._input_processor.decode_token(token))

    def token_json(self, token: int) -> str:
        """A token's text, as a JSON string."""
        found = self._token_jsons.get(token)
        if found is None:
            found = self._token_jsons[token] = json.dumps(self._input_processor.decode_token(token))
        return found

    def logprob_name(self, token: int) -> str:
        """A token in a completion's log-probabilities, as a JSON string: its text, or `bytes_json:\\xf0\\x9f` where it
        is only a part of a character."""
        found = self._logprob_names.get(token)
        if found is None:
            found, raw = self.token_json(token), self._token_bytes(token)
            if "\\ufffd" in found and raw.decode(errors="replace") != raw.decode(errors="ignore"):
                found = json.dumps("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw))
            self._logprob_names[token] = found
        return found

    def bytes_json(self, token: int) -> str:
        """A token's bytes, as a JSON list."""
        found = self._bytes_jsons.get(token)
        if found is None:
            found = self._bytes_jsons[token] = json.dumps(list(self._token_bytes(token)), separators=(",", ":"))
        return found

    def _token_bytes(self, token: int) -> bytes:
        tokenizer = self._input_processor.tokenizer
        return tokenizer.token_bytes(token) if tokenizer is not None else b""


class TokenIdStrings(TokenStrings):
    """As Words, for return_tokens_as_token_ids."""

    def length(self, token: int) -> int:
        """Characters of "token_id:N"."""
        return len(self.token_json(token)) - 2

    def token_json(self, token: int) -> str:
        """ "token_id:N"."""
        return f'"token_id:{token}"'

    logprob_name = token_json


def logprob_json(logprob: float) -> str:
    """A log-probability as JSON: null for NaN, which JSON does not have."""
    return "null" if math.isnan(logprob) else repr(max(logprob, MIN_LOGPROB))


def json_array(slices: Iterable[str]) -> JsonPieces:
    """Slices of a list, without brackets, as a JSON list."""
    pieces = ["["]
    for at, part in enumerate(slices):
        pieces += (",", part) if at else (part,)
    return [*pieces, "]"]


async def ids_json(ids: Iterable[int], pace: WritePace) -> JsonPieces:
    """Token ids as a JSON list."""
    slices, rest = [], iter(ids)
    while part := ",".join(map(str, islice(rest, 64 * SLICE_ENTRIES))):
        slices.append(part)
        await pace(part)
    return json_array(slices)


async def texts_json(texts: Iterable[str], pace: WritePace) -> JsonPieces:
    """Texts as a JSON list."""
    slices, rest = [], iter(texts)
    while part := ",".join(map(json.dumps, islice(rest, 8 * SLICE_ENTRIES))):
        slices.append(part)
        await pace(part)
    return json_array(slices)
