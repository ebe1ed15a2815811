"""Reproduce PagedAttention Figure 14 (§6.3) by simulation: parallel sampling and beam search in each system.

OPT-13B in 12 GiB, Alpaca-like requests. Beams fork as in real searches of the bundled model (sim/histories). Orca's
memories hold the KV of every sequence separately and copy it where a beam forks (§4.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from papers.result import DIFFERS, HOLDS, Reproduction, Result, measured, near
from papers.serving import (
    BELOW,
    CROWD,
    LIMIT,
    SECONDS,
    SEED,
    SYSTEMS,
    TOLERANCE,
    Curve,
    Load,
    as_data,
    curve,
    draw_curves,
    in_parallel,
)
from quire.bench.document import table
from quire.protocol.sampling_params import SamplingParams
from quire.sim.histories import BeamReplay, load_histories
from quire.sim.simulation import Objective, SimulationResult, TraceRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKLOAD = Load("a100-13b", "alpaca")
SHOWN = ("paged", "orca-oracle", "orca-pow2", "orca-max")
WIDTHS = (2, 4, 6)
SHORT = 100.0  # seconds of a trace; with --full as in other figures
HEIGHT = 2 * LIMIT  # of the picture's panels
GAPS = {("basic", 1): 1.3, ("beam", 6): 2.3}  # the paper's: the paged system's rate / Orca (Oracle)'s
PROMPTS = 12.0  # per cent of the KV of parallel sampling (§3)
SAVED = {("parallel", 2): 6.1, ("parallel", 4): 8.5, ("parallel", 6): 9.8,
         ("beam", 2): 37.6, ("beam", 4): 53.1, ("beam", 6): 55.2}  # fmt: skip
WITHIN = 0.2  # of the paper's numbers
ERROR = (1 + TOLERANCE) ** 2  # of a ratio of two gaps: each gap is a ratio of rates, each rate found to TOLERANCE
TITLES = {"basic": "basic sampling", "parallel": "parallel sampling, {} samples", "beam": "beam search, {} beams"}

Case = tuple[str, int]
"""How requests are decoded: "basic", "parallel" or "beam", and how many sequences each has."""


class Decoded(NamedTuple):
    """A load whose requests are decoded in one way. papers.serving measures it as it does a plain Load."""

    load: Load
    way: str
    width: int

    def trace(self, rate: float, seconds: float) -> list[TraceRequest]:
        """Return a trace, as Load.trace does."""
        return self._decoded(self.load.trace(rate, seconds))

    def _decoded(self, requests: Sequence[TraceRequest]) -> list[TraceRequest]:
        """Return the requests, each with its own seed, which chooses its history."""
        seeds = np.random.default_rng(SEED).integers(0, 2**31, len(requests)).tolist()
        found = []
        for one, seed in zip(requests, seeds):
            params = SamplingParams(
                temperature=0.0, n=self.width if self.way == "parallel" else 1,
                beam_width=self.width if self.way == "beam" else None, max_tokens=one.params.max_tokens,
                ignore_eos=True, detokenize=False, seed=seed,
            )  # fmt: skip
            found.append(one._replace(params=params))
        return found

    def serve(
        self, system: str, trace: Sequence[TraceRequest], limit: float = math.inf, until: float = math.inf
    ) -> SimulationResult:
        """Simulate a system, as Load.serve does."""
        plant = self.load.plant(system)
        draw = (
            BeamReplay(load_histories(self.load.workload), frozenset(plant.spec.eos_ids))
            if self.way == "beam"
            else None
        )
        goals = [Objective("mean", "normalised", limit)] if limit < math.inf else ()
        return plant.simulation(draw).run(trace, goals, until)

    def capacity(self, system: str) -> float:
        """Return roughly what Load.capacity does, as the start of the search."""
        mean = np.mean([one.prompt_len + one.output_len for one in self.load.sketches(1000)])
        count = CROWD * math.ceil(self.load.plant(system).kv_tokens / float(mean) / self.width)
        outcome = self.serve(system, self._decoded(self.load.arriving([0.0] * count)))
        ends = sorted(one.token_times[-1][0] for one in outcome.requests)
        first, last = count // 5, count - count // 5 - 1
        return (last - first) / (ends[last] - ends[first])

    def saved(self, rate: float, seconds: float) -> float:
        """Return the mean share of pages that sharing saves in paged memory while requests come."""
        trace = self.trace(rate, seconds)
        return self.serve("paged", trace, until=trace[-1].arrival).totals.sharing_saved


Curves = dict[Case, dict[str, Curve]]


def figure_14(full: bool = False) -> Reproduction:
    """Find each system's sustained rates, for each way of decoding and width, and for basic sampling."""
    seconds = SECONDS if full else SHORT
    cases: list[Case] = [*((way, width) for way in ("beam", "parallel") for width in reversed(WIDTHS)), ("basic", 1)]
    jobs = [(Decoded(WORKLOAD, *case), system, seconds) for case in cases for system in SHOWN]
    done = iter(in_parallel(curve, jobs))
    found = {case: {system: next(done) for system in SHOWN} for case in cases}
    shared = [case for case in cases if case[0] != "basic"]
    saved = in_parallel(
        Decoded.saved,
        [(Decoded(WORKLOAD, *case), max(BELOW) * found[case]["paged"].highest, seconds) for case in shared],
    )
    shares = {case: 100 * share for case, share in zip(shared, saved)}
    results = [*_gaps(found), *_claims(found), *_shares(shares)]
    data = {f"{way} {width}": as_data(curves) for (way, width), curves in found.items()}
    results = [result._replace(real_or_simulated="simulated") for result in results]
    return Reproduction(results, _text(found, shares, seconds), partial(_draw, found), data)


