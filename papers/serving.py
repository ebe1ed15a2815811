"""Compare systems by simulation under one load, and find the request rates they sustain (PagedAttention §6.1).

The requests of a load are one endless sequence, and arrival times are scaled to the rate. Systems differ only in their
memory; rates differ in the number of requests and their speed. Simulations run on all cores. Curves use one seed;
sustained rates and their ratios use several.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire.bench.endless import Endless
from quire.bench.simulate import SimulatedDeployment, read_deployment
from quire.bench.workloads import EDGE, Sketch, poisson
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.protocol.sampling_params import SamplingParams
from quire.sim.simulation import Objective, SimulationResult, TraceRequest, highest_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SYSTEMS = {
    "paged": "vLLM (paged)", "orca-oracle": "Orca (Oracle)", "orca-pow2": "Orca (Pow2)", "orca-max": "Orca (Max)",
    "ft": "FasterTransformer",
}  # fmt: skip
SECONDS = 600.0  # of a trace; with --full the paper's HOUR
HOUR = 3600.0
SEEDS = (0, 1, 2)  # of requests and of arrival times, for rates
SEED = SEEDS[0]  # of curves
APART = 1000  # blocks of requests between two seeds, more than any trace has
MANY = 4096  # requests whose lengths are averaged
LIMIT = 0.2  # seconds a token: limit on the mean normalised latency at a sustained rate, for every system
SHOWN = 5 * LIMIT  # limit of the curves; the paper's axes end there
TOLERANCE = 0.02  # of a sustained rate
STEP, GROWTH = 1.1, 2.0  # of the search for it, see highest_rate
NEXT = 1.12  # step of the search for another seed's rate, which begins at the first seed's
BELOW = (0.3, 0.6, 0.85)  # of the sustained rate: further points of a curve
CROWD = 4  # a burst has this many times the requests that fill the memory
SHARED, OWN = EDGE + 1, EDGE + 2  # token ids of prefixes and of everything else; their values have no effect


class Load(NamedTuple):
    """A load on a device.

    The model and the KV memory are the calibration's unless `model` and `kv_gib` are given. All prompts share their
    first `prefix` tokens, which are registered in the paged memory. Lengths are the workload's times `stretch`, except
    those of a prefix that it names. `seed` determines the requests and their times."""

    calibration: str
    workload: str
    model: str | None = None
    kv_gib: float | None = None
    prefix: int = 0
    stretch: float = 1.0
    seed: int = SEED

    def plant(self, system: str) -> SimulatedDeployment:
        """Return the load's model with a system's memory. Only registered prefixes are cached, as in the paper."""
        config = EngineConfig(
            memory=system, model_config=self.model, kv_gib=self.kv_gib, enable_prefix_caching=False, seed=SEED,
            prefix_tokens=self.prefix if system == "paged" else 0,
        )  # fmt: skip
        return read_deployment(config, self.calibration)

    def sketches(self, count: int) -> list[Sketch]:
        """Return the first `count` requests."""
        drawn = Endless(self.workload, count).sketches(APART * self.seed)
        if self.stretch == 1:
            return drawn
        return [
            one._replace(
                prompt_len=one.prefix_len + math.ceil(self.stretch * (one.prompt_len - one.prefix_len)),
                output_len=math.ceil(self.stretch * one.output_len),
            )
            for one in drawn
        ]

    def arriving(self, times: Sequence[float]) -> list[TraceRequest]:
        """Return the first requests, at these times."""
        found = []
        for time, sketch in zip(times, self.sketches(len(times))):
            prompt = [SHARED] * self.prefix + [OWN] * (sketch.prompt_len - self.prefix)
            params = SamplingParams(temperature=0.0, max_tokens=sketch.output_len, ignore_eos=True, detokenize=False)
            found.append(TraceRequest(time, prompt, params))
        return found

    def trace(self, rate: float, seconds: float) -> list[TraceRequest]:
        """Return Poisson arrivals of `rate` requests a second for about `seconds`."""
        times = np.array(poisson(max(1, math.ceil(rate * seconds)), 1.0, self.seed)) / rate
        return self.arriving(times.tolist())

    def serve(
        self, system: str, trace: Sequence[TraceRequest], limit: float = math.inf, until: float = math.inf
    ) -> SimulationResult:
        """Serve a trace until its mean normalised latency must exceed `limit`, or for `until` seconds."""
        simulation = self.plant(system).simulation()
        if simulation.config.prefix_tokens:
            simulation.register_prefix("prefix", [SHARED] * self.prefix)
        return simulation.run(trace, [Objective("mean", "normalised", limit)] if limit < math.inf else (), until)

    def capacity(self, system: str) -> float:
        """Return the requests a second of a system when all come at once.

        It is measured over the middle requests: memory fills at the beginning and empties at the end."""
        mean = np.mean([one.prompt_len - self.prefix + one.output_len for one in self.sketches(MANY)])
        count = CROWD * math.ceil(self.plant(system).kv_tokens / float(mean))
        outcome = self.serve(system, self.arriving([0.0] * count))
        ends = sorted(one.token_times[-1][0] for one in outcome.requests)
        first, last = count // 5, count - count // 5 - 1
        return (last - first) / (ends[last] - ends[first])


class Point(NamedTuple):
    """A run at a rate: its mean normalised latency in seconds a token (None: it was aborted), running requests (mean
    over steps), seconds a step, and preempted requests."""

    rate: float
    latency: float | None
    running: float
    step: float
    preemptions: int

    def keeps(self, limit: float) -> bool:
        return self.latency is not None and self.latency <= limit


class Curve(NamedTuple):
    """A system's latency by rate, ascending, and the highest rate that it sustains at LIMIT."""

    system: str
    highest: float
    points: tuple[Point, ...]

    def at(self, limit: float) -> float:
        """Return the highest rate at another limit, interpolated between the points; NaN outside them."""
        known = [point for point in self.points if point.latency is not None]
        over = next((i for i, point in enumerate(known) if not point.keeps(limit)), 0)
        if not over:
            return math.nan
        low, high = known[over - 1], known[over]
        assert low.latency is not None, "points without a latency were left out"
        assert high.latency is not None, "points without a latency were left out"
        share = math.log(limit / low.latency) / math.log(high.latency / low.latency)
        return low.rate + share * (high.rate - low.rate)

    @property
    def knee(self) -> Point:
        """Return the run at the highest rate."""
        return next(point for point in self.points if point.rate == self.highest)


