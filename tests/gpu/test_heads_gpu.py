"""Speculation heads on a GPU, with graphs: drafts of the published heads, the tokens of steps of one token, and none
waits for a kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_serving import answers, engine_of, greedy, nothing_is_compiled, prompt, served
from published_heads import HEAD
from test_served_heads import Models, check_greedy, models

pytestmark = pytest.mark.gpu
__all__ = ["models"]

NEAR_TIES = 0.03  # the share of drafts in which two logits are so near that their order depends on the kernel
REQUESTS = [
    (prompt(i, length), greedy(40, seed=i, temperature=0.0 if i % 3 else 0.8))
    for i, length in enumerate((5, 130, 17, 64, 300, 1, 33, 250, 90, 16, 71, 128))
]
SETTINGS: dict[str, Any] = {
    "model_config": "llama-125m", "kv_tokens": 32768, "max_model_len": 1024, "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"cuda_graphs": False}, {"max_num_batched_tokens": 7, "page_size": 16}, {"preemption": "swap"},
        {"preemption": "recompute"}, {"kv_tokens": 160, "max_num_seqs": 3}, {"attention": "sdpa"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_head_drafts_as_the_published_one(
    models: Any, kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    model: Models = models(kind)
    check_greedy(model, monkeypatch, most_wrong=NEAR_TIES, **settings)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An EAGLE-3 head of random weights for llama-125m."""
    folder = tmp_path_factory.mktemp("head")
    shape = {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 2048}
    vocab = {"vocab_size": 32000, "draft_vocab_size": 8000}
    Path(folder, "config.json").write_text(json.dumps({**HEAD, **shape, **vocab}))
    return {"speculative_method": "eagle3", "speculative_model": str(folder), "num_speculative_tokens": 3}


def test_tokens_are_those_without_a_head(head: dict[str, Any]) -> None:
    given = {**SETTINGS, "deterministic": True}
    expected = served(REQUESTS, **given).tokens
    assert served(REQUESTS, **given, **head, adaptive_speculation=False).tokens == expected


@pytest.mark.parametrize("adaptive", [True, False])
def test_nothing_is_compiled_once_it_serves(head: dict[str, Any], adaptive: bool) -> None:
    engine = engine_of(**SETTINGS, **head, adaptive_speculation=adaptive)
    with nothing_is_compiled():
        assert len(answers(engine, REQUESTS)) == len(REQUESTS)
    assert adaptive or engine.stats.draft_tokens > 500
    engine.close()
