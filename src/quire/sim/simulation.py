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
from quire.core.assembly import assemble
from quire.core.scheduler import Scheduler
from quire.core.validation import EngineLimits
from quire.errors import StartupError
from quire.memory.answers import Usage
from quire.memory.build import build_memory, max_seq_len
from quire.memory.page_layout import MemorySize
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.model_spec import ModelSpec
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import StepPlan
from quire.sim.clock import VirtualClock
from quire.sim.cost_model import CostModel
from quire.sim.runner import DrawFunction, SimRunner

MIN_TIMELINE_SAMPLES = 400  # of the memory, in a run
OBJECTIVE_CHECK_SECONDS = 1.0  # virtual seconds between questions whether a run is lost
MEASURES = ("normalised", "ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p99")
MAX_PAGES = 2**24  # each is an entry of several lists here
MAX_RATE_FACTOR = 2.0**14  # how far from its start the search for a rate goes


class TraceRequest(NamedTuple):
    """A request of a trace: it comes at `arrival` seconds. Its parameters give its output length, end tokens aside.
    `media` are its pictures; `pixels`, what a runner with eyes gets of them."""

    arrival: float
    prompt: list[int]
    params: SamplingParams
    media: tuple[ImageItem, ...] = ()
    pixels: tuple[ImagePixels, ...] = ()

    @property
    def encoder_pixels(self) -> tuple[ImagePixels, ...]:
        """Its pixels; of no bytes where the runner has no eyes."""
        return self.pixels or tuple(ImagePixels(medium.key, (0,), b"") for medium in self.media)


class ServedRequest:
    """What became of one request. `token_times` are the moments that brought tokens, and how many each."""

    __slots__ = ("arrival", "done", "output_len", "prompt_len", "token_times")

    def __init__(self, arrival: float, prompt: int, output: int) -> None:
        self.arrival, self.prompt_len, self.output_len = arrival, prompt, output
        self.token_times: list[tuple[float, int]] = []
        self.done = False

    def lower_bound(self, measure: str, now: float) -> float:
        """Seconds of a measure; before the request is done, what it can't fall below any more. `tpot` is the time of a
        token after the first, `ttft` that until the first."""
        last = self.token_times[-1][0] if self.done else now
        if measure == "e2e":
            return last - self.arrival
        if measure == "normalised":
            return (last - self.arrival) / self.output_len
        first = self.token_times[0][0] if self.token_times else None
        if measure == "ttft":
            return (now if first is None else first) - self.arrival
        return (last - first) / (self.output_len - 1) if first is not None and self.output_len > 1 else 0.0


class TimelineSample(NamedTuple):
    """The engine at one time: requests that run and that wait, and the memory."""

    time: float
    running: int
    waiting: int
    usage: Usage


class RunTotals(NamedTuple):
    """A run in numbers. Batches are averages over steps: `mean_batch` of rows, `mean_running` of requests in memory.
    `busy_share` is the share of the time in which the device computed; `finished` is False for a run that was given
    up."""

    seconds: float
    finished: bool
    steps: int
    busy_share: float
    mean_batch: float
    mean_running: float
    preemptions: int
    swapped_bytes: int
    sharing_saved: float


class SimulationResult(NamedTuple):
    """All that a simulation tells."""

    requests: list[ServedRequest]
    timeline: list[TimelineSample]
    totals: RunTotals


class Objective(NamedTuple):
    """A statistic of a measure that must not exceed `limit` seconds."""

    statistic: str
    measure: str
    limit: float

    @property
    def name(self) -> str:
        """As on the command line, without its number."""
        return f"{self.statistic}-{self.measure}-ms"

    def value(self, served: Sequence[ServedRequest]) -> float:
        """The statistic, of requests that are done."""
        values = [one.lower_bound(self.measure, 0.0) for one in served]
        if self.statistic == "mean":
            return float(np.mean(values))
        return float(np.percentile(values, float(self.statistic[1:])))

    def weight(self, value: float) -> float:
        """What one request's value counts for: itself in a mean; whether it is too high in a percentile."""
        return value if self.statistic == "mean" else float(value > self.limit)

    def is_lost(self, weight: float, total: int) -> bool:
        """Requests that together weigh this much are too many, or too slow, for `total` to meet the objective."""
        if self.statistic == "mean":
            return weight > self.limit * total
        rank = int(float(self.statistic[1:]) / 100 * (total - 1))  # if this one and all above are too slow
        return weight >= total - rank


