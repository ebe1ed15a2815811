"""`quire bench limits`: clocks within clocks, what a step's operations are, what limits say of them."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch
from benching import results

from quire.bench import limits
from quire.bench.core_limits import CoreLimits, core_limits, thread_counts
from quire.bench.spent import PRODUCT, Spent, Work, watched
from quire.build import build
from quire.config import EngineConfig
from quire.data.layers.linear import Linear
from quire.data.runner import model_runner, step
from quire.vocabulary.params import SamplingParams

SMALL = ["--device", "cpu", "--kv-tokens", "512", "--skip-tokenizer-init", "--repeat", "1"]


def test_a_call_within_another_counts_as_itself_alone() -> None:
    ticks = count()
    spent = Spent(lambda: float(next(ticks)))
    inner = spent.timed("inner", lambda: None)
    outer = spent.timed("outer", lambda: (inner(), inner()))
    outer()
    assert spent.take() == {"outer": Work(3.0, 1), "inner": Work(2.0, 2)}
    assert spent.take() == {}


def test_a_call_that_fails_stops_its_clock() -> None:
    ticks = count()
    spent = Spent(lambda: float(next(ticks)))

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        spent.timed("outer", spent.timed("inner", fail))()
    assert {name: work.seconds for name, work in spent.take().items()} == {"outer": 2.0, "inner": 1.0}


def test_products_count_their_operations_and_the_bytes_of_their_weights() -> None:
    layer = Linear(8, (3, 5), False, torch.float32, torch.device("cpu"))
    layer.weight.fill_(1)
    spent = Spent()
    spent.product("product qkv", layer)(torch.ones(2, 8))
    assert spent.take()["product qkv"][1:] == (1, 8 * 8 * 4, 2 * 2 * 8 * 8)
    layer.weight_bytes = 40
    spent.product("product qkv", layer)(torch.ones(2, 8))
    assert spent.take()["product qkv"].bytes == 40


def test_clocks_leave_an_engine_as_it_was() -> None:
    built = build(EngineConfig(device="cpu", kv_tokens=256, skip_tokenizer_init=True))
    engine = built.engine
    functions = [model_runner.batch_of, step.queries_keys_values, step.Step._angles]
    try:
        before = {name: set(vars(owner)) for name, owner in (("engine", engine), ("runner", engine.runner))}
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
        with watched(engine) as spent:
            engine.add("1", [5, 6, 7], params)
            while engine.unfinished:
                engine.step()
            found = spent.take()
        assert before == {"engine": set(vars(engine)), "runner": set(vars(engine.runner))}
        assert functions == [model_runner.batch_of, step.queries_keys_values, step.Step._angles]
        layers = len(built.spec.layers)
        assert found["attention"].calls == found[f"{PRODUCT}qkv"].calls == 2 * layers
        assert found["sampling"].calls in (3, 4), "with kernels of our own, or without"
        assert found["control plane"].calls >= 2
        engine.add("2", [5, 6, 7], params)
        while engine.unfinished:
            engine.step()
        assert spent.take() == {}
    finally:
        engine.close()


def test_of_each_step_the_fastest_of_all_runs_counts() -> None:
    runs = [[limits.Step("decode", seconds, {}, 1, tokens, 0, 0) for tokens, seconds in enumerate(run)]
            for run in ((5.0, 1.0, 9.0), (2.0, 7.0, 3.0))]  # fmt: skip
    assert [step.seconds for step in limits.fastest(runs)] == [2.0, 1.0, 3.0]
    with pytest.raises(AssertionError, match="same steps"):
        limits.fastest([runs[0], runs[1][:2]])


def test_the_longer_of_reading_and_multiplying_is_an_operations_limit() -> None:
    found = {
        "operations": {
            "reads": {"bytes": 4e9, "operations": 1e9},
            "multiplies": {"bytes": 1e9, "operations": 6e12},
            "neither": {"bytes": 0, "operations": 0},
        }
    }
    limits.limit(found, 2e9, 1e12)
    assert [part["limit_ms"] for part in found["operations"].values()] == [2000, 6000, 0]
    assert (found["limit_ms"], found["step_bytes"], found["step_operations"]) == (8000, 5e9, 6.001e12)


def test_threads_are_doubled_up_to_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)), raising=False)
    assert [thread_counts(n) for n in (1, 2, 4, 5, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 6]]


def test_the_better_of_two_measurements_is_kept() -> None:
    one, other = CoreLimits(1, 8, 2.0, None, 5.0, 3.0, None), CoreLimits(1, 8, 1.0, 4.0, 6.0, 2.0, 9.0)
    assert one.better(other) == CoreLimits(1, 8, 2.0, None, 6.0, 3.0, None)
    assert (one.multiply(2), one.multiply(4), one.multiply(1), other.multiply(1)) == (5.0, 3.0, 5.0, 9.0)


def test_cores_are_measured_and_threads_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.bench.core_limits.buffer_bytes", lambda: 2**20)
    monkeypatch.setattr("quire.bench.core_limits.SIDE", 64)
    threads = torch.get_num_threads()
    [found] = core_limits([1], 2**16)
    assert torch.get_num_threads() == threads
    assert min(found.read, found.read_weights or 0, found.bf16, found.fp32) > 0
    assert found.buffer == 2**20


def test_a_run_tells_steps_with_prompts_from_those_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.bench.core_limits.buffer_bytes", lambda: 2**20)
    monkeypatch.setattr("quire.bench.core_limits.SIDE", 64)
    *cores, prompts, decode = results(tmp_path, "limits", *SMALL, "--workload", "fixed:16:4@2")
    assert all("cores" in result for result in cores)
    assert (prompts["steps"], prompts["tokens"], prompts["count"]) == ("with prompts", 32, 1)
    assert (decode["steps"], decode["rows"], decode["tokens"], decode["count"]) == ("decode", 2, 2, 3)
    assert decode["limit_ms"] > 0
    assert decode["operations"]["attention"]["bytes"] > 0
    assert "all products" in capsys.readouterr().out
