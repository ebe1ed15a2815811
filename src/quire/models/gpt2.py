"""GPT-2 (Radford et al., 2019): a decoder with learned positions."""

from __future__ import annotations

from torch import Tensor

from quire.models.decoder import Decoder
from quire.models.forward_context import ForwardContext


class GPT2(Decoder):
    """See Decoder."""

    def embed_inputs(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """See Decoder."""
        assert self.positions is not None, "only the first stage embeds"
        return self.positions(ctx.positions, add_to=super().embed_inputs(tokens, ctx))
