"""Run PagedAttention Figures 13a and 12a on a GPU, beside the simulation of the same traces.

Five systems serve OPT-13B's shape with dummy weights and the 12 GiB of KV of Table 1. Token values do not affect the
cost of steps. A GPU faster than the paper's A100 would not fill its memory at the paper's rates, so rates are scaled to
equal saturation: the same share of the paged system's simulated capacity on either device. Batches and ratios between
systems can be compared with the paper. The calibration comes from a separate run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from papers.result import DIFFERS, HOLDS, Reproduction, Result, at_most, measured, near
from papers.serving import SYSTEMS
from papers.side_by_side import Place, Plan, Run, Span, engine_of, run, sleep_until, warm_up
from quire.bench.document import table
from quire.bench.shapes import built
from quire.config import EngineConfig
from quire.ipc.garbage_collection import freeze_loaded_objects
from quire.startup.build import BuiltEngine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_DEVICE, PAPER_RATE = "a100-13b", 2.0  # of Figure 13a
BATCHES = {"paged": 30.42, "orca-oracle": 13.62, "orca-pow2": 9.81, "orca-max": 7.00}  # Figure 13a
RANGES = {"orca-oracle": (1.7, 2.7), "orca-max": (2.7, 8.0)}  # §6.2: paged sustains this many times their rate
MOST_FT = 22.0  # most of paged / FasterTransformer: judged as `near`, as in the simulated Figure 12
TOLERANCE = 0.2  # of the paper's batches, and their ratios, and of MOST_FT
MOST_OFF = 0.15  # the simulation's error, as a share
WITHIN, BEYOND = 0.8, 1.3  # of a system's capacity: the rates of Figure 12 that are run
SHOWN = (0.5, WITHIN, 1.0, 1.15, BEYOND)  # the rates that are simulated


class Setting(NamedTuple):
    """A load, a device, and durations.

    A run of Figure 13 takes `seconds`. One of Figure 12 takes until `requests` have come, the same ones for all
    systems, within `least` and `most`, and `drain` more if the rate is within the system's capacity. The first `ramp`
    seconds are not measured."""

    place: Place
    ramp: float = 8.0
    seconds: float = 60.0
    requests: int = 120
    least: float = 30.0
    most: float = 60.0
    drain: float = 6.0

    def longer(self) -> Setting:
        """Return the setting of --full."""
        return self._replace(seconds=180.0, requests=600, least=60.0, most=240.0)

    def rate(self) -> float:
        """Return the scaled rate of Figure 13."""
        share = PAPER_RATE / self.place._replace(calibration=PAPER_DEVICE).capacity("paged")
        return share * self.place.capacity("paged")

    def plans(self, system: str, shares: Sequence[float]) -> list[Plan]:
        """Return the plans of Figure 12, at shares of the system's capacity."""
        capacity = self.place.capacity(system)
        found = []
        for share in shares:
            rate = share * capacity
            end = min(max(self.requests / rate, self.least), self.most)
            found.append(Plan(system, rate, Span(self.ramp, end, end + self.drain * (share < 1))))
        return found


GPU = Setting(Place(
    EngineConfig(
        model_config="opt-13b", dummy_weights=True, dtype="float16", device="cuda", kv_gib=12.0, max_num_seqs=128,
        enable_prefix_caching=False, preemption="recompute", swap_gib=0.0, skip_tokenizer_init=True,
    ),
    "h200-opt-13b", "sharegpt",
))  # fmt: skip


def figure_13_gpu(full: bool = False) -> Reproduction:
    """Measure the batches of all systems at one rate. StartupError without a GPU."""
    _need_gpu("fig13-gpu")
    return batches(GPU.longer() if full else GPU)


def figure_12a_gpu(full: bool = False) -> Reproduction:
    """Measure latency within each system's capacity and throughput above it. StartupError without a GPU."""
    _need_gpu("fig12a-gpu")
    return rates(GPU.longer() if full else GPU)


def _need_gpu(name: str) -> None:
    from quire.bench.replay import need_gpu

    need_gpu(f"quire reproduce {name}")


def _served(made: BuiltEngine, place: Place, plans: Sequence[Plan]) -> list[Run]:
    """Run the plans one after another."""
    warm_up(made, place)
    freeze_loaded_objects()
    done = []
    for plan in plans:
        engine = engine_of(made, place.config, plan.system)
        done.append(run(engine, sleep_until, place.trace(plan.rate, plan.span.end), plan, "real"))
    return done


# Figure 13a


