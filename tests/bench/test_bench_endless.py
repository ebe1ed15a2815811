"""Endless sequences: of any length the same first requests, and as many as a rate brings."""

from __future__ import annotations

import pytest

from quire.bench.endless import BLOCK, Endless
from quire.bench.workloads import MAX_REQUESTS
from quire.errors import StartupError

NAMES = ("sharegpt", "alpaca", "chat", "wmt1shot", "arxiv-qa", "docqa:3:900", "shared:9:9:9", "fixed:9:9")


@pytest.mark.parametrize("name", NAMES)
def test_a_longer_sequence_begins_with_a_shorter_one(name: str) -> None:
    long = Endless(name, BLOCK + 30).sketches(7)
    assert len(long) == BLOCK + 30
    for count in (1, 63, 65, BLOCK, BLOCK + 1):
        assert Endless(name, count).sketches(7) == long[:count]


@pytest.mark.parametrize("name", ["arxiv-qa", "docqa:3:900"])
def test_blocks_have_documents_of_their_own(name: str) -> None:
    made = Endless(name, 2 * BLOCK)
    lengths: dict[str, int] = {}
    for sketch in made.sketches():
        assert lengths.setdefault(sketch.prefix_id, sketch.prefix_len) == sketch.prefix_len
    assert len(lengths) == (6 if name.startswith("docqa") else 2 * BLOCK // 4)


def test_prefixes_of_every_request_stay_one() -> None:
    for name in ("wmt1shot", "shared:9:9:9"):
        assert len({sketch.prefix_id for sketch in Endless(name, BLOCK + 1).sketches()}) == 1


@pytest.mark.parametrize(("rate", "seconds", "count"), [(1e-6, 1, 1), (2, 3, 6), (2.1, 3, 7), (1e5, 1, MAX_REQUESTS)])
def test_as_many_as_come(rate: float, seconds: float, count: int) -> None:
    assert Endless.lasting("alpaca", rate, seconds).requests == count


def test_more_than_a_workload_may_have() -> None:
    with pytest.raises(StartupError, match=r"320 requests/s for 600 seconds are 192,000 requests, more than 100,000"):
        Endless.lasting("fixed:4:1", 320, 600)
