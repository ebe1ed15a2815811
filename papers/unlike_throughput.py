"""Simulate the throughput of models of unlike layers over two-level and uniform pages, on two devices (Jenga Figure
13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from papers.result import DIFFERS, HOLDS, Reproduction, Result, measured, near
from papers.serving import in_parallel
from papers.unlike_serving import H100, L4, Case, assumed, burst, serve
from quire.bench.document import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ARTICLES, QUESTIONS, PICTURES = "arxiv-qa@40", "mmlu-pro@400", "mmmu-pro@400"  # D3, D1, D2
CHUNK = 2048  # tokens a step on the smaller device; with more, windows would take as much memory as whole requests
# The mean tokens of a prompt that PyramidKV keeps in a layer: an eighth of MMLU-pro's longest request. The paper
# gives no number.
KEPT = (("pyramid_kv", {"average": 384}),)
CASES: dict[str, tuple[Case, ...]] = {
    "Llama Vision": (
        Case("llama3.2-vision-11b", H100, PICTURES, caching=True),
        Case("llama3.2-vision-11b", L4, PICTURES, halved=True, caching=True),
    ),
    "Gemma-2": (
        Case("gemma-2-27b", H100, ARTICLES, caching=True),
        Case("gemma-2-9b", L4, ARTICLES, caching=True, longest=8000, chunk=CHUNK),
    ),
    "Ministral": (
        Case("ministral-8b", H100, ARTICLES, caching=True),
        Case("ministral-8b", L4, ARTICLES, halved=True, caching=True, chunk=CHUNK),
    ),
    "Jamba": (Case("jamba-52b", H100, QUESTIONS, halved=True, caching=True),),
    "character.ai": (
        Case("characterai-70b", H100, QUESTIONS, halved=True, caching=True),
        Case("characterai-8b", L4, QUESTIONS, caching=True),
    ),
    "PyramidKV": (
        Case("pyramidkv-70b", H100, QUESTIONS, halved=True, caching=True, changes=KEPT),
        Case("pyramidkv-8b", L4, QUESTIONS, caching=True, changes=KEPT),
    ),
    "Llama": (
        Case("llama3-70b", H100, QUESTIONS, halved=True, caching=True),
        Case("llama3-8b", L4, QUESTIONS, caching=True),
    ),
}  # Table 1
RULES = ("uniform", "jenga")
UNSHARED = "uniform, unshared"  # where layers share KV: the pages of a system without support for it
MEAN, MOST = {"H100": 1.80, "L4": 1.69}, {"H100": 4.92, "L4": 3.29}
TOLERANCE, EQUAL = 0.2, 0.03


class Speed(NamedTuple):
    """The results of a model on a device by a rule: requests a second, the mean decode batch, the hit rate.

    `left_out` counts requests too long for uniform pages."""

    model: str
    device: str
    rule: str
    label: str
    kv_gib: float
    requests_per_s: float
    batch: float
    hit_rate: float
    preemptions: int
    requests: int
    left_out: int


def speed(model: str, case: Case, rule: str) -> Speed:
    """Simulate a case's requests that fit under either rule."""
    named = rule
    most = min(case.plant(one).max_len for one in RULES)
    if rule == UNSHARED:
        case, rule = case._replace(changes=(("kv_sharing", None),)), "uniform"
    sketches = case.sketches()
    trace = burst(sketches, case.eyes)
    kept = [one for one, sketch in zip(trace, sketches) if len(one.prompt) + sketch.output_len <= most]
    made = case.plant(rule).simulation()
    run = serve(made.engine, kept, made.spec)
    return Speed(
        model, case.device.name, named, case.label, case.budget, run.requests_per_s, run.batch, run.hit_rate,
        run.preemptions, len(kept), len(sketches) - len(kept),
    )  # fmt: skip


def figure_13() -> Reproduction:
    """Simulate all models of Table 1 on both devices; Jamba only on the one that holds it."""
    jobs = [(model, case, rule) for model, cases in CASES.items() for case in cases for rule in RULES]
    jobs += [("character.ai", case, UNSHARED) for case in CASES["character.ai"]]
    found: list[Speed] = in_parallel(speed, jobs)
    results = [result._replace(real_or_simulated="simulated") for result in judged(found)]
    data: Any = [one._asdict() for one in found]
    return Reproduction(results, text(found, assumed()), lambda: draw(data), data)


