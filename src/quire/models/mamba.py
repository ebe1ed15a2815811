"""Mamba (Gu and Dao, 2023) and FalconMamba, which normalises dt, B and C: a norm and a mixer per layer, no attention.
Residual sums are in the model's dtype, even if a checkpoint has `residual_in_fp32`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.layers.mamba import MambaDims, MambaMixer
from quire.models.decoder import Decoder, make_norm
from quire.models.decoder_config import DecoderConfig
from quire.models.forward_context import ForwardContext
from quire.protocol.parallel_layout import UNSHARDED, Shard


def make_mixer(s: DecoderConfig, dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED) -> MambaMixer:
    """Return a layer's mixer, or a rank's part of it."""
    m = s.mamba
    assert m is not None, "a model with Mamba layers declares them"
    dims = MambaDims(m.hidden, m.d_inner, m.dt_rank, m.d_state, m.d_conv)
    return MambaMixer(dims, m.bias, m.conv_bias, m.norms, m.norm_eps, dtype, device, shard)


class MambaLayer(nn.Module):
    """x += delta; returns x and the next residual, mixer(norm(x))."""

    def __init__(
        self, s: DecoderConfig, layer: int, rotary: None, dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> None:
        super().__init__()
        self.layer = layer
        self.norm = make_norm(s, dtype, device)
        self.mixer = make_mixer(s, dtype, device, shard)

    def mix(self, x: Tensor, delta: Tensor | None, ctx: ForwardContext, last: bool = False) -> Tensor:
        """Run the layer up to the mixer: return its output, before the projection `out`."""
        return self.mixer.mix(self.norm(x, delta), *ctx.state(self.layer))

    def feed_forward(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run that projection: return x and the next residual."""
        return x, self.mixer.out(mixed)


class Mamba(Decoder):
    """See Decoder."""

    def make_layer(self, layer: int, *args: Any) -> nn.Module:
        """See Decoder."""
        return MambaLayer(self.config, layer, *args)
