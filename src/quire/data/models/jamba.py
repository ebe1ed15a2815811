"""Jamba (Lieber et al., 2024): Mamba layers with a few of attention between them, none of which needs a rotary
embedding, and behind each a feed-forward block, every second one of experts.

The model knows tokens and an Attending; it knows no batch, no cache, no sampling.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.data.layers.cut import columns, vocabulary
from quire.data.layers.embedding import Embedding
from quire.data.layers.exchange import Exchange, gathered
from quire.data.layers.linear import Linear
from quire.data.layers.mlp import GatedMLP
from quire.data.layers.moe import SparseMLP
from quire.data.layers.norm import RMSNorm
from quire.data.layers.prepare import prepare_layers
from quire.data.layers.stages import stacked
from quire.data.models.attending import Attending
from quire.data.models.llama import Attention
from quire.data.models.mamba import mixer_of
from quire.data.models.mamba_settings import JambaSettings
from quire.data.models.names import Stored, expand, expert_names, mixer_names
from quire.vocabulary.layout import WHOLE, Part
from quire.vocabulary.specs import ModelSpec

NAMES: dict[str, str | tuple[str, ...]] = {
    "embed.weight": "embed_tokens.weight",
    "layers.*.mixer_norm.weight": "layers.*.input_layernorm.weight",
    "layers.*.attention.qkv.weight": tuple(f"layers.*.self_attn.{x}_proj.weight" for x in "qkv"),
    "layers.*.attention.out.weight": "layers.*.self_attn.o_proj.weight",
    **mixer_names("layers.*.mamba", "layers.*.mamba"),
    "layers.*.mlp_norm.weight": "layers.*.pre_ff_layernorm.weight",
    "layers.*.mlp.gate_up.weight": tuple(f"layers.*.feed_forward.{x}_proj.weight" for x in ("gate", "up")),
    "layers.*.mlp.down.weight": "layers.*.feed_forward.down_proj.weight",
    "layers.*.experts.router.weight": "layers.*.feed_forward.router.weight",
    "norm.weight": "final_layernorm.weight",
    "head.weight": "lm_head.weight",
}


class Block(nn.Module):
    """x += mixer(norm(x)), of attention or of a running state, then x and what is to be added to it next,
    mlp(norm(x)). Each sum is left to the norm that follows, which reads all of x anyway."""

    def __init__(
        self, settings: JambaSettings, layer: int, dtype: torch.dtype, device: torch.device, part: Part = WHOLE
    ) -> None:
        super().__init__()
        s, attends, sparse = settings, settings.attends[layer], settings.sparse[layer]
        self.layer = layer
        self.mixer_norm = RMSNorm(s.hidden, s.norm_eps, dtype, device)
        self.attention = Attention(s, layer, dtype, device, part=part) if attends else None
        self.mamba = None if attends else mixer_of(s.mixer, dtype, device, part)
        self.mlp_norm = RMSNorm(s.hidden, s.norm_eps, dtype, device)
        inner = columns(part, s.intermediate)
        self.mlp = None if sparse else GatedMLP(s.hidden, inner, "silu", False, dtype, device)
        self.experts = None
        if sparse:
            self.experts = SparseMLP(s.hidden, inner, s.experts, s.active, "silu", False, dtype, device)

    def forward(self, x: Tensor, delta: Tensor | None, ctx: Attending) -> tuple[Tensor, Tensor]:
        return self.rest(x, self.mix(x, delta, ctx))

    def mix(self, x: Tensor, delta: Tensor | None, ctx: Attending, last: bool = False) -> Tensor:
        """Up to what the mixer's output projection is given."""
        normed = self.mixer_norm(x, delta)
        if self.attention is not None:
            return self.attention(normed, None, ctx, last)
        assert self.mamba is not None, "a layer attends, or has a state"
        return self.mamba.mix(normed, *ctx.state(self.layer))

    def rest(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """From that projection on."""
        mixer, mlp = self.attention or self.mamba, self.mlp or self.experts
        assert mixer is not None, "a layer attends, or has a state"
        assert mlp is not None, "a layer has a feed-forward block"
        return x, mlp(self.mlp_norm(x, mixer.out(mixed)))


class Jamba(nn.Module):
    """The model, its weights uninitialised: fill them (quire.data.weights), then `prepare`, then `forward`."""

    prefixes: ClassVar[tuple[str, ...]] = ("model.",)

    @staticmethod
    def spec(config: dict[str, Any]) -> ModelSpec:
        """What a memory needs to know. StartupError for a config that isn't supported."""
        return JambaSettings.read(config).spec()

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, part: Part = WHOLE) -> None:
        super().__init__()
        s = JambaSettings.read(config)
        s.of(part)  # refuses what can't be
        self.exchange: Exchange | None = None
        self.vocabulary = rows = vocabulary(part, s.vocab_size)
        self.tied, self.count = s.tied, s.experts
        self.embed = Embedding(rows, s.hidden, dtype, device) if part.embeds(s.tied) else None
        self.layers = stacked(part, len(s.attends), lambda layer: Block(s, layer, dtype, device, part))
        self.norm = RMSNorm(s.hidden, s.norm_eps, dtype, device)
        tied = self.embed.weight if s.tied and self.embed is not None else None
        self.head = Linear(s.hidden, rows, False, dtype, device, tied) if part.projects(s.tied) else None

    def forward(self, tokens: Tensor, ctx: Attending) -> Tensor:
        """tokens [T] int64 -> hidden [T, hidden] (of the context's wanted tokens), after the final norm."""
        return self.behind(*self.begin(tokens, ctx), ctx)

    def begin(self, tokens: Tensor, ctx: Attending) -> tuple[Tensor, Tensor]:
        """Up to the last layer's mixer, itself included: x [T, hidden], and what it gives; of a state, which all tokens
        advance, of all of them."""
        return self.through(self.embed(tokens), ctx)

    def through(self, x: Tensor, ctx: Attending, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same from embeddings on, which are used up; or from what the stage before gives, of this one's layers."""
        *layers, last = self.layers
        for layer in layers:
            x, delta = layer(x, delta, ctx)
        return x, last.mix(x, delta, ctx, last=True)

    def behind(self, x: Tensor, mixed: Tensor, ctx: Attending) -> Tensor:
        """`end`, of the context's wanted tokens."""
        return self.end(ctx.wanted(x), mixed if self.layers[-1].mamba is None else ctx.wanted(mixed))

    def end(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Behind the last mixer, of the tokens whose x these are, and what it gave: hidden [T, hidden]."""
        x, delta = self.layers[-1].rest(x, mixed)
        return self.norm(x, delta)

    def logits(self, hidden: Tensor, own: bool = False) -> Tensor:
        """hidden [R, hidden] -> logits [R, vocab_size], in the model's dtype; with `own` this rank's, [R, room]."""
        return gathered(self.head(hidden), self.vocabulary, None if own else self.exchange)

    def names(self) -> dict[str, Stored]:
        """Our parameters -> the checkpoint's tensors, without their prefix. Ask before `prepare`."""
        return expand(self, {**NAMES, **expert_names("layers.*.experts", "layers.*.feed_forward.experts", self.count)})

    @property
    def ignored(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not needed."""
        return (r"lm_head\.weight",) if self.tied else ()

    def prepare(self, max_len: int | None = None, deterministic: bool = False) -> None:
        """After loading, once: choose kernels, pack weights. `deterministic`: see quire.data.layers.prepare."""
        prepare_layers(self, deterministic)
