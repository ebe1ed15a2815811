"""Ranks from the engine's side: start their processes, read their messages, and end them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from socket import socket

from quire.distributed.rank_messages import FAILED, KINDS, STEP_RESULT, RankFailure, read_failure
from quire.errors import StartupError
from quire.ipc.channel import READ_SIZE
from quire.ipc.child_process import ChildProcess, program_arguments
from quire.ipc.frames import Frame, FrameCodec
from quire.protocol.columns import WireError

KILL_WAIT_SECONDS = 5.0  # seconds for a killed process to end
RANK_PROGRAM = program_arguments("quire.startup.rank_program")

RankLauncher = Callable[[int, Sequence[int]], ChildProcess]  # arguments: rank, inherited descriptors


def launch_rank_process(rank: int, inherited: Sequence[int], program: Sequence[str] = RANK_PROGRAM) -> ChildProcess:
    """Start a rank as a child process."""
    return ChildProcess(1, (*program, str(rank)), f"rank {rank}", inherited)


class RankLaunchThread(threading.Thread):
    """A thread that starts ranks and lives as long as they do: they die with the thread that started them
    (PR_SET_PDEATHSIG)."""

    def __init__(self, start: Callable[[], list[ChildProcess]]) -> None:
        super().__init__(name="quire-ranks", daemon=True)
        self._launch_ranks, self._launched, self.may_exit = start, threading.Event(), threading.Event()
        self._children: list[ChildProcess] = []
        self._error: BaseException | None = None
        self._cancelled = False

    def run(self) -> None:
        """Start the ranks, then wait for `may_exit`."""
        try:
            self._children = self._launch_ranks()
        except BaseException as error:
            self._error = error
            self.may_exit.set()
        self._launched.set()
        self.may_exit.wait()
        if self._cancelled:
            kill_children(self._children)

    def wait_for_children(self) -> list[ChildProcess]:
        """Start the thread, and return the ranks' processes. Raise what starting them raised. An interrupt cancels the
        start."""
        try:
            self.start()
        except RuntimeError as error:
            raise StartupError(f"the system has no thread to start ranks: {error}", "See `ulimit -u`") from error
        try:
            self._launched.wait()
        except BaseException:
            self.cancel()
            raise
        if self._error is not None:
            raise self._error
        return self._children

    def cancel(self) -> None:
        """End the ranks that the thread has started or is starting."""
        self._cancelled = True
        self.may_exit.set()
        if self.is_alive():
            self.join(KILL_WAIT_SECONDS / 5)  # Ray may take longer: `run` ends them then


class RankHandle:
    """A rank: its process, its received frames, and its failure."""

    def __init__(self, rank: int, child: ChildProcess) -> None:
        self.rank, self.child = rank, child
        self.step_results, self.other_frames = deque[Frame](), deque[Frame]()  # results of steps, and all other frames
        self.failure: RankFailure | None = None  # reported by the rank, or the end of its process
        self._decoder, self.encoder = FrameCodec(KINDS), FrameCodec(KINDS)

    @property
    def connection(self) -> socket:
        """The engine's end of the rank's socket."""
        return self.child.connections[0]

    def queue_for(self, kind: int) -> deque[Frame]:
        """Return the queue of received frames of that kind. Step results have their own, because they may arrive before
        they are asked for."""
        return self.step_results if kind == STEP_RESULT else self.other_frames

    def send(self, data: bytes) -> None:
        """Send a frame before orders. Raise OSError if the rank has ended."""
        self.connection.sendall(data)

    def read(self) -> None:
        """Read from the rank's socket."""
        try:
            data = self.connection.recv(READ_SIZE)
        except OSError as error:
            self.failure = self.failure or RankFailure(f"sent what is no frame: {error}")
            return
        self.feed(data)
        if not data and self.failure is None:
            self.failure = RankFailure(self.child.describe_exit())

    def feed(self, data: bytes) -> None:
        """Decode what the rank has sent."""
        try:
            for frame in self._decoder.decode(data):
                if frame.kind == FAILED:
                    self.failure = read_failure(frame)
                else:
                    self.queue_for(frame.kind).append(frame)
        except WireError as error:
            self.failure = self.failure or RankFailure(f"sent what is no frame: {error}")


def kill_children(children: list[ChildProcess]) -> None:
    """End ranks that have no RankHandle yet."""
    for child in children:
        child.wait_or_kill(0.0)
        for connection in child.connections:
            connection.close()
