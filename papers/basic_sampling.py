"""Reproduce PagedAttention Figure 12 by simulation: normalised latency by request rate, and the abstract's claim
derived from it.

OPT-13B, 66B and 175B (a to c: ShareGPT-like requests, d to f: Alpaca-like ones) on the A100s of Table 1, with vLLM's
memory, Orca's three and FasterTransformer's. A rate is sustained if mean normalised latency is at most LIMIT. Ratios of
rates are means of several seeds; curves, and numbers read from them, are the first seed's.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from papers.result import DIFFERS, HOLDS, Reproduction, Result, measured, near
from papers.serving import (
    HOUR,
    LIMIT,
    SECONDS,
    SEEDS,
    SHOWN,
    SYSTEMS,
    Curve,
    Load,
    Rates,
    Spread,
    as_data,
    curves,
    draw_curves,
    rates,
    ratios,
    why,
)
from quire.bench.document import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Panel(NamedTuple):
    """A panel of the figure. The seconds of its traces are shorter without --full; with it they are the paper's."""

    title: str
    load: Load
    here: float = SECONDS
    paper: float = HOUR

    def seconds(self, full: bool) -> float:
        return self.paper if full else self.here


PANELS = {
    "a": Panel("OPT-13B, ShareGPT", Load("a100-13b", "sharegpt")),
    "b": Panel("OPT-66B, ShareGPT", Load("a100-66b", "sharegpt")),
    "c": Panel("OPT-175B, ShareGPT", Load("a100-175b", "sharegpt"), paper=900.0),
    "d": Panel("OPT-13B, Alpaca", Load("a100-13b", "alpaca")),
    "e": Panel("OPT-66B, Alpaca", Load("a100-66b", "alpaca")),
    "f": Panel("OPT-175B, Alpaca", Load("a100-175b", "alpaca"), here=300.0, paper=900.0),
}
SLACK = 0.1  # a number is in one of the paper's ranges if it is no further outside than this share
NEAR = 0.2  # a number agrees with one of the paper's if it differs by this share at most
# The paper's ranges of vLLM's rate / another system's: of the ShareGPT panels (§6.2), and of (d) (§6.3).
SHAREGPT = {"orca-oracle": (1.7, 2.7), "orca-max": (2.7, 8.0)}
ALPACA_13B = 1.3
MOST_FT = 22.0  # of the ShareGPT panels
ABSTRACT = (2.0, 4.0)
JUDGED = ("orca-oracle", "orca-pow2", "orca-max")  # the abstract doesn't name one

REASONS = """
Memory decides how many requests run at once, the device what that is worth. Our A100s add matrix operations and the
host's time for each row in full to reading the weights, and count no latency of all-reduces between GPUs: with the
hundred rows of (c) a step takes so much longer that the advantage falls below that in requests. Whether the paper's
steps did isn't told. A static batch has no knee: its latency rises from the lowest rates on, so how far behind
FasterTransformer is depends on the latency at which it is read, as it doesn't for the others; and the host's time
of vLLM's steps is charged to FasterTransformer's too, which has no such scheduler."""


def figure_12(full: bool = False) -> Reproduction:
    """Run all panels, and judge the paper's statements about them together."""
    return panels(tuple(PANELS), full)


def panels(names: tuple[str, ...], full: bool = False) -> Reproduction:
    """Run some panels. The paper's statements about several panels are judged only if all of them are run."""
    chosen = [PANELS[name] for name in names]
    loads, seconds = [panel.load for panel in chosen], [panel.seconds(full) for panel in chosen]
    found = curves(loads, tuple(SYSTEMS), seconds)
    by_panel, by_seed = dict(zip(names, found)), dict(zip(names, rates(loads, seconds, found)))
    results = [result for name in names for result in _of_panel(name, by_seed[name])]
    if len(names) == len(PANELS):
        results += _of_all(by_seed, max(ratio_at(by_panel[name], "ft", LIMIT / 2) for name in "abc"))
    data = {PANELS[name].title: as_data(curves, by_seed[name]) for name, curves in by_panel.items()}
    return Reproduction(results, _text(by_panel, by_seed, full), partial(_draw, by_panel), data)


def ratio_at(found: dict[str, Curve], system: str, limit: float) -> float:
    """Return the ratio of the paged system's highest rate to another system's at `limit`, by the first seed's
    curves."""
    return found["paged"].at(limit) / found[system].at(limit)


def within(row: str, what: str, ours: Spread, low: float, high: float) -> Result:
    """Return a result that holds if the mean is in the paper's range, extended by SLACK."""
    holds = low * (1 - SLACK) <= ours.mean <= high * (1 + SLACK)
    return Result(
        row, f"{what} (by {SLACK:.0%})", f"{low:g} - {high:g}", round(ours.mean, 2), ours.unit(),
        HOLDS if holds else DIFFERS, "simulated",
    )  # fmt: skip


def close(row: str, what: str, ours: Spread, paper: float) -> Result:
    """Return a result that holds if the mean is within NEAR of the paper's number."""
    result = near(row, f"{what} (by {NEAR:.0%})", paper, round(ours.mean, 2), ours.unit(), NEAR)
    return result._replace(real_or_simulated="simulated")


