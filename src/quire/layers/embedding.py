"""A table of vectors, one for each token or position."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.cpu.dispatch import has_kernels
from quire.kernels.cpu.embedding import embedding
from quire.layers.exchange import Exchange
from quire.layers.sharding import ShardRange, as_shard_range


class Embedding(nn.Module):
    """ids [T] int64 in [0, count) -> vectors [T, size], a fresh tensor; multiplied by `scale`, rounded to the dtype, if
    one is given. With `onto` [T, size], they are added to it instead, in place, and ids count from `first` on.

    Of a vocabulary that ranks share out it has the rows of a Cut, and asks for others through the exchange."""

    def __init__(
        self, count: int | ShardRange, size: int, dtype: torch.dtype, device: torch.device, scale: float | None = None
    ) -> None:
        super().__init__()
        self.shard_range = as_shard_range(count)
        self.exchange: Exchange | None = None
        self.scale = None if scale is None else torch.tensor(scale, dtype=dtype, device="cpu").item()
        weight = nn.Parameter(
            torch.empty(self.shard_range.padded, size, dtype=dtype, device=device), requires_grad=False
        )
        self.weight: Tensor | None = weight
        self.use_cpu_kernel = False
        self.packed_lookup: Callable[..., Tensor] | None = None

    def tie_to_packed(self, product: object) -> None:
        """The weight is a head's too, which has packed it for `product`; if rows can be read from there, it is not
        needed twice."""
        from quire.kernels.cpu import linear, low_bit_linear

        if isinstance(product, linear.PackedLinear):
            self.packed_lookup, self.weight = partial(linear.lookup_rows, product), None
        if isinstance(product, low_bit_linear.PackedLowBitLinear):
            self.packed_lookup, self.weight = partial(low_bit_linear.lookup_rows, product), None

    def forward(self, ids: Tensor, add_to: Tensor | None = None, offset: int = 0) -> Tensor:
        if self.exchange is not None:
            assert add_to is None, "positions are not shared out"
            return self._lookup_sharded(ids, self.exchange)
        if self.packed_lookup is not None:
            assert add_to is None, "a head's rows are of tokens"
            return self.packed_lookup(ids, 1.0 if self.scale is None else self.scale)
        assert self.weight is not None, "a table is plain or packed"
        if self.use_cpu_kernel:
            return embedding(ids, self.weight, scale=self.scale, add_to=add_to, offset=offset)
        found = F.embedding(ids + offset if offset else ids, self.weight)
        if self.scale is not None:
            found.mul_(self.scale)
        return found if add_to is None else add_to.add_(found)

    def _lookup_sharded(self, ids: Tensor, exchange: Exchange) -> Tensor:
        """Each vector is that of the one rank that has it, since it is added to zeros."""
        own = self.shard_range.local
        other = (ids < own.start) | (ids >= own.stop)
        ids = (ids - own.start).masked_fill_(other, 0)
        if self.packed_lookup is not None:
            found = self.packed_lookup(ids, 1.0)
        else:
            assert self.weight is not None, "a table is plain or packed"
            found = F.embedding(ids, self.weight)
        found = exchange.all_reduce(found.masked_fill_(other[:, None], 0))
        return found if self.scale is None else found.mul_(self.scale)

    def prepare(self) -> None:
        """Call once, after loading. On a CPU an operation of ours does it."""
        if self.weight is not None:
            self.use_cpu_kernel = has_kernels(self.weight.device, self.weight.dtype)
