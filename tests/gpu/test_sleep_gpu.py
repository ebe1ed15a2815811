"""Sleep on a GPU: memory leaves the device and comes back, graphs are captured again, tokens are the same."""

from __future__ import annotations

import pytest
import torch
from gpu_serving import answers, greedy, prompt

from quire.config import EngineConfig
from quire.startup.build import build

pytestmark = pytest.mark.gpu

REQUESTS = [
    (prompt(i, length), greedy(24, temperature=0.8 * (i % 2), seed=i))
    for i, length in enumerate((5, 130, 17, 64, 300, 1))
]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("memory", ["paged", "virtual"])
def test_memory_leaves_and_comes_back(memory: str, graphs: bool) -> None:
    built = build(
        EngineConfig(
            model_config="llama-125m", dummy_weights=True, dtype="bfloat16", device="cuda", memory=memory,
            cuda_graphs=graphs, kv_tokens=16384, deterministic=True,
        )
    )  # fmt: skip
    engine, plan = built.engine, built.memory_plan
    wanted = answers(engine, REQUESTS)
    for level in (1, 2, 1):
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        engine.sleep(level)
        assert torch.cuda.mem_get_info()[0] - free > 0.9 * (plan.weight_bytes + plan.kv_bytes)
        engine.wake()
        assert (engine.runner.decode_graphs is not None) == graphs
        assert answers(engine, REQUESTS) == wanted
        assert abs(torch.cuda.mem_get_info()[0] - free) < 0.1 * (plan.weight_bytes + plan.kv_bytes), "memory is lost"
    engine.close()
