"""The host of an engine: one thread that works off what fronts send, steps, and tells each front what came for it.

The same for a thread of the front's own process and for a process of the engine's own. Whoever sends waits for nobody;
the thread sleeps on a condition when there is nothing to do.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quire.control.engine import Engine
from quire.control.outcomes import Output
from quire.control.recent import Recent
from quire.control.request import Request
from quire.control.scene import scene
from quire.errors import EngineDead, InputError
from quire.link.caring import Caring
from quire.link.held_pixels import HeldPixels
from quire.link.messages import (
    Abort,
    Add,
    Answer,
    Care,
    Died,
    Facts,
    FromEngine,
    FromFront,
    Look,
    Prefixes,
    Progress,
    Register,
    Release,
    Stepped,
    Stop,
    facts_of,
    queues_of,
)
from quire.link.pulse import Health, Pulse
from quire.vocabulary.columns import MOST_ROWS

log = logging.getLogger("quire")

FACTS_EVERY = 0.25  # seconds between two looks at the memory's usage while busy
UNWATCHED = 10.0  # seconds without a look, and steps aren't noted any more
CHECK_EVERY = 0.5  # seconds between two looks at a runner that can end by itself
FIRST = 0  # the number of the first front

Tell = Callable[[int, FromEngine], None]
"""Hands a message to a front, on the engine's thread. One that left is passed over."""


class Owned:
    """A request of the engine, and whose it is."""

    __slots__ = ("front", "id", "number", "request", "seen", "told")

    def __init__(self, front: int, number: int, id: str, request: Request) -> None:
        self.front, self.number, self.id, self.request = front, number, id, request
        self.told = False  # anything of it
        self.seen: Iterable[bytes] = ()  # the keys of its pictures

    def progress(self) -> Progress:
        """How far it has come."""
        request = self.request
        return Progress(
            self.number, request.max_tokens, request.scheduled, request.first_token, request.cached_tokens,
            request.preemptions,
        )  # fmt: skip


class Left:
    """A front is gone. After the last one the engine ends."""


