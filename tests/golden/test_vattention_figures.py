"""vAttention Figure 7, page by page: the pages of a request are found under its reqId, stay there when it completes,
and are the next one's. On the driver that checks, and over real pages, which keep what R1 wrote."""

from __future__ import annotations

import sys

import pytest
import torch

from bench.fake_driver import FakeDriver
from papers.reqids import pages_of
from quire.vattention import VAttention, init

TOKENS = 32  # of a page; a reqId has places for three


def cache_of(pages: int = 4) -> VAttention:
    return init(1, 2, 3 * TOKENS, 1, 32, 4, 4096, pages=pages, driver=FakeDriver(4096))


def test_figure_7() -> None:
    cache = cache_of()
    assert pages_of(cache) == ((), ()), "(a) a virtual tensor for two requests, without physical memory"

    r1 = cache.alloc_reqid()
    assert pages_of(cache) == ((), ()), "a request takes nothing before it is stepped"
    assert cache.step([1, 0]) == 0
    assert (r1, pages_of(cache)) == (0, ((0,), ())), "(b) R1 has one page"

    r2 = cache.alloc_reqid()
    for length in range(2, TOKENS + 1):
        assert cache.step([length, 0]) == 0
        assert pages_of(cache) == ((0,), ()), "a page more only when the last one is full"
    assert cache.step([TOKENS + 1, 5]) == 0
    assert (r2, pages_of(cache)) == (1, ((0, 1), (2,))), "(c) R1 has two pages, R2 one"

    before = cache.driver.counters
    cache.free_reqid(r1)
    assert cache.step([0, 6]) == 0
    assert pages_of(cache) == ((0, 1), (2,)), "(d) R1 has completed; its memory is not reclaimed"
    assert cache.counts()[:3] == (1, 2, 1)

    r3 = cache.alloc_reqid()
    assert cache.step([2 * TOKENS, 7]) == 0
    assert (r3, pages_of(cache)) == (r1, ((0, 1), (2,))), "(e) R3 has R1's tensor, which is backed already"
    after = cache.driver.counters
    assert (after.maps, after.unmaps) == (before.maps, before.unmaps), "neither mapped nor unmapped since (c)"
    assert cache.step([2 * TOKENS + 1, 8]) == 0
    assert pages_of(cache) == ((0, 1, 3), (2,)), "only what is longer than R1 was is mapped"
    cache.check()
    cache.close()


def test_figure_7_with_what_is_mapped_ahead() -> None:
    """§6.2: R2 finds a page under the reqId that it gets, and R1 its second one before it needs it."""
    cache = cache_of()
    r1 = cache.alloc_reqid()
    assert cache.step([1, 0]) == 0
    cache.map_ahead()
    assert pages_of(cache) == ((0,), (1,))
    r2 = cache.alloc_reqid()
    assert cache.step([TOKENS, 5]) == 0
    cache.map_ahead()
    assert pages_of(cache) == ((0, 2), (1,))
    assert cache.step([TOKENS + 1, 6]) == 0
    assert (r1, r2, cache.counts().in_step) == (0, 1, 1)
    cache.close()


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
def test_figure_7_in_real_pages() -> None:
    """R3 reads what R1 left, in the places that it left it at; R2's rows are its own."""
    cache = init(1, 2, 3 * TOKENS, 1, 32, 4, 4096, pages=4)
    keys = cache.tensors[0]
    r1, r2 = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step([2 * TOKENS, TOKENS]) == 0
    keys[r1, : 2 * TOKENS, 0, 0] = torch.arange(2.0 * TOKENS)
    keys[r2, :TOKENS, 0, 0] = -1
    cache.free_reqid(r1)
    r3 = cache.alloc_reqid()
    assert cache.step([2 * TOKENS, TOKENS]) == 0
    assert keys[r3, : 2 * TOKENS, 0, 0].tolist() == list(range(2 * TOKENS))
    assert set(keys[r2, :TOKENS, 0, 0].tolist()) == {-1}
    del keys
    cache.close()
