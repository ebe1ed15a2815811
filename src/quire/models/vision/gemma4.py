"""Gemma-4's vision encoder (Google, 2026): a tower over the patches of an image of any shape, whose attention rotates
queries and keys by both coordinates; features averaged in squares of patches; and a linear layer.

The text model scales its token embeddings before image embeddings replace some of them, so these are not scaled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.mlp import get_gated_activation
from quire.layers.module_list import module_list
from quire.layers.norm import RMSNorm
from quire.models.vision.blocks import empty_parameter
from quire.models.vision.encoder import VisionEncoder
from quire.models.vision.settings import VisionSettings
from quire.models.vision.tower_settings import Gemma4TowerSettings
from quire.models.weight_names import WeightNames
from quire.protocol.image_tiling import TileGrid

CONNECTOR_NAMES: WeightNames = {"projector": "embed_vision.embedding_projection"}


class ClippedLinear(nn.Module):
    """x -> clip(clip(x) weight^T). `bounds` are the least and the greatest input, and the least and the greatest
    output. If not `clipped`, x -> x weight^T."""

    __call__: Callable[..., Tensor]

    def __init__(
        self, in_features: int, out_features: int, clipped: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.linear = Linear(in_features, out_features, False, dtype, device)
        self.bounds = empty_parameter(4, dtype=dtype, device=device) if clipped else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bounds is None:
            return self.linear(x)
        input_min, input_max, output_min, output_max = self.bounds
        return self.linear(x.clamp(input_min, input_max)).clamp_(output_min, output_max)


class Gemma4VisionLayer(nn.Module):
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x))). All patches attend to one another. Queries, keys and
    values are normalised per head."""

    def __init__(self, s: Gemma4TowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()

        def product(inputs: int, outputs: int) -> ClippedLinear:
            return ClippedLinear(inputs, outputs, s.clipped, dtype, device)

        def norm(size: int, learned: bool = True) -> RMSNorm:
            return RMSNorm(size, s.norm_eps, dtype, device, learned=learned)

        columns, self.head_dim, self.act = s.heads * s.head_dim, s.head_dim, get_gated_activation(s.activation)
        self.q, self.k, self.v = (product(s.hidden, columns) for _ in "qkv")
        self.out = product(columns, s.hidden)
        self.gate, self.up = (product(s.hidden, s.intermediate) for _ in range(2))
        self.down = product(s.intermediate, s.hidden)
        self.q_norm, self.k_norm, self.v_norm = norm(s.head_dim), norm(s.head_dim), norm(s.head_dim, learned=False)
        self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm = (
            norm(s.hidden) for _ in range(4)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x [patches, hidden], changed in place; cos and sin are [patches, 1, 2, head_dim / 4]."""
        self.attention_post_norm.add_to(x, self.out(self._attend(self.attention_norm(x), cos, sin)))
        inner = self.mlp_norm(x)
        self.mlp_post_norm.add_to(x, self.down(self.act(self.gate(inner), self.up(inner))))
        return x

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (product(x).view(len(x), -1, self.head_dim) for product in (self.q, self.k, self.v))
        q, k, v = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin), self.v_norm(v)
        q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=1.0)[0].transpose(0, 1).flatten(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first half of each head in x [patches, heads, head_dim] by the patch's column, and the other half by
    its line. Each half is rotated like a whole head of a text model."""
    first, second = x.unflatten(-1, (2, 2, -1)).unbind(-2)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-2).flatten(-3)


class Gemma4Tower(nn.Module):
    """The tower: from an image's tiles, each a square of patches, to a feature vector for each tile."""

    __call__: Callable[..., Tensor]

    def __init__(self, s: Gemma4TowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.s = s
        self.patches = Linear(3 * s.patch_size**2, s.hidden, False, dtype, device)
        self.positions = empty_parameter(2, s.positions, s.hidden, dtype=dtype, device=device)
        self.layers = module_list(Gemma4VisionLayer(s, dtype, device) for _ in range(s.layers))
        self.std_bias = empty_parameter(s.hidden, dtype=dtype, device=device) if s.standardized else None
        self.std_scale = empty_parameter(s.hidden, dtype=dtype, device=device) if s.standardized else None

    def forward(self, tiles: Tensor, grid: TileGrid) -> Tensor:
        """Return features [tiles, hidden] of an image's tiles [tiles, 3, side, side]."""
        side, patch = self.s.patches_per_side, self.s.patch_size
        cut = tiles.view(-1, 3, side, patch, side, patch).permute(0, 2, 4, 3, 5, 1)
        columns, lines = self._patch_positions(grid, tiles.device)
        x = self.patches(cut.reshape(-1, 3 * patch * patch))
        x.add_(self.positions[0, columns] + self.positions[1, lines])
        cos, sin = self._rotation(columns, lines, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        pooled = x.view(len(tiles), side * side, -1).float().mean(1).to(x.dtype)
        scaled = pooled.float().mul_(self.s.hidden**0.5)  # float16 may be too small for it
        if self.std_bias is not None and self.std_scale is not None:
            scaled.sub_(self.std_bias.float()).mul_(self.std_scale.float())
        return scaled.to(x.dtype)

    def _patch_positions(self, grid: TileGrid, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the column and the line of each patch [patches] in the image, tile by tile."""
        side = self.s.patches_per_side
        lines = torch.arange(grid.rows * side, device=device).view(grid.rows, 1, side, 1)
        columns = torch.arange(grid.columns * side, device=device).view(1, grid.columns, 1, side)
        shape = grid.rows, grid.columns, side, side
        return columns.expand(shape).flatten(), lines.expand(shape).flatten()

    def _rotation(self, columns: Tensor, lines: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [patches, 1, 2, head_dim / 4] of the angles of both coordinates."""
        half = self.s.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=columns.device) / half
        angles = torch.stack((columns, lines), dim=1).float()[:, None, :, None] / self.s.rope_theta**exponents
        return angles.cos().to(dtype), angles.sin().to(dtype)


class Gemma4Vision(VisionEncoder):
    """Encodes a tile as one row. The tiles of an image are one part: their patches attend to one another."""

    encodes_whole_image = True
    weight_prefixes = ("model.vision_tower.", "vision_tower.", "model.")

    def __init__(self, settings: VisionSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(settings, CONNECTOR_NAMES, dtype, device)
        self.norm = RMSNorm(settings.connector_in, settings.tower.norm_eps, dtype, device, learned=False)
        self.projector = Linear(settings.connector_in, settings.hidden, False, dtype, device)

    def make_tower(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """See VisionEncoder."""
        assert isinstance(self.settings.tower, Gemma4TowerSettings), "Gemma-4 has a tower of its own"
        return Gemma4Tower(self.settings.tower, dtype, device)

    def encode(self, pixels: Tensor, grid: TileGrid | None = None) -> Tensor:
        """See VisionEncoder: [1, tiles, 3, side, side] -> [1, tiles, width]."""
        assert grid is not None, "the tower encodes a whole image"
        features: Tensor = self.tower(pixels[0], grid)
        return features[None]

    def assemble(self, features: Tensor, grid: TileGrid) -> Tensor:
        """See VisionEncoder."""
        return self.projector(self.norm(features[0]))
