"""A simulation: the unmodified engine, scheduler and memory over a SimRunner and a virtual clock; what it served, and
the highest request rate that still meets objectives.

Measures are PagedAttention's (§6.1): normalised latency is end-to-end latency divided by output length.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from quire.config import EngineConfig
from quire.control.assembly import assemble
from quire.control.edge import Limits
from quire.control.memory import Size, Usage, build_memory, longest
from quire.errors import StartupError
from quire.sim.clock import VirtualClock
from quire.sim.cost import Cost
from quire.sim.padding import Padding
from quire.sim.runner import Draw, SimRunner
from quire.vocabulary.media import Medium, Pixels
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.specs import ModelSpec

SAMPLES = 400  # of the memory, in a run
LOOKS = 1.0  # virtual seconds between questions whether a run is lost
MEASURES = ("normalised", "ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p99")
MOST_PAGES = 2**24  # each is an entry of several lists here
STEEPEST = 2.0**14  # how far from its start the search for a rate goes


class Arriving(NamedTuple):
    """A request of a trace: it comes at `at` seconds. Its parameters give its output length, end tokens aside. `media`
    are its pictures; `pixels`, what a runner with eyes gets of them."""

    at: float
    prompt: list[int]
    params: SamplingParams
    media: tuple[Medium, ...] = ()
    pixels: tuple[Pixels, ...] = ()

    @property
    def seen(self) -> tuple[Pixels, ...]:
        """Its pixels; of no bytes where the runner has no eyes."""
        return self.pixels or tuple(Pixels(medium.key, (0,), b"") for medium in self.media)


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

    def weight(self, value: float) -> float:
        """What one request's value counts for: itself in a mean; whether it is too high in a percentile."""
        return value if self.statistic == "mean" else float(value > self.limit)

    def lost(self, weight: float, total: int) -> bool:
        """Requests that together weigh this much are too many, or too slow, for `total` to meet the objective."""
        if self.statistic == "mean":
            return weight > self.limit * total
        rank = int(float(self.statistic[1:]) / 100 * (total - 1))  # if this one and all above are too slow
        return weight >= total - rank


class Doubt:
    """Whether a run of `total` requests can still meet an objective. What is done is added up once."""

    def __init__(self, goal: Objective, total: int) -> None:
        self.goal, self.total = goal, total
        self.settled = 0.0

    def settle(self, one: Served) -> None:
        """A request is done."""
        self.settled += self.goal.weight(one.least(self.goal.measure, 0.0))

    def lost(self, others: Iterable[Served], now: float) -> bool:
        """It can't, whatever comes after `now`; `others` came and aren't done."""
        goal = self.goal
        return goal.lost(self.settled + sum(goal.weight(one.least(goal.measure, now)) for one in others), self.total)


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


def _check_pages(kv_tokens: int, page: int) -> None:
    if kv_tokens > MOST_PAGES * page:
        raise StartupError(
            f"{kv_tokens:,} tokens of KV are more than {MOST_PAGES:,} pages of {page}, the most that is simulated",
            "Give a smaller --kv-gib or --kv-tokens, or a larger --page-size",
        )


