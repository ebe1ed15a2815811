"""The predictions of Llama-3-70B on several GPUs: what they say of two ranks is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from papers.entry import HOLDS, MET, one
from papers.pagedattention import OWN
from papers.rank_prediction import FOLDER, llama_70b
from quire.errors import StartupError

ROWS = (1, 32, 256)


def test_steps_from_kernels() -> None:
    points = llama_70b((2, 4, 8), (), ROWS, "")
    steps = {
        (p["tp"], p["what"]): p for p in points if p["by"] == "from kernels" and p["what"].startswith("decode step")
    }
    profile = json.loads((FOLDER / "h200x2_profile_70b.json").read_text())["results"]
    for rows in (1, 256):
        [measured] = [
            run["step_ms"] for run in (result.get("run", result) for result in profile)
            if run.get("rows") == rows and "prompt_tokens_per_s" not in run
        ]  # fmt: skip
        assert steps[2, f"decode step of {rows} rows"]["value"] == pytest.approx(measured)
    for rows in ROWS:
        two, four, eight = (steps[tp, f"decode step of {rows} rows"] for tp in (2, 4, 8))
        assert two["value"] / 4 < eight["value"] < four["value"] < two["value"]
        assert eight["sums"] > two["sums"]
        # a + b / N: the products of eight ranks are as far below those of four as half the way from two to four.
        assert four["products"] - eight["products"] == pytest.approx((two["products"] - four["products"]) / 2)
        assert eight["factor"] == two["factor"]


@pytest.mark.parametrize("text", [None, "", "[]", "{}"])
def test_a_document_without_results_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "llama.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(StartupError, match=r"llama\.json has no results of a measurement"):
        llama_70b((8,), ("fixed:64:32@4",), (), str(path))


def test_measured_throughput_is_judged_beside_the_simulation(tmp_path: Path) -> None:
    """8 ranks in a document of `quire bench throughput`, 10 % faster than simulated; another workload and model."""
    ahead, *_ = llama_70b((8,), ("fixed:64:32@4",), (), "")
    median = {
        "requests": 4, "prompt_tokens": 256, "output_tokens": 128, "seconds": 384 / ahead["value"] / 1.1,
    }  # fmt: skip
    path = tmp_path / "llama.json"
    path.write_text(json.dumps({"results": [
        {"workload": name, "model": model, "config": {"tp": 8}, "median": median}
        for name, model in (("fixed:64:32@4", "llama3-70b"), ("fixed:1:1@1", "llama3-70b"), ("fixed:64:32@4", "yi-6b"))
    ]}))  # fmt: skip
    points = llama_70b((8,), ("fixed:64:32@4",), (), str(path))
    real = one(points, by="real")
    assert real["value"] == pytest.approx(1.1 * ahead["value"])
    assert real["off"] == pytest.approx(1 / 1.1 - 1)
    results = OWN["llama-70b-tp"].judge(points).results
    assert [result.verdict for result in results] == [MET]


def test_two_ranks_are_simulated_as_docs_say() -> None:
    """docs/simulation.md has these errors."""
    entry = OWN["llama-70b-tp"]
    done = entry.run(changes={"ranks": (2,), "rows": ()})
    assert {result.what.split(": simulated")[0]: result.ours for result in done.results} == {
        "2 ranks, fixed:128:128@1": -0.03, "2 ranks, fixed:1000:128@32": -0.027,
        "2 ranks, fixed:1024:128@512": -0.014, "2 ranks, fixed:128:1024@256": -0.173,
    }  # fmt: skip
    assert HOLDS not in {result.verdict for result in done.results}
    assert done.draw().axes
