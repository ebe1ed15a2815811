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

from quire.server.accept_slots import AcceptSlots, OpenConnections
from quire.server.direct_writer import DIRECT_EXTENSION, DirectWriter
from quire.server.errors import Failure

MAX_HEAD_BYTES = 64 << 10  # bytes of a request line and its headers
MAX_HEADERS = 100  # and as many trailers, which are headers after a chunked body
MAX_TARGET_BYTES = 8 << 10  # bytes of a path with its query
FREE_CHUNKS = 1024  # of a chunked body; beyond, they have CHUNK_BYTES on average. Each costs as much as a whole head
CHUNK_BYTES = 256
MAX_ACCEPTS = 32  # connections taken before something else has its turn
YIELD_SECONDS = 0.002  # seconds that are left to a front with fewer connections to take one
BACKLOG = 2048
MAX_LINGERING = 16  # refused connections that are left a second to read why
LAST_CHUNK = re.compile(rb"[\r\n]{0,2}0+(?![0-9A-Fa-f])[^\n]*\n")  # before the trailers
EXHAUSTED_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
log = logging.getLogger("quire.server")


class ConnectionLimits(NamedTuple):
    """How many connections there may be, and for how many seconds one may keep the server waiting."""

    connections: int = 1000
    head: float = 15.0  # for complete headers, from the connection or from the first byte of a later request on
    idle: float = 30.0  # between two requests; whole seconds
    write: float = 60.0  # without reading a byte of what was sent
    linger: float = 1.0  # to read why it was refused
    sweep: float = 1.0  # between two looks


