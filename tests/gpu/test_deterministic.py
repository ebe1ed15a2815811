"""With `deterministic` a sequence's tokens and log-probabilities, to the bit, depend on nothing else that is served:
not on the batch, the chunks of its prompt, the length of a graph's padding, or preemption."""

from __future__ import annotations

from typing import Any

import pytest

from quire.build import build
from quire.config import EngineConfig
from quire.vocabulary.params import SamplingParams

pytestmark = pytest.mark.gpu

LENGTHS = (5, 130, 17, 64, 300, 1, 33, 250, 90, 16, 71, 128, 40, 200, 9, 77, 150, 31, 48, 260)
OUTPUT = 48


def serve(together: bool = True, **settings: Any) -> tuple[list[Any], int]:
    """What each request returned, and how many preemptions there were."""
    config = EngineConfig(
        **{"model_config": "llama-125m", "dummy_weights": True, "dtype": "bfloat16", "device": "cuda",
           "deterministic": True, "kv_tokens": 16384, "enable_prefix_caching": False, **settings}
    )  # fmt: skip
    engine = build(config).engine
    results: dict[str, list[Any]] = {str(i): [] for i in range(len(LENGTHS))}

    def drain() -> None:
        while engine.unfinished:
            for output in engine.step():
                results[output.request] += zip(output.tokens, (top.logprob for top in output.tops), strict=True)

    for i, length in enumerate(LENGTHS):
        temperature = 0.8 if i % 3 == 0 else 0.0
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=OUTPUT, ignore_eos=True, logprobs=0)
        engine.add(str(i), [(31 * i + 7 * j) % 30000 + 10 for j in range(length)], params)
        if not together:
            drain()
    drain()
    preemptions = engine.scheduler.preemptions
    engine.close()
    assert all(len(result) == OUTPUT for result in results.values())
    return list(results.values()), preemptions


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    return serve(together=False)[0]


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
    together, preemptions = serve(**settings)
    assert together == alone
    assert (preemptions > 0) == ("kv_tokens" in settings)


def test_without_it_the_batch_shows() -> None:
    """Otherwise the tests above would say nothing."""
    assert serve(deterministic=False)[0] != serve(deterministic=False, together=False)[0]


def test_a_vocabulary_of_an_odd_size() -> None:
    """Rows of logits that begin at odd addresses."""
    assert serve(model_config="gpt2")[0] == serve(together=False, model_config="gpt2")[0]
