"""Connections to one server. Each carries one request at a time, and stays open for the next one if the server allows
it."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import NamedTuple

from quire.client.response_parser import BadResponse, ResponseParser, ResponseRecord

BUFFER_BYTES = 65_536  # bytes of one read
SILENCE_SECONDS = 600.0  # seconds without a byte after which a request is aborted


class Address(NamedTuple):
    """The server's IP address, its port, and the name in its certificate (None: no TLS)."""

    ip: str
    port: int
    tls_name: str | None


class Connection(asyncio.BufferedProtocol):
    """A connection. Received bytes are put into `buffer`, which the connections of an event loop share: each read is
    handled before the next one."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.is_usable = True
        self.last_received = 0.0  # time of the last byte
        self._reader: ResponseParser | None = None
        self._ended: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def request(self, data: bytes, record: ResponseRecord) -> None:
        """Send `data`, and return when the answer has ended, also if it failed. The result is in `record`."""
        assert self._transport is not None, "`request` before the connection is open"
        assert self._reader is None, "a request is in flight"
        self._reader, self._ended = ResponseParser(record), asyncio.get_running_loop().create_future()
        self.last_received = time.monotonic()
        self._transport.write(data)
        await self._ended

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        now = self.last_received = time.monotonic()
        data, reader = bytes(self._buffer[:nbytes]), self._reader
        if reader is None:  # bytes without a request
            self.close()
            return
        try:
            if reader.feed(data, now):
                self.is_usable = self.is_usable and reader.keep_alive
                self._finish_response(None)
        except BadResponse as error:
            self._finish_response(str(error))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_usable = False
        if self._reader is not None:
            try:
                self._reader.on_close()
                self._finish_response(None)
            except BadResponse as error:
                self._finish_response(f"{error} ({exc})" if exc else str(error))

    def abort_request(self, why: str) -> None:
        """End the request in flight with an error."""
        self._finish_response(why)
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()

    def _finish_response(self, error: str | None) -> None:
        if self._reader is None or self._ended is None:
            return
        if error is not None:
            self._reader.record.error = error
        if not self._ended.done():
            self._ended.set_result(None)
        self._reader = None


class ConnectionPool:
    """Open connections to the server at `address`. `in_use` are those with a request in flight."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._tls = ssl.create_default_context() if address.tls_name is not None else None
        self._idle: list[Connection] = []
        self.in_use: set[Connection] = set()

    async def request(self, data: bytes, record: ResponseRecord) -> None:
        """Send `data` on an idle connection, or on a new one. If the server had closed the idle connection, the request
        is sent again on a new one: that is not the request's failure."""
        while True:
            used_before = bool(self._idle)
            try:
                connection = self._idle.pop() if used_before else await self._connect()
            except OSError as error:
                record.error = f"no connection: {error.strerror or error}"
                return
            if not connection.is_usable:
                continue
            self.in_use.add(connection)
            try:
                await connection.request(data, record)
            finally:
                self.in_use.discard(connection)
            if connection.is_usable:
                self._idle.append(connection)
            elif used_before and record.error is not None and not record.status:
                record.error = None
                continue
            else:
                connection.close()
            return

    async def _connect(self) -> Connection:
        loop, (ip, port, name) = asyncio.get_running_loop(), self._address
        _, connection = await loop.create_connection(
            lambda: Connection(self._buffer), ip, port, ssl=self._tls, server_hostname=name
        )
        return connection

    def abort_silent(self, now: float) -> None:
        """Abort requests of which nothing was received for SILENCE_SECONDS."""
        for connection in [one for one in self.in_use if now - one.last_received > SILENCE_SECONDS]:
            connection.abort_request(f"nothing came for {SILENCE_SECONDS:g} s")

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()