def gap(curves: dict[str, Curve], system: str = "orca-oracle") -> float:
    """Return the ratio of the paged system's highest rate to another's."""
    return curves["paged"].highest / curves[system].highest


def _gaps(found: Curves) -> list[Result]:
    results = []
    for case, curves in sorted(found.items(), key=_order):
        what, ours = f"{_title(case)}: rate of vLLM / Orca (Oracle)", round(gap(curves), 2)
        if case in GAPS:
            results.append(near("P-F14", f"{what} (within {WITHIN:.0%})", GAPS[case], ours, "times", WITHIN))
        else:
            results.append(measured("P-F14", what, ours, "times"))
    return results


def _claims(found: Curves) -> list[Result]:
    """Judge the figure as a whole within the error of searches. A rate, and so a ratio of two rates, is exact to
    TOLERANCE; a ratio of two gaps to ERROR."""
    basic = gap(found["basic", 1])
    results = []
    for way in ("parallel", "beam"):
        gaps = [basic, *(gap(found[way, width]) for width in WIDTHS)]
        grows = all(low <= high * ERROR for low, high in pairwise(gaps)) and gaps[-1] > gaps[0] * ERROR
        what = f"{way}: the gap to Orca (Oracle) grows with the sequences, by more than the searches' error"
        results.append(_claim(what, grows))
    more = all(gap(found["beam", width]) > gap(found["parallel", width]) * ERROR for width in WIDTHS)
    results.append(_claim("beam search widens the gap more than parallel sampling", more))
    falling = all(
        curves[better].highest > curves[worse].highest * (1 + TOLERANCE)
        for curves in found.values()
        for better, worse in pairwise(SHOWN)
    )
    results.append(_claim("vLLM > Orca (Oracle) > Orca (Pow2) > Orca (Max) everywhere", falling))
    return results


def _claim(what: str, holds: bool) -> Result:
    return Result("P-F14", what, True, holds, "", HOLDS if holds else DIFFERS)


def _shares(shares: dict[Case, float]) -> list[Result]:
    """Return savings by Figure 15's measure, in per cent. Of n samples that share a prompt, n - 1 save it."""
    results = [
        near("P-F15", f"{_title(case)}: pages saved while serving (within 30%)", SAVED[case], round(share, 1), "%", 0.3)
        for case, share in sorted(shares.items(), key=_order)
    ]
    prompts = [share * width / (width - 1) for (way, width), share in shares.items() if way == "parallel"]
    what = f"parallel sampling: prompts' share of KV (within {WITHIN:.0%})"
    return [*results, near("P-X2", what, PROMPTS, round(float(np.mean(prompts)), 1), "%", WITHIN)]


def _order(item: tuple[Case, object]) -> tuple[int, int]:
    (way, width), _ = item
    return list(TITLES).index(way), width


def _title(case: Case) -> str:
    return TITLES[case[0]].format(case[1])


def _text(found: Curves, shares: dict[Case, float], seconds: float) -> str:
    head = ("decoding", *(SYSTEMS[system] for system in SHOWN), "vLLM / Oracle", "its requests at once", "its steps",
            "pages saved %")  # fmt: skip
    rows = []
    for case, curves in sorted(found.items(), key=_order):
        ours, theirs = curves["paged"].knee, curves["orca-oracle"].knee
        rows.append((
            _title(case), *(f"{curves[system].highest:.2f}" for system in SHOWN), f"{gap(curves):.2f}",
            f"{ours.running / theirs.running:.2f}", f"{ours.step / theirs.step:.2f}",
            f"{shares[case]:.1f}" if case in shares else "-",
        ))  # fmt: skip
    return (
        f"requests/s that keep a mean normalised latency of {LIMIT:g} s a token; OPT-13B, Alpaca-like lengths, "
        f"{seconds:g} s of requests, simulated\n{table(head, rows)}\n"
        "At its highest rate vLLM runs so many times the requests that Orca (Oracle) runs at once, and its steps take\n"
        "so many times as long: a row's cost, derived from Figure 13, limits what more sharing gains."
    )


def _draw(found: Curves) -> Figure:
    from quire.bench.plots import figure

    fig = figure(11, 6)
    panels = fig.subplots(2, len(WIDTHS), squeeze=False)
    for row, way in zip(panels, ("parallel", "beam")):
        for axes, width in zip(row, WIDTHS):
            draw_curves(axes, found[way, width], _title((way, width)))
            axes.set_ylim(0, HEIGHT)
            if axes is not row[0]:
                axes.set_ylabel("")
    panels[0][0].legend(fontsize=8)
    fig.suptitle("Figure 14: parallel sampling and beam search (OPT-13B, Alpaca, simulated)")
    return fig
