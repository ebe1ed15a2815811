"""Ranks' sums: in rank order, in fp32, the same bits everywhere, whatever their sizes and whoever is late."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from wired import slowest

from quire.distributed import rendezvous as meetings
from quire.distributed import shared_memory_exchange
from quire.distributed.rendezvous import RankRendezvous
from quire.distributed.shared_memory_exchange import SharedMemoryExchange
from quire.errors import PeerLost
from quire.protocol.parallel_layout import ParallelLayout, Shard


def on_ranks(ranks: int, work: Callable[[SharedMemoryExchange], Any]) -> list[Any]:
    """Return what `work` returns, or the PeerLost that it raises, on each rank."""
    meeting, found = RankRendezvous(ParallelLayout(ranks)), [None] * ranks

    def run(part: Shard) -> None:
        try:
            found[part.tp_rank] = work(SharedMemoryExchange(part, meeting.meeting.fds(part), 5.0))
        except PeerLost as error:
            found[part.tp_rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(part,)) for part in ParallelLayout(ranks).shards()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    meeting.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_taken_in_rank_order_in_fp32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    given = torch.randn((4, 7, 33), generator=generator).to(dtype)
    wanted = given[0].float()
    for other in given[1:]:
        wanted = wanted + other.float()

    def work(exchange: SharedMemoryExchange) -> torch.Tensor:
        mine = given[exchange.shard.tp_rank].clone()
        assert exchange.all_reduce(mine) is mine
        return mine

    for found in on_ranks(4, work):
        assert torch.equal(found, wanted.to(dtype))
    backwards = given[3].float() + given[2].float() + given[1].float() + given[0].float()
    assert dtype is not torch.float32 or not torch.equal(backwards, wanted), "the order can't be seen"


def test_large_ones_go_in_pieces_and_nothing_is_written_over_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are late at random. The gathered tensors are not contiguous."""
    monkeypatch.setattr(shared_memory_exchange, "SLOT_BYTES", 64)
    monkeypatch.setattr(meetings, "SLOT_BYTES", 64)

    def numbers(step: int) -> torch.Tensor:
        return torch.arange(2 + 14 * (step % 9), dtype=torch.float32).view(-1, 2)

    def work(exchange: SharedMemoryExchange) -> list[torch.Tensor]:
        rng, found = random.Random(exchange.shard.tp_rank), []
        for step in range(60):
            if rng.random() < 0.2:
                time.sleep(rng.random() / 500)  # a late rank: up to 2 ms, some meetings of the others
            x = numbers(step) * (exchange.shard.tp_rank + step)
            found += [exchange.all_gather(x[:, 1:]), exchange.all_reduce(x[:, 1:].clone())]
        return found

    first, *others = on_ranks(3, work)
    for step in range(60):
        wanted = torch.stack([numbers(step)[:, 1:] * (rank + step) for rank in range(3)])
        assert torch.equal(first[2 * step], wanted)
        assert torch.equal(first[2 * step + 1], wanted.sum(0))
    for other in others:
        assert all(map(torch.equal, first, other))


def test_a_peer_that_says_nothing_is_named_as_the_one_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    behind: list[int] = []

    def work(exchange: SharedMemoryExchange) -> object:
        exchange.all_reduce(torch.ones(3))
        exchange._seconds = 0.1
        return exchange.all_reduce(torch.ones(3)) if exchange.shard.tp_rank != 1 else None

    close = RankRendezvous.close
    monkeypatch.setattr(RankRendezvous, "close", lambda self: (behind.append(slowest(self, 3)), close(self)))
    first, silent, last = on_ranks(3, work)
    assert isinstance(first, PeerLost)
    assert isinstance(last, PeerLost)
    assert silent is None
    assert behind == [1]
