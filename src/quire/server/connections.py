"""Connections: HTTP/1.1 within bounds. How many there are, how much and how long each may ask, and how long it may take
to read; those beyond are told why in OpenAI's shape and are closed. Knows no routes and no engine.

The bounds cost a few comparisons for each piece received and a look at each connection once a second; what is sent
passes by them.
"""

from __future__ import annotations

import asyncio
import errno
import http
import json
import logging
import re
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from quire.server.direct import DIRECT, Direct
from quire.server.errors import Failure
from quire.server.places import Open, Places

MAX_HEAD = 64 << 10  # bytes of a request line and its headers
MAX_HEADERS = 100  # and as many trailers, which are headers after a chunked body
MAX_TARGET = 8 << 10  # bytes of a path with its query
FREE_CHUNKS = 1024  # of a chunked body; beyond, they have CHUNK_BYTES on average. Each costs as much as a whole head
CHUNK_BYTES = 256
ACCEPTS = 32  # connections taken before something else has its turn
PATIENCE = 0.002  # seconds that are left to a front with fewer connections to take one
BACKLOG = 2048
LINGERING = 16  # refused connections that are left a second to read why
LAST_CHUNK = re.compile(rb"[\r\n]{0,2}0+(?![0-9A-Fa-f])[^\n]*\n")  # before the trailers
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
log = logging.getLogger("quire.server")


class Bounds(NamedTuple):
    """How many connections there may be, and for how many seconds one may keep the server waiting."""

    connections: int = 1000
    head: float = 15.0  # for complete headers, from the connection or from the first byte of a later request on
    idle: float = 30.0  # between two requests; whole seconds
    write: float = 60.0  # without reading a byte of what was sent
    linger: float = 1.0  # to read why it was refused
    sweep: float = 1.0  # between two looks


