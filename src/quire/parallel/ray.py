"""Ranks that Ray places (--executor ray): another way to start those of quire.parallel.sides. Ray decides where a rank
is and which GPU it has, and its actor holds the rank's program as a child; ring, sockets and memory are the same as
elsewhere. All on this host.
"""

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

from quire.errors import StartupError
from quire.link.channel import AT_ONCE
from quire.link.child import Child, program_of, status_of
from quire.link.frames import Frames, field, number, read_json, write_json
from quire.parallel import ray_rank
from quire.parallel.ray_address import address_of
from quire.parallel.ray_door import Door
from quire.parallel.ray_driver import CLOSING, ENDED, KINDS, LOST, PLACE, PLACED, Order, end_session
from quire.parallel.sides import PROGRAM
from quire.vocabulary.columns import WireError

OPENS = 120.0  # seconds in which Ray must start, or its cluster be reached
PATIENCE = 30.0  # seconds in which others must leave room in a cluster, and actors must start in it
COMES = 60.0  # seconds for a rank's program to ask for its descriptors
WORD = 10.0  # seconds in which Ray tells how a rank ended
DRIVER = program_of("quire.parallel.ray_driver")
LAUNCHER = ("-I", "-S", str(Path(ray_rank.__file__)))


class RayStart:
    """A Start (quire.parallel.sides) of `ranks` with `gpus` of a GPU each (0: on a CPU), in the cluster that `address`
    names (see ray_address)."""

    def __init__(self, ranks: int, gpus: float, address: str = "", program: Sequence[str] = PROGRAM) -> None:
        """StartupError where Ray isn't installed, or that cluster isn't to be used."""
        if find_spec("ray") is None:
            raise StartupError("--executor is ray, and Ray isn't installed", "pip install 'quire[ray]'")
        self._ranks, self._gpus, self._address, self._program = ranks, gpus, address_of(address), program
        self._group: Group | None = None

    def __call__(self, rank: int, inherited: Sequence[int]) -> Child:
        """The rank, which all others are placed with when the first is asked for. StartupError if it can't be."""
        try:
            self._group = self._group or Group(self._ranks, self._gpus, self._address)
            return self._group.seat(rank, self._program, inherited)
        except BaseException as error:
            if self._group is not None:
                self._group.close()
            if isinstance(error, OSError):
                raise StartupError(f"ranks can't be started by Ray: {error}") from error
            raise


