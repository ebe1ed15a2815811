"""A table of vectors, one for each token or position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """ids [T] int64 in [0, count) -> vectors [T, size], a fresh tensor."""

    def __init__(self, count: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)
