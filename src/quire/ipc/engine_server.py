"""The engine's process: builds what it is told to, then serves the fronts at the other ends of its connections until
none is left. Started by quire.ipc.process_client, over sockets that have no name: nobody else can reach them.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.core.engine import Engine
from quire.errors import InputError, StartupError
from quire.ipc.channel import MAX_QUEUED_BYTES, READ_SIZE, Channel
from quire.ipc.child_process import ignore_signals
from quire.ipc.engine_loop import ClientLeft, EngineLoop
from quire.ipc.frames import (
    INIT,
    PING,
    PONG,
    READY,
    START_FAILED,
    Frame,
    FrameCodec,
    error_to_json,
    read_add_key,
    read_client_message,
    write_engine_message,
    write_json,
)
from quire.ipc.garbage_collection import freeze_loaded_objects
from quire.ipc.grammar_queue import GrammarQueue
from quire.ipc.handshake import EngineInitMessage, read_engine_init, write_heartbeat, write_ready
from quire.ipc.heartbeat import SILENCE_SECONDS
from quire.ipc.messages import EngineExited, EngineMessage, EngineReady, Reply, StepOutputs
from quire.ipc.output_buffer import OutputBuffer
from quire.ipc.thread_stacks import format_thread_stacks
from quire.protocol.columns import WireError

if TYPE_CHECKING:
    pass

LAG_BYTES = 1 << 22  # bytes that wait for a front: from then on its outputs are merged, until none wait
END_SECONDS = 20.0  # for the end once no front is left; then it is forced
log = logging.getLogger("quire.ipc")
EngineBuilder = Callable[[EngineInitMessage], tuple[Engine, EngineReady]]


class ClientConnection:
    """A front, as the engine's process has it: a thread reads what it sends."""

    def __init__(self, client_index: int, connection: socket.socket) -> None:
        self.client_index, self.connection = client_index, connection
        self.channel = Channel(connection, f"front {client_index}", self._flush_output_buffer)
        self.frames = FrameCodec()
        self._send_lock, self._output_buffer = threading.Lock(), OutputBuffer()
        self._unread_frames: list[Frame] = []
        self._has_pinged = self._silence_logged = False

    def read_frame(self, timeout: float | None = None) -> Frame | None:
        """The next frame; None when there is none after `timeout` seconds. EOFError when the front is gone."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        while not self._unread_frames:
            if not poll.poll(None if timeout is None else timeout * 1000):
                return None
            data = self.connection.recv(READ_SIZE)
            if not data:
                raise EOFError
            self._unread_frames += self.frames.decode(data)
            self._unread_frames.reverse()
        return self._unread_frames.pop()

    def serve(self, engine_loop: EngineLoop) -> None:
        """Hand what the front sends to `engine_loop`, until the front is gone."""
        lane = GrammarQueue(self.client_index, engine_loop, self.send)
        try:
            while True:
                frame = self.read_frame(SILENCE_SECONDS)
                if frame is None:
                    self._log_silence()
                elif frame.kind == PING:
                    self._handle_ping(engine_loop)
                else:
                    self._handle_frame(lane, frame)
        except (EOFError, ConnectionError):
            pass
        except Exception as error:
            known = isinstance(error, OSError | WireError)
            log.error("front %d is left: %s", self.client_index, error, exc_info=None if known else error)
        finally:
            self.channel.close(0)
            lane.close()
            engine_loop.enqueue(self.client_index, ClientLeft())

    def _handle_frame(self, lane: GrammarQueue, frame: Frame) -> None:
        try:
            lane.submit(read_client_message(frame))
        except InputError as error:  # of parameters that no honest front sends
            self.send(Reply(read_add_key(frame), error))

    def _handle_ping(self, host: EngineLoop) -> None:
        if self._silence_logged:
            log.warning("front %d is heard of again", self.client_index)
        self._has_pinged, self._silence_logged = True, False
        self.channel.send(PONG, write_heartbeat(host.health(), time.monotonic()))

    def _log_silence(self) -> None:
        if self._has_pinged and not self._silence_logged:
            self._silence_logged = True
            log.error("front %d has not been heard of for %g s", self.client_index, SILENCE_SECONDS)

    def send(self, message: EngineMessage) -> None:
        """Send a message, or merge it with what waits for a front that lags. One that is too large, or more than may
        wait, ends the connection, not the engine."""
        with self._send_lock:
            rest: EngineMessage | None = message
            if isinstance(message, StepOutputs) and (self._output_buffer or self.channel.queued_bytes > LAG_BYTES):
                if not self._output_buffer:
                    log.warning("front %d lags: %d bytes wait for it, and outputs to come are put together",
                    self.client_index,
                                self.channel.queued_bytes)  # fmt: skip
                rest = self._output_buffer.add(message)
                if self._output_buffer.held_bytes > MAX_QUEUED_BYTES:
                    log.error("front %d is left: more waits for it than %d bytes", self.client_index, MAX_QUEUED_BYTES)
                    self.channel.close(0)
                    self._output_buffer = OutputBuffer()
            elif isinstance(message, EngineExited):
                self._write_messages(*self._output_buffer.drain())
            if rest is not None:
                self._write_messages(rest)

    def _flush_output_buffer(self) -> None:
        """On the channel's thread: nothing waits but the backlog."""
        with self._send_lock:
            self._write_messages(*self._output_buffer.drain())

    def _write_messages(self, *messages: EngineMessage) -> None:
        try:
            for message in messages:
                self.channel.send(*write_engine_message(message))
        except WireError as error:
            log.error("front %d is left, as it can't be told: %s", self.client_index, error)
            self.channel.close(0)


