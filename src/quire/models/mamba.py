"""Mamba (Gu and Dao, 2023) and FalconMamba, which normalises dt, B and C: a norm and a mixer per layer, no attention.
Residual sums are in the model's dtype, even if a checkpoint has `residual_in_fp32`.

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
from quire.layers.mamba import MambaDims
from quire.layers.mamba import MambaMixer as Mixer
from quire.layers.norm import RMSNorm
from quire.layers.pipeline import make_layers
from quire.layers.prepare import MappedWeights, prepare_layers
from quire.layers.sharding import shard_vocab
from quire.models.forward_context import ForwardContext
from quire.models.mamba_settings import MambaSettings, MixerSettings
from quire.models.weight_names import WeightSource, expand_weight_names, mixer_weight_names
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import UNSHARDED, Shard

WEIGHT_NAMES: dict[str, str | tuple[str, ...]] = {
    "embed_tokens.weight": "embeddings.weight",
    "layers.*.norm.weight": "layers.*.norm.weight",
    **mixer_weight_names("layers.*.mixer", "layers.*.mixer"),
    "norm.weight": "norm_f.weight",
    "head.weight": "lm_head.weight",
}


def make_mixer(settings: MixerSettings, dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED) -> Mixer:
    """Return a layer's mixer, or a rank's part of it."""
    s, eps = settings, None if settings.norms == "none" else settings.norm_eps
    mixer = Mixer(MambaDims(*s.dims), "silu", s.bias, s.conv_bias, eps, dtype, device, shard)
    for norm in mixer.norms if s.norms == "plain" else ():
        norm.register_parameter("weight", None)  # it is not loaded; `prepare` makes it of ones
    return mixer


class MambaDecoderLayer(nn.Module):
    """x += delta; returns x and the next residual, mixer(norm(x))."""

    def __init__(
        self, settings: MambaSettings, layer: int, dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        self.layer = layer
        self.norm = RMSNorm(settings.hidden, settings.norm_eps, dtype, device)
        self.mixer = make_mixer(settings.mixer, dtype, device, shard)

    def forward(self, x: Tensor, delta: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        return x, self.mixer.out(self.mix(x, delta, ctx))

    def mix(self, x: Tensor, delta: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Run the layer up to the mixer: return its output, before the projection `out`."""
        return self.mixer.mix(self.norm(x, delta), *ctx.state(self.layer))


class Mamba(nn.Module):
    """The model, with uninitialised weights: load them (quire.weights), call `prepare`, then `forward`."""

    weight_prefixes: ClassVar[tuple[str, ...]] = ("backbone.",)
    ignored_weights: tuple[str, ...]

    @staticmethod
    def spec(config: dict[str, Any]) -> ModelSpec:
        """Return the ModelSpec of a config.json. Raise StartupError if it is not supported."""
        return MambaSettings.from_config(config).spec()

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        s = MambaSettings.from_config(config)
        s.for_shard(shard)  # raises StartupError if the model can't be divided so
        self.exchange: Exchange | None = None
        self.vocab_shard = rows = shard_vocab(shard, s.vocab_size)
        self.ignored_weights = (r"lm_head\.weight",) if s.tied else ()  # a checkpoint may hold it
        self.embed_tokens = Embedding(rows, s.hidden, dtype, device) if shard.has_embedding(s.tied) else None
        self.layers = make_layers(shard, s.layers, lambda layer: MambaDecoderLayer(s, layer, dtype, device, shard))
        self.norm = RMSNorm(s.hidden, s.norm_eps, dtype, device)
        tied = self.embed_tokens.weight if s.tied and self.embed_tokens is not None else None
        self.head = Linear(s.hidden, rows, False, dtype, device, tied) if shard.has_lm_head(s.tied) else None

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """Run tokens [T] int64: return hidden states [R, hidden] of those that `ctx` selects, after the final norm."""
        return self.finish(*self.embed(tokens, ctx), ctx)

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Run the model up to the last layer's mixer: return x [T, hidden] and the mixer's output, of all tokens, since
        all of them advance its state."""
        assert self.embed_tokens is not None, "only the first stage embeds"
        return self.run_layers(self.embed_tokens(tokens), ctx)

    def run_layers(self, x: Tensor, ctx: ForwardContext, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `embed`, from embeddings `x`, or from the previous stage's x and delta. x is overwritten."""
        *layers, last = self.layers
        for layer in layers:
            x, delta = layer(x, delta, ctx)
        return x, last.mix(x, delta, ctx)

    def finish(self, x: Tensor, mixed: Tensor, ctx: ForwardContext) -> Tensor:
        """Call `finish_selected` for the tokens that `ctx` selects."""
        return self.finish_selected(ctx.select_logits_rows(x), ctx.select_logits_rows(mixed))

    def finish_selected(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Run what follows the last mixer, for the selected tokens: return hidden states [R, hidden]."""
        return self.norm(x, self.layers[-1].mixer.out(mixed))

    def logits(self, hidden: Tensor, local: bool = False) -> Tensor:
        """Return the logits [R, vocab_size] of hidden [R, hidden], in the model's dtype; if `local`, this rank's
        columns, padding included."""
        assert self.head is not None, "only the last stage has logits"
        return gather_logits(self.head(hidden), self.vocab_shard, None if local else self.exchange)

    def weight_sources(self) -> dict[str, WeightSource]:
        """Map parameter names to the checkpoint's tensors, without prefix. Call before `prepare`."""
        return expand_weight_names(self, WEIGHT_NAMES)

    def prepare(
        self, max_len: int | None = None, deterministic: bool = False, mapped_files: Sequence[MappedWeights] = ()
    ) -> None:
        """Choose kernels and pack weights. Call once, after loading. `deterministic`, `mapped_files`: see
        quire.layers.prepare."""
        prepare_layers(self, deterministic, mapped_files)
