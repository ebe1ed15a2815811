"""The engine's process: builds what it is told to, then serves the fronts at the other ends of its connections until
none is left. Started by quire.link.process, over sockets that have no name: nobody else can reach them.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from quire.control.engine import Engine
from quire.errors import InputError, StartupError
from quire.link.backlog import Backlog
from quire.link.channel import AT_ONCE, MOST_WAITING, Channel
from quire.link.child import leave, spare_signals
from quire.link.collector import spare_the_loaded
from quire.link.frames import (
    FAILED,
    HELLO,
    PING,
    PONG,
    READY,
    Frame,
    Frames,
    add_key,
    read_front,
    write_engine,
    write_error,
    write_json,
)
from quire.link.hello import Hello, read_hello, write_pulse, write_ready
from quire.link.host import Host, Left
from quire.link.lane import Lane
from quire.link.messages import Answer, Died, FromEngine, Ready, Stepped, described
from quire.link.pulse import SILENT
from quire.link.stacks import stacks
from quire.vocabulary.columns import WireError
from quire.vocabulary.structured import Grammar, Structured

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.source import Source
    from quire.text.grammars import Grammars

LAGS = 1 << 22  # bytes that wait for a front: from then on its outputs are merged, until none wait
END_SECONDS = 20.0  # for the end once no front is left; then it is forced
log = logging.getLogger("quire.link")

Build = Callable[[Hello], tuple[Engine, Ready]]


class Side:
    """A front, as the engine's process has it: a thread reads what it sends."""

    def __init__(self, front: int, connection: socket.socket) -> None:
        self.front, self.connection = front, connection
        self.channel = Channel(connection, f"front {front}", self._caught_up)
        self.frames = Frames()
        self._telling, self._backlog = threading.Lock(), Backlog()
        self._unread: list[Frame] = []
        self._pinged = self._said = False

    def next(self, timeout: float | None = None) -> Frame | None:
        """The next frame; None when there is none after `timeout` seconds. EOFError when the front is gone."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        while not self._unread:
            if not poll.poll(None if timeout is None else timeout * 1000):
                return None
            data = self.connection.recv(AT_ONCE)
            if not data:
                raise EOFError
            self._unread += self.frames.feed(data)
            self._unread.reverse()
        return self._unread.pop()

    def serve(self, host: Host) -> None:
        """Hand what the front sends to `host`, until the front is gone."""
        lane = Lane(self.front, host, self.tell)
        try:
            while True:
                frame = self.next(SILENT)
                if frame is None:
                    self._silent()
                elif frame.kind == PING:
                    self._ping(host)
                else:
                    self._take(lane, frame)
        except (EOFError, ConnectionError):
            pass
        except Exception as error:
            known = isinstance(error, OSError | WireError)
            log.error("front %d is left: %s", self.front, error, exc_info=None if known else error)
        finally:
            self.channel.close(0)
            lane.close()
            host.send(self.front, Left())

    def _take(self, lane: Lane, frame: Frame) -> None:
        try:
            lane.take(read_front(frame))
        except InputError as error:  # of parameters that no honest front sends
            self.tell(Answer(add_key(frame), error))

    def _ping(self, host: Host) -> None:
        if self._said:
            log.warning("front %d is heard of again", self.front)
        self._pinged, self._said = True, False
        self.channel.send(PONG, write_pulse(host.health(), time.monotonic()))

    def _silent(self) -> None:
        if self._pinged and not self._said:
            self._said = True
            log.error("front %d has not been heard of for %g s", self.front, SILENT)

    def tell(self, message: FromEngine) -> None:
        """Send a message, or merge it with what waits for a front that lags. One that is too large, or more than may
        wait, ends the connection, not the engine."""
        with self._telling:
            rest: FromEngine | None = message
            if isinstance(message, Stepped) and (self._backlog or self.channel.held > LAGS):
                if not self._backlog:
                    log.warning("front %d lags: %d bytes wait for it, and outputs to come are put together", self.front,
                                self.channel.held)  # fmt: skip
                rest = self._backlog.add(message)
                if self._backlog.size > MOST_WAITING:
                    log.error("front %d is left: more waits for it than %d bytes", self.front, MOST_WAITING)
                    self.channel.close(0)
                    self._backlog = Backlog()
            elif isinstance(message, Died):
                self._send(*self._backlog.take())
            if rest is not None:
                self._send(rest)

    def _caught_up(self) -> None:
        """On the channel's thread: nothing waits but the backlog."""
        with self._telling:
            self._send(*self._backlog.take())

    def _send(self, *messages: FromEngine) -> None:
        try:
            for message in messages:
                self.channel.send(*write_engine(message))
        except WireError as error:
            log.error("front %d is left, as it can't be told: %s", self.front, error)
            self.channel.close(0)


def watch(host: Host) -> None:
    """Say once, with all stacks, that the loop stalled, and that it moves on if it does."""
    stalled = False
    while True:
        time.sleep(0.5)
        health = host.health()
        if health.stalled and not stalled:
            log.error("the engine stalled: %s; all threads of its process:\n%s", health.why, stacks())
        elif stalled and not health.stalled:
            log.warning("the engine moves on")
        stalled = health.stalled


