"""Compare with Jenga §7: "about 4000 lines of Python code on top of vLLM", and no CUDA kernel changed. Counted here are
the lines of this package's files that exist because layers keep different kinds of memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from papers.code_size import ROOT, Size, code_lines
from papers.result import MEASURED, Reproduction, Result, equal
from quire.bench.document import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = 4000
PARTS = {  # files below the package, by purpose
    "large pages, and pages in them": (
        "memory/jenga/two_level_pool.py", "memory/jenga/partial_pages.py", "memory/jenga/page_sizes.py",
        "memory/page_layout.py",
    ),
    "layer types and what they keep": (
        "memory/policies.py", "memory/requirements.py", "memory/jenga/retention.py", "memory/jenga/compaction.py",
        "memory/prefix_waiters.py",
    ),
    "pictures": ("memory/encoder_cache.py", "core/encoder_budget.py"),
    "several models in one pool": ("memory/jenga/shared_pool.py", "pool.py"),
    "the paper's own interface": ("jenga.py",),
    "the runner's side": (
        "worker/cache_views.py", "worker/prompt_lengths.py", "worker/image_inputs.py", "worker/cross_attention.py",
    ),
}  # fmt: skip
CUDA = {".cu", ".cuh"}


def sizes(root: Path = ROOT) -> list[Size]:
    """Return the sizes of the existing files of each part."""
    found = []
    for part, names in PARTS.items():
        files = [root / name for name in names if (root / name).exists()]
        lines = sum(len(path.read_text().splitlines()) for path in files)
        found.append(Size(part, len(files), lines, sum(map(code_lines, files))))
    return found


def foreign(root: Path = ROOT) -> int:
    """Count the lines of CUDA in the package. Its C++ is for CPUs alone."""
    files = (path for path in root.rglob("*") if path.suffix in CUDA)
    return sum(len(path.read_text(errors="replace").splitlines()) for path in files)


def code_taken() -> Reproduction:
    """Count lines that hold code, by the counter of x4. The number of lines is no claim; that none are CUDA's is."""
    counted = sizes()
    total = sum(size.code for size in counted)
    results = [
        Result(
            "J-X3", "lines of Python for layers that keep unlike things", f"about {PAPER}", total, "lines", MEASURED
        ),
        equal("J-X3", "lines of CUDA for them, and in the package", 0, foreign(), "lines"),
        *(Result("J-X3", size.part, None, size.code, "lines", MEASURED) for size in counted),
    ]
    whole = Size("all", sum(s.files for s in counted), sum(s.lines for s in counted), total)
    note = (
        "Files that would not be there, or hardly, if all layers kept the same of every token; those of models, of\n"
        "their kernels (Triton) and of vision encoders are not among them, nor were they among the paper's."
    )
    text = f"{table(('part', 'files', 'lines', 'of code'), [*counted, whole])}\n{note}"
    return Reproduction(results, text, lambda: _draw(counted))


def _draw(counted: list[Size]) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(8, 3)
    axes = fig.add_subplot()
    bars = axes.barh([size.part for size in counted], [size.code for size in counted], color=COLOURS[0])
    axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"lines of code (the paper's: about {PAPER:,})")
    axes.spines[["top", "right"]].set_visible(False)
    fig.suptitle("Jenga: what it took, in lines of Python")
    return fig
