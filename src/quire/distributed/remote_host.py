"""The ranks of another node, as the engine's process sees them, through the node's agent
(quire.distributed.node_agent)."""

from __future__ import annotations

import secrets
import select
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from quire.distributed import node_messages
from quire.distributed.checkpoint_digest import checkpoint_digest
from quire.distributed.node_agent import SECRET_BYTES, START_SECONDS, engine_environment
from quire.distributed.node_messages import NodeInfo, NodeStart, RankState, check_versions, read_node_info
from quire.distributed.rank_handle import RANK_PROGRAM, RankHandle
from quire.distributed.rank_messages import RankFailure
from quire.distributed.rendezvous import Meeting, slowest_rank
from quire.distributed.secure_channel import ChannelLost, SecureChannel
from quire.distributed.shared_ring import RingFull
from quire.errors import StartupError
from quire.ipc.child_process import ChildProcess
from quire.ipc.frames import Frame, read_field, read_json, write_json
from quire.protocol.columns import WireError
from quire.protocol.parallel_layout import ParallelLayout

POLL_SECONDS = 0.1
MAX_TEXT_CHARS = 1000  # of an error that an agent reports


class RemoteRankProcess(ChildProcess):
    """A rank's process on another node, as its agent reports it."""

    def __init__(self, host: RemoteHost, number: int) -> None:
        self._host, self._number, self.exit = host, number, ""

    def is_stopped(self) -> bool:
        """See ChildProcess; as of the last report."""
        return not self.exit and self._host.states[self._number].stopped

    def wait_or_kill(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the rank's end. Return True if it came. The agent kills a rank that goes on
        when the host is closed."""
        end = time.monotonic() + timeout
        poll = select.poll()
        while not self.exit and self._host.descriptors:
            if (left := end - time.monotonic()) <= 0:
                break
            poll.register(self._host.descriptors[0], select.POLLIN)
            poll.poll(min(left, POLL_SECONDS) * 1000)
            self._host.read(self._host.descriptors[0])
        return bool(self.exit)


class RemoteRankHandle(RankHandle):
    """A rank on another node."""

    def __init__(self, rank: int, host: RemoteHost, number: int) -> None:
        super().__init__(rank, RemoteRankProcess(host, number))
        self.child: RemoteRankProcess
        self._host, self._number = host, number

    def send(self, data: bytes) -> None:
        """See RankHandle."""
        self._host.channel.send(node_messages.TO_RANK, node_messages.RANK_HEAD.pack(self._number) + data)


class RemoteHost:
    """A RankHost (quire.distributed.rank_host) on another node. `describe_loss` is called once when the connection has
    ended, and returns why, or ""; `on_close` is called once at the end."""

    def __init__(
        self,
        name: str,
        info: NodeInfo,
        channel: SecureChannel,
        start: NodeStart,
        describe_loss: Callable[[], str],
        on_close: Callable[[], None],
    ) -> None:
        self.name, self.channel, self._start = name, channel, start
        self.cores: int | None = info.cores
        self.memory: tuple[int, int] | None = info.total_bytes, info.free_bytes
        self.meeting = Meeting()
        self._describe_loss, self._on_close, self._lost = describe_loss, on_close, False
        first, count = start.tp * start.first_stage, start.tp * start.num_stages
        self.states = [RankState(False, False, 0)] * count
        self.ranks = [RemoteRankHandle(first + number, self, number) for number in range(count)]
        self.start_error: StartupError | None = None
        self.is_closed, self._heard = False, time.monotonic()
        channel.send(node_messages.START, write_json(start._asdict()), START_SECONDS)

    @property
    def descriptors(self) -> Sequence[int]:
        """See RankHost."""
        return () if self._lost else (self.channel.fileno(),)

    def read(self, descriptor: int) -> bool:
        """See RankHost."""
        if self._lost:
            return False
        try:
            for frame in self.channel.receive():
                self._handle_message(frame)
            self._heard = time.monotonic()
        except ChannelLost as error:
            reason = self._describe_loss()
            self._lose(
                f"was ended with {reason}" if reason else f"was lost with the connection to node {self.name} ({error})"
            )
        except WireError as error:
            self._lose(f"sent what is no frame, through node {self.name}: {error}")
        return not self._lost

    def _lose(self, why: str) -> None:
        self._lost = True
        self.start_error = self.start_error or StartupError(f"a rank on node {self.name} {why}")
        for number in range(len(self.ranks)):
            self._note_exit(number, why)

    def _note_exit(self, number: int, how: str) -> None:
        rank = self.ranks[number]
        rank.failure = rank.failure or RankFailure(how)
        rank.child.exit = rank.child.exit or how

    def _handle_message(self, frame: Frame) -> None:
        kind, body = frame
        count = len(self.ranks)
        if kind == node_messages.FROM_RANK:
            number, data = node_messages.read_rank_head(body, count)
            self.ranks[number].feed(data)
        elif kind == node_messages.RANK_EXITED:
            self._note_exit(*node_messages.read_exit(body, count))
        elif kind == node_messages.STATES:
            self.states = node_messages.read_states(body, count)
        elif kind == node_messages.LOG:
            with suppress(OSError, ValueError):  # this process's standard error may be closed
                sys.stderr.write(bytes(body).decode(errors="replace"))
                sys.stderr.flush()
        elif kind == node_messages.STARTED:
            self.meeting = node_messages.read_started(body, self._start)
        elif kind == node_messages.START_FAILED:
            told = read_json(body)
            text, remedy = (read_field(told, name, str)[:MAX_TEXT_CHARS] for name in ("text", "remedy"))
            self.start_error = StartupError(text, remedy)
        else:
            raise WireError("kind", f"{kind} is not an agent's")

    def write(self, orders: bytes, seconds: float, while_full: Callable[[], None] = lambda: None) -> None:
        """See RankHost. Raise ChannelLost if the connection has ended."""
        size = node_messages.MAX_ORDER_BYTES
        for start in range(0, len(orders), size):
            try:
                self.channel.send(node_messages.ORDERS, orders[start : start + size], seconds, while_full)
            except TimeoutError as error:
                numbers = range(len(self.ranks))  # the agent waits for one of these
                raise RingFull(slowest_rank({i: self.progress(i) for i in numbers}, numbers), seconds) from error

    def progress(self, number: int) -> tuple[bool, int]:
        """See RankHost; as of the last report."""
        return self.states[number].waiting, self.states[number].exchanges

    @property
    def silent_seconds(self) -> float:
        """See RankHost. An agent sends something every REPEAT_SECONDS."""
        return time.monotonic() - self._heard

    def kill(self) -> None:
        """See RankHost: the agent kills the ranks when its connection ends."""
        if not self.is_closed:
            self._lost = self.is_closed = True
            self.channel.close()
            self._on_close()


class AcceptedAgent(NamedTuple):
    """An agent that has connected: the node's name, its address for other agents, its stages, the connection, and the
    body of its HELLO."""

    name: str
    address: str
    stages: range
    channel: SecureChannel
    hello: dict[str, Any]


def start_hosts(
    layout: ParallelLayout,
    agents: Sequence[AcceptedAgent],
    checkpoints: Sequence[str],
    describe_loss: Callable[[int], str],
    on_close: Callable[[], None],
    program: Sequence[str] = RANK_PROGRAM,
) -> list[RemoteHost]:
    """Have agents, in the order of their stages, start the ranks of a layout; `checkpoints` are the folders or
    files of the model and the draft model. `describe_loss` returns why the agent of that number has ended, or "".
    `on_close` is called when all hosts are closed. Raise StartupError if nodes differ or can't start the ranks."""
    hosts: list[RemoteHost] = []

    def closed() -> None:
        if all(host.is_closed for host in hosts):
            on_close()

    try:
        infos = [_read_info(agent) for agent in agents]
        digests = {path: checkpoint_digest(Path(path)) for path in checkpoints}
        links = [[secrets.token_hex(SECRET_BYTES) for _ in range(2 * layout.tp)] for _ in agents[1:]]
        for number, (agent, info) in enumerate(zip(agents, infos)):
            following = number + 1 < len(agents)
            start = NodeStart(
                layout.tp, layout.pp, agent.stages[0], len(agent.stages), list(program), engine_environment(), digests,
                next_address=agents[number + 1].address if following else "",
                next_port=infos[number + 1].port if following else 0,
                previous_secrets=links[number - 1] if number else [],
                next_secrets=links[number] if following else [],
            )  # fmt: skip
            host = RemoteHost(agent.name, info, agent.channel, start, partial(describe_loss, number), closed)
            hosts.append(host)
        _wait_until_started(hosts)
    except BaseException:
        for host in hosts:
            host.kill()
        for agent in agents:
            agent.channel.close()
        raise
    return hosts


def _read_info(agent: AcceptedAgent) -> NodeInfo:
    """Return the NodeInfo of an agent. Raise StartupError if the node differs from this one."""
    try:
        info = read_node_info(agent.hello)
    except WireError as error:
        raise StartupError(f"node {agent.name} sent what is no frame: {error}") from error
    check_versions(agent.name, info.versions)
    return info


def _wait_until_started(hosts: Sequence[RemoteHost]) -> None:
    """Wait until all agents have started their ranks. Raise StartupError if one can't, or takes too long."""
    end = time.monotonic() + START_SECONDS
    poll = select.poll()
    by_descriptor = {host.channel.fileno(): host for host in hosts}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    while missing := [host.name for host in hosts if not host.meeting.descriptors]:
        if time.monotonic() >= end:
            raise StartupError(f"node {missing[0]} has not started its ranks within {START_SECONDS:g} s")
        for descriptor, _ in poll.poll(POLL_SECONDS * 1000):
            by_descriptor[descriptor].read(descriptor)
        for host in hosts:
            if host.start_error is not None:
                raise host.start_error
