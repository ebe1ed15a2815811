"""InternViT (Chen et al., 2023): what each block adds is scaled by a number a column; queries and keys of the large one
are normalised. Under transformers' names and those that were published with it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.data.layers.norm import LayerNorm
from quire.data.models.vision.blocks import Block, Patches, parameter, through
from quire.data.models.vision.towers import TowerSettings

BOTH = ("weight", "bias")
LAYER, PUBLISHED_LAYER = "encoder.layer.*.", "encoder.layers.*."
NAMES: dict[str, str | tuple[str, ...]] = {
    "class_token": "embeddings.cls_token",
    "positions": "embeddings.position_embeddings",
    "norm.weight": "layernorm.weight",
    "norm.bias": "layernorm.bias",
    **{f"patches.{x}": f"embeddings.patch_embeddings.projection.{x}" for x in BOTH},
    **{f"layers.*.attention.qkv.{x}": tuple(f"{LAYER}attention.{y}_proj.{x}" for y in "qkv") for x in BOTH},
    **{f"layers.*.attention.out.{x}": f"{LAYER}attention.projection_layer.{x}" for x in BOTH},
    **{f"layers.*.attention.{y}_norm.weight": f"{LAYER}attention.{y}_norm.weight" for y in "qk"},
    **{f"layers.*.attention_norm.{x}": f"{LAYER}layernorm_before.{x}" for x in BOTH},
    **{f"layers.*.mlp_norm.{x}": f"{LAYER}layernorm_after.{x}" for x in BOTH},
    **{f"layers.*.mlp.up.{x}": f"{LAYER}mlp.fc1.{x}" for x in BOTH},
    **{f"layers.*.mlp.down.{x}": f"{LAYER}mlp.fc2.{x}" for x in BOTH},
    "layers.*.attention_scale": f"{LAYER}lambda_1",
    "layers.*.mlp_scale": f"{LAYER}lambda_2",
}
PUBLISHED: dict[str, str | tuple[str, ...]] = {
    "class_token": "embeddings.class_embedding",
    "positions": "embeddings.position_embedding",
    **{f"patches.{x}": f"embeddings.patch_embedding.{x}" for x in BOTH},
    **{f"layers.*.attention.qkv.{x}": f"{PUBLISHED_LAYER}attn.qkv.{x}" for x in BOTH},
    **{f"layers.*.attention.out.{x}": f"{PUBLISHED_LAYER}attn.proj.{x}" for x in BOTH},
    **{f"layers.*.attention.{y}_norm.weight": f"{PUBLISHED_LAYER}attn.{y}_norm.weight" for y in "qk"},
    **{f"layers.*.attention_norm.{x}": f"{PUBLISHED_LAYER}norm1.{x}" for x in BOTH},
    **{f"layers.*.mlp_norm.{x}": f"{PUBLISHED_LAYER}norm2.{x}" for x in BOTH},
    **{f"layers.*.mlp.up.{x}": f"{PUBLISHED_LAYER}mlp.fc1.{x}" for x in BOTH},
    **{f"layers.*.mlp.down.{x}": f"{PUBLISHED_LAYER}mlp.fc2.{x}" for x in BOTH},
    "layers.*.attention_scale": f"{PUBLISHED_LAYER}ls1",
    "layers.*.mlp_scale": f"{PUBLISHED_LAYER}ls2",
}


class InternViT(nn.Module):
    """pixels [n, 3, H, W] -> features [n, patches, hidden]."""

    def __init__(self, s: TowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.patches = Patches(s, True, dtype, device)
        self.class_token = parameter(1, 1, s.hidden, dtype=dtype, device=device)
        self.positions = parameter(1, s.patches + 1, s.hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(Block(s, dtype, device) for _ in range(s.layers))
        self.norm = LayerNorm(s.hidden, s.norm_eps, dtype, device) if s.final_norm else None

    def forward(self, pixels: Tensor) -> Tensor:
        first = self.class_token.expand(len(pixels), 1, -1)
        x = torch.cat((first, self.patches(pixels)), dim=1).add_(self.positions)
        x = through(self.layers, x)[:, 1:]
        return x if self.norm is None else self.norm(x.contiguous())


def unread(s: TowerSettings) -> tuple[str, ...]:
    """Tensors of what comes behind the layers that are run."""
    layers = "layers" if s.fused else "layer"
    return tuple(rf"encoder\.{layers}\.{layer}\..*" for layer in range(s.layers, s.stored))
