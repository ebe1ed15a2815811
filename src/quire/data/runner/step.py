"""A model's view of one step (quire.data.models.attending): positions, and attention over the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.data.kernels.batch import Batch, LayerCache
from quire.data.layers.norm import RMSNorm
from quire.data.layers.rotary import Rotary, queries_keys_values

Planner = Callable[[LayerCache, Batch | None], Any]
"""A backend's plan of a step for a layer like this one: for queries of all tokens, or of those asked for."""


class Step:
    """Attention by a backend, planned once for each kind of layers."""

    def __init__(
        self, positions: Tensor, caches: Sequence[LayerCache], backend: Any, plan: Planner, asked: Batch | None = None
    ) -> None:
        """With `asked`, the model's last layer has queries of its tokens alone."""
        self.positions, self.caches, self.backend, self.plan, self.asked = positions, caches, backend, plan, asked
        self.plans: dict[Any, Any] = {}
        self.angles: dict[int, tuple[Tensor, Tensor]] = {}  # of each rotary embedding

    @classmethod
    def of(cls, batch: Batch, caches: Sequence[LayerCache], backend: Any, narrow: bool = False) -> Step:
        """The step of a batch. `narrow`: only the hidden states of tokens that end the rows that sample are wanted,
        `batch.narrowed()`'s."""

        def plan(cache: LayerCache, asked: Batch | None) -> Any:
            return backend.plan(batch, cache, asked)

        return cls(batch.positions, caches, backend, plan, batch.narrowed() if narrow else None)

    def attend(
        self, layer: int, qkv: Tensor, rotary: Rotary | None = None, norms: tuple[RMSNorm, RMSNorm] | None = None,
        last: bool = False,
    ) -> Tensor:  # fmt: skip
        """See quire.data.models.attending."""
        cache = self.caches[layer]
        asked = self.asked if last else None
        plan = self.planned(cache) if asked is None else self.plan(cache, asked)
        if self.backend.rotates:
            return self.backend.rotate_and_attend(qkv, rotary, norms, cache, plan)
        angles = self._angles(rotary, qkv.dtype) if rotary is not None else None
        q, k, v = queries_keys_values(qkv, cache.heads, angles, norms)
        if asked is not None:
            q = q.index_select(0, asked.ends)
        return self.backend.attend(q, k, v, cache, plan)

    def wanted(self, x: Tensor) -> Tensor:
        """See quire.data.models.attending."""
        return x if self.asked is None else x.index_select(0, self.asked.ends)

    def planned(self, cache: LayerCache) -> Any:
        """The plan for queries of all tokens."""
        plan = self.plans.get(cache.kind)
        if plan is None:
            plan = self.plans[cache.kind] = self.plan(cache, None)
        return plan

    def _angles(self, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = self.angles.get(id(rotary))
        if angles is None:
            angles = self.angles[id(rotary)] = rotary.at(self.positions, dtype)
        return angles
