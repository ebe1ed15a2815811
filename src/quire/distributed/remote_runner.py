"""The runner that stands for ranks: a core.runner.Runner whose work is done by processes with a part of the model each.
Orders go through one ring to all ranks; each step all ranks reply, and their replies must agree.

Every wait has a timeout. A rank that ends, hangs or disagrees ends all ranks, and the error names the first cause, not
the failures that follow from it."""

from __future__ import annotations

import logging
import select
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from math import inf
from typing import Any, NoReturn

from quire.distributed import rank_messages
from quire.distributed.rank_handle import RankHandle, RankLauncher, launch_rank_process
from quire.distributed.rank_host import LocalHost, RankHost
from quire.distributed.rank_messages import InitMessage
from quire.distributed.rendezvous import START_FACTOR, slowest_rank
from quire.distributed.shared_ring import RingFull
from quire.errors import EngineDead, RanksLost, StartupError
from quire.ipc.frames import Frame, FrameCodec, read_json, write_json
from quire.ipc.heartbeat import SILENCE_SECONDS
from quire.protocol.columns import WireError
from quire.protocol.images import ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheLayout
from quire.protocol.parallel_layout import ParallelLayout
from quire.protocol.step_plan import MappingStats, RankUsage, StepPlan, StepResult
from quire.protocol.wire import decode_frame, encode_frame

# Timeout of one wait. Waits are counted, not seconds, so that an engine that was itself stopped does not fail ranks.
POLL_SECONDS = 0.1
CAUSE_SECONDS = 1.0  # seconds to wait for the cause of a failure after the failures that follow from it
LOCAL_ATTRIBUTES = frozenset(("store", "model", "sampler", "decode_graphs", "mixed_graphs", "backend"))
NODE_SILENCE_SECONDS = 20.0  # after which a node is given up, though its system acknowledges
MAX_STOPPED_CHECKS = 4  # successive checks of idle ranks in which one may be stopped
CLOSE_SECONDS = 5.0  # seconds for ranks to end by themselves
log = logging.getLogger("quire.distributed")


HostOpener = Callable[[ParallelLayout], Sequence[RankHost]]  # starts the ranks of a layout


