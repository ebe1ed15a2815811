"""What vAttention says of other systems is cited, not judged; lines of code are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.reproduce import main
from quire.reproduce.code_size import ROOT
from quire.reproduce.paging_issues import CHANGED, ISSUES, PROPERTIES, SYSTEMS, lines_here
from quire.reproduce.result import CITED, MEASURED


@pytest.mark.parametrize("name", ["vattention-table1", "vattention-table2"])
def test_entries_run(name: str, tmp_path: Path) -> None:
    assert main([name, "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / f"{name}.json").read_text())
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    told = [result for result in content["results"] if result["verdict"] == CITED]
    assert len(told) == (len(ISSUES) + 1 if name == "vattention-table1" else len(CHANGED))
    assert all(isinstance(result["ours"], str) and result["ours"] for result in told), "where it is told of here"
    assert {result["verdict"] for result in content["results"]} <= {CITED, MEASURED}


def test_what_table_1_says() -> None:
    numbers = [(issue.system, issue.number) for issue in ISSUES]
    assert numbers == [
        ("vLLM", 2.85), ("vLLM", 3), ("FlashAttention", 12), ("FlashAttention", None), ("TensorRT-LLM", 10),
        ("TensorRT-LLM", 5), ("FlashInfer", 45),
    ]  # fmt: skip
    for issue in ISSUES:
        if issue.number is not None:
            assert issue.percent == pytest.approx(100 * (issue.number - 1) if issue.unit == "times" else issue.number)


def test_every_system_has_every_property() -> None:
    assert {len(values) for values in SYSTEMS.values()} == {len(PROPERTIES)}


def test_lines_are_counted_where_there_are_any(tmp_path: Path) -> None:
    (tmp_path / "control" / "memory").mkdir(parents=True)
    (tmp_path / "control" / "memory" / "one.py").write_text('"""Said."""\n\nx = 1\ny = 2\n')
    assert list(lines_here(tmp_path).values()) == [2]
    (tmp_path / "data" / "runner" / "virtual").mkdir(parents=True)
    (tmp_path / "data" / "runner" / "virtual" / "one.py").write_text("x = 1\n")
    assert list(lines_here(tmp_path).values()) == [2, 1]
    assert next(iter(lines_here(ROOT).values())) > 500
