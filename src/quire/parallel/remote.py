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

from quire.errors import EngineDead, RanksLost, StartupError
from quire.link.frames import Frame, Frames, read_json, write_json
from quire.link.pulse import SILENT
from quire.parallel.frames import (
    ANSWER,
    ASK,
    BIND,
    CLOSE,
    COLLECT,
    DONE,
    FORGET,
    HELLO,
    KINDS,
    MEET,
    PLAN,
    READY,
    SEE,
    SLEEP,
    TOLD,
    WAKE,
    WARM,
    WARMED,
    Hello,
    read_answer,
    write_bind,
    write_hello,
    write_see,
)
from quire.parallel.meeting import Meeting
from quire.parallel.ring import Ring, RingFull
from quire.parallel.sides import Keeper, Side, Start, end, start_program, started
from quire.vocabulary.columns import WireError
from quire.vocabulary.layout import Layout
from quire.vocabulary.media import Pixels
from quire.vocabulary.plan import Mapped, RankUse, StepPlan, StepResult
from quire.vocabulary.specs import Geometry
from quire.vocabulary.specs import Layout as Addresses
from quire.vocabulary.wire import decode, encode

STARTS = 5  # times as long as a step may take a start
SLICE = 0.1  # seconds of one wait; waits are counted, so that whoever was stopped itself blames nobody
GRACE = 1.0  # seconds in which the cause of a failure is waited for, once its echo is heard
INSIDE = frozenset(("store", "model", "sampler", "graphs", "mixed", "backend"))  # of a ModelRunner
HALTED = 4  # looks at idle ranks in which one may be stopped
CLOSING = 5.0  # seconds for ranks to end by themselves
log = logging.getLogger("quire.parallel")


