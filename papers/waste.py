"""Simulate the use of an A100's memory, and the share of the KV memory that holds tokens (PagedAttention Figures 1 and
2).

OPT-13B in 40 GB, 12 GiB of them for KV. Figure 2: ShareGPT-like requests at 2 a second. Figure 1: all requests come at
once, to systems with a limited batch.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from papers.result import DIFFERS, HOLDS, Reproduction, Result, measured, near
from papers.serving import HOUR, SECONDS, SYSTEMS, Load, in_parallel
from quire.bench.document import table
from quire.memory.answers import Usage
from quire.sim.cost_model import load_calibration as calibration
from quire.sim.simulation import mean_usage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOAD, RATE = Load("a100-13b", "sharegpt"), 2.0
COMPARED = ("orca-max", "orca-pow2", "orca-oracle", "paged")
WARM = 0.1  # of the trace, excluded: memory fills
KINDS = {
    "used": "token states", "reserved": "reserved", "internal": "internal fragmentation", "external": "external",
}  # fmt: skip
LEAST, MOST, PAGED = 20.4, 38.2, 96.3  # the paper's per cent of token states: existing systems, and vLLM
TOLERANCE = 0.1  # of each of these
PAPER_MEAN = 499  # tokens of a request of ShareGPT, prompt and output: Figure 11

WEIGHTS, CACHE = 65, 30  # Figure 1: per cent of the memory
NEAR = 0.05
BATCHES = {"orca-max": (1, 2, 4, 6, 8), "paged": (1, 2, 4, 8, 12, 16, 24, 32, 40, 48)}
BURST, MIDDLE = 12, (0.2, 0.8)  # requests for each running one; averages are taken while these shares of them finish

Shares = dict[str, dict[str, float]]
"""System -> kind -> per cent of the memory that isn't free."""


def figure_2(full: bool = False) -> Reproduction:
    """Average over time while requests come. Free memory is not counted."""
    seconds = HOUR if full else SECONDS
    done = in_parallel(shares, [(LOAD, system, RATE, seconds) for system in COMPARED])
    found = dict(zip(COMPARED, done))
    used = {system: found[system]["used"] for system in COMPARED}
    existing = [used[system] for system in COMPARED[:-1]]
    results = [
        near(
            "P-F2", f"least of the Orcas: token states (within {TOLERANCE:.0%})", LEAST, min(existing), "%", TOLERANCE
        ),
        near("P-F2", f"most of the Orcas: token states (within {TOLERANCE:.0%})", MOST, max(existing), "%", TOLERANCE),
        near("P-F2", f"vLLM: token states (within {TOLERANCE:.0%})", PAGED, used["paged"], "%", TOLERANCE),
        _claim("token states: Orca (Max) < Orca (Pow2) < Orca (Oracle) < vLLM", list(used.values())),
    ]
    rows = [(SYSTEMS[system], *(f"{found[system][kind]:.1f}" for kind in KINDS)) for system in COMPARED]
    about = f"OPT-13B, {RATE:g} requests/s, simulated, {seconds:g} s of requests; % of the memory that isn't free"
    mean = np.mean([one.prompt_len + one.output_len for one in LOAD.sketches(round(RATE * seconds))])
    text = (
        f"{about}\n{table(('system', *KINDS.values()), rows)}\n"
        f"The shorter requests are, the less of 2,048 tokens they fill: ours have {mean:.0f} tokens on average,\n"
        f"cut to be served (see fig11), and the paper's data set {PAPER_MEAN}."
    )
    return Reproduction([_simulated(result) for result in results], text, partial(_draw_waste, found), found)


def shares(load: Load, system: str, rate: float, seconds: float) -> dict[str, float]:
    """Return per cent of the used memory by kind."""
    trace = load.trace(rate, seconds)
    outcome = load.serve(system, trace, until=trace[-1].arrival)
    usage = mean_usage([moment for moment in outcome.timeline if moment.time >= WARM * trace[-1].arrival])
    taken = usage.total - usage.free - usage.cached
    return {kind: round(100 * getattr(usage, kind) / taken, 1) for kind in KINDS}


def _claim(what: str, values: list[float]) -> Result:
    rising = values == sorted(values) and len(set(values)) == len(values)
    return Result("P-F2", what, True, rising, "", HOLDS if rising else DIFFERS)


def _simulated(result: Result) -> Result:
    return result._replace(real_or_simulated="simulated")


