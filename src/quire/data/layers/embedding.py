"""A table of vectors, one for each token or position."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.data.kernels.cpu.embedding import embedding
from quire.data.kernels.cpu.rows import take


class Embedding(nn.Module):
    """ids [T] int64 in [0, count) -> vectors [T, size], a fresh tensor; multiplied by `scale`, rounded to the dtype, if
    one is given. With `onto` [T, size], they are added to it instead, in place, and ids count from `first` on."""

    def __init__(
        self, count: int, size: int, dtype: torch.dtype, device: torch.device, scale: float | None = None
    ) -> None:
        super().__init__()
        self.scale = None if scale is None else torch.tensor(scale, dtype=dtype, device="cpu").item()
        weight = nn.Parameter(torch.empty(count, size, dtype=dtype, device=device), requires_grad=False)
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

    def prepare(self) -> None:
        """Call once, after loading. On a CPU an operation of ours does it."""
        if self.weight is not None:
            self.ours = take(self.weight.device, self.weight.dtype)
