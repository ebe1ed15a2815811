"""Random traces of requests with pictures, some of them the same."""

from __future__ import annotations

import random

import pytest
from pictured import PICTURED
from traces import Told, run_trace

WAYS = ("swap", "recompute", "auto")
every = pytest.mark.parametrize("name", PICTURED)


def drawn_trace(name: str, seed: int, depth: int) -> Told:
    rng = random.Random(seed)
    budget = rng.choice((1, 3, 8, 16, 64))
    return run_trace(
        PICTURED[name],
        seed=seed,
        depth=depth,
        budget=64 if "both-ways" in name else budget,
        tokens=rng.choice((64, 96, 128, 256)),
        max_seqs=rng.choice((3, 8)),
        preemption=rng.choice(WAYS),
        host=rng.choice((0, 12, 1000)),
        prefix_tokens=rng.choice((0, 24)) if "both-ways" not in name else 0,
        unforked=rng.choice((0.0, 0.0, 0.1)),
    )


@pytest.mark.share(8)
@every
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_random_traces(name: str, depth: int) -> None:
    told = [drawn_trace(name, seed, depth) for seed in range(4)]
    assert sum(t.finished for t in told) > 12
    assert sum(t.parts for t in told) > 10
