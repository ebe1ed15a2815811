"""One end of a connection between a client and the engine's process. It sends frames from any thread without waiting.

A thread of the channel sends what the socket does not take at once. The queue is bounded: a reader that hangs does not
block the sender, and a full queue closes the channel."""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from quire.ipc.frames import FrameCodec

READ_SIZE = 1 << 18  # bytes of one read
MAX_QUEUED_BYTES = 1 << 28  # bytes that may wait to be sent
log = logging.getLogger("quire.ipc")


class Channel:
    """Sends on `connection`; `name` names the other end in the log. The owner reads from the connection. `on_drained`
    is called on the channel's thread whenever the queue has become empty."""

    def __init__(self, connection: socket.socket, name: str, on_drained: Callable[[], None] | None = None) -> None:
        self.connection, self.name, self._on_drained = connection, name, on_drained
        self._frames = FrameCodec()
        self._lock = threading.Condition()
        self._queue: deque[bytes] = deque()
        self.queued_bytes = 0  # that wait to be sent
        self._open = True
        self._sender: threading.Thread | None = None

    def send(self, kind: int, body: bytes) -> bool:
        """Send or queue a frame. Return False if the channel is closed."""
        with self._lock:
            if not self._open:
                return False
            frame = self._frames.encode(kind, body)
            sent = 0 if self._queue else self._try_send(frame)
            if sent < len(frame):
                self._enqueue(frame[sent:])
            return self._open

    def close(self, timeout: float = 1.0) -> None:
        """Send what is queued, for at most `timeout` seconds, then close the connection."""
        with self._lock:
            self._lock.wait_for(lambda: not (self._queue and self._open), timeout)
            self._shut_down()

    def _try_send(self, frame: bytes) -> int:
        try:
            return self.connection.send(frame, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # the other end is gone: the reader gets an EOF
            self._shut_down()
            return len(frame)

    def _enqueue(self, rest: bytes) -> None:
        if self.queued_bytes + len(rest) > MAX_QUEUED_BYTES:
            log.error("%s does not read: %d bytes wait for it, at most %d may; its connection is closed",
                      self.name, self.queued_bytes, MAX_QUEUED_BYTES)  # fmt: skip
            self._shut_down()
            return
        self._queue.append(rest)
        self.queued_bytes += len(rest)
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
                self.queued_bytes -= len(rest)
                drained = None if self._queue else self._on_drained
                self._lock.notify_all()
            if drained is not None:
                drained()

    def _shut_down(self) -> None:
        self._open = False
        self._queue.clear()
        self.queued_bytes = 0
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self._lock.notify_all()
