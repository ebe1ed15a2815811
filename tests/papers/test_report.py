"""The report of reproductions: what it shows of each document, in which order, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from papers import ENTRIES, main
from papers.entry import DIFFERS, HOLDS, MEASURED, Entry, Result
from papers.report import report
from quire.errors import StartupError

MACHINE = {"cpu": "a CPU", "logical_cores": 2, "gpu": None, "threads": 1, "torch": "2.13", "revision": "abc"}
KNOWN = {
    "x1": Entry("KV of a token", "a:b"),
    "fig9": Entry("A figure", "a:b"),
    "fig9a": Entry("A panel", "a:b", part_of="fig9"),
}


def put(folder: Path, stem: str, name: str, results: list[Result], text: str | None = None, **machine: Any) -> None:
    content = {
        "name": name, "command": f"quire reproduce {name}", "machine": MACHINE | machine, "date": "2026-11-21T10:00:00",
        "real": True, "results": [result._asdict() for result in results],
    }  # fmt: skip
    (folder / f"{stem}.json").write_text(json.dumps(content if text is None else {**content, "text": text}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "measured"
    made.mkdir()
    put(
        made,
        "x1",
        "x1",
        [Result("P-X1", "a | b", 800, 812.34, "KB", HOLDS), Result("P-X1", "batch", None, 3, "", MEASURED)],
    )
    put(
        made,
        "h200_x1",
        "x1",
        [Result("P-X1", "a", None, 0.5, "KB", DIFFERS, "simulated", "another unit")],
        gpu="H200",
        threads=None,
    )
    (made / "x1.png").touch()
    return made


def test_each_document_is_told_under_its_entry(folder: Path) -> None:
    text = report(KNOWN, folder, folder.parent / "report.md")
    assert "| [x1](#x1) | KV of a token | 1 |  |  |  |  | 1 |  |" in text
    assert "| [x1](#x1) (H200) | KV of a token |  | 1 |  |  |  |  |  |" in text
    assert "| P-X1 | a \\| b | 800 | 812.3 | KB | holds | real |" in text
    assert "| P-X1 | a | - | 0.5 | KB | **differs** | simulated |\n\nWhy: another unit\n" in text
    assert "`quire reproduce x1`; a CPU, 2 logical cores, one thread, torch 2.13, 2026-11-21, revision abc." in text
    assert "`quire reproduce x1`; H200, a CPU, 2 logical cores, torch 2.13, 2026-11-21, revision abc." in text
    assert "![x1](measured/x1.png)" in text
    assert "![h200_x1]" not in text  # it has no picture
    assert text.index("## x1") < text.index("### On H200") < text.index("## Not yet run")


def test_what_an_entry_says_is_told(folder: Path) -> None:
    path = folder.parent / "report.md"
    assert "```" not in report(KNOWN, folder, path), "older documents have no text"
    put(folder, "x1", "x1", [], text="page  ms\n   1  2\nonly roughly\n")
    assert "\n\n```text\npage  ms\n   1  2\nonly roughly\n```\n\n`quire" in report(KNOWN, folder, path)


def test_what_was_not_run_is_said(folder: Path) -> None:
    path = folder.parent / "report.md"
    missing = report(KNOWN, folder, path).partition("## Not yet run")[2]
    assert "`fig9`: A figure" in missing
    assert "`fig9a`" not in missing  # a panel is part of the whole
    put(folder, "fig9", "fig9", [])
    assert "## Not yet run" not in report(KNOWN, folder, path)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    assert main(["--report", str(path), "--from", str(folder)]) == 0
    assert path.read_text() == report(ENTRIES, folder, path)
    with pytest.raises(StartupError, match="belong together"):
        main(["--report", str(path)])
    with pytest.raises(StartupError, match="has no documents"):
        main(["--report", str(path), "--from", str(tmp_path)])
    with pytest.raises(StartupError, match="can't be written"):
        main(["--report", str(tmp_path / "no" / "report.md"), "--from", str(folder)])


@pytest.mark.parametrize("content", ["{", "[]", '{"name": "x1"}'])
def test_other_files_are_refused(folder: Path, content: str) -> None:
    (folder / "other.json").write_text(content)
    with pytest.raises(StartupError, match=r"other\.json is not a document"):
        report(KNOWN, folder, folder.parent / "report.md")


def test_the_committed_report_is_what_the_committed_documents_say() -> None:
    docs = Path(__file__).parents[2] / "docs"
    path = docs / "reproduction.md"
    command = "quire reproduce --report docs/reproduction.md --from docs/measurements/reproduce"
    same = path.read_text() == report(ENTRIES, docs / "measurements" / "reproduce", path)
    assert same, f"docs/reproduction.md is stale: {command}"
