"""GPT-2 (Radford et al., 2019): learned positions, norm before each block, GELU. Checkpoints keep weights as [in, out].

The model knows tokens and an Attending; it knows no batch, no cache, no sampling.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.layers.embedding import Embedding
from quire.layers.exchange import Exchange, gather_logits
from quire.layers.linear import Linear
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.layers.pipeline import make_layers
from quire.layers.prepare import prepare_layers
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
        """What the heads of each token find; `out` comes next."""
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)
        return ctx.attend(self.layer, qkv, last=last).flatten(1)


class GPT2DecoderLayer(nn.Module):
    """x += attention(norm(x)), then x and what is to be added to it next, mlp(norm(x))."""

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
        """Up to the attention, itself included."""
        return self.attention(self.attention_norm(x, delta), ctx, last)

    def feed_forward(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Behind it."""
        return x, self.mlp(self.mlp_norm(x, delta))


class GPT2(nn.Module):
    """The model, its weights uninitialised: fill them (quire.weights), then `prepare`, then `forward`."""

    weight_prefixes: ClassVar[tuple[str, ...]] = ("transformer.",)

    @staticmethod
    def spec(config: dict[str, Any]) -> ModelSpec:
        """What a memory needs to know. StartupError for a config that isn't supported."""
        return GPT2Settings.from_config(config).spec()

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        s = GPT2Settings.from_config(config)
        s.for_shard(shard)  # refuses what can't be
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
        """tokens [T] int64 -> hidden [T, hidden] (of the context's wanted tokens), after the final norm."""
        return self.finish(*self.embed(tokens, ctx), ctx)

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Up to the last attention, itself included: x [T, hidden], and what it gives."""
        return self.run_layers(self.positions(ctx.positions, add_to=self.embed_tokens(tokens)), ctx)

    def run_layers(self, x: Tensor, ctx: ForwardContext, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same from embeddings on, which are used up; or from what the stage before gives, of this one's layers."""
        *layers, last = self.layers
        for layer in layers:
            x, delta = layer(x, delta, ctx)
        return x, last.attend(x, delta, ctx, last=True)

    def finish(self, x: Tensor, attended: Tensor, ctx: ForwardContext) -> Tensor:
        """`finish_selected`, of the context's wanted tokens."""
        return self.finish_selected(ctx.select_logits_rows(x), attended)

    def finish_selected(self, x: Tensor, attended: Tensor) -> Tensor:
        """Behind the last attention, of the tokens whose x and attention these are: hidden [T, hidden]."""
        x, delta = self.layers[-1].feed_forward(x, self.layers[-1].attention.out(attended))
        return self.norm(x, delta)

    def logits(self, hidden: Tensor, local: bool = False) -> Tensor:
        """hidden [R, hidden] -> logits [R, vocab_size], in the model's dtype; with `local` this rank's, [R, room]."""
        return gather_logits(self.head(hidden), self.vocab_shard, None if local else self.exchange)

    def weight_sources(self) -> dict[str, WeightSource]:
        """Our parameters -> the checkpoint's tensors, without their prefix. Ask before `prepare`."""
        return expand_weight_names(self, WEIGHT_NAMES, TRANSPOSED_WEIGHTS)

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not needed: causal masks."""
        return (r"h\.\d+\.attn\.(masked_)?bias", *((r"lm_head\.weight",) if self.tied else ()))

    def prepare(self, max_len: int | None = None, deterministic: bool = False) -> None:
        """After loading, once: choose kernels, pack weights. `deterministic`: see quire.layers.prepare."""
        prepare_layers(self, deterministic)