def batches(setting: Setting) -> Reproduction:
    """Measure Figure 13a on the setting's device."""
    rate = setting.rate()
    span = Span(setting.ramp, setting.seconds, setting.seconds)
    plans = [Plan(system, rate, span) for system in SYSTEMS]
    with built(setting.place.config) as made:
        real = _served(made, setting.place, plans)
        tokens = made.memory_plan.kv_tokens
    beside = [setting.place.simulate(plan, tokens) for plan in plans]
    padded = setting.place.simulate(plans[-1], tokens, padded=True)
    results = [measured("P-F13", "requests a second, scaled from 2", round(rate, 2), "/s", "simulated")]
    for one, other in zip(real, beside):
        label, paper = SYSTEMS[one.system], BATCHES.get(one.system)
        what = f"{label}: mean batch"
        ours = round(one.batch, 2)
        results.append(measured("P-F13", what, ours, "rows") if paper is None
                       else near("P-F13", what, paper, ours, "rows", TOLERANCE))  # fmt: skip
        results.append(measured("P-F13", what, round(other.batch, 2), "rows", "simulated"))
        if paper is not None and one.system != "paged":
            ratio = round(real[0].batch / one.batch, 2)
            times = round(BATCHES["paged"] / paper, 2)
            results.append(near("P-F13", f"batch of vLLM (paged) / {label}", times, ratio, "times", TOLERANCE))
        results += _errors("P-F13", label, one, other, rate < setting.place.capacity(one.system))
        results.append(measured("P-F13", f"{label}: KV memory with token states",
                                round(100 * one.shares["used"], 1), "%"))  # fmt: skip
    return Reproduction(
        results, _text([*real, *beside, padded]), partial(_draw_batches, real, beside),
        [one._asdict() for one in (*real, *beside, padded)],
    )  # fmt: skip


def _errors(row: str, label: str, one: Run, other: Run, within: bool) -> list[Result]:
    """Return the errors of the simulation.

    Above capacity the error is of throughput. `within` capacity throughput equals the offered rate whatever a step
    costs, so there it is of latency."""

    def off(name: str) -> float:
        return round(float(getattr(other, name) / getattr(one, name)) - 1, 3)

    def told(what: str, name: str, judged: bool) -> Result:
        what = f"{label} at {one.rate:.2f}/s: simulated {what}, off by"
        if judged:
            return at_most(row, what, MOST_OFF, abs(off(name)), "share")
        return measured(row, what, off(name), "share")

    return [
        told("throughput", "tokens_per_s", not within),
        told("mean batch", "batch", False),
        told("normalised latency", "latency", within),
    ]


# Figure 12a


def rates(setting: Setting) -> Reproduction:
    """Measure Figure 12a on the setting's device: each system within its capacity and above it; rates between are
    simulated."""
    plans = {system: setting.plans(system, SHOWN) for system in SYSTEMS}
    chosen = [SHOWN.index(WITHIN), SHOWN.index(BEYOND)]
    with built(setting.place.config) as made:
        real = _served(made, setting.place, [plans[system][i] for system in SYSTEMS for i in chosen])
        tokens = made.memory_plan.kv_tokens
    beside = {system: [setting.place.simulate(plan, tokens) for plan in plans[system]] for system in SYSTEMS}
    padded = setting.place.simulate(plans["ft"][-1], tokens, padded=True)
    results: list[Result] = []
    most = {one.system: one.tokens_per_s for one in real[1::2]}
    for i, system in enumerate(SYSTEMS):
        label, within, beyond = SYSTEMS[system], real[2 * i], real[2 * i + 1]
        sustained = most[system] / setting.place.mean_output()
        results.append(measured("P-F12", f"{label}: requests/s served beyond capacity", round(sustained, 2), "/s"))
        results.append(measured("P-F12", f"{label}: normalised latency at {within.rate:.2f}/s",
                                round(1000 * within.latency, 1), "ms"))  # fmt: skip
        if system != "paged":
            results += _ratios(system, most["paged"] / most[system], beside)
        results += _errors("P-F12", label, within, beside[system][chosen[0]], True)
        results += _errors("P-F12", label, beyond, beside[system][chosen[1]], False)
    everything = [*real, *(one for system in SYSTEMS for one in beside[system]), padded]
    return Reproduction(
        results, _text(everything), partial(_draw_rates, real, beside), [one._asdict() for one in everything]
    )


