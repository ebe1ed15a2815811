"""Phi-3-Vision's eyes (Abdin et al., 2024): CLIP over tiles and over the whole picture, 2 x 2 patches in one row,
learned rows at each line's end and between the two, and an MLP. Under the names of Phi3VForCausalLM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.data.models.names import Stored, expand
from quire.data.models.vision.blocks import Frame, Projector, merged, parameter
from quire.data.models.vision.clip import CLIP, NAMES, unread
from quire.data.models.vision.settings import VisionSettings
from quire.vocabulary.pictures import Grid

BOTH = ("weight", "bias")
TABLE = {
    **{f"tower.{ours}": theirs for ours, theirs in NAMES.items()},
    **{f"projector.up.{x}": f"img_projection.0.{x}" for x in BOTH},
    **{f"projector.down.{x}": f"img_projection.2.{x}" for x in BOTH},
    "line_end": "sub_GN",
    "between": "glb_GN",
}


class Phi3Vision(Frame):
    """The whole picture, which is made here of its tiles, is part 0; the tiles follow line by line."""

    prefixes = (
        "model.vision_embed_tokens.img_processor.vision_model.",
        "model.vision_embed_tokens.img_processor.",
        "model.vision_embed_tokens.",
    )

    def __init__(self, settings: VisionSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(settings, dtype)
        self.tower = CLIP(settings.tower, dtype, device)
        self.projector = Projector(settings, dtype, device)
        self.line_end = parameter(1, 1, 1, settings.features, dtype=dtype, device=device)
        self.between = parameter(1, 1, settings.features, dtype=dtype, device=device)

    def open(self, pixels: Tensor, grid: Grid) -> Tensor:
        """pixels [tiles, side, side, 3] uint8 -> [1 + tiles, 3, side, side]."""
        assert pixels.dtype == torch.uint8, "pixels are bytes"
        tiles, side = self.normalised(pixels), self.tiling.tile
        whole = tiles.reshape(grid.rows, grid.columns, 3, side, side).permute(2, 0, 3, 1, 4)
        whole = whole.reshape(1, 3, grid.rows * side, grid.columns * side)
        whole = F.interpolate(whole, (side, side), mode="bicubic")
        return torch.cat((whole, tiles)).to(self.dtype)

    def encode(self, pixels: Tensor, grid: Grid | None = None) -> Tensor:
        """[n, 3, side, side] -> [n, patches, hidden]."""
        return self.tower(pixels)

    def join(self, features: Tensor, grid: Grid) -> Tensor:
        """features [parts, patches, hidden] -> rows [rows, width]."""
        squares = merged(features, 2)
        half, wide = squares.shape[1], squares.shape[3]
        tiles = squares[1:].view(grid.rows, grid.columns, half, half, wide).transpose(1, 2)
        tiles = self._lines(tiles.reshape(grid.rows * half, grid.columns * half, wide))
        whole = self._lines(squares[0])
        ends = (whole, tiles) if self.settings.whole_first else (tiles, whole)
        return self.projector(torch.cat((ends[0], self.between[0], ends[1])))

    def _lines(self, squares: Tensor) -> Tensor:
        """[lines, columns, wide] -> [lines * (columns + 1), wide]."""
        return torch.cat((squares, self.line_end[0].expand(len(squares), 1, -1)), dim=1).flatten(0, 1)

    def names(self) -> dict[str, Stored]:
        """Our parameters -> the checkpoint's tensors, without their prefix."""
        return expand(self, TABLE)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not needed."""
        return (*unread(self.settings.tower), r"wte\..*")
