"""Keys and values in 8 bits: tokens don't depend on how they are kept, moved, shared or computed again; the plan counts
their bytes; and what can't be kept so is refused in one line."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import test_equality
from test_fp8_engine import SEED, negative_logs
from test_tapes import all_of, an_engine, tapes_of

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


@native
def test_perplexity_of_the_bundled_model() -> None:
    documents = list(tiny_text.draw_documents(SEED, 20_000))
    exact, rounded = (negative_logs(documents, dtype="bfloat16", kv_cache_dtype=one) for one in ("auto", "int8"))
    assert len(exact) == len(rounded) > 3000
    assert exact != rounded
    before, after = (math.exp(sum(logs) / len(logs)) for logs in (exact, rounded))
    assert abs(after / before - 1) < 0.005, f"{before:.4f} in bf16, {after:.4f} with keys and values in 8 bits"


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
    config = EngineConfig(kv_cache_dtype="int8")
    source = read_checkpoint(config)
    others = [
        EngineConfig(),
        EngineConfig(quantization="int8"),
        EngineConfig(quantization="int8", kv_cache_dtype="int8"),
    ]
    assert len({kv_namespace(one, source, "bfloat16") for one in (config, *others)}) == 4
