"""The engine in a process of its own, as a front has it: started, spoken to over a socket without a name, listened to
on an event loop, and given up when it is dead or silent.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from quire.errors import EngineDead, StartupError
from quire.ipc.channel import READ_SIZE, Channel
from quire.ipc.child_process import ChildProcess
from quire.ipc.frames import (
    INIT,
    PING,
    PONG,
    READY,
    START_FAILED,
    Frame,
    FrameCodec,
    read_engine_message,
    write_client_message,
)
from quire.ipc.handshake import EngineInitMessage, read_heartbeat, read_ready, read_start_failure, write_engine_init
from quire.ipc.heartbeat import SILENCE_SECONDS, Health
from quire.ipc.messages import (
    ClientMessage,
    EngineExited,
    EngineMessage,
    EngineMetrics,
    EngineReady,
    QueueSizes,
    StepOutputs,
)
from quire.protocol.columns import WireError

PING_INTERVAL = 0.5  # seconds between two questions for the engine's pulse
HANG_SECONDS = 30.0  # seconds without an answer after which it is given up
log = logging.getLogger("quire.ipc")


class ProcessEngineClient:
    """A link to the engine of `child`, whose model is known to be `ready` once `wait_ready` returned."""

    is_in_process, engine = False, None
    ready: EngineReady

    def __init__(self, child: ChildProcess, client_index: int = 0) -> None:
        self.child = child
        self._connection = child.connections[client_index]
        self._channel, self._frames = Channel(self._connection, "the engine's process"), FrameCodec()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._unanswered, self._silence_logged = 0, False
        self._health = Health(True, False, time.monotonic(), "")
        self._ended = self._replacement_cancelled = False
        self._replacement: ProcessEngineClient | None = None
        self._queue_sizes = QueueSizes()
        self._metrics: EngineMetrics
        self._init_message: EngineInitMessage
        self._early_frames: list[Frame] = []  # what came right behind the first
        self._receive: Callable[[EngineMessage], None]

    def send_init(self, message: EngineInitMessage) -> None:
        """Say what is to be built."""
        self._init_message = message
        self._channel.send(INIT, write_engine_init(message))

    def wait_ready(self) -> None:
        """Wait until the engine is built. StartupError if it can't be, or its process ends."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        frames: list[Frame] = []
        try:
            while not frames:
                poll.poll()
                data = self._connection.recv(READ_SIZE)
                if not data:
                    raise EOFError
                frames += self._frames.decode(data)
            frame, *self._early_frames = frames
            if frame.kind == START_FAILED:
                raise read_start_failure(frame)
            if frame.kind != READY:
                raise WireError("kind", f"{frame.kind} comes before the engine is ready")
            self.ready = read_ready(frame.body)
            self._metrics = self.ready.facts
        except (EOFError, OSError) as error:
            remedy = "What it wrote to the log says why; SIGKILL ends those that take too much memory, say"
            raise StartupError(f"the engine's process {self.child.describe_exit(5.0)} at start", remedy) from error
        except WireError as error:
            raise StartupError(f"the engine's process sent what is no frame at start: {error}") from error

    def start(self, receive: Callable[[EngineMessage], None]) -> None:
        """What the engine tells goes to `receive`, on the event loop that `attach_event_loop` was first called on."""
        self._receive = receive
        for frame in self._early_frames:
            self._handle_frame(frame)
        self._early_frames.clear()

    def attach_event_loop(self) -> None:
        """Listen on the running event loop, unless another one does."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._ended or self._loop is loop or (self._loop is not None and not self._loop.is_closed()):
                return
            self._loop = loop
        loop.add_reader(self._connection.fileno(), self._readable)
        self._unanswered = 0
        self._ping()

    def send(self, message: ClientMessage) -> bool:
        """Send a message, from any thread; False when the engine takes no more."""
        return self._channel.send(*write_client_message(message))

    @property
    def queue_sizes(self) -> QueueSizes:
        """As they were after the last step."""
        return self._queue_sizes

    @property
    def metrics(self) -> EngineMetrics:
        """As they were lately."""
        return self._metrics

    def health(self) -> Health:
        """Whether the engine's loop turns, as its process says, and whether that says anything."""
        silent = (self._unanswered - 1) * PING_INTERVAL
        if silent >= SILENCE_SECONDS:
            return Health(True, True, self._health.beat, f"its process has not been heard of for {silent:.0f} s")
        return self._health

    def start_replacement(self) -> ProcessEngineClient:
        """Such an engine in another process, once this one is gone; returns when it is built. StartupError if it can't
        be, or if `cancel_replacement` is called meanwhile."""
        self.child.wait_or_kill(SILENCE_SECONDS)
        self._replacement = link = ProcessEngineClient(ChildProcess(1, self.child.program))
        try:
            if not self._replacement_cancelled:  # else there is nothing to wait for
                link.send_init(self._init_message)
                link.wait_ready()
            if self._replacement_cancelled:
                raise StartupError("the engine isn't wanted any more")
        except BaseException:
            link.close(0.0)
            raise
        return link

    def cancel_replacement(self) -> None:
        """From another thread: no engine is wanted any more of `start_replacement`."""
        self._replacement_cancelled = True
        if self._replacement is not None:
            self._replacement.close(0.0)

    def close(self, timeout: float) -> bool:
        """End the process. Returns whether it ended by itself, within `timeout` seconds."""
        if not self._ended:
            self._disconnect(1.0)
        return self.child.wait_or_kill(timeout)

    def give_up(self, error: BaseException) -> None:
        """On the event loop: the engine is left, for something else that ends the server."""
        self._fail(error)

    # On the event loop

    def _readable(self) -> None:
        try:
            data = self._connection.recv(READ_SIZE, socket.MSG_DONTWAIT)
            if not data:
                raise EOFError
            for frame in self._frames.decode(data):
                self._handle_frame(frame)
        except (BlockingIOError, InterruptedError):
            return
        except (EOFError, OSError):
            if self._ended:
                return
            self._fail(EngineDead(f"its process {self.child.describe_exit()}"))
        except WireError as error:
            self._fail(EngineDead(f"its process sent what is no frame: {error}"))

    def _handle_frame(self, frame: Frame) -> None:
        if frame.kind == PONG:
            if self._silence_logged:
                log.warning("the engine's process is heard of again")
            self._unanswered, self._silence_logged = 0, False
            self._health = read_heartbeat(frame.body, time.monotonic())
            return
        message = read_engine_message(frame)
        if isinstance(message, StepOutputs):
            self._queue_sizes = message.queues
            self._metrics = message.facts or self._metrics
        if isinstance(message, EngineExited):
            self._fail(message.error)
        else:
            self._receive(message)

    def _ping(self) -> None:
        """Ask for the pulse. Silence is counted in questions, so that whoever was stopped itself blames nobody."""
        if self._ended or self._loop is None:
            return
        silent = self._unanswered * PING_INTERVAL
        if silent >= SILENCE_SECONDS and not self._silence_logged:
            self._silence_logged = True
            log.error("the engine's process has not been heard of for %g s", silent)
        if silent >= SILENCE_SECONDS and self.child.is_stopped():
            self._fail(EngineDead(f"its process was stopped (SIGSTOP) and is given up after {silent:g} s"))
            return
        if silent >= HANG_SECONDS:
            self._fail(EngineDead(f"its process has not been heard of for {silent:g} s and is given up"))
            return
        self._unanswered += 1
        self._channel.send(PING, b"")
        self._loop.call_later(PING_INTERVAL, self._ping)

    def _fail(self, error: BaseException) -> None:
        """Nothing more will be said or heard."""
        if not self._ended:
            self._disconnect()
            if not self.child.has_exited():
                threading.Thread(
                    target=self.child.wait_or_kill, args=(SILENCE_SECONDS,), name="quire-reap", daemon=True
                ).start()
            self._receive(EngineExited(error))

    def _disconnect(self, timeout: float = 0.0) -> None:
        """Let go of the connection; what waits to be sent has so many seconds."""
        self._ended = True
        self._channel.close(timeout)
        loop = self._loop
        if loop is None or loop.is_closed() or asyncio._get_running_loop() is loop:
            self._close_connection()
        else:
            with suppress(RuntimeError):  # closed meanwhile
                loop.call_soon_threadsafe(self._close_connection)

    def _close_connection(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection.fileno())
        self._connection.close()
