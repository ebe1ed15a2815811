"""Compare systems by simulation under one load: rates that they sustain, use of memory, runs at a rate (PagedAttention
§6.1).

The requests of a load are one endless sequence, and arrival times are scaled to the rate. Systems differ only in their
memory; rates differ in the number of requests and their speed. Simulations run on all cores. Curves use one seed;
sustained rates use several.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np

from bench.beam_histories import BeamReplay, load_histories
from quire.bench.arrivals import poisson
from quire.bench.simulate import SimulatedDeployment, read_deployment
from quire.bench.workloads import EDGE, Endless, RequestSpec
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.memory.answers import Usage
from quire.protocol.sampling_params import SamplingParams
from quire.sim.cost_model import load_calibration
from quire.sim.simulation import Objective, SimulationResult, TraceRequest, highest_rate, mean_usage

SYSTEMS = {
    "paged": "vLLM (paged)", "orca-oracle": "Orca (Oracle)", "orca-pow2": "Orca (Pow2)", "orca-max": "Orca (Max)",
    "ft": "FasterTransformer",
}  # fmt: skip
DEVICES = ("tp", "pp", "kv_tokens")  # settings that say on what a model runs
SECONDS, SEARCHED = 600.0, 300.0  # of a trace, and of the traces of searches; with --full the paper's HOUR
HOUR = 3600.0
SEEDS = (0, 1, 2)  # of requests and of arrival times, for rates
SEED = SEEDS[0]  # of curves
APART = 1000  # blocks of requests between two seeds, more than any trace has
MANY = 4096  # requests whose lengths are averaged
LIMIT = 0.2  # seconds a token: limit on the mean normalised latency at a sustained rate, for every system
SHOWN = 5 * LIMIT  # limit of the curves; the paper's axes end there
TOLERANCE = 0.02  # of a sustained rate, which is interpolated
NEAR, STEP, GROWTH = 0.12, 1.1, 2.0  # of the search for the runs on both sides of it, see highest_rate
CLOSE, JUMP, MOST_RUNS = 0.05, 1.3, 6  # of the search for another seed's, which follows the first seed's curve
BELOW = (0.3, 0.6, 0.85)  # of the sustained rate: further points of a curve
CROWD = 4  # a burst has this many times the requests that fill the memory
WARM = 0.1  # of a trace, left out of averages over time: memory fills
BURST, MIDDLE = 12, (0.2, 0.8)  # requests for each running one; averages are taken while these shares of them finish
KINDS = ("used", "reserved", "internal", "external")  # of memory that is neither free nor cached
SHARED, OWN = EDGE + 1, EDGE + 2  # token ids of prefixes and of everything else; their values have no effect


class Load(NamedTuple):
    """A load on a device.

    The model and the KV memory are the calibration's unless `model` and `kv_gib` are given. All prompts share their
    first `prefix` tokens, which are registered in the paged memory. Lengths are the workload's times `stretch`, except
    those of a prefix that it names. Each request has `width` samples, or if `beams` as many beams, which fork as in
    real searches of the bundled model. `settings` are other settings of the engine. `copy_seconds` is the time that
    swapping takes for each layer's keys or values of a page beside their bytes' time. `seed` determines the requests
    and their times."""

    calibration: str
    workload: str
    model: str | None = None
    kv_gib: float | None = None
    prefix: int = 0
    stretch: float = 1.0
    width: int = 1
    beams: bool = False
    settings: Mapping[str, Any] | None = None
    copy_seconds: float = 0.0
    seed: int = SEED

    def plant(self, system: str) -> SimulatedDeployment:
        """Return the load's model with a system's memory. Only registered prefixes are cached, as in the paper."""
        config = EngineConfig.of(
            memory=system, model_config=self.model, kv_gib=self.kv_gib, enable_prefix_caching=False, seed=SEED,
            prefix_tokens=self.prefix if system == "paged" else 0, **(self.settings or {}),
        )  # fmt: skip
        plant = read_deployment(config, self.calibration)
        if not self.copy_seconds:
            return plant
        page_bytes = config.page_size * plant.spec.token_bytes(plant.cost.shape.itemsize)
        more = 2 * len(plant.spec.layers) * self.copy_seconds / page_bytes
        costs = plant.cost.coefficients
        costs = costs._replace(swapped_byte=costs.swapped_byte + more)
        return plant._replace(cost=plant.cost._replace(coefficients=costs))

    def specs(self, count: int) -> list[RequestSpec]:
        """Return the first `count` requests."""
        drawn = Endless(self.workload, count).specs(APART * self.seed)
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
        """Return the first requests, at these times. If they have beams, a request's seed chooses how these fork."""
        seeds = np.random.default_rng(SEED).integers(0, 2**31, len(times)).tolist()
        n, beam_width = (1, self.width) if self.beams else (self.width, None)
        found = []
        for time, request, seed in zip(times, self.specs(len(times)), seeds):
            prompt = [SHARED] * self.prefix + [OWN] * (request.prompt_len - self.prefix)
            params = SamplingParams(
                temperature=0.0, n=n, beam_width=beam_width, max_tokens=request.output_len, ignore_eos=True,
                detokenize=False, seed=seed if self.width > 1 else None,
            )  # fmt: skip
            found.append(TraceRequest(time, prompt, params))
        return found

    def trace(self, rate: float, seconds: float) -> list[TraceRequest]:
        """Return Poisson arrivals of `rate` requests a second for about `seconds`."""
        times = np.array(poisson(max(1, math.ceil(rate * seconds)), 1.0, self.seed)) / rate
        return self.arriving(times.tolist())

    def serve(self, system: str, trace: Sequence[TraceRequest], until: float = math.inf) -> SimulationResult:
        """Serve a trace, for `until` seconds at most."""
        plant = self.plant(system)
        draw = BeamReplay(load_histories(self.workload), frozenset(plant.spec.eos_ids)) if self.beams else None
        simulation = plant.simulation(draw)
        if simulation.config.prefix_tokens:
            simulation.register_prefix("prefix", [SHARED] * self.prefix)
        return simulation.run(trace, until=until)

    def capacity(self, system: str) -> float:
        """Return the requests a second of a system when all come at once, with the default `settings`: searches over
        settings begin at one rate."""
        mean = np.mean([one.prompt_len - self.prefix + one.output_len for one in self.specs(MANY)])
        plain = self._replace(settings={k: v for k, v in (self.settings or {}).items() if k in DEVICES})
        count = CROWD * math.ceil(plain.plant(system).kv_tokens / float(mean) / self.width)
        return middle_rate(plain.serve(system, plain.arriving([0.0] * count)))

    def saved(self, system: str, rate: float, seconds: float) -> float:
        """Return the mean per cent of pages that sharing saves while requests come."""
        trace = self.trace(rate, seconds)
        return 100 * self.serve(system, trace, until=trace[-1].arrival).totals.sharing_saved


