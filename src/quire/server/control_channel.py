"""Messages between two frontends of one server, over an unnamed socket. A frame is a length and JSON. Nothing here
depends on the kinds of messages."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from quire.protocol.columns import WireError
from quire.protocol.json_frames import HEADER, pack, unpack

MAX_FRAME_BYTES = 1 << 23  # bytes of a frame
MAX_UNSENT_BYTES = 1 << 24  # bytes that wait for the other side to read; above it, messages are dropped
log = logging.getLogger("quire.server")

Handler = Callable[[Any], Awaitable[Any]]


def send_blocking(connection: socket.socket, kind: str, value: Any) -> None:
    """Send a message before there is an event loop. Raise OSError if the other side is gone."""
    connection.sendall(_frame({"what": kind, "value": value}))


def receive_blocking(connection: socket.socket) -> tuple[str, Any]:
    """Receive a message before there is an event loop. Return its kind and value. Raise EOFError if the other side is
    gone."""
    message = _parse(_read_exactly(connection, _frame_length(_read_exactly(connection, HEADER))))
    return _message_kind(message), message.get("value")


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        data = connection.recv(size - len(received))
        if not data:
            raise EOFError
        received += data
    return received


def _frame(value: dict[str, Any]) -> bytes:
    frame = pack(value)
    if len(frame) - HEADER > MAX_FRAME_BYTES:
        raise WireError("frame", f"{len(frame) - HEADER} bytes, at most {MAX_FRAME_BYTES} are sent")
    return frame


def _frame_length(head: bytes) -> int:
    length = int.from_bytes(head, "big")
    if length > MAX_FRAME_BYTES:
        raise WireError("length", f"{length} bytes are announced, at most {MAX_FRAME_BYTES} are read")
    return length


def _parse(body: bytes) -> dict[str, Any]:
    try:
        message = unpack(body)
    except (ValueError, RecursionError) as error:
        raise WireError("frame", f"no JSON: {str(error)[:200]}") from error
    if not isinstance(message, dict):
        raise WireError("frame", f"a {type(message).__name__}, no object")
    return message


def _message_kind(message: Mapping[str, Any]) -> str:
    what = message.get("what")
    if not isinstance(what, str):
        raise WireError("what", f"a {type(what).__name__}, no text")
    return what


class ControlChannel:
    """One side of `connection` on an event loop. `handlers` answer the other side's messages, by kind; they take and
    return JSON values."""

    def __init__(self, connection: socket.socket, handlers: Mapping[str, Handler]) -> None:
        self._connection, self._handlers = connection, handlers
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._keys = itertools.count()
        self._handler_tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def connect(self) -> None:
        """Attach the connection to the running event loop. Nothing is read yet."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)

    async def serve(self) -> None:
        """Answer messages until the other side is gone or sends an invalid frame."""
        try:
            while True:
                length = _frame_length(await self._reader.readexactly(HEADER))
                self._dispatch(_parse(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        except WireError as error:
            log.error("another frontend sent an invalid frame: %s", error)
        finally:
            self._writer.close()
            for answer in self._pending.values():
                if not answer.done():
                    answer.set_exception(ConnectionResetError("the other frontend is gone"))
            self._pending.clear()

    def notify(self, kind: str, value: Any = None) -> None:
        """Send a message that needs no answer."""
        self._send({"what": kind, "value": value})

    async def request(self, kind: str, value: Any, timeout: float) -> Any:
        """Send a message and return the answer. Raise TimeoutError after `timeout` seconds, ConnectionError if the
        other side is gone."""
        key = next(self._keys)
        answer = self._pending[key] = asyncio.get_running_loop().create_future()
        try:
            self._send({"what": kind, "value": value, "key": key})
            return await asyncio.wait_for(answer, timeout)
        finally:
            self._pending.pop(key, None)

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer.is_closing():
            raise ConnectionResetError("the other frontend is gone")
        if self._writer.transport.get_write_buffer_size() < MAX_UNSENT_BYTES:
            self._writer.write(_frame(message))

    def _dispatch(self, message: dict[str, Any]) -> None:
        key = message.get("key")
        if "answer" in message:
            answer = self._pending.get(key) if isinstance(key, int) else None
            if answer is not None and not answer.done():
                answer.set_result(message["answer"])
            return
        handler = self._handlers.get(_message_kind(message))
        if handler is None:
            raise WireError("what", f"{message['what'][:60]!r} is not a known kind of message")
        task = asyncio.get_running_loop().create_task(self._run_handler(handler, message.get("value"), key))
        self._handler_tasks.add(task)
        task.add_done_callback(self._handler_tasks.discard)

    async def _run_handler(self, handler: Handler, value: Any, key: Any) -> None:
        try:
            value = await handler(value)
        except Exception as error:  # the other side's request has a timeout
            log.error("a request of another frontend failed", exc_info=error)
            return
        if key is not None:
            with suppress(ConnectionError):
                self._send({"answer": value, "key": key})
