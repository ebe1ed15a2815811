"""Count lines of code of parts of the package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from papers.code_size import ROOT, code_lines


def lines_of_parts(
    parts: Mapping[str, Sequence[str]], suffixes: Iterable[str], root: Path = ROOT
) -> list[dict[str, Any]]:
    """Return the files, lines and lines of code of each part, given by files below `root` (missing ones are skipped);
    then all lines of the files with one of the suffixes."""
    points: list[dict[str, Any]] = []
    for part, names in parts.items():
        files = [root / name for name in names if (root / name).exists()]
        lines = sum(len(path.read_text().splitlines()) for path in files)
        points.append({"part": part, "files": len(files), "lines": lines, "code": sum(map(code_lines, files))})
    for suffix in suffixes:
        files = [*root.rglob(f"*{suffix}")]
        lines = sum(len(path.read_text(errors="replace").splitlines()) for path in files)
        points.append({"suffix": suffix, "files": len(files), "lines": lines})
    return points
