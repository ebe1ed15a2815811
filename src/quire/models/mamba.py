"""Models with Mamba layers: Mamba (Gu and Dao, 2023) and FalconMamba, which normalises dt, B and C, with a norm and a
mixer per layer; Jamba (Lieber et al., 2024), with a few attention layers between them, without rotary embedding, and a
feed-forward block in each layer, every second one a mixture of experts. Residual sums are in the model's dtype, even if
a checkpoint has `residual_in_fp32`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.mamba_states import StateCache, StatePlan
from quire.layers.mamba import MambaDims, MambaMixer
from quire.layers.mlp import GatedMLP
from quire.layers.moe import SparseMLP
from quire.models.decoder import Attention, Decoder, make_norm
from quire.models.decoder_config import DecoderConfig
from quire.models.forward_context import ForwardContext
from quire.protocol.parallel_layout import Shard


class MambaLayer(nn.Module):
    """x += mixer(norm(x)), the mixer being attention or Mamba; returns x and the next residual, mlp(norm(x)), or the
    mixer's output if there is no feed-forward block. Each sum is left to the norm that follows."""

    def __init__(
        self, s: DecoderConfig, layer: int, rotary: None, dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> None:
        super().__init__()
        self.layer, kind, m = layer, s.layers[layer], s.mamba
        assert m is not None, "a model with Mamba layers declares them"
        self.mixer_norm = make_norm(s, dtype, device)
        attends, dims = kind.mixer == "attention", MambaDims(m.hidden, m.d_inner, m.dt_rank, m.d_state, m.d_conv)
        self.attention = Attention(s, layer, None, dtype, device, shard) if attends else None
        self.mamba = None
        if not attends:
            self.mamba = MambaMixer(dims, m.bias, m.conv_bias, m.norms, m.norm_eps, dtype, device, shard)
        self.mlp_norm = None if kind.feed_forward == "none" else make_norm(s, dtype, device)
        sizes, dense = (s.hidden, s.intermediate), kind.feed_forward == "mlp"
        self.mlp = GatedMLP(*sizes, "silu", False, dtype, device, shard) if dense else None
        self.experts = None
        if kind.feed_forward == "experts":
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
        delta = mixer.out(mixed)
        return x, delta if mlp is None or self.mlp_norm is None else mlp(self.mlp_norm(x, delta))


class Mamba(Decoder):
    """See Decoder."""

    def make_layer(self, layer: int, *args: Any) -> nn.Module:
        """See Decoder."""
        return MambaLayer(self.config, layer, *args)

    def advance_states(self, tokens: int, state: Callable[[int], tuple[StateCache, StatePlan]]) -> None:
        """Advance all layers' states over rows of the first `tokens` saved tokens: see MambaMixer.advance. `state`
        returns those of a layer, and the plan."""
        for layer in self.layers:
            if layer.mamba is not None:
                layer.mamba.advance(*state(layer.layer), tokens)