class Simulation:
    """An engine of `config`'s memory and scheduler, with `kv_tokens` tokens of KV for `spec` (or all that `kv_bytes`
    hold, see Size), on a device of `cost`."""

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
        kv_bytes: int = 0,
    ) -> None:
        config = config.sized(kind)
        _check_pages(kv_tokens, config.page_size)
        size = Size(kv_tokens, config.max_model_len or spec.max_len, cost.shape.itemsize, kv_bytes)
        size = size._replace(max_len=longest(config, spec, size))
        self.config, self.spec, self.clock = config, spec, VirtualClock()
        depth = config.depth or depth
        self.runner = SimRunner(cost, self.clock, depth, avoid=frozenset(spec.eos_ids), draw=draw)
        memory = build_memory(config, spec, size, "simulated")
        self.runner.bind(memory.geometry)
        limits = Limits(spec.vocab_size, size.max_len, sys.maxsize)
        self.engine = assemble(
            config, memory, self.runner, limits, clock=self.clock, eos_ids=spec.eos_ids, costs=cost.preemption(),
            depth=depth,
        )  # fmt: skip
        if self.engine.scheduler.static:
            self.runner.padding = Padding(self.engine.scheduler)

    def register(self, name: str, tokens: Sequence[int]) -> None:
        """Compute and pin a prefix before any request comes (PagedAttention §4.4), within `config.prefix_tokens`."""
        self.engine.register_prefix(name, tokens)
        while self.engine.unfinished:
            for output in self.engine.step():
                assert output.finish_reason != "error", f"the prefix {name} was not registered: {output.stop_reason}"

    def run(self, trace: Sequence[Arriving], objectives: Sequence[Objective] = (), until: float = math.inf) -> Outcome:
        """Serve the whole trace, or as much of it as shows that an objective can't be met, or as comes before `until`
        seconds. Once only. The trace's time begins now: after prefixes were registered."""
        engine, clock = self.engine, self.clock
        assert all(map(math.isfinite, (one.at for one in trace))), "a request never comes"
        until += clock.now
        trace = [one._replace(at=clock.now + one.at) for one in trace] if clock.now else trace
        served: list[Served] = []
        going: dict[str, Served] = {}
        doubts = [Doubt(goal, len(trace)) for goal in objectives]
        watch = _Watch(self, trace[-1].at)
        look = LOOKS
        while len(served) < len(trace) or engine.unfinished:
            while len(served) < len(trace) and trace[len(served)].at <= clock.now:
                asked = trace[len(served)]
                at, prompt, params = asked[:3]
                assert params.max_tokens is not None, "a request of a trace has a length"
                name = str(len(served))
                engine.add(name, prompt, params, media=asked.media, pixels=asked.seen)
                going[name] = one = Served(at, len(prompt), params.max_tokens)
                served.append(one)
            if not engine.unfinished:
                clock.reach(trace[len(served)].at)
                continue
            ended = 0
            for output in engine.step():
                one = going[output.request]
                one.events.append((clock.now, len(output.tokens)))
                if output.done:
                    one.done = True
                    ended += 1
                    del going[output.request]
                    for doubt in doubts:
                        doubt.settle(one)
            watch.step(ended)
            if clock.now >= until:
                break
            if doubts and clock.now >= look:
                look = clock.now + LOOKS
                if any(doubt.lost(going.values(), clock.now) for doubt in doubts):
                    return Outcome(served, watch.moments, watch.totals(finished=False))
        finished = len(served) == len(trace) and not engine.unfinished
        return Outcome(served, watch.moments, watch.totals(finished))


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
        usage, sharing, _ = scheduler.memory.account()
        self.tables += sharing.tables
        self.saved += sharing.saved
        waiting = len(scheduler.waiting) + len(scheduler.swapped)
        self.moments.append(Moment(now, len(scheduler.running), waiting, usage))
        if len(self.moments) > 2 * SAMPLES:
            self.moments = self.moments[::2]
            self.apart = 2 * max(self.apart, now / len(self.moments) / 2)

    def totals(self, finished: bool) -> Totals:
        engine, now = self.simulation.engine, self.simulation.clock.now
        sharing = engine.scheduler.memory.account().sharing
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


def highest_rate(
    sustains: Callable[[float], bool],
    start: float = 1.0,
    tolerance: float = 0.02,
    factor: float = 2.0,
    growth: float = 1.0,
) -> float:
    """The highest rate that `sustains` still says yes to, by steps from `start` up or down, then bisection until the
    next rate tried that it refuses is at most `tolerance` (a share) higher. The first step is by `factor`, each further
    one by the one before to the power of `growth`. 0 if no rate is accepted, however low; infinite if none is refused,
    however high."""
    assert 1e-100 < start < 1e100, f"the search can't start at {start}"
    assert min(tolerance, factor - 1) > 0, f"steps of {factor}, to within {tolerance}, never end"
    assert growth >= 1, f"steps that shrink to the power of {growth} never end"
    low, high = start, start
    if sustains(start):
        while sustains(high := high * factor):
            low, factor = high, factor**growth
            if high > start * STEEPEST:
                return math.inf
    else:
        while not sustains(low := low / factor):
            high, factor = low, factor**growth
            if low < start / STEEPEST:
                return 0.0
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if sustains(middle) else (low, middle)
    return low
