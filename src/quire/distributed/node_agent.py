"""The agent of a node: a program that Ray's actor runs where some stages of a model are placed. It connects to the
engine's process, starts the ranks of these stages, and passes on orders to them and their replies. It ends, with its
ranks, when the connection or the actor ends.

Sockets between stages on different nodes are opened here, and inherited by the ranks. Tensors pass through them without
encryption, as through NCCL; each begins with secrets that the engine chose."""

from __future__ import annotations

import ctypes
import hmac
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import psutil

from quire.distributed import node_messages
from quire.distributed.checkpoint_digest import checkpoint_digest
from quire.distributed.node_messages import NodeInfo, NodeStart, RankState
from quire.distributed.rank_handle import launch_rank_process
from quire.distributed.rank_host import LocalHost
from quire.distributed.secure_channel import (
    ChannelLost,
    SecureChannel,
    connect,
    describe_os_error,
    set_link_timeout,
)
from quire.errors import StartupError
from quire.ipc.channel import READ_SIZE
from quire.ipc.child_process import exit_now, ignore_signals
from quire.ipc.frames import Frame, write_json
from quire.kernels.cpu.cores import available_cores
from quire.protocol.columns import WireError

PR_SET_PDEATHSIG = 1
START_SECONDS = 120.0  # for the engine's START, which waits for the agents of all nodes
LINK_START_SECONDS = 60.0  # for the neighbouring stages' agents to connect
STATE_SECONDS = 0.5  # between two looks at the ranks' states, which are reported if they have changed
REPEAT_SECONDS = 2.0  # between two reports if they have not
HANGUP = select.POLLRDHUP | select.POLLHUP | select.POLLERR
SECRET_BYTES = 32
SECRET_SECONDS = 2.0  # for a connecting stage's secret
LOG_BYTES = 1 << 16  # of one read of the log


class EngineGone(Exception):
    """The connection to the engine has ended."""


class NodeAgent:
    """Passes messages between the engine and the ranks of this node."""

    def __init__(self, channel: SecureChannel, host: LocalHost, log: int) -> None:
        """Pass on what is written to the pipe `log`, too."""
        self._channel, self._host, self._log = channel, host, log
        self._numbers = {rank.connection.fileno(): number for number, rank in enumerate(host.ranks)}
        self._poll = select.poll()
        for descriptor in (channel.fileno(), *self._numbers, log):
            self._poll.register(descriptor, select.POLLIN | HANGUP)
        self._states: list[RankState] = []
        self._states_due = self._repeat_due = 0.0

    def run(self) -> NoReturn:
        """Pass messages until the connection to the engine ends; then raise EngineGone."""
        while True:
            self._pump(STATE_SECONDS)
            try:
                frames = self._channel.receive()
            except (ChannelLost, WireError) as error:
                raise EngineGone from error
            for frame in frames:
                self._execute(frame)

    def _execute(self, frame: Frame) -> None:
        if frame.kind == node_messages.ORDERS:
            self._host.write(bytes(frame.body), float("inf"), partial(self._pump, 0.0))
        elif frame.kind == node_messages.TO_RANK:
            number, data = node_messages.read_rank_head(frame.body, len(self._host.ranks))
            with suppress(OSError):  # it has ended, which `_read_rank` reports
                self._host.ranks[number].send(data)
        else:
            raise EngineGone(f"the engine sent a frame of kind {frame.kind}")

    def _pump(self, seconds: float) -> None:
        """Pass on what ranks have sent, and report their states, after waiting up to `seconds` for a message of theirs
        or of the engine. Raise EngineGone if the connection has ended."""
        for descriptor, event in self._poll.poll(seconds * 1000):
            if descriptor == self._channel.fileno():
                if event & HANGUP:
                    raise EngineGone
            elif descriptor == self._log:
                self._pass_log()
            else:
                self._read_rank(descriptor)
        if time.monotonic() >= self._states_due:
            self._report_states()

    def _read_rank(self, descriptor: int) -> None:
        number = self._numbers[descriptor]
        rank = self._host.ranks[number]
        try:
            data = rank.connection.recv(READ_SIZE)
        except OSError:
            data = b""
        self._pass_log()  # a rank writes its traceback before it reports its failure
        if data:
            self._send(node_messages.FROM_RANK, node_messages.RANK_HEAD.pack(number) + data)
            return
        self._poll.unregister(descriptor)
        self._send(node_messages.RANK_EXITED, write_json({"number": number, "told": rank.child.describe_exit()}))

    def _pass_log(self) -> None:
        with suppress(BlockingIOError):
            self._send(node_messages.LOG, os.read(self._log, LOG_BYTES))

    def _report_states(self) -> None:
        self._states_due = time.monotonic() + STATE_SECONDS
        children = [rank.child for rank in self._host.ranks]
        states = [RankState(child.is_stopped(), *self._host.progress(i)) for i, child in enumerate(children)]
        if states != self._states or self._states_due >= self._repeat_due:
            self._states, self._repeat_due = states, self._states_due + REPEAT_SECONDS
            self._send(node_messages.STATES, node_messages.write_states(states))

    def _send(self, kind: int, body: bytes) -> None:
        try:
            self._channel.send(kind, body)
        except OSError as error:
            raise EngineGone from error


