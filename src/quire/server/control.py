"""What two fronts of one server ask each other, over a socket without a name: frames of a length and JSON. Knows no
fronts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from quire.text.frames import HEADER, pack, unpack
from quire.vocabulary.columns import WireError

MOST = 1 << 23  # bytes of a frame
UNSENT = 1 << 24  # bytes that may wait for the other side: then it is asked no more
log = logging.getLogger("quire.server")

Handler = Callable[[Any], Awaitable[Any]]


def tell(connection: socket.socket, what: str, value: Any) -> None:
    """Before there is an event loop: say something. OSError when the other side is gone."""
    connection.sendall(_frame({"what": what, "value": value}))


def hear(connection: socket.socket) -> tuple[str, Any]:
    """Before there is an event loop: wait for what the other side says. EOFError when it is gone."""
    said = _read(_exactly(connection, _length(_exactly(connection, HEADER))))
    return _what(said), said.get("value")


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        data = connection.recv(size - len(found))
        if not data:
            raise EOFError
        found += data
    return found


def _frame(value: dict[str, Any]) -> bytes:
    frame = pack(value)
    if len(frame) - HEADER > MOST:
        raise WireError("frame", f"{len(frame) - HEADER} bytes, at most {MOST} are sent")
    return frame


def _length(head: bytes) -> int:
    length = int.from_bytes(head, "big")
    if length > MOST:
        raise WireError("length", f"{length} bytes are announced, at most {MOST} are read")
    return length


def _read(body: bytes) -> dict[str, Any]:
    try:
        said = unpack(body)
    except (ValueError, RecursionError) as error:
        raise WireError("frame", f"no JSON: {str(error)[:200]}") from error
    if not isinstance(said, dict):
        raise WireError("frame", f"a {type(said).__name__}, no object")
    return said


def _what(said: Mapping[str, Any]) -> str:
    what = said.get("what")
    if not isinstance(what, str):
        raise WireError("what", f"a {type(what).__name__}, no text")
    return what


class Control:
    """One side of `connection`, on an event loop. `handlers` answer what the other side asks, by name; what they are
    given and what they return is JSON."""

    def __init__(self, connection: socket.socket, handlers: Mapping[str, Handler]) -> None:
        self._connection, self._handlers = connection, handlers
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._keys = itertools.count()
        self._answering: set[asyncio.Task[None]] = set()
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> None:
        """Have the connection on the running loop. Nothing is read yet."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)

    async def serve(self) -> None:
        """Answer, until the other side is gone or says what is no frame."""
        try:
            while True:
                length = _length(await self._reader.readexactly(HEADER))
                self._take(_read(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        except WireError as error:
            log.error("another front sent what is no frame: %s", error)
        finally:
            self._writer.close()
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(ConnectionResetError("the other front is gone"))
            self._asked.clear()

    def say(self, what: str, value: Any = None) -> None:
        """Tell something that needs no answer."""
        self._send({"what": what, "value": value})

    async def ask(self, what: str, value: Any, seconds: float) -> Any:
        """What the other side answers. TimeoutError after so many seconds, ConnectionError when it is gone."""
        key = next(self._keys)
        answer = self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            self._send({"what": what, "value": value, "key": key})
            return await asyncio.wait_for(answer, seconds)
        finally:
            self._asked.pop(key, None)

    def _send(self, said: dict[str, Any]) -> None:
        if self._writer.is_closing():
            raise ConnectionResetError("the other front is gone")
        if self._writer.transport.get_write_buffer_size() < UNSENT:
            self._writer.write(_frame(said))

    def _take(self, said: dict[str, Any]) -> None:
        key = said.get("key")
        if "answer" in said:
            answer = self._asked.get(key) if isinstance(key, int) else None
            if answer is not None and not answer.done():
                answer.set_result(said["answer"])
            return
        handler = self._handlers.get(_what(said))
        if handler is None:
            raise WireError("what", f"{said['what'][:60]!r} is nothing that is asked")
        task = asyncio.get_running_loop().create_task(self._answer(handler, said.get("value"), key))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, handler: Handler, value: Any, key: Any) -> None:
        try:
            value = await handler(value)
        except Exception as error:  # whoever asked doesn't wait for ever
            log.error("what another front asked failed", exc_info=error)
            return
        if key is not None:
            with suppress(ConnectionError):
                self._send({"answer": value, "key": key})
