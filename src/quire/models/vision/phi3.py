"""Phi-3-Vision's vision encoder (Abdin et al., 2024): CLIP over tiles and over the whole image, 2 x 2 patches merged,
learned rows at the end of each line and between the two, and an MLP. With the weight names of Phi3VForCausalLM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.models.vision.blocks import Projector, VisionEncoder, empty_parameter, merge_patches
from quire.models.vision.clip import WEIGHT_NAMES, CLIPTower, unused_weights
from quire.models.vision.settings import VisionSettings
from quire.models.weight_names import WeightSource, expand_weight_names
from quire.protocol.image_tiling import TileGrid

BOTH = ("weight", "bias")
ENCODER_WEIGHT_NAMES = {
    **{f"tower.{ours}": theirs for ours, theirs in WEIGHT_NAMES.items()},
    **{f"projector.up.{x}": f"img_projection.0.{x}" for x in BOTH},
    **{f"projector.down.{x}": f"img_projection.2.{x}" for x in BOTH},
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
        super().__init__(settings, dtype)
        self.tower = CLIPTower(settings.tower, dtype, device)
        self.projector = Projector(settings, dtype, device)
        self.line_end = empty_parameter(1, 1, 1, settings.connector_in, dtype=dtype, device=device)
        self.separator = empty_parameter(1, 1, settings.connector_in, dtype=dtype, device=device)

    def preprocess(self, pixels: Tensor, grid: TileGrid) -> Tensor:
        """pixels [tiles, side, side, 3] uint8 -> [1 + tiles, 3, side, side]."""
        assert pixels.dtype == torch.uint8, "pixels are bytes"
        tiles, side = self.normalize(pixels), self.tiling.tile_size
        whole = tiles.reshape(grid.rows, grid.columns, 3, side, side).permute(2, 0, 3, 1, 4)
        whole = whole.reshape(1, 3, grid.rows * side, grid.columns * side)
        whole = F.interpolate(whole, (side, side), mode="bicubic")
        return torch.cat((whole, tiles)).to(self.dtype)

    def encode(self, pixels: Tensor, grid: TileGrid | None = None) -> Tensor:
        """[n, 3, side, side] -> [n, patches, hidden]."""
        return self.tower(pixels)

    def assemble(self, features: Tensor, grid: TileGrid) -> Tensor:
        """features [parts, patches, hidden] -> rows [rows, width]."""
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

    def weight_sources(self) -> dict[str, WeightSource]:
        """Map parameter names to the checkpoint's tensors, without prefix."""
        return expand_weight_names(self, ENCODER_WEIGHT_NAMES)

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not loaded."""
        return (*unused_weights(self.settings.tower), r"wte\..*")
