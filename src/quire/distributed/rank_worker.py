"""A rank: a program that has a part of the model, and does what the engine orders through the ring, in that order.
Started by quire.distributed.remote_runner. It decides nothing, and ends with the process that started it.
"""

from __future__ import annotations

import hashlib
import logging
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from quire.distributed.rank_messages import (
    ADD_IMAGE,
    BIND,
    CLOSE,
    COLLECT,
    DONE,
    FAILED,
    INIT,
    KINDS,
    OPEN_DEVICE,
    PLAN,
    QUERY,
    QUERY_REPLY,
    READY,
    REMOVE_IMAGE,
    SLEEP,
    STEP_RESULT,
    STEP_RESULT_HEAD,
    WAKE,
    WARM_UP,
    InitMessage,
    RankFailure,
    read_add_image,
    read_bind,
    read_init,
    read_remove_image,
    read_sleep,
    read_wake,
    read_warm_up,
    write_failure,
)
from quire.distributed.rank_queries import RANK_QUERIES
from quire.distributed.shared_ring import RingReader
from quire.errors import PeerLost, StartupError
from quire.ipc.channel import READ_SIZE
from quire.ipc.frames import Frame, FrameCodec, read_json, write_json
from quire.protocol.columns import WireError
from quire.protocol.step_plan import StepPlan, StepResult
from quire.protocol.wire import decode_frame, encode_frame

HANGUP = getattr(select, "POLLRDHUP", select.POLLHUP)
PR_SET_PDEATHSIG = 1
DIGEST_HEAD = struct.Struct("<QQ")  # a step, what was applied
MASK = 2**64 - 1
NO_MULTICAST_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""What keeps libraries from NVLink's multicast objects."""
log = logging.getLogger("quire.distributed")
RunnerBuilder = Callable[..., Any]  # of a Hello, and of a `seat` if there is one: a Runner of control.engine


class EngineGone(Exception):
    """The engine's process is gone, or wants no more."""


def plan_digest(step: int, frame: memoryview, applied: int) -> int:
    """8 bytes that ranks agree in if they were given the same plan as this step, and `applied` the same of plans so
    far."""
    said = hashlib.blake2b(DIGEST_HEAD.pack(step, applied & MASK), digest_size=8)
    said.update(frame)
    return int.from_bytes(said.digest(), "little")


def samples_digest(result: StepResult) -> int:
    """8 bytes that ranks agree in if they drew the same tokens."""
    return hash(next(zip(*result.slice_results), ())) & MASK  # tuples of integers: the same in every process


class RankWorker:
    """Carries out orders over `runner`, and answers on `connection`."""

    def __init__(self, hello: InitMessage, runner: Any, send: Callable[[int, bytes], None]) -> None:
        self.shard, self.runner, self._send = hello.part, runner, send
        self.submitted = self.collected = 0
        self.in_flight: deque[tuple[memoryview, Any]] = deque()

    def execute(self, frame: Frame) -> None:
        """Carry out one order. Gone: it was the last."""
        kind, body = frame
        if kind == PLAN:
            self._submit(body)
        elif kind == COLLECT:
            self._collect()
        elif kind == ADD_IMAGE:
            self.runner.add_image(read_add_image(body))
        elif kind == REMOVE_IMAGE:
            self.runner.remove_image(read_remove_image(body))
        elif kind == QUERY:
            asked = read_json(body)
            self._send(QUERY_REPLY, write_json({"told": RANK_QUERIES[asked["question"]](self.runner)}))
        elif kind in (BIND, WARM_UP):
            self.runner.bind(read_bind(body)) if kind == BIND else self.runner.warm_up(*read_warm_up(body))
            self._send(DONE, b"")
        elif kind in (SLEEP, WAKE):
            self.runner.sleep(read_sleep(body)) if kind == SLEEP else self.runner.wake(read_wake(body))
            self._send(DONE, b"")
        elif kind == CLOSE:
            raise EngineGone
        else:
            raise WireError("kind", f"{kind} is no order")

    def _submit(self, body: memoryview) -> None:
        plan = decode_frame(body)
        if not isinstance(plan, StepPlan):
            raise WireError("kind", "a result comes where a plan should")
        self.submitted += 1
        self.in_flight.append((body, self.runner.submit(plan)))
        if self.shard.pp_size > 1:  # nobody says when: the stage behind may still compute it
            self._collect()

    def _collect(self) -> None:
        body, ticket = self.in_flight.popleft()
        result = self.runner.collect(ticket)
        self.collected += 1
        applied = plan_digest(self.collected, body, getattr(self.runner, "op_checksum", 0))
        said = encode_frame(result) if self.shard.returns_result else b""
        self._send(STEP_RESULT, STEP_RESULT_HEAD.pack(self.collected, applied, samples_digest(result)) + said)

    @property
    def activity(self) -> str:
        """What it is at, for the log."""
        return f"in step {self.collected + 1}" if self.submitted > self.collected else "between steps"


