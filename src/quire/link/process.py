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
from collections.abc import Callable, Sequence
from contextlib import suppress

from quire.config import EngineConfig
from quire.errors import EngineDead, StartupError
from quire.link.channel import AT_ONCE, Channel
from quire.link.child import Child, Elsewhere, program_of
from quire.link.frames import FAILED, HELLO, PING, PONG, READY, Frame, Frames, read_engine, write_front
from quire.link.hello import Hello, failed, read_pulse, read_ready, write_hello
from quire.link.messages import Died, Facts, FromEngine, FromFront, Queues, Ready, Stepped
from quire.link.pulse import SILENT, Health
from quire.source import Source, eos_ids, read_sight, read_source, read_text
from quire.text.prompts import Prompts
from quire.vocabulary.columns import WireError

BEAT = 0.5  # seconds between two questions for the engine's pulse
HUNG = 30.0  # seconds without an answer after which it is given up
PROGRAM = program_of("quire.link.program")
log = logging.getLogger("quire.link")


class ProcessLink:
    """A link to the engine of `child`, whose model is known to be `ready` once `wait` returned."""

    inside, engine = False, None
    ready: Ready

    def __init__(self, child: Child, front: int = 0) -> None:
        self.child = child
        self._connection = child.connections[front]
        self._channel, self._frames = Channel(self._connection, "the engine's process"), Frames()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._unanswered, self._said = 0, False
        self._health = Health(True, False, time.monotonic(), "")
        self._ended = self._abandoned = False
        self._coming: ProcessLink | None = None
        self._queues = Queues()
        self._facts: Facts
        self._hello: Hello
        self._early: list[Frame] = []  # what came right behind the first
        self._receive: Callable[[FromEngine], None]

    def hello(self, hello: Hello) -> None:
        """Say what is to be built."""
        self._hello = hello
        self._channel.send(HELLO, write_hello(hello))

    def wait(self) -> None:
        """Wait until the engine is built. StartupError if it can't be, or its process ends."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        frames: list[Frame] = []
        try:
            while not frames:
                poll.poll()
                data = self._connection.recv(AT_ONCE)
                if not data:
                    raise EOFError
                frames += self._frames.feed(data)
            frame, *self._early = frames
            if frame.kind == FAILED:
                raise failed(frame)
            if frame.kind != READY:
                raise WireError("kind", f"{frame.kind} comes before the engine is ready")
            self.ready = read_ready(frame.body)
            self._facts = self.ready.facts
        except (EOFError, OSError) as error:
            remedy = "What it wrote to the log says why; SIGKILL ends those that take too much memory, say"
            raise StartupError(f"the engine's process {self.child.status(5.0)} at start", remedy) from error
        except WireError as error:
            raise StartupError(f"the engine's process sent what is no frame at start: {error}") from error

    def start(self, receive: Callable[[FromEngine], None]) -> None:
        """What the engine tells goes to `receive`, on the event loop that `attach` was first called on."""
        self._receive = receive
        for frame in self._early:
            self._take(frame)
        self._early.clear()

    def attach(self) -> None:
        """Listen on the running event loop, unless another one does."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._ended or self._loop is loop or (self._loop is not None and not self._loop.is_closed()):
                return
            self._loop = loop
        loop.add_reader(self._connection.fileno(), self._readable)
        self._unanswered = 0
        self._beat()

    def send(self, message: FromFront) -> bool:
        """Send a message, from any thread; False when the engine takes no more."""
        return self._channel.send(*write_front(message))

    @property
    def queues(self) -> Queues:
        """As they were after the last step."""
        return self._queues

    @property
    def facts(self) -> Facts:
        """As they were lately."""
        return self._facts

    def health(self) -> Health:
        """Whether the engine's loop turns, as its process says, and whether that says anything."""
        silent = (self._unanswered - 1) * BEAT
        if silent >= SILENT:
            return Health(True, True, self._health.beat, f"its process has not been heard of for {silent:.0f} s")
        return self._health

    def again(self) -> ProcessLink:
        """Such an engine in another process, once this one is gone; returns when it is built. StartupError if it can't
        be, or if `abandon` is called meanwhile."""
        self.child.end(SILENT)
        self._coming = link = ProcessLink(Child(1, self.child.program))
        try:
            if not self._abandoned:  # else there is nothing to wait for
                link.hello(self._hello)
                link.wait()
            if self._abandoned:
                raise StartupError("the engine isn't wanted any more")
        except BaseException:
            link.close(0.0)
            raise
        return link

    def abandon(self) -> None:
        """From another thread: no engine is wanted any more of `again`."""
        self._abandoned = True
        if self._coming is not None:
            self._coming.close(0.0)

    def close(self, timeout: float) -> bool:
        """End the process. Returns whether it ended by itself, within `timeout` seconds."""
        if not self._ended:
            self._leave(1.0)
        return self.child.end(timeout)

    def give_up(self, error: BaseException) -> None:
        """On the event loop: the engine is left, for something else that ends the server."""
        self._die(error)

    # On the event loop

    def _readable(self) -> None:
        try:
            data = self._connection.recv(AT_ONCE, socket.MSG_DONTWAIT)
            if not data:
                raise EOFError
            for frame in self._frames.feed(data):
                self._take(frame)
        except (BlockingIOError, InterruptedError):
            return
        except (EOFError, OSError):
            if self._ended:
                return
            self._die(EngineDead(f"its process {self.child.status()}"))
        except WireError as error:
            self._die(EngineDead(f"its process sent what is no frame: {error}"))

    def _take(self, frame: Frame) -> None:
        if frame.kind == PONG:
            if self._said:
                log.warning("the engine's process is heard of again")
            self._unanswered, self._said = 0, False
            self._health = read_pulse(frame.body, time.monotonic())
            return
        message = read_engine(frame)
        if isinstance(message, Stepped):
            self._queues = message.queues
            self._facts = message.facts or self._facts
        if isinstance(message, Died):
            self._die(message.error)
        else:
            self._receive(message)

    def _beat(self) -> None:
        """Ask for the pulse. Silence is counted in questions, so that whoever was stopped itself blames nobody."""
        if self._ended or self._loop is None:
            return
        silent = self._unanswered * BEAT
        if silent >= SILENT and not self._said:
            self._said = True
            log.error("the engine's process has not been heard of for %g s", silent)
        if silent >= SILENT and self.child.stopped():
            self._die(EngineDead(f"its process was stopped (SIGSTOP) and is given up after {silent:g} s"))
            return
        if silent >= HUNG:
            self._die(EngineDead(f"its process has not been heard of for {silent:g} s and is given up"))
            return
        self._unanswered += 1
        self._channel.send(PING, b"")
        self._loop.call_later(BEAT, self._beat)

    def _die(self, error: BaseException) -> None:
        """Nothing more will be said or heard."""
        if not self._ended:
            self._leave()
            if not self.child.ended():
                threading.Thread(target=self.child.end, args=(SILENT,), name="quire-reap", daemon=True).start()
            self._receive(Died(error))

    def _leave(self, timeout: float = 0.0) -> None:
        """Let go of the connection; what waits to be sent has so many seconds."""
        self._ended = True
        self._channel.close(timeout)
        loop = self._loop
        if loop is None or loop.is_closed() or asyncio._get_running_loop() is loop:
            self._let_go()
        else:
            with suppress(RuntimeError):  # closed meanwhile
                loop.call_soon_threadsafe(self._let_go)

    def _let_go(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection.fileno())
        self._connection.close()


