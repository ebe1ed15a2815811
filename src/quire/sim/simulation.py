"""Simulations: the unmodified engine, scheduler and memory over a SimRunner and a virtual clock, measures of served
requests, and the search for the highest request rate that meets objectives.

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
from quire.sim.cost_model import CostModel, StepWork
from quire.sim.runner import DrawFunction, PaddingCounts, SimRunner, VirtualClock

MIN_TIMELINE_SAMPLES = 400  # in a run
OBJECTIVE_CHECK_SECONDS = 1.0  # virtual seconds between checks if a run has failed
MEASURES = ("normalised", "ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p99")
MAX_PAGES = 2**24  # each is an entry of several lists
MAX_RATE_FACTOR = 2.0**14  # limit of the search for a rate, relative to its start
ACCEPTANCE = 0.7  # the default of Experiment.synthetic_acceptance


class TraceRequest(NamedTuple):
    """A request of a trace, at `arrival` seconds. Its parameters define its output length; end tokens do not end it.
    `media` are its images; `pixels` are for runners with a vision encoder."""

    arrival: float
    prompt: list[int]
    params: SamplingParams
    media: tuple[ImageItem, ...] = ()
    pixels: tuple[ImagePixels, ...] = ()

    @property
    def encoder_pixels(self) -> tuple[ImagePixels, ...]:
        """Its pixels, empty if the trace has none."""
        return self.pixels or tuple(ImagePixels(image.key, (0,), b"") for image in self.media)


class ServedRequest:
    """The progress of one request. `token_times` are (time, number of tokens)."""

    __slots__ = ("arrival", "done", "output_len", "prompt_len", "token_times")

    def __init__(self, arrival: float, prompt: int, output: int) -> None:
        self.arrival, self.prompt_len, self.output_len = arrival, prompt, output
        self.token_times: list[tuple[float, int]] = []
        self.done = False

    def lower_bound(self, measure: str, now: float) -> float:
        """Return a measure in seconds, or its lower bound if the request is not done. `tpot` is the time per token
        after the first, `ttft` the time to the first token."""
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
    """The numbers of running and waiting requests and the memory usage at a time."""

    time: float
    running: int
    waiting: int
    usage: Usage


class RunTotals(NamedTuple):
    """Totals of a run. `mean_batch` (rows) and `mean_running` (requests in memory) are averages over steps.
    `busy_share` is the share of time in which the device computed. `finished` is False for an aborted run. Of the
    `draft_tokens` of `drafts` verifications `accepted_tokens` were accepted. Of the `queries` prompt tokens that were
    looked up in the prefix cache `hits` were found."""

    seconds: float
    finished: bool
    steps: int
    busy_share: float
    mean_batch: float
    mean_running: float
    preemptions: int
    swapped_bytes: int
    sharing_saved: float
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    queries: int
    hits: int


class SimulationResult(NamedTuple):
    """The result of a simulation; of several engines, also how many requests each served."""

    requests: list[ServedRequest]
    timeline: list[TimelineSample]
    totals: RunTotals
    replicas: Sequence[int] = ()


class Objective(NamedTuple):
    """A statistic of a measure that must not exceed `limit` seconds."""

    statistic: str
    measure: str
    limit: float

    @property
    def name(self) -> str:
        """The name on the command line, without the number."""
        return f"{self.statistic}-{self.measure}-ms"

    def value(self, served: Sequence[ServedRequest]) -> float:
        """Return the statistic of finished requests."""
        values = [request.lower_bound(self.measure, 0.0) for request in served]
        if self.statistic == "mean":
            return float(np.mean(values))
        return float(np.percentile(values, float(self.statistic[1:])))

    def weight(self, value: float) -> float:
        """Return the weight of a request's value: the value for a mean; for a percentile 1 if it exceeds the limit."""
        return value if self.statistic == "mean" else float(value > self.limit)

    def is_lost(self, weight: float, total: int) -> bool:
        """Return True if `total` requests, of which some have this sum of weights, cannot meet the objective."""
        if self.statistic == "mean":
            return weight > self.limit * total
        # Lost if the requests from this rank up are too slow.
        rank = int(float(self.statistic[1:]) / 100 * (total - 1))
        return weight >= total - rank


