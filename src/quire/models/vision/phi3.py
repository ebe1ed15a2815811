"""Phi-3-Vision's vision encoder (Abdin et al., 2024): CLIP over tiles and over the whole image, 2 x 2 patches merged,
learned rows at the end of each line and between the two, and an MLP. With the weight names of Phi3VForCausalLM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.models.vision.blocks import Projector, empty_parameter, merge_patches
from quire.models.vision.encoder import VisionEncoder
from quire.models.vision.settings import VisionSettings
from quire.models.weight_names import WeightNames
from quire.protocol.image_tiling import TileGrid

CONNECTOR_NAMES: WeightNames = {
    "projector.up": "img_projection.0",
    "projector.down": "img_projection.2",
    "line_end": "sub_GN",
    "separator": "glb_GN",
}


class Phi3Vision(VisionEncoder):
    """Part 0 is the whole image, downsampled here from its tiles; the tiles follow line by line."""

    weight_prefixes = (
        "model.vision_embed_tokens.img_processor.vision_model.",
        "model.vision_embed_tokens.img_processor.",
        "model.vision_embed_tokens.",
    )

    def __init__(self, settings: VisionSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(settings, CONNECTOR_NAMES, dtype, device)
        self.projector = Projector(settings, dtype, device)
        self.line_end = empty_parameter(1, 1, 1, settings.connector_in, dtype=dtype, device=device)
        self.separator = empty_parameter(1, 1, settings.connector_in, dtype=dtype, device=device)

    def preprocess(self, pixels: Tensor, grid: TileGrid) -> Tensor:
        """See VisionEncoder."""
        tiles, side = self.normalize(pixels), self.tiling.tile_size
        whole = tiles.reshape(grid.rows, grid.columns, 3, side, side).permute(2, 0, 3, 1, 4)
        whole = whole.reshape(1, 3, grid.rows * side, grid.columns * side)
        whole = F.interpolate(whole, (side, side), mode="bicubic")
        return torch.cat((whole, tiles)).to(self.dtype)

    def assemble(self, features: Tensor, grid: TileGrid) -> Tensor:
        """See VisionEncoder."""
        squares = merge_patches(features, 2)
        half, width = squares.shape[1], squares.shape[3]
        tiles = squares[1:].view(grid.rows, grid.columns, half, half, width).transpose(1, 2)
        tiles = self._append_line_ends(tiles.reshape(grid.rows * half, grid.columns * half, width))
        whole = self._append_line_ends(squares[0])
        first, second = (whole, tiles) if self.settings.thumbnail_first else (tiles, whole)
        return self.projector(torch.cat((first, self.separator[0], second)))

    def _append_line_ends(self, squares: Tensor) -> Tensor:
        """[lines, columns, width] -> [lines * (columns + 1), width]."""
        return torch.cat((squares, self.line_end[0].expand(len(squares), 1, -1)), dim=1).flatten(0, 1)

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """See VisionEncoder."""
        return (*super().ignored_weights, r"wte\..*")
