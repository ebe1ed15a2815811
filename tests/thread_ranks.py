"""Ranks for tests: threads of one process, whose exchange is a list that each writes in its place. Slow, and obviously
right."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor

from quire.protocol.parallel_layout import Shard

T = TypeVar("T")
PATIENCE = 120.0  # seconds


class Meeting:
    """Where so many ranks meet."""

    def __init__(self, ranks: int, expert_parallel: bool = False) -> None:
        self.expert_parallel = expert_parallel
        self.barrier = Barrier(ranks, timeout=PATIENCE)
        self.given: list[Tensor] = [torch.empty(0)] * ranks

    def run(self, work: Callable[[ThreadExchange], T]) -> list[T]:
        """What each rank makes of its exchange, all at a time; the first one's error, not its echoes."""
        ranks = len(self.given)

        def one(rank: int) -> T:
            try:
                return work(ThreadExchange(self, Shard(rank, ranks, expert_parallel=self.expert_parallel)))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(ranks) as threads:
            done = [threads.submit(one, rank) for rank in range(ranks)]
        errors = [error for future in done if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        return [future.result() for future in done]


class ThreadExchange:
    """One rank's end (see quire.layers.exchange)."""

    def __init__(self, meeting: Meeting, part: Shard) -> None:
        self.meeting, self.shard = meeting, part

    def all_gather(self, x: Tensor) -> Tensor:
        self.meeting.given[self.shard.tp_rank] = x
        self.meeting.barrier.wait()
        shapes = {(each.shape, each.dtype) for each in self.meeting.given}
        assert len(shapes) == 1, f"ranks exchange unlike tensors: {shapes}"
        found = torch.stack(self.meeting.given)
        self.meeting.barrier.wait()  # nobody writes his own before all have read it
        return found

    def check_peers(self) -> None:
        """Barriers tell."""

    def all_reduce(self, x: Tensor) -> Tensor:
        total, *others = self.all_gather(x).float()
        for other in others:
            total = total + other
        return x.copy_(total)
