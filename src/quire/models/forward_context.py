"""The interface between a model and the runtime: positions, attention over the cache, recurrent states. The model
runner implements it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.kernels.forward_batch import HeadNorms
from quire.kernels.mamba_states import StateCache, StatePlan
from quire.layers.rotary import RotaryEmbedding
from quire.models.hidden_states import HiddenStates


class ForwardContext(Protocol):
    """One step's batch: the T tokens of all its sequences, concatenated without padding."""

    positions: Tensor  # [T] int64, each token's position in its own sequence
    hidden_states: HiddenStates | None
    """Keeps hidden states of all tokens for a speculation head, if there is one."""

    def attend(
        self, layer: int, qkv: Tensor, rotary: RotaryEmbedding | None = None,
        norms: HeadNorms | None = None, last: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the attention's output [T, heads, head_dim]; of the `last` layer, only that of the tokens that
        `select_logits_rows` keeps.

        qkv [T, heads + 2 kv_heads, head_dim] has each token's queries, keys and values; of a layer that reads another
        layer's keys and values, queries alone, [T, heads, head_dim]; without values, [T, heads + kv_heads, head_dim],
        they are the keys before norm and rotation. Queries, keys and values are normalised per head by their `norms`,
        if these are given; then queries and keys are rotated if `rotary` is given. Keys and values are written to the
        cache of `layer`. Each token attends to its own sequence up to itself, as the LayerSpec says (window, chunk,
        scale, softcap). Rotation and writing are part of the call because a GPU does them in one launch.
        """
        ...

    def state(self, layer: int) -> tuple[StateCache, StatePlan]:
        """Return the recurrent states of `layer`, and the plan of those that the step reads and writes. A layer with
        states advances them over every token of the step."""
        ...

    @property
    def image_mask(self) -> Tensor | None:
        """[T, 1]: 1 for tokens that cross-attend to an image, 0 for others. None: all are 0."""
        ...

    def cross_attend(self, layer: int, q: Tensor) -> Tensor:
        """Return the cross-attention of q [T, heads, head_dim], of the same shape. Each token attends to the rows of
        the latest image at or before its position; adjacent images count as one. Zeros for tokens without an image.
        Called only if `image_mask` is not None."""
        ...

    @property
    def image_tokens(self) -> Tensor | None:
        """The indices [N] of the tokens that stand for image embeddings; None if the step has no such tokens."""
        ...

    def merge_image_embeddings(self, x: Tensor) -> Tensor:
        """Return the tokens' embeddings x [T, hidden] with the rows of images in place of their placeholder tokens.
        x may be overwritten."""
        ...

    def select_logits_rows(self, x: Tensor) -> Tensor:
        """Return the rows of x [T, hidden] whose logits are needed: only for these the model is run to its end."""
        ...
