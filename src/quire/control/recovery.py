"""Going on after a runner's end: another runner, an empty memory of the same shape, and every sequence computed again,
as after a preemption by recomputation (PagedAttention §4.5). What is drawn depends on seeds and positions alone, so
tokens that were lost in flight are drawn again, and are the same.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.control.memory import KVMemory
from quire.control.outcomes import Output
from quire.control.request import Event, Request, Sequence, Status
from quire.control.rest import PREFIX
from quire.control.scheduler import Scheduler
from quire.control.sight import Sight
from quire.errors import EngineDead, RanksLost, StartupError

if TYPE_CHECKING:
    from quire.control.engine import Engine
    from quire.control.runners import Runner

MOST, WINDOW = 3, 600.0  # restarts within so many seconds
log = logging.getLogger("quire")

Make = Callable[[], "tuple[Runner, KVMemory]"]


class Restarts:
    """Has `make` start runners anew, each with a memory that it is bound to: at most `most` times within `window`
    seconds, those that fail included. `doing` says why nothing is computed, while one starts; any thread may read it.
    """

    def __init__(
        self, make: Make, most: int = MOST, window: float = WINDOW, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.make, self.most, self.window, self.clock = make, most, window, clock
        self.count, self.doing = 0, ""
        self._recent = deque[tuple[float, str]]()  # when, and for what cause

    def again(self, lost: EngineDead) -> tuple[Runner, KVMemory]:
        """Another runner. EngineDead if there were too many lately: with this cause, and the first of these."""
        cause = str(lost)
        try:
            while True:
                self._note(cause, lost)
                self.doing = f"{cause}; ranks are started anew"
                log.error("%s (%d of %d within %g s)", self.doing, len(self._recent), self.most, self.window)
                try:
                    return self.make()
                except (EngineDead, StartupError) as error:
                    cause = str(error)
        finally:
            self.doing = ""

    def _note(self, cause: str, lost: EngineDead) -> None:
        now = self.clock()
        while self._recent and self._recent[0][0] <= now - self.window:
            self._recent.popleft()
        if len(self._recent) >= self.most:
            first = self._recent[0][1]
            times = f"ranks were started anew {len(self._recent)} times within {self.window:g} s"
            raise EngineDead(f"{cause}; {times}, first as {first}") from lost
        self._recent.append((now, cause))
        self.count += 1


def recover(engine: Engine, lost: RanksLost) -> list[Output]:
    """Have the engine, which has lost its runner, go on with another one. Returns what ended meanwhile. EngineDead if
    there is no other."""
    restarts = engine.restarts
    if restarts is None:
        raise lost
    engine.flight.clear()
    engine.held = False
    engine.runner.close()
    prefixes = engine.scheduler.memory.prefixes
    count = restarts.count
    try:
        engine.runner, memory = restarts.again(lost)
    finally:
        engine.stats.restarts += restarts.count - count
    outputs = engine.told(engine.outcomes.of(start_over(engine.scheduler, memory), engine.clock()))
    engine.rest.again()
    for picture in engine.pictures.kept.values():
        engine.say(engine.runner.see, picture)
    if prefixes is not None:
        again = [_prefix(engine, name, prefix.tokens) for name, prefix in prefixes.registered.items()]
        for request in again:
            engine.scheduler.waiting.give_back(request)
    return outputs


def _prefix(engine: Engine, name: str, tokens: list[int]) -> Request:
    """What computes a registered prefix again: nobody waits for it, and those that came before may use it."""
    seq = Sequence(engine.scheduler.new_id(), list(tokens))
    seq.final = len(tokens) + 1
    request = Request(f"prefix:{name}", seq, PREFIX, arrival=engine.clock(), max_tokens=1)
    request.prefix = name
    engine.requests[request.id] = request
    engine.again.add(request.id)
    return request


def start_over(scheduler: Scheduler, memory: KVMemory) -> list[Event]:
    """Put everything back in the queue, in order of arrival, before `memory`, which is empty. Steps in flight are
    forgotten; branches that only awaited the end of one have ended, which is returned where it is still to be told."""
    there = sorted([*scheduler.running, *scheduler.swapped], key=lambda request: request.order)
    every = sorted([*there, *scheduler.waiting], key=lambda request: request.order)
    scheduler.memory = memory
    scheduler.by_slot, scheduler.births, scheduler.running = {}, [], {}
    scheduler.flight = scheduler.deferred = 0
    scheduler.pressed, scheduler.favoured = False, None
    if scheduler.sight is not None:
        scheduler.sight = Sight(memory, scheduler.budget)
    scheduler.swapped.clear()
    events = [event for request in every for event in _back(request)]
    for request in there:
        scheduler.waiting.give_back(request)
    for request in every:
        if not request.live:
            scheduler.waiting.remove(request)
    return events


def _back(request: Request) -> list[Event]:
    request.preemptions += request.status is not Status.WAITING
    request.status, request.candidates = Status.WAITING, {}
    for seq in request.live:
        seq.planned = seq.computed = seq.pending = 0
        seq.sibling = None
    request.done += [seq for seq in request.live if seq.finish is not None]
    request.live = [seq for seq in request.live if seq.finish is None]
    if request.live:
        return []
    request.status = Status.DONE
    return [Event(request, None)] if request.method is not None or request.params.ranked else []