class Group:
    """All ranks of a start: the process that is Ray's driver, the door at which their programs come, and what was
    heard of them."""

    def __init__(self, ranks: int, gpus: float, address: str) -> None:
        """Have Ray place them. StartupError if it can't, or takes too long."""
        self.ended: dict[int, tuple[int, str]] = {}  # by ranks: the status, and what was said at first
        self.lost: dict[int, str] = {}  # ... what of Ray's they ended with
        self.over = False  # the driver has ended
        self._lock, self._frames = threading.RLock(), Frames(KINDS)
        self._last, self._left = ranks - 1, set(range(ranks))
        self._gpus: list[str] | None = None  # of all ranks, once they are placed
        self._refused: StartupError | None = None
        self._folder = tempfile.mkdtemp(prefix="quire-ray-")
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._door = Door(ranks)
            undo.callback(self._door.close)
            self.driver = Child(1, DRIVER, "Ray's driver")
            self._connection = self.driver.connections[0]
            undo.pop_all()
        order = Order(ranks, gpus, address, self._folder, [sys.executable, *LAUNCHER], self._door.name,
                      self._door.token, PATIENCE)  # fmt: skip
        try:
            self._connection.sendall(Frames(KINDS).write(PLACE, write_json(order._asdict())))
            self._until(lambda: self._gpus is not None, OPENS + 2 * PATIENCE, "has not placed ranks")
        except BaseException:
            self.close()
            raise

    def seat(self, rank: int, program: Sequence[str], inherited: Sequence[int]) -> Child:
        """Give a rank's program what it waits for. StartupError if it doesn't come."""
        heard = (self._door.waiting, self.ended, self.lost)
        self._until(lambda: any(rank in one for one in heard), COMES, f"has not started rank {rank}")
        if rank not in self._door.waiting:
            code, said = self.ended.get(rank, (0, ""))
            raise _not_begun(rank, self.lost.get(rank) or said.strip() or f"it {status_of(code)}")
        environment = dict(os.environ)
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus)
        ours, theirs = socket.socketpair()
        numbers = [theirs.fileno(), *inherited]
        arguments = [sys.executable, *program, str(rank), *map(str, numbers)]
        with theirs:
            try:
                process = Process(*self._door.tell(rank, arguments, environment, numbers))
            except OSError as error:
                ours.close()
                raise _not_begun(rank, str(error)) from error
        if rank == self._last:
            self._door.close()  # nobody else is expected
        return PlacedRank(rank, process, ours, self)

    def _until(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Hear what comes until it's done. StartupError if Ray refuses, fails, or takes longer."""
        end = time.monotonic() + seconds
        while not done():
            if self._refused is not None:
                raise self._refused
            if self.over:
                raise StartupError(f"Ray's driver {self.driver.status()} at start")
            if (left := end - time.monotonic()) <= 0:
                raise StartupError(f"Ray {what} within {seconds:g} s", "See whether its cluster is busy, or hangs")
            self._hear(min(left, 1.0))

    def _hear(self, seconds: float) -> None:
        """Take in what the driver, and programs at the door, say within so many seconds."""
        with self._lock:
            poll = select.poll()
            for one in (self._connection, self._door.socket):
                if one.fileno() >= 0:
                    poll.register(one, select.POLLIN)
            for descriptor, _ in poll.poll(seconds * 1000):
                if descriptor == self._door.socket.fileno():
                    self._door.admit()
                else:
                    self._read()

    def _read(self) -> None:
        try:
            data = self._connection.recv(AT_ONCE)
            if not data:
                self._reap(1.0)
            for kind, body in self._frames.feed(data):
                self._take(kind, read_json(body))
        except (WireError, OSError) as error:
            self._refused = StartupError(f"Ray's driver sent what is no frame: {error}")

    def _take(self, kind: int, said: dict[str, Any]) -> None:
        if kind == PLACED:
            each = field(said, "gpus", list)
            self._gpus = list(dict.fromkeys(str(one) for gpus in each for one in gpus))
        elif kind == ENDED:
            self.ended[number(said, "rank")] = field(said, "code", int), field(said, "told", str)
        elif kind == LOST:
            self.lost[number(said, "rank")] = field(said, "told", str)
        else:
            self._refused = StartupError(field(said, "text", str), field(said, "remedy", str))

    def word(self, rank: int, seconds: float) -> None:
        """Wait so long at most for what Ray tells of a rank's end."""
        end = time.monotonic() + seconds
        while not (rank in self.ended or rank in self.lost or self.over):
            if (left := end - time.monotonic()) <= 0:
                return
            self._hear(min(left, 0.2))

    def leave(self, rank: int) -> None:
        """A rank has ended; with the last all ends."""
        self._left.discard(rank)
        if not self._left:
            self.close()

    def close(self) -> None:
        """Nothing of Ray's is left that wasn't there before."""
        with self._lock:
            self._door.close()
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)  # the driver sees that, and ends all
            self._reap(CLOSING)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _reap(self, seconds: float) -> None:
        """The driver ends, or is ended after so many seconds, and nothing that it started is left."""
        if not self.over:
            self.driver.end(seconds)
            self.over = True
            end_session(self.driver.process.pid)
            self._connection.close()


class Process:
    """A process that isn't this one's child, as subprocess has those that are. `descriptor` is its pidfd."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid, self._descriptor = pid, descriptor  # -1: it has ended

    def poll(self) -> int | None:
        """None until it has ended; how isn't known here."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. subprocess.TimeoutExpired where it doesn't come."""
        if self._descriptor >= 0:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            os.close(self._descriptor)
            self._descriptor = -1
        return -1

    def kill(self) -> None:
        """End it at once."""
        if self._descriptor >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


class PlacedRank(Child):
    """A rank that Ray placed."""

    def __init__(self, rank: int, process: Process, connection: socket.socket, group: Group) -> None:
        self.process = cast("subprocess.Popen[bytes]", process)
        self.connections, self._rank, self._group = [connection], rank, group

    def status(self, timeout: float = WORD) -> str:
        """How it ended, as Ray tells: by itself, or with something of Ray's."""
        self._group.word(self._rank, timeout)
        if self._rank in self._group.ended:
            return status_of(self._group.ended[self._rank][0])
        if self._rank in self._group.lost:
            return f"was ended with {self._group.lost[self._rank]}"
        if self._group.over:
            return f"was ended with Ray's driver, which {self._group.driver.status()}"
        return "was ended, and Ray doesn't say how" if self.ended() else "left its connection, and goes on"

    def stopped(self) -> bool:
        """See Child."""
        return not self.ended() and super().stopped()

    def end(self, timeout: float) -> bool:
        """See Child. With the last rank's end all of Ray's is let go."""
        by_itself = super().end(timeout)
        self._group.leave(self._rank)
        return by_itself


def _not_begun(rank: int, why: str) -> StartupError:
    return StartupError(f"rank {rank}, which Ray placed, could not begin: {why}")
