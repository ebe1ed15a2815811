"""The base class of vision encoders: from pixels to the rows of an image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.layers.prepare import prepare_layers
from quire.models.vision.settings import VisionSettings
from quire.models.vision.tower import Tower, tower_names, unused_weights
from quire.models.weight_names import WeightNames, WeightSource, expand_weight_names, prefixed
from quire.protocol.image_tiling import TileGrid


class VisionEncoder(nn.Module):
    """A tower, which turns tiles of pixels into features, and a connector, which turns features into rows: from pixels
    to rows in three calls, `preprocess`, `encode` of all parts in any batches, `assemble`. Weights are loaded as a
    model's.

    A batch may have any parts, also of several images: a part's features don't depend on other parts. But if
    `encodes_whole_image`, an image is one part of all its tiles, and a batch is one image.
    """

    encodes_whole_image = False
    transposed_weights = ""
    """A regular expression for parameters that a checkpoint has as [in, out]."""
    weight_prefixes: tuple[str, ...]

    def __init__(
        self, settings: VisionSettings, connector_names: WeightNames, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`connector_names` are the names of the connector's weights."""
        super().__init__()
        self.settings, self.tiling, self.dtype = settings, settings.tiling, dtype
        self.connector_names = connector_names
        self.tower = self.make_tower(dtype, device)

    def make_tower(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Return the tower."""
        return Tower(self.settings.tower, dtype, device)

    def preprocess(self, pixels: Tensor, grid: TileGrid) -> Tensor:
        """Normalise an image's pixels [tiles, side, side, 3] uint8: return [parts, 3, side, side], or if
        `encodes_whole_image` [1, tiles, 3, side, side], in the model's dtype."""
        tiles = self.normalize(pixels).to(self.dtype)
        return tiles[None] if self.encodes_whole_image else tiles

    def normalize(self, pixels: Tensor) -> Tensor:
        """Return normalised pixels [tiles, 3, side, side] in float32."""
        assert pixels.dtype == torch.uint8, "pixels are bytes"
        side, normal = self.tiling.tile_size, self.settings.normalization
        assert pixels.shape[1:] == (side, side, 3), f"tiles of shape {list(pixels.shape)}"
        mean, std = (torch.tensor(x, device=pixels.device) for x in (normal.mean, normal.std))
        return pixels.float().mul_(normal.scale).sub_(mean).div_(std).permute(0, 3, 1, 2)

    def encode(self, pixels: Tensor, grid: TileGrid | None = None) -> Tensor:
        """Return features [n, tokens, width] of preprocessed parts [n, ...]. `grid` is the image's; it is needed only
        if `encodes_whole_image`."""
        features: Tensor = self.tower(pixels)
        return features

    def assemble(self, features: Tensor, grid: TileGrid) -> Tensor:
        """Return an image's rows [tiling.rows(grid), hidden] from the features of all its parts, in order."""
        raise NotImplementedError

    def weight_sources(self) -> dict[str, WeightSource]:
        """Map parameter names to the checkpoint's tensors, without prefix. Call before `prepare`."""
        tower = prefixed("tower", "", tower_names(self.settings.tower))
        return expand_weight_names(self, {**tower, **self.connector_names}, self.transposed_weights)

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not loaded."""
        return unused_weights(self.settings.tower)

    def prepare(self, deterministic: bool = False) -> None:
        """Choose kernels and pack weights. Call once, after loading."""
        prepare_layers(self, deterministic)
