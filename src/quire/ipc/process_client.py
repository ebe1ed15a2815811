"""The client of an engine in another process: start it, talk to it over an unnamed socket and an event loop, and give
it up when it is dead or silent."""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from quire.errors import EngineDead, StartupError
from quire.ipc import frames
from quire.ipc.channel import READ_SIZE, Channel
from quire.ipc.child_process import ChildProcess
from quire.ipc.handshake import EngineInitMessage, read_first_frames, read_heartbeat, write_engine_init
from quire.ipc.heartbeat import SILENCE_SECONDS, Health
from quire.ipc.messages import (
    AddRequests,
    ClientMessage,
    EngineExited,
    EngineMessage,
    EngineMetrics,
    EngineReady,
    HandoverCounts,
    ImportPages,
    PageImport,
    QueueSizes,
    StepOutputs,
)
from quire.protocol.columns import WireError
from quire.protocol.shared_host import SharedHostMemory

PING_INTERVAL = 0.5  # seconds between two requests for the heartbeat
HANG_SECONDS = 30.0  # seconds of silence after which the engine is given up
log = logging.getLogger("quire.ipc")


class ProcessEngineClient:
    """A connection to the engine of `child`. `ready` is set once `wait_ready` has returned."""

    is_in_process, engine, handover_counts, page_source = False, None, HandoverCounts(), None
    ready: EngineReady

    def __init__(self, child: ChildProcess, client_index: int = 0) -> None:
        self.child = child
        self._connection = child.connections[client_index]
        self._channel, self._frames = Channel(self._connection, "the engine's process"), frames.FrameCodec()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._unanswered, self._silence_logged = 0, False
        self._health = Health(True, False, time.monotonic(), "")
        self._ended = self._replacement_cancelled = False
        self._replacement: ProcessEngineClient | None = None
        self.queue_sizes = QueueSizes()  # after the last step
        self.metrics: EngineMetrics  # the latest
        self._init_message: EngineInitMessage
        self._early_frames: list[frames.Frame] = []  # received together with the first
        self._receive: Callable[[EngineMessage], None]

    def send_init(self, message: EngineInitMessage) -> None:
        """Send what is to be built."""
        self._init_message = message
        self._channel.send(frames.INIT, write_engine_init(message))

    def wait_ready(self) -> None:
        """Wait until the engine is built. Raise StartupError if it can't be, or if its process ends."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        received: list[frames.Frame] = []
        try:
            while not received:
                poll.poll()
                data = self._connection.recv(READ_SIZE)
                if not data:
                    raise EOFError
                received += self._frames.decode(data)
            self.ready, self._early_frames = read_first_frames(received)
            self.metrics = self.ready.facts
        except (EOFError, OSError) as error:
            remedy = "What it wrote to the log says why; SIGKILL ends those that take too much memory, say"
            raise StartupError(f"the engine's process {self.child.describe_exit(5.0)} at start", remedy) from error
        except WireError as error:
            raise StartupError(f"the engine's process sent what is no frame at start: {error}") from error

    def start(self, receive: Callable[[EngineMessage], None]) -> None:
        """Pass the engine's messages to `receive`, on the event loop on which `attach_event_loop` is called first."""
        self._receive = receive
        for frame in self._early_frames:
            self._handle_frame(frame)
        self._early_frames.clear()

    def attach_event_loop(self) -> None:
        """Read the connection on the running event loop, unless an open loop reads it already."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._ended or self._loop is loop or (self._loop is not None and not self._loop.is_closed()):
                return
            self._loop = loop
        loop.add_reader(self._connection.fileno(), self._readable)
        self._unanswered = 0
        self._ping()

    def send(self, message: ClientMessage) -> bool:
        """Send a message, from any thread. Return False if the engine takes no more."""
        return self._channel.send(*frames.write_client_message(message))

    def add_requests(self, message: AddRequests, imports: Sequence[PageImport]) -> bool:
        """Send requests after the pages that they need."""
        for one in imports:
            self.send(ImportPages(one.key, one.handover.pages))
        return self.send(message)

    def forget(self, number: int) -> int:
        """Return 0, the index of the engine, which knows which requests have ended."""
        return 0

    @property
    def shared_host(self) -> SharedHostMemory | None:
        """The host memory that the engine shares with others."""
        return self._init_message.shared_host

    @property
    def replicas(self) -> tuple[ProcessEngineClient]:
        """The client itself: there is one engine."""
        return (self,)

    def health(self) -> Health:
        """Return the health that the engine's process reported last, or a stall if the process is silent."""
        if self._ended:
            return Health(False, False, self._health.beat, "it has ended")
        silent_seconds = (self._unanswered - 1) * PING_INTERVAL
        if silent_seconds >= SILENCE_SECONDS:
            return Health(
                True, True, self._health.beat, f"its process has not been heard of for {silent_seconds:.0f} s"
            )
        return self._health

    def start_replacement(self) -> ProcessEngineClient:
        """Start a new process with the same engine, once this one has ended, and return its client when it is built.
        Raise StartupError if it can't be, or if `cancel_replacement` is called meanwhile."""
        self.child.wait_or_kill(SILENCE_SECONDS)
        self._replacement = replacement = ProcessEngineClient(self.child.start_again())
        try:
            if not self._replacement_cancelled:  # a cancelled one is not waited for
                replacement.send_init(self._init_message)
                replacement.wait_ready()
            if self._replacement_cancelled:
                raise StartupError("the engine's replacement was cancelled")
        except BaseException:
            replacement.close(0.0)
            raise
        return replacement

    def cancel_replacement(self) -> None:
        """End `start_replacement`, from another thread: its engine is no longer needed."""
        self._replacement_cancelled = True
        if self._replacement is not None:
            self._replacement.close(0.0)

    def close(self, timeout: float) -> bool:
        """End the process. Return True if it ended by itself within `timeout` seconds."""
        if not self._ended:
            self._disconnect(1.0)
        return self.child.wait_or_kill(timeout)

    def give_up(self, error: BaseException) -> None:
        """Leave the engine for an error elsewhere that ends the server. Called on the event loop."""
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

    def _handle_frame(self, frame: frames.Frame) -> None:
        if frame.kind == frames.PONG:
            if self._silence_logged:
                log.warning("the engine's process is heard of again")
            self._unanswered, self._silence_logged = 0, False
            self._health = read_heartbeat(frame.body, time.monotonic())
            return
        message = frames.read_engine_message(frame)
        if isinstance(message, StepOutputs):
            self.queue_sizes = message.queues
            self.metrics = message.facts or self.metrics
        if isinstance(message, EngineExited):
            self._fail(message.error)
        else:
            self._receive(message)

    def _ping(self) -> None:
        """Ask for the heartbeat. Silence is counted in unanswered requests, not by the clock, so a client that was
        itself stopped does not give up the engine."""
        if self._ended or self._loop is None:
            return
        silent_seconds = self._unanswered * PING_INTERVAL
        if silent_seconds >= SILENCE_SECONDS and not self._silence_logged:
            self._silence_logged = True
            log.error("the engine's process has not been heard of for %g s", silent_seconds)
        if silent_seconds >= SILENCE_SECONDS and self.child.is_stopped():
            self._fail(EngineDead(f"its process was stopped (SIGSTOP) and is given up after {silent_seconds:g} s"))
            return
        if silent_seconds >= HANG_SECONDS:
            self._fail(EngineDead(f"its process has not been heard of for {silent_seconds:g} s and is given up"))
            return
        self._unanswered += 1
        self._channel.send(frames.PING, b"")
        self._loop.call_later(PING_INTERVAL, self._ping)

    def _fail(self, error: BaseException) -> None:
        """Leave the engine, and report `error` as its end."""
        if not self._ended:
            self._disconnect()
            if not self.child.has_exited():
                threading.Thread(
                    target=self.child.wait_or_kill, args=(SILENCE_SECONDS,), name="quire-reap", daemon=True
                ).start()
            self._receive(EngineExited(error))

    def _disconnect(self, timeout: float = 0.0) -> None:
        """Close the connection, after sending what is queued for up to `timeout` seconds."""
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
