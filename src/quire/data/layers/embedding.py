"""A table of vectors, one for each token or position."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.data.kernels.cpu.embedding import embedding
from quire.data.kernels.cpu.rows import take
from quire.data.layers.cut import Cut, cut_of
from quire.data.layers.exchange import Exchange


class Embedding(nn.Module):
    """ids [T] int64 in [0, count) -> vectors [T, size], a fresh tensor; multiplied by `scale`, rounded to the dtype, if
    one is given. With `onto` [T, size], they are added to it instead, in place, and ids count from `first` on.

    Of a vocabulary that ranks share out it has the rows of a Cut, and asks for others through the exchange."""

    def __init__(
        self, count: int | Cut, size: int, dtype: torch.dtype, device: torch.device, scale: float | None = None
    ) -> None:
        super().__init__()
        self.cut = cut_of(count)
        self.exchange: Exchange | None = None
        self.scale = None if scale is None else torch.tensor(scale, dtype=dtype, device="cpu").item()
        weight = nn.Parameter(torch.empty(self.cut.room, size, dtype=dtype, device=device), requires_grad=False)
        self.weight: Tensor | None = weight
        self.ours = False
        self.rows: Callable[..., Tensor] | None = None

    def share(self, product: object) -> None:
        """The weight is a head's too, which has packed it for `product`; if rows can be read from there, it is not
        needed twice."""
        from quire.data.kernels.cpu import linear, quantised

        for kind in (linear, quantised):
            if isinstance(product, kind.Packed):
                self.rows, self.weight = partial(kind.rows_of, product), None

    def forward(self, ids: Tensor, onto: Tensor | None = None, first: int = 0) -> Tensor:
        if self.exchange is not None:
            assert onto is None, "positions are not shared out"
            return self._exchanged(ids, self.exchange)
        if self.rows is not None:
            assert onto is None, "a head's rows are of tokens"
            return self.rows(ids, 1.0 if self.scale is None else self.scale)
        assert self.weight is not None, "a table is plain or packed"
        if self.ours:
            return embedding(ids, self.weight, scale=self.scale, onto=onto, first=first)
        found = F.embedding(ids + first if first else ids, self.weight)
        if self.scale is not None:
            found.mul_(self.scale)
        return found if onto is None else onto.add_(found)

    def _exchanged(self, ids: Tensor, exchange: Exchange) -> Tensor:
        """Each vector is that of the one rank that has it, since it is added to zeros."""
        own = self.cut.own
        other = (ids < own.start) | (ids >= own.stop)
        ids = (ids - own.start).masked_fill_(other, 0)
        if self.rows is not None:
            found = self.rows(ids, 1.0)
        else:
            assert self.weight is not None, "a table is plain or packed"
            found = F.embedding(ids, self.weight)
        found = exchange.add(found.masked_fill_(other[:, None], 0))
        return found if self.scale is None else found.mul_(self.scale)

    def prepare(self) -> None:
        """Call once, after loading. On a CPU an operation of ours does it."""
        if self.weight is not None:
            self.ours = take(self.weight.device, self.weight.dtype)
