"""A model's view of one step (quire.data.models.attending): positions, and attention over the pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.data.kernels.batch import Batch
from quire.data.layers.norm import RMSNorm
from quire.data.layers.rotary import Rotary, queries_keys_values
from quire.data.runner.store import Store


class StepContext:
    """Attention by a backend's `attend`, after the rotation."""

    def __init__(self, batch: Batch, store: Store, backend: Any, narrow: bool = False) -> None:
        """`narrow`: only the hidden states of tokens that end the rows that sample are wanted, `batch.narrowed()`'s."""
        self.positions = batch.positions
        self.batch, self.caches, self.backend = batch, store.caches, backend
        self.asked = batch.narrowed() if narrow else None
        self.plans: dict[int, Any] = {}
        self.angles: dict[int, tuple[Tensor, Tensor]] = {}  # of each rotary embedding

    def attend(
        self, layer: int, qkv: Tensor, rotary: Rotary | None = None, norms: tuple[RMSNorm, RMSNorm] | None = None
    ) -> Tensor:
        """See quire.data.models.attending."""
        cache = self.caches[layer]
        asked = self.asked if layer == len(self.caches) - 1 else None
        plan = self.plans.get(cache.group) if asked is None else self.backend.plan(self.batch, cache.group, asked)
        if plan is None:
            plan = self.plans[cache.group] = self.backend.plan(self.batch, cache.group)
        scale = cache.head_dim**-0.5
        if self.backend.rotates:
            return self.backend.rotate_and_attend(qkv, rotary, norms, cache, plan, scale)
        angles = self._angles(rotary, qkv.dtype) if rotary is not None else None
        q, k, v = queries_keys_values(qkv, cache.heads, angles, norms)
        if asked is not None:
            q = q.index_select(0, asked.ends)
        return self.backend.attend(q, k, v, cache, plan, scale)

    def wanted(self, layer: int, x: Tensor) -> Tensor:
        """See quire.data.models.attending."""
        if self.asked is None or layer < len(self.caches) - 1:
            return x
        return x.index_select(0, self.asked.ends)

    def _angles(self, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = self.angles.get(id(rotary))
        if angles is None:
            angles = self.angles[id(rotary)] = rotary.at(self.positions, dtype)
        return angles
