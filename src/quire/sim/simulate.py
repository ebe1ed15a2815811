"""A simulation: the unmodified engine, scheduler and memory over a SimRunner and a virtual clock; what it served, and
the highest request rate that still meets objectives.

Measures are PagedAttention's (§6.1): normalised latency is end-to-end latency divided by output length.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from quire.config import EngineConfig
from quire.engine import Engine, Limits
from quire.errors import StartupError
from quire.memory import Size, Usage, build_memory
from quire.memory.reserved import STATIC, ReservedMemory
from quire.request import SamplingParams
from quire.scheduler import Scheduler
from quire.sim.clock import VirtualClock
from quire.sim.cost import Cost
from quire.sim.runner import Draw, SimRunner
from quire.specs import ModelSpec

SAMPLES = 400  # of the memory, in a run
LOOKS = 1.0  # virtual seconds between questions whether a run is lost
MEASURES = ("normalised", "ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p99")
STEEPEST = 2.0**14  # how far from its start the search for a rate goes


class Arriving(NamedTuple):
    """A request of a trace: it comes at `at` seconds. Its parameters give its output length, end tokens aside."""

    at: float
    prompt: list[int]
    params: SamplingParams


class Served:
    """What became of one request. `events` are the moments that brought tokens, and how many each."""

    __slots__ = ("arrival", "done", "events", "output", "prompt")

    def __init__(self, arrival: float, prompt: int, output: int) -> None:
        self.arrival, self.prompt, self.output = arrival, prompt, output
        self.events: list[tuple[float, int]] = []
        self.done = False

    def least(self, measure: str, now: float) -> float:
        """Seconds of a measure; before the request is done, what it can't fall below any more. `tpot` is the time of a
        token after the first, `ttft` that until the first."""
        last = self.events[-1][0] if self.done else now
        if measure == "e2e":
            return last - self.arrival
        if measure == "normalised":
            return (last - self.arrival) / self.output
        first = self.events[0][0] if self.events else None
        if measure == "ttft":
            return (now if first is None else first) - self.arrival
        return (last - first) / (self.output - 1) if first is not None and self.output > 1 else 0.0


class Moment(NamedTuple):
    """The engine at one time: requests that run and that wait, and the memory."""

    time: float
    running: int
    waiting: int
    usage: Usage


class Totals(NamedTuple):
    """A run in numbers. Batches are averages over steps: `mean_batch` of rows, `mean_running` of requests in memory.
    `busy` is the share of the time in which the device computed; `finished` is False for a run that was given up."""

    seconds: float
    finished: bool
    steps: int
    busy: float
    mean_batch: float
    mean_running: float
    preemptions: int
    swapped_bytes: int
    saved: float


class Outcome(NamedTuple):
    """All that a simulation tells."""

    served: list[Served]
    moments: list[Moment]
    totals: Totals


class Objective(NamedTuple):
    """A statistic of a measure that must not exceed `limit` seconds."""

    statistic: str
    measure: str
    limit: float

    @property
    def name(self) -> str:
        """As on the command line, without its number."""
        return f"{self.statistic}-{self.measure}-ms"

    def value(self, served: Sequence[Served]) -> float:
        """The statistic, of requests that are done."""
        values = [one.least(self.measure, 0.0) for one in served]
        if self.statistic == "mean":
            return float(np.mean(values))
        return float(np.percentile(values, float(self.statistic[1:])))

    def lost(self, served: Sequence[Served], now: float, total: int) -> bool:
        """The run of `total` requests can't meet the objective any more, whatever comes after `now`."""
        least = [one.least(self.measure, now) for one in served]
        if self.statistic == "mean":
            return sum(least) > self.limit * total
        rank = int(float(self.statistic[1:]) / 100 * (total - 1))  # if this one and all above are too slow
        return sum(value > self.limit for value in least) >= total - rank


def objective(text: str) -> Objective:
    """The objective of a text such as "p99-normalised-ms=200". StartupError says what was expected."""
    name, _, number = text.partition("=")
    statistic, _, rest = name.partition("-")
    measure = rest.removesuffix("-ms")
    try:
        limit = float(number) / 1000
    except ValueError:
        limit = -1.0
    if statistic not in STATISTICS or measure not in MEASURES or not rest.endswith("-ms") or not 0 < limit < 1e9:
        raise StartupError(
            f"there is no objective {text[:60]!r}",
            f"Expected {'|'.join(STATISTICS)}-{'|'.join(MEASURES)}-ms=NUMBER, such as p99-normalised-ms=200",
        )
    return Objective(statistic, measure, limit)


