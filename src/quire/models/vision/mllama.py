"""Llama 3.2 Vision's encoder: all tiles of an image in one tower of local and global layers, then a linear layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.module_list import module_list
from quire.layers.norm import LayerNorm
from quire.models.vision.blocks import PatchEmbedding, VisionEncoderLayer, empty_parameter
from quire.models.vision.encoder import VisionEncoder
from quire.models.vision.settings import VisionSettings
from quire.models.vision.tower_settings import TowerSettings
from quire.models.weight_names import WeightNames
from quire.protocol.image_tiling import FittedCanvasTiling, TileGrid

EPS = 1e-5  # of the norms before and after the local layers; it is in no config


class MllamaTower(nn.Module):
    """An image's tiles -> features of their patches and class tokens.

    It was trained with images padded to `max_tiles` tiles, tiles padded to a multiple of 8 tokens, and a mask only
    between padding and padding: real tokens attend to padding. So padding is computed too. It is placed last, and
    attention is two calls without a mask. The inputs of `intermediate_layers` are part of the output, as in training
    (transformers 5 has their outputs, one layer later).
    """

    __call__: Callable[..., Tensor]

    def __init__(self, s: TowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.s, h, tables, tiles = s, s.hidden, s.num_grid_shapes + 1, s.max_tiles
        self.patches = PatchEmbedding(s, False, dtype, device)
        self.class_token = empty_parameter(h, dtype=dtype, device=device)
        self.positions = empty_parameter(s.patches + 1, h, dtype=dtype, device=device)
        self.tile_positions = empty_parameter(tables, tiles * (s.patches + 1) * h, dtype=dtype, device=device)
        self.pre_tile_positions = empty_parameter(tables, tiles * h, dtype=dtype, device=device)
        self.post_tile_positions = empty_parameter(tables, tiles * h, dtype=dtype, device=device)
        self.positions_gate = empty_parameter(1, dtype=dtype, device=device)
        self.pre_tile_positions_gate = empty_parameter(1, dtype=dtype, device=device)
        self.post_tile_positions_gate = empty_parameter(1, dtype=dtype, device=device)
        self.norm_pre = LayerNorm(h, EPS, dtype, device)
        self.norm_post = LayerNorm(h, EPS, dtype, device)
        self.local_layers = module_list(VisionEncoderLayer(s, dtype, device) for _ in range(s.layers))
        self.global_layers = module_list(
            VisionEncoderLayer(s, dtype, device, gated=True) for _ in range(s.global_layers)
        )

    def forward(self, pixels: Tensor, shape: int) -> Tensor:
        """Return features [n, patches + 1, out] of an image's tiles [n, 3, H, W]; `shape` is its grid's number."""
        tiles, tokens, hidden = self.s.max_tiles, self.s.tokens, self.s.hidden
        x, real = self._embed(pixels, shape), len(pixels) * (self.s.patches + 1)
        order = self._token_order(len(pixels), x.device)
        flat, padding, inputs = x.flatten(0, 1)[order], tiles * tokens - real, []
        delta: Tensor | None = None
        for number, layer in enumerate(self.local_layers):
            if number in self.s.intermediate_layers:
                inputs.append(flat[:real] if delta is None else flat[:real] + delta[:real])
            flat, delta = layer(flat, delta, 1, padding)
        flat = self.norm_post(flat, delta)
        positions = self.post_tile_positions[shape].view(tiles, hidden) * self.post_tile_positions_gate.tanh()
        flat, delta = flat.add_(positions[order // tokens]), None
        for layer in self.global_layers:
            flat, delta = layer(flat, delta, 1, padding)
        assert delta is not None, "there are global layers"
        last = flat[:real] + delta[:real]
        intermediate = [torch.stack(inputs, dim=-1).flatten(1)] if inputs else []
        return torch.cat((last, *intermediate), dim=-1).view(len(pixels), self.s.patches + 1, -1)

    def _embed(self, pixels: Tensor, shape: int) -> Tensor:
        """Return the embedded tokens [max_tiles, tokens, hidden], the image's tiles first."""
        tiles, hidden, count = self.s.max_tiles, self.s.hidden, self.s.patches + 1
        x = F.pad(self.patches(pixels), (0, 0, 0, 0, 0, tiles - len(pixels)))  # black tiles have patches of 0
        x.add_(self.pre_tile_positions[shape].view(tiles, 1, hidden) * self.pre_tile_positions_gate.tanh())
        x = torch.cat((self.class_token.expand(tiles, 1, hidden), x), dim=1)
        gate = self.positions_gate.tanh()
        x.add_((1 - gate) * self.positions).add_(self.tile_positions[shape].view(tiles, count, hidden) * gate)
        return F.pad(self.norm_pre(x), (0, 0, 0, self.s.tokens - count))

    def _token_order(self, tiles: int, device: torch.device) -> Tensor:
        """Return the indices of the real tokens of `tiles` tiles, then those of all padding."""
        index = torch.arange(self.s.max_tiles * self.s.tokens, device=device).view(self.s.max_tiles, -1)
        count = self.s.patches + 1
        return torch.cat((index[:tiles, :count].flatten(), index[:tiles, count:].flatten(), index[tiles:].flatten()))


CONNECTOR_NAMES: WeightNames = {"projector": "multi_modal_projector"}


class MllamaVision(VisionEncoder):
    """The rows, of real tiles only, tile by tile, are for the text model's cross-attention layers."""

    encodes_whole_image = True
    weight_prefixes = ("model.vision_model.", "vision_model.", "model.")
    tiling: FittedCanvasTiling

    def __init__(self, settings: VisionSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(settings, CONNECTOR_NAMES, dtype, device)
        self.projector = Linear(settings.connector_in, settings.hidden, True, dtype, device)

    def make_tower(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """See VisionEncoder."""
        return MllamaTower(self.settings.tower, dtype, device)

    def preprocess(self, pixels: Tensor, grid: TileGrid) -> Tensor:
        """See VisionEncoder."""
        assert len(pixels) == grid.rows * grid.columns, f"{len(pixels)} tiles in a grid of {grid.rows} x {grid.columns}"
        return super().preprocess(pixels, grid)

    def encode(self, pixels: Tensor, grid: TileGrid | None = None) -> Tensor:
        """See VisionEncoder: [1, tiles, 3, side, side] -> [1, tiles * (patches + 1), width]."""
        assert grid is not None, "the tower encodes a whole image"
        features: Tensor = self.tower(pixels[0], self.tiling.aspect_ratio_id(grid))
        return features.flatten(0, 1)[None]

    def assemble(self, features: Tensor, grid: TileGrid) -> Tensor:
        """See VisionEncoder."""
        return self.projector(features[0])
