"""A rank: a process that holds a part of the model and carries out the engine's orders, which come through the ring. It
is started by quire.distributed.remote_runner, decides nothing, and ends with the process that started it."""

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

from quire.distributed import rank_messages
from quire.distributed.rank_messages import InitMessage, RankFailure
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
DIGEST_HEAD = struct.Struct("<QQ")  # the step, `applied`
MASK = 2**64 - 1
NO_MULTICAST_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Keeps libraries from creating NVLink multicast objects."""
log = logging.getLogger("quire.distributed")
RunnerBuilder = Callable[..., Any]  # makes a Runner of an InitMessage, and of the RankDevice if there is one


class EngineGone(Exception):
    """The engine's process has ended, or has closed this rank."""


def plan_digest(step: int, frame: memoryview, applied: int) -> int:
    """Return a 64-bit integer that is equal on ranks that were given the same plan for this step. `applied` is such a
    digest of the page operations so far."""
    digest = hashlib.blake2b(DIGEST_HEAD.pack(step, applied & MASK), digest_size=8)
    digest.update(frame)
    return int.from_bytes(digest.digest(), "little")


def samples_digest(result: StepResult) -> int:
    """Return a 64-bit integer that is equal on ranks that sampled the same tokens. Hashes of tuples of integers are the
    same in every process."""
    return hash(next(zip(*result.slice_results), ())) & MASK


class RankWorker:
    """Carries out orders on `runner`, and replies on `connection`."""

    def __init__(self, hello: InitMessage, runner: Any, send: Callable[[int, bytes], None]) -> None:
        self.shard, self.runner, self._send = hello.part, runner, send
        self.submitted = self.collected = 0
        self.in_flight: deque[tuple[memoryview, Any]] = deque()

    def execute(self, frame: Frame) -> None:
        """Carry out one order. Raise EngineGone after the last."""
        kind, body = frame
        match kind:
            case rank_messages.PLAN:
                self._submit(body)
            case rank_messages.COLLECT:
                self._collect()
            case rank_messages.ADD_IMAGE:
                self.runner.add_image(rank_messages.read_add_image(body))
            case rank_messages.REMOVE_IMAGE:
                self.runner.remove_image(rank_messages.read_remove_image(body))
            case rank_messages.QUERY:
                answer = RANK_QUERIES[read_json(body)["question"]](self.runner)
                self._send(rank_messages.QUERY_REPLY, write_json({"told": answer}))
            case rank_messages.BIND:
                self.runner.bind(rank_messages.read_bind(body))
            case rank_messages.WARM_UP:
                self.runner.warm_up(*rank_messages.read_warm_up(body))
            case rank_messages.SLEEP:
                self.runner.sleep(rank_messages.read_sleep(body))
            case rank_messages.WAKE:
                self.runner.wake(rank_messages.read_wake(body))
            case rank_messages.CLOSE:
                raise EngineGone
            case _:
                raise WireError("kind", f"{kind} is not an order")
        if kind in rank_messages.ANSWERED_BY_DONE:
            self._send(rank_messages.DONE, b"")

    def _submit(self, body: memoryview) -> None:
        plan = decode_frame(body)
        if not isinstance(plan, StepPlan):
            raise WireError("kind", "a result instead of a plan")
        self.submitted += 1
        self.in_flight.append((body, self.runner.submit(plan)))
        if self.shard.pp_size > 1:  # without a COLLECT: the next stage may still be computing this step
            self._collect()

    def _collect(self) -> None:
        body, ticket = self.in_flight.popleft()
        result = self.runner.collect(ticket)
        self.collected += 1
        applied = plan_digest(self.collected, body, getattr(self.runner, "op_checksum", 0))
        head = rank_messages.STEP_RESULT_HEAD.pack(self.collected, applied, samples_digest(result))
        encoded_result = encode_frame(result) if self.shard.returns_result else b""
        self._send(rank_messages.STEP_RESULT, head + encoded_result)

    @property
    def activity(self) -> str:
        """What the rank is doing, for the log."""
        return f"in step {self.collected + 1}" if self.submitted > self.collected else "between steps"


