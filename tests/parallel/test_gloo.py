"""Ranks' sums over gloo: in rank order, in fp32, the same bits everywhere; and a peer that is gone is said to be."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.errors import PeerLost
from quire.parallel.gloo import GlooExchange
from quire.vocabulary.layout import Layout, Part


def on_ranks(ranks: int, work: Callable[[GlooExchange], Any]) -> list[Any]:
    """What `work` returns, or raises, on each of some ranks."""
    store, found = os.memfd_create("store"), [None] * ranks

    def run(part: Part) -> None:
        try:
            found[part.rank] = work(GlooExchange(part, store, 5.0))
        except PeerLost as error:
            found[part.rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(part,)) for part in Layout(ranks).parts()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    os.close(store)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_taken_in_rank_order_in_fp32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    given = torch.randn((4, 7, 33), generator=generator).to(dtype)
    wanted = given[0].float()
    for other in given[1:]:
        wanted = wanted + other.float()

    def work(exchange: GlooExchange) -> torch.Tensor:
        mine = given[exchange.part.rank].clone()
        assert exchange.add(mine) is mine
        return mine

    for found in on_ranks(4, work):
        assert torch.equal(found, wanted.to(dtype))
    backwards = given[3].float() + given[2].float() + given[1].float() + given[0].float()
    assert dtype is not torch.float32 or not torch.equal(backwards, wanted), "the order can't be seen"


def test_everybody_gets_all_of_it() -> None:
    """Of rows that aren't next to one another, too."""
    wide = torch.arange(24).reshape(4, 6)
    found = on_ranks(3, lambda exchange: exchange.gather((wide + 100 * exchange.part.rank)[:, 1:3]))
    for one in found:
        assert torch.equal(one, torch.stack([(wide + 100 * rank)[:, 1:3] for rank in range(3)]))


def test_a_peer_that_is_gone_is_an_error() -> None:
    def work(exchange: GlooExchange) -> object:
        if exchange.part.rank == 1:
            return None
        return exchange.add(torch.ones(3))

    first, _ = on_ranks(2, work)
    assert isinstance(first, PeerLost)
    assert "the other ranks can't be reached: " in str(first)