def answer(failure: Failure) -> bytes:
    """A whole response, after which the connection is closed."""
    body = json.dumps(failure.body()).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"HTTP/1.1 {failure.code} {http.HTTPStatus(failure.code).phrase}"]
    lines += [f"{name}: {value}" for name, value in (headers | (failure.headers or {})).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Tally:
    """Counts what would fill the log; `tell` says it in one line."""

    def __init__(self, what: str) -> None:
        self._what, self._count, self._last = what, 0, ""

    def note(self, last: str) -> None:
        """It happened once more."""
        self._count, self._last = self._count + 1, last

    def tell(self) -> None:
        """What happened since it was told last, if anything did."""
        if self._count:
            log.warning("%s: %d (%s)", self._what, self._count, self._last)
            self._count = 0


class BoundedParser(h11.Connection):
    """h11's server side. What breaks a rule isn't raised but is `fault`, after which there are no more events."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD)
        self.fault: Failure | None = None
        self._chunks = self._size = 0
        self._between = self._trailing = False  # what comes next of a chunked body: a chunk's size, or its trailers

    def next_event(self) -> Any:
        """The next event, or NEED_DATA also when there is a fault, and in place of PAUSED while nothing waits: what it
        would be is that the connection needn't be read, which costs more to say twice a request than it saves."""
        if self.fault is None:
            self.fault = self._wrong_head()
        if self.fault is not None:
            return h11.NEED_DATA
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.fault = Failure(400, f"this is not valid HTTP: {str(error)[:80]}")
            return h11.NEED_DATA
        if event is h11.PAUSED and not self.trailing_data[0]:
            return h11.NEED_DATA
        if isinstance(event, h11.Request):
            self._chunks = self._size = 0
            self._between, self._trailing = b"transfer-encoding" in dict(event.headers), False
            if len(event.target) > MAX_TARGET:
                self.fault = Failure(414, f"the path has {len(event.target)} bytes; {MAX_TARGET} are the most")
        elif isinstance(event, h11.Data):
            self._chunks, self._size = self._chunks + event.chunk_start, self._size + len(event.data)
            self._between = event.chunk_end
            if self._chunks > FREE_CHUNKS and self._size < CHUNK_BYTES * self._chunks:
                cause = f"the body comes in chunks of {self._size // self._chunks} bytes"
                self.fault = Failure(400, f"{cause}; beyond {FREE_CHUNKS} they have {CHUNK_BYTES} at least on average")
        return event if self.fault is None else h11.NEED_DATA

    def _wrong_head(self) -> Failure | None:
        """Before it is parsed, as each header takes time: whether the head or the trailers that begin what was received
        are bounded."""
        data, name = self._head()
        ends = [at for at in (data.find(b"\n\r\n"), data.find(b"\n\n")) if at >= 0]
        end = min(ends) if ends else len(data.rstrip(b"\r\n"))
        if end > MAX_HEAD:
            return Failure(431, f"the {name} have more than {MAX_HEAD} bytes")
        if data.count(b"\n", 0, end) > MAX_HEADERS:
            return Failure(431, f"there are more than {MAX_HEADERS} {name}")
        return None

    def _head(self) -> tuple[bytes, str]:
        """What was received, if it begins with a line and headers, else nothing; and what the headers are called."""
        if self.their_state is h11.IDLE:
            return self.trailing_data[0], "headers"
        if self.their_state is not h11.SEND_BODY or not (self._between or self._trailing):
            return b"", ""
        # Looked at where h11 holds it: a copy for each chunk takes longer than the chunk.
        if not self._trailing and LAST_CHUNK.match(self._receive_buffer._data) is None:
            return b"", ""
        first, self._trailing = not self._trailing, True
        data = self.trailing_data[0]
        return data.lstrip(b"\r\n") if first else b"0\n" + data, "trailers"


class BoundedProtocol(H11Protocol):
    """uvicorn's, within `bounds`. It is one of `all` from the socket's acceptance until it is closed."""

    conn: BoundedParser

    def __init__(
        self,
        config: Config,
        state: ServerState,
        app_state: dict[str, Any],
        bounds: Bounds,
        all: set[BoundedProtocol],
        refused: Tally,
    ) -> None:
        super().__init__(config, state, app_state)
        self.conn, self._bounds, self._all, self._refused = BoundedParser(), bounds, all, refused
        self.app = self._offering
        self._since: float | None = None  # when the client began to owe a head, or a body that was answered already
        self._told: float | None = None  # when it was told to go
        self._unsent, self._moved = 0, 0.0  # bytes that the client must read before more is sent, and their last change
        all.add(self)

    async def _offering(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, with Direct among the extensions that it is offered."""
        scope["extensions"] = {DIRECT: Direct(self.cycle, self.flow)}
        await self.config.loaded_app(scope, receive, send)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The first head is due."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """There is room for another one."""
        self._all.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pieces of requests."""
        if self._told is not None:
            return
        state = self.conn.their_state
        super().data_received(data)
        if self.conn.their_state is not state:
            self._since = None
        elif self._since is None and self._owing():
            self._since = self.loop.time()

    def handle_events(self) -> None:
        """What was received, up to a fault."""
        super().handle_events()
        if self.conn.fault is not None and self._told is None:
            self._refuse(self.conn.fault)

    def on_response_complete(self) -> None:
        """The rest of the request, if it has one, is due."""
        super().on_response_complete()
        self._since = self.loop.time() if self.conn.their_state is h11.SEND_BODY and self._owing() else None

    def _unsupported_upgrade_warning(self) -> None:
        """A client that wishes for another protocol is answered in this one; two lines in the log say nothing."""

    def shutdown(self) -> None:
        """End after the response under way."""
        if self._told is not None:
            self.transport.abort()
        else:
            super().shutdown()

    def sweep(self, now: float) -> None:
        """End what takes too long."""
        if self.transport is None:
            return  # TLS has a limit of its own
        if self._told is not None:
            if now - self._told > self._bounds.linger:
                self.transport.abort()
        elif self._since is not None and now - self._since > self._bounds.head and not self.transport.is_closing():
            self._refuse(Failure(408, f"the request did not arrive within {self._bounds.head:g} s"))
        else:
            stuck = self.flow.write_paused or self.transport.is_closing()
            unsent = self.transport.get_write_buffer_size() if stuck else 0
            if unsent != self._unsent or not unsent:
                self._unsent, self._moved = unsent, now
            elif now - self._moved > self._bounds.write:
                self._refused.note(f"{unsent} bytes of a response were not read within {self._bounds.write:g} s")
                self.transport.abort()

    def _owing(self) -> bool:
        state = self.conn.their_state
        return state is h11.IDLE or (state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete)

    def _refuse(self, failure: Failure) -> None:
        """Say why, unless a response has begun; then close, and leave a moment to read it."""
        self._told = self.loop.time()
        self._refused.note(f"{failure.code}, {failure.message}")
        self._unset_keepalive_if_required()
        fresh = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if fresh:
            self.transport.write(answer(failure))
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self.flow.resume_reading()  # what is left unread when a socket is closed may cost the client the answer


class Door:
    """Accepts connections on a bound socket, as many as `bounds` allow; those beyond get a 503 at once. Where other
    fronts accept on it too, `places` says whose turn it is."""

    def __init__(
        self,
        listener: socket.socket,
        bounds: Bounds,
        make: Callable[..., BoundedProtocol],
        ssl: Any,
        places: Places | None = None,
    ) -> None:
        self._listener, self._bounds, self._make, self._ssl = listener, bounds, make, ssl
        self._places, self._patient = places, False
        self._loop = asyncio.get_running_loop()
        self._open = Open(places)
        self._arriving: set[asyncio.Task[None]] = set()
        self._leaving: deque[tuple[float, socket.socket]] = deque()
        self._refused, self._full = Tally("connections refused or ended"), Tally("connections beyond the limit")
        self._starved = Tally("connections can't be accepted")
        self._most = places.most if places is not None and places.most is not None else bounds.connections
        told = Failure(503, f"all {self._most} connections are in use", headers={"Retry-After": "1"})
        self._sorry = answer(told)
        self._closed = False
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._loop.add_reader(listener, self._readable)
        self._sweeper = self._loop.call_later(bounds.sweep, self._sweep)

    def close(self) -> None:
        """Accept nothing more. What is open goes on."""
        self._closed = True
        self._loop.remove_reader(self._listener)
        self._sweeper.cancel()
        for _, sock in self._leaving:
            sock.close()

    def _readable(self) -> None:
        """Accept, unless it is another front's turn: then a moment later, if nobody else did."""
        if self._places is None:
            self._accept(ACCEPTS)
        elif self._places.mine():
            self._accept(1)
        elif not self._patient:
            self._patient = True
            self._loop.remove_reader(self._listener)
            self._loop.call_later(PATIENCE, self._insist)

    def _insist(self) -> None:
        self._patient = False
        if not self._closed:
            self._loop.add_reader(self._listener, self._readable)
            self._accept(1)

    def _accept(self, most: int) -> None:
        for _ in range(most):
            try:
                sock, _address = self._listener.accept()
            except OSError as error:
                if error.errno in EXHAUSTED:  # by others: connections are kept below the limit. The sweep tries again
                    self._starved.note(str(error))
                    self._loop.remove_reader(self._listener)
                return
            sock.setblocking(False)
            if len(self._open) >= self._bounds.connections or (self._places is not None and self._places.full()):
                self._turn_away(sock)
            else:
                protocol = self._make(bounds=self._bounds, all=self._open, refused=self._refused)
                task = self._loop.create_task(self._take(sock, protocol))
                self._arriving.add(task)
                task.add_done_callback(self._arriving.discard)

    async def _take(self, sock: socket.socket, protocol: BoundedProtocol) -> None:
        limit = self._bounds.head if self._ssl else None
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._ssl, ssl_handshake_timeout=limit)
        except OSError as error:  # TLS failed
            self._open.discard(protocol)
            self._refused.note(f"{type(error).__name__} {str(error)[:80]}")

    def _turn_away(self, sock: socket.socket) -> None:
        self._full.note(f"{self._most} are open")
        with suppress(OSError):
            if not self._ssl:
                sock.send(self._sorry)
            sock.shutdown(socket.SHUT_WR)
        self._leaving.append((self._loop.time(), sock))
        if len(self._leaving) > LINGERING:
            self._shut()

    def _shut(self) -> None:
        _, sock = self._leaving.popleft()
        with suppress(OSError):
            sock.recv(MAX_HEAD)  # what is left unread may cost the client the answer
        sock.close()

    def _sweep(self) -> None:
        now = self._loop.time()
        self._sweeper = self._loop.call_later(self._bounds.sweep, self._sweep)
        self._loop.add_reader(self._listener, self._readable)
        while self._leaving and now - self._leaving[0][0] > self._bounds.linger:
            self._shut()
        for protocol in list(self._open):
            protocol.sweep(now)
        for tally in (self._refused, self._full, self._starved):
            tally.tell()
