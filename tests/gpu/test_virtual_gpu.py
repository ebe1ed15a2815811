"""The memory `virtual` on a GPU: the tokens of the paged memory, to the bit with `deterministic`, through graphs that
were captured before any of a sequence's pages was mapped."""

from __future__ import annotations

from typing import Any

import pytest

from quire.build import build
from quire.config import EngineConfig
from quire.vocabulary.params import SamplingParams

pytestmark = pytest.mark.gpu

LENGTHS = (5, 130, 17, 64, 700, 1, 33, 250, 90, 16, 71, 128, 40, 2100, 9, 77)
OUTPUT = 48


def serve(**settings: Any) -> tuple[list[list[int]], int, Any]:
    """Each request's tokens, the number of preemptions, and what was mapped."""
    config = EngineConfig(
        **{"model_config": "llama-125m", "dummy_weights": True, "dtype": "float32", "device": "cuda",
           "max_model_len": 2304, "kv_tokens": 32768, "max_num_seqs": 64, **settings}
    )  # fmt: skip
    engine = build(config).engine
    results: dict[tuple[str, int], list[int]] = {}
    for i, length in enumerate(LENGTHS):
        params = SamplingParams(
            temperature=0.8 if i % 3 == 0 else 0.0, seed=i, max_tokens=OUTPUT, ignore_eos=True, n=3 if i % 5 == 4 else 1
        )
        engine.add(str(i), [(31 * (i % 4) + 7 * j) % 30000 + 10 for j in range(length)], params)
    while engine.unfinished:
        for output in engine.step():
            results.setdefault((output.request, output.branch), []).extend(output.tokens)
    engine.scheduler.memory.check()
    preemptions, mapped = engine.scheduler.preemptions, getattr(engine.runner.store, "mapped", None)
    engine.close()
    assert all(len(tokens) == OUTPUT for tokens in results.values())
    return [results[key] for key in sorted(results)], preemptions, mapped


SOME: list[dict[str, Any]] = [
    {"dtype": "bfloat16", "deterministic": True},
    {"dtype": "bfloat16", "deterministic": True, "cuda_graphs": False},
    {"dtype": "bfloat16", "deterministic": True, "preemption": "swap", "kv_tokens": 4096},
    {"dtype": "bfloat16", "deterministic": True, "preemption": "recompute", "kv_tokens": 4096},
]


@pytest.mark.parametrize("layout", ["sliced", "sliced:4", "layer"])
@pytest.mark.parametrize("settings", SOME, ids=str)
def test_tokens_are_those_of_the_paged_memory(settings: dict[str, Any], layout: str) -> None:
    roomy = {**settings, "kv_tokens": 32768}
    expected = serve(**roomy)[0]
    if layout == "layer" and "kv_tokens" in settings:
        settings = {**settings, "kv_tokens": 4 * settings["kv_tokens"]}  # a page holds many tokens
    tokens, preemptions, mapped = serve(**settings, memory="virtual", virtual_layout=layout)
    assert tokens == expected
    assert mapped.maps > 0
    if "kv_tokens" in settings and layout != "layer":
        assert preemptions > 0


@pytest.mark.parametrize("attention", ["sdpa", "contiguous"])
def test_torch_kernels_over_it(attention: str) -> None:
    expected = serve(attention="sdpa", cuda_graphs=False)[0]
    tokens = serve(attention=attention, memory="virtual", cuda_graphs=False, virtual_page_kib=18 * 1024)[0]
    same = sum(a == b for a, b in zip(tokens, expected))
    assert same >= len(expected) - 2, f"{len(expected) - same} of {len(expected)} answers differ"
