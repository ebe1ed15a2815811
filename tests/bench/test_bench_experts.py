"""What `bench.expert_parallel` measures of a layer that is small enough for a test."""

from __future__ import annotations

import pytest
import torch

from bench.expert_parallel import make_layer, measure
from quire.kernels.cpu.library_loader import library
from quire.layers.experts_config import ExpertsConfig
from quire.protocol.parallel_layout import Shard


@pytest.mark.skipif(library() is None, reason="the kernels for CPUs aren't built")
@pytest.mark.parametrize("skew", [0.0, 9.0])
def test_ranks_that_are_not_equally_busy(skew: float) -> None:
    config, device = ExpertsConfig(count=10, per_token=2, intermediate=64), torch.device("cpu")
    by_columns, by_experts = (
        make_layer(64, config, "silu", Shard(0, 2, 0, 1, whole), device) for whole in (False, True)
    )
    found = measure(by_columns, by_experts, 64, 40, 2, skew, device)
    assert 0 < found["experts_mean_us"] <= found["experts_us"]
    assert found["columns_us"] > 0
    assert 1 <= found["busiest"] <= 2
    assert (found["busiest"] > 1.2) == (skew > 0)