def _ratios(system: str, ratio: float, beside: dict[str, list[Run]]) -> list[Result]:
    """Return the paged system's highest throughput / this one's, measured and simulated."""
    what = f"rate of vLLM (paged) / {SYSTEMS[system]}"
    simulated = beside["paged"][-1].tokens_per_s / beside[system][-1].tokens_per_s
    shown = measured("P-F12", what, round(simulated, 2), "times", "simulated")
    ours = round(ratio, 2)
    if system == "ft":
        judged = near("P-F12", what, MOST_FT, ours, "times", TOLERANCE)._replace(paper=f"up to {MOST_FT:g}")
    elif system in RANGES:
        low, high = RANGES[system]
        verdict = HOLDS if low <= ratio <= high else DIFFERS
        judged = Result("P-F12", what, f"{low:g}-{high:g}", ours, "times", verdict)
    else:
        judged = measured("P-F12", what, ours, "times")
    return [judged, shown]


# Text and plots


def _text(runs: Sequence[Run]) -> str:
    head = ("system", "by", "requests/s", "mean batch", "running", "output tok/s", "normalised ms", "requests",
            "unfinished", "preempted", "used", "reserved", "internal", "external", "free")  # fmt: skip
    rows = [
        (SYSTEMS[one.system], one.by, f"{one.rate:.2f}", f"{one.batch:.2f}", f"{one.running:.2f}",
         f"{one.tokens_per_s:.0f}", f"{1000 * one.latency:.1f}", one.requests, one.unfinished, one.preemptions,
         *(f"{100 * one.shares[name]:.1f}%" for name in ("used", "reserved", "internal", "external", "free")))
        for one in runs
    ]  # fmt: skip
    note = (
        "this engine doesn't compute what FasterTransformer does for nothing (padding): nor does its simulation here, "
        'unless "padded"'
    )
    return f"{table(head, rows)}\n{note}"


def _draw_batches(real: Sequence[Run], beside: Sequence[Run]) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(9, 4)
    left, right = fig.subplots(1, 2)
    sets = {"paper (A100)": BATCHES, "real": {one.system: one.batch for one in real},
            "simulated": {one.system: one.batch for one in beside}}  # fmt: skip
    for i, (name, values) in enumerate(sets.items()):
        places = [k + 0.27 * (i - 1) for k, system in enumerate(SYSTEMS) if system in values]
        shown = [values[system] for system in SYSTEMS if system in values]
        bars = left.bar(places, shown, 0.25, color=COLOURS[i], label=name)
        left.bar_label(bars, fmt="%.1f", fontsize=6)
    left.set_ylabel("mean batch, rows a step")
    left.legend()
    bottom = [0.0] * len(real)
    for name, colour in zip(("used", "reserved", "internal", "external"), COLOURS):
        heights = [100 * one.shares[name] for one in real]
        right.bar(range(len(real)), heights, bottom=bottom, color=colour, label=name)
        bottom = [low + height for low, height in zip(bottom, heights)]
    right.set_ylabel("KV memory, % (real)")
    right.set_ylim(0, 119)
    right.legend(ncols=4, fontsize=8, loc="upper center")
    for axes in (left, right):
        axes.set_xticks(range(len(SYSTEMS)), [label.replace(" ", "\n") for label in SYSTEMS.values()], fontsize=8)
    fig.suptitle(f"Figure 13a: requests in a batch at {real[0].rate:.2f} requests/s")
    return fig


def _draw_rates(real: Sequence[Run], beside: dict[str, list[Run]]) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(11, 4)
    left, right = fig.subplots(1, 2)
    for (system, runs), colour in zip(beside.items(), COLOURS):
        mine = [one for one in real if one.system == system]
        left.plot([one.rate for one in runs], [1000 * one.latency for one in runs], "-", color=colour, linewidth=1)
        left.plot([one.rate for one in mine], [1000 * one.latency for one in mine], "o", color=colour)
        right.plot([one.rate for one in runs], [one.tokens_per_s for one in runs], "-", color=colour, linewidth=1)
        right.plot([one.rate for one in mine], [one.tokens_per_s for one in mine], "o", color=colour,
                   label=SYSTEMS[system])  # fmt: skip
    left.set_ylim(0)
    left.set_ylabel("normalised latency, ms a token")
    right.set_ylabel("output tokens/s")
    for axes in (left, right):
        axes.set_xlabel("requests/s")
        axes.set_xlim(0)
    right.set_ylim(0)
    right.legend(fontsize=8)
    fig.suptitle("Figure 12a: OPT-13B, ShareGPT; dots are real, lines simulated")
    return fig
