"""Random traces of requests with pictures, some of them the same."""

from __future__ import annotations

import pytest
from pictured import PICTURED
from traces import DEPTHS, drawn_trace


@pytest.mark.share(8)
@pytest.mark.parametrize("name", PICTURED)
@pytest.mark.parametrize("depth", DEPTHS)
def test_random_traces(name: str, depth: int) -> None:
    settings = {"least": 64, "prefixes": (0,)} if "both-ways" in name else {}
    told = [drawn_trace(PICTURED[name], seed, depth, **settings) for seed in range(4)]
    assert sum(t.finished for t in told) > 12
    assert sum(t.parts for t in told) > 10
