"""Reproduce Jenga Figure 15 and §7.2 by simulation: the decode batch for 20 requests with long documents under every
allocation rule, and the longest request that a small device serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from papers.closed_forms import bars
from papers.result import DIFFERS, HOLDS, Reproduction, Result, measured, near
from papers.unlike_serving import (
    H100,
    L4,
    LABELS,
    OWN,
    RULES,
    Case,
    Ran,
    Step,
    assumed,
    exactly,
    serve,
    simulated,
)
from quire.bench.document import table
from quire.sim.simulation import TraceRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATIO = 1.95  # of ours to vLLM's, SGLang's and TGI's, as the paper has it
PAPER = {"jenga": (5.39, 300), "uniform": (2.63, 600)}  # mean decode batch, and steps ("within", "around")
TOLERANCE = 0.2
CASE = Case("ministral-8b", H100, "longdoc@20")  # D4
# The paper doesn't give its KV memory's size. In this one uniform pages have nearly the paper's batch.
MATCHED = CASE._replace(kv_gib=42.0)


class Decoded(NamedTuple):
    """A run under an allocation rule: its decode steps, and the share of allocated memory that no later token reads."""

    batch: float
    steps: int
    wasted: float
    batches: list[int]

    @classmethod
    def of(cls, run: Ran) -> Decoded:
        allocated = sum(moment.allocated for moment in run.memory)
        wasted = sum(moment.wasted for moment in run.memory) / allocated if allocated else 0.0
        return cls(round(run.batch, 2), run.decode_steps, wasted, decoding(run.steps))


def decoding(steps: Sequence[Step]) -> list[int]:
    """Return the batch sizes of steps that decode."""
    return [step.decoding for step in steps if step.decoding]


Runs = Mapping[str, Decoded]


def figure_15() -> Reproduction:
    """Run every rule in the budget of the paper's device, and in the one that gives uniform pages the paper's batch."""
    runs = {rule: Decoded.of(simulated(CASE, rule, sampled=0.5)) for rule in RULES}
    matched = {rule: Decoded.of(simulated(MATCHED, rule, sampled=0.5)) for rule in RULES}
    results = [result._replace(real_or_simulated="simulated") for result in judged(runs, matched)]
    data: Any = {
        name: {rule: run._asdict() for rule, run in found.items()}
        for name, found in (("h100", runs), ("less", matched))
    }
    return Reproduction(results, _text(runs, matched), lambda: draw(data), data)


def judged(runs: Runs, matched: Runs) -> list[Result]:
    """Judge the paper's numbers in the paper's budget, and the ratio in both budgets."""
    found: list[Result] = []
    for rule, (batch, steps) in PAPER.items():
        what = f"{LABELS[rule]}, {CASE.budget:.1f} GiB: "
        found += [
            near("J-F15", f"{what}mean decode batch (within {TOLERANCE:.0%})", batch, runs[rule].batch, "requests",
                 TOLERANCE),
            near("J-F15", f"{what}steps that decode (within {TOLERANCE:.0%})", steps, runs[rule].steps, "steps",
                 TOLERANCE),
        ]  # fmt: skip
    for case, of in ((CASE, runs), (MATCHED, matched)):
        what = f"batch of LCM pages / of uniform ones, {case.budget:.1f} GiB (within {TOLERANCE:.0%})"
        ratio = round(of["jenga"].batch / of["uniform"].batch, 2)
        found.append(near("J-F15", what, RATIO, ratio, "times", TOLERANCE))
    for rule in RULES:
        if rule not in PAPER:
            found.append(measured("J-F15", f"{LABELS[rule]}, {CASE.budget:.1f} GiB: mean decode batch",
                                  runs[rule].batch, "requests"))  # fmt: skip
    return found


def _text(runs: Runs, matched: Runs) -> str:
    rows = [
        (LABELS[rule], case.budget, run.batch, run.steps, f"{100 * run.wasted:.2f}%",
         f"{run.batch / of['uniform'].batch:.2f}")
        for case, of in ((CASE, runs), (MATCHED, matched))
        for rule, run in of.items()
    ]  # fmt: skip
    shown = [(rule, f"{kv:.1f}", *rest) for rule, kv, *rest in rows]
    head = ("pages", "KV GiB", "mean decode batch", "decode steps", "wasted", "of uniform's batch")
    return (
        f"{CASE.model}, {CASE.workload}, all at once; chunks of up to 8,192 tokens a step; simulated\n"
        f"{table(head, shown)}\n"
        "Wasted: of what is allocated, what no token to come reads; of a static split most is never allocated, since\n"
        "layers with windows don't fill their share. The paper doesn't give its KV memory. Of requests of 82,500\n"
        "tokens uniform pages waste 45 %, so 1.82 times as many fit; the paper has 1.95 times, and with so few\n"
        "requests whole ones decide. Here a prompt is computed in 10 steps beside those that decode: it takes memory\n"
        "and doesn't decode yet, which makes either batch smaller than what fits.\n"
        f"{assumed()} Batches depend on it only through who is admitted when."
    )


def draw(data: Mapping[str, Any]) -> Figure:
    """Draw decode batches over steps, with a panel for each budget."""
    from quire.bench.plots import COLOURS, figure

    fig = figure(11, 4)
    for axes, (name, runs) in zip(fig.subplots(1, len(data), squeeze=False).flat, data.items()):
        for (rule, run), colour in zip(runs.items(), (COLOURS * 2)[: len(runs)]):
            if rule in ("jenga", "uniform", "max"):
                axes.plot(run["batches"], color=colour, label=f"{LABELS[rule]}: mean {run['batch']:.2f}")
        axes.set_title(f"{(CASE if name == 'h100' else MATCHED).budget:.1f} GiB of KV", fontsize=9)
        axes.set_xlabel("steps that decode")
        axes.set_ylabel("requests that decode")
        axes.set_ylim(0)
        axes.legend(fontsize=8)
    fig.suptitle("Jenga Figure 15: decode batch, Ministral 8B, 20 requests of 55K to 110K tokens (simulated)")
    return fig


# §7.2: the longest request on an L4

SMALL = Case("ministral-8b", L4, "arxiv-qa@1", halved=True)


def longest_request() -> Reproduction:
    """Return the longest request that fits the budget of an L4, and check that it is served."""
    found = {rule: SMALL.plant(rule).max_len for rule in ("jenga", "uniform")}
    served = {rule: _one(rule, length) for rule, length in found.items()}
    longest = SMALL.spec.max_len
    results = [
        Result("J-X5", f"LCM pages: the longest request in {SMALL.budget:.2f} GiB", longest, found["jenga"], "tokens",
               HOLDS if found["jenga"] == longest else DIFFERS),
        Result("J-X5", "uniform pages can't serve the longest request", True, found["uniform"] < longest, "",
               HOLDS if found["uniform"] < longest else DIFFERS),
        measured("J-X5", f"uniform pages: the longest request in {SMALL.budget:.2f} GiB", found["uniform"], "tokens"),
        *(measured("J-X5", f"{LABELS[rule]}: such a request served, output tokens", tokens, "", "simulated")
          for rule, tokens in served.items()),
    ]  # fmt: skip
    weights = SMALL.spec.parameters / 2**30
    text = (
        f"0.95 of 24 GB, less {weights:.2f} GiB of weights of one byte and 1.5 GB, are {SMALL.budget:.2f} GiB for KV: "
        f"--kv-gib {SMALL.budget:.2f}.\nA token takes 147,456 bytes in all 36 layers; behind the window of 32,768 "
        "tokens, 27 of them need it no more."
    )
    shown = [measured("J-X5", LABELS[rule], length, "tokens")._replace(paper=longest) for rule, length in found.items()]
    return Reproduction(results, text, lambda: bars(shown, "Jenga §7.2: the longest request; paper: the model's own"))


def _one(rule: str, length: int) -> int:
    """Serve a request of `length` tokens in all. Return the number of its output tokens."""
    engine = SMALL.plant(rule).simulation().engine
    trace = [TraceRequest(0.0, [OWN] * (length - 50), exactly(50))]
    return sum(step.decoding for step in serve(engine, trace, SMALL.spec).steps) + 1