def _of_panel(name: str, by_seed: Rates) -> list[Result]:
    results = []
    for system in by_seed:
        if system == "paged":
            continue
        ratio = Spread.of(ratios(by_seed, system))
        what = f"({name}) {PANELS[name].title}: vLLM / {SYSTEMS[system]}"
        if name in "abc" and system in SHAREGPT:
            results.append(within("P-F12", what, ratio, *SHAREGPT[system]))
        elif name == "d" and system == "orca-oracle":
            results.append(close("P-F12", what, ratio, ALPACA_13B))
        else:
            results.append(measured("P-F12", what, round(ratio.mean, 2), ratio.unit(), "simulated"))
    return results


def _of_all(by_seed: dict[str, Rates], stricter: float) -> list[Result]:
    """Judge the statements about all panels. `stricter` is the largest ratio to FasterTransformer in (a) to (c) at half
    the latency."""
    most = Spread.of([max(of) for of in zip(*(ratios(by_seed[name], "ft") for name in "abc"))])
    oracle = {name: Spread.of(ratios(panel, "orca-oracle")).mean for name, panel in by_seed.items()}
    order = all(
        Spread.of(ratios(panel, worse, better)).mean > 1
        for panel in by_seed.values()
        for better, worse in pairwise(panel)
    )
    what = f"the same where latency is {LIMIT / 2:g} s a token, first seed"
    return [
        close("P-F12", "the most of (a) to (c): vLLM / FasterTransformer", most, MOST_FT),
        measured("P-F12", what, round(stricter, 2), "ratio", "simulated"),
        _claim("each panel: vLLM > Orca (Oracle) > Orca (Pow2) > Orca (Max) > FasterTransformer", order),
        _claim("(f): the least advantage over Orca (Oracle)", min(oracle, key=lambda name: oracle[name]) == "f"),
        *(_of_abstract(by_seed, system) for system in JUDGED),
    ]


def _of_abstract(by_seed: dict[str, Rates], system: str) -> Result:
    """Judge the abstract's claim for one system."""
    medians = [float(np.median(of)) for of in zip(*(ratios(panel, system) for panel in by_seed.values()))]
    what = f"vLLM / {SYSTEMS[system]}, median of all panels; the paper doesn't say which Orca"
    return within("P-X3", what, Spread.of(medians), *ABSTRACT)


def _claim(what: str, holds: bool) -> Result:
    return Result("P-F12", what, True, holds, "", HOLDS if holds else DIFFERS, "simulated")


def _text(by_panel: dict[str, dict[str, Curve]], by_seed: dict[str, Rates], full: bool) -> str:
    rows = []
    for name, found in by_panel.items():
        for system, curve in found.items():
            rate, ratio = Spread.of(by_seed[name][system]), Spread.of(ratios(by_seed[name], system))
            rows.append((
                f"({name}) {PANELS[name].title}", SYSTEMS[system],
                f"{rate.mean:.3g}", f"{rate.lowest:.3g}-{rate.highest:.3g}",
                f"{ratio.mean:.2f}", f"{ratio.lowest:.2f}-{ratio.highest:.2f}",
                f"{ratio_at(found, system, LIMIT / 2):.2f}",
                f"{curve.knee.running:.1f}", f"{1000 * curve.knee.step:.1f}", curve.knee.preemptions,
            ))  # fmt: skip
    head = (
        "panel", "system", "requests/s", "by seed", "vLLM / it", "by seed", f"at {LIMIT / 2:g} s", "running",
        "ms a step", "preempted",
    )  # fmt: skip
    lengths = ", ".join(f"({name}) {PANELS[name].seconds(full):g} s" for name in by_panel)
    return (
        f"Sustained: mean normalised latency of at most {LIMIT:g} s a token. Simulated; traces: {lengths}\n"
        f"Rates and ratios: mean, lowest and highest of {len(SEEDS)} seeds; from 'at' on the first seed's\n"
        f"{table(head, rows)}\n"
        + "\n".join(f"({name}) {why(found, 'orca-oracle')}." for name, found in by_panel.items())
        + REASONS
    )


def _draw(by_panel: dict[str, dict[str, Curve]]) -> Figure:
    from quire.bench.plots import figure

    columns = min(len(by_panel), 3)
    lines = -(-len(by_panel) // columns)
    fig = figure(1 + 4 * columns, 1 + 3.2 * lines)
    for axes, (name, found) in zip(fig.subplots(lines, columns, squeeze=False).flat, by_panel.items()):
        draw_curves(axes, found, f"({name}) {PANELS[name].title}")
    handles, labels = axes.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncol=len(SYSTEMS), frameon=False)
    fig.suptitle(f"Figure 12: latency by request rate (simulated; dotted: sustained up to here, axis: {SHOWN:g} s)")
    return fig


figure_12a = partial(panels, ("a",))
figure_12b = partial(panels, ("b",))
figure_12c = partial(panels, ("c",))
figure_12d = partial(panels, ("d",))
figure_12e = partial(panels, ("e",))
figure_12f = partial(panels, ("f",))