class Host:
    """`engine`, driven by whoever calls `run`. `seconds` is the processor time that it took; a turn of more than
    `stall_after` seconds is a stall."""

    def __init__(
        self, engine: Engine, tell: Tell, stall_after: float = 60.0, seconds: Callable[[], float] = time.thread_time
    ) -> None:
        self.engine, self._tell, self._seconds = engine, tell, seconds
        self.pulse = Pulse(stall_after)
        self.fronts = [FIRST]
        self._wake = threading.Condition()
        self._sent: deque[tuple[int, FromFront | Left]] = deque()
        self._taken: deque[tuple[int, FromFront | Left]] = deque()
        self._closing = False
        self._owned: dict[str, Owned] = {}  # by the request's id
        self._numbered: dict[tuple[int, int], Owned] = {}  # by front and number
        self._looked, self._dirty = time.monotonic(), True
        self._seen = (0.0, 0.0)  # when somebody looked last, and the processor time until then
        self._telling = 0.0  # processor time to tell the last look
        self._computed = 0
        self.pictures, self.caring = HeldPixels(), Caring(engine)
        self._late: list[tuple[int, Stop]] = []  # stops that must wait for a step
        # A runner in other processes is looked at while there is nothing to do: one may end.
        self._patience = CHECK_EVERY if hasattr(engine.runner, "check") else None
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            Add: self._add, Abort: self._abort, Stop: self._stop, Register: self._register, Release: self._release,
            Prefixes: self._prefixes, Look: self._look, Care: self._care, Left: self._leave,
        }  # fmt: skip

    # From any thread

    def send(self, front: int, message: FromFront | Left) -> bool:
        """Hand a front's message to the engine's thread; False when that takes no more."""
        with self._wake:
            if self._closing:
                return False
            self._sent.append((front, message))
            self._wake.notify()
            return True

    def close(self) -> None:
        """End `run`, after the step under way."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def health(self) -> Health:
        """How the loop is, as long as it is."""
        health = self.pulse.health("")
        restarts = self.engine.restarts
        return health._replace(stalled=True, why=restarts.doing) if restarts is not None and restarts.doing else health

    # On the engine's thread

    def run(self) -> BaseException | None:
        """Serve until `close`, then release the engine. Returns what ended it before, which all fronts were told."""
        error: BaseException | None = None
        try:
            while self._turn():
                pass
        except BaseException as failure:  # whoever ends the thread, SystemExit too, is named to those who wait
            error = failure
        with self._wake:
            died, self._closing = not self._closing, True
        try:
            for front in self.fronts:
                self._tell(front, Died(error if died and error is not None else EngineDead("the engine was closed")))
        finally:
            self._end(error)
        return error if died else None

    def _end(self, error: BaseException | None) -> None:
        """Close the engine. After a failure its frames would hold on to what is released, and a second one is only
        logged: the first is what there is to say."""
        chain = error
        while chain is not None:
            traceback.clear_frames(chain.__traceback__)
            chain = chain.__cause__ or chain.__context__
        try:
            self.engine.close()
        except Exception:
            if error is None:
                raise
            log.exception("the engine could not be closed")

    def _turn(self) -> bool:
        """One turn: messages, then a step. False when it is time to end."""
        with self._wake:
            while not (self._sent or self._closing or self.engine.unfinished):
                self.pulse.rest()
                if self._dirty:
                    self._tell_facts()
                if not self._wake.wait(self._patience):
                    break
            if self._closing:
                return False
            idle = not (self._sent or self.engine.unfinished)
        if idle:
            restarts = self.engine.stats.restarts
            self.engine.check()
            self._dirty |= self.engine.stats.restarts > restarts
            return True
        with self._wake:
            self._taken, self._sent = self._sent, self._taken
            self.pulse.turn(self.engine.stats.steps - len(self.engine.flight) + 1)
        late, self._late = self._late, []
        for front, stop in late:
            self._stop(front, stop)
        while self._taken:
            front, message = self._taken.popleft()
            self._handlers[type(message)](front, message)
        self._dirty = True
        if self.engine.unfinished:
            self._publish(self.engine.step())
        self.pulse.rest()  # as in `_care`
        for front, answer in self.caring.fall_asleep():
            self._tell(front, answer)
        return True

    def _publish(self, outputs: list[Output]) -> None:
        """Tell each front what came for its requests; the first one, that there was a step."""
        now = self.engine.clock()
        brought: dict[int, tuple[list[Progress], list[tuple[int, Output]]]] = {FIRST: ([], [])}
        for output in outputs:
            owned = self._owned.get(output.request)
            if owned is None:  # a prefix that is computed again
                continue
            progress, told = brought.get(owned.front) or brought.setdefault(owned.front, ([], []))
            if not owned.told or output.done:
                owned.told = True
                progress.append(owned.progress())
            told.append((owned.number, output))
            if output.done:
                self._forget(owned)
        computed, self._computed = self.engine.stats.computed_tokens - self._computed, self.engine.stats.computed_tokens
        facts, queues = self._facts_if_due(), queues_of(self.engine)
        for front in self.fronts if facts is not None else [front for front in self.fronts if front in brought]:
            progress, told = brought.get(front, ([], []))
            self._tell(
                front, Stepped(now, queues, computed if front == FIRST else 0, progress, told[:MOST_ROWS], facts)
            )
            for at in range(MOST_ROWS, len(told), MOST_ROWS):  # of aborts, say, which end any number of branches
                self._tell(front, Stepped(now, queues, 0, (), told[at : at + MOST_ROWS]))

    def _facts_if_due(self) -> Facts | None:
        now = time.monotonic()
        if now - self._looked <= FACTS_EVERY:
            return None
        self._looked = now
        if now - self._seen[0] > UNWATCHED:
            self.engine.recent = None
        return facts_of(self.engine, self._seconds())

    def _tell_facts(self) -> None:
        """Before a rest: what is so now."""
        self._dirty, self._looked = False, time.monotonic()
        facts, queues = facts_of(self.engine, self._seconds()), queues_of(self.engine)
        for front in self.fronts:
            self._tell(front, Stepped(self.engine.clock(), queues, 0, (), (), facts))

    # What fronts send

    def _add(self, front: int, message: Add) -> None:
        def add() -> None:
            if len({asked.number for asked in message.requests}) < len(message.requests):
                raise InputError("request numbers must be distinct")
            prompts = [(asked.id, asked.prompt) for asked in message.requests]
            if message.pixels or seen:
                self._add_seeing(prompts, message, seen)
            else:
                self.engine.add_all(prompts, message.params, salt=message.salt, client=message.client)

        seen = {asked.number: {medium.key for medium in asked.media} for asked in message.requests if asked.media}
        self._answer(front, message.key, add, {asked.number: asked.id for asked in message.requests}, seen)

    def _add_seeing(self, prompts: list[tuple[str, Sequence[int]]], message: Add, seen: dict[int, set[bytes]]) -> None:
        """Requests with pictures, by the keys that each has `seen`; each is a user of these."""
        shown = {one.key: one for one in message.pixels}
        used = [key for keys in seen.values() for key in keys]
        if not shown.keys() >= set(used):
            raise InputError("the pixels of a picture are missing")
        pixels = self.pictures.hold([shown[key] for key in used])
        try:
            media = [asked.media for asked in message.requests]
            self.engine.add_all(
                prompts, message.params, salt=message.salt, media=media, pixels=pixels, client=message.client
            )
        except BaseException:
            self.pictures.drop(used)
            raise

    def _register(self, front: int, message: Register) -> None:
        def register() -> None:
            self.engine.register_prefix(message.name, message.tokens)

        self._answer(front, message.key, register, {message.number: f"prefix:{message.name}"})

    def _answer(
        self, front: int, key: int, add: Callable[[], None], ids: dict[int, str], seen: Mapping[int, set[bytes]] = {}
    ) -> None:
        """`add` requests of these numbers and ids, and say whether that went well. `seen` are keys of pictures."""
        try:
            for number in ids:
                if (front, number) in self._numbered:
                    raise InputError(f"request number {number} is in use")
            add()
        except Exception as error:
            self._tell(front, Answer(key, error))
            return
        for number, id in ids.items():
            owned = Owned(front, number, id, self.engine.requests[id])
            self._owned[id] = self._numbered[front, number] = owned
            owned.seen = seen.get(number, ())
        self._tell(front, Answer(key))

    def _abort(self, front: int, message: Abort) -> None:
        numbers = message.numbers
        if numbers is None:
            numbers = tuple(number for owner, number in self._numbered if owner == front)
        for number in numbers:
            owned = self._numbered.get((front, number))
            if owned is not None:
                self.engine.abort(owned.id)

    def _stop(self, front: int, message: Stop) -> None:
        owned = self._numbered.get((front, message.number))
        if owned is None:
            return
        ended = self.engine.stop(owned.id, message.branch, message.reason)
        if ended is None:
            self._late.append((front, message))
        elif ended:
            self._forget(owned)

    def _release(self, front: int, message: Release) -> None:
        self._tell(front, Answer(message.key, value=self.engine.release_prefix(message.name)))

    def _prefixes(self, front: int, message: Prefixes) -> None:
        held, live = self.engine.prefixes, self.engine.requests
        asleep = self.engine.rest.level > 0
        ready = tuple(name for name in held if f"prefix:{name}" not in live and not asleep)
        self._tell(front, Answer(message.key, value=(dict(held), ready)))

    def _look(self, front: int, message: Look) -> None:
        began, now, used = time.thread_time(), time.monotonic(), self._seconds()
        (seen, before), self._seen = self._seen, (now, used)
        busy = min(max(used - before, 0.0) / max(now - seen, 1e-6), 1.0)
        if self.engine.recent is None:
            self.engine.recent = Recent(self.engine.scheduler.preempted)
        text = json.dumps(scene(self.engine), separators=(",", ":"))
        made = time.thread_time()
        took = made - began + self._telling
        self._tell(front, Answer(message.key, value=f'{{"took":{took:.6f},"busy":{busy:.4f},{text[1:]}'))
        self._telling = time.thread_time() - made

    def _care(self, front: int, message: Care) -> None:
        self.pulse.rest()  # to sleep and to wake up takes as long as it takes
        answer = self.caring.do(front, message)
        self._dirty = True
        if answer is not None:
            self._tell(front, answer)

    def _leave(self, front: int, message: Left) -> None:
        self._abort(front, Abort(None))
        self.fronts.remove(front)
        if not self.fronts:
            self.close()

    def _forget(self, owned: Owned) -> None:
        self.pictures.drop(owned.seen)
        del self._owned[owned.id]
        del self._numbered[owned.front, owned.number]
