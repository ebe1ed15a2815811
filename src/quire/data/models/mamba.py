"""Mamba (Gu and Dao, 2023), and FalconMamba, which normalises what the scan is given: a norm and a mixer a layer, and
no attention. Sums are in the model's dtype, also where a checkpoint says `residual_in_fp32`.

The model knows tokens and an Attending; it knows no batch, no cache, no sampling.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.data.layers.cut import vocabulary
from quire.data.layers.embedding import Embedding
from quire.data.layers.exchange import Exchange, gathered
from quire.data.layers.linear import Linear
from quire.data.layers.mamba import Mamba as Mixer
from quire.data.layers.mamba import Widths
from quire.data.layers.norm import RMSNorm
from quire.data.layers.prepare import prepare_layers
from quire.data.layers.stages import stacked
from quire.data.models.attending import Attending
from quire.data.models.mamba_settings import MambaSettings, MixerSettings
from quire.data.models.names import Stored, expand, mixer_names
from quire.vocabulary.layout import WHOLE, Part
from quire.vocabulary.specs import ModelSpec

NAMES: dict[str, str | tuple[str, ...]] = {
    "embed.weight": "embeddings.weight",
    "layers.*.norm.weight": "layers.*.norm.weight",
    **mixer_names("layers.*.mixer", "layers.*.mixer"),
    "norm.weight": "norm_f.weight",
    "head.weight": "lm_head.weight",
}


def mixer_of(settings: MixerSettings, dtype: torch.dtype, device: torch.device, part: Part = WHOLE) -> Mixer:
    """A layer's mixer, or a rank's part of it."""
    s, eps = settings, None if settings.norms == "none" else settings.norm_eps
    mixer = Mixer(Widths(*s.widths), "silu", s.bias, s.conv_bias, eps, dtype, device, part)
    for norm in mixer.norms if s.norms == "plain" else ():
        norm.weight = None  # `prepare` fills in ones
    return mixer


class Block(nn.Module):
    """x += delta, then x and what is to be added to it next, mixer(norm(x))."""

    def __init__(
        self, settings: MambaSettings, layer: int, dtype: torch.dtype, device: torch.device, part: Part = WHOLE
    ) -> None:
        super().__init__()
        self.layer = layer
        self.norm = RMSNorm(settings.hidden, settings.norm_eps, dtype, device)
        self.mixer = mixer_of(settings.mixer, dtype, device, part)

    def forward(self, x: Tensor, delta: Tensor | None, ctx: Attending) -> tuple[Tensor, Tensor]:
        return x, self.mixer.out(self.mix(x, delta, ctx))

    def mix(self, x: Tensor, delta: Tensor | None, ctx: Attending) -> Tensor:
        """Up to what the mixer's output projection is given."""
        return self.mixer.mix(self.norm(x, delta), *ctx.state(self.layer))


class Mamba(nn.Module):
    """The model, its weights uninitialised: fill them (quire.data.weights), then `prepare`, then `forward`."""

    prefixes: ClassVar[tuple[str, ...]] = ("backbone.",)
    ignored: tuple[str, ...]

    @staticmethod
    def spec(config: dict[str, Any]) -> ModelSpec:
        """What a memory needs to know. StartupError for a config that isn't supported."""
        return MambaSettings.read(config).spec()

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, part: Part = WHOLE) -> None:
        super().__init__()
        s = MambaSettings.read(config)
        s.of(part)  # refuses what can't be
        self.exchange: Exchange | None = None
        self.vocabulary = rows = vocabulary(part, s.vocab_size)
        self.ignored = (r"lm_head\.weight",) if s.tied else ()  # a checkpoint may hold it, and it isn't needed
        self.embed = Embedding(rows, s.hidden, dtype, device) if part.embeds(s.tied) else None
        self.layers = stacked(part, s.layers, lambda layer: Block(s, layer, dtype, device, part))
        self.norm = RMSNorm(s.hidden, s.norm_eps, dtype, device)
        tied = self.embed.weight if s.tied and self.embed is not None else None
        self.head = Linear(s.hidden, rows, False, dtype, device, tied) if part.projects(s.tied) else None

    def forward(self, tokens: Tensor, ctx: Attending) -> Tensor:
        """tokens [T] int64 -> hidden [T, hidden] (of the context's wanted tokens), after the final norm."""
        return self.behind(*self.begin(tokens, ctx), ctx)

    def begin(self, tokens: Tensor, ctx: Attending) -> tuple[Tensor, Tensor]:
        """Up to the last layer's state, which all tokens advance: x [T, hidden], and what it gives them."""
        return self.through(self.embed(tokens), ctx)

    def through(self, x: Tensor, ctx: Attending, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same from embeddings on, which are used up; or from what the stage before gives, of this one's layers."""
        *layers, last = self.layers
        for layer in layers:
            x, delta = layer(x, delta, ctx)
        return x, last.mix(x, delta, ctx)

    def behind(self, x: Tensor, mixed: Tensor, ctx: Attending) -> Tensor:
        """`end`, of the context's wanted tokens."""
        return self.end(ctx.wanted(x), ctx.wanted(mixed))

    def end(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Behind the last state, of the tokens whose x these are, and what it gave: hidden [T, hidden]."""
        return self.norm(x, self.layers[-1].mixer.out(mixed))

    def logits(self, hidden: Tensor, own: bool = False) -> Tensor:
        """hidden [R, hidden] -> logits [R, vocab_size], in the model's dtype; with `own` this rank's, [R, room]."""
        return gathered(self.head(hidden), self.vocabulary, None if own else self.exchange)

    def names(self) -> dict[str, Stored]:
        """Our parameters -> the checkpoint's tensors, without their prefix. Ask before `prepare`."""
        return expand(self, NAMES)

    def prepare(self, max_len: int | None = None, deterministic: bool = False) -> None:
        """After loading, once: choose kernels, pack weights. `deterministic`: see quire.data.layers.prepare."""
        prepare_layers(self, deterministic)
