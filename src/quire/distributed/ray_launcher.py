"""Ranks placed by Ray (--executor ray), as an alternative to quire.distributed.rank_host.LocalHost. Ray chooses nodes
and GPUs; an agent on each node starts the ranks there and connects to this process."""

from __future__ import annotations

import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from typing import Any

from quire.distributed import node_messages
from quire.distributed.rank_handle import RANK_PROGRAM
from quire.distributed.ray_address import resolve_ray_address
from quire.distributed.ray_driver import (
    AGENT_EXITED,
    AGENT_LOST,
    CLOSE_SECONDS,
    KINDS,
    PLACE,
    PLACED,
    RUN,
    PlacementRequest,
    end_session,
)
from quire.distributed.remote_host import AcceptedAgent, RemoteHost, start_hosts
from quire.distributed.secure_channel import ChannelListener
from quire.errors import StartupError
from quire.ipc.channel import READ_SIZE
from quire.ipc.child_process import ChildProcess, describe_exit_code, program_arguments
from quire.ipc.frames import FrameCodec, read_field, read_json, read_uint32, write_json
from quire.protocol.columns import WireError
from quire.protocol.parallel_layout import ParallelLayout

RAY_START_SECONDS = 120.0  # seconds for Ray to start, or for its cluster to answer
PLACEMENT_SECONDS = 30.0  # seconds for room in the cluster, and for actors to start
AGENT_CONNECT_SECONDS = 60.0  # seconds for agents to connect
EXIT_REPORT_SECONDS = 10.0  # seconds for Ray to report how an agent ended
POLL_SECONDS = 0.05
DRIVER_PROGRAM = program_arguments("quire.distributed.ray_driver")
AGENT_PROGRAM = program_arguments("quire.distributed.node_agent")


class RayLauncher:
    """Starts ranks with `gpus` of a GPU each (0: on a CPU) in the cluster at `address` (see ray_address). `checkpoints`
    are the folders or files of the model and the draft model; ranks are Python with the arguments `program`."""

    def __init__(
        self, gpus: float, address: str = "", checkpoints: Sequence[str] = (), program: Sequence[str] = RANK_PROGRAM
    ) -> None:
        """Raise StartupError if Ray is not installed, or the cluster must not be used."""
        if find_spec("ray") is None:
            raise StartupError("--executor is ray, and Ray isn't installed", "pip install 'quire[ray]'")
        self._gpus, self._address = gpus, resolve_ray_address(address)
        self._checkpoints, self._program = checkpoints, program

    def __call__(self, layout: ParallelLayout) -> list[RemoteHost]:
        """Start the ranks of a layout. Raise StartupError if that fails."""
        placement: RayPlacement | None = None
        try:
            placement = RayPlacement(layout, self._gpus, self._address)
            return placement.start_hosts(self._checkpoints, self._program)
        except BaseException as error:
            if placement is not None:
                placement.close()
            if isinstance(error, OSError):
                raise StartupError(f"ranks can't be started by Ray: {error}") from error
            raise


