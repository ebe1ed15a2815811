"""Token and position embeddings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.cpu.rows import embedding, has_kernels
from quire.layers.exchange import Exchange, ShardedModule
from quire.layers.sharding import ShardRange, as_shard_range


class Embedding(ShardedModule):
    """ids [T] int64 in [0, count) -> vectors [T, size], a new tensor, multiplied by `scale` (rounded to the dtype) if
    given. With `add_to` [T, size] they are added to it instead, in place; `offset` is added to the ids.

    If ranks divide a vocabulary, the table has the rows of a ShardRange; the others come through the exchange."""

    __call__: Callable[..., Tensor]

    def __init__(
        self, count: int | ShardRange, size: int, dtype: torch.dtype, device: torch.device, scale: float | None = None
    ) -> None:
        super().__init__()
        self.shard_range = as_shard_range(count)
        self.scale = None if scale is None else torch.tensor(scale, dtype=dtype, device="cpu").item()
        weight = nn.Parameter(
            torch.empty(self.shard_range.padded, size, dtype=dtype, device=device), requires_grad=False
        )
        self.weight: nn.Parameter | None = weight
        self.use_cpu_kernel = False
        self.packed_lookup: Callable[..., Tensor] | None = None

    def connect(self, exchange: Exchange) -> None:
        """See ShardedModule. A whole table needs no exchange."""
        if self.shard_range.is_sharded:
            super().connect(exchange)

    def tie_to_packed(self, product: object) -> None:
        """Look rows up in `product`, the packed weight of a tied head, and drop the plain weight, if rows can be read
        from that packing."""
        from quire.kernels.cpu.linear import PackedWeight, lookup_rows

        if isinstance(product, PackedWeight):
            self.packed_lookup, self.weight = partial(lookup_rows, product), None

    def forward(self, ids: Tensor, add_to: Tensor | None = None, offset: int = 0) -> Tensor:
        if self.exchange is not None:
            assert add_to is None, "position embeddings are not sharded"
            return self._lookup_sharded(ids, self.exchange)
        if self.packed_lookup is not None:
            assert add_to is None, "a tied head's rows are token embeddings"
            return self.packed_lookup(ids, 1.0 if self.scale is None else self.scale)
        assert self.weight is not None, "a table is plain or packed"
        if self.use_cpu_kernel:
            return embedding(ids, self.weight, scale=self.scale, add_to=add_to, offset=offset)
        vectors = F.embedding(ids + offset if offset else ids, self.weight)
        if self.scale is not None:
            vectors.mul_(self.scale)
        return vectors if add_to is None else add_to.add_(vectors)

    def _lookup_sharded(self, ids: Tensor, exchange: Exchange) -> Tensor:
        """Sum the ranks' vectors. Each is zero on all ranks but the one that has its row, so the sum is exact."""
        local = self.shard_range.local
        missing = (ids < local.start) | (ids >= local.stop)
        ids = (ids - local.start).masked_fill_(missing, 0)
        if self.packed_lookup is not None:
            vectors = self.packed_lookup(ids, 1.0)
        else:
            assert self.weight is not None, "a table is plain or packed"
            vectors = F.embedding(ids, self.weight)
        vectors = exchange.all_reduce(vectors.masked_fill_(missing[:, None], 0))
        return vectors if self.scale is None else vectors.mul_(self.scale)

    def prepare(self) -> None:
        """Choose the kernel: on a CPU quire's own. Call once, after loading."""
        if self.weight is not None:
            self.use_cpu_kernel = has_kernels(self.weight.device, self.weight.dtype)
