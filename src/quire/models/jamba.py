"""Jamba (Lieber et al., 2024): Mamba layers with a few attention layers between them, without rotary embedding. Each
layer has a feed-forward block, every second one a mixture of experts.

The model works on tokens and a ForwardContext; batching, the cache and sampling are outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.layers.embedding import Embedding
from quire.layers.exchange import Exchange, gather_logits
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.moe import SparseMLP
from quire.layers.norm import RMSNorm
from quire.layers.pipeline import make_layers
from quire.layers.prepare import MappedWeights, prepare_layers
from quire.layers.sharding import shard_columns, shard_vocab
from quire.models.forward_context import ForwardContext
from quire.models.llama import LlamaAttention
from quire.models.mamba import make_mixer
from quire.models.mamba_settings import JambaSettings
from quire.models.weight_names import WeightSource, expand_weight_names, expert_weight_names, mixer_weight_names
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import UNSHARDED, Shard

WEIGHT_NAMES: dict[str, str | tuple[str, ...]] = {
    "embed_tokens.weight": "embed_tokens.weight",
    "layers.*.mixer_norm.weight": "layers.*.input_layernorm.weight",
    "layers.*.attention.qkv.weight": tuple(f"layers.*.self_attn.{x}_proj.weight" for x in "qkv"),
    "layers.*.attention.out.weight": "layers.*.self_attn.o_proj.weight",
    **mixer_weight_names("layers.*.mamba", "layers.*.mamba"),
    "layers.*.mlp_norm.weight": "layers.*.pre_ff_layernorm.weight",
    "layers.*.mlp.gate_up.weight": tuple(f"layers.*.feed_forward.{x}_proj.weight" for x in ("gate", "up")),
    "layers.*.mlp.down.weight": "layers.*.feed_forward.down_proj.weight",
    "layers.*.experts.router.weight": "layers.*.feed_forward.router.weight",
    "norm.weight": "final_layernorm.weight",
    "head.weight": "lm_head.weight",
}


class JambaDecoderLayer(nn.Module):
    """x += mixer(norm(x)), the mixer being attention or Mamba; returns x and the next residual, mlp(norm(x)). Each sum
    is left to the norm that follows, which reads all of x anyway."""

    def __init__(
        self, settings: JambaSettings, layer: int, dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        s, attends, sparse = settings, settings.is_attention_layer[layer], settings.is_moe_layer[layer]
        self.layer = layer
        self.mixer_norm = RMSNorm(s.hidden, s.norm_eps, dtype, device)
        self.attention = LlamaAttention(s, layer, dtype, device, shard=shard) if attends else None
        self.mamba = None if attends else make_mixer(s.mixer, dtype, device, shard)
        self.mlp_norm = RMSNorm(s.hidden, s.norm_eps, dtype, device)
        inner = shard_columns(shard, s.intermediate)
        self.mlp = None if sparse else GatedMLP(s.hidden, inner, "silu", False, dtype, device)
        self.experts = None
        if sparse:
            self.experts = SparseMLP(s.hidden, inner, s.experts, s.experts_per_token, "silu", False, dtype, device)

    def forward(self, x: Tensor, delta: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        return self.feed_forward(x, self.mix(x, delta, ctx))

    def mix(self, x: Tensor, delta: Tensor | None, ctx: ForwardContext, last: bool = False) -> Tensor:
        """Run the layer up to the mixer: return its output, before the projection `out`."""
        normed = self.mixer_norm(x, delta)
        if self.attention is not None:
            return self.attention(normed, None, ctx, last)
        assert self.mamba is not None, "a layer attends, or has a state"
        return self.mamba.mix(normed, *ctx.state(self.layer))

    def feed_forward(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Run the rest of the layer from that projection on: return x and the next residual."""
        mixer, mlp = self.attention or self.mamba, self.mlp or self.experts
        assert mixer is not None, "a layer attends, or has a state"
        assert mlp is not None, "a layer has a feed-forward block"
        return x, mlp(self.mlp_norm(x, mixer.out(mixed)))


