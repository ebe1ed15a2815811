"""HTTP/1.1 connections with limits: their number, the size and duration of a request, and the time that a client may
take to read. A connection over a limit gets an error in OpenAI's format and is closed. Nothing here depends on routes
or on the engine.

The limits cost a few comparisons for each piece of data received, and a check of each connection once a second. Sending
costs nothing extra.
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
MAX_HEADERS = 100  # also the limit of trailers, which are headers after a chunked body
MAX_TARGET_BYTES = 8 << 10  # bytes of a path with its query
FREE_CHUNKS = 1024  # chunks of a body without a minimum size: each costs as much to parse as a whole head
CHUNK_BYTES = 256  # the least average size of the chunks of a body that has more
MAX_ACCEPTS = 32  # connections accepted in one turn of the event loop
YIELD_SECONDS = 0.002  # time for a frontend with fewer connections to accept one
BACKLOG = 2048
MAX_LINGERING = 16  # refused connections that stay open, so that the client can read the error
LAST_CHUNK = re.compile(rb"[\r\n]{0,2}0+(?![0-9A-Fa-f])[^\n]*\n")  # before the trailers
EXHAUSTED_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
log = logging.getLogger("quire.server")


class ConnectionLimits(NamedTuple):
    """The most connections, and time limits of a connection in seconds."""

    connections: int = 1000
    head: float = 15.0  # until the headers are complete, from the connection or the first byte of a later request
    idle: float = 30.0  # between two requests; whole seconds
    write: float = 60.0  # without reading a byte of what was sent
    linger: float = 1.0  # to read the reason of a refusal
    sweep: float = 1.0  # between two checks of these limits


def raw_response(failure: Failure) -> bytes:
    """Return the bytes of a response, with "Connection: close"."""
    body = json.dumps(failure.body()).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"HTTP/1.1 {failure.code} {http.HTTPStatus(failure.code).phrase}"]
    lines += [f"{name}: {value}" for name, value in (headers | (failure.headers or {})).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class LogThrottle:
    """Counts frequent events, and logs their number in one line on `flush`."""

    def __init__(self, subject: str) -> None:
        self._subject, self._count, self._last = subject, 0, ""

    def count(self, last: str) -> None:
        """Count an event, described by `last`."""
        self._count, self._last = self._count + 1, last

    def flush(self) -> None:
        """Log the number of events since the last call, if there were any."""
        if self._count:
            log.warning("%s: %d (%s)", self._subject, self._count, self._last)
            self._count = 0


class BoundedParser(h11.Connection):
    """h11's parser of requests, with limits. A violation is not raised but stored in `fault`; no events follow it."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.fault: Failure | None = None
        self._chunks = self._size = 0
        # What comes next in a chunked body: the size of a chunk, or the trailers.
        self._at_chunk_size = self._in_trailers = False

    def next_event(self) -> Any:
        """Return the next event, or NEED_DATA after a fault.

        PAUSED is returned as NEED_DATA while no data is waiting: uvicorn would pause reading, which costs more for each
        request than it saves.
        """
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
                self.fault = Failure(414, f"the path has {len(event.target)} bytes; the limit is {MAX_TARGET_BYTES}")
        elif isinstance(event, h11.Data):
            self._chunks, self._size = self._chunks + event.chunk_start, self._size + len(event.data)
            self._at_chunk_size = event.chunk_end
            if self._chunks > FREE_CHUNKS and self._size < CHUNK_BYTES * self._chunks:
                cause = f"the body comes in chunks of {self._size // self._chunks} bytes"
                self.fault = Failure(400, f"{cause}; more than {FREE_CHUNKS} chunks must have {CHUNK_BYTES} on average")
        return event if self.fault is None else h11.NEED_DATA

    def _head_failure(self) -> Failure | None:
        """Return the failure if the headers or trailers at the start of the received data exceed a limit. Checked
        before they are parsed, since each header takes time."""
        data, name = self._head()
        ends = [at for at in (data.find(b"\n\r\n"), data.find(b"\n\n")) if at >= 0]
        end = min(ends) if ends else len(data.rstrip(b"\r\n"))
        if end > MAX_HEAD_BYTES:
            return Failure(431, f"the {name} have more than {MAX_HEAD_BYTES} bytes")
        if data.count(b"\n", 0, end) > MAX_HEADERS:
            return Failure(431, f"there are more than {MAX_HEADERS} {name}")
        return None

    def _head(self) -> tuple[bytes, str]:
        """Return the received data if it starts with headers or trailers, else b"", and which of them it is."""
        if self.their_state is h11.IDLE:
            return self.trailing_data[0], "headers"
        if self.their_state is not h11.SEND_BODY or not (self._at_chunk_size or self._in_trailers):
            return b"", ""
        # Reads h11's own buffer: a copy for each chunk takes longer than the chunk itself.
        if not self._in_trailers and LAST_CHUNK.match(self._receive_buffer._data) is None:
            return b"", ""
        first, self._in_trailers = not self._in_trailers, True
        data = self.trailing_data[0]
        return data.lstrip(b"\r\n") if first else b"0\n" + data, "trailers"


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with `limits`. It is in `connections` from when the socket is accepted until it is closed."""

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
        # Since when headers are due from the client, or the rest of a body that was answered already.
        self._waiting_since: float | None = None
        self._refused_at: float | None = None  # when the connection was refused
        self._unsent, self._unsent_changed = 0, 0.0  # bytes that the client has not read yet, and their last change
        connections.add(self)

    async def _app_with_direct(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with a DirectWriter among the ASGI extensions."""
        scope["extensions"] = {DIRECT_EXTENSION: DirectWriter(self.cycle, self.flow)}
        await self.config.loaded_app(scope, receive, send)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the time limit of the first headers."""
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn asks for asyncio.Transport
        self._waiting_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the set of open ones."""
        self._connections.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received data, and start or stop the time limit."""
        if self._refused_at is not None:
            return
        state = self.conn.their_state
        super().data_received(data)
        if self.conn.their_state is not state:
            self._waiting_since = None
        elif self._waiting_since is None and self._is_client_due():
            self._waiting_since = self.loop.time()

    def handle_events(self) -> None:
        """Handle the received events, and refuse the connection after a fault."""
        super().handle_events()
        if self.conn.fault is not None and self._refused_at is None:
            self._refuse(self.conn.fault)

    def on_response_complete(self) -> None:
        """Start the time limit for the rest of the request's body, if it has not arrived."""
        super().on_response_complete()
        self._waiting_since = (
            self.loop.time() if self.conn.their_state is h11.SEND_BODY and self._is_client_due() else None
        )

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a client that asks for another protocol is answered in HTTP/1.1."""

    def shutdown(self) -> None:
        """Close the connection after the current response."""
        if self._refused_at is not None:
            self.transport.abort()
        else:
            super().shutdown()

    def sweep(self, now: float) -> None:
        """Close the connection if it exceeds a time limit."""
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
        """Send the failure, unless a response has begun, and close. The client has a moment to read it."""
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
        self.flow.resume_reading()  # closing a socket with unread data may discard the response


class ConnectionAcceptor:
    """Accepts connections on a bound socket, up to the limit; further ones get a 503 at once. If other frontends accept
    on the socket too, `accept_slots` decides which of them accepts next."""

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
        self._refused = LogThrottle("connections refused or ended")
        self._over_limit = LogThrottle("connections beyond the limit")
        self._accept_errors = LogThrottle("connections can't be accepted")
        self._max_connections = (
            accept_slots.max_connections
            if accept_slots is not None and accept_slots.max_connections is not None
            else limits.connections
        )
        failure = Failure(503, f"all {self._max_connections} connections are in use", headers={"Retry-After": "1"})
        self._full_response = raw_response(failure)
        self._closed = False
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._loop.add_reader(listener, self._on_readable)
        self._sweeper = self._loop.call_later(limits.sweep, self._sweep)

    def close(self) -> None:
        """Stop accepting. Open connections stay open."""
        self._closed = True
        self._loop.remove_reader(self._listener)
        self._sweeper.cancel()
        for _, sock in self._lingering:
            sock.close()

    def _on_readable(self) -> None:
        """Accept connections. If it is another frontend's turn, wait a moment first."""
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
                # Exhausted by other processes, since connections stay below the limit. The sweep tries again.
                if error.errno in EXHAUSTED_ERRNOS:
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
            sock.recv(MAX_HEAD_BYTES)  # closing a socket with unread data may discard the response
        sock.close()

    def _sweep(self) -> None:
        now = self._loop.time()
        self._sweeper = self._loop.call_later(self._limits.sweep, self._sweep)
        self._loop.add_reader(self._listener, self._on_readable)
        while self._lingering and now - self._lingering[0][0] > self._limits.linger:
            self._close_lingering()
        for protocol in list(self._connections):
            protocol.sweep(now)
        for throttle in (self._refused, self._over_limit, self._accept_errors):
            throttle.flush()