class RayPlacement:
    """The nodes of a start: Ray's driver process and its reports."""

    def __init__(self, layout: ParallelLayout, gpus: float, address: str) -> None:
        """Have Ray place the stages. Raise StartupError if it can't, or takes too long."""
        self.layout = layout
        self.loss_reasons: dict[int, str] = {}  # by number of the node: how its agent ended
        self.driver_exited = False
        self._lock, self._frames, self._orders = threading.RLock(), FrameCodec(KINDS), FrameCodec(KINDS)
        self._here, self._nodes = "", list[tuple[str, range]]()  # this node's address; each node's address and stages
        self._start_error: StartupError | None = None
        self._listener: ChannelListener | None = None
        self._folder = tempfile.mkdtemp(prefix="quire-ray-")
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self.driver = ChildProcess(1, DRIVER_PROGRAM, "Ray's driver")
            self._connection = self.driver.connections[0]
            undo.pop_all()
        order = PlacementRequest(
            layout.tp, layout.pp, gpus, address, self._folder, list(AGENT_PROGRAM), PLACEMENT_SECONDS
        )
        try:
            self._send(PLACE, order._asdict())
            self._wait_until(
                lambda: bool(self._nodes), RAY_START_SECONDS + 2 * PLACEMENT_SECONDS, "has not placed ranks"
            )
        except BaseException:
            self.close()
            raise

    def start_hosts(self, checkpoints: Sequence[str], program: Sequence[str]) -> list[RemoteHost]:
        """Run the agents and start their ranks. Raise StartupError if one can't begin."""
        count = len(self._nodes)
        listener = self._listener = ChannelListener(self._here, count, node_messages.KINDS, node_messages.HELLO)
        self._send(RUN, {
            "address": self._here, "port": listener.port, "certificate": listener.certificate, "token": listener.token,
        })  # fmt: skip

        def connected() -> bool:
            for number, why in self.loss_reasons.items():
                raise StartupError(f"node {self._nodes[number][0]} was lost with {why}")
            return len(listener.accepted) == count

        self._wait_until(connected, AGENT_CONNECT_SECONDS, "has not started the nodes' agents")
        agents = [
            AcceptedAgent(address, address, stages, *listener.accepted.pop(number))
            for number, (address, stages) in enumerate(self._nodes)
        ]
        return start_hosts(self.layout, agents, checkpoints, self.describe_loss, self.close, program)

    def describe_loss(self, number: int) -> str:
        """Wait for Ray's report of how the agent of a node ended, and return it, or "" if none comes."""
        end = time.monotonic() + EXIT_REPORT_SECONDS
        while number not in self.loss_reasons and not self.driver_exited and time.monotonic() < end:
            self._poll_events(POLL_SECONDS)
        if number not in self.loss_reasons:
            return f"Ray's driver, which {self.driver.describe_exit()}" if self.driver_exited else ""
        return self.loss_reasons[number]

    def _send(self, kind: int, body: dict[str, Any]) -> None:
        with suppress(OSError):  # the driver has ended, which `_wait_until` reports
            self._connection.sendall(self._orders.encode(kind, write_json(body)))

    def _wait_until(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Handle events until `done` returns True. Raise StartupError if Ray refuses, fails, or takes longer than
        `seconds`."""
        end = time.monotonic() + seconds
        while not done():
            if self._start_error is not None:
                raise self._start_error
            if self.driver_exited:
                raise StartupError(f"Ray's driver {self.driver.describe_exit()} at start")
            if time.monotonic() >= end:
                raise StartupError(f"Ray {what} within {seconds:g} s", "See whether its cluster is busy, or hangs")
            self._poll_events(POLL_SECONDS)

    def _poll_events(self, seconds: float) -> None:
        """Handle what the driver sends within `seconds`."""
        with self._lock:
            if self.driver_exited:
                return
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            if poll.poll(seconds * 1000):
                self._read()

    def _read(self) -> None:
        try:
            data = self._connection.recv(READ_SIZE)
            if not data:
                self._reap(1.0)
            for kind, body in self._frames.decode(data):
                self._handle_message(kind, read_json(body))
        except (WireError, OSError) as error:
            self._start_error = StartupError(f"Ray's driver sent what is no frame: {error}")

    def _handle_message(self, kind: int, data: dict[str, Any]) -> None:
        if kind == PLACED:
            self._here, first = read_field(data, "here", str), 0
            for node in read_field(data, "nodes", list):
                count = read_uint32(node, "stages")
                self._nodes.append((read_field(node, "address", str), range(first, first + count)))
                first += count
        elif kind == AGENT_EXITED:
            told = read_field(data, "told", str).strip().rpartition("\n")[2]  # may be a warning of a library
            how = f"its node's agent, which {describe_exit_code(read_field(data, 'code', int))}"
            self.loss_reasons.setdefault(read_uint32(data, "number"), f"{how}: {told}" if told else how)
        elif kind == AGENT_LOST:
            self.loss_reasons.setdefault(read_uint32(data, "number"), read_field(data, "told", str))
        else:
            self._start_error = StartupError(read_field(data, "text", str), read_field(data, "remedy", str))

    def close(self) -> None:
        """End everything that was started in Ray."""
        with self._lock:
            if self._listener is not None:
                self._listener.close()
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)  # the driver ends everything at the end of its connection
            self._reap(CLOSE_SECONDS)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _reap(self, seconds: float) -> None:
        """Wait for the driver's end, kill it after `seconds`, and end all that it started."""
        if not self.driver_exited:
            self.driver.wait_or_kill(seconds)
            self.driver_exited = True
            end_session(self.driver.process.pid)
            self._connection.close()