class RemoteRunner:
    """See core.runner.Runner. `seconds` is the time that ranks may take for a step, `hosts` are the ranks by host."""

    def __init__(
        self,
        layout: ParallelLayout | int,
        seconds: float,
        start: RankLauncher = launch_rank_process,
        open_hosts: HostOpener | None = None,
    ) -> None:
        """Start the ranks of a layout, or of that number of tensor-parallel ranks: on this host by `start`, or by
        `open_hosts`. `send_init` sends them what to build. Raise StartupError if the system lacks the resources."""
        self.layout = layout = layout if isinstance(layout, ParallelLayout) else ParallelLayout(layout)
        self.seconds, self._death_cause = float(seconds), ""
        self.depth, self.attention, self.device, self.notices = 1, "", "", tuple[str, ...]()
        self.submitted = self.collected = 0
        self._virtual = False
        self._stopped_counts = Counter[int]()  # successive checks in which a rank was stopped
        self._orders = FrameCodec(rank_messages.KINDS)
        self.hosts: Sequence[RankHost] = (
            [LocalHost(layout, range(layout.pp), start)] if open_hosts is None else open_hosts(layout)
        )
        self._finalizer = weakref.finalize(self, kill_hosts, self.hosts)
        self.ranks = [rank for host in self.hosts for rank in host.ranks]
        self._poll = select.poll()
        self._hosts_by_fd = {descriptor: host for host in self.hosts for descriptor in host.descriptors}
        for descriptor in self._hosts_by_fd:
            self._poll.register(descriptor, select.POLLIN)

    def open_devices(self, hellos: Sequence[InitMessage]) -> list[dict[str, Any]]:
        """Have each rank open its GPU and its exchange, and return the memory information of each, with the name of its
        `node`. Of an InitMessage only part, seconds and the config's settings of the exchange are used. Raise
        StartupError if a rank fails."""
        self._send_init_messages(rank_messages.OPEN_DEVICE, hellos)
        nodes = [host.name for host in self.hosts for _ in host.ranks]
        infos = self._receive_answers(START_FACTOR * self.seconds, "at start")
        return [{**info, "node": node} for info, node in zip(infos, nodes, strict=True)]

    def send_init(self, hellos: Sequence[InitMessage]) -> None:
        """Send each rank what to build; `wait_until_built` waits for it."""
        self._send_init_messages(rank_messages.INIT, hellos)

    def _send_init_messages(self, kind: int, hellos: Sequence[InitMessage]) -> None:
        meetings = [host.meeting for host in self.hosts for _ in host.ranks]
        for rank, init_message, meeting in zip(self.ranks, hellos, meetings, strict=True):
            body = rank_messages.write_init(init_message._replace(meeting=meeting))
            with suppress(OSError):  # the rank has ended, which `_receive_all` reports
                rank.send(rank.encoder.encode(kind, body))

    def wait_until_built(self) -> None:
        """Wait until all ranks have built their part. Raise StartupError if one fails."""
        frames = self._receive_all(rank_messages.READY, START_FACTOR * self.seconds, "at start")
        replies = [read_json(frame.body) for frame in frames]
        self.depth = max(min(int(one["depth"]) for one in replies), self.layout.pp)
        self.attention, self.device = str(replies[0]["attention"]), str(replies[0]["device"])
        # CPU ranks describe their kernels, the first rank for all; of GPUs, only some have links to other nodes.
        described = replies[:1] if self.device == "cpu" else replies
        self.notices = tuple(dict.fromkeys(str(notice) for one in described for notice in one["notices"]))

    def __getattr__(self, name: str) -> NoReturn:
        """Raise StartupError for the attributes of a ModelRunner that commands use, else AttributeError."""
        if name in LOCAL_ATTRIBUTES:
            raise StartupError(f"this reads {name} of the runner, but the model is in other processes",
                               "Leave --tp and --executor out")  # fmt: skip
        raise AttributeError(f"a RemoteRunner has no {name}")

    # The interface Runner

    def bind(self, geometry: KVCacheConfig) -> None:
        """Allocate the memory's tensors on each rank; `geometry` is that of one rank."""
        self._virtual = geometry.layout is KVCacheLayout.CONTIGUOUS
        self._send_and_wait(rank_messages.BIND, rank_messages.write_bind(geometry), "at start")

    def warm_up(self, tokens: int, max_len: int) -> None:
        """See ModelRunner. Raise StartupError if ranks have graphs of different sizes: they would wait for each other's
        rows in vain."""
        for rank, graphs in enumerate(captured := self.query("graphs")):
            for kind in graphs.keys() | captured[0].keys():
                if (mine := graphs.get(kind)) != (first := captured[0].get(kind)):
                    cause = f"rank {rank} captures graphs of {kind} of {mine} rows, rank 0 of {first}"
                    self._fail(cause[:400], "at start")
        self._send_and_wait(rank_messages.WARM_UP, rank_messages.WARM_UP_BODY.pack(tokens, max_len), "at start")

    def sleep(self, level: int) -> None:
        """See core.runner.SleepableRunner; on each rank."""
        self._send_and_wait(rank_messages.SLEEP, bytes((level,)), "falling asleep")

    def wake(self, tags: Sequence[str]) -> None:
        """See core.runner.SleepableRunner; on each rank. Raise EngineDead if one fails: the others are awake then."""
        self._send_and_wait(rank_messages.WAKE, write_json({"tags": list(tags)}), "waking up")

    def add_image(self, pixels: ImagePixels) -> None:
        """Send an image's pixels: plans that are submitted from now on may encode it."""
        self._send_order(rank_messages.ADD_IMAGE, rank_messages.write_add_image(pixels))

    def remove_image(self, key: bytes) -> None:
        """Drop an image's pixels: no later plan encodes it."""
        self._send_order(rank_messages.REMOVE_IMAGE, key)

    def submit(self, plan: StepPlan) -> int:
        """Send a step to all ranks and return its number."""
        self._send_order(rank_messages.PLAN, encode_frame(plan))
        self.submitted += 1
        return self.submitted

    def collect(self, ticket: int) -> StepResult:
        """Wait for the step of that number and return its result. Raise RanksLost if a rank fails, or if ranks
        disagree."""
        if self.layout.pp == 1:  # stages reply without being asked
            self._send_order(rank_messages.COLLECT, b"")
        self.collected += 1
        assert ticket == self.collected, f"step {ticket} is collected out of order, {self.collected} is due"
        frames = self._receive_all(rank_messages.STEP_RESULT, self.seconds, f"in step {ticket}")
        first = self.layout.result_rank
        try:
            replies = [rank_messages.read_step_result(frame.body) for frame in frames]
            result = decode_frame(replies[first].result)
        except WireError as error:
            self._fail(f"a rank's result of step {ticket} is malformed: {error}"[:300])
        assert replies[first].step == ticket, f"rank {first} answers step {replies[first].step}, and {ticket} is due"
        for rank, reply in enumerate(replies):
            samples = rank >= first  # only the last stage samples
            if reply[:2] != replies[first][:2] or (samples and reply.sampled != replies[first].sampled):
                self._fail(f"rank {rank} applied or sampled differently from rank {first} in step {ticket}")
        assert isinstance(result, StepResult), f"rank {first} answers with a result"
        return result

    def query(self, question: str) -> list[Any]:
        """Return each rank's answer to a question (quire.distributed.rank_queries)."""
        self._send_order(rank_messages.QUERY, write_json({"question": question}))
        return self._receive_answers(self.seconds, f"asked for its {question}")

    def _receive_answers(self, seconds: float, when: str) -> list[Any]:
        frames = self._receive_all(rank_messages.QUERY_REPLY, seconds, when)
        return [read_json(frame.body)["told"] for frame in frames]

    @property
    def mapping_stats(self) -> MappingStats | None:
        """The mapping statistics of virtual memory: the maximum over ranks of each field."""
        stats = self._query_or_empty("mapped") if self._virtual else []
        return MappingStats(*map(max, zip(*stats))) if stats and None not in stats else None

    @property
    def used(self) -> tuple[RankUsage, ...]:
        """What each rank's process uses."""
        return tuple(RankUsage(seconds, int(size)) for seconds, size in self._query_or_empty("used"))

    def _query_or_empty(self, question: str) -> list[Any]:
        """Return the same as `query`, or nothing if ranks have ended, which the next step reports."""
        try:
            return self.query(question)
        except EngineDead:
            return []

    def check(self) -> None:
        """Raise RanksLost if a rank has ended, or was stopped for some time. Called regularly while there is nothing to
        do."""
        if self._death_cause:
            raise RanksLost(self._death_cause)
        self._poll_ranks(0)
        self._check_failures("between steps")
        self._check_nodes("between steps")
        for rank in self.ranks:
            self._stopped_counts[rank.rank] = self._stopped_counts[rank.rank] + 1 if rank.child.is_stopped() else 0
            if self._stopped_counts[rank.rank] > MAX_STOPPED_CHECKS:
                self._fail(f"rank {rank.rank} was stopped (SIGSTOP) between steps, and is given up")

    def close(self) -> None:
        """End the ranks and release all their resources."""
        if not self._death_cause:
            order = self._orders.encode(rank_messages.CLOSE, b"")
            for host in self.hosts:
                with suppress(EngineDead, RingFull, OSError, ValueError):
                    host.write(order, 0.0)
            # Stages may block in sending results that are no longer read.
            answering = self.layout.pp > 1 and self.submitted > self.collected
            end = time.monotonic() + (0.0 if answering else CLOSE_SECONDS)
            for rank in self.ranks:
                rank.child.wait_or_kill(max(end - time.monotonic(), 0.0))
        self._death_cause = self._death_cause or "it was closed"
        self._finalizer()

    def kill(self) -> None:
        """Kill the ranks at once."""
        self._death_cause = self._death_cause or "it was abandoned"
        self._finalizer()

    # Orders and replies

    def _send_order(self, kind: int, body: bytes, when: str = "between steps") -> None:
        """Send an order. Raise RanksLost, or at start StartupError, if a rank fails or makes no room while the ring is
        full."""
        if self._death_cause:
            raise RanksLost(self._death_cause)
        seconds = self.seconds * (START_FACTOR if when == "at start" else 1)
        order = self._orders.encode(kind, body)
        for host in self.hosts:
            try:
                host.write(order, seconds, self._when_ring_full(when))
            except RingFull as full:
                rank = host.ranks[full.reader].rank
                why = self._stopped_suffix(rank)
                self._fail(f"rank {rank} has not taken what it was sent for {seconds:g} s{why}", when)
            except OSError:  # the host is gone, which the next reply reports
                self._check_failures(when)

    def _send_and_wait(self, kind: int, body: bytes, when: str) -> None:
        """Send an order and wait until all ranks have carried it out, for as long as a start may take."""
        self._send_order(kind, body, when)
        self._receive_all(rank_messages.DONE, START_FACTOR * self.seconds, when)

    def _when_ring_full(self, when: str) -> Callable[[], None]:
        """Return a function to be called while the ring is full. It reads the ranks' messages, since ranks must be able
        to send theirs, and fails for a stopped rank, which never makes room."""
        waited, due, before = 0.0, SILENCE_SECONDS, time.monotonic()

        def look() -> None:
            nonlocal waited, due, before
            now = time.monotonic()
            waited, before = waited + min(now - before, POLL_SECONDS), now
            self._poll_ranks(0)
            self._check_failures(when)
            if waited >= due:
                due = waited + POLL_SECONDS
                self._check_silent(self.ranks, waited, inf, when)

        return look

    def _receive_all(self, kind: int, seconds: float, when: str) -> list[Frame]:
        """Return the next frame of each rank, which must be of that kind. Raise RanksLost, or at start StartupError, if
        a rank fails or is silent for `seconds`."""
        if self._death_cause:
            raise RanksLost(self._death_cause)
        waited = 0.0
        queues = [rank.queue_for(kind) for rank in self.ranks]
        missing = len(queues)
        while num_missing := sum(not queue for queue in queues):
            if num_missing < missing:  # stages reply one after another, and each has the whole timeout
                waited, missing = 0.0, num_missing
            if not self._poll_ranks(POLL_SECONDS):
                waited += POLL_SECONDS
                silent = [rank for rank, queue in zip(self.ranks, queues) if not queue]
                self._check_silent(silent, waited, seconds, when)
            self._check_failures(when)
        frames = [queue.popleft() for queue in queues]
        for rank, frame in zip(self.ranks, frames):
            if frame.kind != kind:
                self._fail(f"rank {rank.rank} answered with a frame of kind {frame.kind}, not {kind}, {when}")
        return frames

    def _poll_ranks(self, seconds: float) -> bool:
        """Read the ranks' messages, waiting up to `seconds` for one. Return True if any came."""
        came = self._poll.poll(seconds * 1000)
        for descriptor, _ in came:
            if not self._hosts_by_fd[descriptor].read(descriptor):
                self._poll.unregister(descriptor)
                del self._hosts_by_fd[descriptor]
        return bool(came)

    def _check_nodes(self, when: str) -> None:
        for host in self.hosts:
            if host.silent_seconds >= NODE_SILENCE_SECONDS:
                self._fail(f"the agent of node {host.name} has been silent for {NODE_SILENCE_SECONDS:g} s {when}", when)

    def _check_silent(self, silent: list[RankHandle], waited: float, seconds: float, when: str) -> None:
        if waited >= SILENCE_SECONDS and (stopped := [side for side in silent if side.child.is_stopped()]):
            self._fail(f"rank {stopped[0].rank} was stopped (SIGSTOP) {when}, and is given up", when)
        self._check_nodes(when)
        if waited >= seconds:
            every = [host.progress(number) for host in self.hosts for number in range(len(host.ranks))]
            rank = slowest_rank(dict(enumerate(every)), (side.rank for side in silent))
            self._fail(f"rank {rank} has not answered for {seconds:g} s {when} (--rank-timeout)", when)

    def _check_failures(self, when: str) -> None:
        """End all ranks if one has failed. Of several failures, name one that does not follow from another; it may
        arrive later."""
        end = time.monotonic() + CAUSE_SECONDS
        while failed := [rank for rank in self.ranks if rank.failure is not None]:
            causes = [rank for rank in failed if rank.failure is not None and not rank.failure.echo]
            if causes:
                cause = causes[0].failure
                assert cause is not None, "it failed"
                text = f"{cause.text} (rank {causes[0].rank})" if cause.remedy else ""  # at start
                self._fail(text or f"rank {causes[0].rank} {_as_predicate(cause.text)} {when}", when, cause.remedy)
            if len(failed) == len(self.ranks) or time.monotonic() >= end:
                others = [rank.rank for rank in self.ranks if rank.failure is None] or [failed[0].rank]
                echo = failed[0].failure.text if failed[0].failure is not None else ""
                self._fail(
                    f"rank {others[0]} doesn't answer the other ranks {when}{self._stopped_suffix(others[0])}: {echo}",
                    when,
                )
            self._poll_ranks(POLL_SECONDS)

    def _stopped_suffix(self, rank: int) -> str:
        return ": it was stopped (SIGSTOP)" if self.ranks[rank].child.is_stopped() else ""

    def _fail(self, cause: str, when: str = "", remedy: str = "") -> NoReturn:
        """End all ranks and raise the cause."""
        self._death_cause = cause
        log.error("%s; all ranks are ended", cause)
        self._finalizer()
        raise StartupError(cause, remedy) if when == "at start" else RanksLost(cause)


def kill_hosts(hosts: Sequence[RankHost]) -> None:
    """Kill all ranks at once and release their resources, even if interrupted."""
    with ExitStack() as cleanup:
        for host in hosts:
            cleanup.callback(host.kill)


def _as_predicate(text: str) -> str:
    """Make a predicate of a failure's text: the description of a process's end is one already, that of an exception is
    not."""
    known = ("was ended", "was lost", "ended with", "left its connection", "sent what")
    return text if text.startswith(known) else f"failed: {text}"
