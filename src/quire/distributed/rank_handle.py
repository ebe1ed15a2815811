"""A rank as the engine's process has it: how it is started and ended, and what it said."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from quire.distributed.rank_messages import FAILED, KINDS, STEP_RESULT, RankFailure, read_failure
from quire.distributed.rendezvous import RankRendezvous
from quire.distributed.shared_ring import RingWriter
from quire.errors import StartupError
from quire.ipc.channel import READ_SIZE
from quire.ipc.child_process import ChildProcess, program_arguments
from quire.ipc.frames import Frame, FrameCodec
from quire.protocol.columns import WireError

KILL_WAIT_SECONDS = 5.0  # seconds for a process to go that was killed
RANK_PROGRAM = program_arguments("quire.startup.rank_program")

RankLauncher = Callable[[int, Sequence[int]], ChildProcess]  # of a rank's number, and the descriptors that it inherits


def launch_rank_process(rank: int, inherited: Sequence[int], program: Sequence[str] = RANK_PROGRAM) -> ChildProcess:
    """A rank as a process."""
    return ChildProcess(1, (*program, str(rank)), f"rank {rank}", inherited)


class RankLaunchThread(threading.Thread):
    """Starts ranks, and lives as long as they do: they die with the thread that started them (PR_SET_PDEATHSIG)."""

    def __init__(self, start: Callable[[], list[ChildProcess]]) -> None:
        super().__init__(name="quire-ranks", daemon=True)
        self._launch_ranks, self._launched, self.may_exit = start, threading.Event(), threading.Event()
        self._children: list[ChildProcess] = []
        self._error: BaseException | None = None
        self._cancelled = False

    def run(self) -> None:
        """On its thread."""
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
        """They are started. Raises what starting them raised. An interrupt meanwhile leaves none."""
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
        """None that it has started, or is about to, is wanted."""
        self._cancelled = True
        self.may_exit.set()
        if self.is_alive():
            self.join(KILL_WAIT_SECONDS / 5)  # Ray may take long to start them: they end once it has


class RankHandle:
    """A rank as the engine has it: its process, and what it has said that nobody took yet."""

    def __init__(self, rank: int, child: ChildProcess) -> None:
        self.rank, self.child = rank, child
        self.connection = child.connections[0]
        self.step_results, self.other_frames = deque[Frame](), deque[Frame]()  # of steps, and of all else
        self.failure: RankFailure | None = None  # with a reason of its own, or without any word
        self._decoder, self.encoder = FrameCodec(KINDS), FrameCodec(KINDS)

    def queue_for(self, kind: int) -> deque[Frame]:
        """Where frames of a kind are until they are taken: steps may be answered before anybody asks."""
        return self.step_results if kind == STEP_RESULT else self.other_frames

    def read(self) -> None:
        """Take in what came."""
        try:
            data = self.connection.recv(READ_SIZE)
            for frame in self._decoder.decode(data):
                if frame.kind == FAILED:
                    self.failure = read_failure(frame)
                else:
                    self.queue_for(frame.kind).append(frame)
            if not data and self.failure is None:
                self.failure = RankFailure(self.child.describe_exit())
        except (WireError, OSError) as error:
            self.failure = self.failure or RankFailure(f"sent what is no frame: {error}")


def launch_ranks(start: RankLauncher, ranks: int, ring: RingWriter, meeting: RankRendezvous) -> list[ChildProcess]:
    """All ranks, or none and what was raised."""
    children: list[ChildProcess] = []
    try:
        for rank in range(ranks):
            children.append(start(rank, (ring.descriptor, ring.events[rank], *meeting.descriptors)))
    except BaseException:
        kill_children(children)
        raise
    return children


def kill_children(children: list[ChildProcess]) -> None:
    """End ranks that nobody knows yet."""
    for child in children:
        child.wait_or_kill(0.0)
        for connection in child.connections:
            connection.close()


def release_ranks(
    children: list[ChildProcess], ring: RingWriter, meeting: RankRendezvous, keeper: RankLaunchThread
) -> None:
    """End ranks at once, and let go of all that they had in common, also when it is interrupted."""
    with ExitStack() as left:  # the last first
        left.callback(keeper.may_exit.set)
        left.callback(meeting.close)
        left.callback(ring.close)
        for child in reversed(children):
            for connection in child.connections:
                left.callback(connection.close)
            left.callback(child.wait_or_kill, KILL_WAIT_SECONDS)
        for child in children:
            with suppress(OSError):
                child.process.kill()
