"""Llama 3.2 Vision (Grattafiori et al., 2024, §7): a Llama with cross-attention layers between its layers, which attend
to the vision encoder's rows of images. Their outputs are multiplied by learned gates, initially 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.prepare import MappedWeights
from quire.layers.sharding import shard_heads
from quire.models.decoder import Decoder, DecoderLayer, make_norm
from quire.models.decoder_config import DecoderConfig
from quire.models.forward_context import ForwardContext
from quire.models.vision_language import VisionLanguageModel
from quire.protocol.parallel_layout import Shard


class CrossAttention(nn.Module):
    """Attention of tokens' queries to keys and values of image rows. Queries and keys are normalised per head, and not
    rotated. Ranks divide the heads."""

    __call__: Callable[..., Tensor]

    def __init__(self, s: DecoderConfig, layer: int, dtype: torch.dtype, device: torch.device, shard: Shard) -> None:
        super().__init__()
        queries, keys = shard_heads(shard, s.heads, s.kv_heads, s.head_dim)
        self.layer, self.head_dim = layer, s.head_dim
        self.q = Linear(s.hidden, queries, False, dtype, device)
        self.kv = Linear(s.hidden, (keys, keys), False, dtype, device)
        self.out = Linear(queries, s.hidden, False, dtype, device, output_modified=True)  # by the layer's gate
        self.q_norm = RMSNorm(s.head_dim, s.norm_eps, dtype, device)
        self.k_norm = RMSNorm(s.head_dim, s.norm_eps, dtype, device)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        queries = self.q_norm(self.q(x).view(len(x), -1, self.head_dim))
        return self.out(ctx.cross_attend(self.layer, queries).flatten(1))

    def project_kv(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of image rows [R, hidden], [R, kv_heads, head_dim] each."""
        keys, values = self.kv(rows).view(len(rows), 2, -1, self.head_dim).unbind(1)
        return self.k_norm(keys), values


class CrossAttentionLayer(nn.Module):
    """x += gate * cross(norm(x)); returns x and the next residual, gate * mlp(norm(x)). Nothing is added for a token
    that attends to no image."""

    def __init__(
        self, s: DecoderConfig, layer: int, rotary: None, dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm(s, dtype, device)
        self.cross = CrossAttention(s, layer, dtype, device, shard)
        self.mlp_norm = make_norm(s, dtype, device)
        self.mlp = GatedMLP(s.hidden, s.intermediate, s.activation, s.mlp_bias, dtype, device, shard, True)
        self.attention_gate = nn.Parameter(torch.empty(1, dtype=dtype, device=device), requires_grad=False)
        self.mlp_gate = nn.Parameter(torch.empty(1, dtype=dtype, device=device), requires_grad=False)

    def forward(
        self, x: Tensor, delta: Tensor | None, image_mask: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """`image_mask` [T, 1] is 1 for tokens that attend to an image, 0 for others."""
        attended = self.cross(self.attention_norm(x, delta), ctx)
        inner = self.mlp(self.mlp_norm(x, attended.mul_(self.attention_gate)))
        return x, inner.mul_(image_mask).mul_(self.mlp_gate)

    def prepare(self) -> None:
        """Replace the gates' parameters by their tanh. Call once, after loading."""
        for gate in (self.attention_gate, self.mlp_gate):
            gate.tanh_()


class Mllama(VisionLanguageModel):
    """See Decoder. `project_kv` makes a layer's keys and values of the rows of `vision_encoder`."""

    def make_layer(self, layer: int, *args: Any) -> nn.Module:
        """See Decoder."""
        is_cross = self.config.layers[layer].mixer == "cross"
        return (CrossAttentionLayer if is_cross else DecoderLayer)(self.config, layer, *args)

    def uses_images(self, shard: Shard) -> bool:
        """See VisionLanguageModel."""
        layers = self.config.layers
        return any(layers[layer].mixer == "cross" for layer in shard.layer_range(len(layers)))

    def embed_inputs(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """See Decoder: images are no part of the sequence."""
        return Decoder.embed_inputs(self, tokens, ctx)

    def run_layers(self, x: Tensor, ctx: ForwardContext, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See Decoder. Cross-attention layers are skipped if no token attends to an image."""
        *layers, last = self.layers
        for layer in layers:
            if not isinstance(layer, CrossAttentionLayer):
                x, delta = layer.feed_forward(x, layer.mix(x, delta, ctx))
            elif ctx.image_mask is not None:
                x, delta = layer(x, delta, ctx.image_mask, ctx)
        return x, last.mix(x, delta, ctx, last=True)

    def project_kv(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return a cross-attention layer's keys and values [R, kv_heads, head_dim] of image rows [R, hidden]."""
        keys, values = self.layers[layer].cross.project_kv(rows)
        return keys, values

    def prepare(
        self, max_len: int | None = None, deterministic: bool = False, mapped_files: Sequence[MappedWeights] = ()
    ) -> None:
        """See Decoder."""
        for layer in self.layers:
            if isinstance(layer, CrossAttentionLayer):
                layer.prepare()
        super().prepare(max_len, deterministic, mapped_files)
