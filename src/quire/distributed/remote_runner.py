"""The runner that stands for ranks: a Runner as control.engine has it, whose work is done by processes with a part of
the model each. Orders go through one ring to all; every step all answer, and must agree.

Each wait is bounded. A rank that ends, hangs or disagrees ends all, and what is told then is the first cause, not its
echoes.
"""

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

from quire.distributed.rank_handle import (
    RankHandle,
    RankLauncher,
    RankLaunchThread,
    launch_rank_process,
    launch_ranks,
    release_ranks,
)
from quire.distributed.rank_messages import (
    ADD_IMAGE,
    BIND,
    CLOSE,
    COLLECT,
    DONE,
    INIT,
    KINDS,
    OPEN_DEVICE,
    PLAN,
    QUERY,
    QUERY_REPLY,
    READY,
    REMOVE_IMAGE,
    SLEEP,
    STEP_RESULT,
    WAKE,
    WARM_UP,
    WARM_UP_BODY,
    InitMessage,
    read_step_result,
    write_add_image,
    write_bind,
    write_init,
)
from quire.distributed.rendezvous import RankRendezvous
from quire.distributed.shared_ring import RingFull, RingWriter
from quire.errors import EngineDead, RanksLost, StartupError
from quire.ipc.frames import Frame, FrameCodec, read_json, write_json
from quire.ipc.heartbeat import SILENCE_SECONDS
from quire.protocol.columns import WireError
from quire.protocol.images import ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.kv_cache_config import KVCacheLayout as Addresses
from quire.protocol.parallel_layout import ParallelLayout
from quire.protocol.step_plan import MappingStats, RankUsage, StepPlan, StepResult
from quire.protocol.wire import decode_frame, encode_frame

START_FACTOR = 5  # times as long as a step may take a start
POLL_SECONDS = 0.1  # seconds of one wait; waits are counted, so that whoever was stopped itself blames nobody
CAUSE_SECONDS = 1.0  # seconds in which the cause of a failure is waited for, once its echo is heard
LOCAL_ATTRIBUTES = frozenset(
    ("store", "model", "sampler", "decode_graphs", "mixed_graphs", "backend")
)  # of a ModelRunner
MAX_STOPPED_CHECKS = 4  # looks at idle ranks in which one may be stopped
CLOSE_SECONDS = 5.0  # seconds for ranks to end by themselves
log = logging.getLogger("quire.distributed")