class Jamba(nn.Module):
    """The model, with uninitialised weights: load them (quire.weights), call `prepare`, then `forward`."""

    weight_prefixes: ClassVar[tuple[str, ...]] = ("model.",)

    @staticmethod
    def spec(config: dict[str, Any]) -> ModelSpec:
        """Return the ModelSpec of a config.json. Raise StartupError if it is not supported."""
        return JambaSettings.from_config(config).spec()

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        s = JambaSettings.from_config(config)
        s.for_shard(shard)  # raises StartupError if the model can't be divided so
        self.exchange: Exchange | None = None
        self.vocab_shard = rows = shard_vocab(shard, s.vocab_size)
        self.tied, self.num_experts = s.tied, s.experts
        self.embed_tokens = Embedding(rows, s.hidden, dtype, device) if shard.has_embedding(s.tied) else None
        self.layers = make_layers(
            shard, len(s.is_attention_layer), lambda layer: JambaDecoderLayer(s, layer, dtype, device, shard)
        )
        self.norm = RMSNorm(s.hidden, s.norm_eps, dtype, device)
        tied = self.embed_tokens.weight if s.tied and self.embed_tokens is not None else None
        self.head = Linear(s.hidden, rows, False, dtype, device, tied) if shard.has_lm_head(s.tied) else None

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """Run tokens [T] int64: return hidden states [R, hidden] of those that `ctx` selects, after the final norm."""
        return self.finish(*self.embed(tokens, ctx), ctx)

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Run the model up to the last layer's mixer: return x [T, hidden] and the mixer's output. A Mamba mixer gives
        that of all tokens, since all of them advance its state."""
        assert self.embed_tokens is not None, "only the first stage embeds"
        return self.run_layers(self.embed_tokens(tokens), ctx)

    def run_layers(self, x: Tensor, ctx: ForwardContext, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `embed`, from embeddings `x`, or from the previous stage's x and delta. x is overwritten."""
        *layers, last = self.layers
        for layer in layers:
            x, delta = layer(x, delta, ctx)
        return x, last.mix(x, delta, ctx, last=True)

    def finish(self, x: Tensor, mixed: Tensor, ctx: ForwardContext) -> Tensor:
        """Call `finish_selected` for the tokens that `ctx` selects."""
        return self.finish_selected(
            ctx.select_logits_rows(x), mixed if self.layers[-1].mamba is None else ctx.select_logits_rows(mixed)
        )

    def finish_selected(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Run what follows the last mixer, for the selected tokens: return hidden states [R, hidden]."""
        x, delta = self.layers[-1].feed_forward(x, mixed)
        return self.norm(x, delta)

    def logits(self, hidden: Tensor, local: bool = False) -> Tensor:
        """Return the logits [R, vocab_size] of hidden [R, hidden], in the model's dtype; if `local`, this rank's
        columns, padding included."""
        assert self.head is not None, "only the last stage has logits"
        return gather_logits(self.head(hidden), self.vocab_shard, None if local else self.exchange)

    def weight_sources(self) -> dict[str, WeightSource]:
        """Map parameter names to the checkpoint's tensors, without prefix. Call before `prepare`."""
        return expand_weight_names(
            self,
            {
                **WEIGHT_NAMES,
                **expert_weight_names("layers.*.experts", "layers.*.feed_forward.experts", self.num_experts),
            },
        )

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not loaded."""
        return (r"lm_head\.weight",) if self.tied else ()

    def prepare(
        self, max_len: int | None = None, deterministic: bool = False, mapped_files: Sequence[MappedWeights] = ()
    ) -> None:
        """Choose kernels and pack weights. Call once, after loading. `deterministic`, `mapped_files`: see
        quire.layers.prepare."""
        prepare_layers(self, deterministic, mapped_files)
