"""`quire simulate`: tables, documents and pictures, rates that are found, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from published_heads import HEAD

import quire
from quire.bench.simulate import _generate_trace, read_deployment
from quire.cli import main
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.sim.cost_model import FOLDER

TINY = Path(quire.__file__).parent / "assets" / "tiny"
FIND = ("--find-rate", "--objective", "mean-e2e-ms=9000")
A100 = ["simulate", "--calibration", "a100-13b"]


def results(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    out = folder / "s.json"
    assert main([*A100, *arguments, "--out", str(out)]) == 0
    found: list[dict[str, Any]] = json.loads(out.read_text())["results"]
    return found


def trace_of(folder: Path, *times: float) -> str:
    """A trace of requests that come at these times."""
    path = folder / "t.jsonl"
    lines = [{"arrival": time, "prompt_len": 20, "output_len": 3} for time in times]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


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
    plot = tmp_path / "s.png"
    command = ["--workload", "alpaca@60", "--find-rate", "--rate", "8", "--objective", "mean-normalised-ms=35"]
    runs = results(tmp_path, *command, "--plot", str(plot))
    assert [run["rate"] for run in runs] == sorted(run["rate"] for run in runs)
    best = runs[0]["highest_rate"]
    assert [run["meets"] for run in runs] == [run["rate"] <= best for run in runs]
    assert f"highest rate: {best:.4g} requests/s" in capsys.readouterr().out
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_a_workload_that_is_too_short_finds_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    goal = ["--find-rate", "--objective"]
    assert main([*A100, "--workload", "fixed:9:9@2", *goal, "p99-e2e-ms=9000"]) == 0
    assert "every rate meets the objectives: the workload is too short to tell" in capsys.readouterr().out
    assert main([*A100, "--workload", "fixed:9:9@2", *goal, "p99-e2e-ms=1"]) == 0
    assert "no rate meets the objectives" in capsys.readouterr().out


def test_a_trace_keeps_its_times_or_is_stretched(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, 0.0, 2.0, 4.0, 6.0, 8.0)
    [run] = results(tmp_path, "--trace", trace)
    assert run["rate"] is None
    assert 8 < run["seconds"] < 8.5
    [run] = results(tmp_path, "--trace", trace, "--rate", "1.25")
    assert 4 < run["seconds"] < 4.5
    for last in (5e-324, 1e9):
        [run] = results(tmp_path, "--trace", trace_of(tmp_path, 0, last), "--rate", "0.5")
        assert 4 < run["seconds"] < 4.5


def test_the_size_of_the_kv_memory() -> None:
    """What the calibration's device had for its model, what it would have left for another, or what is asked for."""
    assert read_deployment(EngineConfig(), "a100-13b").kv_tokens == 12 * 2**30 // 819200
    assert read_deployment(EngineConfig(kv_gib=1.0), "a100-13b").kv_tokens == 2**30 // 819200
    assert read_deployment(EngineConfig(kv_tokens=500), "a100-13b").kv_tokens == 500
    other = read_deployment(EngineConfig(model_config="llama-7b"), "a100-13b")
    assert 15e9 < other.kv_tokens * other.spec.token_bytes(2) < 22e9
    with pytest.raises(StartupError, match="leave no room for KV"):
        read_deployment(EngineConfig(model_config="opt-66b"), "a100-13b")