def measure(load: Load, system: str, rate: float, seconds: float, limit: float = SHOWN) -> Point:
    """Simulate one run; abort it when its latency must exceed `limit`."""
    outcome = load.serve(system, load.trace(rate, seconds), limit)
    run = outcome.totals
    latency = Objective("mean", "normalised", limit).value(outcome.requests) if run.finished else None
    return Point(rate, latency, run.mean_running, run.seconds / run.steps, run.preemptions)


def curve(load: Load, system: str, seconds: float, limit: float = LIMIT) -> Curve:
    """Return a system's latency around and below the highest rate that it sustains, searched from its capacity."""
    points: dict[float, Point] = {}

    def sustains(rate: float) -> bool:
        points[rate] = measure(load, system, rate, seconds)
        return points[rate].keeps(limit)

    found = highest_rate(sustains, load.capacity(system), TOLERANCE, STEP, GROWTH)
    _check(found, system, seconds)
    for share in BELOW:
        sustains(share * found)
    return Curve(system, found, tuple(points[rate] for rate in sorted(points)))


def batches(loads: Mapping[str, tuple[Load, float]], systems: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """Return the mean number of running requests of each system on each named trace, given by its load and rate."""
    cases = [(trace, system) for trace in loads for system in systems]
    done = in_parallel(mean_running, [(loads[trace][0], system, loads[trace][1], seconds) for trace, system in cases])
    return [
        {"trace": trace, "system": system, "label": SYSTEMS[system], "running": running}
        for (trace, system), running in zip(cases, done)
    ]


def mean_running(load: Load, system: str, rate: float, seconds: float) -> float:
    """Return the number of requests in memory, averaged over time after the first tenth of the trace."""
    trace = load.trace(rate, seconds)
    last = trace[-1].arrival
    outcome = load.serve(system, trace, until=last)
    return float(np.mean([moment.running for moment in outcome.timeline if moment.time >= last / 10]))


def _check(found: float, system: str, seconds: float) -> None:
    """Raise StartupError if a search found no rate, or no upper bound."""
    if found == 0:
        raise StartupError(
            f"{SYSTEMS[system]} keeps the limit of latency at no rate, however low", "Allow more latency, or serve less"
        )
    if found == math.inf:
        raise StartupError(f"{SYSTEMS[system]} sustains any rate for {seconds:g} s", "Use longer traces")


def further_rate(load: Load, system: str, seconds: float, first: float, limit: float = LIMIT) -> float:
    """Return the highest rate of a load with another seed, searched from the `first` seed's.

    It goes in steps of NEXT up or down until one rate keeps the limit and the next doesn't, then interpolates as in
    Curve.at. No run is aborted, since both latencies count."""
    points: dict[float, Point] = {}

    def sustains(rate: float) -> bool:
        points[rate] = measure(load, system, rate, seconds, math.inf)
        return points[rate].keeps(limit)

    found = highest_rate(sustains, first, NEXT - 1 + TOLERANCE, NEXT)
    _check(found, system, seconds)
    return Curve(system, found, tuple(points[rate] for rate in sorted(points))).at(limit)


Rates = dict[str, tuple[float, ...]]
"""System -> the highest rates that it sustains, of each of SEEDS."""


class Spread(NamedTuple):
    """A number over several seeds: the mean, the lowest and the highest."""

    mean: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(float(np.mean(values)), min(values), max(values))

    def unit(self, name: str = "ratio", digits: int = 2) -> str:
        """Return the unit of a result, with the range over seeds."""
        return f"{name} ({self.lowest:.{digits}f}-{self.highest:.{digits}f})"


def ratios(rates: Rates, other: str, ours: str = "paged") -> tuple[float, ...]:
    """Return the ratio of two sustained rates, seed by seed: both systems got the same requests."""
    return tuple(mine / theirs for mine, theirs in zip(rates[ours], rates[other]))


def in_parallel(function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], most: int = 8) -> list[Any]:
    """Call `function` with each job's arguments, in one process per core, at most `most`. Return results in job order.

    The function must be importable by name. Put the longest jobs first."""
    workers = min(len(jobs), len(os.sched_getaffinity(0)), most)
    if workers < 2:
        return [function(*job) for job in jobs]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return list(pool.map(function, *zip(*jobs)))


