"""OPT (Zhang et al., 2022): opt-350m normalises after each block."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.models.decoder import Decoder, DecoderLayer
from quire.models.forward_context import ForwardContext


class PostNormLayer(DecoderLayer):
    """x = norm(x + attention(x)), then x = norm(x + mlp(x)): no residual is left."""

    def mix(self, x: Tensor, delta: Tensor | None, ctx: ForwardContext, last: bool = False) -> Tensor:
        """See DecoderLayer."""
        return self.attention(x, ctx, last)

    def feed_forward(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor | None]:
        """See DecoderLayer."""
        assert self.mlp is not None, "no OPT has experts"
        x = self.attention_norm(x, self.attention.out(mixed))
        return self.mlp_norm(x, self.mlp(x)), None


class OPT(Decoder):
    """See Decoder."""

    def make_layer(self, layer: int, *args: Any) -> nn.Module:
        """See Decoder."""
        return (DecoderLayer if self.config.pre_norms else PostNormLayer)(self.config, layer, *args)
