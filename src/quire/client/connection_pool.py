"""Connections to one server: a request at a time on each, kept open for the next one as long as the server allows."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import NamedTuple

from quire.client.response_parser import BadResponse, ResponseParser, ResponseRecord

BUFFER_BYTES = 65_536  # bytes read at once
SILENCE_SECONDS = 600.0  # seconds without a byte after which an answer is given up


class Address(NamedTuple):
    """Where the server is: its address, its port, and the name that its certificate must have (without TLS: None)."""

    ip: str
    port: int
    tls_name: str | None


class Connection(asyncio.BufferedProtocol):
    """One connection. `request` sends a request and returns when its answer has ended, well or not. What comes is put
    into `buffer`, which the connections of an event loop share: it is read before another one gets it."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.is_usable = True
        self.last_received = 0.0  # when the last byte came
        self._reader: ResponseParser | None = None
        self._ended: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def request(self, data: bytes, record: ResponseRecord) -> None:
        """Send `data`; what comes back is in `record`."""
        assert self._transport is not None, "asked before it was connected"
        assert self._reader is None, "asked twice at once"
        self._reader, self._ended = ResponseParser(record), asyncio.get_running_loop().create_future()
        self.last_received = time.monotonic()
        self._transport.write(data)
        await self._ended

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        now = self.last_received = time.monotonic()
        data, reader = bytes(self._buffer[:nbytes]), self._reader
        if reader is None:  # nobody asked
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
        """End what is under way, without an answer."""
        self._finish_response(why)
        self.close()

    def close(self) -> None:
        """No more is sent or read."""
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
    """Open connections to the server at `address`. `in_use` are those with a request under way."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._tls = ssl.create_default_context() if address.tls_name is not None else None
        self._idle: list[Connection] = []
        self.in_use: set[Connection] = set()

    async def request(self, data: bytes, record: ResponseRecord) -> None:
        """Send `data`, on an open connection if there is one. One that the server had already closed isn't the
        request's failure: it is sent again, on a new one."""
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
        """Give up answers of which nothing came for SILENCE seconds."""
        for connection in [one for one in self.in_use if now - one.last_received > SILENCE_SECONDS]:
            connection.abort_request(f"nothing came for {SILENCE_SECONDS:g} s")

    def close(self) -> None:
        """Close those that wait for a request."""
        while self._idle:
            self._idle.pop().close()
