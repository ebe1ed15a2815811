"""Gemma-2 (Riviere et al., 2024): norms before and after attention and MLP, soft caps on scores and logits, a sliding
window in every second layer; and the text model of Gemma-3 (Kamath et al., 2025): normalised queries and keys instead
of the cap on scores, five layers with a window to each without, and a separate rotary embedding for those with one.

The model works on tokens and a ForwardContext; batching, the cache and sampling are outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.layers.embedding import Embedding
from quire.layers.exchange import Exchange, gather_logits
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.module_list import module_list
from quire.layers.norm import RMSNorm
from quire.layers.pipeline import make_layers
from quire.layers.prepare import MappedWeights, prepare_layers
from quire.layers.rotary import RotaryEmbedding
from quire.layers.sharding import shard_columns, shard_vocab
from quire.layers.softcap import Softcap
from quire.models.forward_context import ForwardContext
from quire.models.gemma_settings import GemmaSettings
from quire.models.llama import WEIGHT_NAMES as LLAMA_NAMES
from quire.models.llama import LlamaAttention
from quire.models.weight_names import WeightSource, expand_weight_names
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import UNSHARDED, Shard

WEIGHT_NAMES: dict[str, str | tuple[str, ...]] = {
    **LLAMA_NAMES,
    "layers.*.post_attention_norm.weight": "layers.*.post_attention_layernorm.weight",
    "layers.*.mlp_norm.weight": "layers.*.pre_feedforward_layernorm.weight",
    "layers.*.post_mlp_norm.weight": "layers.*.post_feedforward_layernorm.weight",
}


class GemmaDecoderLayer(nn.Module):
    """x += post_norm(attention(norm(x))), then the same with the MLP, in place. Each sum with its post norm is left to
    the norm that follows, which reads all of x anyway."""

    def __init__(
        self, settings: GemmaSettings, layer: int, dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> None:
        super().__init__()
        s = settings
        norm = partial(RMSNorm, s.hidden, s.norm_eps, dtype, device, offset=True)
        self.attention_norm, self.post_attention_norm = norm(), norm()
        self.attention = LlamaAttention(s, layer, dtype, device, shard=shard)
        self.mlp_norm, self.post_mlp_norm = norm(), norm()
        self.mlp = GatedMLP(s.hidden, shard_columns(shard, s.intermediate), s.activation, False, dtype, device)

    def attend(
        self, x: Tensor, delta: Tensor | None, post_norm: RMSNorm | None, rotary: RotaryEmbedding, ctx: ForwardContext,
        last: bool = False,
    ) -> Tensor:  # fmt: skip
        """Run the layer up to the attention: return its output, before `out`. `delta` is the previous layer's residual,
        `post_norm` the norm through which it is added."""
        return self.attention(self.attention_norm(x, delta, post_norm), rotary, ctx, last)

    def feed_forward(self, x: Tensor, attended: Tensor) -> Tensor:
        """Run the rest of the layer: return the residual to be added to x through `post_mlp_norm`."""
        return self.mlp(self.mlp_norm(x, self.attention.out(attended), self.post_attention_norm))


class Gemma(nn.Module):
    """The model, with uninitialised weights: load them (quire.weights), call `prepare`, then `forward`."""

    weight_prefixes: ClassVar[tuple[str, ...]] = (
        "model.language_model.",
        "language_model.model.",
        "language_model.",
        "model.",
    )

    @staticmethod
    def spec(config: dict[str, Any]) -> ModelSpec:
        """Return the ModelSpec of a config.json. Raise StartupError if it is not supported."""
        return GemmaSettings.from_config(config).spec()

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        s = GemmaSettings.from_config(config)
        s.for_shard(shard)  # raises StartupError if the model can't be divided so
        self.tied = s.tied
        self.exchange: Exchange | None = None
        self.vocab_shard = rows = shard_vocab(shard, s.vocab_size)
        embeds = shard.has_embedding(s.tied)
        self.embed_tokens = Embedding(rows, s.hidden, dtype, device, scale=s.hidden**0.5) if embeds else None
        self.layers = make_layers(
            shard, len(s.windows), lambda layer: GemmaDecoderLayer(s, layer, dtype, device, shard)
        )
        if not shard.is_first_stage:  # the previous stage's last residual is added here, through that layer's post norm
            before = self.layers[shard.layer_range(len(s.windows)).start - 1]
            before.post_mlp_norm = RMSNorm(s.hidden, s.norm_eps, dtype, device, offset=True)
        self.norm = RMSNorm(s.hidden, s.norm_eps, dtype, device, offset=True)
        tied = self.embed_tokens.weight if s.tied and self.embed_tokens is not None else None
        self.head = Linear(s.hidden, rows, False, dtype, device, tied) if shard.has_lm_head(s.tied) else None
        self.softcap = None if s.final_softcap is None else Softcap(s.final_softcap, dtype, device)
        ropes = list(dict.fromkeys(s.ropes))
        self.rotary = module_list(RotaryEmbedding(rope, s.head_dim, s.max_len) for rope in ropes)
        self.rotary_index = [ropes.index(rope) for rope in s.ropes]  # each layer's index into `rotary`

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """Run tokens [T] int64: return hidden states [R, hidden] of those that `ctx` selects, after the final norm."""
        return self.finish(*self.embed(tokens, ctx), ctx)

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Run the model up to the last attention: return x [T, hidden] and the attention's output."""
        assert self.embed_tokens is not None, "only the first stage embeds"
        return self.run_layers(self.embed_tokens(tokens), ctx)

    def run_layers(self, x: Tensor, ctx: ForwardContext, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `embed`, from embeddings `x`, or from the previous stage's x and delta. x is overwritten."""
        post_norm = None
        *layers, last = zip(self.layers, (self.rotary[which] for which in self.rotary_index), strict=True)
        for layer, rotary in layers:
            delta = layer.feed_forward(x, layer.attend(x, delta, post_norm, rotary, ctx))
            post_norm = layer.post_mlp_norm
        layer, rotary = last
        return x, layer.attend(x, delta, post_norm, rotary, ctx, last=True)

    def finish(self, x: Tensor, attended: Tensor, ctx: ForwardContext) -> Tensor:
        """Call `finish_selected` for the tokens that `ctx` selects."""
        return self.finish_selected(ctx.select_logits_rows(x), attended)

    def finish_selected(self, x: Tensor, attended: Tensor) -> Tensor:
        """Run what follows the last attention, for the selected tokens: return hidden states [R, hidden]."""
        last = self.layers[-1]
        return self.norm(x, last.feed_forward(x, attended), last.post_mlp_norm)

    def logits(self, hidden: Tensor, local: bool = False) -> Tensor:
        """Return the logits [R, vocab_size] of hidden [R, hidden], in the model's dtype; if `local`, this rank's
        columns, padding included."""
        assert self.head is not None, "only the last stage has logits"
        logits = self.head(hidden)
        if self.softcap is not None:
            logits = self.softcap(logits)
        return gather_logits(logits, self.vocab_shard, None if local else self.exchange)

    def weight_sources(self) -> dict[str, WeightSource]:
        """Map parameter names to the checkpoint's tensors, without prefix. Call before `prepare`."""
        return expand_weight_names(self, WEIGHT_NAMES)

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not loaded, Gemma-3's vision tower
        among them."""
        vision = r"(vision_tower|multi_modal_projector)\..*"
        return (r"(.*\.)?rotary_emb\.inv_freq", vision, *((r"lm_head\.weight",) if self.tied else ()))

    def prepare(
        self, max_len: int | None = None, deterministic: bool = False, mapped_files: Sequence[MappedWeights] = ()
    ) -> None:
        """Choose kernels, pack weights, build the rotary tables for positions below `max_len`. Call once, after
        loading. `deterministic`, `mapped_files`: see quire.layers.prepare."""
        for rotary in self.rotary:
            rotary.prepare(self.norm.weight.device, max_len)
        prepare_layers(self, deterministic, mapped_files)
