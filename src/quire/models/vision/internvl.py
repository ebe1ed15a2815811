"""InternVL's vision encoder (Chen et al., 2024): InternViT, squares of patches merged into one (pixel shuffle), a norm,
an MLP. With transformers' weight names and those of InternVLChatModel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.norm import LayerNorm
from quire.models.vision.blocks import Projector, VisionEncoder, merge_patches
from quire.models.vision.internvit import PUBLISHED_WEIGHT_NAMES, WEIGHT_NAMES, InternViT, unused_weights
from quire.models.vision.settings import VisionSettings
from quire.models.weight_names import WeightSource, expand_weight_names
from quire.protocol.image_tiling import TileGrid

BOTH = ("weight", "bias")
ENCODER_WEIGHT_NAMES = {
    **{f"tower.{ours}": theirs for ours, theirs in WEIGHT_NAMES.items()},
    **{f"norm.{x}": f"multi_modal_projector.layer_norm.{x}" for x in BOTH},
    **{f"projector.up.{x}": f"multi_modal_projector.linear_1.{x}" for x in BOTH},
    **{f"projector.down.{x}": f"multi_modal_projector.linear_2.{x}" for x in BOTH},
}
PUBLISHED_ENCODER_WEIGHT_NAMES = {
    **{f"tower.{ours}": theirs for ours, theirs in PUBLISHED_WEIGHT_NAMES.items()},
    **{f"norm.{x}": f"mlp1.0.{x}" for x in BOTH},
    **{f"projector.up.{x}": f"mlp1.1.{x}" for x in BOTH},
    **{f"projector.down.{x}": f"mlp1.3.{x}" for x in BOTH},
}


class InternVL(VisionEncoder):
    """The parts are an image's tiles, line by line, and last the whole image."""

    weight_prefixes = ("model.vision_tower.", "vision_tower.", "vision_model.", "model.")

    def __init__(self, settings: VisionSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(settings, dtype)
        self.tower = InternViT(settings.tower, dtype, device)
        self.norm = LayerNorm(settings.connector_in, 1e-5, dtype, device)
        self.projector = Projector(settings, dtype, device)

    def encode(self, pixels: Tensor, grid: TileGrid | None = None) -> Tensor:
        """[n, 3, side, side] -> [n, patches, hidden]."""
        return self.tower(pixels)

    def assemble(self, features: Tensor, grid: TileGrid) -> Tensor:
        """features [parts, patches, hidden] -> rows [rows, width]."""
        return self.projector(self.norm(merge_patches(features, self.settings.merge).flatten(0, 2)))

    def weight_sources(self) -> dict[str, WeightSource]:
        """Map parameter names to the checkpoint's tensors, without prefix."""
        return expand_weight_names(
            self, PUBLISHED_ENCODER_WEIGHT_NAMES if self.settings.published_names else ENCODER_WEIGHT_NAMES
        )

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not loaded."""
        return unused_weights(self.settings.tower)
