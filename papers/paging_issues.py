"""List vAttention's Tables 1 and 2: the issues it cites in other systems, each with the entry that measures it here,
and the systems compared with this one.

Only lines of code are measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from papers.code_size import ROOT, code_lines
from papers.result import Reproduction, Result, cited, measured
from quire.bench.document import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Issue(NamedTuple):
    """An issue of Table 1. `number` is the paper's, `percent` the same as an overhead, `here` the entries that measure
    it."""

    system: str
    what: str
    number: float | None
    unit: str
    percent: float | None
    source: str
    here: str


ISSUES = [
    Issue("vLLM", "decode kernel slower than FlashAttention's, up to", 2.85, "times", 185, "Figure 9b",
          "vattention-fig9"),
    Issue("vLLM", "effect of the block size on its kernel's time, up to", 3, "times", 200, "Figure 5",
          "vattention-fig5"),
    Issue("FlashAttention", "paged kernel slower than the vanilla one, up to", 12, "%", 12, "Figure 3",
          "vattention-fig3"),
    Issue("FlashAttention", "first attempts to add paging failed unit tests", None, "", None, "its [15]",
          "pytest tests/kernels"),
    Issue("TensorRT-LLM", "throughput lost in a Python front-end, more than", 10, "%", 10, "its [13]",
          "vattention-x2, step-overhead"),
    Issue("TensorRT-LLM", "latency with paging even in C++, up to", 5, "%", 5, "Table 1", "nothing"),
    Issue("FlashInfer", "paged prefill raises the time to the first token, up to", 45, "%", 45, "Table 6",
          "vattention-table6"),
]  # fmt: skip
FIGURE_5 = 3.31  # its largest label
TENSORRT = (412, 365)  # tokens a second, §3.3.2
TABLE_6 = (59.91, 41.35)  # s to the first token, Llama-3-8B, 192K: FlashInfer paged, over vAttention

PROPERTIES = (
    "memory management in user code", "KV-cache fragmentation", "KV-cache allocation", "portable wrt GPU code",
    "programming effort, GPU", "programming effort, CPU",
)  # fmt: skip
SYSTEMS = {  # Table 2, with this system's values
    "vLLM": ("block tables", "low", "fast", "no", "high", "high"),
    "FlashInfer": ("compressed block tables", "low", "fast", "no", "high", "high"),
    "vAttention": ("none", "low", "slow", "yes", "none", "low"),
    "quire, paged": ("a ledger, page tables", "low", "fast", "no", "kernels of its own", "the ledger"),
    "quire, virtual": ("the same ledger", "low", "slow", "yes", "none", "the ledger, a driver"),
}
CHANGED = {  # lines that paging took, as reported in §7 (implementation effort)
    "FlashInfer's decode kernel into vLLM, over 15 files, more than": 600,
    "paging in FlashAttention's kernel, about": 280,
}
KEPT = {  # files below the package
    "memory in user code: all memories' ledgers and policies": "memory",
    "drivers of virtual memory": "worker/virtual",
}


def table_1() -> Reproduction:
    """List each issue with the entry that measures it. The text compares the paper's numbers with its claims."""
    before, after = TENSORRT
    paged, vanilla = TABLE_6
    results = [cited("V-T1", f"{one.system}: {one.what}", one.number, one.here, one.unit) for one in ISSUES]
    results.append(cited("V-X3", f"TensorRT-LLM: throughput lost, {before} to {after} tokens/s", 11, "nothing", "%"))
    rows = [(i.system, i.what, "-" if i.number is None else f"{i.number:g} {i.unit}", i.source, i.here) for i in ISSUES]
    text = f"""{table(("system", "issue", "paper", "its source", "here"), rows)}

By the paper's own numbers: Figure 5's largest label is {FIGURE_5}, and Table 6 has {paged} s against {vanilla}, {
        100 * (paged / vanilla - 1):.1f} %.
Of TensorRT-LLM (§3.3.2): throughput fell from {before} to {after} tokens/s, {
        100 * (1 - after / before):.1f} %. "This issue was attributed to the
Python runtime of TensorRT-LLM and moving to a C++ runtime can mitigate the CPU overhead." This engine plans in
Python while the device computes, so that its time shows only where a step is shorter than a plan."""
    return Reproduction(results, text, _draw_issues)


def _draw_issues() -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(10, 3.4)
    axes = fig.add_subplot()
    told = [issue for issue in ISSUES if issue.percent is not None]
    names = [f"{issue.system}: {issue.what}" for issue in told]
    bars = axes.barh(names, [issue.percent or 0 for issue in told], color=COLOURS[4], height=0.6)
    axes.bar_label(bars, [f"{i.number:g} {i.unit} ({i.source}); here: {i.here}" for i in told], padding=4, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 380)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("overhead as cited, %")
    axes.spines[["top", "right"]].set_visible(False)
    fig.suptitle("vAttention Table 1: issues that paging brings, as cited")
    return fig


def table_2() -> Reproduction:
    """List the systems, with the lines of memory code here and those that the paper counts in others."""
    counted = lines_here()
    results: list[Result] = [cited("V-T2", what, lines, "vattention-fig12", "lines") for what, lines in CHANGED.items()]
    results += [measured("V-T2", what, lines, "lines of code") for what, lines in counted.items()]
    rows = [(name, *values) for name, *values in zip(PROPERTIES, *SYSTEMS.values())]
    text = (
        f"{table(('', *SYSTEMS), rows)}\n\n"
        "The first three as the paper has them; TensorRT-LLM, LightLLM and FlashAttention page as vLLM does, it says.\n"
        "quire's columns are its own judgement. One ledger counts pages for both memories, so that prefixes, forks,\n"
        "preemption and swapping work over virtual memory too: it is not gone from user code, but no kernel reads its\n"
        "tables. Fragmentation: vattention-table8, c1; allocation: vattention-table3; portability: vattention-fig12."
    )
    return Reproduction(results, text, lambda: _draw_lines(counted))


def lines_here(root: Path = ROOT) -> dict[str, int]:
    """Return the lines of code of the files in KEPT that exist."""
    return {
        what: sum(code_lines(path) for path in (root / folder).rglob("*.py"))
        for what, folder in KEPT.items()
        if (root / folder).is_dir()
    }


def _draw_lines(counted: dict[str, int]) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(9, 2.6)
    axes = fig.add_subplot()
    names = [*CHANGED, *(f"quire, {what}" for what in counted)]
    colours = [COLOURS[4]] * len(CHANGED) + [COLOURS[0]] * len(counted)
    bars = axes.barh(names, [*CHANGED.values(), *counted.values()], color=colours, height=0.6)
    axes.bar_label(bars, fmt="{:,.0f}", padding=4)
    axes.invert_yaxis()
    axes.set_xlim(right=1.15 * max(*CHANGED.values(), *counted.values()))
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("lines; grey: changed for paging, as the paper counts; blue: of code, here")
    axes.spines[["top", "right"]].set_visible(False)
    fig.suptitle("vAttention Table 2, §7: what managing memory takes")
    return fig
