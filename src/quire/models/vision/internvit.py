"""InternViT (Chen et al., 2023): residuals are scaled by a vector; queries and keys of the large model are normalised.
With transformers' weight names and the original ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quire.layers.module_list import module_list
from quire.layers.norm import LayerNorm
from quire.models.vision.blocks import PatchEmbedding, VisionEncoderLayer, empty_parameter, run_layers
from quire.models.vision.tower_settings import TowerSettings

BOTH = ("weight", "bias")
LAYER_PREFIX, PUBLISHED_LAYER_PREFIX = "encoder.layer.*.", "encoder.layers.*."
WEIGHT_NAMES: dict[str, str | tuple[str, ...]] = {
    "class_token": "embeddings.cls_token",
    "positions": "embeddings.position_embeddings",
    "norm.weight": "layernorm.weight",
    "norm.bias": "layernorm.bias",
    **{f"patches.{x}": f"embeddings.patch_embeddings.projection.{x}" for x in BOTH},
    **{f"layers.*.attention.qkv.{x}": tuple(f"{LAYER_PREFIX}attention.{y}_proj.{x}" for y in "qkv") for x in BOTH},
    **{f"layers.*.attention.out.{x}": f"{LAYER_PREFIX}attention.projection_layer.{x}" for x in BOTH},
    **{f"layers.*.attention.{y}_norm.weight": f"{LAYER_PREFIX}attention.{y}_norm.weight" for y in "qk"},
    **{f"layers.*.attention_norm.{x}": f"{LAYER_PREFIX}layernorm_before.{x}" for x in BOTH},
    **{f"layers.*.mlp_norm.{x}": f"{LAYER_PREFIX}layernorm_after.{x}" for x in BOTH},
    **{f"layers.*.mlp.up.{x}": f"{LAYER_PREFIX}mlp.fc1.{x}" for x in BOTH},
    **{f"layers.*.mlp.down.{x}": f"{LAYER_PREFIX}mlp.fc2.{x}" for x in BOTH},
    "layers.*.attention_scale": f"{LAYER_PREFIX}lambda_1",
    "layers.*.mlp_scale": f"{LAYER_PREFIX}lambda_2",
}
PUBLISHED_WEIGHT_NAMES: dict[str, str | tuple[str, ...]] = {
    "class_token": "embeddings.class_embedding",
    "positions": "embeddings.position_embedding",
    **{f"patches.{x}": f"embeddings.patch_embedding.{x}" for x in BOTH},
    **{f"layers.*.attention.qkv.{x}": f"{PUBLISHED_LAYER_PREFIX}attn.qkv.{x}" for x in BOTH},
    **{f"layers.*.attention.out.{x}": f"{PUBLISHED_LAYER_PREFIX}attn.proj.{x}" for x in BOTH},
    **{f"layers.*.attention.{y}_norm.weight": f"{PUBLISHED_LAYER_PREFIX}attn.{y}_norm.weight" for y in "qk"},
    **{f"layers.*.attention_norm.{x}": f"{PUBLISHED_LAYER_PREFIX}norm1.{x}" for x in BOTH},
    **{f"layers.*.mlp_norm.{x}": f"{PUBLISHED_LAYER_PREFIX}norm2.{x}" for x in BOTH},
    **{f"layers.*.mlp.up.{x}": f"{PUBLISHED_LAYER_PREFIX}mlp.fc1.{x}" for x in BOTH},
    **{f"layers.*.mlp.down.{x}": f"{PUBLISHED_LAYER_PREFIX}mlp.fc2.{x}" for x in BOTH},
    "layers.*.attention_scale": f"{PUBLISHED_LAYER_PREFIX}ls1",
    "layers.*.mlp_scale": f"{PUBLISHED_LAYER_PREFIX}ls2",
}


class InternViT(nn.Module):
    """pixels [n, 3, H, W] -> features [n, patches, hidden]."""

    __call__: Callable[..., Tensor]

    def __init__(self, s: TowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.patches = PatchEmbedding(s, True, dtype, device)
        self.class_token = empty_parameter(1, 1, s.hidden, dtype=dtype, device=device)
        self.positions = empty_parameter(1, s.patches + 1, s.hidden, dtype=dtype, device=device)
        self.layers = module_list(VisionEncoderLayer(s, dtype, device) for _ in range(s.layers))
        self.norm = LayerNorm(s.hidden, s.norm_eps, dtype, device) if s.final_norm else None

    def forward(self, pixels: Tensor) -> Tensor:
        first = self.class_token.expand(len(pixels), 1, -1)
        x = torch.cat((first, self.patches(pixels)), dim=1).add_(self.positions)
        x = run_layers(self.layers, x)[:, 1:]
        return x if self.norm is None else self.norm(x.contiguous())


def unused_weights(s: TowerSettings) -> tuple[str, ...]:
    """Return patterns of the tensors after the layers that are run."""
    layers = "layers" if s.fused_qkv else "layer"
    return tuple(rf"encoder\.{layers}\.{layer}\..*" for layer in range(s.layers, s.checkpoint_layers))
