"""Reading one streamed completion: HTTP/1.1 and server-sent events, fed with bytes as they come.

No socket and no clock: whoever feeds says when. Every length that a server states is bounded before it is believed.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable
from typing import Any

HEAD = 65_536  # bytes of a status line and headers
LINE = 2**20  # bytes of a line of a stream
CHUNK = 2**24  # bytes of a chunk of a body
SIZE_LINE = 128  # bytes of the line before a chunk
MOST = 2**31  # tokens of a request
TOLD = 300  # bytes kept of a body that says what went wrong
SIZE = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;.*)?")
LENGTH = re.compile(rb"[0-9]{1,12}")


class BadAnswer(Exception):
    """What came is no streamed completion; the text says why."""


def _count(said: object) -> int:
    """A number of tokens. ValueError if it can be none."""
    if not isinstance(said, int) or not 0 <= said <= MOST:
        raise ValueError(said)
    return said


class Answer:
    """What came of one request, in seconds on the client's clock: when it was due (in a closed loop: sent), when it was
    sent, and when each chunk with a choice came. `counts` is the tokens after each chunk, if the server says them.
    `error` is None, or why there is no whole answer; `status` is the HTTP status, 0 if none came."""

    def __init__(self, number: int, due: float | None) -> None:
        self.number, self.due = number, due
        self.sent = 0.0
        self.times = array("d")
        self.counts = array("Q")
        self.prompt = self.tokens = self.status = 0
        self.error: str | None = None


class Reader:
    """Feeds one Answer. `feed` returns True when the answer is complete; `keep` then says whether the connection may be
    used again."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.keep = answer, False
        self._rest = self._line = b""
        self._left = 0  # bytes of a body of known length
        self._told = b""
        self._done = False
        self._parse: Callable[[bytes, float], int] = self._head

    def feed(self, data: bytes, now: float) -> bool:
        """Take in what came at `now`. BadAnswer if it can't be read."""
        if self._rest:
            data = self._rest + data
        at = 0
        while not self._done:
            parse = self._parse
            used = parse(data[at:] if at else data, now)
            at += used
            if self._parse is parse and (not used or at == len(data)):
                break
        self._rest = data[at:]
        return self._done

    def closed(self) -> None:
        """The connection ended. BadAnswer unless that is how the answer ends."""
        if self._done or self._parse == self._until_close:
            self._finish()
        else:
            raise BadAnswer("the connection was closed in an answer" if self.answer.status else "no answer came")

    def _head(self, data: bytes, now: float) -> int:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > HEAD:
                raise BadAnswer(f"headers of more than {HEAD} bytes")
            return 0
        status, *lines = data[:end].split(b"\r\n")
        version, _, code = status.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not code[:3].isdigit():
            raise BadAnswer(f"no HTTP answer: {status[:60].decode(errors='replace')!r}")
        if code.startswith(b"1"):  # such as 100 Continue: another head follows
            return end + 4
        self.answer.status = int(code[:3])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        self.keep = version == b"HTTP/1.1" and headers.get(b"connection", b"").lower() != b"close"
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._parse = self._chunked
        elif b"content-length" in headers:
            if not LENGTH.fullmatch(headers[b"content-length"]):
                raise BadAnswer("a content-length that is no number")
            self._left = int(headers[b"content-length"])
            self._parse = self._counted
            if not self._left:
                self._finish()
        else:
            self.keep, self._parse = False, self._until_close
        return end + 4

    def _chunked(self, data: bytes, now: float) -> int:
        at = 0
        while True:
            end = data.find(b"\r\n", at)
            if end < 0:
                if len(data) - at > SIZE_LINE:
                    raise BadAnswer("a chunk without a size")
                return at
            found = SIZE.fullmatch(data, at, end)
            size = int(found[1], 16) if found else -1
            if not 0 <= size <= CHUNK:
                raise BadAnswer(f"a chunk of size {data[at : min(end, at + 20)].decode(errors='replace')!r}")
            if not size:
                return self._trailer(data, at, end)
            after = end + 2 + size
            if len(data) < after + 2:
                return at
            self._body(data[end + 2 : after], now)
            at = after + 2

    def _trailer(self, data: bytes, at: int, end: int) -> int:
        """The last chunk, at `at`; what follows it ends with an empty line."""
        last = data.find(b"\r\n\r\n", end)
        if last < 0:
            if len(data) - at > HEAD:
                raise BadAnswer(f"a trailer of more than {HEAD} bytes")
            return at
        self._finish()
        return last + 4

    def _counted(self, data: bytes, now: float) -> int:
        piece = data[: self._left]
        self._left -= len(piece)
        self._body(piece, now)
        if not self._left:
            self._finish()
        return len(piece)

    def _until_close(self, data: bytes, now: float) -> int:
        self._body(data, now)
        return len(data)

    def _body(self, piece: bytes, now: float) -> None:
        if self.answer.status != 200:
            self._told = (self._told + piece)[:TOLD]
            return
        *lines, self._line = (self._line + piece).split(b"\n")
        if len(self._line) > LINE:
            raise BadAnswer(f"a line of more than {LINE} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                raise BadAnswer(f"the server failed: {str(chunk['error'])[:TOLD]}")
            usage = chunk.get("usage")
            if usage:
                self.answer.tokens, self.answer.prompt = (
                    _count(usage["completion_tokens"]), _count(usage["prompt_tokens"])
                )  # fmt: skip
            if chunk.get("choices") and not _only_role(chunk["choices"][0]):
                self.answer.times.append(now)
                if usage:
                    self.answer.counts.append(self.answer.tokens)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise BadAnswer(f"a chunk that can't be read: {data[:60].decode(errors='replace')!r}") from error

    def _finish(self) -> None:
        self._done = True
        answer = self.answer
        if answer.status != 200:
            answer.error = f"{answer.status}: {self._told.decode(errors='replace')}"
        elif not answer.times or not answer.tokens:
            answer.error = "a stream that ended without tokens or usage"


def _only_role(choice: Any) -> bool:
    """Whether a chunk only says who speaks, as a chat's first one does: no token came with it."""
    delta = choice.get("delta") if isinstance(choice, dict) else None
    return bool(delta) and "role" in delta and not delta.get("content")