def ratios(found: Sequence[Speed], other: str = "uniform") -> dict[tuple[str, str], float]:
    """Return (model, device) -> the throughput of two-level pages / that of the others."""
    of = {(one.model, one.device, one.rule): one.requests_per_s for one in found}
    pairs = dict.fromkeys((one.model, one.device) for one in found if one.rule == other)
    return {(model, device): of[model, device, "jenga"] / of[model, device, other] for model, device in pairs}


def judged(found: Sequence[Speed]) -> list[Result]:
    """Judge each ratio: Llama's is 1, none is less, and the mean and the maximum against the paper's."""
    results = []
    by = ratios(found)
    for (model, device), ratio in by.items():
        what = f"{next(one.label for one in found if (one.model, one.device) == (model, device))}: LCM pages / uniform"
        if model == "Llama":
            results.append(near("J-F13", f"{what} (within {EQUAL:.0%})", 1.0, round(ratio, 2), "times", EQUAL))
        else:
            verdict = HOLDS if ratio > 1 else DIFFERS
            results.append(Result("J-F13", f"{what} (above 1)", None, round(ratio, 2), "times", verdict))
    for (model, device), ratio in ratios(found, UNSHARED).items():
        what = f"{model}, {device}: LCM pages / {UNSHARED}"
        results.append(measured("J-F13", what, round(ratio, 2), "times"))
    for device in dict.fromkeys(device for _, device in by):
        mine = [ratio for (_, at), ratio in by.items() if at == device]
        results.append(near("J-F13", f"{device}: mean of {len(mine)} models (within {TOLERANCE:.0%})", MEAN[device],
                            round(mean(mine), 2), "times", TOLERANCE))  # fmt: skip
        model = max((ratio, model) for (model, at), ratio in by.items() if at == device)[1]
        most = measured("J-F13", f"{device}: the most, of {model}", round(max(mine), 2), "times")
        results.append(most._replace(paper=f"up to {MOST[device]}"))
    return results


def text(found: Sequence[Speed], note: str) -> str:
    head = ("model", "KV GiB", "pages", "requests", "requests/s", "decode batch", "hit rate", "preempted", "left out")
    rows = [
        (one.label, f"{one.kv_gib:.2f}", one.rule, one.requests, f"{one.requests_per_s:.3g}", f"{one.batch:.2f}",
         f"{100 * one.hit_rate:.1f}%", one.preemptions, one.left_out)
        for one in found
    ]  # fmt: skip
    return (
        f"* weights of one byte. Gemma-2 and Ministral: {ARTICLES}, cut to the context; Llama Vision: {PICTURES}; "
        f"others: {QUESTIONS}; all at once\n{table(head, rows)}\n"
        "KV GiB: 0.95 of the device less weights and 1.5 GB, for --kv-gib. Left out: requests that uniform pages\n"
        "can't hold, which the paper's vLLM could not serve either. The paper's means are of 7 and 6 models, and\n"
        "which bar is whose can't be read from its text. Long prompts are arithmetic, whatever the batch: there a\n"
        "larger batch saves little, and what is found of prompts decides. Uniform pages hold states apart from them,\n"
        "one for each sequence that may run, as vLLM 0.6.3 did; with --max-num-seqs 256 both rules serve Jamba alike.\n"
        "Those of character.ai's model know which layers share; those of a system that doesn't are beside.\n"
        f"{note}"
    )


def draw(data: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw throughput as a share of the better rule: pairs of bars, a panel for each device."""
    from quire.bench.plots import COLOURS, figure

    found = [Speed(**one) for one in data]
    by = ratios(found)
    devices = list(dict.fromkeys(one.device for one in found))
    fig = figure(6 * len(devices), 4)
    for axes, device in zip(fig.subplots(1, len(devices), squeeze=False).flat, devices):
        mine = [one for one in found if one.device == device]
        models = list(dict.fromkeys(one.model for one in mine))
        for i, rule in enumerate(RULES):
            of = {one.model: one.requests_per_s for one in mine if one.rule == rule}
            base = {one.model: one.requests_per_s for one in mine if one.rule == "uniform"}
            places = [k + 0.4 * (i - 0.5) for k in range(len(models))]
            bars = axes.bar(places, [of[m] / base[m] for m in models], 0.38, color=COLOURS[1 - i], label=rule)
            if rule == "jenga":
                axes.bar_label(bars, [f"{by[m, device]:.2f}" for m in models], fontsize=8)
        axes.set_xticks(range(len(models)), models, fontsize=8)
        axes.set_ylabel("throughput, of uniform pages'")
        axes.set_title(device, fontsize=9)
        axes.legend(fontsize=8)
    fig.suptitle("Jenga Figure 13: throughput")
    return fig
