"""An engine with weights in FP8, or in few bits: the bundled model says nearly what it says in bf16; what does not fit
is refused."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.bench.simulate import read_deployment
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.protocol.sampling_params import SamplingParams
from quire.startup.build import build
from quire.startup.checkpoint import read_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))  # the training tools are scripts

import tiny_text

SEED = 77_000_001  # of documents that training never drew
MOST = {"fp8": 0.02, "int8": 0.01, "int4": 0.1}


def negative_logs(documents: list[str], **settings: Any) -> list[float]:
    """-log of the probability of every token of the documents but their first ones."""
    found = []
    with quire.LLM(**{"kv_tokens": 4096, "enable_prefix_caching": False, **settings}) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        for output in llm.generate(documents, params):
            assert output.prompt_logprobs is not None
            for token, entry in list(zip(output.prompt_token_ids, output.prompt_logprobs))[1:]:
                assert entry is not None
                found.append(-entry[token].logprob)
    return found


@pytest.mark.parametrize("asked", ["fp8", "int8", "int4"])
def test_perplexity_of_the_bundled_model(asked: str) -> None:
    documents = list(tiny_text.draw_documents(SEED, 20_000))
    exact, rounded = (negative_logs(documents, dtype="bfloat16", quantization=q) for q in (None, asked))
    assert len(exact) == len(rounded) > 3000
    assert exact != rounded
    before, after = (math.exp(sum(logs) / len(logs)) for logs in (exact, rounded))
    print(f"perplexity {before:.4f} in bf16, {after:.4f} with {asked}: {after / before - 1:+.3%}")
    assert abs(after / before - 1) < MOST[asked]


def test_a_checkpoint_that_says_fp8_and_is_not(tmp_path: Path) -> None:
    bundled = read_checkpoint(EngineConfig()).path
    assert bundled is not None
    for file in bundled.iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((bundled / "config.json").read_text())
    for said, words in (
        ({"quant_method": "fbgemm_fp8"}, "has dtype bfloat16"),
        ({"quant_method": "aqlm"}, "quant_method 'aqlm', which is not supported"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
        with pytest.raises(StartupError, match=words) as failure:
            build(EngineConfig(model=str(tmp_path), kv_tokens=256, device="cpu"))
        assert failure.value.remedy


def test_keys_of_prefixes_tell_formats_apart() -> None:
    """Keys and values differ, and so must what they are found by. A CPU plans with the model's dtype."""
    roots, weights = set(), set()
    for quantization in (None, "fp8"):
        built = build(EngineConfig(kv_tokens=512, device="cpu", dtype="float32", quantization=quantization))
        engine = built.engine
        weights.add(built.memory_plan.weight_bytes)
        roots.add(engine.scheduler.memory.prefix_cache.root_key)  # type: ignore[attr-defined]
        engine.close()
    assert (len(roots), len(weights)) == (2, 1)


def test_a_simulation_reads_the_experts_that_tokens_take() -> None:
    """Jamba's, two of sixteen by a token; FP8 halves what is read, whatever that is."""
    plain, fp8 = (
        read_deployment(EngineConfig(model_config="jamba-52b", quantization=q), "h200-llama3-8b").cost.shape
        for q in (None, "fp8")
    )
    expert = 3 * 4096 * 14336
    assert plain.expert_weights == fp8.expert_weights == 16 * 16 * expert
    assert plain.bytes_read(1) - 2 * 16 * 2 * expert == 2 * (plain.body_weights + plain.head_weights)
    mixer = 28 * (3 * 4096 * 8192 + 2 * 8192 * (256 + 32 + 256))  # its small products have two bytes
    rest = 4 * (4096 * 6144 + 4096 * 4096) + 16 * expert
    head = 65536 * 4096
    assert fp8.bytes_read(1) == pytest.approx(16 * 2 * expert + mixer + rest + 2 * head, rel=0.015)
    assert fp8.bytes_read(10**6) == fp8.weight_bytes
    assert fp8.weight_bytes == pytest.approx(plain.expert_weights + mixer + rest + 2 * head, rel=0.001)
