"""Reproduce Jenga Figure 17 by simulation: the hit rate and throughput of prefix caching by the number of articles in
the questions, for each retention policy of tokens outside a window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from papers.result import DIFFERS, HOLDS, Reproduction, Result, measured, near
from papers.serving import in_parallel
from papers.unlike_serving import H100, Case, assumed, burst, serve
from quire.bench.document import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ARTICLES = (1, 2, 3, 4, 5, 6, 8, 10)
ASKED, LENGTH = 6, 92_000  # questions about each article, and its tokens, +-25 %: assumed
EQUAL = 3  # articles up to which both systems cache all
HITS, SPEED = 1.60, 1.77  # times vLLM's, at most
TOLERANCE, SAME = 0.2, 0.05
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "uniform": ("uniform", {}),
    "paper": ("jenga", {"retention": "paper"}),
    "slack": ("jenga", {"retention": "slack"}),
    "boundary": ("jenga", {"retention": "boundary"}),
}
LABELS = {
    "uniform": "uniform (vLLM 0.6.3)", "paper": "LCM pages, retention paper", "slack": "LCM pages, retention slack",
    "boundary": "LCM pages, retention boundary (default)",
}  # fmt: skip
OURS = "boundary"


class Found(NamedTuple):
    """The result of a run: the share of prompt tokens found in the prefix cache, and requests a second."""

    articles: int
    way: str
    hit_rate: float
    requests_per_s: float


def case(articles: int, length: int = LENGTH) -> Case:
    """Return a trace of questions about `articles` articles, in random order."""
    return Case("ministral-8b", H100, f"docqa:{articles}:{length}@{ASKED * articles}", caching=True)


def run(articles: int, way: str) -> Found:
    """Serve the questions one after another."""
    rule, more = WAYS[way]
    asked = case(articles)
    engine = asked.plant(rule, **more).simulation().engine
    done = serve(engine, burst(asked.sketches()), asked.spec, concurrency=1)
    return Found(articles, way, done.hit_rate, done.requests_per_s)


def figure_17() -> Reproduction:
    """Run every policy for every number of articles."""
    jobs = [(articles, way) for articles in reversed(ARTICLES) for way in WAYS]
    found: list[Found] = sorted(in_parallel(run, jobs))
    results = [result._replace(real_or_simulated="simulated") for result in judged(found)]
    data: Any = [one._asdict() for one in found]
    return Reproduction(results, text(found, assumed()), lambda: draw(data), data)


def over(found: Sequence[Found], way: str, name: str) -> dict[int, float]:
    """Return, by number of articles, the ratio of a number to that of uniform pages."""
    of = {(one.articles, one.way): getattr(one, name) for one in found}
    numbers = sorted({one.articles for one in found})
    return {n: of[n, way] / of[n, "uniform"] if of[n, "uniform"] else float(of[n, way] > 0) for n in numbers}


def judged(found: Sequence[Found]) -> list[Result]:
    """Judge the figure: no difference up to EQUAL articles, and the largest ratio above it."""
    results = []
    for way in (one for one in WAYS if one != "uniform"):
        hits, speed = over(found, way, "hit_rate"), over(found, way, "requests_per_s")
        few = [abs(ratio - 1) for n in hits if n <= EQUAL for ratio in (hits[n], speed[n])]
        pairs = [("hit rate", HITS, hits), ("throughput", SPEED, speed)]
        if way == OURS:
            equal = max(few) <= SAME
            results.append(Result("J-F17", f"up to {EQUAL} articles equal (within {SAME:.0%})", True, equal, "",
                                  HOLDS if equal else DIFFERS))  # fmt: skip
        for what, paper, ratios in pairs:
            n = max(ratios, key=lambda n: (ratios[n], -n))
            label = f"{LABELS[way]}: {what}, the most of uniform's, at {n} articles"
            ours = round(ratios[n], 2)
            results.append(near("J-F17", f"{label} (within {TOLERANCE:.0%})", paper, ours, "times", TOLERANCE)
                           if way == OURS else measured("J-F17", label, ours, "times"))  # fmt: skip
    return results


def text(found: Sequence[Found], note: str) -> str:
    of = {(one.articles, one.way): one for one in found}
    numbers = sorted({one.articles for one in found})
    rows = [
        (n, *(f"{100 * of[n, way].hit_rate:.1f}%" for way in WAYS),
         *(f"{of[n, way].requests_per_s / of[n, 'uniform'].requests_per_s:.2f}" for way in WAYS))
        for n in numbers
    ]  # fmt: skip
    head = ("articles", *(f"hits, {way}" for way in WAYS), *(f"speed, {way}" for way in WAYS))
    one = case(1)
    return (
        f"{one.label}, {one.budget:.1f} GiB for KV; {ASKED} questions about each article of {LENGTH:,} tokens give or "
        f"take\na quarter, in random order, one at a time\n{table(head, rows)}\n"
        "Speed: requests a second, of uniform pages'. The paper doesn't say how many questions are asked, in which\n"
        "order, how many at once, nor how large its KV memory is; the first question about an article never hits.\n"
        "retention: paper leaves what left a window as old as its last use, younger than the windows that others'\n"
        "hits need; slack empties it 512 tokens later; boundary keeps also the windows where prompts end or part.\n"
        f"{note}"
    )


def draw(data: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw hit rate and throughput by the number of articles, with a line for each policy."""
    from quire.bench.plots import COLOURS, figure

    fig = figure(11, 4)
    labels = (("hit_rate", "share of prompts that is found"), ("requests_per_s", "requests/s"))
    for axes, (name, label) in zip(fig.subplots(1, 2), labels):
        for way, colour in zip(WAYS, COLOURS):
            mine = sorted((one["articles"], one[name]) for one in data if one["way"] == way)
            axes.plot(*zip(*mine), "o-", color=colour, label=LABELS[way], markersize=4)
        axes.set_xlabel("articles")
        axes.set_ylabel(label)
        axes.set_ylim(0)
    fig.axes[0].legend(fontsize=8)
    fig.suptitle("Jenga Figure 17: prefix caching by the number of articles, Ministral 8B")
    return fig
