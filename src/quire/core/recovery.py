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

from quire.core.encoder_budget import EncoderBudget
from quire.core.outputs import BranchOutput
from quire.core.request import Request, RequestStatus, SeqEvent
from quire.core.scheduler import Scheduler
from quire.core.sleep import PREFIX_PARAMS
from quire.errors import EngineDead, RanksLost, StartupError
from quire.memory.interface import KVMemory
from quire.protocol.sequence import Sequence

if TYPE_CHECKING:
    from quire.core.engine import Engine
    from quire.core.runner import Runner

MAX_RESTARTS, RESTART_WINDOW = 3, 600.0  # restarts within so many seconds
log = logging.getLogger("quire")

RunnerFactory = Callable[[], "tuple[Runner, KVMemory]"]


class RunnerRestarter:
    """Has `make_runner` start runners anew, each with a memory that it is bound to: at most `max_restarts` times within
    `window` seconds, those that fail included. `status` says why nothing is computed, while one starts; any thread may
    read it.
    """

    def __init__(
        self,
        make_runner: RunnerFactory,
        max_restarts: int = MAX_RESTARTS,
        window: float = RESTART_WINDOW,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.make_runner, self.max_restarts, self.window, self.clock = make_runner, max_restarts, window, clock
        self.num_restarts, self.status = 0, ""
        self._recent_failures = deque[tuple[float, str]]()  # when, and for what cause

    def restart(self, lost: EngineDead) -> tuple[Runner, KVMemory]:
        """Another runner. EngineDead if there were too many lately: with this cause, and the first of these."""
        cause = str(lost)
        try:
            while True:
                self._record(cause, lost)
                self.status = f"{cause}; ranks are started anew"
                log.error(
                    "%s (%d of %d within %g s)", self.status, len(self._recent_failures), self.max_restarts, self.window
                )
                try:
                    return self.make_runner()
                except (EngineDead, StartupError) as error:
                    cause = str(error)
        finally:
            self.status = ""

    def _record(self, cause: str, lost: EngineDead) -> None:
        now = self.clock()
        while self._recent_failures and self._recent_failures[0][0] <= now - self.window:
            self._recent_failures.popleft()
        if len(self._recent_failures) >= self.max_restarts:
            first = self._recent_failures[0][1]
            times = f"ranks were started anew {len(self._recent_failures)} times within {self.window:g} s"
            raise EngineDead(f"{cause}; {times}, first as {first}") from lost
        self._recent_failures.append((now, cause))
        self.num_restarts += 1


def recover(engine: Engine, lost: RanksLost) -> list[BranchOutput]:
    """Have the engine, which has lost its runner, go on with another one. Returns what ended meanwhile. EngineDead if
    there is no other."""
    restarts = engine.restarter
    if restarts is None:
        raise lost
    engine.in_flight.clear()
    engine.is_awaiting_masks = False
    engine.runner.close()
    prefixes = engine.scheduler.memory.prefix_cache
    count = restarts.num_restarts
    try:
        engine.runner, memory = restarts.restart(lost)
    finally:
        engine.stats.restarts += restarts.num_restarts - count
    outputs = engine.finish_outputs(engine.output_builder.build(requeue_all(engine.scheduler, memory), engine.clock()))
    engine.sleep_controller.restore_sleep()
    for picture in engine.image_registry.runner_pixels.values():
        engine.send_to_runner(engine.runner.add_image, picture)
    if prefixes is not None:
        again = [_prefix_request(engine, name, prefix.tokens) for name, prefix in prefixes.registered_prefixes.items()]
        for request in again:
            engine.scheduler.waiting.requeue(request)
    return outputs


def _prefix_request(engine: Engine, name: str, tokens: list[int]) -> Request:
    """What computes a registered prefix again: nobody waits for it, and those that came before may use it."""
    seq = Sequence(engine.scheduler.new_seq_id(), list(tokens))
    seq.max_total_len = len(tokens) + 1
    request = Request(f"prefix:{name}", seq, PREFIX_PARAMS, arrival_time=engine.clock(), max_tokens=1)
    request.prefix_name = name
    engine.requests[request.id] = request
    engine.prefix_recompute_ids.add(request.id)
    return request


def requeue_all(scheduler: Scheduler, memory: KVMemory) -> list[SeqEvent]:
    """Put everything back in the queue, in order of arrival, before `memory`, which is empty. Steps in flight are
    forgotten; branches that only awaited the end of one have ended, which is returned where it is still to be told."""
    there = sorted([*scheduler.running, *scheduler.swapped], key=lambda request: request.order)
    every = sorted([*there, *scheduler.waiting], key=lambda request: request.order)
    scheduler.memory = memory
    scheduler.by_slot, scheduler.new_slots, scheduler.running = {}, [], {}
    scheduler.num_in_flight = scheduler.num_prefix_waiters = 0
    scheduler.rebalance_due, scheduler.rebalance_target = False, None
    if scheduler.encoder_budget is not None:
        scheduler.encoder_budget = EncoderBudget(memory, scheduler.token_budget)
    scheduler.swapped.clear()
    events = [event for request in every for event in _reset_request(request)]
    for request in there:
        scheduler.waiting.requeue(request)
    for request in every:
        if not request.live_seqs:
            scheduler.waiting.remove(request)
    return events


def _reset_request(request: Request) -> list[SeqEvent]:
    request.preemptions += request.status is not RequestStatus.WAITING
    request.status, request.candidates = RequestStatus.WAITING, {}
    for seq in request.live_seqs:
        seq.planned = seq.computed = seq.pending_samples = 0
        seq.prefix_source = None
    request.finished_seqs += [seq for seq in request.live_seqs if seq.finish_reason is not None]
    request.live_seqs = [seq for seq in request.live_seqs if seq.finish_reason is None]
    if request.live_seqs:
        return []
    request.status = RequestStatus.DONE
    return [SeqEvent(request, None)] if request.method is not None or request.params.returns_best_of else []
