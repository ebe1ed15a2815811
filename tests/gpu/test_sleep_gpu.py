"""Sleep on a GPU: memory leaves the device and comes back, graphs are captured again, tokens are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.build import build
from quire.config import EngineConfig
from quire.control.engine import Engine
from quire.vocabulary.params import SamplingParams

pytestmark = pytest.mark.gpu

LENGTHS = (5, 130, 17, 64, 300, 1)


def tokens(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {str(i): [] for i in range(len(LENGTHS))}
    for i, length in enumerate(LENGTHS):
        params = SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True)
        engine.add(str(i), [(31 * i + 7 * j) % 30000 + 10 for j in range(length)], params)
    while engine.unfinished:
        for output in engine.step():
            found[output.request] += output.tokens
    return found


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("memory", ["paged", "virtual"])
def test_memory_leaves_and_comes_back(memory: str, graphs: bool) -> None:
    settings: dict[str, Any] = {"memory": memory, "cuda_graphs": graphs, "kv_tokens": 16384, "deterministic": True}
    built = build(EngineConfig(model_config="llama-125m", dummy_weights=True, dtype="bfloat16", device="cuda",
                               **settings))  # fmt: skip
    engine, plan = built.engine, built.plan
    wanted = tokens(engine)
    for level in (1, 2, 1):
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        engine.rest.sleep(level)
        assert torch.cuda.mem_get_info()[0] - free > 0.9 * (plan.weights + plan.kv_bytes)
        engine.rest.wake()
        assert (engine.runner.graphs is not None) == graphs
        assert tokens(engine) == wanted
        assert abs(torch.cuda.mem_get_info()[0] - free) < 0.1 * (plan.weights + plan.kv_bytes), "memory is lost"
    engine.close()
