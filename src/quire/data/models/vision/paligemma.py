"""PaliGemma's eyes (Beyer et al., 2024; Steiner et al., 2024): SigLIP over one tile, and a product.

Rows take the place of embeddings that are scaled already: the text's factor is not for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.data.layers.linear import Linear
from quire.data.models.names import Stored, expand
from quire.data.models.vision import clip
from quire.data.models.vision.blocks import Frame
from quire.data.models.vision.llava import PREFIXES
from quire.data.models.vision.settings import VisionSettings
from quire.data.models.vision.siglip import NAMES, SigLIP
from quire.vocabulary.pictures import Grid

TABLE = {
    **{f"tower.{ours}": theirs for ours, theirs in NAMES.items()},
    **{f"projector.{x}": f"multi_modal_projector.linear.{x}" for x in ("weight", "bias")},
}


class PaliGemma(Frame):
    """A picture is one part."""

    prefixes = PREFIXES

    def __init__(self, settings: VisionSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(settings, dtype)
        self.tower = SigLIP(settings.tower, dtype, device)
        self.projector = Linear(settings.features, settings.width, True, dtype, device)

    def encode(self, pixels: Tensor, grid: Grid | None = None) -> Tensor:
        """[n, 3, side, side] -> [n, patches, hidden]."""
        return self.tower(pixels)

    def join(self, features: Tensor, grid: Grid) -> Tensor:
        """features [1, patches, hidden] -> rows [patches, width]."""
        return self.projector(features.flatten(0, 1))

    def names(self) -> dict[str, Stored]:
        """Our parameters -> the checkpoint's tensors, without their prefix."""
        return expand(self, TABLE)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not needed."""
        return clip.unread(self.settings.tower)
