"""Measure the latency of Llama 3.2 Vision by request rate, over two-level and uniform pages (Jenga Figure 14).

End-to-end latency, time to the first token and time per output token; by simulation, and on one GPU. Other devices than
the paper's serve other rates, so rates are shares of the simulated capacity with uniform pages, and with two-level
pages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from papers.result import DIFFERS, HOLDS, Reproduction, Result, at_most, measured
from papers.serving import in_parallel
from papers.side_by_side import Span, Wait, serve, sleep_until
from papers.unlike_serving import H200, SEED, Case, assumed, burst
from papers.unlike_throughput import CASES
from quire.bench.document import table
from quire.bench.workloads import poisson
from quire.sim.simulation import ServedRequest, TraceRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RULES = ("uniform", "jenga")
MEASURES = {"e2e": "end to end", "ttft": "first token", "tpot": "each token after it"}
CROWD, REQUESTS = 1200, 600  # requests for capacities (about five times what two-level pages hold), and of a run
CASE = CASES["Llama Vision"][0]._replace(workload=f"mmmu-pro@{CROWD}", caching=False)
WITHIN = (0.25, 0.5, 0.7)  # of uniform pages' capacity
BETWEEN, BEYOND = (0.5,), (0.95, 1.2)  # of the way from uniform to two-level pages' capacity; and shares of the latter
ALIKE = 0.026  # mean difference of latencies within both capacities
SOONER = {"e2e": 2.24, "ttft": 29.43}  # times, at most
MOST_OFF = 0.15  # the simulation's error, as a share
# GPU runs: one rate as a share of uniform pages' capacity and one of two-level pages', with the requests of each;
# and the time limit of a run in seconds.
REAL_WITHIN, REAL_BEYOND, MOST_SECONDS = (0.5, 60), (0.95, 180), 21.0


class Latencies(NamedTuple):
    """Mean latencies in seconds over all requests at `rate` requests a second. `share` is of uniform pages'
    capacity."""

    rule: str
    by: str
    rate: float
    share: float
    e2e: float
    ttft: float
    tpot: float
    unfinished: int


def timed(asked: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """Return Poisson arrivals; every rate uses the same sequence, scaled."""
    return [one._replace(arrival=at / rate) for one, at in zip(asked, poisson(len(asked), 1.0, SEED))]


def latencies(
    rule: str, by: str, rate: float, capacity: float, served: Sequence[ServedRequest], end: float
) -> Latencies:
    """Return the mean latencies; an unfinished request counts with its lower bound at `end`."""
    e2e, ttft, tpot = (mean(one.lower_bound(measure, end) for one in served) for measure in MEASURES)
    return Latencies(rule, by, rate, rate / capacity, e2e, ttft, tpot, sum(not one.done for one in served))


def run(case: Case, rule: str, rate: float, capacity: float, count: int) -> Latencies:
    """Run a simulation to its end."""
    made = case.plant(rule).simulation()
    outcome = made.run(timed(burst(case.sketches()[:count], case.eyes), rate))
    return latencies(rule, "simulated", rate, capacity, outcome.requests, outcome.totals.seconds)


def capacity(case: Case, rule: str) -> float:
    """Return the requests a second of a rule when all come at once.

    It is measured over the middle requests: memory fills at the beginning and empties at the end."""
    outcome = case.plant(rule).simulation().run(burst(case.sketches(), case.eyes))
    ends = sorted(one.token_times[-1][0] for one in outcome.requests)
    first, last = len(ends) // 5, len(ends) - len(ends) // 5 - 1
    return (last - first) / (ends[last] - ends[first])


def rates(less: float, more: float) -> list[float]:
    """Return rates from within both capacities to above both."""
    between = [less + share * (more - less) for share in BETWEEN]
    return [*(share * less for share in WITHIN), *between, *(share * more for share in BEYOND)]


def figure_14() -> Reproduction:
    """Simulate every rate with both rules."""
    less, more = in_parallel(capacity, [(CASE, rule) for rule in RULES])
    jobs = [(CASE, rule, rate, less, REQUESTS) for rate in reversed(rates(less, more)) for rule in RULES]
    found: list[Latencies] = sorted(in_parallel(run, jobs), key=lambda one: (one.rate, one.rule != RULES[0]))
    results = [result._replace(real_or_simulated="simulated") for result in judged(found)]
    results = [*(measured("J-F14", f"{rule}: capacity", round(most, 2), "requests/s", "simulated")
                 for rule, most in zip(RULES, (less, more))), *results]  # fmt: skip
    data: Any = [one._asdict() for one in found]
    return Reproduction(results, text(CASE, found), lambda: draw(data), data)


def judged(found: Sequence[Latencies]) -> list[Result]:
    """Judge the claims: equal latencies within uniform pages' capacity; above it shorter ones, with more time per
    token."""
    of = {(one.rate, one.rule): one for one in found}
    within = sorted({one.rate for one in found if one.share < 1})
    beyond = sorted({one.rate for one in found if one.share > 1})
    apart = mean(abs(of[rate, "jenga"].e2e / of[rate, "uniform"].e2e - 1) for rate in within)
    results = [at_most("J-F14", "end to end within capacity: LCM pages from uniform ones, mean", ALIKE, round(apart, 4),
                       "share")._replace(paper=ALIKE)]  # fmt: skip
    for measure, paper in SOONER.items():
        most = max(getattr(of[rate, "uniform"], measure) / getattr(of[rate, "jenga"], measure) for rate in beyond)
        verdict = HOLDS if most > 1 else DIFFERS
        what = f"{MEASURES[measure]} beyond it: uniform / LCM pages, at most (above 1)"
        results.append(Result("J-F14", what, f"up to {paper}", round(most, 2), "times", verdict))
    longer = mean(of[rate, "jenga"].tpot / of[rate, "uniform"].tpot for rate in beyond)
    what = "each token after the first beyond it: LCM pages / uniform, mean (above 1)"
    results.append(Result("J-F14", what, "longer", round(longer, 2), "times", HOLDS if longer > 1 else DIFFERS))
    return results


def text(case: Case, found: Sequence[Latencies]) -> str:
    head = ("requests/s", "of uniform's capacity", "pages", "by", *(f"{name} s" for name in MEASURES), "unfinished")
    rows = [
        (f"{one.rate:.2f}", f"{one.share:.2f}", one.rule, one.by, f"{one.e2e:.2f}", f"{one.ttft:.3f}",
         f"{one.tpot:.4f}", one.unfinished)
        for one in found
    ]  # fmt: skip
    return (
        f"{case.model}, {case.workload.partition('@')[0]}, Poisson arrivals; --kv-gib {case.budget:.2f}, an H100's\n"
        f"{table(head, rows)}\n"
        "Latencies are means over all requests of a run, which beyond a capacity grow with its length: how many\n"
        f"times sooner is of {REQUESTS} requests, simulated alone, and of {REAL_BEYOND[1]} for real.\n{assumed()}"
    )


def draw(data: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw a panel for each measure: seconds by rate, lines simulated and dots measured."""
    from quire.bench.plots import COLOURS, figure

    found = [Latencies(**one) for one in data]
    fig = figure(11, 3.4)
    for axes, (measure, label) in zip(fig.subplots(1, len(MEASURES)), MEASURES.items()):
        for rule, colour in zip(RULES, COLOURS):
            for by, style in (("simulated", "o-"), ("real", "s")):
                mine = [one for one in found if (one.rule, one.by) == (rule, by)]
                if mine:
                    axes.plot([one.rate for one in mine], [getattr(one, measure) for one in mine], style, color=colour,
                              markersize=3 if by == "simulated" else 7, label=f"{rule}, {by}")  # fmt: skip
        axes.set_xlabel("requests/s")
        axes.set_ylabel(f"{label}, s")
        axes.set_xlim(0)
        axes.set_yscale("log" if measure == "ttft" else "linear")
    fig.axes[0].legend(fontsize=8)
    fig.suptitle("Jenga Figure 14: latency of Llama 3.2 Vision by request rate")
    return fig


