"""One side of a connection between a front and an engine's process: sends frames from any thread, never waiting.

What the socket doesn't take at once is sent by a thread of the channel's own, and bounded: a reader that is stuck holds
nobody up, and once too much waits for it the channel is closed.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from quire.ipc.frames import FrameCodec

READ_SIZE = 1 << 18  # bytes that are read at once
MAX_QUEUED_BYTES = 1 << 28  # bytes that wait for the other side
log = logging.getLogger("quire.ipc")


class Channel:
    """Sends on `connection`, whose other side is called `name` in the log. Reading is the owner's. `on_drained` is
    called, on the channel's thread, whenever nothing waits any more."""

    def __init__(self, connection: socket.socket, name: str, on_drained: Callable[[], None] | None = None) -> None:
        self.connection, self.name, self._on_drained = connection, name, on_drained
        self._frames = FrameCodec()
        self._lock = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0  # bytes
        self._open = True
        self._sender: threading.Thread | None = None

    def send(self, kind: int, body: bytes) -> bool:
        """Send a frame, or have it sent; False once the channel is closed."""
        with self._lock:
            if not self._open:
                return False
            frame = self._frames.encode(kind, body)
            sent = 0 if self._queue else self._try_send(frame)
            if sent < len(frame):
                self._enqueue(frame[sent:])
            return self._open

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for the other side."""
        return self._queued_bytes

    def close(self, timeout: float = 1.0) -> None:
        """Send what waits, for so many seconds at the most, then nothing more."""
        with self._lock:
            self._lock.wait_for(lambda: not (self._queue and self._open), timeout)
            self._shut_down()

    def _try_send(self, frame: bytes) -> int:
        try:
            return self.connection.send(frame, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # the other side is gone: whoever reads hears of it
            self._shut_down()
            return len(frame)

    def _enqueue(self, rest: bytes) -> None:
        if self._queued_bytes + len(rest) > MAX_QUEUED_BYTES:
            log.error("%s doesn't read what it is sent: %d bytes wait for it, at most %d may; it is left alone",
                      self.name, self._queued_bytes, MAX_QUEUED_BYTES)  # fmt: skip
            self._shut_down()
            return
        self._queue.append(rest)
        self._queued_bytes += len(rest)
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_loop, name="quire-link", daemon=True)
            self._sender.start()
        self._lock.notify_all()

    def _send_loop(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._queue or not self._open)
                if not self._open:
                    return
                rest = self._queue[0]
            try:
                self.connection.sendall(rest)
            except OSError:
                with self._lock:
                    self._shut_down()
                return
            with self._lock:
                if not self._open:
                    return
                self._queue.popleft()
                self._queued_bytes -= len(rest)
                drained = None if self._queue else self._on_drained
                self._lock.notify_all()
            if drained is not None:
                drained()

    def _shut_down(self) -> None:
        self._open = False
        self._queue.clear()
        self._queued_bytes = 0
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self._lock.notify_all()
