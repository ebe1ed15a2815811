"""A rank: a program that has a part of the model, and does what the engine orders through the ring, in that order.
Started by quire.parallel.remote. It decides nothing, and ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from quire.errors import PeerLost, StartupError
from quire.link.channel import AT_ONCE
from quire.link.child import leave, spare_signals
from quire.link.collector import spare_the_loaded
from quire.link.frames import Frame, Frames, read_json, write_json
from quire.parallel.caches import cache_apart
from quire.parallel.frames import (
    ANSWER,
    ASK,
    BIND,
    CLOSE,
    COLLECT,
    DONE,
    DREW,
    FAILED,
    FORGET,
    HELLO,
    KINDS,
    MEET,
    PLAN,
    READY,
    SEE,
    SLEEP,
    TOLD,
    WAKE,
    WARM,
    Failed,
    Hello,
    read_bind,
    read_hello,
    read_key,
    read_see,
    read_sleep,
    read_wake,
    read_warm,
    write_failed,
)
from quire.parallel.questions import QUESTIONS
from quire.parallel.ring import RingReader
from quire.vocabulary.columns import WireError
from quire.vocabulary.plan import StepPlan, StepResult
from quire.vocabulary.wire import decode, encode

GONE = getattr(select, "POLLRDHUP", select.POLLHUP)
PR_SET_PDEATHSIG = 1
SAID = struct.Struct("<QQ")  # a step, what was applied
MASK = 2**64 - 1
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""What keeps libraries from NVLink's multicast objects."""
log = logging.getLogger("quire.parallel")

Build = Callable[..., Any]  # of a Hello, and of a `seat` if there is one: a Runner of control.engine


class Gone(Exception):
    """The engine's process is gone, or wants no more."""


def digest_of(step: int, frame: memoryview, applied: int) -> int:
    """8 bytes that ranks agree in if they were given the same plan as this step, and `applied` the same of plans so
    far."""
    said = hashlib.blake2b(SAID.pack(step, applied & MASK), digest_size=8)
    said.update(frame)
    return int.from_bytes(said.digest(), "little")


def drawn_of(result: StepResult) -> int:
    """8 bytes that ranks agree in if they drew the same tokens."""
    return hash(next(zip(*result.samples), ())) & MASK  # tuples of integers: the same in every process


class Rank:
    """Carries out orders over `runner`, and answers on `connection`."""

    def __init__(self, hello: Hello, runner: Any, send: Callable[[int, bytes], None]) -> None:
        self.part, self.runner, self._send = hello.part, runner, send
        self.submitted = self.collected = 0
        self.flight: deque[tuple[memoryview, Any]] = deque()

    def obey(self, frame: Frame) -> None:
        """Carry out one order. Gone: it was the last."""
        kind, body = frame
        if kind == PLAN:
            self._submit(body)
        elif kind == COLLECT:
            self._collect()
        elif kind == SEE:
            self.runner.see(read_see(body))
        elif kind == FORGET:
            self.runner.forget(read_key(body))
        elif kind == ASK:
            asked = read_json(body)
            self._send(TOLD, write_json({"told": QUESTIONS[asked["question"]](self.runner)}))
        elif kind in (BIND, WARM):
            self.runner.bind(read_bind(body)) if kind == BIND else self.runner.warm_up(*read_warm(body))
            self._send(DONE, b"")
        elif kind in (SLEEP, WAKE):
            self.runner.sleep(read_sleep(body)) if kind == SLEEP else self.runner.wake(read_wake(body))
            self._send(DONE, b"")
        elif kind == CLOSE:
            raise Gone
        else:
            raise WireError("kind", f"{kind} is no order")

    def _submit(self, body: memoryview) -> None:
        plan = decode(body)
        if not isinstance(plan, StepPlan):
            raise WireError("kind", "a result comes where a plan should")
        self.submitted += 1
        self.flight.append((body, self.runner.submit(plan)))
        if self.part.stages > 1:  # nobody says when: the stage behind may still compute it
            self._collect()

    def _collect(self) -> None:
        body, ticket = self.flight.popleft()
        result = self.runner.collect(ticket)
        self.collected += 1
        applied = digest_of(self.collected, body, getattr(self.runner, "applied", 0))
        said = encode(result) if self.part.answers else b""
        self._send(ANSWER, DREW.pack(self.collected, applied, drawn_of(result)) + said)

    @property
    def doing(self) -> str:
        """What it is at, for the log."""
        return f"in step {self.collected + 1}" if self.submitted > self.collected else "between steps"


