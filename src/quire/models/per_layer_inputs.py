"""A decoder each of whose layers has an input of its own for a token (Gemma-3n's and Gemma-4's per-layer embeddings): a
row of a table, and a product of the token's embedding. It is the third block of a layer:
x += norm(project(act(gate(x)) * input))."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.cpu.linear import ACTIVATIONS
from quire.kernels.cpu.rows import act_times, has_kernels
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.mlp import get_activation
from quire.layers.norm import ResidualSum, RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.models.decoder import Decoder, DecoderLayer
from quire.models.decoder_config import DecoderConfig
from quire.models.forward_context import ForwardContext
from quire.protocol.parallel_layout import UNSHARDED, Shard


class PerLayerInputLayer(DecoderLayer):
    """A DecoderLayer, and the block of its own input. Every rank computes all of that."""

    def __init__(
        self, s: DecoderConfig, layer: int, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device,
        shard: Shard = UNSHARDED,
    ) -> None:  # fmt: skip
        super().__init__(s, layer, rotary, dtype, device, shard)
        sums_ranks = s.layers[layer].feed_forward != "both"
        self.feed_forward_sum = ResidualSum(RMSNorm(s.hidden, s.norm_eps, dtype, device), sums_ranks)
        self.act, self.act_name = get_activation(s.activation), s.activation
        self.use_cpu_kernel = has_kernels(device, dtype) and s.activation in ACTIVATIONS
        self.gate = Linear(s.hidden, s.per_layer_dim, False, dtype, device)
        self.project = Linear(s.per_layer_dim, s.hidden, False, dtype, device)

    def add_input(self, x: Tensor, delta: Tensor | None, own: Tensor) -> tuple[Tensor, Tensor]:
        """Add delta to x, in place, and return x and the next residual; `own` [T, per_layer_dim] is the layer's
        input."""
        x = self.feed_forward_sum(x, delta)
        gate = self.gate(x)
        inner = act_times(gate, own, self.act_name) if self.use_cpu_kernel else self.act(gate).mul_(own)
        return x, self.project(inner)


class PerLayerInputDecoder(Decoder):
    """See Decoder. Rows of hidden states before the last block end with the last layer's input."""

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__(config, dtype, device, shard)
        s = self.config
        self.has_inputs = s.per_layer_dim > 0
        self.row_width = s.hidden + s.per_layer_dim
        if self.has_inputs:
            # (product / sqrt(hidden), normalised, + the row * sqrt(per_layer_dim)) / sqrt(2)
            width, half = len(s.layers) * s.per_layer_dim, 2**-0.5
            self.input_table = Embedding(s.per_layer_vocab, width, dtype, device, s.per_layer_dim**0.5 * half)
            self.input_product = Linear(s.hidden, width, False, dtype, device)
            self.input_norm = RMSNorm(s.per_layer_dim, s.norm_eps * s.hidden, dtype, device, factor=half)

    def make_layer(self, layer: int, *args: Any) -> nn.Module:
        """See Decoder."""
        return (PerLayerInputLayer if self.config.per_layer_dim else DecoderLayer)(self.config, layer, *args)

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """See Decoder."""
        if not self.has_inputs:
            return super().forward(tokens, ctx)
        x, own, mixed = self.run_with_inputs(tokens, ctx)
        hidden = self.finish_with_input(ctx.select_logits_rows(x), ctx.select_logits_rows(own), mixed)
        if ctx.hidden_states is not None:
            ctx.hidden_states.store_final(hidden)
        return hidden

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """See Decoder; x is [T, hidden + per_layer_dim]."""
        if not self.has_inputs:
            return super().embed(tokens, ctx)
        x, own, mixed = self.run_with_inputs(tokens, ctx)
        return torch.cat((x, own), dim=1), mixed

    def run_with_inputs(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Run the model up to the last layer's mixer: return x [T, hidden], the last layer's input [T, per_layer_dim]
        and the mixer's output."""
        x, states = self.embed_inputs(tokens, ctx), ctx.hidden_states
        if ctx.image_tokens is not None:
            tokens = tokens.index_fill(0, ctx.image_tokens, self.config.per_layer_image_token)
        *inputs, last_input = self.layer_inputs(tokens, x)
        *layers, last = self.layers
        delta: Tensor | None = None
        for number, (layer, own) in enumerate(zip(layers, inputs)):
            mixed = layer.mix(x, delta, ctx)
            if states is not None:  # x includes delta now
                states.store_layer(number, x)
            x, delta = layer.add_input(*layer.feed_forward(x, mixed), own)
        mixed = last.mix(x, delta, ctx, last=True)
        if states is not None:
            states.store_layer(len(layers), x)
        return x, last_input, mixed

    def layer_inputs(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """Return each layer's input [T, per_layer_dim], for tokens [T] with embeddings x [T, hidden]."""
        product, dim = self.input_product(x), self.config.per_layer_dim
        self.input_norm.normalize_(product.view(-1, dim))
        return torch.split(self.input_table(tokens, add_to=product), dim, dim=1)

    def finish_selected(self, x: Tensor, mixed: Tensor) -> Tensor:
        """See Decoder; x is [R, hidden + per_layer_dim]."""
        if not self.has_inputs:
            return super().finish_selected(x, mixed)
        return self.finish_with_input(x[:, : self.config.hidden], x[:, self.config.hidden :], mixed)

    def finish_with_input(self, x: Tensor, own: Tensor, mixed: Tensor) -> Tensor:
        """As `finish_selected`, with the last layer's input apart."""
        last = self.layers[-1]
        return self.norm(*last.add_input(*last.feed_forward(x, mixed), own))