class ObjectiveTracker:
    """Tracks whether a run of `total` requests can still meet an objective. Finished requests are summed once."""

    def __init__(self, objective: Objective, total: int) -> None:
        self.objective, self.total = objective, total
        self.finished_weight = 0.0

    def add_finished(self, request: ServedRequest) -> None:
        """Add a finished request."""
        self.finished_weight += self.objective.weight(request.lower_bound(self.objective.measure, 0.0))

    def is_lost(self, others: Iterable[ServedRequest], now: float) -> bool:
        """Return True if the objective cannot be met any more; `others` have arrived and are not done."""
        objective = self.objective
        bounds = (request.lower_bound(objective.measure, now) for request in others)
        return objective.is_lost(self.finished_weight + sum(map(objective.weight, bounds)), self.total)


def parse_objective(text: str) -> Objective:
    """Parse an objective such as "p99-normalised-ms=200". Raise StartupError with the expected form."""
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


class StaticBatchPadding:
    """Counts the padding of a scheduler of static batches, in which all members of a batch start in one step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.batch_size = 0  # sequences of the current batch, future forks included

    def __call__(self, plan: StepPlan) -> PaddingCounts:
        """Return the padding of the step that was just planned."""
        by_slot = self.scheduler.by_slot
        prompts = [init.prompt_len for init in plan.new_slots if init.parent_slot < 0]
        branches = sum(seq.num_forks for _, seq in by_slot.values())
        if prompts:
            self.batch_size = len(by_slot) + branches
        prompt = len(prompts) * max(prompts, default=0) - sum(prompts)
        return PaddingCounts(prompt, max(self.batch_size - len(by_slot) - branches, 0))


class Simulation:
    """An engine of `config` for a model of `spec`, with `kv_tokens` tokens of KV (or as many as `kv_bytes` hold, see
    MemorySize), on a device with costs `cost`. `spec` has the layers of the draft model too, if there is one."""

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
        on_step: Callable[[StepWork, float], None] | None = None,
    ) -> None:
        """`kind`: "cuda" or "cpu". `depth`, `draw` and `on_step`: see SimRunner."""
        config = config.with_device_defaults(kind)
        _check_pages(kv_tokens, config.page_size)
        size = MemorySize(kv_tokens, config.max_model_len or spec.max_len, cost.shape.itemsize, kv_bytes)
        size = size._replace(max_len=max_seq_len(config, spec, size))
        self.config, self.spec, self.clock = config, spec, VirtualClock()
        depth = config.depth or depth
        acceptance = config.experiment.synthetic_acceptance
        self.runner = SimRunner(
            cost, self.clock, depth, avoid=frozenset(spec.eos_ids), draw=draw, on_step=on_step,
            acceptance=ACCEPTANCE if acceptance is None else acceptance,
        )  # fmt: skip
        memory = build_memory(config, spec, size, "simulated")
        self.runner.bind(memory.kv_config)
        limits = EngineLimits(spec.vocab_size, size.max_len, sys.maxsize)
        self.engine = assemble(
            config, memory, self.runner, limits, clock=self.clock, eos_ids=spec.eos_ids, costs=cost.preemption_costs(),
            depth=depth, speculation_costs=cost.speculation_costs(),
        )  # fmt: skip
        if self.engine.scheduler.static_batching:
            self.runner.set_padding(StaticBatchPadding(self.engine.scheduler))

    def register_prefix(self, name: str, tokens: Sequence[int]) -> None:
        """Compute and pin a prefix before any request arrives (PagedAttention §4.4), within `config.prefix_tokens`."""
        self.engine.register_prefix(name, tokens)
        while self.engine.has_unfinished_requests:
            for output in self.engine.step():
                assert output.finish_reason != "error", f"the prefix {name} was not registered: {output.stop_reason}"

    def run(
        self, trace: Sequence[TraceRequest], objectives: Sequence[Objective] = (), until: float = math.inf
    ) -> SimulationResult:
        """Serve the trace, once, until its end, `until` seconds, or the time when an objective cannot be met any more.
        The trace's time begins now, after the registration of prefixes."""
        engine, clock = self.engine, self.clock
        assert all(map(math.isfinite, (request.arrival for request in trace))), "a request never arrives"
        until += clock.now
        trace = [request._replace(arrival=clock.now + request.arrival) for request in trace] if clock.now else trace
        served: list[ServedRequest] = []
        unfinished: dict[str, ServedRequest] = {}
        trackers = [ObjectiveTracker(objective, len(trace)) for objective in objectives]
        recorder = _StepRecorder(self, trace[-1].arrival)
        next_check = OBJECTIVE_CHECK_SECONDS
        while len(served) < len(trace) or engine.has_unfinished_requests:
            while len(served) < len(trace) and trace[len(served)].arrival <= clock.now:
                request = trace[len(served)]
                prompt, params = request.prompt, request.params
                assert params.max_tokens is not None, "a request of a trace needs max_tokens"
                name = str(len(served))
                engine.add(name, prompt, params, images=request.media, pixels=request.encoder_pixels)
                unfinished[name] = ServedRequest(request.arrival, len(prompt), params.max_tokens)
                served.append(unfinished[name])
            if not engine.has_unfinished_requests:
                clock.advance_to(trace[len(served)].arrival)
                continue
            ended = 0
            for output in engine.step():
                progress = unfinished[output.request_id]
                progress.token_times.append((clock.now, len(output.tokens)))
                if output.done:
                    progress.done = True
                    ended += 1
                    del unfinished[output.request_id]
                    for tracker in trackers:
                        tracker.add_finished(progress)
            recorder.record_step(ended)
            if clock.now >= until:
                break
            if trackers and clock.now >= next_check:
                next_check = clock.now + OBJECTIVE_CHECK_SECONDS
                if any(tracker.is_lost(unfinished.values(), clock.now) for tracker in trackers):
                    return SimulationResult(served, recorder.timeline, recorder.totals(finished=False))
        finished = len(served) == len(trace) and not engine.has_unfinished_requests
        return SimulationResult(served, recorder.timeline, recorder.totals(finished))


