"""SigLIP's vision tower (Zhai et al., 2023): no class token, a position for each patch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quire.layers.module_list import module_list
from quire.layers.norm import LayerNorm
from quire.models.vision.blocks import PatchEmbedding, VisionEncoderLayer, empty_parameter, run_layers
from quire.models.vision.clip import LAYER_WEIGHT_NAMES
from quire.models.vision.tower_settings import TowerSettings

WEIGHT_NAMES: dict[str, str | tuple[str, ...]] = {
    **LAYER_WEIGHT_NAMES,
    "patches.weight": "embeddings.patch_embedding.weight",
    "patches.bias": "embeddings.patch_embedding.bias",
    "positions": "embeddings.position_embedding.weight",
    "norm.weight": "post_layernorm.weight",
    "norm.bias": "post_layernorm.bias",
}


class SigLIPTower(nn.Module):
    """pixels [n, 3, H, W] -> features [n, patches, hidden], after the final norm if `final_norm`."""

    __call__: Callable[..., Tensor]

    def __init__(self, s: TowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.patches = PatchEmbedding(s, True, dtype, device)
        self.positions = empty_parameter(s.patches, s.hidden, dtype=dtype, device=device)
        self.layers = module_list(VisionEncoderLayer(s, dtype, device) for _ in range(s.layers))
        self.norm = LayerNorm(s.hidden, s.norm_eps, dtype, device) if s.final_norm else None

    def forward(self, pixels: Tensor) -> Tensor:
        x = run_layers(self.layers, self.patches(pixels).add_(self.positions))
        return x if self.norm is None else self.norm(x)