def serve(
    build: RunnerBuilder,
    connection: socket.socket,
    reader: RingReader,
    end: Callable[[], object],
    open_device: Callable[[InitMessage], Any] | None = None,
) -> int:
    """Build what the HELLO on `connection` says, then obey what comes through the ring. Returns the exit status; `end`
    is called, on another thread, once the other side is gone. Before a HELLO there may be a MEET: what `open_device`
    makes of it is given to `build` too."""
    answers, orders = FrameCodec(KINDS), FrameCodec(KINDS)

    def send(kind: int, body: bytes) -> None:
        with suppress(OSError):  # whoever should read it is gone, which ends this rank
            connection.sendall(answers.encode(kind, body))

    said = _read_init_messages(connection)
    try:
        kind, hello = next(said)
    except (EOFError, OSError):
        return 1
    except (WireError, StartupError) as error:
        send(FAILED, write_failure(_to_failure(error)))
        return 1
    parent = select.poll()
    parent.register(connection, HANGUP)
    threading.Thread(target=_exit_with_engine, args=(parent, end), name="quire-parent", daemon=True).start()
    logging.getLogger().setLevel(hello.log_level)
    try:
        if kind == OPEN_DEVICE:
            assert open_device is not None, "there is no GPU here"
            place = open_device(hello)
            send(QUERY_REPLY, write_json({"told": place.told()}))
            build = partial(build, seat=place)
            _, hello = next(said)
        runner = build(hello)
    except BaseException as error:
        _log_failure(hello.part.global_rank, "at start", error)
        send(FAILED, write_failure(_to_failure(error)))
        return 1
    rank = RankWorker(hello, runner, send)
    send(READY, write_json({name: RANK_QUERIES[name](runner) for name in ("depth", "attention", "device", "notices")}))
    poll = select.poll()
    poll.register(reader.event, select.POLLIN)
    poll.register(connection, select.POLLIN | HANGUP)
    try:
        while True:
            for frame in orders.decode(_next_record(reader, poll)):
                rank.execute(frame)
    except EngineGone:
        runner.close()
        return 0
    except BaseException as error:
        _log_failure(hello.part.global_rank, rank.activity, error)
        send(FAILED, write_failure(_to_failure(error)))
        return 1


def _log_failure(rank: int, doing: str, error: BaseException) -> None:
    """Log what nobody foresaw: others' failures and mistakes of whoever started this are told in a line."""
    if not isinstance(error, PeerLost | StartupError):
        log.error("rank %d failed %s", rank, doing, exc_info=error)


def _read_init_messages(connection: socket.socket) -> Iterator[tuple[int, InitMessage]]:
    """What comes before orders: a HELLO, or a MEET, which has the same body, and a HELLO."""
    frames = FrameCodec(KINDS)
    while True:
        data = connection.recv(READ_SIZE)
        if not data:
            raise EOFError
        for frame in frames.decode(data):
            if frame.kind not in (INIT, OPEN_DEVICE):
                raise WireError("kind", f"{frame.kind} comes before a hello")
            yield frame.kind, read_init(frame.body)


def _next_record(reader: RingReader, poll: select.poll) -> bytes:
    """The next record, which is waited for. `poll` is for the reader's event, and for a word of whoever sends records:
    Gone, as that's their end."""
    while not reader:
        for descriptor, _ in poll.poll():
            if descriptor != reader.event:
                raise EngineGone
    return reader.read()


def _exit_with_engine(parent: select.poll, end: Callable[[], object]) -> None:
    """The process ends with the engine's, also when a step hangs."""
    parent.poll()
    end()


def _to_failure(error: BaseException) -> RankFailure:
    """What is said of a failure: a StartupError as it is."""
    if isinstance(error, StartupError):
        return RankFailure(error.cause, error.remedy)
    said = next(iter(str(error).splitlines()), "")
    return RankFailure(f"{type(error).__name__}{': ' * bool(said)}{said}"[:300], "", isinstance(error, PeerLost))
