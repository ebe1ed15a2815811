"""tools/compare_gpu.py: ratios from both engines' runs, and a run of quire alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))  # scripts, not a part of the package

import compare_gpu


def made_up(engine: str, *seconds: float) -> dict[str, Any]:
    case = {"name": "fixed:8:4@1", "prompts": [[1] * 8], "outputs": [4]}
    runs = [compare_gpu.describe_run({**case, "seed": seed}, value) for seed, value in enumerate(seconds)]
    return {"model": "llama-125m", "engine": engine, "ready_s": 1.0, "runs": runs}


def test_ratios_are_of_equal_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = [made_up("quire", 1.0, 2.0, 4.0), made_up("vllm", 2.0, 2.0, 6.0)]
    [one] = compare_gpu.ratios(results)
    assert (one["ratios"], one["median"]) == ([2.0, 1.0, 1.5], 1.5)
    assert results[0]["runs"][1]["ms_a_step"] == 500.0
    (tmp_path / "made.json").write_text(
        json.dumps({"results": [*results, {"model": "x", "engine": "vllm", "error": "no"}]})
    )
    given = ["--draw", str(tmp_path / "made.json"), "--picture", str(tmp_path / "made.png")]
    assert compare_gpu.main(given) == 1, "an engine failed"
    assert (tmp_path / "made.png").stat().st_size > 1000
    shown = capsys.readouterr().out
    assert "1.500 (1.000-2.000)" in shown
    assert "vllm, x: no" in shown


@pytest.mark.full
def test_an_engine_in_a_process(tmp_path: Path) -> None:
    given = ["llama-125m", "--workloads", "fixed:8:4@1", "sampled:fixed:16:4@3", "--seeds", "1", "--out",
             str(tmp_path / "out.json"), "--settings"]  # fmt: skip
    assert compare_gpu.main([*given, '{"device": "cpu", "kv_tokens": 2048}']) == 0
    [result] = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [run["workload"] for run in result["runs"]] == ["fixed:8:4@1", "sampled:fixed:16:4@3"]
    assert compare_gpu.main([*given, '{"device": "cpu", "kv_tokens": 7}']) == 1
    [result] = json.loads((tmp_path / "out.json").read_text())["results"]
    assert "Use --max-model-len 16 or less" in result["error"]
