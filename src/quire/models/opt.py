"""OPT (Zhang et al., 2022): learned positions; opt-350m normalises after each block, and projects its smaller word
embeddings in and out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.models.decoder import Decoder, DecoderLayer
from quire.models.families import OPT_POSITION_OFFSET
from quire.models.forward_context import ForwardContext
from quire.protocol.parallel_layout import UNSHARDED, Shard


class PostNormLayer(DecoderLayer):
    """x = norm(x + attention(x)), then x = norm(x + mlp(x)): no residual is left."""

    def mix(self, x: Tensor, delta: Tensor | None, ctx: ForwardContext, last: bool = False) -> Tensor:
        """See DecoderLayer."""
        return self.attention(x, ctx, last)

    def feed_forward(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor | None]:
        """See DecoderLayer."""
        x = self.attention_norm(x, self.attention.out(mixed))
        return self.mlp_norm(x, self.mlp(x)), None


class OPT(Decoder):
    """See Decoder."""

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__(config, dtype, device, shard)
        s = self.config
        projected = s.embed_dim != s.hidden
        self.project_in = Linear(s.embed_dim, s.hidden, False, dtype, device) if projected else None
        self.project_out = Linear(s.hidden, s.embed_dim, False, dtype, device) if projected else None

    def make_layer(self, layer: int, *args: Any) -> nn.Module:
        """See Decoder."""
        return (DecoderLayer if self.config.pre_norms else PostNormLayer)(self.config, layer, *args)

    def embed_inputs(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """See Decoder."""
        assert self.positions is not None, "only the first stage embeds"
        x = super().embed_inputs(tokens, ctx)
        x = x if self.project_in is None else self.project_in(x)
        return self.positions(ctx.positions, add_to=x, offset=OPT_POSITION_OFFSET)

    def logits(self, hidden: Tensor, local: bool = False) -> Tensor:
        """See Decoder."""
        return super().logits(hidden if self.project_out is None else self.project_out(hidden), local)
