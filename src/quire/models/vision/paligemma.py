"""PaliGemma's vision encoder (Beyer et al., 2024; Steiner et al., 2024): SigLIP over one tile, then a linear layer.

Rows replace embeddings after these have been scaled: the text model's factor doesn't apply to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.linear import Linear
from quire.models.vision.blocks import VisionEncoder
from quire.models.vision.clip import unused_weights
from quire.models.vision.llava import WEIGHT_PREFIXES
from quire.models.vision.settings import VisionSettings
from quire.models.vision.siglip import WEIGHT_NAMES, SigLIPTower
from quire.models.weight_names import WeightSource, expand_weight_names
from quire.protocol.image_tiling import TileGrid

ENCODER_WEIGHT_NAMES = {
    **{f"tower.{ours}": theirs for ours, theirs in WEIGHT_NAMES.items()},
    **{f"projector.{x}": f"multi_modal_projector.linear.{x}" for x in ("weight", "bias")},
}


class PaliGemma(VisionEncoder):
    """An image is one part."""

    weight_prefixes = WEIGHT_PREFIXES

    def __init__(self, settings: VisionSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(settings, dtype)
        self.tower = SigLIPTower(settings.tower, dtype, device)
        self.projector = Linear(settings.connector_in, settings.hidden, True, dtype, device)

    def encode(self, pixels: Tensor, grid: TileGrid | None = None) -> Tensor:
        """[n, 3, side, side] -> [n, patches, hidden]."""
        return self.tower(pixels)

    def assemble(self, features: Tensor, grid: TileGrid) -> Tensor:
        """features [1, patches, hidden] -> rows [patches, width]."""
        return self.projector(features.flatten(0, 1))

    def weight_sources(self) -> dict[str, WeightSource]:
        """Map parameter names to the checkpoint's tensors, without prefix."""
        return expand_weight_names(self, ENCODER_WEIGHT_NAMES)

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not loaded."""
        return unused_weights(self.settings.tower)
