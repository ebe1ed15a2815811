"""With `deterministic` a sequence's tokens and log-probabilities, to the bit, depend on nothing else that is served:
not on the batch, the chunks of its prompt, the length of a graph's padding, or preemption."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_serving import Served, greedy, prompt, served

pytestmark = pytest.mark.gpu

LENGTHS = (5, 130, 17, 64, 300, 1, 33, 250, 90, 16, 71, 128, 40, 200, 9, 77, 150, 31, 48, 260)
REQUESTS = [
    (prompt(i, length), greedy(48, temperature=0.0 if i % 3 else 0.8, seed=i, logprobs=0))
    for i, length in enumerate(LENGTHS)
]


def serve(**settings: Any) -> Served:
    return served(
        REQUESTS,
        **{"model_config": "llama-125m", "deterministic": True, "kv_tokens": 16384, "enable_prefix_caching": False,
           **settings},
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    return serve(alone=True).tokens


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 64},
        {"max_num_seqs": 3},
        {"cuda_graphs": False},
        {"kv_tokens": 1024, "preemption": "recompute"},
        {"kv_tokens": 1024, "preemption": "swap"},
        {"page_size": 64, "max_num_batched_tokens": 200},
    ],
    ids=str,
)
def test_tokens_and_their_log_probabilities_are_the_same_to_the_bit(alone: list[Any], settings: dict[str, Any]) -> None:
    together = serve(**settings)
    assert together.tokens == alone
    assert (together.preemptions > 0) == ("kv_tokens" in settings)


def test_without_it_the_batch_shows() -> None:
    """Otherwise the tests above would say nothing."""
    assert serve(deterministic=False).tokens != serve(deterministic=False, alone=True).tokens


def test_a_vocabulary_of_an_odd_size() -> None:
    """Rows of logits that begin at odd addresses."""
    assert serve(model_config="gpt2").tokens == serve(alone=True, model_config="gpt2").tokens
