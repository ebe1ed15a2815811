"""Run a trace on this device and in simulation, served in several ways: by the systems of PagedAttention §6.1, say.

`serve` takes the wall clock or a virtual one, so both are measured in the same way. One model and one runner serve all
ways in turn, so these differ only in their memory and scheduling. Token values do not affect the cost of steps, so
weights may be dummies. A GPU faster than the paper's would not fill its memory at the paper's rates, so rates are
shares of a system's simulated capacity. The calibration comes from a separate run.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from papers.entry import left_out
from papers.serving import DEVICES, MANY, SHARED, SYSTEMS, Load, in_parallel, search
from quire.bench.contexts import stop
from quire.bench.machine import seconds_alive
from quire.bench.shapes import built
from quire.bench.simulate import read_deployment
from quire.config import EngineConfig
from quire.core.assembly import assemble
from quire.core.engine import Engine
from quire.core.runner import Runner
from quire.errors import QuireError
from quire.ipc.garbage_collection import freeze_loaded_objects
from quire.memory.answers import Usage
from quire.memory.build import build_memory
from quire.memory.page_layout import MemorySize
from quire.protocol.parallel_layout import Shard
from quire.protocol.step_plan import LAST_SAMPLED, SeqSlice, StepPlan, StepResult
from quire.sim.simulation import ServedRequest, Simulation, TraceRequest
from quire.startup.build import BuiltEngine
from quire.startup.checkpoint import read_checkpoint
from quire.startup.dtypes import ITEMSIZE

LOOK = 0.25  # seconds between samples of the memory
CROWD = 1024  # simultaneous requests where a capacity is simulated,
STEPS = 5000  # of that simulation, at most
EACH = 128  # tokens of KV memory for each request of the warm-up
WARM = 3.0  # seconds of the warm-up
OFF = ("tokens_per_s", "batch", "latency")  # whose errors by simulation are computed

Wait = Callable[[float], None]


class Span(NamedTuple):
    """Seconds of a run: it is measured from `start` to `end`, when the last request comes, and aborted at `until`."""

    start: float
    end: float
    until: float


class Step(NamedTuple):
    """A finished step: its time, the steps and rows planned during it, the running requests, new tokens."""

    at: float
    planned: int
    rows: int
    running: int
    tokens: int


class Place(NamedTuple):
    """A device and a load: an engine of `config`, and its simulation by the load's calibration.

    Requests are the same, in the same order, at any rate. With `config.prefix_tokens` the load's prefix is
    registered. With `per_rank` the calibration is of the device of one rank, else of those of all ranks together."""

    config: EngineConfig
    load: Load
    per_rank: bool = False

    def trace(self, rate: float, seconds: float) -> list[TraceRequest]:
        """Return Poisson arrivals."""
        return self.load.trace(rate, seconds)

    def mean_output(self) -> float:
        """Return the mean output tokens of a request."""
        return self.load.width * float(np.mean([one.output_len for one in self.load.specs(MANY)]))

    def simulation(self, kv_tokens: int | None = None) -> Simulation:
        """Return the simulation by the calibration."""
        config = self.config if self.per_rank else replace(self.config, tp=1)
        plant = read_deployment(config, self.load.calibration)
        plant = plant if kv_tokens is None else plant._replace(kv_tokens=kv_tokens, kv_bytes=0)
        made = plant.simulation()
        self.register_prefix(made.engine)
        return made

    def register_prefix(self, engine: Engine) -> None:
        """Register the prefix of the load's requests, if the config has room for one."""
        if self.config.prefix_tokens:
            engine.register_prefix("prefix", [SHARED] * self.load.prefix)
            while engine.has_unfinished_requests:
                engine.step()

    def capacity(self) -> float:
        """Return the simulated requests a second with a full queue, from the middle of the steps: memory fills at the
        beginning and may empty at the end."""
        made = self.simulation()
        for i, one in enumerate(self.trace(CROWD, 1.0)):
            made.engine.add(str(i), one.prompt, one.params)
        steps: list[tuple[float, int]] = []
        while made.engine.has_unfinished_requests and len(steps) < STEPS:
            tokens = sum(len(output.tokens) for output in made.engine.step())
            steps.append((made.clock(), tokens))
        middle = steps[len(steps) // 5 : 1 + 4 * len(steps) // 5]
        tokens = sum(tokens for _, tokens in middle[1:])
        return tokens / (middle[-1][0] - middle[0][0]) / self.mean_output()


def every_system(place: Place) -> dict[str, Place]:
    """Return a way for each system of PagedAttention §6.1, vLLM first: each has its own memory."""
    return {name: place._replace(config=replace(place.config, memory=memory)) for memory, name in SYSTEMS.items()}


class Plan(NamedTuple):
    """A planned run: a way to serve at a rate, in requests a second, which is a `share` of its simulated capacity."""

    way: str
    place: Place
    rate: float
    share: float
    span: Span

    def label(self) -> str:
        """Return a name for messages about the run."""
        return f"{self.way} at {self.rate:.2f}/s"

    def trace(self) -> list[TraceRequest]:
        return self.place.trace(self.rate, self.span.end)

    def simulate(self, kv_tokens: int) -> dict[str, Any]:
        """Run the plan on the virtual clock, with a memory of `kv_tokens` tokens."""
        made = self.place.simulation(kv_tokens)
        return run(made.engine, made.clock.advance_to, self, "simulated")


# Runs


def serve(
    engine: Engine, wait: Wait, trace: Sequence[TraceRequest], span: Span
) -> tuple[list[ServedRequest], list[Step], list[Usage]]:
    """Submit requests at their times by the engine's clock; `wait` waits until a time on it.

    Unfinished requests are aborted at the end, so that the engine is idle again."""
    clock = engine.clock
    began, look = clock(), span.start
    served: list[ServedRequest] = []
    steps: list[Step] = []
    usages: list[Usage] = []
    # Times are compared as `wait` gets them, or rounding would make it wait for a time that has come.
    while (now := clock()) < began + span.until and (len(served) < len(trace) or engine.has_unfinished_requests):
        while len(served) < len(trace) and began + trace[len(served)].arrival <= now:
            asked = trace[len(served)]
            at, prompt, params = asked[:3]
            assert params.max_tokens is not None, "a request of a trace has a length"
            engine.add(str(len(served)), prompt, params, images=asked.media, pixels=asked.encoder_pixels)
            served.append(ServedRequest(at, len(prompt), params.max_tokens))
        if engine.has_unfinished_requests:
            steps.append(_step(engine, served, began))
        else:
            wait(began + min(trace[len(served)].arrival, span.until))
        if look <= clock() - began <= span.end:
            usages.append(engine.scheduler.memory.account().usage)
            look = clock() - began + LOOK
    usages = usages or [engine.scheduler.memory.account().usage]  # a step may take longer than the run
    stop(engine)
    return served, steps, usages


def _step(engine: Engine, served: Sequence[ServedRequest], began: float) -> Step:
    """Run one step of the engine. Requests that finish in it count as running."""
    planned, rows = engine.stats.steps, engine.stats.rows
    outputs = engine.step()
    now = engine.clock() - began
    tokens, running = 0, len(engine.scheduler.running)
    for output in outputs:
        if output.finish_reason == "error":
            raise QuireError(f"request {output.request_id} failed: {output.stop_reason}")
        one = served[int(output.request_id)]
        one.token_times.append((now, len(output.tokens)))
        one.done = output.done
        tokens += len(output.tokens)
        running += output.done
    return Step(now, engine.stats.steps - planned, engine.stats.rows - rows, running, tokens)


def report(point: dict[str, Any]) -> dict[str, Any]:
    """Print a point to stderr at once, so that a later error does not lose it; return it."""
    print(json.dumps(point), file=sys.stderr, flush=True)
    return point


def run(engine: Engine, wait: Wait, plan: Plan, by: str) -> dict[str, Any]:
    """Serve the plan's trace and return a point; report measured ones.

    `batch` is rows a step, `running` requests in memory, `tokens_per_s` of outputs: means over the measured `steps`.
    `latency` is the mean normalised latency (s a token) of all requests; `unfinished` ones count with their latency so
    far. The memory by category is in per cent."""
    start, end, _ = plan.span
    before = engine.scheduler.num_preemptions
    served, steps, usages = serve(engine, wait, plan.trace(), plan.span)
    now = steps[-1].at
    part = [step for step in steps if start < step.at <= end]
    planned = sum(step.planned for step in part)
    sizes = np.mean(usages, axis=0)
    point = {
        "system": plan.way, "rate": plan.rate, "by": by, "seconds": end - start, "steps": planned,
        "batch": sum(step.rows for step in part) / max(planned, 1),
        "running": sum(step.running for step in part) / max(len(part), 1),
        "tokens_per_s": sum(step.tokens for step in part) / (end - start),
        "latency": float(np.mean([one.lower_bound("normalised", now) for one in served])),
        "requests": len(served), "unfinished": sum(not one.done for one in served),
        "preemptions": engine.scheduler.num_preemptions - before, "share": plan.share,
        **dict(zip(Usage._fields, (100 * sizes / sizes.sum()).tolist())),
    }  # fmt: skip
    return report(point) if by == "real" else point


# On the device


class PaddingRunner:
    """A runner that computes what FasterTransformer pads: prompts up to the longest of their batch, and sequences that
    have ended until the last of the batch ends. These overwrite the end of their own memory, and their results are
    dropped; outputs after a padded prompt are wrong."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.ends: dict[int, int] = {}  # the tokens so far of each member of the batch, by slot
        self.rows: deque[int] = deque()  # of the steps in flight, without the padding

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def submit(self, plan: StepPlan) -> Any:
        slices = tuple(plan.slices)
        if any(init.parent_slot < 0 for init in plan.new_slots):
            assert all(row.start == 0 for row in slices), "a static batch computes all its prompts in one step"
            longest = max(len(row.tokens) for row in slices)
            slices = tuple(row._replace(tokens=row.tokens + (0,) * (longest - len(row.tokens))) for row in slices)
            self.ends = {}
        self.ends.update({row.slot: row.start + len(row.tokens) for row in slices})
        ended = self.ends.keys() - {row.slot for row in slices}
        more = tuple(SeqSlice(slot, (LAST_SAMPLED,), self.ends[slot] - 1, 1) for slot in sorted(ended))
        self.rows.append(len(slices))
        return self.runner.submit(plan._replace(slices=slices + more))

    def collect(self, ticket: Any) -> StepResult:
        result = self.runner.collect(ticket)
        return result._replace(slice_results=result.slice_results[: self.rows.popleft()])


def engine_of(made: BuiltEngine, config: EngineConfig) -> Engine:
    """Return another engine over the runner of `made`, now idle, with the memory of `config`.

    Pages and page tables have the same sizes in every memory, so the captured graphs and compiled kernels of `made` are
    reused."""
    runner: Any = made.engine.runner
    config = config.with_device_defaults(made.memory_plan.device).per_rank()
    spec = read_checkpoint(config, weights=False).for_shard(Shard(0, config.tp, 0, 1)).spec
    size = MemorySize(
        made.memory_plan.kv_tokens,
        made.memory_plan.max_len,
        ITEMSIZE[made.memory_plan.dtype],
        made.memory_plan.kv_bytes,
    )
    memory = build_memory(config, spec, size, made.name)
    assert memory.kv_config == made.engine.scheduler.memory.kv_config, "the memories have other tables"
    limits = made.engine.limits._replace(max_queued=sys.maxsize)
    engine = assemble(config, memory, runner, limits, clock=time.monotonic, depth=made.engine.depth)
    if engine.scheduler.static_batching:
        engine.runner = cast(Runner, PaddingRunner(runner))
    return engine


def sleep_until(moment: float) -> None:
    """Sleep until a time of time.monotonic."""
    time.sleep(max(0.0, moment - time.monotonic()))


def warm_up(made: BuiltEngine, place: Place) -> None:
    """Run an unmeasured burst, so that the first run finds the device in the same state as the others.

    Kernels and graphs exist since startup."""
    engine = engine_of(made, place.config)
    rows = min(engine.scheduler.max_seqs, made.memory_plan.kv_tokens // EACH)
    serve(engine, sleep_until, place.trace(2 * rows / WARM, WARM), Span(0.0, WARM, WARM))


# Runners


def one_rate(ways: Mapping[str, Place], of: tuple[str, float], ramp: float, seconds: float) -> list[dict[str, Any]]:
    """Return the runs of all ways, on this device and simulated, at the rate that is the same share of the first one's
    capacity as the rate `of` another calibration. The first `ramp` seconds are not measured."""
    device, rate = of
    first = next(iter(ways.values()))
    rate *= first.capacity() / first._replace(load=first.load._replace(calibration=device)).capacity()
    span = Span(ramp, seconds, seconds)
    plans = [Plan(way, place, rate, rate / place.capacity(), span) for way, place in ways.items()]
    return _beside(plans, plans)


def by_rate(
    ways: Mapping[str, Place], shares: Sequence[float], real: Sequence[float], ramp: float, requests: int, least: float,
    most: float, drain: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return simulated runs of all ways at shares of each one's capacity, and runs on this device at those of `real`.

    A run takes until `requests` have come, the same ones for all ways, within `least` and `most` seconds, and `drain`
    more if the rate is within the capacity. The first `ramp` seconds are not measured."""
    plans = []
    for way, place in ways.items():
        capacity = place.capacity()
        for share in shares:
            end = min(max(requests / (share * capacity), least), most)
            plans.append(Plan(way, place, share * capacity, share, Span(ramp, end, end + drain * (share < 1))))
    return _beside(plans, [plan for plan in plans if plan.share in real])


def panel(
    model: str, workload: str, tp: int, kv_tokens: int, device: str, dtype: str, calibration: str,
    shares: Sequence[float], real: Sequence[float], ramp: float, seconds: float, drain: float, minutes: float,
    knees: float = 0.0,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return runs of vLLM's memory and the three Orcas: simulated ones at the shares `shares` and `real` of each one's
    capacity, and ones on this device at `real`. `model` has dummy weights and `kv_tokens` tokens of KV on `tp` devices.
    `calibration` is that of one of them.

    On the device the shares come in the order of `real`, with all systems for each. Runs that would end more than
    `minutes` after this process began are left out. If `knees` isn't 0, there is also a point for each system with the
    highest rate (`knee`) that keeps LIMIT in simulated traces of `knees` seconds."""
    config = EngineConfig(
        model_config=model, dummy_weights=True, dtype=dtype, device=device, tp=tp, kv_tokens=kv_tokens,
        enable_prefix_caching=False, preemption="recompute", swap_gib=0.0, skip_tokenizer_init=True, rank_timeout=60.0,
    )  # fmt: skip
    settings = {name: getattr(config, name) for name in DEVICES}
    place = Place(config, Load(calibration, workload, model, settings=settings), per_rank=True)
    ways = {name: way for name, way in every_system(place).items() if way.config.memory != "ft"}
    capacities = dict(zip(ways, in_parallel(Load.capacity, [(place.load, way.config.memory) for way in ways.values()])))
    plans = [
        Plan(name, ways[name], share * capacities[name], share, Span(ramp, seconds, seconds + drain * (share < 1)))
        for share in dict.fromkeys((*real, *shares)) for name in ways
    ]  # fmt: skip
    simulated = in_parallel(Plan.simulate, [(plan, kv_tokens) for plan in plans])
    measured, missing, _ = _measure([plan for plan in plans if plan.share in real], 60 * minutes)
    searched = in_parallel(
        search, [(place.load, way.config.memory, knees, capacities[name]) for name, way in ways.items() if knees]
    )
    points = _joined(plans, measured, simulated)
    points += [
        {"system": name, "by": "simulated", "capacity": capacities[name], "knee": knee, "seconds": knees}
        for name, (knee, _) in zip(ways, searched)
    ]
    label = {"model": model, "workload": workload, "tp": tp, "kv_tokens": kv_tokens}
    return [*({**label, **point} for point in points), *map(dict, left_out(missing))]


def _beside(plans: Sequence[Plan], real: Sequence[Plan]) -> list[dict[str, Any]]:
    """Run the plans `real` on this device one after another, simulate all plans, and return the points of both."""
    measured, missing, tokens = _measure(real)
    points = _joined(plans, measured, [plan.simulate(tokens) for plan in plans])
    return [*points, *map(dict, left_out(missing))]


def _measure(plans: Sequence[Plan], until: float = math.inf) -> tuple[list[dict[str, Any]], dict[str, str], int]:
    """Run the plans on this device one after another, with one engine start. Return the points; the labels of missing
    runs, with the reasons; and the number of tokens of the KV memory, 0 if no engine was started.

    A run that would end later than `until` seconds after this process began is missing, and so are a run that failed
    and all after it. Without `until` a failure is raised."""
    measured: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    if not plans or seconds_alive() + plans[0].span.until > until:
        return measured, dict.fromkeys(map(Plan.label, plans), "no time was left"), 0
    with built(plans[0].place.config) as made:
        warm_up(made, plans[0].place)
        freeze_loaded_objects()
        failed = ""
        for plan in plans:
            late = seconds_alive() + plan.span.until > until
            if not (failed or late):
                try:
                    engine = engine_of(made, plan.place.config)
                    plan.place.register_prefix(engine)
                    point = run(engine, sleep_until, plan, "real")
                    if point["tokens_per_s"]:
                        measured.append(point)
                    else:
                        missing[plan.label()] = "no token came in the measured time"
                    continue
                except QuireError as error:
                    if until == math.inf:
                        raise
                    failed = f"{type(error).__name__}: {error}"[:300]
            missing[plan.label()] = failed or "no time was left"
        return measured, missing, made.memory_plan.kv_tokens


def _joined(
    plans: Sequence[Plan], measured: Sequence[dict[str, Any]], simulated: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the points of this device, then the simulated ones, one for each plan. Add the requests `served` a second
    to all of them, and the simulation's relative errors to those of this device."""
    by_plan = {(point["system"], point["share"]): point for point in simulated}
    outputs = {plan.way: plan.place.mean_output() for plan in plans}
    beside = [
        {**point, **{f"{name}_off": by_plan[point["system"], point["share"]][name] / point[name] - 1 for name in OFF}}
        for point in measured
    ]
    return [{**point, "served": point["tokens_per_s"] / outputs[point["system"]]} for point in (*beside, *simulated)]
