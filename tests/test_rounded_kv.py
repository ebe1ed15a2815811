"""Keys and values in 8 bits: tokens don't depend on how they are kept, moved, shared or computed again; the plan counts
their bytes; and what can't be kept so is refused in one line. With them, or with weights in FP8 or in few bits, the
bundled model says nearly what it says in bf16."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import test_equality
from test_tapes import all_of, an_engine, tapes_of

import quire
from quire.bench.simulate import read_deployment
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.kernels.cpu.library_loader import library
from quire.protocol.sampling_params import SamplingParams
from quire.startup.build import build, describe_memory_plan
from quire.startup.checkpoint import read_checkpoint
from quire.startup.dtypes import kv_namespace

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))  # the training tools are scripts

import tiny_text

native = pytest.mark.skipif(library() is None, reason="there are no kernels for this CPU (no compiler?)")
ROUNDED: dict[str, Any] = {"kv_cache_dtype": "int8", "deterministic": True}
ASKED = {
    "greedy": SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
    "three": SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=16, ignore_eos=True),
    "beams": SamplingParams(beam_width=3, n=3, max_tokens=16, ignore_eos=True),
}
LITTLE = {"page_size": 4, "max_num_batched_tokens": 16}
oracle = test_equality.oracle


@pytest.mark.share(4)
@native
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), ("gemma2", "float32")])
def test_tokens_do_not_depend_on_where_cells_lie(oracle, family: str, dtype: str, asked: str) -> None:
    """On tapes and eagerly, swapped, computed again, found again, in chunks, in large pages of unlike layers."""
    model, params = oracle(family), ASKED[asked]
    settings, prompts = {**ROUNDED, "dtype": dtype, "max_num_seqs": 15}, model.prompts[:5]
    expected = all_of(an_engine(model, False, enable_prefix_caching=False, **settings), prompts, params)
    engine = an_engine(model, **settings)
    assert all_of(engine, prompts, params) == expected
    assert tapes_of(engine).programs, "some steps were replayed"
    for preemption in ("swap", "recompute"):
        tokens = 64 if asked == "greedy" else 160
        engine = an_engine(model, preemption=preemption, kv_tokens=tokens, **LITTLE, **settings)
        assert all_of(engine, prompts, params) == expected
        assert engine.scheduler.num_preemptions > 0
    again = an_engine(model, page_size=4, kv_tokens=2048, **settings)
    for _ in range(2):
        assert all_of(again, prompts, params) == expected
    assert again.scheduler.memory.account().sharing.hits > 0


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        ({"quantization": "fp8"}, 0.02), ({"quantization": "int8"}, 0.01), ({"quantization": "int4"}, 0.1),
        pytest.param({"kv_cache_dtype": "int8"}, 0.005, marks=native),
    ],
    ids=str,
)  # fmt: skip
def test_perplexity_of_the_bundled_model(asked: dict[str, Any], most: float) -> None:
    documents = list(tiny_text.draw_documents(SEED, 20_000))
    exact, rounded = (negative_logs(documents, dtype="bfloat16", **one) for one in ({}, asked))
    assert len(exact) == len(rounded) > 3000
    assert exact != rounded
    before, after = (math.exp(sum(logs) / len(logs)) for logs in (exact, rounded))
    assert abs(after / before - 1) < most, f"{before:.4f} in bf16, {after:.4f} with {asked}"


@native
def test_a_plan_counts_them(capsys: pytest.CaptureFixture[str]) -> None:
    """The 125M shape has 12 layers of 4 key heads of 64: 12,288 bytes a token in bf16."""
    lines = describe_memory_plan(
        EngineConfig(model_config="llama-125m", dtype="bfloat16", kv_gib=0.25, kv_cache_dtype="int8")
    )
    token = 12 * 2 * 4 * (64 + 4)
    [line] = [line for line in lines if line.startswith("KV cache")]
    assert f"{2**28 // (16 * token) * 16:,} tokens of {token:,} bytes" in line


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention": "sdpa"}, "--attention is sdpa"),
        ({"memory": "virtual"}, "--memory is virtual"),
        ({"dtype": "float16"}, "they don't take the model's heads, or its --dtype"),
        ({"model_config": "jamba-52b"}, "running states"),
        ({"model_config": "llama3.2-vision-11b"}, "image embeddings"),
        ({"model_config": "pyramidkv-8b"}, "layers that prune the prompt"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype is 'fp8'. Choose one of: auto, int8"),
    ],
)
@native
def test_what_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    usual = {"kv_cache_dtype": "int8", "device": "cpu", "dtype": "bfloat16", "kv_gib": 0.01}
    with pytest.raises(StartupError, match="--kv-cache-dtype is ") as failure:
        describe_memory_plan(EngineConfig(**{**usual, **settings}))
    assert words in str(failure.value)


def test_without_kernels_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    library.cache_clear()
    try:
        with pytest.raises(StartupError, match=r"--kv-cache-dtype is int8, .* QUIRE_CPU_KERNELS is off\. Leave it out"):
            build(EngineConfig(kv_cache_dtype="int8", device="cpu"))
    finally:
        library.cache_clear()
    monkeypatch.setattr("quire.startup.build.choose_device", lambda config: "cuda")
    with pytest.raises(StartupError, match=r"--kv-cache-dtype is int8, .* --device is cuda\. Leave it out"):
        describe_memory_plan(EngineConfig(kv_cache_dtype="int8"))


def test_keys_in_8_bits_are_not_found_by_others() -> None:
    weights, cells = {"quantization": "int8"}, {"kv_cache_dtype": "int8"}
    source = read_checkpoint(EngineConfig())
    assert (
        len({kv_namespace(EngineConfig(**one), source, "bfloat16") for one in ({}, weights, cells, weights | cells)})
        == 4
    )


# Weights in FP8, or in few bits

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))  # the training tools are scripts


SEED = 77_000_001  # of documents that training never drew


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
        roots.add(engine.scheduler.memory.prefix_cache.key_chain.root_key)  # type: ignore[attr-defined]
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