def middle_rate(outcome: SimulationResult) -> float:
    """Return the requests a second while the middle requests end: memory fills at the beginning and empties at the
    end."""
    ends = sorted(one.token_times[-1][0] for one in outcome.requests)
    first, last = len(ends) // 5, len(ends) - len(ends) // 5 - 1
    return (last - first) / (ends[last] - ends[first])


class Case(NamedTuple):
    """A system that serves a load: for `seconds`, at `rate` requests a second where a run needs one. `fields` are part
    of its points."""

    fields: Mapping[str, Any]
    load: Load
    system: str = "paged"
    seconds: float = SECONDS
    rate: float = 0.0


Points = list[dict[str, Any]]

# Sustained rates


class Run(NamedTuple):
    """A run at a rate: its mean normalised latency in seconds a token, running requests (mean over steps), seconds a
    step, and preempted requests."""

    rate: float
    latency: float
    running: float
    step: float
    preemptions: int


def curves(cases: Sequence[Case], seeds: Sequence[int] = SEEDS, below: Sequence[float] = BELOW) -> Points:
    """Return latencies by rate of each case, and a point of its sustained rates.

    `sustained` are the highest rates that keep LIMIT, one for each seed. The rest is the first seed's: the rate that
    keeps half the LIMIT (`half`, None if no run is near it), the run nearest to the sustained rate, and for several
    sequences in paged memory the per cent of pages that sharing `saved` below it."""
    first = in_parallel(partial(curve, below=below), [(one.load, one.system, one.seconds) for one in cases])
    further = [
        (one.load._replace(seed=seed), one.system, one.seconds, *found)
        for one, found in zip(cases, first)
        for seed in seeds[1:]
    ]
    others = iter(in_parallel(further_rate, further))
    sharing = [
        (one.load, one.system, max(BELOW) * highest, one.seconds)
        for one, (highest, _) in zip(cases, first)
        if _shares(one)
    ]
    saved = iter(in_parallel(Load.saved, sharing))
    points = []
    for one, (highest, runs) in zip(cases, first):
        knee = min(runs, key=lambda run: abs(run.rate - highest))
        half = rate_at(runs, LIMIT / 2)
        points.append({
            **one.fields, "sustained": [highest, *(next(others) for _ in seeds[1:])],
            "half": None if math.isnan(half) else half, "running": knee.running, "step": knee.step,
            "preemptions": knee.preemptions, **({"saved": next(saved)} if _shares(one) else {}),
        })  # fmt: skip
        points += [{**one.fields, **run._asdict()} for run in runs]
    return points


