"""What vAttention says of other systems is cited, not judged; lines of code are counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_reproduce import reproduced

from quire.reproduce.code_size import ROOT
from quire.reproduce.paging_issues import CHANGED, ISSUES, lines_here
from quire.reproduce.result import CITED, MEASURED


@pytest.mark.parametrize("name", ["vattention-table1", "vattention-table2"])
def test_entries_run(name: str, tmp_path: Path) -> None:
    results = reproduced(name, tmp_path)["results"]
    told = [result for result in results if result["verdict"] == CITED]
    assert len(told) == (len(ISSUES) + 1 if name == "vattention-table1" else len(CHANGED))
    assert all(isinstance(result["ours"], str) and result["ours"] for result in told), "where it is told of here"
    assert {result["verdict"] for result in results} <= {CITED, MEASURED}


def test_lines_are_counted_where_there_are_any(tmp_path: Path) -> None:
    (tmp_path / "control" / "memory").mkdir(parents=True)
    (tmp_path / "control" / "memory" / "one.py").write_text('"""Said."""\n\nx = 1\ny = 2\n')
    assert list(lines_here(tmp_path).values()) == [2]
    (tmp_path / "data" / "runner" / "virtual").mkdir(parents=True)
    (tmp_path / "data" / "runner" / "virtual" / "one.py").write_text("x = 1\n")
    assert list(lines_here(tmp_path).values()) == [2, 1]
    assert next(iter(lines_here(ROOT).values())) > 500