class ObjectiveTracker:
    """Whether a run of `total` requests can still meet an objective. What is done is added up once."""

    def __init__(self, objective: Objective, total: int) -> None:
        self.objective, self.total = objective, total
        self.finished_weight = 0.0

    def add_finished(self, one: ServedRequest) -> None:
        """A request is done."""
        self.finished_weight += self.objective.weight(one.lower_bound(self.objective.measure, 0.0))

    def is_lost(self, others: Iterable[ServedRequest], now: float) -> bool:
        """It can't, whatever comes after `now`; `others` came and aren't done."""
        goal = self.objective
        return goal.is_lost(
            self.finished_weight + sum(goal.weight(one.lower_bound(goal.measure, now)) for one in others), self.total
        )


def parse_objective(text: str) -> Objective:
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
    if kv_tokens > MAX_PAGES * page:
        raise StartupError(
            f"{kv_tokens:,} tokens of KV are more than {MAX_PAGES:,} pages of {page}, the most that is simulated",
            "Give a smaller --kv-gib or --kv-tokens, or a larger --page-size",
        )


class Simulation:
    """An engine of `config`'s memory and scheduler, with `kv_tokens` tokens of KV for `spec` (or all that `kv_bytes`
    hold, see Size), on a device of `cost`."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        cost: CostModel,
        kv_tokens: int,
        *,
        kind: str = "cuda",
        depth: int = 1,
        draw: DrawFunction | None = None,
        kv_bytes: int = 0,
    ) -> None:
        config = config.with_device_defaults(kind)
        _check_pages(kv_tokens, config.page_size)
        size = MemorySize(kv_tokens, config.max_model_len or spec.max_len, cost.shape.itemsize, kv_bytes)
        size = size._replace(max_len=max_seq_len(config, spec, size))
        self.config, self.spec, self.clock = config, spec, VirtualClock()
        depth = config.depth or depth
        self.runner = SimRunner(cost, self.clock, depth, avoid=frozenset(spec.eos_ids), draw=draw)
        memory = build_memory(config, spec, size, "simulated")
        self.runner.bind(memory.kv_config)
        limits = EngineLimits(spec.vocab_size, size.max_len, sys.maxsize)
        self.engine = assemble(
            config, memory, self.runner, limits, clock=self.clock, eos_ids=spec.eos_ids, costs=cost.preemption_costs(),
            depth=depth,
        )  # fmt: skip
        if self.engine.scheduler.static_batching:
            self.runner.padding = StaticBatchPadding(self.engine.scheduler)

    def register_prefix(self, name: str, tokens: Sequence[int]) -> None:
        """Compute and pin a prefix before any request comes (PagedAttention §4.4), within `config.prefix_tokens`."""
        self.engine.register_prefix(name, tokens)
        while self.engine.has_unfinished_requests:
            for output in self.engine.step():
                assert output.finish_reason != "error", f"the prefix {name} was not registered: {output.stop_reason}"

    def run(
        self, trace: Sequence[TraceRequest], objectives: Sequence[Objective] = (), until: float = math.inf
    ) -> SimulationResult:
        """Serve the whole trace, or as much of it as shows that an objective can't be met, or as comes before `until`
        seconds. Once only. The trace's time begins now: after prefixes were registered."""
        engine, clock = self.engine, self.clock
        assert all(map(math.isfinite, (one.arrival for one in trace))), "a request never comes"
        until += clock.now
        trace = [one._replace(arrival=clock.now + one.arrival) for one in trace] if clock.now else trace
        served: list[ServedRequest] = []
        going: dict[str, ServedRequest] = {}
        doubts = [ObjectiveTracker(goal, len(trace)) for goal in objectives]
        watch = _StepRecorder(self, trace[-1].arrival)
        look = OBJECTIVE_CHECK_SECONDS
        while len(served) < len(trace) or engine.has_unfinished_requests:
            while len(served) < len(trace) and trace[len(served)].arrival <= clock.now:
                asked = trace[len(served)]
                at, prompt, params = asked[:3]
                assert params.max_tokens is not None, "a request of a trace has a length"
                name = str(len(served))
                engine.add(name, prompt, params, images=asked.media, pixels=asked.encoder_pixels)
                going[name] = one = ServedRequest(at, len(prompt), params.max_tokens)
                served.append(one)
            if not engine.has_unfinished_requests:
                clock.advance_to(trace[len(served)].arrival)
                continue
            ended = 0
            for output in engine.step():
                one = going[output.request_id]
                one.token_times.append((clock.now, len(output.tokens)))
                if output.done:
                    one.done = True
                    ended += 1
                    del going[output.request_id]
                    for doubt in doubts:
                        doubt.add_finished(one)
            watch.record_step(ended)
            if clock.now >= until:
                break
            if doubts and clock.now >= look:
                look = clock.now + OBJECTIVE_CHECK_SECONDS
                if any(doubt.is_lost(going.values(), clock.now) for doubt in doubts):
                    return SimulationResult(served, watch.timeline, watch.totals(finished=False))
        finished = len(served) == len(trace) and not engine.has_unfinished_requests
        return SimulationResult(served, watch.timeline, watch.totals(finished))