def curves(
    loads: Sequence[Load], systems: Sequence[str], seconds: Sequence[float], limit: float = LIMIT
) -> list[dict[str, Curve]]:
    """Return the curves of each load by system; traces take the given seconds."""
    jobs = [(load, system, length) for load, length in zip(loads, seconds) for system in systems]
    done: list[Curve] = in_parallel(partial(curve, limit=limit), jobs)
    return [
        {system: done[i * len(systems) + k] for k, system in enumerate(systems)} for i in range(len(loads))
    ]  # fmt: skip


def rates(loads: Sequence[Load], seconds: Sequence[float], found: Sequence[dict[str, Curve]]) -> list[Rates]:
    """Return the rates of each load for all seeds: the first seed's from its curves, the others searched from there."""
    cases = [
        (load, system, length, curve)
        for load, length, curves in zip(loads, seconds, found)
        for system, curve in curves.items()
    ]
    done = iter(rates_of(cases))
    return [{system: next(done) for system in curves} for curves in found]


def rates_of(cases: Sequence[tuple[Load, str, float, Curve]]) -> list[tuple[float, ...]]:
    """Return the rates of all seeds for each load, system, trace duration and first seed's curve."""
    jobs = [
        (load._replace(seed=seed), system, seconds, curve.highest)
        for load, system, seconds, curve in cases
        for seed in SEEDS[1:]
    ]
    done = iter(in_parallel(further_rate, jobs))
    return [(curve.highest, *(next(done) for _ in SEEDS[1:])) for *_, curve in cases]


def draw_curves(axes: Axes, found: dict[str, Curve], title: str, labels: dict[str, str] | None = None) -> None:
    """Draw latency by rate, a line for each system, as in Figure 12."""
    from quire.bench.plots import COLOURS

    for (system, curve), colour in zip(found.items(), COLOURS):
        shown = [(point.rate, point.latency) for point in curve.points if point.latency is not None]
        axes.plot(*zip(*shown), "o-", color=colour, markersize=3, label=(labels or SYSTEMS)[system])
    axes.axhline(LIMIT, color="black", linewidth=0.6, linestyle=":")
    axes.set_ylim(0, SHOWN)
    axes.set_xlim(0)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("requests/s")
    axes.set_ylabel("normalised latency, s a token")


def why(found: dict[str, Curve], other: str) -> str:
    """Explain vLLM's advantage over another system, at the sustained rate of each."""
    ours, theirs = found["paged"].knee, found[other].knee
    return (
        f"vLLM runs {ours.running / theirs.running:.2f} times as many requests at once as {SYSTEMS[other]}, in steps "
        f"that take {ours.step / theirs.step:.2f} times as long"
    )


def as_data(found: dict[str, Curve], rates: Mapping[str, Sequence[float]] | None = None) -> dict[str, Any]:
    """Return curves as JSON, with the rates of all seeds if given."""
    return {
        system: {
            "highest": curve.highest,
            "points": [point._asdict() for point in curve.points],
            **({"by_seed": list(rates[system])} if rates else {}),
        }
        for system, curve in found.items()
    }
