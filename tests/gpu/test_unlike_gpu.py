"""Layers of unlike kinds, and ones that keep a running state, on a GPU: one model's tokens are the same however its
memory is cut into pages, whichever is preempted, whether its steps are graphs, and with what they share a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_serving import Served, greedy, prompt, served

from quire.models.named_configs import named_config

pytestmark = pytest.mark.gpu

LENGTHS = (5, 130, 17, 64, 700, 1, 33, 250, 90, 16, 71, 128, 40, 1500, 9, 77)
REQUESTS = [
    (prompt(i % 4, length, 4000), greedy(96, temperature=0.0 if i % 3 else 0.8, seed=i, n=3 if i == 7 else 1))
    for i, length in enumerate(LENGTHS)
]
SMALL = {
    "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024,
    "vocab_size": 4096, "max_position_embeddings": 2304, "dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
STATES = {
    "num_attention_heads": 4, "mamba_dt_rank": 32, "attn_layer_period": 4, "attn_layer_offset": 0, "num_experts": 8
}  # fmt: skip
SLIDING = {"head_dim": 256, "sliding_window": 100}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-2-9b": ("gemma-2-9b", {"num_hidden_layers": 6, **SLIDING, "query_pre_attn_scalar": 256}),
    "gemma-3-4b": ("gemma-3-4b", {"num_hidden_layers": 6, **SLIDING, "rope_scaling": None}),
    "ministral-8b": ("ministral-8b", {"num_hidden_layers": 8, "head_dim": 128, "sliding_window": 100,
                                      "layer_types": ["full_attention", *["sliding_attention"] * 3] * 2}),
    "characterai-8b": ("characterai-8b", {"num_hidden_layers": 6, "head_dim": 64, "sliding_window": 100,
                                          "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
                                          "kv_sharing": [None, 0, None, 2, None, None]}),
    "llama-125m": ("llama-125m", {"num_hidden_layers": 4, "head_dim": 64, "attention_chunk_size": 100,
                                  "layer_types": ["chunked_attention", "full_attention"] * 2}),
    "pyramidkv-8b": ("pyramidkv-8b", {"num_hidden_layers": 4, "head_dim": 128, "rope_scaling": None,
                                      "pyramid_kv": {"budgets": [144, 112, 80, 48], "queries": 32, "pool": 5}}),
    "state last": ("jamba-52b", {**STATES, "num_hidden_layers": 7}),
    "attention last": ("jamba-52b", {**STATES, "num_hidden_layers": 5}),
    "no attention": ("mamba-2.8b", {**STATES, "num_hidden_layers": 4, "time_step_rank": 32}),
}  # fmt: skip
STATEFUL = ("state last", "attention last", "no attention")
CUTS: list[dict[str, Any]] = [
    {"cuda_graphs": False},
    {"page_sizes": "max"},
    {"page_sizes": "max", "page_size": 32},
    {"memory": "uniform"},
    {"association": "paper", "preemption": "recompute", "kv_tokens": 1664},
    {"preemption": "swap", "kv_tokens": 1664},
]
STATE_CUTS: list[dict[str, Any]] = [
    {"cuda_graphs": False},
    {"state_tokens": 512},
    {"state_tokens": 16, "max_num_batched_tokens": 96},
    {"page_sizes": "max"},
    {"memory": "uniform"},
    {"enable_prefix_caching": False},
    {"preemption": "recompute", "every": 5, "depth": 1},
    {"preemption": "swap", "every": 5, "depth": 1},
]


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A shape's name, and its folder."""
    folder, (name, shape) = tmp_path_factory.mktemp("model"), SHAPES[request.param]
    config = {key: value for key, value in {**named_config(name), **SMALL, **shape}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return request.param, folder


def serve(model: tuple[str, Path], **settings: Any) -> Served:
    name, folder = model
    runs = {"state_tokens": 64} if name in STATEFUL else {}
    return served(
        REQUESTS,
        **{"model": str(folder), "deterministic": True, "kv_tokens": 32768, "max_model_len": 1600, "max_num_seqs": 64,
           "max_num_batched_tokens": 128, **runs, **settings},
    )  # fmt: skip


def test_tokens_are_the_same_in_every_memory(model: tuple[str, Path]) -> None:
    """With states in float32, since what is rounded at the end of a step depends on where steps end."""
    expected = serve(model).tokens
    if model[0] in STATEFUL:
        assert len({tuple(tokens) for tokens in expected}) > len(expected) // 2
    differ, preempted = [], 0
    for settings in STATE_CUTS if model[0] in STATEFUL else CUTS:
        tokens, preemptions, _ = serve(model, **settings)
        preempted += preemptions
        if model[0] in STATEFUL:
            assert (preemptions > 10) == ("preemption" in settings)
        if tokens != expected:
            same = sum(a == b for a, b in zip(tokens, expected))
            differ.append(f"{settings}: {len(expected) - same} of {len(expected)}")
    assert not differ
    assert preempted > 0


def test_other_kernels_agree(model: tuple[str, Path]) -> None:
    """The usual kernels, which are chosen by the batch, and torch's attention: in fp32, but for rounding the same."""
    usual = {"deterministic": False, "dtype": "float32"}
    ours = serve(model, **usual).tokens
    torchs = serve(model, **usual, attention="sdpa", cuda_graphs=False).tokens
    same = sum(a == b for a, b in zip(ours, torchs))
    assert same >= len(ours) - 3, f"{len(ours) - same} of {len(ours)} answers differ"