class RemoteRunner:
    """See control.engine.Runner. `seconds` is how long ranks may take for a step, `rendezvous` where they meet in "
    "it."""

    def __init__(self, layout: ParallelLayout | int, seconds: float, start: RankLauncher = launch_rank_process) -> None:
        """Start the ranks of a layout, or so many that divide each layer: `send_init` tells them what to build.
        StartupError where the system has none."""
        self.layout = layout = layout if isinstance(layout, ParallelLayout) else ParallelLayout(layout)
        ranks = layout.world_size
        self.seconds, self._death_cause = float(seconds), ""
        self.depth, self.attention, self.device, self.notices = 1, "", "", tuple[str, ...]()
        self.submitted = self.collected = 0
        self._virtual = False
        self._stopped_counts = Counter[int]()  # looks in which a rank was stopped, one after another
        self._orders = FrameCodec(KINDS)
        with ExitStack() as undo:
            try:
                self.rendezvous = meeting = RankRendezvous(layout)
                undo.callback(meeting.close)
                self._ring = ring = RingWriter(ranks)
                undo.callback(ring.close)
            except (OSError, AttributeError) as error:  # elsewhere than on Linux there are no such memory and events
                raise _no_resources_error(ranks, error) from error
            self._launch_thread = keeper = RankLaunchThread(lambda: launch_ranks(start, ranks, ring, meeting))
            undo.callback(keeper.cancel)
            self.ranks = [RankHandle(rank, child) for rank, child in enumerate(keeper.wait_for_children())]
            self._poll = select.poll()
            self._ranks_by_fd = {side.connection.fileno(): side for side in self.ranks}
            for descriptor in self._ranks_by_fd:
                self._poll.register(descriptor, select.POLLIN)
            self._finalizer = weakref.finalize(
                self, release_ranks, [side.child for side in self.ranks], ring, meeting, keeper
            )
            undo.pop_all()

    def open_devices(self, hellos: Sequence[InitMessage]) -> list[dict[str, Any]]:
        """Have each rank open its GPU, and its way to the others: what each tells of it. Of a Hello only part, seconds,
        meeting and what it says of the config's exchange count. StartupError if one can't."""
        self._send_init_messages(OPEN_DEVICE, hellos)
        return [
            read_json(frame.body)["told"]
            for frame in self._receive_all(QUERY_REPLY, START_FACTOR * self.seconds, "at start")
        ]

    def send_init(self, hellos: Sequence[InitMessage]) -> None:
        """Say what each rank is to build; `wait_until_built` for it then."""
        self._send_init_messages(INIT, hellos)

    def _send_init_messages(self, kind: int, hellos: Sequence[InitMessage]) -> None:
        for side, hello in zip(self.ranks, hellos, strict=True):
            with suppress(OSError):  # it's gone: whoever waits for it says so
                side.connection.sendall(side.encoder.encode(kind, write_init(hello)))

    def wait_until_built(self) -> None:
        """Wait until all have built their part. StartupError if one can't."""
        said = [read_json(frame.body) for frame in self._receive_all(READY, START_FACTOR * self.seconds, "at start")]
        self.depth = max(min(int(one["depth"]) for one in said), self.layout.pp)
        self.attention, self.device = str(said[0]["attention"]), str(said[0]["device"])
        self.notices = tuple(map(str, said[0]["notices"]))

    def __getattr__(self, name: str) -> NoReturn:
        """What commands look for in a runner that computes here."""
        if name in LOCAL_ATTRIBUTES:
            raise StartupError(f"this looks into the runner ({name}), and the model is in processes of its own",
                               "Leave --tp and --executor out")  # fmt: skip
        raise AttributeError(f"a RemoteRunner has no {name}")

    # The runner

    def bind(self, geometry: KVCacheConfig) -> None:
        """Allocate the tensors of a memory, on each rank: `geometry` is one rank's."""
        self._virtual = geometry.layout is Addresses.CONTIGUOUS
        self._send_order(BIND, write_bind(geometry), "at start")
        self._receive_all(DONE, START_FACTOR * self.seconds, "at start")

    def warm_up(self, tokens: int, max_len: int) -> None:
        """See ModelRunner. StartupError if ranks have graphs of different sizes: they would wait for each other's rows
        in vain."""
        for rank, graphs in enumerate(told := self.query("graphs")):
            for kind in graphs.keys() | told[0].keys():
                if (mine := graphs.get(kind)) != (first := told[0].get(kind)):
                    said = f"rank {rank} captures graphs of {kind} of {mine} rows, rank 0 of {first}"
                    self._fail(said[:400], "at start")
        self._send_order(WARM_UP, WARM_UP_BODY.pack(tokens, max_len), "at start")
        self._receive_all(DONE, START_FACTOR * self.seconds, "at start")

    def sleep(self, level: int) -> None:
        """See control.runners.Sleeping; on each rank."""
        self._send_order(SLEEP, bytes((level,)))
        self._receive_all(DONE, START_FACTOR * self.seconds, "falling asleep")

    def wake(self, tags: Sequence[str]) -> None:
        """See control.runners.Sleeping; on each rank. EngineDead if one can't: the others are awake by then."""
        self._send_order(WAKE, write_json({"tags": list(tags)}))
        self._receive_all(DONE, START_FACTOR * self.seconds, "waking up")

    def add_image(self, pixels: ImagePixels) -> None:
        """Keep a picture: plans that are submitted from now on may encode it."""
        self._send_order(ADD_IMAGE, write_add_image(pixels))

    def remove_image(self, key: bytes) -> None:
        """No plan that isn't submitted yet encodes this picture."""
        self._send_order(REMOVE_IMAGE, key)

    def submit(self, plan: StepPlan) -> int:
        """Send a step to all ranks; returns its number."""
        self._send_order(PLAN, encode_frame(plan))
        self.submitted += 1
        return self.submitted

    def collect(self, ticket: int) -> StepResult:
        """Wait for the step of that number. RanksLost if a rank fails, or they don't agree in what they did."""
        if self.layout.pp == 1:  # stages answer as soon as they can
            self._send_order(COLLECT, b"")
        self.collected += 1
        assert ticket == self.collected, f"step {ticket} is collected out of order, {self.collected} is due"
        frames, first = self._receive_all(STEP_RESULT, self.seconds, f"in step {ticket}"), self.layout.result_rank
        try:
            answers = [read_step_result(frame.body) for frame in frames]
            result = decode_frame(answers[first].result)
        except WireError as error:
            self._fail(f"a rank's answer in step {ticket} is none: {error}"[:300])
        assert answers[first].step == ticket, f"rank {first} answers step {answers[first].step}, and {ticket} is due"
        for rank, answer in enumerate(answers):
            draws = rank >= first  # what was drawn only the last stage knows
            if answer[:2] != answers[first][:2] or (draws and answer.drawn != answers[first].drawn):
                self._fail(f"rank {rank} applied or drew something else than rank {first} in step {ticket}")
        assert isinstance(result, StepResult), f"rank {first} answers with a result"
        return result

    def query(self, question: str) -> list[Any]:
        """What each rank answers (quire.distributed.rank_queries)."""
        self._send_order(QUERY, write_json({"question": question}))
        return [
            read_json(frame.body)["told"]
            for frame in self._receive_all(QUERY_REPLY, self.seconds, f"asked for its {question}")
        ]

    @property
    def mapping_stats(self) -> MappingStats | None:
        """What was mapped on each rank, where memory is virtual: the most, and of seconds, the longest."""
        told = self._query_or_empty("mapped") if self._virtual else []
        return MappingStats(*map(max, zip(*told))) if told and None not in told else None

    @property
    def used(self) -> tuple[RankUsage, ...]:
        """What each rank's process uses."""
        return tuple(RankUsage(seconds, int(size)) for seconds, size in self._query_or_empty("used"))

    def _query_or_empty(self, question: str) -> list[Any]:
        """The same; nothing where ranks have ended, as whoever wants a step next is told."""
        try:
            return self.query(question)
        except EngineDead:
            return []

    def check(self) -> None:
        """While nothing is to be done, asked every now and then: RanksLost if a rank has ended, or was stopped for some
        time."""
        if self._death_cause:
            raise RanksLost(self._death_cause)
        self._poll_ranks(0)
        self._check_failures("between steps")
        for side in self.ranks:
            self._stopped_counts[side.rank] = self._stopped_counts[side.rank] + 1 if side.child.is_stopped() else 0
            if self._stopped_counts[side.rank] > MAX_STOPPED_CHECKS:
                self._fail(f"rank {side.rank} was stopped (SIGSTOP) between steps, and is given up")

    def close(self) -> None:
        """End the ranks. Nothing of them is left."""
        if not self._death_cause:
            with suppress(EngineDead, RingFull, ValueError):
                self._ring.write(self._orders.encode(CLOSE, b""), 0.0)
            answering = self.layout.pp > 1 and self.submitted > self.collected  # nobody reads what stages say unasked
            end = time.monotonic() + (0.0 if answering else CLOSE_SECONDS)
            for side in self.ranks:
                side.child.wait_or_kill(max(end - time.monotonic(), 0.0))
        self._death_cause = self._death_cause or "it was closed"
        self._finalizer()

    def kill(self) -> None:
        """End the ranks at once, whatever they do."""
        self._death_cause = self._death_cause or "it was abandoned"
        self._finalizer()

    # Orders and answers

    def _send_order(self, kind: int, body: bytes, when: str = "between steps") -> None:
        """RanksLost, or at start StartupError, if a rank fails while there is no room in the ring, or makes none."""
        if self._death_cause:
            raise RanksLost(self._death_cause)
        seconds = self.seconds * (START_FACTOR if when == "at start" else 1)
        try:
            self._ring.write(self._orders.encode(kind, body), seconds, self._when_ring_full(when))
        except RingFull as full:
            why = self._stopped_suffix(full.reader)
            self._fail(f"rank {full.reader} has not taken what it was sent for {seconds:g} s{why}", when)

    def _when_ring_full(self, when: str) -> Callable[[], None]:
        """What is done while there is no room in the ring: ranks must be able to say what they have to say, and one
        that is stopped never makes room."""
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
        """The next frame of each rank, which must be of that kind. RanksLost, or at start StartupError, if one fails
        or says nothing for so many seconds."""
        if self._death_cause:
            raise RanksLost(self._death_cause)
        waited = 0.0
        boxes = [side.queue_for(kind) for side in self.ranks]
        missing = len(boxes)
        while left := sum(not box for box in boxes):
            if left < missing:  # stages answer one after another, and each has its time
                waited, missing = 0.0, left
            if not self._poll_ranks(POLL_SECONDS):
                waited += POLL_SECONDS
                self._check_silent([side for side, box in zip(self.ranks, boxes) if not box], waited, seconds, when)
            self._check_failures(when)
        frames = [box.popleft() for box in boxes]
        for side, frame in zip(self.ranks, frames):
            if frame.kind != kind:
                self._fail(f"rank {side.rank} answered with a frame of kind {frame.kind}, not {kind}, {when}")
        return frames

    def _poll_ranks(self, seconds: float) -> bool:
        """Take in what ranks say. Whether any said something, for which so many seconds are waited."""
        came = self._poll.poll(seconds * 1000)
        for descriptor, _ in came:
            side = self._ranks_by_fd[descriptor]
            side.read()
            if side.failure is not None:
                self._poll.unregister(descriptor)
                del self._ranks_by_fd[descriptor]
        return bool(came)

    def _check_silent(self, silent: list[RankHandle], waited: float, seconds: float, when: str) -> None:
        if waited >= SILENCE_SECONDS and (stopped := [side for side in silent if side.child.is_stopped()]):
            self._fail(f"rank {stopped[0].rank} was stopped (SIGSTOP) {when}, and is given up", when)
        if waited >= seconds:
            rank = self.rendezvous.slowest_rank(side.rank for side in silent)
            self._fail(f"rank {rank} has not answered for {seconds:g} s {when} (--rank-timeout)", when)

    def _check_failures(self, when: str) -> None:
        """End all if a rank has failed. Of several failures one that isn't an echo is named: it may come later."""
        end = time.monotonic() + CAUSE_SECONDS
        while failed := [side for side in self.ranks if side.failure is not None]:
            causes = [side for side in failed if side.failure is not None and not side.failure.echo]
            if causes:
                cause = causes[0].failure
                assert cause is not None, "it failed"
                said = f"{cause.text} (rank {causes[0].rank})" if cause.remedy else ""  # of a start
                self._fail(said or f"rank {causes[0].rank} {_as_predicate(cause.text)} {when}", when, cause.remedy)
            if len(failed) == len(self.ranks) or time.monotonic() >= end:
                others = [side.rank for side in self.ranks if side.failure is None] or [failed[0].rank]
                echo = failed[0].failure.text if failed[0].failure is not None else ""
                self._fail(
                    f"rank {others[0]} doesn't answer the other ranks {when}{self._stopped_suffix(others[0])}: {echo}",
                    when,
                )
            self._poll_ranks(POLL_SECONDS)

    def _stopped_suffix(self, rank: int) -> str:
        return ": it was stopped (SIGSTOP)" if self.ranks[rank].child.is_stopped() else ""

    def _fail(self, cause: str, when: str = "", remedy: str = "") -> NoReturn:
        """End all ranks, for that cause."""
        self._death_cause = cause
        log.error("%s; all ranks are ended", cause)
        self._finalizer()
        raise StartupError(cause, remedy) if when == "at start" else RanksLost(cause)


def _no_resources_error(ranks: int, error: Exception) -> StartupError:
    said = getattr(error, "strerror", None) or str(error)
    return StartupError(f"the system has no shared memory or descriptors for {ranks} ranks: {said}",
                        "Use fewer ranks, or see `ulimit -n`")  # fmt: skip


def _as_predicate(said: str) -> str:
    """What a process said of its end is a sentence already, what a rank says of an exception isn't."""
    known = ("was ended", "ended with", "left its connection", "sent what")
    return said if said.startswith(known) else f"failed: {said}"
