"""Random traces over groups that have little in common, and the bugs that only they show."""

from __future__ import annotations

import pytest
from traces import DEPTHS, Told, drawn_trace
from unlike import KNOWN, QUERIES, UNLIKE

from quire.protocol.kv_cache_config import KVCacheGroup
from quire.protocol.sequence import Sequence

every = pytest.mark.parametrize("name", UNLIKE)


def drawn(name: str, seed: int, depth: int) -> Told:
    return drawn_trace(UNLIKE[name], seed, depth, least=QUERIES if "budgets" in name else 1)


@pytest.mark.parametrize("kind", KNOWN)
def test_pages_that_are_written_are_among_those_that_are_read(kind: str) -> None:
    """Room is made for what is read, and only for that."""
    window, chunk = 5 if kind == "window" else None, 7 if kind == "chunked" else None
    group = KVCacheGroup(
        (0,), 64, 4, 100, range(1, 200), run_tokens=5, run_pages=2, window=window, kind=kind, chunk=chunk, budget=7
    )
    policy = KNOWN[kind](group)
    for seq in (None, Sequence(1, [1] * 18)):
        for start in range(40):
            for end in range(start + 1, 44):
                assert set(policy.writes(seq, start, end)) <= set(policy.reads(seq, start, end))


@pytest.mark.share(8)
@every
@pytest.mark.parametrize("depth", DEPTHS)
def test_random_traces(name: str, depth: int) -> None:
    told = [drawn(name, seed, depth) for seed in range(3)]
    assert sum(t.finished for t in told) > 12


@pytest.mark.soak
@pytest.mark.timeout(0)
@every
@pytest.mark.parametrize("depth", DEPTHS)
def test_many_random_traces(name: str, depth: int) -> None:
    for seed in range(1000, 1500):
        drawn(name, seed, depth)