def _draw_waste(found: Shares) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(8, 4.5)
    axes = fig.add_subplot()
    names = [SYSTEMS[system] for system in found]
    bottom = np.zeros(len(found))
    for (kind, label), colour in zip(KINDS.items(), COLOURS):
        values = np.array([found[system][kind] for system in found])
        bars = axes.bar(names, values, 0.6, bottom, color=colour, label=label)
        texts = [f"{value:.1f}" if value >= 3 else "" for value in values]
        axes.bar_label(bars, texts, label_type="center", color="white")
        bottom += values
    axes.axhline(LEAST, color="black", linewidth=0.8, linestyle=":", label="the paper's least and most of Orca")
    axes.axhline(MOST, color="black", linewidth=0.8, linestyle=":")
    axes.set_ylabel("% of the KV memory that isn't free")
    axes.set_title("Figure 2: what the KV memory holds (OPT-13B, ShareGPT, 2 requests/s, simulated)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncol=3, frameon=False)
    return fig


class Batch(NamedTuple):
    """Mean running requests, their allocated KV memory in GB, and tokens generated a second."""

    running: float
    memory: float
    throughput: float


def figure_1() -> Reproduction:
    """Compute, left, the per cent of 40 * 10^9 bytes for weights, KV memory and the rest; right, memory and throughput
    by batch."""
    plant = LOAD.plant("paged")
    whole, weights = calibration(LOAD.calibration).memory_bytes, plant.cost.shape.weight_bytes
    kv = plant.kv_tokens * plant.spec.token_bytes(plant.cost.shape.itemsize)
    split = {"parameters": 100 * weights / whole, "KV memory": 100 * kv / whole}
    split["others"] = 100 - sum(split.values())
    jobs = [(LOAD, system, most) for system, sizes in BATCHES.items() for most in sizes]
    done = iter(in_parallel(batch, jobs))
    found = {system: [next(done) for _ in sizes] for system, sizes in BATCHES.items()}
    best = {system: max(points, key=lambda point: point.throughput) for system, points in found.items()}
    slope = {system: points[0].memory / points[0].running for system, points in found.items()}
    more = best["paged"].throughput / best["orca-max"].throughput
    sized = f"KV memory: the paper's 12 GiB of its 40 GB (within {2 * NEAR:.0%})"
    results = [
        near("P-F1", f"parameters (within {NEAR:.0%})", WEIGHTS, round(split["parameters"], 1), "%", NEAR),
        near("P-F1", sized, CACHE, round(split["KV memory"], 1), "%", 2 * NEAR),
        _ratio("memory of a request: vLLM / Orca (Max)", slope["paged"] / slope["orca-max"]),
        _ratio("throughput: vLLM / Orca (Max), each at its best", more),
    ]  # fmt: skip
    rows = [(SYSTEMS[s], *(f"{value:.1f}" for value in point)) for s, points in found.items() for point in points]
    text = table(("system", "running", "KV memory GB", "tokens/s"), rows)
    about = ", ".join(f"{name} {value:.1f} %" for name, value in split.items())
    data = {"memory": split, **{system: [point._asdict() for point in points] for system, points in found.items()}}
    told = f"40 GB: {about}: arithmetic on the paper's sizes (Table 1), not a finding\nsimulated\n{text}"
    return Reproduction(results, told, partial(_draw_growth, split, found), data)


def _ratio(what: str, ours: float) -> Result:
    """Return a measured ratio: the paper draws the difference, but gives no number."""
    return measured("P-F1", what, round(ours, 2), "ratio", "simulated")


def batch(load: Load, system: str, most: int) -> Batch:
    """Simulate a system that runs at most `most` requests at a time, with a full queue."""
    plant = load.plant(system)
    trace = load.arriving([0.0] * max(BURST * most, 60))
    outcome = plant.with_max_num_seqs(most).simulate(trace)
    ends = sorted(one.token_times[-1][0] for one in outcome.requests)
    first, last = (ends[int(share * len(ends))] for share in MIDDLE)
    moments = [moment for moment in outcome.timeline if first <= moment.time <= last]
    usage: Usage = mean_usage(moments)
    made = sum(count for one in outcome.requests for time, count in one.token_times if first <= time <= last)
    running = float(np.mean([moment.running for moment in moments]))
    return Batch(running, (usage.total - usage.free) / 1e9, made / (last - first))


def _draw_growth(split: dict[str, float], found: dict[str, list[Batch]]) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(11, 4)
    left, middle, right = fig.subplots(1, 3, width_ratios=(1.2, 2, 2))
    bottom = 0.0
    for (name, value), colour in zip(split.items(), (COLOURS[4], COLOURS[1], COLOURS[2])):
        left.bar(["A100, 40 GB"], [value], 0.6, bottom, color=colour)
        left.text(0, bottom + value / 2, f"{name} {value:.0f} %", ha="center", va="center", color="white", fontsize=9)
        bottom += value
    left.set_ylabel("% of the memory")
    for axes, key, label in ((middle, "memory", "KV memory taken, GB"), (right, "throughput", "tokens/s")):
        for (system, points), colour in zip(found.items(), COLOURS):
            values: list[Any] = [getattr(point, key) for point in points]
            axes.plot([point.running for point in points], values, "o-", color=colour, label=SYSTEMS[system])
        axes.set_xlabel("requests that run at once")
        axes.set_ylabel(label)
        axes.set_ylim(0)
        axes.legend()
    fig.suptitle("Figure 1: memory of OPT-13B, its growth and throughput by batch (ShareGPT, simulated)")
    return fig
