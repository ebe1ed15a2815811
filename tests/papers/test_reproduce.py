"""Every entry of `quire reproduce` runs, holds where the clock has no say, and writes its document and picture."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

import papers
from papers import ENTRIES, main
from papers.entry import BY_ARITHMETIC, CITED, DIFFERS, HOLDS, MEASURED, MET, MISSED, VERDICTS, Point, Points, Run
from quire.errors import StartupError

RESULT = {"row", "what", "paper", "ours", "unit", "verdict", "real_or_simulated", "why"}
MIXED = {  # of whose numbers some are claimed by nobody
    "vattention-table1", "vattention-table2", "vattention-table4", "vattention-table8", "vattention-fig12",
    "jenga-fig3", "jenga-fig6", "jenga-fig7", "jenga-fig8", "jenga-fig9", "jenga-fig10", "jenga-fig11", "jenga-fig12",
    "jenga-table1", "jenga-x2", "jenga-x3", "jenga-x5",
}  # fmt: skip
APART = {  # they have tests of their own
    "fig1", "fig2", "fig11", "fig13", "fig14", "fig15", "fig16", "fig17", "fig18b", "fig19a", "fig19b", "table-scope",
    "step-overhead", "x4", "r1", "c1", "c5", "vattention-table3", "vattention-table7", "vattention-fig11",
    "vattention-x2", "vattention-views", "llama-70b-tp",
    *(name for name in ENTRIES if name.startswith(("fig12", "jenga-"))),
} - MIXED  # fmt: skip


def reproduced(name: str, folder: Path) -> dict[str, Any]:
    status = main([name, "--out", str(folder)])
    content: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    assert set(content) - {"data"} == {"name", "command", "machine", "date", "real", "results", "text"}
    real = all(result["real_or_simulated"] != "simulated" for result in content["results"])
    assert (content["name"], content["real"]) == (name, real)
    assert content["results"]
    for result in content["results"]:
        assert set(result) == RESULT
        assert result["verdict"] in VERDICTS
    assert status == any(result["verdict"] in (DIFFERS, MISSED) for result in content["results"])
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return content


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if name not in APART and not entry.gpu])
def test_entry_holds(name: str, tmp_path: Path) -> None:
    verdicts = {result["verdict"] for result in reproduced(name, tmp_path)["results"]}
    assert verdicts <= {HOLDS, BY_ARITHMETIC, MET, *((MEASURED, CITED) if name in MIXED else ())}


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.gpu])
def test_they_need_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(StartupError, match=r"measures a GPU, and torch finds none.*Run it beside a GPU"):
        ENTRIES[name].run()


def test_what_is_served_has_the_papers_mean_lengths(tmp_path: Path) -> None:
    content = reproduced("fig11", tmp_path)
    assert [result["verdict"] for result in content["results"]] == [MEASURED] * 4
    assert all(abs(result["ours"] / result["paper"] - 1) < 0.05 for result in content["results"])


def test_a_changed_checkout_gets_no_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for revision, refused in (("abc-dirty", True), ("abc", False), (None, False)):
        monkeypatch.setattr(papers, "revision", lambda revision=revision: revision)
        papers.refuse_changed_tree(tmp_path)
        with pytest.raises(StartupError, match="the code of this checkout is changed") if refused else nullcontext():
            papers.refuse_changed_tree(papers.ROOT / "docs")


def test_documents_are_judged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reproduced("table1", tmp_path)
    path = tmp_path / "table1.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "results": [], "text": ""}))
    assert main(["--judge", str(tmp_path)]) == 0
    assert json.loads(path.read_text()) == content
    path.write_text(json.dumps({**content, "data": [{"model": "opt-13b"}]}))
    with pytest.raises(StartupError, match="have no 'parameters'"):
        main(["--judge", str(tmp_path)])


def test_several_entries_end_with_a_table_of_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table1", "x1"]) == 0
    head, *rows = capsys.readouterr().out.rstrip().split("\n")[-3:]
    assert head.split()[:2] == ["entry", "holds"]
    assert [row.split()[0] for row in rows] == ["table1", "x1"]


def test_list_and_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    head, *groups = capsys.readouterr().out.split("\n\n")
    assert head.split() == ["name", "takes", "needs", "what"]
    listed = {paper: [line.split() for line in lines] for paper, *lines in map(str.splitlines, groups)}
    assert [*listed] == ["PagedAttention", "vAttention", "Jenga", "quire"]
    assert [line[0] for lines in listed.values() for line in lines] == [*ENTRIES]
    assert ["fig6", "seconds", "Figure", "6:"] in [line[:4] for line in listed["PagedAttention"]]
    assert ["vattention-table6", "minutes", "GPU"] in [line[:3] for line in listed["vAttention"]]
    for name, *words in (line for lines in listed.values() for line in lines):
        assert (words[1] == "GPU") == ENTRIES[name].gpu
    with pytest.raises(StartupError, match=r"fig99.*Known: fig1"):
        main(["fig99"])


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_how_long_an_entry_runs(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    stream, points = io.StringIO(), Run.points
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)

    def slow(run: Run, full: bool, changes: Point) -> Points:
        if terminal:
            wait_until(lambda: "x1: 0 s; it takes seconds" in stream.getvalue(), "no time is shown")
        return points(run, full, changes)

    monkeypatch.setattr(Run, "points", slow)
    monkeypatch.setattr("papers.SHOWN_AFTER", 0.0)
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(["x1"]) == 0
    assert stream.getvalue().endswith("\r\x1b[K" if terminal else "")
    assert bool(stream.getvalue()) == terminal


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for flags, told in (([], 1), (["--no-pictures"], 0)):
        assert main(["x1", "--out", str(tmp_path), *flags]) == 0
        assert capsys.readouterr().err.count("pip install 'quire[plot]'") == told
        assert [path.name for path in tmp_path.iterdir()] == ["x1.json"]
    with pytest.raises(StartupError, match="matplotlib is not installed"):
        main(["--draw", str(tmp_path)])


def test_parameters_are_changed(capsys: pytest.CaptureFixture[str]) -> None:
    entry = ENTRIES["fig12c-gpu"]
    texts = ["tp=2", "model=opt-125m", "seconds=30", "real=[1.3, 0.5]", "device=cpu"]
    changes = {"tp": 2, "model": "opt-125m", "seconds": 30.0, "real": (1.3, 0.5), "device": "cpu"}
    assert entry.parse_changes(texts) == changes
    assert type(entry.parse_changes(["seconds=30"])["seconds"]) is float
    for wrong, why in (
        ("speed=2", "names no parameter.*Known: model, workload, tp"), ("tp=two", "another type than 8"),
        ("tp=2.5", "another type than 8"), ("real=1", "another type"), ("tp", "another type"),
    ):  # fmt: skip
        with pytest.raises(StartupError, match=why):
            main(["fig12c-gpu", "--set", wrong])
    with pytest.raises(StartupError, match="Known: none"):
        main(["fig2", "--set", "cases=[]"])


def test_simulated_is_of_all() -> None:
    with pytest.raises(StartupError, match="--simulated is given without --all"):
        main(["x1", "--simulated"])


def test_imports_are_light() -> None:
    """Measuring works where neither the server's libraries nor matplotlib are installed, as on the GPU machine."""
    code = (
        "import sys, quire.cli, quire.bench, papers as r; from importlib import import_module\n"
        "[import_module('papers.' + run.runner.partition(':')[0]) for e in r.ENTRIES.values() for run in e.runs]\n"
        "r.main(['--list'])\n"
        "absent = 'pydantic', 'fastapi', 'uvicorn', 'starlette', 'msgspec', 'matplotlib', 'tokenizers'\n"
        "print([name for name in absent if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