def main() -> None:
    """Run the agent. One line of JSON on standard input has `address` and `port` of the engine's process, its
    `certificate`, the `token`, the agent's `number`, the `host` address on which to wait for other agents ("" to wait
    for none), the `gpus` that Ray assigned, and the pid of Ray's actor, `parent`."""
    task = json.loads(sys.stdin.readline())
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != task["parent"]:
        sys.exit("the actor is gone")
    ignore_signals()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        channel = connect(task["address"], task["port"], task["certificate"], node_messages.KINDS)
    except OSError as error:
        sys.exit(f"the engine's process at {task['address']} port {task['port']} can't be reached: {error}")
    listener = _open_listener(task["host"])
    with suppress(OSError):
        info = node_info(listener.getsockname()[1] if listener is not None else 0)
        hello = {"number": task["number"], "token": task["token"], **info._asdict()}
        channel.send(node_messages.HELLO, write_json(hello), START_SECONDS)
    host: LocalHost | None = None
    status = 0
    try:
        start = receive_start(channel)
        log = redirect_output()
        prepare_environment(start, task["gpus"])
        check_checkpoints(start)
        previous, following = open_links(start, listener)
        launcher = partial(launch_rank_process, program=tuple(start.program))
        host = LocalHost(start.layout, start.stages, launcher, previous, following)
        channel.send(node_messages.STARTED, write_json({"descriptors": host.meeting.descriptors}))
        NodeAgent(channel, host, log).run()
    except StartupError as error:
        with suppress(OSError):
            channel.send(node_messages.START_FAILED, write_json({"text": error.cause, "remedy": error.remedy}))
    except (EngineGone, OSError, WireError):
        pass  # the connection has ended, or the engine is none
    except Exception:  # standard error is the log, which is no longer read
        status = 1
        with suppress(OSError):
            channel.send(node_messages.LOG, traceback.format_exc().encode())
    finally:
        if host is not None:
            host.kill()
    exit_now(status)


def node_info(port: int) -> NodeInfo:
    """Return the information about this node."""
    memory, cores = psutil.virtual_memory(), available_cores()
    threads = cores.threads if cores is not None else os.cpu_count() or 1
    return NodeInfo(port, node_messages.installed_versions(), threads, memory.total, memory.available)


def receive_start(channel: SecureChannel) -> NodeStart:
    """Wait for the START. Raise EngineGone if it does not come."""
    poll, end = select.poll(), time.monotonic() + START_SECONDS
    poll.register(channel, select.POLLIN)
    while (left := end - time.monotonic()) > 0:
        poll.poll(left * 1000)
        for frame in channel.receive():
            if frame.kind != node_messages.START:
                raise EngineGone(f"a frame of kind {frame.kind} before START")
            return node_messages.read_start(frame.body)
    raise EngineGone(f"no START came in {START_SECONDS:g} s")


