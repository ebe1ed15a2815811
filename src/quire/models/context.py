"""What a model is given beside its tokens: their positions, and attention over the cache. The runner implements it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Context(Protocol):
    """One step's batch: T tokens, those of all its sequences one after another, without padding between them."""

    positions: Tensor  # [T] int64, each token's position in its own sequence

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v [T, kv_heads, head_dim] to the cache of `layer`; then each token of q [T, heads, head_dim]
        attends to its own sequence up to itself (within the layer's window), with scale head_dim ** -0.5.

        -> [T, heads, head_dim]. The inputs may be views with strides; their last dimension is dense.
        """
        ...