class RemoteRunner:
    """See control.engine.Runner. `seconds` is how long ranks may take for a step, `meeting` where they meet in it."""

    def __init__(self, layout: Layout | int, seconds: float, start: Start = start_program) -> None:
        """Start the ranks of a layout, or so many that divide each layer: `hello` tells them what to build.
        StartupError where the system has none."""
        self.layout = layout = layout if isinstance(layout, Layout) else Layout(layout)
        ranks = layout.ranks
        self.seconds, self._dead = float(seconds), ""
        self.depth, self.attention, self.device, self.notices = 1, "", "", tuple[str, ...]()
        self.submitted = self.collected = 0
        self._virtual = False
        self._halted = Counter[int]()  # looks in which a rank was stopped, one after another
        self._orders = Frames(KINDS)
        with ExitStack() as undo:
            try:
                self.meeting = meeting = Meeting(layout)
                undo.callback(meeting.close)
                self._ring = ring = Ring(ranks)
                undo.callback(ring.close)
            except (OSError, AttributeError) as error:  # elsewhere than on Linux there are no such memory and events
                raise _refused(ranks, error) from error
            self._keeper = keeper = Keeper(lambda: started(start, ranks, ring, meeting))
            undo.callback(keeper.dismiss)
            self.sides = [Side(rank, child) for rank, child in enumerate(keeper.children())]
            self._poll = select.poll()
            self._heard = {side.connection.fileno(): side for side in self.sides}
            for descriptor in self._heard:
                self._poll.register(descriptor, select.POLLIN)
            self._release = weakref.finalize(self, end, [side.child for side in self.sides], ring, meeting, keeper)
            undo.pop_all()

    def meet(self, hellos: Sequence[Hello]) -> list[dict[str, Any]]:
        """Have each rank open its GPU, and its way to the others: what each tells of it. Of a Hello only part, seconds,
        meeting and what it says of the config's exchange count. StartupError if one can't."""
        self._say(MEET, hellos)
        return [read_json(frame.body)["told"] for frame in self._all(TOLD, STARTS * self.seconds, "at start")]

    def hello(self, hellos: Sequence[Hello]) -> None:
        """Say what each rank is to build; `wait` for it then."""
        self._say(HELLO, hellos)

    def _say(self, kind: int, hellos: Sequence[Hello]) -> None:
        for side, hello in zip(self.sides, hellos, strict=True):
            with suppress(OSError):  # it's gone: whoever waits for it says so
                side.connection.sendall(side.said.write(kind, write_hello(hello)))

    def wait(self) -> None:
        """Wait until all have built their part. StartupError if one can't."""
        said = [read_json(frame.body) for frame in self._all(READY, STARTS * self.seconds, "at start")]
        self.depth = max(min(int(one["depth"]) for one in said), self.layout.pp)
        self.attention, self.device = str(said[0]["attention"]), str(said[0]["device"])
        self.notices = tuple(map(str, said[0]["notices"]))

    def __getattr__(self, name: str) -> NoReturn:
        """What commands look for in a runner that computes here."""
        if name in INSIDE:
            raise StartupError(f"this looks into the runner ({name}), and the model is in processes of its own",
                               "Leave --tp and --executor out")  # fmt: skip
        raise AttributeError(f"a RemoteRunner has no {name}")

    # The runner

    def bind(self, geometry: Geometry) -> None:
        """Allocate the tensors of a memory, on each rank: `geometry` is one rank's."""
        self._virtual = geometry.layout is Addresses.CONTIGUOUS
        self._order(BIND, write_bind(geometry), "at start")
        self._all(DONE, STARTS * self.seconds, "at start")

    def warm_up(self, tokens: int, max_len: int) -> None:
        """See ModelRunner. StartupError if ranks have graphs of different sizes: they would wait for each other's rows
        in vain."""
        for rank, graphs in enumerate(told := self.ask("graphs")):
            for kind in graphs.keys() | told[0].keys():
                if (mine := graphs.get(kind)) != (first := told[0].get(kind)):
                    said = f"rank {rank} captures graphs of {kind} of {mine} rows, rank 0 of {first}"
                    self._die(said[:400], "at start")
        self._order(WARM, WARMED.pack(tokens, max_len), "at start")
        self._all(DONE, STARTS * self.seconds, "at start")

    def sleep(self, level: int) -> None:
        """See control.runners.Sleeping; on each rank."""
        self._order(SLEEP, bytes((level,)))
        self._all(DONE, STARTS * self.seconds, "falling asleep")

    def wake(self, tags: Sequence[str]) -> None:
        """See control.runners.Sleeping; on each rank. EngineDead if one can't: the others are awake by then."""
        self._order(WAKE, write_json({"tags": list(tags)}))
        self._all(DONE, STARTS * self.seconds, "waking up")

    def see(self, pixels: Pixels) -> None:
        """Keep a picture: plans that are submitted from now on may encode it."""
        self._order(SEE, write_see(pixels))

    def forget(self, key: bytes) -> None:
        """No plan that isn't submitted yet encodes this picture."""
        self._order(FORGET, key)

    def submit(self, plan: StepPlan) -> int:
        """Send a step to all ranks; returns its number."""
        self._order(PLAN, encode(plan))
        self.submitted += 1
        return self.submitted

    def collect(self, ticket: int) -> StepResult:
        """Wait for the step of that number. RanksLost if a rank fails, or they don't agree in what they did."""
        if self.layout.pp == 1:  # stages answer as soon as they can
            self._order(COLLECT, b"")
        self.collected += 1
        assert ticket == self.collected, f"step {ticket} is collected out of order, {self.collected} is due"
        frames, first = self._all(ANSWER, self.seconds, f"in step {ticket}"), self.layout.answers
        try:
            answers = [read_answer(frame.body) for frame in frames]
            result = decode(answers[first].result)
        except WireError as error:
            self._die(f"a rank's answer in step {ticket} is none: {error}"[:300])
        assert answers[first].step == ticket, f"rank {first} answers step {answers[first].step}, and {ticket} is due"
        for rank, answer in enumerate(answers):
            draws = rank >= first  # what was drawn only the last stage knows
            if answer[:2] != answers[first][:2] or (draws and answer.drawn != answers[first].drawn):
                self._die(f"rank {rank} applied or drew something else than rank {first} in step {ticket}")
        assert isinstance(result, StepResult), f"rank {first} answers with a result"
        return result

    def ask(self, question: str) -> list[Any]:
        """What each rank answers (quire.parallel.questions)."""
        self._order(ASK, write_json({"question": question}))
        return [read_json(frame.body)["told"] for frame in self._all(TOLD, self.seconds, f"asked for its {question}")]

    @property
    def mapped(self) -> Mapped | None:
        """What was mapped on each rank, where memory is virtual: the most, and of seconds, the longest."""
        told = self._asked("mapped") if self._virtual else []
        return Mapped(*map(max, zip(*told))) if told and None not in told else None

    @property
    def used(self) -> tuple[RankUse, ...]:
        """What each rank's process uses."""
        return tuple(RankUse(seconds, int(size)) for seconds, size in self._asked("used"))

    def _asked(self, question: str) -> list[Any]:
        """The same; nothing where ranks have ended, as whoever wants a step next is told."""
        try:
            return self.ask(question)
        except EngineDead:
            return []

    def check(self) -> None:
        """While nothing is to be done, asked every now and then: RanksLost if a rank has ended, or was stopped for some
        time."""
        if self._dead:
            raise RanksLost(self._dead)
        self._listen(0)
        self._look("between steps")
        for side in self.sides:
            self._halted[side.rank] = self._halted[side.rank] + 1 if side.child.stopped() else 0
            if self._halted[side.rank] > HALTED:
                self._die(f"rank {side.rank} was stopped (SIGSTOP) between steps, and is given up")

    def close(self) -> None:
        """End the ranks. Nothing of them is left."""
        if not self._dead:
            with suppress(EngineDead, RingFull, ValueError):
                self._ring.write(self._orders.write(CLOSE, b""), 0.0)
            answering = self.layout.pp > 1 and self.submitted > self.collected  # nobody reads what stages say unasked
            end = time.monotonic() + (0.0 if answering else CLOSING)
            for side in self.sides:
                side.child.end(max(end - time.monotonic(), 0.0))
        self._dead = self._dead or "it was closed"
        self._release()

    def abandon(self) -> None:
        """End the ranks at once, whatever they do."""
        self._dead = self._dead or "it was abandoned"
        self._release()

    # Orders and answers

    def _order(self, kind: int, body: bytes, when: str = "between steps") -> None:
        """RanksLost, or at start StartupError, if a rank fails while there is no room in the ring, or makes none."""
        if self._dead:
            raise RanksLost(self._dead)
        seconds = self.seconds * (STARTS if when == "at start" else 1)
        try:
            self._ring.write(self._orders.write(kind, body), seconds, self._waiting(when))
        except RingFull as full:
            why = self._why(full.reader)
            self._die(f"rank {full.reader} has not taken what it was sent for {seconds:g} s{why}", when)

    def _waiting(self, when: str) -> Callable[[], None]:
        """What is done while there is no room in the ring: ranks must be able to say what they have to say, and one
        that is stopped never makes room."""
        waited, due, before = 0.0, SILENT, time.monotonic()

        def look() -> None:
            nonlocal waited, due, before
            now = time.monotonic()
            waited, before = waited + min(now - before, SLICE), now
            self._listen(0)
            self._look(when)
            if waited >= due:
                due = waited + SLICE
                self._silent(self.sides, waited, inf, when)

        return look

    def _all(self, kind: int, seconds: float, when: str) -> list[Frame]:
        """The next frame of each rank, which must be of that kind. RanksLost, or at start StartupError, if one fails
        or says nothing for so many seconds."""
        if self._dead:
            raise RanksLost(self._dead)
        waited = 0.0
        boxes = [side.box(kind) for side in self.sides]
        missing = len(boxes)
        while left := sum(not box for box in boxes):
            if left < missing:  # stages answer one after another, and each has its time
                waited, missing = 0.0, left
            if not self._listen(SLICE):
                waited += SLICE
                self._silent([side for side, box in zip(self.sides, boxes) if not box], waited, seconds, when)
            self._look(when)
        frames = [box.popleft() for box in boxes]
        for side, frame in zip(self.sides, frames):
            if frame.kind != kind:
                self._die(f"rank {side.rank} answered with a frame of kind {frame.kind}, not {kind}, {when}")
        return frames

    def _listen(self, seconds: float) -> bool:
        """Take in what ranks say. Whether any said something, for which so many seconds are waited."""
        came = self._poll.poll(seconds * 1000)
        for descriptor, _ in came:
            side = self._heard[descriptor]
            side.read()
            if side.failed is not None:
                self._poll.unregister(descriptor)
                del self._heard[descriptor]
        return bool(came)

    def _silent(self, silent: list[Side], waited: float, seconds: float, when: str) -> None:
        if waited >= SILENT and (stopped := [side for side in silent if side.child.stopped()]):
            self._die(f"rank {stopped[0].rank} was stopped (SIGSTOP) {when}, and is given up", when)
        if waited >= seconds:
            rank = self.meeting.behind(side.rank for side in silent)
            self._die(f"rank {rank} has not answered for {seconds:g} s {when} (--rank-timeout)", when)

    def _look(self, when: str) -> None:
        """End all if a rank has failed. Of several failures one that isn't an echo is named: it may come later."""
        end = time.monotonic() + GRACE
        while failed := [side for side in self.sides if side.failed is not None]:
            causes = [side for side in failed if side.failed is not None and not side.failed.echo]
            if causes:
                cause = causes[0].failed
                assert cause is not None, "it failed"
                said = f"{cause.text} (rank {causes[0].rank})" if cause.remedy else ""  # of a start
                self._die(said or f"rank {causes[0].rank} {_verb(cause.text)} {when}", when, cause.remedy)
            if len(failed) == len(self.sides) or time.monotonic() >= end:
                others = [side.rank for side in self.sides if side.failed is None] or [failed[0].rank]
                echo = failed[0].failed.text if failed[0].failed is not None else ""
                self._die(f"rank {others[0]} doesn't answer the other ranks {when}{self._why(others[0])}: {echo}", when)
            self._listen(SLICE)

    def _why(self, rank: int) -> str:
        return ": it was stopped (SIGSTOP)" if self.sides[rank].child.stopped() else ""

    def _die(self, cause: str, when: str = "", remedy: str = "") -> NoReturn:
        """End all ranks, for that cause."""
        self._dead = cause
        log.error("%s; all ranks are ended", cause)
        self._release()
        raise StartupError(cause, remedy) if when == "at start" else RanksLost(cause)


def _refused(ranks: int, error: Exception) -> StartupError:
    said = getattr(error, "strerror", None) or str(error)
    return StartupError(f"the system has no shared memory or descriptors for {ranks} ranks: {said}",
                        "Use fewer ranks, or see `ulimit -n`")  # fmt: skip


def _verb(said: str) -> str:
    """What a process said of its end is a sentence already, what a rank says of an exception isn't."""
    known = ("was ended", "ended with", "left its connection", "sent what")
    return said if said.startswith(known) else f"failed: {said}"
