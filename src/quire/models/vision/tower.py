"""The vision towers CLIP (Radford et al., 2021), up to a layer before the last, SigLIP (Zhai et al., 2023) and
InternViT (Chen et al., 2023); and the names of all towers' weights: transformers', and of InternViT the original ones
too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quire.layers.module_list import module_list
from quire.layers.norm import LayerNorm
from quire.models.vision.blocks import PatchEmbedding, VisionEncoderLayer, empty_parameter, run_layers
from quire.models.vision.tower_settings import CLIP, GEMMA4, INTERN, MLLAMA, SIGLIP, TowerSettings
from quire.models.weight_names import WeightNames, prefixed

CLIP_NAMES: WeightNames = {
    "class_token": "embeddings.class_embedding",
    "patches": "embeddings.patch_embedding",
    "positions": "embeddings.position_embedding.weight",
    "pre_norm": "pre_layrnorm",
    "norm": "post_layernorm",
    **prefixed("layers.*", "encoder.layers.*.", {
        "attention.qkv": tuple(f"self_attn.{x}_proj" for x in "qkv"),
        "attention.out": "self_attn.out_proj",
        "attention_norm": "layer_norm1",
        "mlp_norm": "layer_norm2",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    }),
}  # fmt: skip
INTERN_NAMES: WeightNames = {
    "class_token": "embeddings.cls_token",
    "patches": "embeddings.patch_embeddings.projection",
    "positions": "embeddings.position_embeddings",
    "norm": "layernorm",
    **prefixed("layers.*", "encoder.layer.*.", {
        "attention.qkv": tuple(f"attention.{x}_proj" for x in "qkv"),
        "attention.out": "attention.projection_layer",
        "attention.q_norm": "attention.q_norm",
        "attention.k_norm": "attention.k_norm",
        "attention_norm": "layernorm_before",
        "mlp_norm": "layernorm_after",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
        "attention_scale": "lambda_1",
        "mlp_scale": "lambda_2",
    }),
}  # fmt: skip
PUBLISHED_INTERN_NAMES: WeightNames = {
    "class_token": "embeddings.class_embedding",
    "patches": "embeddings.patch_embedding",
    "positions": "embeddings.position_embedding",
    **prefixed("layers.*", "encoder.layers.*.", {
        "attention.qkv": "attn.qkv",
        "attention.out": "attn.proj",
        "attention.q_norm": "attn.q_norm",
        "attention.k_norm": "attn.k_norm",
        "attention_norm": "norm1",
        "mlp_norm": "norm2",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
        "attention_scale": "ls1",
        "mlp_scale": "ls2",
    }),
}  # fmt: skip
MLLAMA_LAYER_NAMES: WeightNames = {
    "attention.qkv": tuple(f"self_attn.{x}_proj" for x in "qkv"),
    "attention.out": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
    "attention_scale": "gate_attn",
    "mlp_scale": "gate_ffn",
}
MLLAMA_NAMES: WeightNames = {
    "patches": "patch_embedding",
    "class_token": "class_embedding",
    "positions": "gated_positional_embedding.embedding",
    "positions_gate": "gated_positional_embedding.gate",
    "tile_positions": "gated_positional_embedding.tile_embedding.weight",
    "pre_tile_positions": "pre_tile_positional_embedding.embedding.weight",
    "pre_tile_positions_gate": "pre_tile_positional_embedding.gate",
    "post_tile_positions": "post_tile_positional_embedding.embedding.weight",
    "post_tile_positions_gate": "post_tile_positional_embedding.gate",
    "norm_pre": "layernorm_pre",
    "norm_post": "layernorm_post",
    **prefixed("local_layers.*", "transformer.layers.*.", MLLAMA_LAYER_NAMES),
    **prefixed("global_layers.*", "global_transformer.layers.*.", MLLAMA_LAYER_NAMES),
}
GEMMA4_PRODUCTS = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
GEMMA4_NAMES: WeightNames = {
    "patches": "patch_embedder.input_proj",
    "positions": "patch_embedder.position_embedding_table",
    "std_bias": "std_bias",
    "std_scale": "std_scale",
    **prefixed("layers.*", "encoder.layers.*.", {
        **{f"{ours}.linear": f"{theirs}.linear" for ours, theirs in GEMMA4_PRODUCTS.items()},
        **{f"{ours}.bounds": tuple(f"{theirs}.{x}" for x in ("input_min", "input_max", "output_min", "output_max"))
           for ours, theirs in GEMMA4_PRODUCTS.items()},
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }),
}  # fmt: skip
NAMES = {
    CLIP: CLIP_NAMES, SIGLIP: CLIP_NAMES, INTERN: INTERN_NAMES, MLLAMA: MLLAMA_NAMES, GEMMA4: GEMMA4_NAMES,
}  # fmt: skip


class Tower(nn.Module):
    """pixels [n, 3, H, W] -> features [n, patches, hidden]. Only SigLIP has no class token, whose feature is not part
    of the result, and only CLIP a norm before its layers."""

    __call__: Callable[..., Tensor]

    def __init__(self, s: TowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.patches = PatchEmbedding(s, s.kind != CLIP, dtype, device)
        lead, tokens = (1, 1) if s.kind == INTERN else (), s.patches
        self.class_token = None
        if s.kind != SIGLIP:
            self.class_token, tokens = empty_parameter(*lead, s.hidden, dtype=dtype, device=device), tokens + 1
        self.positions = empty_parameter(*lead[1:], tokens, s.hidden, dtype=dtype, device=device)
        self.pre_norm = LayerNorm(s.hidden, s.norm_eps, dtype, device) if s.kind == CLIP else None
        self.layers = module_list(VisionEncoderLayer(s, dtype, device) for _ in range(s.layers))
        self.norm = LayerNorm(s.hidden, s.norm_eps, dtype, device) if s.final_norm else None

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(len(pixels), 1, -1), x), dim=1)
        x.add_(self.positions)
        x = run_layers(self.layers, x if self.pre_norm is None else self.pre_norm(x))
        x = x if self.class_token is None else x[:, 1:]
        return x if self.norm is None else self.norm(x.contiguous())


def tower_names(s: TowerSettings) -> WeightNames:
    """Return the names of a tower's weights."""
    return PUBLISHED_INTERN_NAMES if s.fused_qkv else NAMES[s.kind]


def unused_weights(s: TowerSettings) -> tuple[str, ...]:
    """Return patterns of the tensors that are not loaded: those after the layers that are run."""
    if s.kind in (MLLAMA, GEMMA4):
        return ()
    name = "layer" if s.kind == INTERN and not s.fused_qkv else "layers"
    layers = tuple(rf"encoder\.{name}\.{layer}\..*" for layer in range(s.layers, s.checkpoint_layers))
    if s.kind == INTERN:
        return layers
    return (r"embeddings\.position_ids", *layers, *(() if s.final_norm else (r"post_layernorm\..*",)), r"head\..*")