def run(
    build: Build,
    connection: socket.socket,
    reader: RingReader,
    end: Callable[[], object],
    seat: Callable[[Hello], Any] | None = None,
) -> int:
    """Build what the HELLO on `connection` says, then obey what comes through the ring. Returns the exit status; `end`
    is called, on another thread, once the other side is gone. Before a HELLO there may be a MEET: what `seat` makes of
    it is given to `build` too."""
    answers, orders = Frames(KINDS), Frames(KINDS)

    def send(kind: int, body: bytes) -> None:
        with suppress(OSError):  # whoever should read it is gone, which ends this rank
            connection.sendall(answers.write(kind, body))

    said = _said(connection)
    try:
        kind, hello = next(said)
    except (EOFError, OSError):
        return 1
    except (WireError, StartupError) as error:
        send(FAILED, write_failed(_failure(error)))
        return 1
    parent = select.poll()
    parent.register(connection, GONE)
    threading.Thread(target=_end_without, args=(parent, end), name="quire-parent", daemon=True).start()
    logging.getLogger().setLevel(hello.log_level)
    try:
        if kind == MEET:
            assert seat is not None, "there is no GPU here"
            place = seat(hello)
            send(TOLD, write_json({"told": place.told()}))
            build = partial(build, seat=place)
            _, hello = next(said)
        runner = build(hello)
    except BaseException as error:
        _tell(hello.part.number, "at start", error)
        send(FAILED, write_failed(_failure(error)))
        return 1
    rank = Rank(hello, runner, send)
    send(READY, write_json({name: QUESTIONS[name](runner) for name in ("depth", "attention", "device", "notices")}))
    poll = select.poll()
    poll.register(reader.event, select.POLLIN)
    poll.register(connection, select.POLLIN | GONE)
    try:
        while True:
            for frame in orders.feed(_next(reader, poll)):
                rank.obey(frame)
    except Gone:
        runner.close()
        return 0
    except BaseException as error:
        _tell(hello.part.number, rank.doing, error)
        send(FAILED, write_failed(_failure(error)))
        return 1


def _tell(rank: int, doing: str, error: BaseException) -> None:
    """Log what nobody foresaw: others' failures and mistakes of whoever started this are told in a line."""
    if not isinstance(error, PeerLost | StartupError):
        log.error("rank %d failed %s", rank, doing, exc_info=error)


def _said(connection: socket.socket) -> Iterator[tuple[int, Hello]]:
    """What comes before orders: a HELLO, or a MEET, which has the same body, and a HELLO."""
    frames = Frames(KINDS)
    while True:
        data = connection.recv(AT_ONCE)
        if not data:
            raise EOFError
        for frame in frames.feed(data):
            if frame.kind not in (HELLO, MEET):
                raise WireError("kind", f"{frame.kind} comes before a hello")
            yield frame.kind, read_hello(frame.body)


def _next(reader: RingReader, poll: select.poll) -> bytes:
    """The next record, which is waited for. `poll` is for the reader's event, and for a word of whoever sends records:
    Gone, as that's their end."""
    while not reader:
        for descriptor, _ in poll.poll():
            if descriptor != reader.event:
                raise Gone
    return reader.read()


def _end_without(parent: select.poll, end: Callable[[], object]) -> None:
    """The process ends with the engine's, also when a step hangs."""
    parent.poll()
    end()


def _failure(error: BaseException) -> Failed:
    """What is said of a failure: a StartupError as it is."""
    if isinstance(error, StartupError):
        return Failed(error.cause, error.remedy)
    said = next(iter(str(error).splitlines()), "")
    return Failed(f"{type(error).__name__}{': ' * bool(said)}{said}"[:300], "", isinstance(error, PeerLost))


def build_shard(hello: Hello, seat: Any = None) -> Any:
    """The runner of a part of a model."""
    from quire.shard import build_rank

    return build_rank(hello, seat)


def seat_of(hello: Hello) -> Any:
    """The GPU that a rank will use."""
    from quire.parallel.devices import Seat

    os.environ.update(cache_apart())
    return Seat(hello)


def main(build: Build | None = None, seat: Callable[[Hello], Any] | None = None) -> None:
    """The arguments are the rank's number, and descriptors: of the connection, of the ring, of its event. Without a
    `build` of its own it's a model's: torch is imported while the engine's process reads what it needs of that."""

    def built(hello: Hello, **seat: Any) -> Any:
        runner = (build or build_shard)(hello, **seat)
        spare_the_loaded()
        return runner

    gc.disable()  # until all is loaded
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with suppress(AttributeError, OSError):  # a process that is stopped ends too
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    spare_signals()
    if build is None:
        threading.Thread(target=import_module, args=("torch",), name="quire-imports", daemon=True).start()
    os.environ.update(WITHOUT_MULTICAST)
    rank, connection, ring, event = map(int, sys.argv[1:5])
    reader = RingReader(ring, event, rank)
    leave(run(built, socket.socket(fileno=connection), reader, partial(os._exit, 1), seat or seat_of))
