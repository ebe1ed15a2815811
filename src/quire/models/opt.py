"""OPT (Zhang et al., 2022): learned positions, ReLU, biases everywhere; opt-350m normalises after each block and
projects its smaller word embeddings in and out.

The model works on tokens and a ForwardContext; batching, the cache and sampling are outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.layers.embedding import Embedding
from quire.layers.exchange import Exchange, gather_logits
from quire.layers.linear import Linear
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.layers.pipeline import make_layers
from quire.layers.prepare import MappedWeights, prepare_layers
from quire.layers.sharding import shard_columns, shard_heads, shard_vocab
from quire.models.forward_context import ForwardContext
from quire.models.settings import OPTSettings
from quire.models.weight_names import WeightSource, expand_weight_names
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import UNSHARDED, Shard

NORM_EPS = 1e-5
POSITION_OFFSET = 2  # the first two rows of the position table are never used


def _weight_names() -> dict[str, str | tuple[str, ...]]:
    names: dict[str, str | tuple[str, ...]] = {
        "embed_tokens.weight": "embed_tokens.weight",
        "positions.weight": "embed_positions.weight",
        "project_in.weight": "project_in.weight",
        "project_out.weight": "project_out.weight",
        "head.weight": "lm_head.weight",
    }
    for kind in ("weight", "bias"):
        names |= {
            f"layers.*.attention_norm.{kind}": f"layers.*.self_attn_layer_norm.{kind}",
            f"layers.*.attention.qkv.{kind}": tuple(f"layers.*.self_attn.{x}_proj.{kind}" for x in "qkv"),
            f"layers.*.attention.out.{kind}": f"layers.*.self_attn.out_proj.{kind}",
            f"layers.*.mlp_norm.{kind}": f"layers.*.final_layer_norm.{kind}",
            f"layers.*.mlp.up.{kind}": f"layers.*.fc1.{kind}",
            f"layers.*.mlp.down.{kind}": f"layers.*.fc2.{kind}",
            f"norm.{kind}": f"final_layer_norm.{kind}",
        }
    return names


WEIGHT_NAMES = _weight_names()


class OPTAttention(nn.Module):
    """Queries, keys and values from one product; attention through the context; the output projection."""

    __call__: Callable[..., Tensor]

    def __init__(
        self, settings: OPTSettings, layer: int, dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> None:
        super().__init__()
        s = settings
        self.layer, self.head_dim = layer, s.head_dim
        queries, keys = shard_heads(shard, s.heads, s.heads, s.head_dim)
        self.qkv = Linear(s.hidden, (queries, keys, keys), s.bias, dtype, device)
        self.out = Linear(queries, s.hidden, s.bias, dtype, device)

    def forward(self, x: Tensor, ctx: ForwardContext, last: bool = False) -> Tensor:
        """Return the heads' outputs [T, heads * head_dim], before `out`."""
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)
        return ctx.attend(self.layer, qkv, last=last).flatten(1)


