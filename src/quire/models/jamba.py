"""Jamba (Lieber et al., 2024): Mamba layers with a few attention layers between them, without rotary embedding. Each
layer has a feed-forward block, every second one a mixture of experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.layers.mlp import GatedMLP
from quire.layers.moe import SparseMLP
from quire.models.decoder import Attention, Decoder, make_norm
from quire.models.decoder_config import DecoderConfig
from quire.models.forward_context import ForwardContext
from quire.models.mamba import make_mixer
from quire.protocol.parallel_layout import Shard


class JambaLayer(nn.Module):
    """x += mixer(norm(x)), the mixer being attention or Mamba; returns x and the next residual, mlp(norm(x)). Each sum
    is left to the norm that follows, which reads all of x anyway."""

    def __init__(
        self, s: DecoderConfig, layer: int, rotary: None, dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> None:
        super().__init__()
        self.layer, attends = layer, s.layers[layer].mixer == "attention"
        self.mixer_norm = make_norm(s, dtype, device)
        self.attention = Attention(s, layer, None, dtype, device, shard) if attends else None
        self.mamba = None if attends else make_mixer(s, dtype, device, shard)
        self.mlp_norm = make_norm(s, dtype, device)
        sizes, sparse = (s.hidden, s.intermediate), s.layers[layer].feed_forward == "experts"
        self.mlp = None if sparse else GatedMLP(*sizes, "silu", False, dtype, device, shard)
        self.experts = None
        if sparse:
            self.experts = SparseMLP(*sizes, s.experts, s.experts_per_token, "silu", False, dtype, device, shard)

    def mix(self, x: Tensor, delta: Tensor | None, ctx: ForwardContext, last: bool = False) -> Tensor:
        """Run the layer up to the mixer: return its output, before the projection `out`."""
        normed = self.mixer_norm(x, delta)
        if self.attention is not None:
            return self.attention(normed, ctx, last)
        assert self.mamba is not None, "a layer attends, or has a state"
        return self.mamba.mix(normed, *ctx.state(self.layer))

    def feed_forward(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run the rest of the layer from that projection on: return x and the next residual."""
        mixer, mlp = self.attention or self.mamba, self.mlp or self.experts
        assert mixer is not None, "a layer attends, or has a state"
        assert mlp is not None, "a layer has a feed-forward block"
        return x, mlp(self.mlp_norm(x, mixer.out(mixed)))


class Jamba(Decoder):
    """See Decoder."""

    def make_layer(self, layer: int, *args: Any) -> nn.Module:
        """See Decoder."""
        return JambaLayer(self.config, layer, *args)
