"""Models with Mamba layers: Mamba (Gu and Dao, 2023) and FalconMamba, which normalises dt, B and C, with a norm and a
mixer per layer; Jamba (Lieber et al., 2024), with a few attention layers between them, without rotary embedding, and a
feed-forward block in each layer, every second one a mixture of experts. Residual sums are in the model's dtype, even if
a checkpoint has `residual_in_fp32`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from quire.kernels.mamba_states import StateCache, StatePlan
from quire.layers.mamba import MambaDims, MambaMixer
from quire.models.decoder import Decoder, DecoderLayer
from quire.models.decoder_config import DecoderConfig
from quire.models.forward_context import ForwardContext


class MambaLayer(DecoderLayer):
    """A layer whose mixer is Mamba."""

    def __init__(self, s: DecoderConfig, layer: int, *args: Any) -> None:
        super().__init__(s, layer, *args)
        m = s.mamba
        assert m is not None, "a model with Mamba layers declares them"
        dims = MambaDims(m.hidden, m.d_inner, m.dt_rank, m.d_state, m.d_conv)
        self.layer = layer
        self.mamba = MambaMixer(dims, m.bias, m.conv_bias, m.norms, m.norm_eps, *args[1:])

    def mix(self, x: Tensor, delta: Tensor | None, ctx: ForwardContext, last: bool = False) -> Tensor:
        """See DecoderLayer."""
        return self.mamba.mix(self.attention_norm(x, delta), *ctx.state(self.layer))

    def feed_forward(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor | None]:
        """See DecoderLayer."""
        return self.run_mlp(x, self.mamba.out(mixed))


class Mamba(Decoder):
    """See Decoder."""

    def make_layer(self, layer: int, *args: Any) -> nn.Module:
        """See Decoder."""
        has_state = self.config.layers[layer].mixer == "mamba"
        return (MambaLayer if has_state else DecoderLayer)(self.config, layer, *args)

    def advance_states(self, tokens: int, state: Callable[[int], tuple[StateCache, StatePlan]]) -> None:
        """Advance all layers' states over rows of the first `tokens` saved tokens: see MambaMixer.advance. `state`
        returns those of a layer, and the plan."""
        for layer in self.layers:
            if isinstance(layer, MambaLayer):
                layer.mamba.advance(*state(layer.layer), tokens)
