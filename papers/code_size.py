"""Compare the size of this system with PagedAttention §5: "8.5K lines of Python and 2K lines of C++/CUDA code".

Lines of the package's own files are counted if they hold code; blank lines, comments and docstrings are not.
"""

from __future__ import annotations

import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import quire
from papers.result import MEASURED, Reproduction, Result
from quire.bench.document import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(quire.__file__).parent
PAPER = {"Python": 8.5, "kernels": 2.0}  # thousands of lines
OTHER, KERNELS, MEASURING = "text and Python API", "kernels", "measuring"
PARTS = {  # files and folders below the package; a file belongs to the longest name that it begins with
    "control plane": ("core", "memory", "protocol", "config", "errors"),
    "runner": ("worker",),
    "models": ("layers", "models", "weights"),
    KERNELS: ("kernels",),
    "server and command line": ("server", "cli", "__main__"),
    MEASURING: ("bench", "sim"),
}
SILENT = {tokenize.COMMENT, tokenize.NL}
LAYOUT = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}


class Size(NamedTuple):
    """A part of the package: the number of its files, of all their lines, and of lines that hold code."""

    part: str
    files: int
    lines: int
    code: int


def part_of(path: Path) -> str:
    """Return the part of a file, given its path below the package."""
    named = {name: part for part, names in PARTS.items() for name in names}
    above = (path.with_suffix(""), *path.parents)
    return next((named[str(folder)] for folder in above if str(folder) in named), OTHER)


def code_lines(path: Path) -> int:
    """Count the lines with any token of code. A string that is a whole statement is documentation."""
    with tokenize.open(path) as file:
        tokens = [token for token in tokenize.generate_tokens(file.readline) if token.type not in SILENT]
    held: set[int] = set()
    for i, token in enumerate(tokens):
        if token.type in LAYOUT or (token.type == tokenize.STRING and _alone(tokens, i)):
            continue
        held.update(range(token.start[0], token.end[0] + 1))
    return len(held)


def _alone(tokens: list[tokenize.TokenInfo], i: int) -> bool:
    before = i == 0 or tokens[i - 1].type in LAYOUT
    return before and tokens[i + 1].type in LAYOUT


def sizes(root: Path = ROOT) -> Iterator[Size]:
    """Yield the size of every part, in the order of PARTS; measuring code is last."""
    files: dict[str, list[Path]] = {part: [] for part in (*PARTS, OTHER)}
    for path in sorted(root.rglob("*.py")):
        files[part_of(path.relative_to(root))].append(path)
    for part in (*(part for part in PARTS if part != MEASURING), OTHER, MEASURING):
        lines = sum(len(path.read_text().splitlines()) for path in files[part])
        yield Size(part, len(files[part]), lines, sum(code_lines(path) for path in files[part]))


def code_size() -> Reproduction:
    """Compare the serving system with the paper's; measuring code is counted apart. Neither number is a claim of
    merit."""
    counted = list(sizes())
    serving = [size for size in counted if size.part != MEASURING]
    kernels = sum(size.code for size in serving if size.part == KERNELS)
    python = sum(size.code for size in serving) - kernels
    results = [
        _beside("serving, kernels aside (the paper: Python)", PAPER["Python"], python),
        _beside("kernels (the paper: C++ and CUDA; here Triton and torch)", PAPER["kernels"], kernels),
        *(_beside(size.part, None, size.code) for size in counted if size.part != KERNELS),
    ]
    head = ("part", "files", "lines", "of code")
    whole = Size(
        "all", sum(size.files for size in counted), sum(size.lines for size in counted), sum(s.code for s in counted)
    )
    text = table(head, [*counted, whole])
    return Reproduction(results, text, lambda: _draw(counted))


def _beside(what: str, paper: float | None, lines: int) -> Result:
    return Result("P-X4", what, paper, round(lines / 1000, 1), "thousand lines of code", MEASURED)


def _draw(counted: list[Size]) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(8, 3.6)
    axes = fig.add_subplot()
    names = [size.part for size in counted]
    bars = axes.barh(names, [size.lines for size in counted], color=COLOURS[4], alpha=0.4, label="all lines")
    axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
    bars = axes.barh(names, [size.code for size in counted], color=COLOURS[0], label="code")
    axes.bar_label(bars, fmt="{:,.0f}", label_type="center", color="white", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(right=1.15 * max(size.lines for size in counted))
    axes.set_xlabel("lines (the paper's system: 8,500 of Python, 2,000 of C++ and CUDA)")
    axes.legend(loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    fig.suptitle("Size of the package by part")
    return fig