def fits(tokens: int, large_pages: int) -> bool:
    return -(-tokens // 16) + -(-tokens // 64) <= large_pages


def test_a_draft_model_shares_the_memory_and_saves_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, drafted = (
        read_deployment(EngineConfig(model_config="llama3-8b", speculative_model=draft), "a100-13b")
        for draft in (None, "llama3.2-1b")
    )
    assert len(drafted.spec.layers) == 32 + 16
    assert plain.kv_bytes - drafted.kv_bytes > 2 * 1_235_814_400, "the draft model's weights, and logits of drafts"
    large_pages = drafted.kv_bytes // 2**21  # 16 tokens of the model, or 4 pages of 16 tokens of the draft model
    assert fits(drafted.kv_tokens, large_pages)
    assert not fits(drafted.kv_tokens + 16, large_pages)
    command = ["--model-config", "llama3-8b", "--workload", "alpaca@20", "--rate", "1"]
    [alone] = results(tmp_path, *command)
    assert "drafts" not in alone
    [with_draft] = results(tmp_path, *command, "--speculative-model", "llama3.2-1b", "--acceptance", "0.9")
    assert with_draft["normalised_s"]["mean"] < 0.7 * alone["normalised_s"]["mean"]
    tokens = 1 + with_draft["accepted_tokens"] / with_draft["drafts"]
    assert 4 < tokens < 4.8  # 4.69 if five tokens were drafted each time
    assert f"rate 1: {tokens:.2f} tokens a verification" in capsys.readouterr().out


def test_the_shape_of_a_head(tmp_path: Path) -> None:
    """It reads its layer and its LM head, which is smaller than the model's."""
    head = {
        **HEAD, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "draft_vocab_size": 32000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(head))
    settings = {"speculative_method": "eagle3", "speculative_model": str(tmp_path)}
    shape = read_deployment(EngineConfig(model_config="llama3-8b", **settings), "a100-13b").cost.draft
    layer = 2 * 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert shape is not None
    assert shape.head_weights == 4096 * 32000
    assert shape.body_weights == pytest.approx(layer + 3 * 4096 * 4096, rel=1e-3)
    assert shape.reads_hidden_states


def test_the_model_is_the_calibration_s_where_none_is_named(tmp_path: Path) -> None:
    content = json.loads((FOLDER / "a100-13b.json").read_text())
    path = tmp_path / "mine.json"
    for name, layers in (("tiny", 6), ("llama3-8b", 32)):
        path.write_text(json.dumps({**content, "model": name}))
        assert len(read_deployment(EngineConfig(kv_gib=1.0), str(path)).spec.layers) == layers
    path.write_text(json.dumps({**content, "model": "mine"}))
    with pytest.raises(StartupError, match="mine, isn't known by name"):
        read_deployment(EngineConfig(), str(path))
    assert read_deployment(EngineConfig(model_config="llama-7b"), str(path)).spec.heads == 32


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "alpaca@4"], "--rate is missing"),
        (["--rate", "1"], "one of --workload and --trace"),
        (["--workload", "alpaca@4", "--trace", "x", "--rate", "1"], "one of --workload and --trace"),
        (["--workload", "nothing", "--rate", "1"], "there is no workload"),
        *((["--workload", "alpaca@4", "--rate", r], f"--rate is {r}") for r in ("0", "-1", "nan", "1e+06", "1e-07")),
        (["--workload", "alpaca@4", *FIND, "--rate", "0"], "--rate is 0"),
        (["--workload", "alpaca@4", *FIND, "--rate", "1", "2"], "--find-rate is given with 2 rates, 1 2"),
        (["--workload", "fixed:4:1", *FIND, "--rate", "170"], "are 102,000 requests, more than 100,000"),
        (["--workload", "alpaca@4", "--rate", "1", "--kv-tokens", str(10**12)], "1,000,000,000,000 tokens of KV are"),
        (["--workload", "alpaca", "--rate", "1", "--seconds", "0"], "--seconds is 0"),
        (["--workload", "alpaca@4", "--find-rate"], "--find-rate needs an --objective"),
        (["--workload", "alpaca@4", "--rate", "1", "--objective", "fast"], "there is no objective 'fast'"),
        (["--workload", "fixed:4000:10@4", "--rate", "1"], "sequences may have 2048"),
        (["--workload", "fixed:9:9@4", "--rate", "1", "--memory", "orca-max", "--kv-tokens", "100"], "no room"),
        (["--trace", "/nonexistent/trace"], "can't be read"),
        (["--workload", "alpaca@4", "--rate", "1", "--acceptance", "1.5"], "acceptance is 1.5"),
        (["--workload", "alpaca@4", "--rate", "1", "--speculative-method", "ngram"], "have no content"),
        (["--workload", "alpaca@4", "--rate", "1", "--speculative-model", "llama3.2-1b"], "has 128256 tokens"),
    ],
)
def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main([*A100, *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("quire: error: ")
    assert words in error


def test_a_search_ends_where_requests_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At twice the rate a workload would have more requests than one may have: what was found is kept."""
    monkeypatch.setattr("quire.bench.workloads.MAX_REQUESTS", 100)
    monkeypatch.setattr("quire.bench.workloads.BLOCK", 100)
    first, last = results(tmp_path, "--workload", "fixed:4:1", *FIND, "--rate", "4", "--seconds", "10")
    assert (first["rate"], last["rate"]) == (4, 8)
    assert last["meets"]
    assert last["highest_rate"] is None
    assert "16 requests/s for 10 seconds are 160 requests, more than 100" in last["ended"]
    assert "8 requests/s, the highest rate tried, meets the objectives" in capsys.readouterr().out


def test_higher_rates_serve_the_same_requests_and_more() -> None:
    plant = read_deployment(EngineConfig(), "a100-13b")
    few, many = (_generate_trace("sharegpt", 50.0, plant, rate) for rate in (1.0, 3.1))
    assert (len(few), len(many)) == (50, 155)
    for one, same in zip(few, many):
        assert (one.params, len(one.prompt)) == (same.params, len(same.prompt))
        assert one.arrival == pytest.approx(3.1 * same.arrival)


def test_a_trace_of_texts_is_counted_by_a_tokenizer(tmp_path: Path) -> None:
    trace = tmp_path / "sharegpt.json"
    turn = [{"from": "human", "value": "How many pages are in a quire of paper?"},
            {"from": "gpt", "value": "There are twenty-four of them, or twenty-five."}]  # fmt: skip
    trace.write_text(json.dumps([{"conversations": turn}] * 3))
    command = ["--trace", str(trace), "--rate", "1", "--trace-requests", "2"]
    assert main([*A100, *command]) == 2, "the calibration's model has no tokenizer here"
    assert results(tmp_path, *command, "--tokenizer", str(TINY))[0]["requests"] == 2


def test_the_document_is_written_before_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "s.json"
    monkeypatch.setattr("quire.bench.simulate.format_results", lambda results, plant: 1 / 0)
    assert main([*A100, "--workload", "alpaca@2", "--rate", "5", "--out", str(out)]) == 2
    assert len(json.loads(out.read_text())["results"]) == 1


def test_a_picture_without_matplotlib_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "s.json"
    command = [*A100, "--workload", "alpaca@2", "--rate", "5", "--out", str(out), "--plot", str(tmp_path / "s.png")]
    assert main(command) == 2
    assert not out.exists()


def test_a_broken_trace_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*A100, "--trace", trace_of(tmp_path, 0, -1)]) == 2
    assert "line 2" in capsys.readouterr().err
