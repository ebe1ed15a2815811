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
from quire.server.size import MAX_BYTES
from quire.text.prompts import Prompts

LOWEST = -9999.0  # what -inf becomes: JSON has no infinities
SLICE = 32  # entries of a list between two looks at the clock
TURN = 0.004  # seconds that a list is written for before the event loop turns
SHORT = 1 << 14  # characters that are not worth a turn
Pieces = list[str]


class Turns:
    """Who writes long answers takes turns: in one turn of the event loop one of them writes, however many there are."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
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


class Pace:
    """Awaited between slices of work, it lets the event loop and other writers turn every few milliseconds, and refuses
    to write more than `most` bytes for one answer."""

    def __init__(self, turns: Turns | None = None) -> None:
        self.turns, self.most = turns or Turns(), float(MAX_BYTES)
        self._end = time.perf_counter() + TURN
        self._written = 0
        self._next = SHORT

    async def __call__(self, *written: str) -> None:
        """`written` was written since the last call."""
        self.count(*written)
        if time.perf_counter() >= self._end:
            if self._written >= self._next:  # else most of the time was spent waiting for something to write
                await self.turns.next()
                self._next = self._written + SHORT
            self._end = time.perf_counter() + TURN

    def count(self, *written: str) -> None:
        """As a call, without a turn. InputError when the answer becomes too long."""
        self._written += sum(map(len, written))
        if self._written > self.most:
            raise InputError(f"the answer has more than {MAX_BYTES} bytes: ask for fewer log-probabilities or outputs")


class Words:
    """Tokens as JSON text, each written once: as they are, or as "token_id:N" where a client asks for that."""

    def __init__(self, text: Prompts) -> None:
        self._text = text
        self._quoted: dict[int, str] = {}
        self._bytes: dict[int, str] = {}
        self._named: dict[int, str] = {}

    def length(self, token: int) -> int:
        """Characters of a token's text."""
        return len(self._text.decode_token(token))

    def quoted(self, token: int) -> str:
        """A token's text, as a JSON string."""
        found = self._quoted.get(token)
        if found is None:
            found = self._quoted[token] = json.dumps(self._text.decode_token(token))
        return found

    def named(self, token: int) -> str:
        """A token in a completion's log-probabilities, as a JSON string: its text, or `bytes:\\xf0\\x9f` where it is
        only a part of a character."""
        found = self._named.get(token)
        if found is None:
            found, raw = self.quoted(token), self._raw(token)
            if "\\ufffd" in found and raw.decode(errors="replace") != raw.decode(errors="ignore"):
                found = json.dumps("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw))
            self._named[token] = found
        return found

    def bytes(self, token: int) -> str:
        """A token's bytes, as a JSON list."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = json.dumps(list(self._raw(token)), separators=(",", ":"))
        return found

    def _raw(self, token: int) -> bytes:
        tokenizer = self._text.tokenizer
        return tokenizer.token_bytes(token) if tokenizer is not None else b""


class Numbers(Words):
    """As Words, for return_tokens_as_token_ids."""

    def length(self, token: int) -> int:
        """Characters of "token_id:N"."""
        return len(self.quoted(token)) - 2

    def quoted(self, token: int) -> str:
        """ "token_id:N"."""
        return f'"token_id:{token}"'

    named = quoted


def finite(logprob: float) -> str:
    """A log-probability as JSON: null for NaN, which JSON does not have."""
    return "null" if math.isnan(logprob) else repr(max(logprob, LOWEST))


def array(slices: Iterable[str]) -> Pieces:
    """Slices of a list, without brackets, as a JSON list."""
    pieces = ["["]
    for at, part in enumerate(slices):
        pieces += (",", part) if at else (part,)
    return [*pieces, "]"]


async def numbers(ids: Iterable[int], pace: Pace) -> Pieces:
    """Token ids as a JSON list."""
    slices, rest = [], iter(ids)
    while part := ",".join(map(str, islice(rest, 64 * SLICE))):
        slices.append(part)
        await pace(part)
    return array(slices)


async def strings(texts: Iterable[str], pace: Pace) -> Pieces:
    """Texts as a JSON list."""
    slices, rest = [], iter(texts)
    while part := ",".join(map(json.dumps, islice(rest, 8 * SLICE))):
        slices.append(part)
        await pace(part)
    return array(slices)
