"""Speculative decoding of models with running states on a GPU, with graphs: the tokens are those of steps of one token,
and none waits for a kernel. Draft tokens are right up to one that depends on the length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_serving import answers, engine_of, greedy, nothing_is_compiled, prompt, served
from test_unlike_gpu import LENGTHS, SHAPES, SMALL, STATEFUL

from quire.core.speculation import NgramIndex
from quire.models.named_configs import named_config

pytestmark = pytest.mark.gpu

REQUESTS = [
    (prompt(i, length, 4000), greedy(64, temperature=0.0 if i % 3 else 0.8, seed=i)) for i, length in enumerate(LENGTHS)
]
DRAFTS: dict[str, Any] = {
    "speculative_method": "ngram", "num_speculative_tokens": 5, "adaptive_speculation": False, "prompt_lookup_min": 1
}  # fmt: skip
CUTS: list[dict[str, Any]] = [
    {},
    {"cuda_graphs": False},
    {"state_tokens": 16, "max_num_batched_tokens": 96},
    {"enable_prefix_caching": False, "num_speculative_tokens": 12},
    {"max_num_seqs": 2},
    {"preemption": "recompute", "every": 5, "depth": 1},
    {"preemption": "swap", "every": 5, "depth": 1},
]


@pytest.fixture(scope="module", params=STATEFUL)
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, (name, shape) = tmp_path_factory.mktemp("model"), SHAPES[request.param]
    config = {key: value for key, value in {**named_config(name), **SMALL, **shape}.items() if value is not None}
    Path(folder, "config.json").write_text(json.dumps(config))
    return {
        "model": str(folder), "deterministic": True, "kv_tokens": 32768, "max_model_len": 1600, "max_num_seqs": 64,
        "max_num_batched_tokens": 256, "state_tokens": 64,
    }  # fmt: skip


@pytest.fixture(scope="module")
def expected(settings: dict[str, Any]) -> list[list[int]]:
    tokens = served(REQUESTS, **settings).tokens
    assert len({tuple(one) for one in tokens}) > len(tokens) // 2
    return tokens


@pytest.fixture(autouse=True)
def _right_drafts(expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    # `answers` sorts request names as text.
    names = sorted(range(len(REQUESTS)), key=str)
    texts = [[*REQUESTS[i][0], *tokens] for i, tokens in zip(names, expected)]

    def propose(self: NgramIndex, tokens: list[int], count: int) -> tuple[int, ...]:
        text = next((text for text in texts if text[: len(tokens)] == tokens), [])
        wrong = len(tokens) * 7 % 6
        return tuple((token + (i == wrong)) % 4096 for i, token in enumerate(text[len(tokens) :][:count]))

    monkeypatch.setattr(NgramIndex, "propose", propose)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_tokens_are_the_same(settings: dict[str, Any], expected: list[list[int]], cut: dict[str, Any]) -> None:
    """To the bit with `deterministic` and states in float32."""
    found = served(REQUESTS, **{**settings, **DRAFTS, **cut})
    differ = sum(a != b for a, b in zip(found.tokens, expected, strict=True))
    assert not differ, f"{differ} of {len(expected)} answers differ"
    assert (found.preemptions > 5) == ("preemption" in cut)


def test_nothing_is_compiled_once_it_serves(settings: dict[str, Any], expected: list[list[int]]) -> None:
    engine = engine_of(**{**settings, **DRAFTS, "deterministic": False})
    with nothing_is_compiled():
        assert len(answers(engine, REQUESTS)) == len(expected)
    assert engine.stats.accepted_tokens > 20  # in batches of other sizes the tokens soon differ
    engine.close()