def redirect_output() -> int:
    """Send this process's standard output and errors, which ranks inherit, to a pipe, and return its other end."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    for descriptor in (1, 2):
        os.dup2(writing, descriptor)
    os.close(writing)
    return reading


def prepare_environment(start: NodeStart, gpus: Sequence[str]) -> None:
    """Set the environment of ranks: this node's with the engine's variables, and the GPUs."""
    for name in [name for name in os.environ if name.startswith("RAY_") or name in ENGINE_VARIABLES]:
        del os.environ[name]
    os.environ.update(start.environment)
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


ENGINE_VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")  # Ray sets them for its workers


def engine_environment() -> dict[str, str]:
    """Return the variables of the engine's environment that its ranks get on all nodes."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("QUIRE_", "NCCL_", "TORCH_", "TRITON_", "OMP_", "MKL_"))
        and not name.endswith("_KEY")
        and name != "NCCL_HOSTID"  # by it, NCCL distinguishes nodes
    }


def check_checkpoints(start: NodeStart) -> None:
    """Raise StartupError unless the checkpoints are on this node and are the engine's."""
    node = socket.gethostname()
    for path, digest in start.checkpoints.items():
        if not os.path.exists(path):
            raise StartupError(f"node {node} has no {path}", "Put the model under the same path on all nodes")
        try:
            same = checkpoint_digest(Path(path)) == digest
        except StartupError as error:
            raise StartupError(f"on node {node} {error.cause}", error.remedy) from error
        if not same:
            raise StartupError(
                f"{path} on node {node} is not the engine's: names, sizes or contents of its files differ",
                "Copy the same model to all nodes",
            )


def _open_listener(address: str) -> socket.socket | None:
    if not address:
        return None
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def open_links(start: NodeStart, listener: socket.socket | None) -> tuple[list[socket.socket], list[socket.socket]]:
    """Return sockets to the same ranks of the stages before and after those of this node, if these are on other nodes.
    Raise StartupError if they don't connect in time."""
    end = time.monotonic() + LINK_START_SECONDS
    following: list[socket.socket] = []
    try:
        for ours, _ in _pairs(start.next_secrets):
            following.append(socket.create_connection((start.next_address, start.next_port), LINK_START_SECONDS))
            following[-1].sendall(ours)
        previous = _accept_links(listener, start, end) if start.previous_secrets and listener is not None else []
        for link, (_, theirs) in zip(following, _pairs(start.next_secrets)):
            if not hmac.compare_digest(_receive_secret(link, end), theirs):
                raise StartupError(f"{start.next_address} port {start.next_port} is not the next stage's agent")
    except OSError as error:
        where = f"to {start.next_address} " if start.next_secrets else ""
        raise StartupError(
            f"node {socket.gethostname()} can't connect its stage {where}within {LINK_START_SECONDS:g} s: "
            f"{describe_os_error(error)}",
            "Check that nodes reach each other's ports",
        ) from error
    for link in (*previous, *following):
        link.settimeout(None)
        set_link_timeout(link)
    return previous, following


def _pairs(texts: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """Return the secrets of each rank's connection: the earlier stage's, and the later one's."""
    secrets = [*map(bytes.fromhex, texts)]
    return list(zip(secrets[::2], secrets[1::2]))


def _accept_links(listener: socket.socket, start: NodeStart, end: float) -> list[socket.socket]:
    """Return the connections of the stage before, by rank. Others are closed. Raise TimeoutError after `end`."""
    pairs = _pairs(start.previous_secrets)
    found: dict[int, socket.socket] = {}
    with listener:
        while len(found) < len(pairs):
            listener.settimeout(max(end - time.monotonic(), 0.01))
            link, _ = listener.accept()
            secret = b""
            with suppress(OSError):
                secret = _receive_secret(link, min(end, time.monotonic() + SECRET_SECONDS))
            rank = next((rank for rank, (theirs, _) in enumerate(pairs) if hmac.compare_digest(secret, theirs)), -1)
            if rank < 0 or rank in found:
                link.close()
                continue
            link.sendall(pairs[rank][1])
            found[rank] = link
    return [found[rank] for rank in range(len(pairs))]


def _receive_secret(link: socket.socket, end: float) -> bytes:
    received = b""
    while len(received) < SECRET_BYTES:
        link.settimeout(max(end - time.monotonic(), 0.01))
        data = link.recv(SECRET_BYTES - len(received))
        if not data:
            raise ConnectionError("it was closed")
        received += data
    return received
