"""Ranks placed by Ray (--executor ray), as an alternative to quire.distributed.rank_handle.launch_rank_process. Ray
chooses the node and GPU of a rank, and its actor runs the rank's program as a child; the ring, sockets and memory are
the same as without Ray. All ranks are on this host."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from quire.distributed import ray_rank_bootstrap
from quire.distributed.rank_handle import RANK_PROGRAM
from quire.distributed.ray_address import resolve_ray_address
from quire.distributed.ray_driver import (
    CLOSE_SECONDS,
    KINDS,
    PLACE,
    PLACED,
    RANK_EXITED,
    RANK_LOST,
    PlacementRequest,
    end_session,
)
from quire.distributed.ray_fd_server import RankFdServer
from quire.errors import StartupError
from quire.ipc.channel import READ_SIZE
from quire.ipc.child_process import ChildProcess, describe_exit_code, program_arguments
from quire.ipc.frames import FrameCodec, read_field, read_json, read_uint32, write_json
from quire.protocol.columns import WireError

RAY_START_SECONDS = 120.0  # seconds for Ray to start, or for its cluster to answer
PLACEMENT_SECONDS = 30.0  # seconds for room in the cluster, and for actors to start
RANK_CONNECT_SECONDS = 60.0  # seconds for a rank to connect
EXIT_REPORT_SECONDS = 10.0  # seconds for Ray to report how a rank ended
DRIVER_PROGRAM = program_arguments("quire.distributed.ray_driver")
LAUNCHER = ("-I", "-S", str(Path(ray_rank_bootstrap.__file__)))


class RayLauncher:
    """A RankLauncher (quire.distributed.rank_handle) of `ranks` with `gpus` of a GPU each (0: on a CPU), in the cluster
    at `address` (see ray_address)."""

    def __init__(self, ranks: int, gpus: float, address: str = "", program: Sequence[str] = RANK_PROGRAM) -> None:
        """Raise StartupError if Ray is not installed, or the cluster must not be used."""
        if find_spec("ray") is None:
            raise StartupError("--executor is ray, and Ray isn't installed", "pip install 'quire[ray]'")
        self._ranks, self._gpus, self._address, self._program = ranks, gpus, resolve_ray_address(address), program
        self._group: RayRankGroup | None = None

    def __call__(self, rank: int, inherited: Sequence[int]) -> ChildProcess:
        """Start a rank. All ranks are placed when the first is started. Raise StartupError if that fails."""
        try:
            self._group = self._group or RayRankGroup(self._ranks, self._gpus, self._address)
            return self._group.start_rank(rank, self._program, inherited)
        except BaseException as error:
            if self._group is not None:
                self._group.close()
            if isinstance(error, OSError):
                raise StartupError(f"ranks can't be started by Ray: {error}") from error
            raise


class RayRankGroup:
    """All ranks of a start: Ray's driver process, the socket to which their programs connect, and the reports of the
    driver."""

    def __init__(self, ranks: int, gpus: float, address: str) -> None:
        """Have Ray place the ranks. Raise StartupError if it can't, or takes too long."""
        self.exit_reports: dict[int, tuple[int, str]] = {}  # by rank: the exit status, and its errors at start
        self.loss_reasons: dict[int, str] = {}  # by rank: the process of Ray with which it ended
        self.driver_exited = False
        self._lock, self._frames = threading.RLock(), FrameCodec(KINDS)
        self._last_rank, self._running_ranks = ranks - 1, set(range(ranks))
        self._gpus: list[str] | None = None  # of all ranks, after they are placed
        self._start_error: StartupError | None = None
        self._folder = tempfile.mkdtemp(prefix="quire-ray-")
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._fd_server = RankFdServer(ranks)
            undo.callback(self._fd_server.close)
            self.driver = ChildProcess(1, DRIVER_PROGRAM, "Ray's driver")
            self._connection = self.driver.connections[0]
            undo.pop_all()
        order = PlacementRequest(ranks, gpus, address, self._folder, [sys.executable, *LAUNCHER], self._fd_server.name,
                      self._fd_server.token, PLACEMENT_SECONDS)  # fmt: skip
        try:
            self._connection.sendall(FrameCodec(KINDS).encode(PLACE, write_json(order._asdict())))
            self._wait_until(
                lambda: self._gpus is not None, RAY_START_SECONDS + 2 * PLACEMENT_SECONDS, "has not placed ranks"
            )
        except BaseException:
            self.close()
            raise

    def start_rank(self, rank: int, program: Sequence[str], inherited: Sequence[int]) -> ChildProcess:
        """Send a rank its program. Raise StartupError if the rank does not connect."""
        reports = (self._fd_server.pending, self.exit_reports, self.loss_reasons)
        self._wait_until(
            lambda: any(rank in one for one in reports), RANK_CONNECT_SECONDS, f"has not started rank {rank}"
        )
        if rank not in self._fd_server.pending:
            code, errors = self.exit_reports.get(rank, (0, ""))
            raise _rank_start_error(
                rank, self.loss_reasons.get(rank) or errors.strip() or f"it {describe_exit_code(code)}"
            )
        environment = dict(os.environ)
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus)
        ours, theirs = socket.socketpair()
        numbers = [theirs.fileno(), *inherited]
        arguments = [sys.executable, *program, str(rank), *map(str, numbers)]
        with theirs:
            try:
                process = PidfdProcess(*self._fd_server.send_program(rank, arguments, environment, numbers))
            except OSError as error:
                ours.close()
                raise _rank_start_error(rank, str(error)) from error
        if rank == self._last_rank:
            self._fd_server.close()  # all ranks have connected
        return RayRankProcess(rank, process, ours, self)

    def _wait_until(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Handle events until `done` returns True. Raise StartupError if Ray refuses, fails, or takes longer than
        `seconds`."""
        end = time.monotonic() + seconds
        while not done():
            if self._start_error is not None:
                raise self._start_error
            if self.driver_exited:
                raise StartupError(f"Ray's driver {self.driver.describe_exit()} at start")
            if (left := end - time.monotonic()) <= 0:
                raise StartupError(f"Ray {what} within {seconds:g} s", "See whether its cluster is busy, or hangs")
            self._poll_events(min(left, 1.0))

    def _poll_events(self, seconds: float) -> None:
        """Handle what the driver and connecting ranks send within `seconds`."""
        with self._lock:
            poll = select.poll()
            for one in (self._connection, self._fd_server.socket):
                if one.fileno() >= 0:
                    poll.register(one, select.POLLIN)
            for descriptor, _ in poll.poll(seconds * 1000):
                if descriptor == self._fd_server.socket.fileno():
                    self._fd_server.accept()
                else:
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
            each = read_field(data, "gpus", list)
            self._gpus = list(dict.fromkeys(str(one) for gpus in each for one in gpus))
        elif kind == RANK_EXITED:
            self.exit_reports[read_uint32(data, "rank")] = read_field(data, "code", int), read_field(data, "told", str)
        elif kind == RANK_LOST:
            self.loss_reasons[read_uint32(data, "rank")] = read_field(data, "told", str)
        else:
            self._start_error = StartupError(read_field(data, "text", str), read_field(data, "remedy", str))

    def wait_for_exit_report(self, rank: int, seconds: float) -> None:
        """Wait for Ray's report of a rank's end, for at most `seconds`."""
        end = time.monotonic() + seconds
        while not (rank in self.exit_reports or rank in self.loss_reasons or self.driver_exited):
            if (left := end - time.monotonic()) <= 0:
                return
            self._poll_events(min(left, 0.2))

    def rank_exited(self, rank: int) -> None:
        """Note that a rank has ended. The last one closes the group."""
        self._running_ranks.discard(rank)
        if not self._running_ranks:
            self.close()

    def close(self) -> None:
        """End everything that was started in Ray."""
        with self._lock:
            self._fd_server.close()
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


class PidfdProcess:
    """A process that is not a child of this one, with the interface of subprocess.Popen. `descriptor` is its pidfd."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid, self._descriptor = pid, descriptor  # -1 after its end

    def poll(self) -> int | None:
        """Return None while the process runs, else -1: its exit status is not known here."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raise subprocess.TimeoutExpired after `timeout` seconds."""
        if self._descriptor >= 0:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            os.close(self._descriptor)
            self._descriptor = -1
        return -1

    def kill(self) -> None:
        """Kill the process."""
        if self._descriptor >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


class RayRankProcess(ChildProcess):
    """A rank that Ray placed."""

    def __init__(self, rank: int, process: PidfdProcess, connection: socket.socket, group: RayRankGroup) -> None:
        self.process = cast("subprocess.Popen[bytes]", process)
        self.connections, self._rank, self._group = [connection], rank, group

    def describe_exit(self, timeout: float = EXIT_REPORT_SECONDS) -> str:
        """Describe how the rank ended, as Ray reports it: by itself, or with a process of Ray."""
        self._group.wait_for_exit_report(self._rank, timeout)
        if self._rank in self._group.exit_reports:
            return describe_exit_code(self._group.exit_reports[self._rank][0])
        if self._rank in self._group.loss_reasons:
            return f"was ended with {self._group.loss_reasons[self._rank]}"
        if self._group.driver_exited:
            return f"was ended with Ray's driver, which {self._group.driver.describe_exit()}"
        return "was ended, and Ray doesn't say how" if self.has_exited() else "left its connection, and goes on"

    def is_stopped(self) -> bool:
        """See ChildProcess."""
        return not self.has_exited() and super().is_stopped()

    def wait_or_kill(self, timeout: float) -> bool:
        """See ChildProcess. The end of the last rank closes the group."""
        by_itself = super().wait_or_kill(timeout)
        self._group.rank_exited(self._rank)
        return by_itself


def _rank_start_error(rank: int, why: str) -> StartupError:
    return StartupError(f"rank {rank}, which Ray placed, could not begin: {why}")
