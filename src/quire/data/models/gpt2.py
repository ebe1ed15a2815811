"""GPT-2 (Radford et al., 2019): learned positions, norm before each block, GELU. Checkpoints keep weights as [in, out].

The model knows tokens and an Attending; it knows no batch, no cache, no sampling.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.data.layers.cut import columns, heads, vocabulary
from quire.data.layers.embedding import Embedding
from quire.data.layers.exchange import Exchange, gathered
from quire.data.layers.linear import Linear
from quire.data.layers.mlp import MLP
from quire.data.layers.norm import LayerNorm
from quire.data.layers.prepare import prepare_layers
from quire.data.layers.stages import stacked
from quire.data.models.attending import Attending
from quire.data.models.names import Stored, expand
from quire.data.models.settings import GPT2Settings
from quire.vocabulary.layout import WHOLE, Part
from quire.vocabulary.specs import ModelSpec


def _names() -> dict[str, str | tuple[str, ...]]:
    names: dict[str, str | tuple[str, ...]] = {
        "embed.weight": "wte.weight",
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


NAMES = _names()
TRANSPOSED = r"\.(attention|mlp)\."


class Attention(nn.Module):
    """Queries, keys and values from one product; attention through the context; the output projection."""

    def __init__(
        self, settings: GPT2Settings, layer: int, dtype: torch.dtype, device: torch.device, part: Part
    ) -> None:
        super().__init__()
        s = settings
        self.layer, self.head_dim = layer, s.head_dim
        queries, keys = heads(part, s.heads, s.heads, s.head_dim)
        self.qkv = Linear(s.hidden, (queries, keys, keys), True, dtype, device)
        self.out = Linear(queries, s.hidden, True, dtype, device)

    def forward(self, x: Tensor, ctx: Attending, last: bool = False) -> Tensor:
        """What the heads of each token find; `out` comes next."""
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)
        return ctx.attend(self.layer, qkv, last=last).flatten(1)


class Block(nn.Module):
    """x += attention(norm(x)), then x and what is to be added to it next, mlp(norm(x))."""

    def __init__(
        self, settings: GPT2Settings, layer: int, dtype: torch.dtype, device: torch.device, part: Part
    ) -> None:
        super().__init__()
        s = settings
        self.attention_norm = LayerNorm(s.hidden, s.norm_eps, dtype, device)
        self.attention = Attention(s, layer, dtype, device, part)
        self.mlp_norm = LayerNorm(s.hidden, s.norm_eps, dtype, device)
        self.mlp = MLP(s.hidden, columns(part, s.intermediate), s.activation, True, dtype, device)

    def forward(self, x: Tensor, delta: Tensor | None, ctx: Attending) -> tuple[Tensor, Tensor]:
        return self.rest(x, self.attention.out(self.attend(x, delta, ctx)))

    def attend(self, x: Tensor, delta: Tensor | None, ctx: Attending, last: bool = False) -> Tensor:
        """Up to the attention, itself included."""
        return self.attention(self.attention_norm(x, delta), ctx, last)

    def rest(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Behind it."""
        return x, self.mlp(self.mlp_norm(x, delta))


class GPT2(nn.Module):
    """The model, its weights uninitialised: fill them (quire.data.weights), then `prepare`, then `forward`."""

    prefixes: ClassVar[tuple[str, ...]] = ("transformer.",)

    @staticmethod
    def spec(config: dict[str, Any]) -> ModelSpec:
        """What a memory needs to know. StartupError for a config that isn't supported."""
        return GPT2Settings.read(config).spec()

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, part: Part = WHOLE) -> None:
        super().__init__()
        s = GPT2Settings.read(config)
        s.of(part)  # refuses what can't be
        self.tied = s.tied
        self.exchange: Exchange | None = None
        self.vocabulary = rows = vocabulary(part, s.vocab_size)
        self.embed = Embedding(rows, s.hidden, dtype, device) if part.embeds(s.tied) else None
        self.positions = Embedding(s.max_len, s.hidden, dtype, device) if part.starts else None
        self.layers = stacked(part, s.layers, lambda layer: Block(s, layer, dtype, device, part))
        self.norm = LayerNorm(s.hidden, s.norm_eps, dtype, device)
        tied = self.embed.weight if s.tied and self.embed is not None else None
        self.head = Linear(s.hidden, rows, False, dtype, device, tied) if part.projects(s.tied) else None

    def forward(self, tokens: Tensor, ctx: Attending) -> Tensor:
        """tokens [T] int64 -> hidden [T, hidden] (of the context's wanted tokens), after the final norm."""
        return self.behind(*self.begin(tokens, ctx), ctx)

    def begin(self, tokens: Tensor, ctx: Attending) -> tuple[Tensor, Tensor]:
        """Up to the last attention, itself included: x [T, hidden], and what it gives."""
        return self.through(self.positions(ctx.positions, onto=self.embed(tokens)), ctx)

    def through(self, x: Tensor, ctx: Attending, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same from embeddings on, which are used up; or from what the stage before gives, of this one's layers."""
        *layers, last = self.layers
        for layer in layers:
            x, delta = layer(x, delta, ctx)
        return x, last.attend(x, delta, ctx, last=True)

    def behind(self, x: Tensor, attended: Tensor, ctx: Attending) -> Tensor:
        """`end`, of the context's wanted tokens."""
        return self.end(ctx.wanted(x), attended)

    def end(self, x: Tensor, attended: Tensor) -> Tensor:
        """Behind the last attention, of the tokens whose x and attention these are: hidden [T, hidden]."""
        x, delta = self.layers[-1].rest(x, self.layers[-1].attention.out(attended))
        return self.norm(x, delta)

    def logits(self, hidden: Tensor, own: bool = False) -> Tensor:
        """hidden [R, hidden] -> logits [R, vocab_size], in the model's dtype; with `own` this rank's, [R, room]."""
        return gathered(self.head(hidden), self.vocabulary, None if own else self.exchange)

    def names(self) -> dict[str, Stored]:
        """Our parameters -> the checkpoint's tensors, without their prefix. Ask before `prepare`."""
        return expand(self, NAMES, TRANSPOSED)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not needed: causal masks."""
        return (r"h\.\d+\.attn\.(masked_)?bias", *((r"lm_head\.weight",) if self.tied else ()))

    def prepare(self, max_len: int | None = None, deterministic: bool = False) -> None:
        """After loading, once: choose kernels, pack weights. `deterministic`: see quire.data.layers.prepare."""
        prepare_layers(self, deterministic)
