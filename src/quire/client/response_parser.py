"""Parse a streamed completion: HTTP/1.1 and server-sent events.

No socket and no clock: the caller passes bytes and times. Every length that a server states is checked against a limit
before it is used."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable
from typing import Any

MAX_HEAD_BYTES = 65_536  # of a status line and headers
MAX_LINE_BYTES = 2**20
MAX_CHUNK_BYTES = 2**24
MAX_SIZE_LINE_BYTES = 128  # of the line before a chunk
MAX_TOKENS = 2**31  # of a request
MAX_ERROR_BYTES = 300  # kept of the body of an error
SIZE_PATTERN = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;.*)?")
LENGTH_PATTERN = re.compile(rb"[0-9]{1,12}")


class BadResponse(Exception):
    """The response is not a streamed completion; the text says why."""


def _check_count(count: object) -> int:
    """Return a number of tokens. Raise ValueError if it is none."""
    if not isinstance(count, int) or not 0 <= count <= MAX_TOKENS:
        raise ValueError(count)
    return count


class ResponseRecord:
    """The result of a request. Times are seconds on the client's clock: when it was due (in a closed loop: sent), when
    it was sent, and when each chunk with a choice arrived. `token_counts` has the total of tokens after each chunk, if
    the server reports it. `error` is None, or why the answer is incomplete; `status` is the HTTP status, 0 if there was
    no response."""

    def __init__(self, number: int, due: float | None) -> None:
        self.number, self.due_at = number, due
        self.sent = 0.0
        self.chunk_times = array("d")
        self.token_counts = array("Q")
        self.prompt_tokens = self.completion_tokens = self.status = 0
        self.error: str | None = None


class ResponseParser:
    """Parses one response into a ResponseRecord. After its end `keep_alive` is True if the connection may be reused."""

    def __init__(self, record: ResponseRecord) -> None:
        self.record, self.keep_alive = record, False
        self._unparsed = self._line = b""
        self._body_left = 0  # of a body with a content-length
        self._error_body = b""
        self._done = False
        self._parse: Callable[[bytes, float], int] = self._parse_head

    def feed(self, data: bytes, now: float) -> bool:
        """Parse the bytes received at `now`, and return True if the response is complete. Raise BadResponse if it is
        malformed."""
        if self._unparsed:
            data = self._unparsed + data
        at = 0
        while not self._done:
            parse = self._parse
            used = parse(data[at:] if at else data, now)
            at += used
            if self._parse is parse and (not used or at == len(data)):
                break
        self._unparsed = data[at:]
        return self._done

    def on_close(self) -> None:
        """Handle the end of the connection. Raise BadResponse unless it ends the response."""
        if self._done or self._parse == self._parse_until_close:
            self._finish()
        else:
            raise BadResponse("the connection was closed in an answer" if self.record.status else "no answer came")

    def _parse_head(self, data: bytes, now: float) -> int:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > MAX_HEAD_BYTES:
                raise BadResponse(f"headers of more than {MAX_HEAD_BYTES} bytes")
            return 0
        status, *lines = data[:end].split(b"\r\n")
        version, _, code = status.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not code[:3].isdigit():
            raise BadResponse(f"no HTTP answer: {status[:60].decode(errors='replace')!r}")
        if code.startswith(b"1"):  # such as 100 Continue: another head follows
            return end + 4
        self.record.status = int(code[:3])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        self.keep_alive = version == b"HTTP/1.1" and headers.get(b"connection", b"").lower() != b"close"
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._parse = self._parse_chunks
        elif b"content-length" in headers:
            if not LENGTH_PATTERN.fullmatch(headers[b"content-length"]):
                raise BadResponse("a content-length that is no number")
            self._body_left = int(headers[b"content-length"])
            self._parse = self._parse_sized_body
            if not self._body_left:
                self._finish()
        else:
            self.keep_alive, self._parse = False, self._parse_until_close
        return end + 4

    def _parse_chunks(self, data: bytes, now: float) -> int:
        at = 0
        while True:
            end = data.find(b"\r\n", at)
            if end < 0:
                if len(data) - at > MAX_SIZE_LINE_BYTES:
                    raise BadResponse("a chunk without a size")
                return at
            match = SIZE_PATTERN.fullmatch(data, at, end)
            size = int(match[1], 16) if match else -1
            if not 0 <= size <= MAX_CHUNK_BYTES:
                raise BadResponse(f"a chunk of size {data[at : min(end, at + 20)].decode(errors='replace')!r}")
            if not size:
                return self._parse_trailer(data, at, end)
            after = end + 2 + size
            if len(data) < after + 2:
                return at
            self._handle_body(data[end + 2 : after], now)
            at = after + 2

    def _parse_trailer(self, data: bytes, at: int, end: int) -> int:
        """Parse the last chunk, at `at`; the trailer after it ends with an empty line."""
        last = data.find(b"\r\n\r\n", end)
        if last < 0:
            if len(data) - at > MAX_HEAD_BYTES:
                raise BadResponse(f"a trailer of more than {MAX_HEAD_BYTES} bytes")
            return at
        self._finish()
        return last + 4

    def _parse_sized_body(self, data: bytes, now: float) -> int:
        piece = data[: self._body_left]
        self._body_left -= len(piece)
        self._handle_body(piece, now)
        if not self._body_left:
            self._finish()
        return len(piece)

    def _parse_until_close(self, data: bytes, now: float) -> int:
        self._handle_body(data, now)
        return len(data)

    def _handle_body(self, piece: bytes, now: float) -> None:
        if self.record.status != 200:
            self._error_body = (self._error_body + piece)[:MAX_ERROR_BYTES]
            return
        *lines, self._line = (self._line + piece).split(b"\n")
        if len(self._line) > MAX_LINE_BYTES:
            raise BadResponse(f"a line of more than {MAX_LINE_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._handle_event(line[5:].strip(), now)

    def _handle_event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                raise BadResponse(f"the server failed: {str(chunk['error'])[:MAX_ERROR_BYTES]}")
            usage = chunk.get("usage")
            if usage:
                self.record.completion_tokens = _check_count(usage["completion_tokens"])
                self.record.prompt_tokens = _check_count(usage["prompt_tokens"])
            if chunk.get("choices") and not _has_only_role(chunk["choices"][0]):
                self.record.chunk_times.append(now)
                if usage:
                    self.record.token_counts.append(self.record.completion_tokens)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise BadResponse(f"a chunk that can't be read: {data[:60].decode(errors='replace')!r}") from error

    def _finish(self) -> None:
        self._done = True
        record = self.record
        if record.status != 200:
            record.error = f"{record.status}: {self._error_body.decode(errors='replace')}"
        elif not record.chunk_times or not record.completion_tokens:
            record.error = "a stream that ended without tokens or usage"


def _has_only_role(choice: Any) -> bool:
    """Return True if a chunk only has the role, as the first one of a chat: it has no token."""
    delta: Any = choice.get("delta") if isinstance(choice, dict) else None
    return bool(delta) and "role" in delta and not delta.get("content")
