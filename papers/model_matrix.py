"""Reproduce Jenga Table 1: models, data sets and devices. Each model, with vision encoder and states, is planned into
each device's budget: the memory left for KV, and whether the longest request of its data set fits, or the shortfall.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from papers.result import Reproduction, Result, equal, measured
from papers.unlike_serving import BESIDE, GB, L4, SHARE, Case, burst
from papers.unlike_throughput import CASES
from quire.bench.document import table
from quire.errors import StartupError
from quire.models.quantization import FP8_ON_LOAD
from quire.sim.simulation import TraceRequest
from quire.weights.fp8 import saved_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = {  # model -> the data set; sizes on an H100 and on an L4, "*" with FP8
    "Llama Vision": ("MMMU-pro", "11B", "11B*"), "Gemma-2": ("arXiv-QA", "27B", "9B"),
    "Ministral": ("arXiv-QA", "8B", "8B*"), "Jamba": ("MMLU-pro", "52B*", "OOM"),
    "character.ai": ("MMLU-pro", "70B*", "8B"), "PyramidKV": ("MMLU-pro", "70B*", "8B"),
    "Llama": ("MMLU-pro", "70B*", "8B"),
}  # fmt: skip
JAMBA_L4 = CASES["Jamba"][0]._replace(device=L4)
PLANS, OOM = "plans", "OOM"


class Cell(NamedTuple):
    """A model on a device. `weights`: bytes in this engine, in FP8 where the paper's are. `left`: bytes that the budget
    leaves for KV. Then tokens in every layer, the bytes of a large page, and whether the longest request fits two-level
    pages and uniform ones (None: no request fits)."""

    model: str
    device: str
    paper: str
    label: str
    workload: str
    weights: int
    left: int
    tokens: int = 0
    large: int = 0
    fits: bool | None = None
    uniform: bool | None = None

    @property
    def verdict(self) -> str:
        return PLANS if self.fits else OOM


def weights(case: Case) -> int:
    """Return the bytes of a case's weights, with the vision encoder. FP8 is that of --quantization fp8: with scales,
    and with embeddings, head and vision encoder in 16 bits."""
    spec = case.spec
    eyes = spec.vision.parameters if spec.vision is not None else 0
    return 2 * (spec.parameters + eyes) - (saved_bytes(case.shape, FP8_ON_LOAD, 2) if case.halved else 0)


def cell(model: str, case: Case, paper: str) -> Cell:
    """Plan a model into a device's budget."""
    taken = weights(case)
    left = int(SHARE * case.device.memory - taken - BESIDE)
    one = Cell(model, case.device.name, paper, case.label, case.workload, taken, left)
    if left <= 0:
        return one
    sketches = case.sketches()
    most = max(burst(sketches, case.eyes), key=lambda asked: _length(asked))
    found: dict[str, Any] = {}
    for rule in ("jenga", "uniform"):
        try:
            plant = case._replace(kv_gib=left / 2**30).plant(rule)
            memory = plant.simulation().engine.scheduler.memory
        except StartupError:
            continue
        found[rule] = memory.fits([_length(most)], len(most.prompt), most.media)
        if rule == "jenga":
            found["tokens"], found["large"] = plant.kv_tokens, memory.kv_config.large_bytes
    return one._replace(
        tokens=found.get("tokens", 0), large=found.get("large", 0), fits=found.get("jenga", False),
        uniform=found.get("uniform", False),
    )  # fmt: skip


def _length(asked: TraceRequest) -> int:
    return len(asked.prompt) + (asked.params.max_tokens or 0)


def table_1() -> Reproduction:
    """Plan every model on both devices."""
    found = []
    for model, (_, *sizes) in PAPER.items():
        cases = CASES[model] if model != "Jamba" else (*CASES[model], JAMBA_L4)
        found += [cell(model, case, size) for case, size in zip(cases, sizes, strict=True)]
    data: Any = [one._asdict() for one in found]
    return Reproduction(judged(found), text(found), lambda: draw(data), data)


def judged(found: Sequence[Cell]) -> list[Result]:
    """Judge that a model fits where the paper has a size, and doesn't where it has OOM."""
    results = []
    for one in found:
        what = f"{one.label}, {one.workload.partition('@')[0]} (Table 1: {one.paper})"
        results.append(equal("J-T1", what, OOM if one.paper == OOM else PLANS, one.verdict))
        if one.left > 0:
            results.append(measured("J-T1", f"{one.label}: left for KV", round(one.left / GB, 2), "GB"))
        else:
            results.append(measured("J-T1", f"{one.label}: too much by", round(-one.left / GB, 2), "GB"))
    return results


def text(found: Sequence[Cell]) -> str:
    head = ("model", "data set", "weights GB", "left GB", "KV tokens", "large page KiB", "longest fits", "over uniform")
    said = {None: "-", True: "yes", False: "no"}
    rows = [
        (one.label, PAPER[one.model][0], f"{one.weights / GB:.2f}", f"{one.left / GB:.2f}", f"{one.tokens:,}",
         f"{one.large / 1024:,.0f}" if one.large else "-", said[one.fits], said[one.uniform])
        for one in found
    ]  # fmt: skip
    return (
        f"* in FP8, as --quantization fp8 has it: scales beside, embeddings, head and eyes in 16 bits\n"
        f"{table(head, rows)}\n"
        f"Left: {SHARE} of the device less weights and {BESIDE / GB:g} GB. KV tokens: in every layer, as --kv-tokens "
        f"counts them.\nThe longest request of the data set (Figure 13's sample), alone, over LCM pages and over "
        f"uniform ones.\nFigure 13's budgets count one byte for each weight instead."
    )


def draw(data: Sequence[dict[str, Any]]) -> Figure:
    """Draw a bar for each cell: the device's memory for weights, and the rest for KV."""
    from quire.bench.plots import COLOURS, figure

    fig = figure(8, 5)
    axes = fig.add_subplot()
    names = [one["label"] for one in data]
    sizes = [one["weights"] / GB for one in data]
    axes.barh(names, sizes, color=COLOURS[0], label="weights")
    axes.barh(names, [max(one["left"], 0) / GB for one in data], left=sizes, color=COLOURS[2], label="left for KV")
    for i, one in enumerate(data):
        axes.annotate(PLANS if one["fits"] else OOM, (max(sizes[i], 0) + max(one["left"], 0) / GB + 0.5, i),
                      va="center", fontsize=8)  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlim(right=1.1 * max(sizes))
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("GB (of 80 and of 24)")
    axes.legend(fontsize=8)
    fig.suptitle("Jenga Table 1: models, data sets and devices")
    return fig