def serve(
    build: RunnerBuilder,
    connection: socket.socket,
    reader: RingReader,
    end: Callable[[], object],
    open_device: Callable[[InitMessage], Any] | None = None,
) -> int:
    """Build what the INIT on `connection` describes, then carry out the orders of the ring. Return the exit status.
    `end` is called on another thread when the engine's process has ended. If an OPEN_DEVICE precedes the INIT, `build`
    gets the result of `open_device` too."""
    outgoing, orders = FrameCodec(rank_messages.KINDS), FrameCodec(rank_messages.KINDS)

    def send(kind: int, body: bytes) -> None:
        with suppress(OSError):  # the engine has ended, which ends this rank
            connection.sendall(outgoing.encode(kind, body))

    def fail(doing: str, error: BaseException) -> int:
        if not isinstance(error, PeerLost | StartupError):  # the engine logs these in one line
            log.error("rank %d failed %s", init_message.part.global_rank, doing, exc_info=error)
        send(rank_messages.FAILED, rank_messages.write_failure(_to_failure(error)))
        return 1

    init_messages = _read_init_messages(connection)
    try:
        kind, init_message = next(init_messages)
    except (EOFError, OSError):
        return 1
    except (WireError, StartupError) as error:
        send(rank_messages.FAILED, rank_messages.write_failure(_to_failure(error)))
        return 1
    parent = select.poll()
    parent.register(connection, HANGUP)
    threading.Thread(target=_exit_with_engine, args=(parent, end), name="quire-parent", daemon=True).start()
    logging.getLogger().setLevel(init_message.log_level)
    try:
        if kind == rank_messages.OPEN_DEVICE:
            assert open_device is not None, "there is no GPU here"
            rank_device = open_device(init_message)
            send(rank_messages.QUERY_REPLY, write_json({"told": rank_device.memory_info()}))
            build = partial(build, rank_device=rank_device)
            _, init_message = next(init_messages)
        runner = build(init_message)
    except BaseException as error:
        return fail("at start", error)
    rank = RankWorker(init_message, runner, send)
    answers = {name: RANK_QUERIES[name](runner) for name in ("depth", "attention", "device", "notices")}
    send(rank_messages.READY, write_json(answers))
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
        return fail(rank.activity, error)


def _read_init_messages(connection: socket.socket) -> Iterator[tuple[int, InitMessage]]:
    """Yield the kind and message of the frames before orders: an INIT, or an OPEN_DEVICE, which has the same body, and
    an INIT."""
    frames = FrameCodec(rank_messages.KINDS)
    while True:
        data = connection.recv(READ_SIZE)
        if not data:
            raise EOFError
        for frame in frames.decode(data):
            if frame.kind not in (rank_messages.INIT, rank_messages.OPEN_DEVICE):
                raise WireError("kind", f"{frame.kind} before INIT")
            yield frame.kind, rank_messages.read_init(frame.body)


def _next_record(reader: RingReader, poll: select.poll) -> bytes:
    """Wait for the next record and return it. `poll` watches the reader's event and the engine's socket; the socket is
    readable only when the engine has ended: then raise EngineGone."""
    while not reader:
        for descriptor, _ in poll.poll():
            if descriptor != reader.event:
                raise EngineGone
    return reader.read()


def _exit_with_engine(parent: select.poll, end: Callable[[], object]) -> None:
    """End the process when the engine's has ended, even if a step hangs."""
    parent.poll()
    end()


def _to_failure(error: BaseException) -> RankFailure:
    """Return the RankFailure of an error, with the text and remedy of a StartupError."""
    if isinstance(error, StartupError):
        return RankFailure(error.cause, error.remedy)
    first_line = next(iter(str(error).splitlines()), "")
    text = f"{type(error).__name__}{': ' * bool(first_line)}{first_line}"
    return RankFailure(text[:300], "", isinstance(error, PeerLost))