def run(build: Build, connections: list[socket.socket]) -> int:
    """Serve fronts over `connections`, of which the first says what to build. The exit status."""
    spare_signals()
    sides = [Side(front, connection) for front, connection in enumerate(connections)]
    try:
        frame = sides[0].next()
        assert frame is not None, "without a timeout"
        if frame.kind != HELLO:
            raise WireError("kind", f"{frame.kind} comes before a hello")
        hello = read_hello(frame.body)
    except (EOFError, OSError):
        return 1
    logging.getLogger().setLevel(hello.log_level)
    building = threading.Event()
    threading.Thread(target=_end_without, args=(connections[0], building), name="quire-parent", daemon=True).start()
    try:
        engine, ready = build(hello)
        building.set()
    except BaseException as error:  # a library may end the thread too, by SystemExit
        sides[0].channel.send(FAILED, write_json(write_error(_failure(error))))
        sides[0].channel.close()
        return 1
    host = Host(engine, lambda front, message: sides[front].tell(message), hello.stall_after, time.process_time)
    host.fronts = list(range(len(sides)))
    spare_the_loaded()
    readers = []
    for side in sides:
        side.channel.send(READY, write_ready(ready))
        readers.append(threading.Thread(target=side.serve, args=(host,), name=f"quire-front-{side.front}", daemon=True))
        readers[-1].start()
    threading.Thread(target=_end_after, args=(readers,), name="quire-end", daemon=True).start()
    threading.Thread(target=watch, args=(host,), name="quire-watch", daemon=True).start()
    ended = host.run()
    for side in sides:
        side.channel.close()
    if ended is not None:
        log.error("the engine stopped: %s", ended or type(ended).__name__, exc_info=ended)
    return 1 if ended is not None else 0


def _failure(error: BaseException) -> StartupError:
    """Why nothing was built, for who waits. What nobody foresaw is in the log with its traceback."""
    if isinstance(error, StartupError):
        return error
    log.error("the engine can't be built", exc_info=error)
    said = next(iter(str(error).splitlines()), "")
    cause = f"the engine's process failed at start: {type(error).__name__}{': ' * bool(said)}{said}"[:300]
    return StartupError(cause, "What it wrote to the log says more")


def _end_without(connection: socket.socket, built: threading.Event) -> None:
    """While the model loads: the process ends with its front, which may be killed meanwhile."""
    poll = select.poll()
    poll.register(connection, getattr(select, "POLLRDHUP", select.POLLHUP))
    while not built.is_set():
        if poll.poll(200) and not built.is_set():
            os._exit(1)


def _end_after(readers: list[threading.Thread]) -> None:
    """Once no front is left the process ends, also when a step hangs."""
    for reader in readers:
        reader.join()
    faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=sys.__stderr__ or sys.stderr)


def build_model(hello: Hello) -> tuple[Engine, Ready]:
    """The engine of a model."""
    from quire.build import build_engine
    from quire.reserve import reserve
    from quire.source import read_source

    config = hello.config
    source = read_source(config)
    reserve(config, source)
    engine, plan, notices = build_engine(config, source, hello.named, hello.progress)
    engine.grammars = LateGrammars(config, source, engine)
    return engine, described(engine, plan.lines(), notices)


class LateGrammars:
    """Makes grammars in the engine's process: fronts send the forms of outputs, which they have checked and tried. The
    tokenizer is read with the first."""

    def __init__(self, config: EngineConfig, source: Source, engine: Engine) -> None:
        self._config, self._source, self._engine = config, source, engine
        self._lock = threading.Lock()
        self._grammars: Grammars | None = None

    def held(self, asked: Structured) -> Grammar | None:
        """The grammar, if it costs nothing to get it."""
        return None if self._grammars is None else self._grammars.held(asked)

    def get(self, asked: Structured) -> Grammar:
        """Its grammar."""
        with self._lock:
            if self._grammars is None:
                self._grammars = self._made()
        return self._grammars.get(asked)

    def _made(self) -> Grammars:
        from quire.source import read_tokenizer
        from quire.text.grammars import Grammars

        tokenizer = read_tokenizer(self._config, self._source)
        if tokenizer is None:
            raise InputError("structured output needs a tokenizer to make a grammar of it", "structured_outputs")
        return Grammars(tokenizer, self._engine.limits.vocab_size, tuple(self._engine.scheduler.eos_ids), trusted=True)


def import_torch() -> None:
    """What goes wrong is in the log: who imports it again may fail of what the first time left behind."""
    try:
        import_module("torch")
    except Exception:
        log.warning("torch can't be imported", exc_info=True)


def main(build: Build | None = None) -> None:
    """The arguments are the numbers of the connections' file descriptors. Without a `build` of its own it's a model's:
    torch is imported while the front finds out what it wants."""
    gc.disable()  # until all is loaded
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if build is None:
        threading.Thread(target=import_torch, name="quire-imports", daemon=True).start()
    connections = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    leave(run(build or build_model, connections))