class Simulation:
    """An engine of `config`'s memory and scheduler, with `kv_tokens` tokens of KV for `spec`, on a device of `cost`."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        cost: Cost,
        kv_tokens: int,
        *,
        kind: str = "cuda",
        depth: int = 1,
        draw: Draw | None = None,
    ) -> None:
        config = config.sized(kind)
        max_len = min(config.max_model_len or spec.max_len, kv_tokens)
        assert config.max_num_batched_tokens is not None, "sized above"
        assert config.max_num_seqs is not None, "sized above"
        self.config, self.spec, self.clock = config, spec, VirtualClock()
        depth = config.depth or depth
        self.runner = SimRunner(cost, self.clock, depth, avoid=frozenset(spec.eos_ids), draw=draw)
        memory = build_memory(config, spec, Size(kv_tokens, max_len, cost.shape.itemsize), "simulated")
        self.runner.bind(memory.geometry)
        scheduler = Scheduler(
            memory,
            budget=config.max_num_batched_tokens,
            max_seqs=config.max_num_seqs,
            max_len=max_len,
            eos_ids=spec.eos_ids,
            preemption=config.preemption if config.swap_gib else "recompute",
            costs=cost.preemption(),
            static=config.memory in STATIC,
        )
        if isinstance(memory, ReservedMemory):
            if not memory.fits([max_len]):
                raise StartupError(
                    f"--memory {config.memory} finds no room for a sequence of {max_len} tokens in {kv_tokens}",
                    "Use a smaller --max-model-len, or a larger --kv-gib",
                )
            memory.queue = scheduler.waiting
            reserved = memory
            self.runner.padding = lambda: (reserved.padding.prompt, reserved.padding.rows)
        limits = Limits(spec.vocab_size, max_len, sys.maxsize)
        self.engine = Engine(scheduler, self.runner, limits, clock=self.clock, seed=config.seed, depth=depth)

    def run(self, trace: Sequence[Arriving], objectives: Sequence[Objective] = ()) -> Outcome:
        """Serve the whole trace, or as much of it as shows that an objective can't be met. Once only."""
        engine, clock = self.engine, self.clock
        served: list[Served] = []
        watch = _Watch(self, trace[-1].at)
        look = LOOKS
        while len(served) < len(trace) or engine.unfinished:
            while len(served) < len(trace) and trace[len(served)].at <= clock.now:
                at, prompt, params = trace[len(served)]
                assert params.max_tokens is not None, "a request of a trace has a length"
                engine.add(str(len(served)), prompt, params)
                served.append(Served(at, len(prompt), params.max_tokens))
            if not engine.unfinished:
                clock.reach(trace[len(served)].at)
                continue
            ended = 0
            for output in engine.step():
                one = served[int(output.request)]
                one.events.append((clock.now, len(output.tokens)))
                one.done = output.done
                ended += output.done
            watch.step(ended)
            if clock.now >= look:
                look = clock.now + LOOKS
                if any(goal.lost(served, clock.now, len(trace)) for goal in objectives):
                    return Outcome(served, watch.moments, watch.totals(finished=False))
        return Outcome(served, watch.moments, watch.totals(finished=True))


class _Watch:
    """Averages over steps, and samples of the memory over time, in even distances: where there are too many, every
    other one is dropped."""

    def __init__(self, simulation: Simulation, expected: float) -> None:
        self.simulation = simulation
        self.moments: list[Moment] = []
        self.apart = expected / SAMPLES
        self.running = self.steps = self.tables = self.saved = 0

    def step(self, ended: int) -> None:
        """After each step; requests that ended were running in it."""
        scheduler, now = self.simulation.engine.scheduler, self.simulation.clock.now
        self.steps += 1
        self.running += len(scheduler.running) + ended
        if self.moments and now < self.moments[-1].time + self.apart:
            return
        sharing = scheduler.memory.sharing()
        self.tables += sharing.tables
        self.saved += sharing.saved
        waiting = len(scheduler.waiting) + len(scheduler.swapped)
        self.moments.append(Moment(now, len(scheduler.running), waiting, scheduler.memory.usage()))
        if len(self.moments) > 2 * SAMPLES:
            self.moments = self.moments[::2]
            self.apart = 2 * max(self.apart, now / len(self.moments) / 2)

    def totals(self, finished: bool) -> Totals:
        engine, now = self.simulation.engine, self.simulation.clock.now
        sharing = engine.scheduler.memory.sharing()
        return Totals(
            now, finished, engine.stats.steps, self.simulation.runner.busy / now if now else 0.0,
            engine.stats.rows / max(engine.stats.steps, 1), self.running / max(self.steps, 1),
            engine.scheduler.preemptions, sharing.swapped_out + sharing.swapped_in,
            self.saved / self.tables if self.tables else 0.0,
        )  # fmt: skip


def mean_usage(moments: Sequence[Moment]) -> Usage:
    """The memory by category, averaged over the samples."""
    return Usage(*(int(np.mean([moment.usage[i] for moment in moments])) for i in range(len(Usage._fields))))


def meets(outcome: Outcome, objectives: Sequence[Objective]) -> bool:
    """The run was finished and kept to every objective."""
    return outcome.totals.finished and all(goal.value(outcome.served) <= goal.limit for goal in objectives)


def highest_rate(sustains: Callable[[float], bool], start: float = 1.0, tolerance: float = 0.02) -> float:
    """The highest rate that `sustains` still says yes to, by doubling or halving from `start`, then bisection until the
    next rate tried that it refuses is at most `tolerance` (a share) higher. 0 if it accepts none, however low; infinite
    if it refuses none, however high."""
    low, high = start, start
    if sustains(start):
        while sustains(high := high * 2):
            low = high
            if high > start * STEEPEST:
                return math.inf
    else:
        while not sustains(low := low / 2):
            high = low
            if low < start / STEEPEST:
                return 0.0
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if sustains(middle) else (low, middle)
    return low
