"""Models whose layers keep a running state, on a GPU: tokens are the same however the memory is cut into pages, whoever
is preempted, whether steps are graphs, and with what they share a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_unlike_gpu import serve

from quire.data.models.configs import named_config

pytestmark = pytest.mark.gpu

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "state last": ("jamba-52b", {"num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "attention last": ("jamba-52b", {"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "no attention": ("mamba-2.8b", {"num_hidden_layers": 4, "time_step_rank": 32}),
}
COMMON = {
    "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096, "max_position_embeddings": 2304,
    "mamba_dt_rank": 32, "attn_layer_period": 4, "attn_layer_offset": 0, "num_experts": 8, "dtype": "bfloat16",
    "eos_token_id": 2,
}  # fmt: skip
STATES = {"state_tokens": 64}
CUTS: list[dict[str, Any]] = [
    {"cuda_graphs": False},
    {"state_tokens": 512},
    {"state_tokens": 16, "max_num_batched_tokens": 96},
    {"page_sizes": "max"},
    {"memory": "uniform"},
    {"enable_prefix_caching": False},
    {"preemption": "recompute", "every": 5, "depth": 1},
    {"preemption": "swap", "every": 5, "depth": 1},
]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, (shape, more) in SHAPES.items():
        found[name] = tmp_path_factory.mktemp("states")
        (found[name] / "config.json").write_text(json.dumps({**named_config(shape), **COMMON, **more}))
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_are_the_same_in_every_memory(name: str, folders: dict[str, Path]) -> None:
    """With states in float32, since what is rounded at the end of a step depends on where steps end."""
    expected, _ = serve(folders[name], **STATES)
    assert len({tuple(tokens) for tokens in expected}) > len(expected) // 2
    differ = []
    for settings in CUTS:
        tokens, preemptions = serve(folders[name], **{**STATES, **settings})
        assert (preemptions > 10) == ("preemption" in settings)
        if tokens != expected:
            same = sum(a == b for a, b in zip(tokens, expected))
            differ.append(f"{settings}: {len(expected) - same} of {len(expected)}")
    assert not differ


@pytest.mark.parametrize("name", SHAPES)
def test_states_in_bfloat16(name: str, folders: dict[str, Path]) -> None:
    """Graphs and launches one by one have the same numbers, since their steps end in the same places."""
    short = {**STATES, "state_dtype": "bfloat16"}
    tokens, _ = serve(folders[name], **short)
    assert tokens == serve(folders[name], **short, cuda_graphs=False)[0]


@pytest.mark.parametrize("name", SHAPES)
def test_other_kernels_agree(name: str, folders: dict[str, Path]) -> None:
    """The usual kernels, which are chosen by the batch, and torch's attention: in fp32, but for rounding the same."""
    usual = {**STATES, "deterministic": False, "dtype": "float32"}
    ours, _ = serve(folders[name], **usual)
    torchs, _ = serve(folders[name], **usual, attention="sdpa", cuda_graphs=False)
    same = sum(a == b for a, b in zip(ours, torchs))
    assert same >= len(ours) - 3, f"{len(ours) - same} of {len(ours)} answers differ"
