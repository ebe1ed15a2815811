"""docs/rows.md names files, tests and documents that are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOMES = ROOT, ROOT / "src" / "quire", ROOT / "docs" / "measurements", ROOT / "docs"
NAMED = re.compile(r"[\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|json|md|cpp|h|js|mjs))")
OTHERS = re.compile(r"_[XN](?=\.)|\*")
"""What stands for several names."""


def named(text: str) -> Iterator[tuple[str, bool]]:
    """The paths in each cell of the tables; and whether it is the first one of its cell, which stands alone."""
    for line in text.splitlines():
        for cell in re.split(r"(?<!\\)\|", line)[1:-1] if line.startswith("|") else ():
            words = [word.rstrip(",;:") for code in re.findall(r"`([^`]+)`", cell) for word in code.split()]
            paths = [word for word in words if NAMED.fullmatch(OTHERS.sub("", word))]
            yield from ((path, i == 0) for i, path in enumerate(paths))


def missing(text: str) -> list[str]:
    """Those that are nowhere. Further ones of a cell may be told from a folder that the one before lies in."""
    lost, beside = list[str](), list[Path]()
    for path, first in named(text):
        homes = HOMES if first else (*HOMES, *beside)
        found = next((one for home in homes for one in home.glob(OTHERS.sub("*", path).rstrip("/"))), None)
        if found is None:
            lost.append(path)
        else:
            beside = [folder for folder in found.parents if folder.is_relative_to(ROOT / "src")]
    return lost


def test_every_path_is_there() -> None:
    text = (ROOT / "docs" / "rows.md").read_text(encoding="utf-8")
    assert sum(1 for _ in named(text)) > 500
    assert missing(text) == []


def test_one_that_is_not_is_found() -> None:
    rows = "| a | `control/scheduler.py`, `nowhere.py` | `pytest tests/test_nowhere.py` | `cpu_nowhere_X.json` |"
    assert missing(rows) == ["nowhere.py", "tests/test_nowhere.py", "cpu_nowhere_X.json"]
    assert not missing("| `control/memory/large.py`, `pages.py`, `scheduler.py` | `cpu_memory_X.json` |")
    assert missing("| `pages.py` |") == ["pages.py"]
