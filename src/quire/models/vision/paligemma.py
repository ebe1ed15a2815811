"""PaliGemma's vision encoder (Beyer et al., 2024; Steiner et al., 2024): SigLIP over one tile, then a linear layer.

Rows replace embeddings after these have been scaled: the text model's factor doesn't apply to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.linear import Linear
from quire.models.vision.encoder import VisionEncoder
from quire.models.vision.llava import WEIGHT_PREFIXES
from quire.models.vision.settings import VisionSettings
from quire.models.weight_names import WeightNames
from quire.protocol.image_tiling import TileGrid

CONNECTOR_NAMES: WeightNames = {"projector": "multi_modal_projector.linear"}


class PaliGemma(VisionEncoder):
    """An image is one part."""

    weight_prefixes = WEIGHT_PREFIXES

    def __init__(self, settings: VisionSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(settings, CONNECTOR_NAMES, dtype, device)
        self.projector = Linear(settings.connector_in, settings.hidden, True, dtype, device)

    def assemble(self, features: Tensor, grid: TileGrid) -> Tensor:
        """See VisionEncoder."""
        return self.projector(features.flatten(0, 1))
