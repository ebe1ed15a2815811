"""What a model is given beside its tokens: their positions, attention over the cache, and running states. The runner
implements it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.kernels.mamba_states import StateCache, StatePlan
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding


class ForwardContext(Protocol):
    """One step's batch: T tokens, those of all its sequences one after another, without padding between them."""

    positions: Tensor  # [T] int64, each token's position in its own sequence

    def attend(
        self, layer: int, qkv: Tensor, rotary: RotaryEmbedding | None = None, norms: tuple[RMSNorm,
        RMSNorm] | None = None,
        last: bool = False,
    ) -> Tensor:  # fmt: skip
        """qkv [T, heads + 2 kv_heads, head_dim] holds each token's queries, keys and values. Queries and keys are
        normalised a head if `norms` (theirs) are given, then rotated if `rotary` is; keys and values go to the cache of
        `layer`; then each token attends to its own sequence up to itself, as the layer's LayerSpec says (window,
        chunk, scale, softcap). A layer that shares another's keys and values gives queries alone, [T, heads, head_dim].

        -> [T, heads, head_dim], where the model says that this is its `last` attention only of the `select_logits_rows`
        tokens. Rotation and writing are asked for here because a GPU does them in one launch.
        """
        ...

    def state(self, layer: int) -> tuple[StateCache, StatePlan]:
        """The running states of `layer`, and which of them the step's rows read and write. A layer with states is asked
        for every token of the step."""
        ...

    @property
    def image_mask(self) -> Tensor | None:
        """[T, 1]: 1 for tokens that see a picture, by layers of their own, and 0 for others. None: all are 0."""
        ...

    def cross_attend(self, layer: int, q: Tensor) -> Tensor:
        """q [T, heads, head_dim] -> the same: each token attends to the rows of the latest picture that stands before
        it or in its place, neighbouring pictures counting as one. Zeros for tokens that see none. Asked only where
        `image_mask` says that some do."""
        ...

    def merge_image_embeddings(self, x: Tensor) -> Tensor:
        """x [T, hidden], the tokens' embeddings -> the same, the rows of pictures in the places of those tokens that
        stand for them. x may be used up."""
        ...

    def select_logits_rows(self, x: Tensor) -> Tensor:
        """The rows of x [T, hidden] that go on after the last attention: those of tokens whose logits will be asked
        for. Nothing else of it is read by anybody."""
        ...
