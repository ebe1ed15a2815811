"""Simulate several engines on one time line. A router sends each request to one of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from quire.core.outputs import BranchOutput
from quire.memory.answers import Usage
from quire.memory.cache_log import CacheChanges
from quire.router.router import Router, WorkCosts
from quire.sim.cost_model import CostModel, StepWork
from quire.sim.simulation import (
    MIN_TIMELINE_SAMPLES,
    RunTotals,
    ServedRequest,
    Simulation,
    SimulationResult,
    TimelineSample,
    TraceRequest,
)

NO_CHANGES = CacheChanges([], [], {})
BATCH = 64  # sequences of the step whose seconds are divided among output tokens


def work_costs(cost: CostModel) -> WorkCosts:
    """Return the seconds that tokens cost on a simulated device."""
    prompt_token = cost.preemption_costs().compute_token
    operations = 2.0 * (cost.shape.weights_per_token + cost.shape.head_weights) * BATCH
    step = StepWork(BATCH, BATCH, operations, 0.0, 0.0, 0, 0)
    return WorkCosts(prompt_token, cost.device_seconds(step) / BATCH)


class News(NamedTuple):
    """What a router learns of a replica at a time: the outputs of a step, and the pages stored and dropped."""

    time: float
    outputs: list[BranchOutput]
    changes: CacheChanges


class SimulatedReplica:
    """An engine of a fleet. `news` is what the router has yet to learn."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.engine, self.clock = simulation, simulation.engine, simulation.clock
        self.memory = self.engine.scheduler.memory
        self.cache_log = self.memory.prefix_cache.log() if self.memory.prefix_cache is not None else None
        self.news = deque[News]()
        self.steps = self.running = 0  # steps, and the sum of the running requests over them

    def run_until(self, time: float) -> None:
        """Run steps until `time`; the last may end after it."""
        engine, clock = self.engine, self.clock
        while clock.now < time and engine.has_unfinished_requests:
            outputs = engine.step()
            self.steps += 1
            self.running += len(engine.scheduler.running) + sum(output.done for output in outputs)
            changes = self.cache_log.take() if self.cache_log is not None else NO_CHANGES
            self.news.append(News(clock.now, outputs, changes))
        if clock.now < time < math.inf:
            clock.advance_to(time)


class Fleet:
    """Engines, and a router with this policy that divides the requests among them."""

    def __init__(self, simulations: Sequence[Simulation], policy: str, costs: WorkCosts) -> None:
        self.replicas = [SimulatedReplica(simulation) for simulation in simulations]
        log = self.replicas[0].cache_log  # the replicas are alike
        self.keys = log.keys if log is not None else None
        key_tokens = self.keys.page_tokens if self.keys is not None else 1
        self.router = Router(len(self.replicas), policy, costs, key_tokens)
        self.served = list[ServedRequest]()
        self.timeline = list[TimelineSample]()

    def run(self, trace: Sequence[TraceRequest]) -> SimulationResult:
        """Serve a trace, once, to its end."""
        counts = [0] * len(self.replicas)
        interval = trace[-1].arrival / MIN_TIMELINE_SAMPLES
        for request in trace:
            self._run_until(request.arrival, interval)
            name, prompt, params = str(len(self.served)), request.prompt, request.params
            assert params.max_tokens is not None, "a request of a trace needs max_tokens"
            keys = self.keys.of_prompt(prompt, images=request.media) if self.keys is not None else ()
            at = self.router.choose(keys, len(prompt))
            assert at is not None, "no replica is draining"
            self.router.add(name, at, keys, len(prompt), params.max_tokens)
            self.replicas[at].engine.add(name, prompt, params, images=request.media, pixels=request.encoder_pixels)
            self.served.append(ServedRequest(request.arrival, len(prompt), params.max_tokens))
            counts[at] += 1
        while any(replica.engine.has_unfinished_requests or replica.news for replica in self.replicas):
            self._run_until(max(replica.clock.now for replica in self.replicas) + max(interval, 1e-3), interval)
        return SimulationResult(self.served, self.timeline, self._totals(), counts)

    def _run_until(self, time: float, interval: float) -> None:
        """Run all replicas until `time`, and tell the router what has happened."""
        for replica in self.replicas:
            replica.run_until(time)
        for at, replica in enumerate(self.replicas):
            while replica.news and replica.news[0].time <= time:
                self._learn(at, replica.news.popleft())
        if self.timeline and time < self.timeline[-1].time + interval:
            return
        schedulers = [replica.engine.scheduler for replica in self.replicas]
        usages = [scheduler.memory.account().usage for scheduler in schedulers]
        waiting = sum(len(scheduler.waiting) + len(scheduler.swapped) for scheduler in schedulers)
        running = sum(len(scheduler.running) for scheduler in schedulers)
        self.timeline.append(TimelineSample(time, running, waiting, Usage(*map(sum, zip(*usages)))))

    def _learn(self, at: int, news: News) -> None:
        router = self.router
        router.update_keys(at, news.changes.stored, news.changes.dropped)
        for output in news.outputs:
            served = self.served[int(output.request_id)]
            served.token_times.append((news.time, len(output.tokens)))
            router.record_tokens(output.request_id, len(output.tokens))
            if output.done:
                served.done = True
                router.finish(output.request_id)

    def _totals(self) -> RunTotals:
        engines = [replica.engine for replica in self.replicas]
        stats = [engine.stats for engine in engines]
        sharing = [replica.memory.account().sharing for replica in self.replicas]
        seconds, steps = max(one.token_times[-1][0] for one in self.served), sum(one.steps for one in stats)
        busy_seconds = sum(replica.simulation.runner.busy_seconds for replica in self.replicas)
        return RunTotals(
            seconds, True, steps, busy_seconds / seconds / len(engines), sum(one.rows for one in stats) / steps,
            sum(replica.running for replica in self.replicas) / sum(replica.steps for replica in self.replicas),
            sum(engine.scheduler.num_preemptions for engine in engines),
            sum(one.swapped_out + one.swapped_in for one in sharing), 0.0,
            sum(one.num_drafts for one in stats), sum(one.draft_tokens for one in stats),
            sum(one.accepted_tokens for one in stats),
            sum(one.queries for one in sharing), sum(one.hits for one in sharing),
        )  # fmt: skip
