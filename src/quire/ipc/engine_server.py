"""The server side of the engine's process: one thread for each client reads its messages for the EngineLoop, until no
client is left. The connections are unnamed sockets, so no other process can reach them."""

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

from quire.core.engine import Engine
from quire.errors import InputError, StartupError
from quire.ipc import frames
from quire.ipc.channel import MAX_QUEUED_BYTES, READ_SIZE, Channel
from quire.ipc.child_process import ignore_signals
from quire.ipc.engine_loop import ClientLeft, EngineLoop
from quire.ipc.garbage_collection import freeze_loaded_objects
from quire.ipc.grammar_queue import GrammarQueue
from quire.ipc.handshake import EngineInitMessage, read_engine_init, write_heartbeat, write_ready
from quire.ipc.heartbeat import SILENCE_SECONDS
from quire.ipc.kv_events import KVEventPublisher
from quire.ipc.messages import EngineExited, EngineMessage, EngineReady, Reply, StepOutputs
from quire.ipc.output_buffer import OutputBuffer
from quire.ipc.thread_stacks import format_thread_stacks
from quire.protocol.columns import WireError
from quire.protocol.structured_output import GrammarCompiler

LAG_BYTES = 1 << 22  # bytes queued for a client from which on its outputs are merged, until the queue is empty
END_SECONDS = 20.0  # seconds to end after the last client left, then the end is forced
log = logging.getLogger("quire.ipc")
EngineBuilder = Callable[[EngineInitMessage], tuple[Engine, EngineReady, GrammarCompiler | None]]
"""Builds an engine. Without a grammar compiler it accepts no structured output."""


class ClientConnection:
    """A client's connection in the engine's process."""

    def __init__(self, client_index: int, connection: socket.socket) -> None:
        self.client_index, self.connection = client_index, connection
        self.channel = Channel(connection, f"the engine's client {client_index}", self._flush_output_buffer)
        self.frames = frames.FrameCodec()
        self._send_lock, self._output_buffer = threading.Lock(), OutputBuffer()
        self._unread_frames: list[frames.Frame] = []
        self._has_pinged = self._silence_logged = False

    def read_frame(self, timeout: float | None = None) -> frames.Frame | None:
        """Return the next frame, or None if there is none within `timeout` seconds. Raise EOFError if the client has
        left."""
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

    def serve(self, engine_loop: EngineLoop, grammar_compiler: GrammarCompiler | None) -> None:
        """Pass the client's messages to `engine_loop` until the client leaves. Runs on a thread of its own."""
        queue = GrammarQueue(self.client_index, engine_loop, grammar_compiler, self.send)
        try:
            while True:
                frame = self.read_frame(SILENCE_SECONDS)
                if frame is None:
                    self._log_silence()
                elif frame.kind == frames.PING:
                    self._handle_ping(engine_loop)
                else:
                    self._handle_frame(queue, frame)
        except (EOFError, ConnectionError):
            pass
        except Exception as error:
            known = isinstance(error, OSError | WireError)
            log.error(
                "the engine's client %d is disconnected: %s",
                self.client_index,
                error,
                exc_info=None if known else error,
            )
        finally:
            self.channel.close(0)
            queue.close()
            engine_loop.enqueue(self.client_index, ClientLeft())

    def _handle_frame(self, queue: GrammarQueue, frame: frames.Frame) -> None:
        try:
            queue.submit(frames.read_client_message(frame))
        except InputError as error:  # parameters that a correct client never sends
            self.send(Reply(frames.read_add_key(frame), error))

    def _handle_ping(self, host: EngineLoop) -> None:
        if self._silence_logged:
            log.warning("the engine's client %d is heard of again", self.client_index)
        self._has_pinged, self._silence_logged = True, False
        self.channel.send(frames.PONG, write_heartbeat(host.health(), time.monotonic()))

    def _log_silence(self) -> None:
        if self._has_pinged and not self._silence_logged:
            self._silence_logged = True
            log.error("the engine's client %d has not been heard of for %g s", self.client_index, SILENCE_SECONDS)

    def send(self, message: EngineMessage) -> None:
        """Send a message, or merge it with the outputs that a slow client has yet to get. A message that is too large,
        or too much queued output, ends the connection, not the engine."""
        with self._send_lock:
            rest: EngineMessage | None = message
            if isinstance(message, StepOutputs) and (self._output_buffer or self.channel.queued_bytes > LAG_BYTES):
                if not self._output_buffer:
                    log.warning(
                        "the engine's client %d lags: %d bytes wait for it; its outputs are merged until it catches up",
                        self.client_index,
                        self.channel.queued_bytes,
                    )
                rest = self._output_buffer.add(message)
                if self._output_buffer.held_bytes > MAX_QUEUED_BYTES:
                    log.error(
                        "the engine's client %d is disconnected: more than %d bytes wait for it",
                        self.client_index,
                        MAX_QUEUED_BYTES,
                    )
                    self.channel.close(0)
                    self._output_buffer = OutputBuffer()
            elif isinstance(message, EngineExited):
                self._write_messages(*self._output_buffer.drain())
            if rest is not None:
                self._write_messages(rest)

    def _flush_output_buffer(self) -> None:
        """Send the merged outputs. Called on the channel's thread, when nothing else waits."""
        with self._send_lock:
            self._write_messages(*self._output_buffer.drain())

    def _write_messages(self, *messages: EngineMessage) -> None:
        try:
            for message in messages:
                self.channel.send(*frames.write_engine_message(message))
        except WireError as error:
            log.error(
                "the engine's client %d is disconnected: a message to it can't be encoded: %s", self.client_index, error
            )
            self.channel.close(0)


