"""tools/compare_gpu.py: ratios from both engines' runs, and a run of quire alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import has_ended, wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))  # scripts, not a part of the package

import compare_gpu

OTHER_RESULTS = Path(__file__).parents[1] / "docs" / "measurements" / "h200x2_mixtures.json"


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


def test_an_engine_that_ended_in_the_middle_has_some_results() -> None:
    some = {**made_up("vllm", 2.0), "error": "ended with exit status -9"}
    other = compare_gpu.describe_run({"name": "fixed:8:4@3", "seed": 0, "prompts": [[1]], "outputs": [4]}, 1.0)
    whole = made_up("quire", 1.0)
    whole["runs"].append(other)
    shown = compare_gpu.show([whole, some])
    assert "2.000 (2.000-2.000)" in shown
    assert shown.endswith("vllm, llama-125m: ended with exit status -9")
    [line] = [line for line in shown.splitlines() if line.startswith("fixed:8:4@3")]
    assert line.split()[-2:] == ["4", "-"]


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    args = compare_gpu.make_parser().parse_args(["llama-125m", "--vllm", str(killed), "--workloads", "fixed:8:4@1"])
    assert compare_gpu.run_one(args, "llama-125m", "vllm")["error"] == "ended with exit status -9"


def test_an_engine_that_takes_too_long_ends_with_its_processes(tmp_path: Path) -> None:
    slow, child = tmp_path / "python", tmp_path / "child"
    slow.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {child}\nwait\n")
    slow.chmod(0o755)
    args = compare_gpu.make_parser().parse_args(["llama-125m", "--vllm", str(slow), "--timeout", "1"])
    assert compare_gpu.run_one(args, "llama-125m", "vllm")["error"] == "took more than 1.0 s"
    wait_until(lambda: has_ended(int(child.read_text())), "the child has ended")


@pytest.mark.parametrize(
    ("given", "words"),
    [([], "Name a shape"), (["llama-125m", "llama-9"], "no model config 'llama-9'"),
     (["gemma-3-4b-vision"], "has images"),
     (["llama-125m", "--workloads", "fixed:8:4@1", "sampled:none@1"], "no workload 'none@1'"),
     (["llama-125m", "--vllm", "/none/python"], "--vllm is /none/python"),
     (["llama-125m", "--out", str(Path(__file__).parent)], "can't be written"),
     (["--draw", "/none.json"], "can't be drawn"), (["--draw", __file__], "can't be drawn"),
     (["--draw", str(OTHER_RESULTS)], "can't be drawn")],
)  # fmt: skip
def test_arguments_are_refused(given: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is measured."""
    monkeypatch.setattr(compare_gpu, "run_one", None)
    with pytest.raises(SystemExit, match=words):
        compare_gpu.main(given)


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