class OPTDecoderLayer(nn.Module):
    """x += attention, then x += mlp, with the norm before or after. Returns x and the residual that the next norm adds;
    None if the norm is after."""

    def __init__(
        self, settings: OPTSettings, layer: int, dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> None:
        super().__init__()
        s = settings
        self.norm_before = s.norm_before
        self.attention_norm = LayerNorm(s.hidden, NORM_EPS, dtype, device)
        self.attention = OPTAttention(s, layer, dtype, device, shard)
        self.mlp_norm = LayerNorm(s.hidden, NORM_EPS, dtype, device)
        self.mlp = MLP(s.hidden, shard_columns(shard, s.intermediate), s.activation, s.bias, dtype, device)

    def forward(self, x: Tensor, delta: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor | None]:
        return self.feed_forward(x, self.attention.out(self.attend(x, delta, ctx)))

    def attend(self, x: Tensor, delta: Tensor | None, ctx: ForwardContext, last: bool = False) -> Tensor:
        """Run the layer up to the attention: return its output, before `out`."""
        return self.attention(self.attention_norm(x, delta) if self.norm_before else x, ctx, last)

    def feed_forward(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run the rest of the layer: return x and the next residual, if any."""
        if self.norm_before:
            return x, self.mlp(self.mlp_norm(x, delta))
        x = self.attention_norm(x, delta)
        return self.mlp_norm(x, self.mlp(x)), None


class OPT(nn.Module):
    """The model, with uninitialised weights: load them (quire.weights), call `prepare`, then `forward`."""

    weight_prefixes: ClassVar[tuple[str, ...]] = ("model.decoder.", "decoder.")

    @staticmethod
    def spec(config: dict[str, Any]) -> ModelSpec:
        """Return the ModelSpec of a config.json. Raise StartupError if it is not supported."""
        return OPTSettings.from_config(config).spec()

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        s = OPTSettings.from_config(config)
        s.for_shard(shard)  # raises StartupError if the model can't be divided so
        self.tied = s.tied
        self.exchange: Exchange | None = None
        self.vocab_shard = rows = shard_vocab(shard, s.vocab_size)
        self.embed_tokens = Embedding(rows, s.embed_dim, dtype, device) if shard.has_embedding(s.tied) else None
        positions = s.max_len + POSITION_OFFSET
        self.positions = Embedding(positions, s.hidden, dtype, device) if shard.is_first_stage else None
        projected = s.embed_dim != s.hidden
        self.project_in = Linear(s.embed_dim, s.hidden, False, dtype, device) if projected else None
        self.layers = make_layers(shard, s.layers, lambda layer: OPTDecoderLayer(s, layer, dtype, device, shard))
        self.norm = LayerNorm(s.hidden, NORM_EPS, dtype, device) if s.final_norm else None
        self.project_out = Linear(s.hidden, s.embed_dim, False, dtype, device) if projected else None
        tied = self.embed_tokens.weight if s.tied and self.embed_tokens is not None else None
        self.head = Linear(s.embed_dim, rows, False, dtype, device, tied) if shard.has_lm_head(s.tied) else None

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """Run tokens [T] int64: return hidden states [R, hidden] of those that `ctx` selects, after the norm if any."""
        return self.finish(*self.embed(tokens, ctx), ctx)

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Run the model up to the last attention: return x [T, hidden] and the attention's output."""
        assert self.embed_tokens is not None, "only the first stage embeds"
        assert self.positions is not None, "only the first stage embeds"
        x = self.embed_tokens(tokens)
        if self.project_in is not None:
            x = self.project_in(x)
        self.positions(ctx.positions, add_to=x, offset=POSITION_OFFSET)
        return self.run_layers(x, ctx)

    def run_layers(self, x: Tensor, ctx: ForwardContext, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `embed`, from embeddings `x`, or from the previous stage's x and delta. x is overwritten."""
        *layers, last = self.layers
        for layer in layers:
            x, delta = layer(x, delta, ctx)
        return x, last.attend(x, delta, ctx, last=True)

    def finish(self, x: Tensor, attended: Tensor, ctx: ForwardContext) -> Tensor:
        """Call `finish_selected` for the tokens that `ctx` selects."""
        return self.finish_selected(ctx.select_logits_rows(x), attended)

    def finish_selected(self, x: Tensor, attended: Tensor) -> Tensor:
        """Run what follows the last attention, for the selected tokens: return hidden states [R, hidden]."""
        x, delta = self.layers[-1].feed_forward(x, self.layers[-1].attention.out(attended))
        if self.norm is not None:
            return self.norm(x, delta)
        if self.exchange is not None and delta is not None:
            delta = self.exchange.all_reduce(delta)
        return x if delta is None else x.add_(delta)

    def logits(self, hidden: Tensor, local: bool = False) -> Tensor:
        """Return the logits [R, vocab_size] of hidden [R, hidden], in the model's dtype; if `local`, this rank's
        columns, padding included."""
        assert self.head is not None, "only the last stage has logits"
        logits = self.head(hidden if self.project_out is None else self.project_out(hidden))
        return gather_logits(logits, self.vocab_shard, None if local else self.exchange)

    def weight_sources(self) -> dict[str, WeightSource]:
        """Map parameter names to the checkpoint's tensors, without prefix. Call before `prepare`."""
        return expand_weight_names(self, WEIGHT_NAMES)

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
