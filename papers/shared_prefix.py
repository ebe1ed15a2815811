"""Simulate translation where all prompts begin with the same examples (PagedAttention Figure 16).

LLaMA-13B in the memory of OPT-13B. In vLLM's memory the prefix is registered: computed in advance, and held once (§4.4,
Figure 10). Orca holds and computes it for every request.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from papers.result import DIFFERS, HOLDS, Reproduction, Result, measured
from papers.serving import (
    HOUR,
    LIMIT,
    SECONDS,
    SEEDS,
    Curve,
    Load,
    Rates,
    Spread,
    as_data,
    curve,
    draw_curves,
    in_parallel,
    rates_of,
    ratios,
)
from quire.bench.document import table
from quire.bench.workloads import TRANSLATION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL, KV_GIB = "llama-13b", 12.0
PANELS = {"wmt1shot": ("one example", 1.67), "wmt5shot": ("five examples", 3.58)}  # the paper's vLLM / Orca (Oracle)
SHARE = 0.2  # of the usual trace: requests take seconds here, not half a minute
SLACK = 0.2  # of the paper's numbers
LONGER = 1.5  # sentence lengths are assumed; this factor tests longer ones
LABELS = {
    "paged": "vLLM (paged), prefix registered", "alone": "vLLM (paged), each with its own prefix",
    "orca-oracle": "Orca (Oracle)",
}  # fmt: skip


def figure_16(full: bool = False) -> Reproduction:
    """Compare sustained rates with prefixes of 80 and 341 tokens, and with pages that share nothing to separate the
    effects."""
    seconds = SHARE * (HOUR if full else SECONDS)
    jobs = [(_load(name, way), "orca-oracle" if way == "orca-oracle" else "paged", seconds)
            for name in PANELS for way in LABELS]  # fmt: skip
    done = iter(in_parallel(curve, jobs))
    found: dict[str, dict[str, Curve]] = {name: {way: next(done) for way in LABELS} for name in PANELS}
    rates = iter(rates_of([(*job, found[name][way]) for job, (name, way) in zip(jobs, product(PANELS, LABELS))]))
    by_seed: dict[str, Rates] = {name: {way: next(rates) for way in LABELS} for name in PANELS}
    results = []
    for name, (about, paper) in PANELS.items():
        label = f"{about}, {TRANSLATION[name]} tokens"
        shared, apart = (Spread.of(ratios(by_seed[name], "orca-oracle", way)) for way in ("paged", "alone"))
        results.append(judged(f"{label}: vLLM / Orca (Oracle)", paper, shared))
        what = f"{label}: vLLM / Orca (Oracle), each with its own prefix"
        results.append(measured("P-F16", what, round(apart.mean, 2), apart.unit(), "simulated"))
    one, five = (result.ours for result in results[::2])
    results += _of_longer_sentences()
    more = Result("P-F16", "a longer prefix, more gain", True, five > one, "", HOLDS if five > one else DIFFERS)
    results.append(more._replace(real_or_simulated="simulated"))
    data = {name: as_data(curves, by_seed[name]) for name, curves in found.items()}
    return Reproduction(results, _text(found, by_seed, seconds), partial(_draw, found), data)


def _load(name: str, way: str) -> Load:
    return Load("a100-13b", name, MODEL, KV_GIB, TRANSLATION[name] if way == "paged" else 0)


def _of_longer_sentences() -> list[Result]:
    """Return throughput ratios when all requests come at once, with the workload's sentences and with longer ones."""
    results = []
    for stretch in (1.0, LONGER):
        for name in PANELS:
            paged, orca = (_load(name, way)._replace(stretch=stretch) for way in ("paged", "orca-oracle"))
            ours = paged.capacity("paged") / orca.capacity("orca-oracle")
            what = f"{PANELS[name][0]}, sentences {stretch:g} times as long, all at once: vLLM / Orca (Oracle)"
            results.append(measured("P-F16", what, round(ours, 2), "ratio", "simulated"))
    return results


def judged(what: str, paper: float, ours: Spread) -> Result:
    """Return a result that holds if the mean is within SLACK of the paper's."""
    holds = abs(ours.mean - paper) <= SLACK * paper
    what = f"{what} (within {SLACK:.0%})"
    return Result("P-F16", what, paper, round(ours.mean, 2), ours.unit(), HOLDS if holds else DIFFERS, "simulated")


def _text(found: dict[str, dict[str, Curve]], by_seed: dict[str, Rates], seconds: float) -> str:
    rows = [
        (f"{TRANSLATION[name]} tokens", LABELS[way], *(f"{rate:.3g}" for rate in Spread.of(by_seed[name][way])),
         f"{curve.knee.running:.1f}", f"{1000 * curve.knee.step:.1f}")
        for name, curves in found.items() for way, curve in curves.items()
    ]  # fmt: skip
    head = ("prefix", "system", "requests/s", "lowest", "highest", "running at once", "ms a step")
    return (
        f"LLaMA-13B, sustained: mean normalised latency of at most {LIMIT:g} s a token. Simulated; {seconds:g} s of "
        f"requests, {len(SEEDS)} seeds: mean, lowest and highest; running and steps: the first seed's\n"
        f"{table(head, rows)}\n"
        "The paper says nothing of WMT16's sentences in tokens; ours have 28 on average, and translations 36. The\n"
        "longer they are, the less of a request is its prefix: see the ratios with longer ones."
    )


def _draw(found: dict[str, dict[str, Curve]]) -> Figure:
    from quire.bench.plots import figure

    fig = figure(10, 4.4)
    for axes, (name, curves) in zip(fig.subplots(1, 2), found.items()):
        draw_curves(axes, curves, f"{PANELS[name][0]}, {TRANSLATION[name]} tokens", LABELS)
    handles, labels = axes.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncol=len(LABELS), frameon=False)
    fig.suptitle("Figure 16: translation with a shared prefix (LLaMA-13B, simulated)")
    return fig
