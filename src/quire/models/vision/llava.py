"""LLaVA-OneVision's vision encoder (Li et al., 2024): SigLIP over the whole image and over its tiles. The tiles'
patches are joined, cropped of padding, downsampled if there are many, and each line is ended by a newline row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.models.vision.blocks import Projector, empty_parameter
from quire.models.vision.encoder import VisionEncoder
from quire.models.vision.settings import VisionSettings
from quire.models.weight_names import WeightNames
from quire.protocol.image_tiling import AnyResTiling, TileGrid

WEIGHT_PREFIXES = (
    "model.vision_tower.vision_model.", "vision_tower.vision_model.", "model.vision_tower.", "vision_tower.", "model.",
)  # fmt: skip
CONNECTOR_NAMES: WeightNames = {
    "projector.up": "multi_modal_projector.linear_1",
    "projector.down": "multi_modal_projector.linear_2",
    "newline": "image_newline",
}


class LlavaOneVision(VisionEncoder):
    """Part 0 is the whole image; the tiles follow line by line."""

    weight_prefixes = WEIGHT_PREFIXES
    tiling: AnyResTiling

    def __init__(self, settings: VisionSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(settings, CONNECTOR_NAMES, dtype, device)
        self.projector = Projector(settings, dtype, device)
        self.newline = empty_parameter(settings.hidden, dtype=dtype, device=device)

    def assemble(self, features: Tensor, grid: TileGrid) -> Tensor:
        """See VisionEncoder."""
        whole = self.projector(features[0])
        if not grid.rows:
            return torch.cat((whole, self.newline[None]))
        canvas, (lines, length) = self._canvas(features[1:], grid), self.tiling.unpadded_grid(grid)
        if canvas.shape[:2] != (lines, length):
            resized = F.interpolate(canvas.permute(2, 0, 1)[None], (lines, length), mode="bilinear")
            canvas = resized[0].permute(1, 2, 0)
        with_newlines = torch.cat((canvas, self.newline.expand(lines, 1, len(self.newline))), dim=1)
        return torch.cat((whole, with_newlines.flatten(0, 1)))

    def _canvas(self, features: Tensor, grid: TileGrid) -> Tensor:
        """Return the rows of the grid's patches without padding, [lines, length, width]."""
        side, (above, left) = self.tiling.patches_per_side, self.tiling.patch_padding(grid)
        lines, length = grid.rows * side, grid.columns * side
        canvas = features.view(grid.rows, grid.columns, side, side, -1).transpose(1, 2).reshape(lines, length, -1)
        canvas = canvas[above : lines - above, left : length - left]
        return self.projector(canvas.flatten(0, 1)).view(*canvas.shape[:2], self.settings.hidden)
