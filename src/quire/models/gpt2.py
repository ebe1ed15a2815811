"""GPT-2 (Radford et al., 2019): learned positions, norm before each block, GELU. Checkpoints keep weights as [in, out].

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
from quire.models.settings import GPT2Settings
from quire.models.weight_names import WeightSource, expand_weight_names
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import UNSHARDED, Shard


def _weight_names() -> dict[str, str | tuple[str, ...]]:
    names: dict[str, str | tuple[str, ...]] = {
        "embed_tokens.weight": "wte.weight",
        "positions.weight": "wpe.weight",
        "head.weight": "lm_head.weight",
    }
    for kind in ("weight", "bias"):
        names |= {
            f"layers.*.attention_norm.{kind}": f"h.*.ln_1.{kind}",
            f"layers.*.attention.qkv.{kind}": f"h.*.attn.c_attn.{kind}",
            f"layers.*.attention.out.{kind}": f"h.*.attn.c_proj.{kind}",
            f"layers.*.mlp_norm.{kind}": f"h.*.ln_2.{kind}",
            f"layers.*.mlp.up.{kind}": f"h.*.mlp.c_fc.{kind}",
            f"layers.*.mlp.down.{kind}": f"h.*.mlp.c_proj.{kind}",
            f"norm.{kind}": f"ln_f.{kind}",
        }
    return names


WEIGHT_NAMES = _weight_names()
TRANSPOSED_WEIGHTS = r"\.(attention|mlp)\."


class GPT2Attention(nn.Module):
    """Queries, keys and values from one product; attention through the context; the output projection."""

    __call__: Callable[..., Tensor]

    def __init__(
        self, settings: GPT2Settings, layer: int, dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> None:
        super().__init__()
        s = settings
        self.layer, self.head_dim = layer, s.head_dim
        queries, keys = shard_heads(shard, s.heads, s.heads, s.head_dim)
        self.qkv = Linear(s.hidden, (queries, keys, keys), True, dtype, device)
        self.out = Linear(queries, s.hidden, True, dtype, device)

    def forward(self, x: Tensor, ctx: ForwardContext, last: bool = False) -> Tensor:
        """Return the heads' outputs [T, heads * head_dim], before `out`."""
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)
        return ctx.attend(self.layer, qkv, last=last).flatten(1)


class GPT2DecoderLayer(nn.Module):
    """x += attention(norm(x)); returns x and the next residual, mlp(norm(x))."""

    def __init__(
        self, settings: GPT2Settings, layer: int, dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> None:
        super().__init__()
        s = settings
        self.attention_norm = LayerNorm(s.hidden, s.norm_eps, dtype, device)
        self.attention = GPT2Attention(s, layer, dtype, device, shard)
        self.mlp_norm = LayerNorm(s.hidden, s.norm_eps, dtype, device)
        self.mlp = MLP(s.hidden, shard_columns(shard, s.intermediate), s.activation, True, dtype, device)

    def forward(self, x: Tensor, delta: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        return self.feed_forward(x, self.attention.out(self.attend(x, delta, ctx)))

    def attend(self, x: Tensor, delta: Tensor | None, ctx: ForwardContext, last: bool = False) -> Tensor:
        """Run the layer up to the attention: return its output, before `out`."""
        return self.attention(self.attention_norm(x, delta), ctx, last)

    def feed_forward(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Run the rest of the layer: return x and the next residual."""
        return x, self.mlp(self.mlp_norm(x, delta))


class GPT2(nn.Module):
    """The model, with uninitialised weights: load them (quire.weights), call `prepare`, then `forward`."""

    weight_prefixes: ClassVar[tuple[str, ...]] = ("transformer.",)

    @staticmethod
    def spec(config: dict[str, Any]) -> ModelSpec:
        """Return the ModelSpec of a config.json. Raise StartupError if it is not supported."""
        return GPT2Settings.from_config(config).spec()

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        s = GPT2Settings.from_config(config)
        s.for_shard(shard)  # raises StartupError if the model can't be divided so
        self.tied = s.tied
        self.exchange: Exchange | None = None
        self.vocab_shard = rows = shard_vocab(shard, s.vocab_size)
        self.embed_tokens = Embedding(rows, s.hidden, dtype, device) if shard.has_embedding(s.tied) else None
        self.positions = Embedding(s.max_len, s.hidden, dtype, device) if shard.is_first_stage else None
        self.layers = make_layers(shard, s.layers, lambda layer: GPT2DecoderLayer(s, layer, dtype, device, shard))
        self.norm = LayerNorm(s.hidden, s.norm_eps, dtype, device)
        tied = self.embed_tokens.weight if s.tied and self.embed_tokens is not None else None
        self.head = Linear(s.hidden, rows, False, dtype, device, tied) if shard.has_lm_head(s.tied) else None

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """Run tokens [T] int64: return hidden states [R, hidden] of those that `ctx` selects, after the final norm."""
        return self.finish(*self.embed(tokens, ctx), ctx)

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Run the model up to the last attention: return x [T, hidden] and the attention's output."""
        assert self.embed_tokens is not None, "only the first stage embeds"
        assert self.positions is not None, "only the first stage embeds"
        return self.run_layers(self.positions(ctx.positions, add_to=self.embed_tokens(tokens)), ctx)

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
        return self.norm(x, delta)

    def logits(self, hidden: Tensor, local: bool = False) -> Tensor:
        """Return the logits [R, vocab_size] of hidden [R, hidden], in the model's dtype; if `local`, this rank's
        columns, padding included."""
        assert self.head is not None, "only the last stage has logits"
        return gather_logits(self.head(hidden), self.vocab_shard, None if local else self.exchange)

    def weight_sources(self) -> dict[str, WeightSource]:
        """Map parameter names to the checkpoint's tensors, without prefix. Call before `prepare`."""
        return expand_weight_names(self, WEIGHT_NAMES, TRANSPOSED_WEIGHTS)

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not loaded: causal masks."""
        return (r"h\.\d+\.attn\.(masked_)?bias", *((r"lm_head\.weight",) if self.tied else ()))

    def prepare(
        self, max_len: int | None = None, deterministic: bool = False, mapped_files: Sequence[MappedWeights] = ()
    ) -> None:
        """Choose kernels and pack weights. Call once, after loading. `deterministic`, `mapped_files`: see
        quire.layers.prepare."""
        prepare_layers(self, deterministic, mapped_files)
