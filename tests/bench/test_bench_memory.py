"""`quire bench memory`: its loads are as large as they may be, and what it measured is what was planned, as far as that
is exact. `quire bench limits`: clocks within clocks, what a step's operations are, what limits say of them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from benching import results

from bench import limits, memory
from bench.core_limits import CoreLimits, thread_counts
from bench.spent import PRODUCT, Spent, Work, watched
from quire.bench.shapes import built
from quire.config import EngineConfig
from quire.layers.linear import Linear
from quire.protocol.model_spec import max_parts_per_step
from quire.protocol.sampling_params import SamplingParams
from quire.startup.build import build
from quire.startup.checkpoint import read_checkpoint
from quire.worker import model_runner
from quire.worker import step_context as step

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")


@linux
def test_parts_of_a_small_engine(tmp_path: Path) -> None:
    """In a process of its own: what one held before and gave back is there still, and wouldn't count."""
    out = tmp_path / "memory.json"
    flags = ["--device", "cpu", "--threads", "1", "--dtype", "float32", "--kv-tokens", "8192"]
    done = subprocess.run(
        [sys.executable, "-m", "quire", "bench", "memory", *flags, "--max-num-seqs", "8",
         "--max-num-batched-tokens", "256", "--out", str(out)],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "off by" in done.stdout
    (result,) = json.loads(out.read_text())["results"]
    planned, measured = result["planned"], result["measured"]
    page = planned["kv"] // (8192 // 16)
    assert measured["kv"] == planned["kv"] + page  # and the scratch page
    assert measured["weights"] == planned["weights"]
    assert 2**20 < measured["beside"] < 2 * planned["beside"] + 2**28  # allocators keep much


@pytest.mark.parametrize(
    ("settings", "many", "long"),
    [
        ({"kv_tokens": 4096, "max_num_seqs": 4, "max_num_batched_tokens": 64}, [32] * 4, [4096 - 12]),
        ({"kv_tokens": 600, "max_num_seqs": 1, "max_num_batched_tokens": 64}, [128], [608 - 12]),  # whole pages
        ({"kv_tokens": 48}, [47 - 11], [47 - 11]),  # less than four pages
        ({"kv_tokens": 2048, "max_model_len": 8, "max_num_seqs": 2}, [1, 1], [1, 1]),
        ({"kv_tokens": 2048, "max_num_seqs": 3, "max_num_queued_reqs": 1}, [2 * 2048 // 3] * 3, [2048 - 12]),
    ],
)
def test_the_loads(settings, many: list[int], long: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    scored: list[bool] = []
    with built(EngineConfig(device="cpu", **settings)) as made:
        add = made.engine.add

        def noted(id: str, prompt: list[int], params: SamplingParams) -> None:
            lengths.append(len(prompt))
            scored.append(params.prompt_logprobs is not None)
            add(id, prompt, params)

        monkeypatch.setattr(made.engine, "add", noted)
        memory._serve(made)
        assert made.engine.stats.prompt_tokens == sum(lengths)
        assert made.engine.stats.finished == {"length": len(lengths)}
    assert lengths == many + long
    assert scored == [i % 2 == 1 for i in range(len(many))] + [False] * len(long)


def test_pictures_are_encoded() -> None:
    """As many as a step may encode, and one more; each once, all that have room."""
    config = EngineConfig(
        model="tiny-vision", device="cpu", kv_tokens=4096, max_num_batched_tokens=512
    ).with_device_defaults("cpu")
    source = read_checkpoint(config)
    jobs = memory._seeing(config, source)
    eyes, parts = source.spec.vision, jobs[0].media[0].num_parts
    assert eyes is not None
    most = max_parts_per_step(512, eyes.part_tokens, eyes.part_embeds, eyes.max_embeds)
    assert (len(jobs) - 1) * parts <= most < len(jobs) * parts
    with built(config) as made:
        assert memory._see(made, jobs) == len(jobs) > 1
        assert made.engine.stats.finished == {"length": len(jobs)}
        assert made.engine.scheduler.memory.account().sharing.encoder_runs == len(jobs)
    with built(replace(config, max_model_len=16)) as made:
        assert memory._see(made, jobs) == 0
    assert len(memory._seeing(replace(config, max_num_seqs=2), source)) == 2
    assert memory._seeing(config, read_checkpoint(EngineConfig())) == []


SMALL = ["--device", "cpu", "--kv-tokens", "512", "--skip-tokenizer-init", "--repeat", "1"]


def test_a_call_within_another_counts_as_itself_alone() -> None:
    """Also one that fails."""
    ticks = count()
    spent = Spent(lambda: float(next(ticks)))
    inner = spent.timed("inner", lambda: None)
    outer = spent.timed("outer", lambda: (inner(), inner()))
    outer()
    assert spent.take() == {"outer": Work(3.0, 1), "inner": Work(2.0, 2)}
    assert spent.take() == {}

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        spent.timed("outer", spent.timed("inner", fail))()
    assert spent.take() == {"outer": Work(2.0, 1), "inner": Work(1.0, 1)}


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
    functions = [model_runner.build_flat_batch, step.prepare_qkv, step.StepContext._rotary_tables]
    try:
        before = {name: set(vars(owner)) for name, owner in (("engine", engine), ("runner", engine.runner))}
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
        with watched(engine) as spent:
            engine.add("1", [5, 6, 7], params)
            while engine.has_unfinished_requests:
                engine.step()
            found = spent.take()
        assert before == {"engine": set(vars(engine)), "runner": set(vars(engine.runner))}
        assert functions == [model_runner.build_flat_batch, step.prepare_qkv, step.StepContext._rotary_tables]
        layers = len(built.spec.layers)
        assert found["attention"].calls == found[f"{PRODUCT}qkv"].calls == 2 * layers
        assert found["sampling"].calls in (3, 4), "with kernels of our own, or without"
        assert found["control plane"].calls >= 2
        engine.add("2", [5, 6, 7], params)
        while engine.has_unfinished_requests:
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


def test_a_run_tells_steps_with_prompts_from_those_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.core_limits.buffer_bytes", lambda: 2**20)
    monkeypatch.setattr("bench.core_limits.SIDE", 64)
    threads = torch.get_num_threads()
    *cores, prompts, decode = results(tmp_path, "limits", *SMALL, "--workload", "fixed:16:4@2")
    assert torch.get_num_threads() == threads
    assert all("cores" in result for result in cores)
    assert cores[0]["cores"]["buffer"] == 2**20
    assert min(cores[0]["cores"][what] for what in ("read", "bf16", "fp32")) > 0
    assert (prompts["steps"], prompts["tokens"], prompts["count"]) == ("with prompts", 32, 1)
    assert (decode["steps"], decode["rows"], decode["tokens"], decode["count"]) == ("decode", 2, 2, 3)
    assert decode["limit_ms"] > 0
    assert decode["operations"]["attention"]["bytes"] > 0
    assert "all products" in capsys.readouterr().out
