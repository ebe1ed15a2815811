"""Layers of unlike kinds on a GPU: one model's tokens are the same however its memory is cut into pages, whoever is
preempted, and whether its steps are graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.build import build
from quire.config import EngineConfig
from quire.data.models.configs import named_config
from quire.vocabulary.params import SamplingParams

pytestmark = pytest.mark.gpu

LENGTHS = (5, 130, 17, 64, 700, 1, 33, 250, 90, 16, 71, 128, 40, 1500, 9, 77)
OUTPUT = 96
SMALL = {
    "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024,
    "vocab_size": 4096, "max_position_embeddings": 2304, "dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention"]
SHAPES: dict[str, dict[str, Any]] = {
    "gemma-2-9b": {"num_hidden_layers": 6, "head_dim": 256, "sliding_window": 100, "query_pre_attn_scalar": 256},
    "gemma-3-4b": {"num_hidden_layers": 6, "head_dim": 256, "sliding_window": 100, "rope_scaling": None},
    "ministral-8b": {"num_hidden_layers": 8, "head_dim": 128, "sliding_window": 100,
                     "layer_types": ["full_attention", *["sliding_attention"] * 3] * 2},
    "characterai-8b": {"num_hidden_layers": 6, "head_dim": 64, "sliding_window": 100,
                       "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
                       "kv_sharing": [None, 0, None, 2, None, None]},
    "llama-125m": {"num_hidden_layers": 4, "head_dim": 64, "attention_chunk_size": 100,
                   "layer_types": ["chunked_attention", "full_attention"] * 2},
    "pyramidkv-8b": {"num_hidden_layers": 4, "head_dim": 128, "rope_scaling": None,
                     "pyramid_kv": {"budgets": [144, 112, 80, 48], "queries": 32, "pool": 5}},
}  # fmt: skip
CUTS: list[dict[str, Any]] = [
    {"cuda_graphs": False},
    {"page_sizes": "max"},
    {"page_sizes": "max", "page_size": 32},
    {"memory": "uniform"},
    {"association": "paper", "preemption": "recompute", "kv_tokens": 1664},
    {"preemption": "swap", "kv_tokens": 1664},
]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, shape in SHAPES.items():
        found[name] = tmp_path_factory.mktemp(name)
        config = {key: value for key, value in {**named_config(name), **SMALL, **shape}.items() if value is not None}
        (found[name] / "config.json").write_text(json.dumps(config))
    return found


def serve(folder: Path, every: int = 0, **settings: Any) -> tuple[list[list[int]], int]:
    """Each request's tokens, and the number of preemptions. With `every`, between steps, so many apart, the youngest
    request is preempted; `depth` must be 1."""
    config = EngineConfig(
        **{"model": str(folder), "dummy_weights": True, "skip_tokenizer_init": True, "dtype": "bfloat16",
           "device": "cuda", "deterministic": True, "kv_tokens": 32768, "max_model_len": 1600, "max_num_seqs": 64,
           "max_num_batched_tokens": 128, **settings}
    )  # fmt: skip
    engine = build(config).engine
    results: dict[tuple[str, int], list[int]] = {}
    for i, length in enumerate(LENGTHS):
        params = SamplingParams(
            temperature=0.8 if i % 3 == 0 else 0.0, seed=i, max_tokens=OUTPUT, ignore_eos=True, n=3 if i == 7 else 1
        )
        engine.add(str(i), [(31 * (i % 4) + 7 * j) % 4000 + 10 for j in range(length)], params)
    scheduler, steps = engine.scheduler, 0
    while engine.unfinished:
        steps += 1
        if every and steps % every == 0 and scheduler.running:
            assert not scheduler.flight, "a step computes"
            scheduler._preempt(next(reversed(scheduler.running)))
        for output in engine.step():
            results.setdefault((output.request, output.branch), []).extend(output.tokens)
    engine.scheduler.memory.check()
    preemptions = engine.scheduler.preemptions
    engine.close()
    assert all(len(tokens) == OUTPUT for tokens in results.values())
    return [results[key] for key in sorted(results)], preemptions


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_are_the_same_in_every_memory(name: str, folders: dict[str, Path]) -> None:
    expected, _ = serve(folders[name])
    differ, preempted = [], 0
    for settings in CUTS:
        tokens, preemptions = serve(folders[name], **settings)
        preempted += preemptions
        if tokens != expected:
            same = sum(a == b for a, b in zip(tokens, expected))
            differ.append(f"{settings}: {len(expected) - same} of {len(expected)}")
    assert not differ
    assert preempted > 0


@pytest.mark.parametrize("name", SHAPES)
def test_other_kernels_agree(name: str, folders: dict[str, Path]) -> None:
    """The usual kernels, which are chosen by the batch, and torch's: in fp32, but for rounding the same."""
    usual = {"deterministic": False, "dtype": "float32"}
    ours, _ = serve(folders[name], **usual)
    torchs, _ = serve(folders[name], **usual, attention="sdpa", cuda_graphs=False)
    same = sum(a == b for a, b in zip(ours, torchs))
    assert same >= len(ours) - 3, f"{len(ours) - same} of {len(ours)} answers differ"