def log_stalls(engine_loop: EngineLoop) -> None:
    """Log once, with the stacks of all threads, that the loop stalled, and once that it moves on."""
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
    """Serve clients over `connections`, the first of which sends what to build. Return the exit status."""
    ignore_signals()
    clients = [ClientConnection(index, connection) for index, connection in enumerate(connections)]
    try:
        frame = clients[0].read_frame()
        assert frame is not None, "without a timeout"
        if frame.kind != frames.INIT:
            raise WireError("kind", f"{frame.kind} before INIT")
        init = read_engine_init(frame.body)
    except (EOFError, OSError):
        return 1
    logging.getLogger().setLevel(init.log_level)
    building = threading.Event()
    threading.Thread(
        target=_exit_with_client, args=(connections[0], building), name="quire-parent", daemon=True
    ).start()
    kv_events: KVEventPublisher | None = None
    try:
        if init.config.kv_events is not None:
            kv_events = KVEventPublisher(init.config.kv_events, init.replica)  # a port in use is found before the load
        engine, ready, grammar_compiler = build(init)
        building.set()
    except BaseException as error:  # a library may end the thread too, by SystemExit
        clients[0].channel.send(frames.START_FAILED, frames.write_json(frames.error_to_json(_to_startup_error(error))))
        clients[0].channel.close()
        if kv_events is not None:
            kv_events.close()
        return 1
    prefix_cache, cache_log = engine.scheduler.memory.prefix_cache, None
    if (init.report_cache or kv_events is not None) and prefix_cache is not None:
        cache_log = prefix_cache.log(with_contents=kv_events is not None)
    if kv_events is not None and cache_log is None:
        log.warning("no KV events are published: no pages of this model can be cached")
    engine_loop = EngineLoop(
        engine, lambda index, message: clients[index].send(message), init.stall_after, time.process_time, len(clients),
        cache_log, init.report_cache, kv_events,
    )  # fmt: skip
    freeze_loaded_objects()
    readers = []
    for client in clients:
        client.channel.send(frames.READY, write_ready(ready))
        name = f"quire-client-{client.client_index}"
        readers.append(
            threading.Thread(target=client.serve, args=(engine_loop, grammar_compiler), name=name, daemon=True)
        )
        readers[-1].start()
    threading.Thread(target=_exit_after_clients, args=(readers,), name="quire-end", daemon=True).start()
    threading.Thread(target=log_stalls, args=(engine_loop,), name="quire-watch", daemon=True).start()
    ended = engine_loop.run()
    for client in clients:
        client.channel.close()
    if ended is not None:
        log.error("the engine stopped: %s", ended or type(ended).__name__, exc_info=ended)
    return 1 if ended is not None else 0


def _to_startup_error(error: BaseException) -> StartupError:
    """Return the reason that nothing was built, for the clients that wait. An unexpected error is logged with its
    traceback."""
    if isinstance(error, StartupError):
        return error
    log.error("the engine can't be built", exc_info=error)
    first_line = next(iter(str(error).splitlines()), "")
    cause = f"the engine's process failed at start: {type(error).__name__}{': ' * bool(first_line)}{first_line}"[:300]
    return StartupError(cause, "What it wrote to the log says more")


def _exit_with_client(connection: socket.socket, built: threading.Event) -> None:
    """End the process with its client, which may be killed while the model loads."""
    poll = select.poll()
    poll.register(connection, getattr(select, "POLLRDHUP", select.POLLHUP))
    while not built.is_set():
        if poll.poll(200) and not built.is_set():
            os._exit(1)


def _exit_after_clients(readers: list[threading.Thread]) -> None:
    """End the process after the last client left, even if a step hangs."""
    for reader in readers:
        reader.join()
    faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=sys.__stderr__ or sys.stderr)
