"""Counting lines of code: what counts, and that every module is counted once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from quire.reproduce.code_size import KERNELS, MEASURING, OTHER, PARTS, ROOT, code_lines, code_size, part_of, sizes
from quire.reproduce.result import MEASURED

CODE = {
    '"""Documentation,\nof two lines."""\n': 0,
    "# a comment\n\n\n": 0,
    "x = 1  # said of it\n": 1,
    "def f():\n    '''What it does.'''\n    return 1\n": 2,
    "x = (\n    # why\n    'text'  # what\n)\n": 3,
    "x = '''a\nb\n'''\n": 3,
    "f(\n    1,\n\n    2,\n)\n": 4,
    "class A:\n    '''Alone.'''\n": 1,
}


@pytest.mark.parametrize("source", CODE)
def test_lines_of_code(source: str, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(source)
    assert code_lines(path) == CODE[source]


counted = cache(lambda: list(sizes()))  # counting takes seconds


def test_every_file_is_counted_once() -> None:
    found = counted()
    assert {size.part for size in found} == {*PARTS, OTHER}
    assert sum(size.files for size in found) == len(list(ROOT.rglob("*.py")))
    assert all(0 < size.code < size.lines for size in found)


def test_parts() -> None:
    paths = ("control/scheduler.py", "data/kernels/triton/rope.py", "data/models/llama.py", "bench/runs.py", "llm.py")
    assert [part_of(Path(path)) for path in paths] == ["control plane", KERNELS, "models", MEASURING, OTHER]
    there = {str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.rglob("*")}
    assert not {name for names in PARTS.values() for name in names} - there, "a part names a module that is gone"


def test_the_paper_stands_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.reproduce.code_size.sizes", counted)
    python, kernels, *parts = code_size().results
    assert (python.paper, kernels.paper) == (8.5, 2.0)
    assert {result.verdict for result in (python, kernels, *parts)} == {MEASURED}
    serving = sum(result.ours for result in parts if result.what != MEASURING)
    assert python.ours == pytest.approx(serving, abs=0.05 * len(parts))
