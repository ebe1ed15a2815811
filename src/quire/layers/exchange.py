"""What the ranks that share out a model's layers tell each other in a step: sums, and rows of the vocabulary. How they
do it is not known here.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quire.layers.sharding import ShardRange
from quire.protocol.parallel_layout import Shard


class Exchange(Protocol):
    """One rank's end of it. All ranks call the same in the same order, with tensors of the same shape and dtype."""

    @property
    def shard(self) -> Shard: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """x, in place and returned: the sum of all ranks', taken in fp32 and in rank order, then rounded. All ranks
        have the same bits."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[ranks, *x.shape]: everybody's, in rank order."""
        ...

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """x's numbers, each the largest of all ranks'; while weights are loaded."""
        ...

    def check_peers(self) -> None:
        """Once a step is done: an error if it isn't what it should be, since another rank was missed."""
        ...


class OverlappedAllReduce(Protocol):
    """An Exchange's, where what ranks add up can be sent while it is computed. All ranks send the same."""

    def split_rows(self, rows: int, nbytes: int) -> tuple[slice, ...]:
        """In what pieces of so many rows, which have nbytes, a product is to be computed; none: as a whole."""
        ...

    def send_rows(self, delta: Tensor, rows: slice) -> None:
        """Send a piece of delta, which is to be the next to be added up."""
        ...


def gather_logits(logits: Tensor, vocabulary: ShardRange, exchange: Exchange | None) -> Tensor:
    """The logits [R, vocab_size] of which these are one rank's [R, its rows of the vocabulary], without padding; the
    same tensor where nobody has others."""
    if exchange is None:
        return logits
    ranks = vocabulary.shard.tp_size
    own = [len(Shard(rank, ranks).vocab_range(vocabulary.total)) for rank in range(ranks)]
    return torch.cat([rows[:, :count] for rows, count in zip(exchange.all_gather(logits), own, strict=True)], dim=1)


class StageNeighbours(Protocol):
    """A stage's way to those before and behind it."""

    def send(self, x: Tensor, delta: Tensor | None) -> None:
        """x [T, hidden], and what is to be added to it before the next layer (of several ranks a part of that)."""
        ...

    def receive(self, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The same of the stage before's next step, which has so many rows."""
        ...