def log_stalls(engine_loop: EngineLoop) -> None:
    """Say once, with all stacks, that the loop stalled, and that it moves on if it does."""
    stalled = False
    while True:
        time.sleep(0.5)
        health = engine_loop.health()
        if health.stalled and not stalled:
            log.error("the engine stalled: %s; all threads of its process:\n%s", health.why, format_thread_stacks())
        elif stalled and not health.stalled:
            log.warning("the engine moves on")
        stalled = health.stalled


def serve_clients(build: EngineBuilder, connections: list[socket.socket]) -> int:
    """Serve fronts over `connections`, of which the first says what to build. The exit status."""
    ignore_signals()
    sides = [ClientConnection(front, connection) for front, connection in enumerate(connections)]
    try:
        frame = sides[0].read_frame()
        assert frame is not None, "without a timeout"
        if frame.kind != INIT:
            raise WireError("kind", f"{frame.kind} comes before a hello")
        hello = read_engine_init(frame.body)
    except (EOFError, OSError):
        return 1
    logging.getLogger().setLevel(hello.log_level)
    building = threading.Event()
    threading.Thread(
        target=_exit_with_client, args=(connections[0], building), name="quire-parent", daemon=True
    ).start()
    try:
        engine, ready = build(hello)
        building.set()
    except BaseException as error:  # a library may end the thread too, by SystemExit
        sides[0].channel.send(START_FAILED, write_json(error_to_json(_to_startup_error(error))))
        sides[0].channel.close()
        return 1
    host = EngineLoop(engine, lambda front, message: sides[front].send(message), hello.stall_after, time.process_time)
    host.client_indices = list(range(len(sides)))
    freeze_loaded_objects()
    readers = []
    for side in sides:
        side.channel.send(READY, write_ready(ready))
        readers.append(
            threading.Thread(target=side.serve, args=(host,), name=f"quire-front-{side.client_index}", daemon=True)
        )
        readers[-1].start()
    threading.Thread(target=_exit_after_clients, args=(readers,), name="quire-end", daemon=True).start()
    threading.Thread(target=log_stalls, args=(host,), name="quire-watch", daemon=True).start()
    ended = host.run()
    for side in sides:
        side.channel.close()
    if ended is not None:
        log.error("the engine stopped: %s", ended or type(ended).__name__, exc_info=ended)
    return 1 if ended is not None else 0


def _to_startup_error(error: BaseException) -> StartupError:
    """Why nothing was built, for who waits. What nobody foresaw is in the log with its traceback."""
    if isinstance(error, StartupError):
        return error
    log.error("the engine can't be built", exc_info=error)
    said = next(iter(str(error).splitlines()), "")
    cause = f"the engine's process failed at start: {type(error).__name__}{': ' * bool(said)}{said}"[:300]
    return StartupError(cause, "What it wrote to the log says more")


def _exit_with_client(connection: socket.socket, built: threading.Event) -> None:
    """While the model loads: the process ends with its front, which may be killed meanwhile."""
    poll = select.poll()
    poll.register(connection, getattr(select, "POLLRDHUP", select.POLLHUP))
    while not built.is_set():
        if poll.poll(200) and not built.is_set():
            os._exit(1)


def _exit_after_clients(readers: list[threading.Thread]) -> None:
    """Once no front is left the process ends, also when a step hangs."""
    for reader in readers:
        reader.join()
    faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=sys.__stderr__ or sys.stderr)