def raw_response(failure: Failure) -> bytes:
    """A whole response, after which the connection is closed."""
    body = json.dumps(failure.body()).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"HTTP/1.1 {failure.code} {http.HTTPStatus(failure.code).phrase}"]
    lines += [f"{name}: {value}" for name, value in (headers | (failure.headers or {})).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class LogThrottle:
    """Counts what would fill the log; `flush` says it in one line."""

    def __init__(self, subject: str) -> None:
        self._subject, self._count, self._last = subject, 0, ""

    def count(self, last: str) -> None:
        """It happened once more."""
        self._count, self._last = self._count + 1, last

    def flush(self) -> None:
        """What happened since it was told last, if anything did."""
        if self._count:
            log.warning("%s: %d (%s)", self._subject, self._count, self._last)
            self._count = 0


class BoundedParser(h11.Connection):
    """h11's server side. What breaks a rule isn't raised but is `fault`, after which there are no more events."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.fault: Failure | None = None
        self._chunks = self._size = 0
        self._at_chunk_size = self._in_trailers = (
            False  # what comes next of a chunked body: a chunk's size, or its trailers
        )

    def next_event(self) -> Any:
        """The next event, or NEED_DATA also when there is a fault, and in place of PAUSED while nothing waits: what it
        would be is that the connection needn't be read, which costs more to say twice a request than it saves."""
        if self.fault is None:
            self.fault = self._head_failure()
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
            self._at_chunk_size, self._in_trailers = b"transfer-encoding" in dict(event.headers), False
            if len(event.target) > MAX_TARGET_BYTES:
                self.fault = Failure(414, f"the path has {len(event.target)} bytes; {MAX_TARGET_BYTES} are the most")
        elif isinstance(event, h11.Data):
            self._chunks, self._size = self._chunks + event.chunk_start, self._size + len(event.data)
            self._at_chunk_size = event.chunk_end
            if self._chunks > FREE_CHUNKS and self._size < CHUNK_BYTES * self._chunks:
                cause = f"the body comes in chunks of {self._size // self._chunks} bytes"
                self.fault = Failure(400, f"{cause}; beyond {FREE_CHUNKS} they have {CHUNK_BYTES} at least on average")
        return event if self.fault is None else h11.NEED_DATA

    def _head_failure(self) -> Failure | None:
        """Before it is parsed, as each header takes time: whether the head or the trailers that begin what was received
        are bounded."""
        data, name = self._head()
        ends = [at for at in (data.find(b"\n\r\n"), data.find(b"\n\n")) if at >= 0]
        end = min(ends) if ends else len(data.rstrip(b"\r\n"))
        if end > MAX_HEAD_BYTES:
            return Failure(431, f"the {name} have more than {MAX_HEAD_BYTES} bytes")
        if data.count(b"\n", 0, end) > MAX_HEADERS:
            return Failure(431, f"there are more than {MAX_HEADERS} {name}")
        return None

    def _head(self) -> tuple[bytes, str]:
        """What was received, if it begins with a line and headers, else nothing; and what the headers are called."""
        if self.their_state is h11.IDLE:
            return self.trailing_data[0], "headers"
        if self.their_state is not h11.SEND_BODY or not (self._at_chunk_size or self._in_trailers):
            return b"", ""
        # Looked at where h11 holds it: a copy for each chunk takes longer than the chunk.
        if not self._in_trailers and LAST_CHUNK.match(self._receive_buffer._data) is None:
            return b"", ""
        first, self._in_trailers = not self._in_trailers, True
        data = self.trailing_data[0]
        return data.lstrip(b"\r\n") if first else b"0\n" + data, "trailers"


class BoundedProtocol(H11Protocol):
    """uvicorn's, within `limits`. It is one of `connections` from the socket's acceptance until it is closed."""

    conn: BoundedParser

    def __init__(
        self,
        config: Config,
        state: ServerState,
        app_state: dict[str, Any],
        limits: ConnectionLimits,
        connections: set[BoundedProtocol],
        refused: LogThrottle,
    ) -> None:
        super().__init__(config, state, app_state)
        self.conn, self._limits, self._connections, self._refused = BoundedParser(), limits, connections, refused
        self.app = self._app_with_direct
        # when the client began to owe a head, or a body that was answered already
        self._waiting_since: float | None = None
        self._refused_at: float | None = None  # when it was told to go
        self._unsent, self._unsent_changed = (
            0,
            0.0,
        )  # bytes that the client must read before more is sent, and their last change
        connections.add(self)

    async def _app_with_direct(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, with Direct among the extensions that it is offered."""
        scope["extensions"] = {DIRECT_EXTENSION: DirectWriter(self.cycle, self.flow)}
        await self.config.loaded_app(scope, receive, send)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The first head is due."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._waiting_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """There is room for another one."""
        self._connections.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pieces of requests."""
        if self._refused_at is not None:
            return
        state = self.conn.their_state
        super().data_received(data)
        if self.conn.their_state is not state:
            self._waiting_since = None
        elif self._waiting_since is None and self._is_client_due():
            self._waiting_since = self.loop.time()

    def handle_events(self) -> None:
        """What was received, up to a fault."""
        super().handle_events()
        if self.conn.fault is not None and self._refused_at is None:
            self._refuse(self.conn.fault)

    def on_response_complete(self) -> None:
        """The rest of the request, if it has one, is due."""
        super().on_response_complete()
        self._waiting_since = (
            self.loop.time() if self.conn.their_state is h11.SEND_BODY and self._is_client_due() else None
        )

    def _unsupported_upgrade_warning(self) -> None:
        """A client that wishes for another protocol is answered in this one; two lines in the log say nothing."""

    def shutdown(self) -> None:
        """End after the response under way."""
        if self._refused_at is not None:
            self.transport.abort()
        else:
            super().shutdown()

    def sweep(self, now: float) -> None:
        """End what takes too long."""
        if self.transport is None:
            return  # TLS has a limit of its own
        if self._refused_at is not None:
            if now - self._refused_at > self._limits.linger:
                self.transport.abort()
        elif (
            self._waiting_since is not None
            and now - self._waiting_since > self._limits.head
            and not self.transport.is_closing()
        ):
            self._refuse(Failure(408, f"the request did not arrive within {self._limits.head:g} s"))
        else:
            stuck = self.flow.write_paused or self.transport.is_closing()
            unsent = self.transport.get_write_buffer_size() if stuck else 0
            if unsent != self._unsent or not unsent:
                self._unsent, self._unsent_changed = unsent, now
            elif now - self._unsent_changed > self._limits.write:
                self._refused.count(f"{unsent} bytes of a response were not read within {self._limits.write:g} s")
                self.transport.abort()

    def _is_client_due(self) -> bool:
        state = self.conn.their_state
        return state is h11.IDLE or (state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete)

    def _refuse(self, failure: Failure) -> None:
        """Say why, unless a response has begun; then close, and leave a moment to read it."""
        self._refused_at = self.loop.time()
        self._refused.count(f"{failure.code}, {failure.message}")
        self._unset_keepalive_if_required()
        fresh = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if fresh:
            self.transport.write(raw_response(failure))
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self.flow.resume_reading()  # what is left unread when a socket is closed may cost the client the answer


class ConnectionAcceptor:
    """Accepts connections on a bound socket, as many as `limits` allow; those beyond get a 503 at once. Where other
    fronts accept on it too, `accept_slots` says whose turn it is."""

    def __init__(
        self,
        listener: socket.socket,
        limits: ConnectionLimits,
        new_protocol: Callable[..., BoundedProtocol],
        ssl: Any,
        accept_slots: AcceptSlots | None = None,
    ) -> None:
        self._listener, self._limits, self._new_protocol, self._ssl = listener, limits, new_protocol, ssl
        self._accept_slots, self._is_yielding = accept_slots, False
        self._loop = asyncio.get_running_loop()
        self._connections = OpenConnections(accept_slots)
        self._accept_tasks: set[asyncio.Task[None]] = set()
        self._lingering: deque[tuple[float, socket.socket]] = deque()
        self._refused, self._over_limit = (
            LogThrottle("connections refused or ended"),
            LogThrottle("connections beyond the limit"),
        )
        self._accept_errors = LogThrottle("connections can't be accepted")
        self._max_connections = (
            accept_slots.max_connections
            if accept_slots is not None and accept_slots.max_connections is not None
            else limits.connections
        )
        told = Failure(503, f"all {self._max_connections} connections are in use", headers={"Retry-After": "1"})
        self._full_response = raw_response(told)
        self._closed = False
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._loop.add_reader(listener, self._on_readable)
        self._sweeper = self._loop.call_later(limits.sweep, self._sweep)

    def close(self) -> None:
        """Accept nothing more. What is open goes on."""
        self._closed = True
        self._loop.remove_reader(self._listener)
        self._sweeper.cancel()
        for _, sock in self._lingering:
            sock.close()

    def _on_readable(self) -> None:
        """Accept, unless it is another front's turn: then a moment later, if nobody else did."""
        if self._accept_slots is None:
            self._accept(MAX_ACCEPTS)
        elif self._accept_slots.is_my_turn():
            self._accept(1)
        elif not self._is_yielding:
            self._is_yielding = True
            self._loop.remove_reader(self._listener)
            self._loop.call_later(YIELD_SECONDS, self._accept_after_yield)

    def _accept_after_yield(self) -> None:
        self._is_yielding = False
        if not self._closed:
            self._loop.add_reader(self._listener, self._on_readable)
            self._accept(1)

    def _accept(self, max_accepts: int) -> None:
        for _ in range(max_accepts):
            try:
                sock, _address = self._listener.accept()
            except OSError as error:
                if (
                    error.errno in EXHAUSTED_ERRNOS
                ):  # by others: connections are kept below the limit. The sweep tries again
                    self._accept_errors.count(str(error))
                    self._loop.remove_reader(self._listener)
                return
            sock.setblocking(False)
            if len(self._connections) >= self._limits.connections or (
                self._accept_slots is not None and self._accept_slots.is_full()
            ):
                self._refuse(sock)
            else:
                protocol = self._new_protocol(limits=self._limits, connections=self._connections, refused=self._refused)
                task = self._loop.create_task(self._connect(sock, protocol))
                self._accept_tasks.add(task)
                task.add_done_callback(self._accept_tasks.discard)

    async def _connect(self, sock: socket.socket, protocol: BoundedProtocol) -> None:
        limit = self._limits.head if self._ssl else None
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._ssl, ssl_handshake_timeout=limit)
        except OSError as error:  # TLS failed
            self._connections.discard(protocol)
            self._refused.count(f"{type(error).__name__} {str(error)[:80]}")

    def _refuse(self, sock: socket.socket) -> None:
        self._over_limit.count(f"{self._max_connections} are open")
        with suppress(OSError):
            if not self._ssl:
                sock.send(self._full_response)
            sock.shutdown(socket.SHUT_WR)
        self._lingering.append((self._loop.time(), sock))
        if len(self._lingering) > MAX_LINGERING:
            self._close_lingering()

    def _close_lingering(self) -> None:
        _, sock = self._lingering.popleft()
        with suppress(OSError):
            sock.recv(MAX_HEAD_BYTES)  # what is left unread may cost the client the answer
        sock.close()

    def _sweep(self) -> None:
        now = self._loop.time()
        self._sweeper = self._loop.call_later(self._limits.sweep, self._sweep)
        self._loop.add_reader(self._listener, self._on_readable)
        while self._lingering and now - self._lingering[0][0] > self._limits.linger:
            self._close_lingering()
        for protocol in list(self._connections):
            protocol.sweep(now)
        for tally in (self._refused, self._over_limit, self._accept_errors):
            tally.flush()
