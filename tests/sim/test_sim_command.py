"""`quire simulate`: tables, documents and pictures, rates that are found, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench.calibrate import at_once
from quire.bench.workloads import parse
from quire.cli import main
from quire.cli.simulate import plant_of
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.sim.cost import FOLDER

A100 = ["simulate", "--calibration", "a100-13b"]


def test_rates_as_a_table_a_document_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "s.json", tmp_path / "s.png"
    command = [*A100, "--workload", "alpaca@40", "--rate", "5", "20", "--out", str(out), "--plot", str(plot)]
    assert main(command) == 0
    content = json.loads(out.read_text())
    assert content["real"] is False
    assert content["command"].startswith("quire simulate --calibration a100-13b")
    assert content["calibration"]["model"] == "opt-13b"
    slow, fast = content["results"]
    assert (slow["rate"], fast["rate"]) == (5, 20)
    assert slow["requests"] == fast["requests"] == 40
    assert 0 < slow["normalised_s"]["mean"] < fast["normalised_s"]["mean"]
    assert slow["mean_running"] < fast["mean_running"]
    assert sum(slow["memory_bytes"].values()) == pytest.approx(12 * 2**30, rel=0.01)
    assert plot.read_bytes()[:4] == b"\x89PNG"
    shown = capsys.readouterr().out
    assert "KV used" in shown
    assert "15,728 tokens of KV" in shown


def test_a_rate_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "s.json", tmp_path / "s.png"
    command = [*A100, "--workload", "alpaca@60", "--find-rate", "--rate", "8", "--objective", "mean-normalised-ms=35"]
    assert main([*command, "--out", str(out), "--plot", str(plot)]) == 0
    results = json.loads(out.read_text())["results"]
    assert [run["rate"] for run in results] == sorted(run["rate"] for run in results)
    best = results[0]["highest_rate"]
    assert [run["meets"] for run in results] == [run["rate"] <= best for run in results]
    assert f"highest rate: {best:.4g} requests/s" in capsys.readouterr().out
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_a_workload_that_is_too_short_finds_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    goal = ["--find-rate", "--objective"]
    assert main([*A100, "--workload", "fixed:9:9@2", *goal, "p99-e2e-ms=9000"]) == 0
    assert "every rate meets the objectives: the workload is too short to tell" in capsys.readouterr().out
    assert main([*A100, "--workload", "fixed:9:9@2", *goal, "p99-e2e-ms=1"]) == 0
    assert "no rate meets the objectives" in capsys.readouterr().out


def test_memories_of_earlier_systems_serve_less() -> None:
    found = {}
    for memory in ("paged", "orca-oracle", "orca-max", "ft"):
        plant = plant_of(EngineConfig(memory=memory, enable_prefix_caching=False), "a100-13b")
        run = plant.simulate(at_once(parse("sharegpt@60").jobs(plant.spec.vocab_size)))
        found[memory] = run.totals
    assert found["paged"].mean_running > found["orca-oracle"].mean_running > found["orca-max"].mean_running
    seconds = [found[memory].seconds for memory in ("paged", "orca-oracle", "orca-max", "ft")]
    assert seconds == sorted(seconds)


def test_a_trace_keeps_its_times_or_is_stretched(tmp_path: Path) -> None:
    trace, out = tmp_path / "t.jsonl", tmp_path / "s.json"
    lines = [{"arrival": 2.0 * i, "prompt_len": 20, "output_len": 3} for i in range(5)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    assert main([*A100, "--trace", str(trace), "--out", str(out)]) == 0
    [run] = json.loads(out.read_text())["results"]
    assert run["rate"] is None
    assert 8 < run["seconds"] < 8.5
    assert main([*A100, "--trace", str(trace), "--rate", "1.25", "--out", str(out)]) == 0
    [run] = json.loads(out.read_text())["results"]
    assert 4 < run["seconds"] < 4.5


def test_the_size_of_the_kv_memory() -> None:
    """What the calibration's device had for its model, what it would have left for another, or what is asked for."""
    assert plant_of(EngineConfig(), "a100-13b").kv_tokens == 12 * 2**30 // 819200
    assert plant_of(EngineConfig(kv_gib=1.0), "a100-13b").kv_tokens == 2**30 // 819200
    assert plant_of(EngineConfig(kv_tokens=500), "a100-13b").kv_tokens == 500
    other = plant_of(EngineConfig(model_config="llama-7b"), "a100-13b")
    assert 15e9 < other.kv_tokens * other.spec.token_bytes(2) < 22e9
    with pytest.raises(StartupError, match="leave no room for KV"):
        plant_of(EngineConfig(model_config="opt-66b"), "a100-13b")


def test_the_model_is_the_calibration_s_where_none_is_named(tmp_path: Path) -> None:
    content = json.loads((FOLDER / "a100-13b.json").read_text())
    path = tmp_path / "mine.json"
    for name, layers in (("tiny", 6), ("llama3-8b", 32)):
        path.write_text(json.dumps({**content, "model": name}))
        assert len(plant_of(EngineConfig(kv_gib=1.0), str(path)).spec.layers) == layers
    path.write_text(json.dumps({**content, "model": "mine"}))
    with pytest.raises(StartupError, match="mine, isn't known by name"):
        plant_of(EngineConfig(), str(path))
    assert plant_of(EngineConfig(model_config="llama-7b"), str(path)).spec.heads == 32


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "alpaca@4"], "--rate is missing"),
        (["--rate", "1"], "one of --workload and --trace"),
        (["--workload", "alpaca@4", "--trace", "x", "--rate", "1"], "one of --workload and --trace"),
        (["--workload", "nothing", "--rate", "1"], "there is no workload"),
        (["--workload", "alpaca@4", "--rate", "0"], "--rate is 0"),
        (["--workload", "alpaca@4", "--rate", "nan"], "--rate is nan"),
        (["--workload", "alpaca", "--rate", "1", "--seconds", "0"], "--seconds is 0"),
        (["--workload", "alpaca@4", "--find-rate"], "--find-rate needs an --objective"),
        (["--workload", "alpaca@4", "--rate", "1", "--objective", "fast"], "there is no objective 'fast'"),
        (["--workload", "fixed:4000:10@4", "--rate", "1"], "sequences may have 2048"),
        (["--workload", "fixed:9:9@4", "--rate", "1", "--memory", "orca-max", "--kv-tokens", "100"], "no room"),
        (["--trace", "/nonexistent/trace"], "can't be read"),
    ],
)
def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main([*A100, *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("quire: error: ")
    assert words in error


def test_a_broken_trace_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        '{"arrival": 0, "prompt_len": 5, "output_len": 5}\n{"arrival": -1, "prompt_len": 5, "output_len": 5}'
    )
    assert main([*A100, "--trace", str(trace)]) == 2
    assert "line 2" in capsys.readouterr().err
