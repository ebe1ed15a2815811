"""A table of vectors, one for each token or position."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """ids [T] int64 in [0, count) -> vectors [T, size], a fresh tensor; multiplied by `scale`, rounded to the dtype, if
    one is given."""

    def __init__(
        self, count: int, size: int, dtype: torch.dtype, device: torch.device, scale: float | None = None
    ) -> None:
        super().__init__()
        self.scale = None if scale is None else torch.tensor(scale, dtype=dtype, device="cpu").item()
        weight = nn.Parameter(torch.empty(count, size, dtype=dtype, device=device), requires_grad=False)
        self.weight: Tensor | None = weight
        self.rows: Callable[..., Tensor] | None = None

    def share(self, product: object) -> None:
        """The weight is a head's too, which has packed it for `product`; if rows can be read from there, it is not
        needed twice."""
        from quire.data.kernels.cpu import linear, quantised

        for kind in (linear, quantised):
            if isinstance(product, kind.Packed):
                self.rows, self.weight = partial(kind.rows_of, product), None

    def forward(self, ids: Tensor) -> Tensor:
        if self.rows is not None:
            return self.rows(ids, 1.0 if self.scale is None else self.scale)
        assert self.weight is not None, "a table is plain or packed"
        found = F.embedding(ids, self.weight)
        return found if self.scale is None else found.mul_(self.scale)
