"""GPT-2 (Radford et al., 2019): a decoder with learned positions."""

from __future__ import annotations

from torch import Tensor

from quire.models.decoder import Decoder
from quire.models.forward_context import ForwardContext


class GPT2(Decoder):
    """See Decoder."""

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """See Decoder."""
        assert self.embed_tokens is not None, "only the first stage embeds"
        assert self.positions is not None, "only the first stage embeds"
        return self.run_layers(self.positions(ctx.positions, add_to=self.embed_tokens(tokens)), ctx)
