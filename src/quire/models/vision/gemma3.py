"""Gemma-3's vision encoder (Kamath et al., 2025): SigLIP over one tile, whose patches are averaged in squares, an RMS
norm, and a linear layer.

Rows replace embeddings after these have been scaled: the text model's factor doesn't apply to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.models.vision.encoder import VisionEncoder
from quire.models.vision.llava import WEIGHT_PREFIXES
from quire.models.vision.settings import VisionSettings
from quire.models.weight_names import WeightNames
from quire.protocol.image_tiling import TileGrid

CONNECTOR_NAMES: WeightNames = {
    "norm": "multi_modal_projector.mm_soft_emb_norm",
    "projector.weight": "multi_modal_projector.mm_input_projection_weight",
}


class Gemma3Vision(VisionEncoder):
    """An image is one part."""

    weight_prefixes = WEIGHT_PREFIXES
    transposed_weights = r"^projector\."

    def __init__(self, settings: VisionSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(settings, CONNECTOR_NAMES, dtype, device)
        width, tower = settings.connector_in, settings.tower
        self.norm = RMSNorm(width, tower.norm_eps, dtype, device, offset=True)
        self.projector = Linear(width, settings.hidden, False, dtype, device)
        self.side = self.tiling.patches_per_side
        self.square = tower.patches_per_side // self.side

    def assemble(self, features: Tensor, grid: TileGrid) -> Tensor:
        """See VisionEncoder."""
        squares = features.view(self.side, self.square, self.side, self.square, -1)
        return self.projector(self.norm(squares.float().mean((1, 3)).to(self.dtype).flatten(0, 1)))
