"""A rank as the engine's process has it: how it is started and ended, and what it said."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from quire.errors import StartupError
from quire.link.channel import AT_ONCE
from quire.link.child import Child, program_of
from quire.link.frames import Frame, Frames
from quire.parallel.frames import ANSWER, FAILED, KINDS, Failed, read_failed
from quire.parallel.meeting import Meeting
from quire.parallel.ring import Ring
from quire.vocabulary.columns import WireError

KILLED = 5.0  # seconds for a process to go that was killed
PROGRAM = program_of("quire.parallel.rank")

Start = Callable[[int, Sequence[int]], Child]  # of a rank's number, and the descriptors that it inherits


def start_program(rank: int, inherited: Sequence[int], program: Sequence[str] = PROGRAM) -> Child:
    """A rank as a process."""
    return Child(1, (*program, str(rank)), f"rank {rank}", inherited)


class Keeper(threading.Thread):
    """Starts ranks, and lives as long as they do: they die with the thread that started them (PR_SET_PDEATHSIG)."""

    def __init__(self, start: Callable[[], list[Child]]) -> None:
        super().__init__(name="quire-ranks", daemon=True)
        self._start_all, self._up, self.let_go = start, threading.Event(), threading.Event()
        self._children: list[Child] = []
        self._error: BaseException | None = None
        self._unwanted = False

    def run(self) -> None:
        """On its thread."""
        try:
            self._children = self._start_all()
        except BaseException as error:
            self._error = error
            self.let_go.set()
        self._up.set()
        self.let_go.wait()
        if self._unwanted:
            drop(self._children)

    def children(self) -> list[Child]:
        """They are started. Raises what starting them raised. An interrupt meanwhile leaves none."""
        try:
            self.start()
        except RuntimeError as error:
            raise StartupError(f"the system has no thread to start ranks: {error}", "See `ulimit -u`") from error
        try:
            self._up.wait()
        except BaseException:
            self.dismiss()
            raise
        if self._error is not None:
            raise self._error
        return self._children

    def dismiss(self) -> None:
        """None that it has started, or is about to, is wanted."""
        self._unwanted = True
        self.let_go.set()
        if self.is_alive():
            self.join(KILLED / 5)  # Ray may take long to start them: they end once it has


class Side:
    """A rank as the engine has it: its process, and what it has said that nobody took yet."""

    def __init__(self, rank: int, child: Child) -> None:
        self.rank, self.child = rank, child
        self.connection = child.connections[0]
        self.answers, self.inbox = deque[Frame](), deque[Frame]()  # of steps, and of all else
        self.failed: Failed | None = None  # with a reason of its own, or without any word
        self._frames, self.said = Frames(KINDS), Frames(KINDS)

    def box(self, kind: int) -> deque[Frame]:
        """Where frames of a kind are until they are taken: steps may be answered before anybody asks."""
        return self.answers if kind == ANSWER else self.inbox

    def read(self) -> None:
        """Take in what came."""
        try:
            data = self.connection.recv(AT_ONCE)
            for frame in self._frames.feed(data):
                if frame.kind == FAILED:
                    self.failed = read_failed(frame)
                else:
                    self.box(frame.kind).append(frame)
            if not data and self.failed is None:
                self.failed = Failed(self.child.status())
        except (WireError, OSError) as error:
            self.failed = self.failed or Failed(f"sent what is no frame: {error}")


def started(start: Start, ranks: int, ring: Ring, meeting: Meeting) -> list[Child]:
    """All ranks, or none and what was raised."""
    children: list[Child] = []
    try:
        for rank in range(ranks):
            children.append(start(rank, (ring.descriptor, ring.events[rank], *meeting.descriptors)))
    except BaseException:
        drop(children)
        raise
    return children


def drop(children: list[Child]) -> None:
    """End ranks that nobody knows yet."""
    for child in children:
        child.end(0.0)
        for connection in child.connections:
            connection.close()


def end(children: list[Child], ring: Ring, meeting: Meeting, keeper: Keeper) -> None:
    """End ranks at once, and let go of all that they had in common, also when it is interrupted."""
    with ExitStack() as left:  # the last first
        left.callback(keeper.let_go.set)
        left.callback(meeting.close)
        left.callback(ring.close)
        for child in reversed(children):
            for connection in child.connections:
                left.callback(connection.close)
            left.callback(child.end, KILLED)
        for child in children:
            with suppress(OSError):
                child.process.kill()
