"""The communication of tensor-parallel ranks within a step: sums, and rows of the vocabulary; interfaces, and the base
class of the modules that use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.layers.sharding import ShardRange
from quire.protocol.parallel_layout import Shard


class Exchange(Protocol):
    """The collectives of one rank. All ranks make the same calls in the same order, with equal shapes and dtypes."""

    @property
    def shard(self) -> Shard: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace x by the sum over all ranks, and return it. It is computed in fp32 in rank order, then rounded: all
        ranks have the same bits."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' tensors, [ranks, *x.shape], in rank order."""
        ...

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Return the element-wise maximum over all ranks. Used while weights are loaded."""
        ...

    def check_peers(self) -> None:
        """Raise an error, after a step, if its results are wrong because another rank did not take part."""
        ...


@runtime_checkable
class OverlappedAllReduce(Protocol):
    """An Exchange that can send parts of a sum while the rest is computed. All ranks send the same rows."""

    def split_rows(self, rows: int, nbytes: int) -> tuple[slice, ...]:
        """Return the pieces in which to compute a product of `rows` rows and `nbytes` bytes; none: as a whole."""
        ...

    def send_rows(self, delta: Tensor, rows: slice) -> None:
        """Send these rows of delta, the next tensor to be all-reduced."""
        ...


class ShardedModule(nn.Module):
    """A module that communicates with the other ranks, once `connect` has been called."""

    exchange: Exchange | None = None
    all_reduce_norm: Callable[..., Tensor | None] | None = None  # all-reduce, residual sum and norm in one launch

    def connect(self, exchange: Exchange) -> None:
        """Communicate through `exchange` from now on. Call at most once, before or after `prepare`."""
        self.exchange, self.all_reduce_norm = exchange, getattr(exchange, "all_reduce_norm", None)


def gather_logits(logits: Tensor, vocabulary: ShardRange, exchange: Exchange | None) -> Tensor:
    """Return the logits [R, vocab_size] of all ranks, without padding, from one rank's [R, local rows of the
    vocabulary]; the same tensor without an exchange."""
    if exchange is None:
        return logits
    ranks = vocabulary.shard.tp_size
    counts = [len(Shard(rank, ranks).vocab_range(vocabulary.total)) for rank in range(ranks)]
    return torch.cat([part[:, :count] for part, count in zip(exchange.all_gather(logits), counts, strict=True)], dim=1)


class StageNeighbours(Protocol):
    """The connections of a pipeline stage to the previous and the next one."""

    def send(self, x: Tensor, delta: Tensor | None) -> None:
        """Send x [T, hidden] and the delta to be added before the next layer (of several ranks, this one's term)."""
        ...

    def receive(self, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Receive x and delta of the previous stage's next step, with this number of rows."""
        ...