# GPU runs


def figure_14_gpu() -> Reproduction:
    """Run one rate within uniform pages' capacity and one above it. StartupError without a GPU."""
    from quire.bench.replay import need_gpu

    need_gpu("quire reproduce jenga-fig14-gpu")
    return real(CASE._replace(device=H200, kv_gib=CASE.budget))


def real(case: Case, within: tuple[float, int] = REAL_WITHIN, beyond: tuple[float, int] = REAL_BEYOND) -> Reproduction:
    """Run a case at one rate within capacity and one above it, on the device and simulated."""
    from papers.dummy_engines import release
    from papers.unlike_gpu import built, warm

    less, more = in_parallel(capacity, [(case, rule) for rule in RULES])
    every = burst(case.sketches()[: max(within[1], beyond[1])], case.eyes, pixels=True)
    rates = [(share * most, count) for (share, count), most in ((within, less), (beyond, more))]
    traces = {rate: timed(every[:count], rate) for rate, count in rates}
    span, found = Span(0.0, MOST_SECONDS, MOST_SECONDS), list[Latencies]()
    for rule in RULES:
        with built(case, rule) as made:
            warm(made, case)
            serve(made.engine, sleep_until, next(iter(traces.values())), span)  # compiles what its steps need
            for rate, asked in traces.items():
                found.append(_served(partial(serve, made.engine, sleep_until, asked, span), rule, "real", rate, less))
                print(json.dumps(found[-1]._asdict()), file=sys.stderr, flush=True)
        del made
        release()
        for rate, asked in traces.items():
            simulated = case.plant(rule).simulation()
            wait: Wait = simulated.clock.advance_to
            beside = partial(serve, simulated.engine, wait, asked, span)
            found.append(_served(beside, rule, "simulated", rate, less))
    found.sort(key=lambda one: (one.rate, one.rule != RULES[0], one.by))
    results = [*judged([one for one in found if one.by == "real"]),
               *(one._replace(real_or_simulated="simulated")
                 for one in judged([one for one in found if one.by == "simulated"])), *off(found)]  # fmt: skip
    data: Any = [one._asdict() for one in found]
    return Reproduction(results, text(case, found), lambda: draw(data), data)


def _served(go: Any, rule: str, by: str, rate: float, less: float) -> Latencies:
    served, steps, _ = go()
    return latencies(rule, by, rate, less, served, steps[-1].at)


def off(found: Sequence[Latencies]) -> list[Result]:
    """Return the error of the simulated end-to-end latency."""
    of = {(one.rate, one.rule, one.by): one for one in found}
    return [
        at_most("J-F14", f"{one.rule} at {one.rate:.2f}/s: simulated end to end, off by", MOST_OFF,
                round(abs(of[one.rate, one.rule, "simulated"].e2e / one.e2e - 1), 3), "share")
        for one in found if one.by == "real"
    ]  # fmt: skip