class _StepRecorder:
    """Averages over steps, and samples of the memory over time, in even distances: where there are too many, every
    other one is dropped."""

    def __init__(self, simulation: Simulation, expected: float) -> None:
        self.simulation = simulation
        self.timeline: list[TimelineSample] = []
        self.interval = expected / MIN_TIMELINE_SAMPLES
        self.running = self.steps = self.table_pages = self.saved_pages = 0

    def record_step(self, ended: int) -> None:
        """After each step; requests that ended were running in it."""
        scheduler, now = self.simulation.engine.scheduler, self.simulation.clock.now
        self.steps += 1
        self.running += len(scheduler.running) + ended
        if self.timeline and now < self.timeline[-1].time + self.interval:
            return
        usage, sharing, _ = scheduler.memory.account()
        self.table_pages += sharing.tables
        self.saved_pages += sharing.saved
        waiting = len(scheduler.waiting) + len(scheduler.swapped)
        self.timeline.append(TimelineSample(now, len(scheduler.running), waiting, usage))
        if len(self.timeline) > 2 * MIN_TIMELINE_SAMPLES:
            self.timeline = self.timeline[::2]
            self.interval = 2 * max(self.interval, now / len(self.timeline) / 2)

    def totals(self, finished: bool) -> RunTotals:
        engine, now = self.simulation.engine, self.simulation.clock.now
        sharing = engine.scheduler.memory.account().sharing
        return RunTotals(
            now, finished, engine.stats.steps, self.simulation.runner.busy_seconds / now if now else 0.0,
            engine.stats.rows / max(engine.stats.steps, 1), self.running / max(self.steps, 1),
            engine.scheduler.num_preemptions, sharing.swapped_out + sharing.swapped_in,
            self.saved_pages / self.table_pages if self.table_pages else 0.0,
        )  # fmt: skip


def mean_usage(moments: Sequence[TimelineSample]) -> Usage:
    """The memory by category, averaged over the samples."""
    return Usage(*(int(np.mean([moment.usage[i] for moment in moments])) for i in range(len(Usage._fields))))


def meets_objectives(outcome: SimulationResult, objectives: Sequence[Objective]) -> bool:
    """The run was finished and kept to every objective."""
    return outcome.totals.finished and all(goal.value(outcome.requests) <= goal.limit for goal in objectives)


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
            if high > start * MAX_RATE_FACTOR:
                return math.inf
    else:
        while not sustains(low := low / factor):
            high, factor = low, factor**growth
            if low < start / MAX_RATE_FACTOR:
                return 0.0
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if sustains(middle) else (low, middle)
    return low


class PaddingCounts(NamedTuple):
    """In one step: tokens that pad prompts to the longest of their batch, and rows of members that ended, which the
    others still need."""

    prompt: int
    rows: int


class StaticBatchPadding:
    """Watches a scheduler of static batches, in which all members of a batch come in one step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.batch_size = 0  # sequences of the batch under way, those to be forked included

    def __call__(self, plan: StepPlan) -> PaddingCounts:
        """What is computed for nothing in the step that was just planned."""
        by_slot = self.scheduler.by_slot
        prompts = [birth.prompt_len for birth in plan.new_slots if birth.parent_slot < 0]
        branches = sum(seq.num_forks for _, seq in by_slot.values())
        if prompts:
            self.batch_size = len(by_slot) + branches
        prompt = len(prompts) * max(prompts, default=0) - sum(prompts)
        return PaddingCounts(prompt, max(self.batch_size - len(by_slot) - branches, 0))