def launch(
    config: EngineConfig,
    progress: bool = False,
    stall_after: float = 60.0,
    program: Sequence[str] = PROGRAM,
    fronts: int = 1,
    others: Callable[[Child], None] | None = None,
) -> tuple[ProcessLink, Prompts, Source]:
    """Start an engine's process and wait until its model is there. Texts are read here meanwhile. With more than one
    front `others` starts those beside this one, over the child's other connections."""
    child = Child(fronts, program)
    link = ProcessLink(child)

    def begin(named: tuple[int, ...]) -> None:
        link.hello(Hello(config, named, stall_after, progress, logging.getLogger().level))
        if others is not None:
            others(child)

    return _read(link, config, begin)


def join(
    config: EngineConfig, connection: socket.socket, begin: Callable[[tuple[int, ...]], None]
) -> tuple[ProcessLink, Prompts, Source]:
    """The engine's process that another front started, once its model is there; `begin` is called before that is
    waited for."""
    return _read(ProcessLink(Elsewhere(connection)), config, begin)


def _read(
    link: ProcessLink, config: EngineConfig, begin: Callable[[tuple[int, ...]], None]
) -> tuple[ProcessLink, Prompts, Source]:
    """Read the model's texts; `begin` learns the tokenizer's end tokens. Then wait for the engine."""
    from quire.text.renderer import Renderer

    renderer = None if config.skip_tokenizer_init else Renderer()
    try:
        source = read_source(config)
        tokenizer, chat = read_text(config, source, renderer)
        sight = read_sight(config, source, tokenizer)
        begin(tokenizer.eos_ids if tokenizer is not None else ())
        link.wait()
    except BaseException:
        link.close(0.0)
        if renderer is not None:
            renderer.close()
        raise
    ends = None if tokenizer is None else eos_ids(source, tokenizer.eos_ids)
    return link, Prompts(tokenizer, chat, link.ready.limits, source.defaults, sight, ends), source