def _shares(case: Case) -> bool:
    return case.load.width > 1 and case.system == "paged"


def rate_at(runs: Sequence[Run], limit: float) -> float:
    """Return the highest rate at a limit of latency, interpolated between runs; NaN outside them."""
    over = next((i for i, run in enumerate(runs) if run.latency > limit), 0)
    if not over:
        return math.nan
    low, high = runs[over - 1 : over + 1]
    return low.rate + math.log(limit / low.latency) / math.log(high.latency / low.latency) * (high.rate - low.rate)


def measure(load: Load, system: str, rate: float, seconds: float) -> Run:
    """Simulate one run to its end, since both latencies around a limit count."""
    outcome = load.serve(system, load.trace(rate, seconds))
    run = outcome.totals
    latency = Objective("mean", "normalised", math.inf).value(outcome.requests)
    return Run(rate, latency, run.mean_running, run.seconds / run.steps, run.preemptions)


def search(load: Load, system: str, seconds: float, start: float) -> tuple[float, list[Run]]:
    """Return the highest rate that a system sustains, searched from `start`, and the runs by rate. It is interpolated
    between the runs on both sides, which are near each other."""
    runs: dict[float, Run] = {}

    def sustains(rate: float) -> bool:
        runs[rate] = measure(load, system, rate, seconds)
        return runs[rate].latency <= LIMIT

    _check(highest_rate(sustains, start, NEAR, STEP, GROWTH), system, seconds)
    by_rate = [runs[rate] for rate in sorted(runs)]
    return rate_at(by_rate, LIMIT), by_rate


def further_rate(load: Load, system: str, seconds: float, first: float, runs: Sequence[Run]) -> float:
    """Return the highest rate that a system sustains with another seed than that of `runs`, which sustained `first`.

    The seeds' curves differ in a factor of the rate, about: it is read from a run at the rate that is expected, until
    that is close."""
    logs = np.maximum.accumulate([math.log(run.latency) for run in runs])
    rate = first
    for _ in range(MOST_RUNS):
        latency = measure(load, system, rate, seconds).latency
        as_first = float(np.interp(math.log(latency), logs, [run.rate for run in runs]))
        factor = min(max(first / as_first, 1 / JUMP), JUMP)
        rate *= factor
        if abs(factor - 1) < CLOSE:
            break
    return rate


def curve(load: Load, system: str, seconds: float, below: Sequence[float] = BELOW) -> tuple[float, list[Run]]:
    """Return the highest rate that a system sustains, searched from its capacity, and the runs around and below it."""
    found, runs = search(load, system, seconds, load.capacity(system))
    runs += [measure(load, system, share * found, seconds) for share in (*below, 1.0)]
    runs.sort(key=lambda run: run.rate)
    return rate_at(runs, LIMIT), runs


def _check(found: float, system: str, seconds: float) -> None:
    """Raise StartupError if a search found no rate, or no upper bound."""
    if found == 0:
        raise StartupError(
            f"{SYSTEMS[system]} keeps the limit of latency at no rate, however low", "Allow more latency, or serve less"
        )
    if found == math.inf:
        raise StartupError(f"{SYSTEMS[system]} sustains any rate for {seconds:g} s", "Use longer traces")


