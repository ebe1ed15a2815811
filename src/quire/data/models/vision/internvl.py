"""InternVL's eyes (Chen et al., 2024): InternViT, squares of patches merged into one (pixel shuffle), a norm, an MLP.
Under transformers' names, and those of InternVLChatModel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.data.layers.norm import LayerNorm
from quire.data.models.names import Stored, expand
from quire.data.models.vision.blocks import Frame, Projector, merged
from quire.data.models.vision.internvit import NAMES, PUBLISHED, InternViT, unread
from quire.data.models.vision.settings import VisionSettings
from quire.vocabulary.pictures import Grid

BOTH = ("weight", "bias")
TABLE = {
    **{f"tower.{ours}": theirs for ours, theirs in NAMES.items()},
    **{f"norm.{x}": f"multi_modal_projector.layer_norm.{x}" for x in BOTH},
    **{f"projector.up.{x}": f"multi_modal_projector.linear_1.{x}" for x in BOTH},
    **{f"projector.down.{x}": f"multi_modal_projector.linear_2.{x}" for x in BOTH},
}
PUBLISHED_TABLE = {
    **{f"tower.{ours}": theirs for ours, theirs in PUBLISHED.items()},
    **{f"norm.{x}": f"mlp1.0.{x}" for x in BOTH},
    **{f"projector.up.{x}": f"mlp1.1.{x}" for x in BOTH},
    **{f"projector.down.{x}": f"mlp1.3.{x}" for x in BOTH},
}


class InternVL(Frame):
    """Tiles line by line, the whole picture last."""

    prefixes = ("model.vision_tower.", "vision_tower.", "vision_model.", "model.")

    def __init__(self, settings: VisionSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(settings, dtype)
        self.tower = InternViT(settings.tower, dtype, device)
        self.norm = LayerNorm(settings.features, 1e-5, dtype, device)
        self.projector = Projector(settings, dtype, device)

    def encode(self, pixels: Tensor, grid: Grid | None = None) -> Tensor:
        """[n, 3, side, side] -> [n, patches, hidden]."""
        return self.tower(pixels)

    def join(self, features: Tensor, grid: Grid) -> Tensor:
        """features [parts, patches, hidden] -> rows [rows, width]."""
        return self.projector(self.norm(merged(features, self.settings.merge).flatten(0, 2)))

    def names(self) -> dict[str, Stored]:
        """Our parameters -> the checkpoint's tensors, without their prefix."""
        return expand(self, PUBLISHED_TABLE if self.settings.published else TABLE)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not needed."""
        return unread(self.settings.tower)
