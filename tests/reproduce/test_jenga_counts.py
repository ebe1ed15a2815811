"""Jenga's entries that only count: Figure 12's steps, Table 1's plans, lines of code."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.reproduce import code_taken, model_matrix, picture_steps
from quire.reproduce.code_size import ROOT
from quire.reproduce.model_matrix import PAPER, Cell, cell, judged
from quire.reproduce.result import DIFFERS, HOLDS, MEASURED
from quire.reproduce.unlike_serving import L4
from quire.reproduce.unlike_throughput import CASES


def test_figure_12_is_the_papers() -> None:
    done = picture_steps.timelines()
    assert {one.verdict for one in done.results if one.verdict != MEASURED} == {HOLDS}
    assert len(picture_steps.draw(done.data).axes) == 3
    late = {way: [step._replace(left=9) for step in picture_steps.figure_12(way)] for way in picture_steps.WAYS}
    verdicts = [one.verdict for one in picture_steps.judged(late)]
    assert verdicts[:6] == [DIFFERS] * 6
    assert picture_steps.peak(late["pages"]) == 16


def test_models_plan_where_the_paper_has_them() -> None:
    """Two that fit, one whose longest request uniform pages can't hold, and one that is too large."""
    small = cell("Llama", CASES["Llama"][1], "8B")
    assert (small.fits, small.uniform) == (True, True)
    assert small.left == pytest.approx(0.95 * 24e9 - 1.5e9 - small.weights, abs=1)
    long = cell("Ministral", CASES["Ministral"][1], "8B*")
    assert (long.fits, long.uniform) == (True, False)
    seeing = cell("Llama Vision", CASES["Llama Vision"][1], "11B*")
    assert seeing.fits
    assert seeing.weights > 2 * 895_000_000 + 9_775_000_000, "eyes aren't in FP8"
    too_large = cell("Jamba", model_matrix.JAMBA_L4, "OOM")
    assert too_large.fits is None
    assert too_large.left < -25e9
    results = judged([small, long, seeing, too_large])
    assert {one.verdict for one in results if one.verdict != MEASURED} == {HOLDS}
    assert [one.what for one in results if "too much" in one.what] == ["jamba-52b*, L4: too much by"]
    wrong = judged([small._replace(fits=False), too_large._replace(paper="52B*")])
    assert {one.verdict for one in wrong if one.verdict != MEASURED} == {DIFFERS}
    assert len(model_matrix.draw([one._asdict() for one in (small, too_large)]).axes) == 1


def test_all_of_table_1_is_there() -> None:
    assert list(PAPER) == ["Llama Vision", *(name for name in CASES if name != "Llama Vision")]
    for model, (_, *sizes) in PAPER.items():
        for case, size in zip(CASES[model], sizes):
            assert case.halved == size.endswith("*"), f"{model}, {size}"
            assert case.model.endswith(f"-{size.rstrip('*').lower()}")
    assert model_matrix.JAMBA_L4.device == L4
    assert Cell("", "", "", "", "", 1, -1).verdict == "OOM"


def test_lines_are_those_of_files_that_are_there(tmp_path: Path) -> None:
    named = [name for names in code_taken.PARTS.values() for name in names]
    assert len(set(named)) == len(named)
    assert [name for name in named if not (ROOT / name).exists()] in ([], ["data/runner/crossing.py"])
    (tmp_path / "jenga.py").write_text('"""A text."""\n\nx = 1  # a comment\n')
    (tmp_path / "kernel.cu").write_text("int x;\nint y;\n")
    assert [size[1:] for size in code_taken.sizes(tmp_path) if size.files] == [(1, 3, 1)]
    assert code_taken.foreign(tmp_path) == 2
    assert code_taken.foreign() == 0
    assert code_taken.code_taken().results[1].verdict == HOLDS
