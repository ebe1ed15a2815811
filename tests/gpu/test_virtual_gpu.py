"""The memory `virtual` on a GPU: the tokens of the paged memory, to the bit with `deterministic`, through graphs that
were captured before any of a sequence's pages was mapped."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_serving import Served, greedy, prompt, served

pytestmark = pytest.mark.gpu

LENGTHS = (5, 130, 17, 64, 700, 1, 33, 250, 90, 16, 71, 128, 40, 2100, 9, 77)
REQUESTS = [
    (prompt(i % 4, length), greedy(48, temperature=0.0 if i % 3 else 0.8, seed=i, n=3 if i % 5 == 4 else 1))
    for i, length in enumerate(LENGTHS)
]


def serve(**settings: Any) -> Served:
    return served(
        REQUESTS,
        **{"model_config": "llama-125m", "dtype": "float32", "max_model_len": 2304, "kv_tokens": 32768,
           "max_num_seqs": 64, **settings},
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["sliced", "sliced:4", "layer"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"cuda_graphs": False}, *({"preemption": how, "kv_tokens": 4096} for how in ("swap", "recompute"))],
    ids=str,
)
def test_tokens_are_those_of_the_paged_memory(settings: dict[str, Any], layout: str) -> None:
    settings = {"dtype": "bfloat16", "deterministic": True, **settings}
    expected = serve(**{**settings, "kv_tokens": 32768}).tokens
    if layout == "layer" and "kv_tokens" in settings:
        settings["kv_tokens"] *= 4  # a page holds many tokens
    found = serve(**settings, memory="virtual", virtual_layout=layout)
    assert found.tokens == expected
    assert found.mapped.maps > 0
    if "kv_tokens" in settings and layout != "layer":
        assert found.preemptions > 0


@pytest.mark.parametrize("attention", ["sdpa", "contiguous"])
def test_torch_kernels_over_it(attention: str) -> None:
    expected = serve(attention="sdpa", cuda_graphs=False).tokens
    tokens = serve(attention=attention, memory="virtual", cuda_graphs=False, virtual_page_kib=18 * 1024).tokens
    same = sum(a == b for a, b in zip(tokens, expected))
    assert same >= len(expected) - 2, f"{len(expected) - same} of {len(expected)} answers differ"
