"""Models that put image rows in place of token embeddings: LLaVA-OneVision, InternVL, Phi-3-Vision and PaliGemma. A
vision encoder, and a text model that is independent of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quire.layers.prepare import MappedWeights
from quire.models.forward_context import ForwardContext
from quire.models.gemma import Gemma
from quire.models.gemma_settings import GemmaSettings
from quire.models.llama import Llama
from quire.models.vision import build_encoder
from quire.models.vision_language_settings import VisionLanguageSettings
from quire.models.weight_names import WeightSource
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import UNSHARDED, Shard

TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.")


class VisionLanguageModel(nn.Module):
    """The model, with uninitialised weights: load them (quire.weights), call `prepare`, then `forward`. The caller runs
    `vision_encoder`, an Encoder (quire.models.vision), before."""

    @staticmethod
    def spec(config: dict[str, Any]) -> ModelSpec:
        """Return the ModelSpec of a config.json. Raise StartupError if it is not supported."""
        return VisionLanguageSettings.from_config(config).spec()

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        s = VisionLanguageSettings.from_config(config).for_shard(shard)
        self.text = (Gemma if isinstance(s.text, GemmaSettings) else Llama)(s.text_config, dtype, device, shard)
        self.vision_encoder = build_encoder(s.vision, dtype, device) if shard.is_first_stage else None
        vision_prefixes = () if self.vision_encoder is None else self.vision_encoder.weight_prefixes
        self.weight_prefixes: tuple[str, ...] = (*TEXT_PREFIXES, *vision_prefixes, *self.text.weight_prefixes)

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """Run tokens [T] int64: return hidden states [R, hidden] of those that `ctx` selects, after the final norm."""
        return self.finish(*self.embed(tokens, ctx), ctx)

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Run the model up to the last attention: return x [T, hidden] and the attention's output."""
        assert self.text.embed_tokens is not None, "only the first stage embeds"
        return self.text.run_layers(ctx.merge_image_embeddings(self.text.embed_tokens(tokens)), ctx)

    def run_layers(self, x: Tensor, ctx: ForwardContext, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `embed`, from the previous stage's x and delta. x is overwritten."""
        return self.text.run_layers(x, ctx, delta)

    def finish(self, x: Tensor, attended: Tensor, ctx: ForwardContext) -> Tensor:
        """Call `finish_selected` for the tokens that `ctx` selects."""
        return self.text.finish(x, attended, ctx)

    def finish_selected(self, x: Tensor, attended: Tensor) -> Tensor:
        """Run what follows the last attention, for the selected tokens: return hidden states [R, hidden]."""
        return self.text.finish_selected(x, attended)

    def logits(self, hidden: Tensor, local: bool = False) -> Tensor:
        """Return the logits [R, vocab_size] of hidden [R, hidden], in the model's dtype; if `local`, this rank's
        columns, padding included."""
        return self.text.logits(hidden, local)

    def weight_sources(self) -> dict[str, WeightSource]:
        """Map parameter names to the checkpoint's tensors, without prefix. Call before `prepare`."""
        parts = {"text": self.text}
        if self.vision_encoder is not None:
            parts["vision_encoder"] = self.vision_encoder
        return {
            f"{part}.{name}": source
            for part, module in parts.items()
            for name, source in module.weight_sources().items()
        }

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not loaded."""
        vision = () if self.vision_encoder is None else self.vision_encoder.ignored_weights
        return (*self.text.ignored_weights, *vision)

    def prepare(
        self, max_len: int | None = None, deterministic: bool = False, mapped_files: Sequence[MappedWeights] = ()
    ) -> None:
        """Prepare the text model and the vision encoder. Call once, after loading."""
        self.text.prepare(max_len, deterministic, mapped_files)
        if self.vision_encoder is not None:
            self.vision_encoder.prepare(deterministic)
