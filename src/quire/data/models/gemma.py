"""Gemma-2 (Riviere et al., 2024): norms before and behind attention and MLP, bounded scores and logits, a window in
every second layer; and the text of Gemma-3 (Kamath et al., 2025): normalised queries and keys instead of bounds, five
layers with a window to each without, and a rotary embedding of their own for these.

The model knows tokens and an Attending; it knows no batch, no cache, no sampling.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.data.layers.cut import columns, vocabulary
from quire.data.layers.embedding import Embedding
from quire.data.layers.exchange import Exchange, gathered
from quire.data.layers.linear import Linear
from quire.data.layers.mlp import GatedMLP
from quire.data.layers.norm import RMSNorm
from quire.data.layers.prepare import prepare_layers
from quire.data.layers.rotary import Rotary
from quire.data.layers.softcap import Softcap
from quire.data.layers.stages import stacked
from quire.data.models.attending import Attending
from quire.data.models.gemma_settings import GemmaSettings
from quire.data.models.llama import NAMES as LLAMA_NAMES
from quire.data.models.llama import Attention
from quire.data.models.names import Stored, expand
from quire.vocabulary.layout import WHOLE, Part
from quire.vocabulary.specs import ModelSpec

NAMES: dict[str, str | tuple[str, ...]] = {
    **LLAMA_NAMES,
    "layers.*.behind_attention.weight": "layers.*.post_attention_layernorm.weight",
    "layers.*.mlp_norm.weight": "layers.*.pre_feedforward_layernorm.weight",
    "layers.*.behind_mlp.weight": "layers.*.post_feedforward_layernorm.weight",
}


class Block(nn.Module):
    """x += behind(attention(norm(x))), then the same with the MLP, all of it in place. Each sum, and the norm that it
    goes through, is left to the norm that follows: that reads all of x anyway."""

    def __init__(
        self, settings: GemmaSettings, layer: int, dtype: torch.dtype, device: torch.device, part: Part
    ) -> None:
        super().__init__()
        s = settings
        norm = partial(RMSNorm, s.hidden, s.norm_eps, dtype, device, offset=True)
        self.attention_norm, self.behind_attention = norm(), norm()
        self.attention = Attention(s, layer, dtype, device, part=part)
        self.mlp_norm, self.behind_mlp = norm(), norm()
        self.mlp = GatedMLP(s.hidden, columns(part, s.intermediate), s.activation, False, dtype, device)

    def attend(
        self, x: Tensor, delta: Tensor | None, behind: RMSNorm | None, rotary: Rotary, ctx: Attending,
        last: bool = False,
    ) -> Tensor:  # fmt: skip
        """Up to the attention, itself included. `delta` and `behind` are what the block before leaves to be added."""
        return self.attention(self.attention_norm(x, delta, behind), rotary, ctx, last)

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """Behind it: what is to be added to x next, through `behind_mlp`."""
        return self.mlp(self.mlp_norm(x, self.attention.out(attended), self.behind_attention))


class Gemma(nn.Module):
    """The model, its weights uninitialised: fill them (quire.data.weights), then `prepare`, then `forward`."""

    prefixes: ClassVar[tuple[str, ...]] = (
        "model.language_model.",
        "language_model.model.",
        "language_model.",
        "model.",
    )

    @staticmethod
    def spec(config: dict[str, Any]) -> ModelSpec:
        """What a memory needs to know. StartupError for a config that isn't supported."""
        return GemmaSettings.read(config).spec()

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, part: Part = WHOLE) -> None:
        super().__init__()
        s = GemmaSettings.read(config)
        s.of(part)  # refuses what can't be
        self.tied = s.tied
        self.exchange: Exchange | None = None
        self.vocabulary = rows = vocabulary(part, s.vocab_size)
        embeds = part.embeds(s.tied)
        self.embed = Embedding(rows, s.hidden, dtype, device, scale=s.hidden**0.5) if embeds else None
        self.layers = stacked(part, len(s.windows), lambda layer: Block(s, layer, dtype, device, part))
        if not part.starts:  # what the layer before this stage's leaves to be added goes through its norm
            before = self.layers[part.layers(len(s.windows)).start - 1]
            before.behind_mlp = RMSNorm(s.hidden, s.norm_eps, dtype, device, offset=True)
        self.norm = RMSNorm(s.hidden, s.norm_eps, dtype, device, offset=True)
        tied = self.embed.weight if s.tied and self.embed is not None else None
        self.head = Linear(s.hidden, rows, False, dtype, device, tied) if part.projects(s.tied) else None
        self.softcap = None if s.final_softcap is None else Softcap(s.final_softcap, dtype, device)
        ropes = list(dict.fromkeys(s.ropes))
        self.rotary = nn.ModuleList(Rotary(rope, s.head_dim, s.max_len) for rope in ropes)
        self.turned_by = [ropes.index(rope) for rope in s.ropes]  # a layer's own of these

    def forward(self, tokens: Tensor, ctx: Attending) -> Tensor:
        """tokens [T] int64 -> hidden [T, hidden] (of the context's wanted tokens), after the final norm."""
        return self.behind(*self.begin(tokens, ctx), ctx)

    def begin(self, tokens: Tensor, ctx: Attending) -> tuple[Tensor, Tensor]:
        """Up to the last attention, itself included: x [T, hidden], and what it gives."""
        return self.through(self.embed(tokens), ctx)

    def through(self, x: Tensor, ctx: Attending, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same from embeddings on, which are used up; or from what the stage before gives, of this one's layers."""
        behind = None
        *layers, last = zip(self.layers, (self.rotary[which] for which in self.turned_by), strict=True)
        for layer, rotary in layers:
            delta = layer.rest(x, layer.attend(x, delta, behind, rotary, ctx))
            behind = layer.behind_mlp
        layer, rotary = last
        return x, layer.attend(x, delta, behind, rotary, ctx, last=True)

    def behind(self, x: Tensor, attended: Tensor, ctx: Attending) -> Tensor:
        """`end`, of the context's wanted tokens."""
        return self.end(ctx.wanted(x), attended)

    def end(self, x: Tensor, attended: Tensor) -> Tensor:
        """Behind the last attention, of the tokens whose x and attention these are: hidden [T, hidden]."""
        last = self.layers[-1]
        return self.norm(x, last.rest(x, attended), last.behind_mlp)

    def logits(self, hidden: Tensor, own: bool = False) -> Tensor:
        """hidden [R, hidden] -> logits [R, vocab_size], in the model's dtype; with `own` this rank's, [R, room]."""
        logits = self.head(hidden)
        if self.softcap is not None:
            logits = self.softcap(logits)
        return gathered(logits, self.vocabulary, None if own else self.exchange)

    def names(self) -> dict[str, Stored]:
        """Our parameters -> the checkpoint's tensors, without their prefix. Ask before `prepare`."""
        return expand(self, NAMES)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not needed: those that read pictures
        among them."""
        pictures = r"(vision_tower|multi_modal_projector)\..*"
        return (r"(.*\.)?rotary_emb\.inv_freq", pictures, *((r"lm_head\.weight",) if self.tied else ()))

    def prepare(self, max_len: int | None = None, deterministic: bool = False) -> None:
        """After loading, once: choose kernels, pack weights, build the rotary tables for positions below `max_len`.
        `deterministic`: see quire.data.layers.prepare."""
        for rotary in self.rotary:
            rotary.prepare(self.norm.weight.device, max_len)
        prepare_layers(self, deterministic)
