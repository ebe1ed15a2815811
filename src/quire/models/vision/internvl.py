"""InternVL's vision encoder (Chen et al., 2024): InternViT, squares of patches merged into one (pixel shuffle), a norm,
an MLP. With transformers' weight names and those of InternVLChatModel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.norm import LayerNorm
from quire.models.vision.blocks import Projector, merge_patches
from quire.models.vision.encoder import VisionEncoder
from quire.models.vision.settings import VisionSettings
from quire.protocol.image_tiling import TileGrid


class InternVL(VisionEncoder):
    """The parts are an image's tiles, line by line, and last the whole image."""

    weight_prefixes = ("model.vision_tower.", "vision_tower.", "vision_model.", "model.")

    def __init__(self, settings: VisionSettings, dtype: torch.dtype, device: torch.device) -> None:
        names = [f"multi_modal_projector.{x}" for x in ("layer_norm", "linear_1", "linear_2")]
        names = ["mlp1.0", "mlp1.1", "mlp1.3"] if settings.published_names else names
        super().__init__(settings, dict(zip(("norm", "projector.up", "projector.down"), names)), dtype, device)
        self.norm = LayerNorm(settings.connector_in, 1e-5, dtype, device)
        self.projector = Projector(settings, dtype, device)

    def assemble(self, features: Tensor, grid: TileGrid) -> Tensor:
        """See VisionEncoder."""
        return self.projector(self.norm(merge_patches(features, self.settings.merge).flatten(0, 2)))