class _StepRecorder:
    """Records averages over steps, and evenly spaced samples of the memory: if there are too many, every other one is
    dropped."""

    def __init__(self, simulation: Simulation, expected: float) -> None:
        self.simulation = simulation
        self.timeline: list[TimelineSample] = []
        self.interval = expected / MIN_TIMELINE_SAMPLES
        self.running = self.steps = self.table_pages = self.saved_pages = 0

    def record_step(self, ended: int) -> None:
        """Record a step in which `ended` requests finished."""
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
        sharing, stats = engine.scheduler.memory.account().sharing, engine.stats
        return RunTotals(
            now, finished, stats.steps, self.simulation.runner.busy_seconds / now if now else 0.0,
            stats.rows / max(stats.steps, 1), self.running / max(self.steps, 1),
            engine.scheduler.num_preemptions, sharing.swapped_out + sharing.swapped_in,
            self.saved_pages / self.table_pages if self.table_pages else 0.0,
            stats.num_drafts, stats.draft_tokens, stats.accepted_tokens, sharing.queries, sharing.hits,
        )  # fmt: skip


def mean_usage(moments: Sequence[TimelineSample]) -> Usage:
    """The memory by category, averaged over the samples."""
    return Usage(*(int(np.mean([moment.usage[i] for moment in moments])) for i in range(len(Usage._fields))))


def meets_objectives(outcome: SimulationResult, objectives: Sequence[Objective]) -> bool:
    """Return True if the run finished and met all objectives."""
    return outcome.totals.finished and all(goal.value(outcome.requests) <= goal.limit for goal in objectives)


def highest_rate(
    sustains: Callable[[float], bool],
    start: float = 1.0,
    tolerance: float = 0.02,
    factor: float = 2.0,
    growth: float = 1.0,
) -> float:
    """Return the highest rate for which `sustains` is True: by steps up or down from `start`, then by bisection until a
    rejected rate is at most `tolerance` (relative) higher. The first step is `factor`, each next one the previous step
    to the power of `growth`. Return 0 if every rate down to the search's limit is rejected, infinity if none is."""
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