# Runs at a rate, and all at once


def steady(cases: Sequence[Case]) -> Points:
    """Return the mean number of running requests of each case, the use of its memory and its preemptions, from the
    first tenth of the trace to its last arrival."""
    return _each(_steady, cases)


def _steady(case: Case) -> dict[str, Any]:
    trace = case.load.trace(case.rate, case.seconds)
    last = trace[-1].arrival
    outcome = case.load.serve(case.system, trace, until=last)
    moments = [moment for moment in outcome.timeline if WARM * last <= moment.time <= last]
    running = float(np.mean([moment.running for moment in moments]))
    return {"running": running, **shares(mean_usage(moments)), "preemptions": outcome.totals.preemptions}


def whole(cases: Sequence[Case]) -> Points:
    """Return what it takes each case to serve all of its trace: mean normalised latency (s a token), running requests
    (mean over steps), requests a second, use of memory (mean over time), preemptions and bytes swapped."""
    return _each(_whole, cases)


def _whole(case: Case) -> dict[str, Any]:
    trace = case.load.trace(case.rate, case.seconds)
    outcome = case.load.serve(case.system, trace)
    run = outcome.totals
    return {
        "latency": Objective("mean", "normalised", 1.0).value(outcome.requests), "running": run.mean_running,
        "requests_per_s": len(trace) / run.seconds, **shares(mean_usage(outcome.timeline)),
        "preemptions": run.preemptions, "swapped": run.swapped_bytes,
    }  # fmt: skip


def shares(usage: Usage) -> dict[str, float]:
    """Return the per cent of each of KINDS, of the memory that is neither free nor cached."""
    taken = sum(getattr(usage, kind) for kind in KINDS)
    return {kind: 100 * getattr(usage, kind) / taken if taken else 0.0 for kind in KINDS}


def bursts(cases: Sequence[Case]) -> Points:
    """Return the requests a second of each case when all come at once."""
    return _each(_burst, cases)


def _burst(case: Case) -> dict[str, Any]:
    return {"capacity": case.load.capacity(case.system)}


def growth(cases: Sequence[Case]) -> Points:
    """Return the mean running requests of each case, their KV memory in GB and the tokens generated a second, with a
    full queue and the `max_num_seqs` of the load's settings."""
    return _each(_growth, cases)


def _growth(case: Case) -> dict[str, Any]:
    plant = case.load.plant(case.system)
    outcome = case.load.serve(
        case.system, case.load.arriving([0.0] * max(BURST * (plant.config.max_num_seqs or 0), 60))
    )
    ends = sorted(one.token_times[-1][0] for one in outcome.requests)
    first, last = (ends[int(share * len(ends))] for share in MIDDLE)
    moments = [moment for moment in outcome.timeline if first <= moment.time <= last]
    usage = mean_usage(moments)
    made = sum(count for one in outcome.requests for time, count in one.token_times if first <= time <= last)
    running = float(np.mean([moment.running for moment in moments]))
    return {"running": running, "memory": (usage.total - usage.free) / 1e9, "throughput": made / (last - first)}


def memory_parts(load: Load) -> Points:
    """Return the per cent of the device's memory that weights, KV memory and others take."""
    plant = load.plant("paged")
    size = load_calibration(load.calibration).memory_bytes
    kv = plant.kv_tokens * plant.spec.token_bytes(plant.cost.shape.itemsize)
    parts = {"parameters": 100 * plant.cost.shape.weight_bytes / size, "KV memory": 100 * kv / size}
    parts["others"] = 100 - sum(parts.values())
    return [{"part": part, "percent": percent} for part, percent in parts.items()]


def _each(function: Callable[[Case], dict[str, Any]], cases: Sequence[Case]) -> Points:
    done = in_parallel(function, [(case,) for case in cases])
    return [{**case.fields, **point} for case, point in zip(cases, done)]


def in_parallel(function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], most: int = 8) -> list[Any]:
    """Call `function` with each job's arguments, in one process per core, at most `most`. Return results in job order.

    The function must be importable by name. Put the longest jobs first."""
    workers = min(len(jobs), len(os.sched_getaffinity(0)), most)
    if workers < 2:
        return [function(*job) for job in jobs]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return list(pool.map(function, *zip(*jobs)))
