"""Jamba (Lieber et al., 2024): Mamba layers with a few of attention between them, none of which needs a rotary
embedding, and behind each a feed-forward block, every second one of experts.

The model knows tokens and an Attending; it knows no batch, no cache, no sampling.
"""

from __future__ import annotations

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
from quire.layers.prepare import prepare_layers
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
    """x += mixer(norm(x)), of attention or of a running state, then x and what is to be added to it next,
    mlp(norm(x)). Each sum is left to the norm that follows, which reads all of x anyway."""

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
        """Up to what the mixer's output projection is given."""
        normed = self.mixer_norm(x, delta)
        if self.attention is not None:
            return self.attention(normed, None, ctx, last)
        assert self.mamba is not None, "a layer attends, or has a state"
        return self.mamba.mix(normed, *ctx.state(self.layer))

    def feed_forward(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """From that projection on."""
        mixer, mlp = self.attention or self.mamba, self.mlp or self.experts
        assert mixer is not None, "a layer attends, or has a state"
        assert mlp is not None, "a layer has a feed-forward block"
        return x, mlp(self.mlp_norm(x, mixer.out(mixed)))


class Jamba(nn.Module):
    """The model, its weights uninitialised: fill them (quire.weights), then `prepare`, then `forward`."""

    weight_prefixes: ClassVar[tuple[str, ...]] = ("model.",)

    @staticmethod
    def spec(config: dict[str, Any]) -> ModelSpec:
        """What a memory needs to know. StartupError for a config that isn't supported."""
        return JambaSettings.from_config(config).spec()

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        s = JambaSettings.from_config(config)
        s.for_shard(shard)  # refuses what can't be
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
        """tokens [T] int64 -> hidden [T, hidden] (of the context's wanted tokens), after the final norm."""
        return self.finish(*self.embed(tokens, ctx), ctx)

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Up to the last layer's mixer, itself included: x [T, hidden], and what it gives; of a state, which all tokens
        advance, of all of them."""
        return self.run_layers(self.embed_tokens(tokens), ctx)

    def run_layers(self, x: Tensor, ctx: ForwardContext, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same from embeddings on, which are used up; or from what the stage before gives, of this one's layers."""
        *layers, last = self.layers
        for layer in layers:
            x, delta = layer(x, delta, ctx)
        return x, last.mix(x, delta, ctx, last=True)

    def finish(self, x: Tensor, mixed: Tensor, ctx: ForwardContext) -> Tensor:
        """`finish_selected`, of the context's wanted tokens."""
        return self.finish_selected(
            ctx.select_logits_rows(x), mixed if self.layers[-1].mamba is None else ctx.select_logits_rows(mixed)
        )

    def finish_selected(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Behind the last mixer, of the tokens whose x these are, and what it gave: hidden [T, hidden]."""
        x, delta = self.layers[-1].feed_forward(x, mixed)
        return self.norm(x, delta)

    def logits(self, hidden: Tensor, local: bool = False) -> Tensor:
        """hidden [R, hidden] -> logits [R, vocab_size], in the model's dtype; with `local` this rank's, [R, room]."""
        return gather_logits(self.head(hidden), self.vocab_shard, None if local else self.exchange)

    def weight_sources(self) -> dict[str, WeightSource]:
        """Our parameters -> the checkpoint's tensors, without their prefix. Ask before `prepare`."""
        return expand_weight_names(
            self,
            {
                **WEIGHT_NAMES,
                **expert_weight_names("layers.*.experts", "layers.*.feed_forward.experts", self.num_experts),
            },
        )

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not needed."""
        return (r"lm_head\.weight",) if self.tied else ()

    def prepare(self, max_len: int | None = None, deterministic: bool = False) -> None:
        """After loading, once: choose kernels, pack weights. `deterministic`: see quire.layers.prepare."""
        prepare_layers(self, deterministic)
