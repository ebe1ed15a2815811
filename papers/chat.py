"""Reproduce PagedAttention Figure 17 by simulation: a chatbot.

OPT-13B; prompts are the last 1,024 tokens of history and query, and no KV is kept between rounds (§6.5). The buddy
allocator rounds 1,024 tokens and any output up to 2,048, so that Orca's knowledge of output lengths has no effect.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from papers.result import DIFFERS, HOLDS, Reproduction, Result
from papers.serving import (
    HOUR,
    LIMIT,
    SECONDS,
    SEEDS,
    SYSTEMS,
    Curve,
    Load,
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

LOAD = Load("a100-13b", "chat")
COMPARED = ("paged", "orca-oracle", "orca-pow2", "orca-max")
PAPER = 2.0
SLACK = 0.2  # share of PAPER
ALIKE = 0.1  # (highest - lowest) / lowest of the Orcas' rates, at most


def figure_17(full: bool = False) -> Reproduction:
    """Find the sustained rates of vLLM and of the three Orcas."""
    seconds = HOUR if full else SECONDS
    [found] = curves([LOAD], COMPARED, [seconds])
    [by_seed] = rates([LOAD], [seconds], [found])
    results = [_judged(f"vLLM / {SYSTEMS[system]}", Spread.of(ratios(by_seed, system))) for system in COMPARED[1:]]
    orcas = zip(*(by_seed[system] for system in COMPARED[1:]))
    apart = Spread.of([100 * (max(of) / min(of) - 1) for of in orcas])
    what = f"the three Orcas alike: their rates differ by (at most {ALIKE:.0%})"
    verdict = HOLDS if apart.mean <= 100 * ALIKE else DIFFERS
    results.append(Result("P-F17", what, None, round(apart.mean, 1), apart.unit("%", 1), verdict, "simulated"))
    long = sum(sketch.prompt_len == 1024 for sketch in LOAD.sketches(4096)) / 4096
    rows = [
        (
            SYSTEMS[system],
            *(f"{rate:.3g}" for rate in Spread.of(by_seed[system])),
            f"{curve.knee.running:.1f}",
            f"{1000 * curve.knee.step:.1f}",
        )
        for system, curve in found.items()
    ]
    text = (
        f"Sustained: mean normalised latency of at most {LIMIT:g} s a token. Simulated; {seconds:g} s of requests, "
        f"{len(SEEDS)} seeds: mean, lowest and highest; running and steps: the first seed's; {long:.0%} of the prompts "
        "have all 1,024 tokens\n"
        f"{table(('system', 'requests/s', 'lowest', 'highest', 'running at once', 'ms a step'), rows)}\n"
        f"{why(found, 'orca-max')}: long contexts are read in every step, and every request's prompt is computed\n"
        "whoever serves it. The Orcas differ by the prompts that are shorter than 1,024 tokens."
    )
    return Reproduction(results, text, partial(_draw, found), as_data(found, by_seed))


def _judged(what: str, ours: Spread) -> Result:
    holds = abs(ours.mean - PAPER) <= SLACK * PAPER
    what = f"{what} (within {SLACK:.0%})"
    return Result("P-F17", what, PAPER, round(ours.mean, 2), ours.unit(), HOLDS if holds else DIFFERS, "simulated")


def _draw(found: dict[str, Curve]) -> Figure:
    from quire.bench.plots import figure

    fig = figure(6, 4)
    axes = fig.add_subplot()
    draw_curves(axes, found, "Figure 17: chatbot (OPT-13B, simulated)")
    axes.legend()
    return fig
