"""CLIP's vision tower (Radford et al., 2021), up to a layer before the last: patches without their class token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quire.layers.module_list import module_list
from quire.layers.norm import LayerNorm
from quire.models.vision.blocks import PatchEmbedding, VisionEncoderLayer, empty_parameter, run_layers
from quire.models.vision.tower_settings import TowerSettings

LAYER_PREFIX = "encoder.layers.*."
LAYER_WEIGHT_NAMES: dict[str, str | tuple[str, ...]] = {
    **{
        f"layers.*.attention.qkv.{x}": tuple(f"{LAYER_PREFIX}self_attn.{y}_proj.{x}" for y in "qkv")
        for x in ("weight", "bias")
    },
    **{f"layers.*.attention.out.{x}": f"{LAYER_PREFIX}self_attn.out_proj.{x}" for x in ("weight", "bias")},
    **{f"layers.*.attention_norm.{x}": f"{LAYER_PREFIX}layer_norm1.{x}" for x in ("weight", "bias")},
    **{f"layers.*.mlp_norm.{x}": f"{LAYER_PREFIX}layer_norm2.{x}" for x in ("weight", "bias")},
    **{f"layers.*.mlp.up.{x}": f"{LAYER_PREFIX}mlp.fc1.{x}" for x in ("weight", "bias")},
    **{f"layers.*.mlp.down.{x}": f"{LAYER_PREFIX}mlp.fc2.{x}" for x in ("weight", "bias")},
}
WEIGHT_NAMES: dict[str, str | tuple[str, ...]] = {
    **LAYER_WEIGHT_NAMES,
    "class_token": "embeddings.class_embedding",
    "patches.weight": "embeddings.patch_embedding.weight",
    "positions": "embeddings.position_embedding.weight",
    "norm.weight": "pre_layrnorm.weight",
    "norm.bias": "pre_layrnorm.bias",
}


class CLIPTower(nn.Module):
    """pixels [n, 3, H, W] -> features [n, patches, hidden]."""

    __call__: Callable[..., Tensor]

    def __init__(self, s: TowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.patches = PatchEmbedding(s, False, dtype, device)
        self.class_token = empty_parameter(s.hidden, dtype=dtype, device=device)
        self.positions = empty_parameter(s.patches + 1, s.hidden, dtype=dtype, device=device)
        self.norm = LayerNorm(s.hidden, s.norm_eps, dtype, device)
        self.layers = module_list(VisionEncoderLayer(s, dtype, device) for _ in range(s.layers))

    def forward(self, pixels: Tensor) -> Tensor:
        first = self.class_token.expand(len(pixels), 1, -1)
        x = torch.cat((first, self.patches(pixels)), dim=1).add_(self.positions)
        return run_layers(self.layers, self.norm(x))[:, 1:]


def unused_weights(s: TowerSettings) -> tuple[str, ...]:
    """Return patterns of the tensors after the layers that are run."""
    layers = tuple(rf"encoder\.layers\.{layer}\..*" for layer in range(s.layers, s.checkpoint_layers))
    return (r"embeddings\.position_ids", *layers, *(() if s.final_norm else (r"post_layernorm\..*",)), r"head\..*")
