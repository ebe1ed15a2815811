"""The ranks of one host: their processes, the ring through which they get orders, and the resources that they share. An
engine starts one for ranks on its own host; the agent of another node starts one for the ranks there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from socket import socket
from typing import Protocol

from quire.distributed.rank_handle import (
    KILL_WAIT_SECONDS,
    RankHandle,
    RankLauncher,
    RankLaunchThread,
    kill_children,
)
from quire.distributed.rendezvous import Meeting, RankRendezvous
from quire.distributed.shared_ring import RingWriter
from quire.errors import StartupError
from quire.ipc.child_process import ChildProcess
from quire.protocol.parallel_layout import ParallelLayout


class RankHost(Protocol):
    """The ranks of some stages, on this host (LocalHost) or on another one (remote_host.RemoteHost)."""

    @property
    def ranks(self) -> Sequence[RankHandle]:
        """The ranks, in the order of their numbers."""

    meeting: Meeting
    cores: int | None  # for their threads; None: those of this process
    memory: tuple[int, int] | None  # total and free bytes of the host's RAM; None: those of this host
    name: str  # in messages; "" for this host

    @property
    def descriptors(self) -> Sequence[int]:
        """What to poll for the ranks' messages."""

    def read(self, descriptor: int) -> bool:
        """Read the messages that one of `descriptors` has. Return False if it will have no more."""

    def write(self, orders: bytes, seconds: float, while_full: Callable[[], None] = ...) -> None:
        """Send orders to all ranks. `while_full` is called repeatedly while they can't be sent. Raise RingFull, with an
        index into `ranks`, after `seconds`."""

    def progress(self, number: int) -> tuple[bool, int]:
        """See RankRendezvous."""

    @property
    def silent_seconds(self) -> float:
        """How long the host has sent nothing."""

    def kill(self) -> None:
        """Kill the ranks at once, and release all resources."""


class LocalHost:
    """A RankHost on this host: the ranks of `stages`, started by `start`. The other arguments are those of
    RankRendezvous."""

    cores: int | None = None
    memory: tuple[int, int] | None = None
    name = ""
    silent_seconds = 0.0

    def __init__(
        self,
        layout: ParallelLayout,
        stages: range,
        start: RankLauncher,
        previous: Sequence[socket] = (),
        following: Sequence[socket] = (),
    ) -> None:
        """Start the ranks. Raise StartupError if the system lacks the resources."""
        count, first = layout.tp * len(stages), layout.tp * stages[0]
        with ExitStack() as undo:
            try:
                self._rendezvous = rendezvous = RankRendezvous(layout, stages, previous, following)
                undo.callback(rendezvous.close)
                self.ring = ring = RingWriter(count)
                undo.callback(ring.close)
            except (OSError, AttributeError) as error:  # only Linux has memfd and eventfd
                raise _no_resources_error(count, error) from error
            self.meeting = rendezvous.meeting
            self._launch_thread = RankLaunchThread(self._launch_ranks(start))
            undo.callback(self._launch_thread.cancel)
            self._children = self._launch_thread.wait_for_children()
            self.ranks: Sequence[RankHandle] = [
                RankHandle(first + index, child) for index, child in enumerate(self._children)
            ]
            self._by_descriptor = {rank.connection.fileno(): rank for rank in self.ranks}
            undo.pop_all()
        self.progress = rendezvous.progress

    def write(self, orders: bytes, seconds: float, while_full: Callable[[], None] = lambda: None) -> None:
        """See RankHost."""
        self.ring.write(orders, seconds, while_full)

    def _launch_ranks(self, start: RankLauncher) -> Callable[[], list[ChildProcess]]:
        ring, descriptors = self.ring, self.meeting.descriptors

        def launch() -> list[ChildProcess]:
            children: list[ChildProcess] = []
            try:
                for index, event in enumerate(ring.events):
                    children.append(start(index, (ring.descriptor, event, *descriptors)))
            except BaseException:
                kill_children(children)
                raise
            return children

        return launch

    @property
    def descriptors(self) -> Sequence[int]:
        """See RankHost."""
        return list(self._by_descriptor)

    def read(self, descriptor: int) -> bool:
        """See RankHost."""
        rank = self._by_descriptor[descriptor]
        rank.read()
        return rank.failure is None

    def kill(self) -> None:
        """See RankHost. All is released even if this is interrupted."""
        with ExitStack() as cleanup:  # callbacks run in reverse order
            cleanup.callback(self._launch_thread.may_exit.set)
            cleanup.callback(self._rendezvous.close)
            cleanup.callback(self.ring.close)
            for child in reversed(self._children):
                for connection in child.connections:
                    cleanup.callback(connection.close)
                cleanup.callback(child.wait_or_kill, KILL_WAIT_SECONDS)
            for child in self._children:
                with suppress(OSError):
                    child.process.kill()


def _no_resources_error(ranks: int, error: Exception) -> StartupError:
    reason = getattr(error, "strerror", None) or str(error)
    return StartupError(f"the system has no shared memory or descriptors for {ranks} ranks: {reason}",
                        "Use fewer ranks, or see `ulimit -n`")  # fmt: skip
