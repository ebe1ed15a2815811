"""`quire bench memory`: its loads are as large as they may be, and what it measured is what was planned, as far as that
is exact."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quire.bench import memory
from quire.bench.shapes import built
from quire.config import EngineConfig
from quire.source import read_source
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.specs import parts_a_step

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
    config = EngineConfig(model="tiny-vision", device="cpu", kv_tokens=4096, max_num_batched_tokens=512).sized("cpu")
    source = read_source(config)
    jobs = memory._seeing(config, source)
    eyes, parts = source.spec.vision, jobs[0].media[0].parts
    assert eyes is not None
    most = parts_a_step(512, eyes.part_tokens, eyes.part_rows, eyes.most_rows)
    assert (len(jobs) - 1) * parts <= most < len(jobs) * parts
    with built(config) as made:
        assert memory._see(made, jobs) == len(jobs) > 1
        assert made.engine.stats.finished == {"length": len(jobs)}
        assert made.engine.scheduler.memory.account().sharing.encoder_runs == len(jobs)
    with built(replace(config, max_model_len=16)) as made:
        assert memory._see(made, jobs) == 0
    assert len(memory._seeing(replace(config, max_num_seqs=2), source)) == 2
    assert memory._seeing(config, read_source(EngineConfig())) == []
