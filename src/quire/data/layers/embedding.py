"""A table of vectors, one for each token or position."""

from __future__ import annotations

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
        self.weight = nn.Parameter(torch.empty(count, size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        found = F.embedding(ids, self.weight)
        return found if self.scale is None else found.mul_(self.scale)
