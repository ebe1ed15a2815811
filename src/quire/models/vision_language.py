"""Models whose text has pictures' rows in place of tokens' embeddings: LLaVA-OneVision, InternVL, Phi-3-Vision and
PaliGemma. Eyes, and a text model that knows nothing of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
    """The model, its weights uninitialised: fill them (quire.weights), then `prepare`, then `forward`. `vision_encoder`
    is an Encoder (quire.models.vision), which whoever runs the model asks before it."""

    @staticmethod
    def spec(config: dict[str, Any]) -> ModelSpec:
        """What a memory needs to know. StartupError for a config that isn't supported."""
        return VisionLanguageSettings.from_config(config).spec()

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        s = VisionLanguageSettings.from_config(config).for_shard(shard)
        self.text = (Gemma if isinstance(s.text, GemmaSettings) else Llama)(s.text_config, dtype, device, shard)
        self.vision_encoder = (
            build_encoder(s.vision, dtype, device) if shard.is_first_stage else None
        )  # with the embedding
        self.weight_prefixes = (
            *TEXT_PREFIXES,
            *(self.vision_encoder.weight_prefixes if self.vision_encoder is not None else ()),
            *self.text.weight_prefixes,
        )

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [T] int64 -> hidden [T, hidden] (of the context's wanted tokens), after the final norm."""
        return self.finish(*self.embed(tokens, ctx), ctx)

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Up to the last attention, itself included: x [T, hidden], and what it gives."""
        return self.text.run_layers(ctx.merge_image_embeddings(self.text.embed_tokens(tokens)), ctx)

    def run_layers(self, x: Tensor, ctx: ForwardContext, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same from what the stage before gives, of this one's layers."""
        return self.text.run_layers(x, ctx, delta)

    def finish(self, x: Tensor, attended: Tensor, ctx: ForwardContext) -> Tensor:
        """`finish_selected`, of the context's wanted tokens."""
        return self.text.finish(x, attended, ctx)

    def finish_selected(self, x: Tensor, attended: Tensor) -> Tensor:
        """Behind the last attention, of the tokens whose x and attention these are: hidden [T, hidden]."""
        return self.text.finish_selected(x, attended)

    def logits(self, hidden: Tensor, local: bool = False) -> Tensor:
        """hidden [R, hidden] -> logits [R, vocab_size], in the model's dtype; with `local` this rank's, [R, room]."""
        return self.text.logits(hidden, local)

    def weight_sources(self) -> dict[str, WeightSource]:
        """Our parameters -> the checkpoint's tensors, without their prefix. Ask before `prepare`."""
        parts = (
            {"text": self.text}
            if self.vision_encoder is None
            else {"text": self.text, "vision_encoder": self.vision_encoder}
        )
        return {f"{part}.{name}": stored for part, of in parts.items() for name, stored in of.weight_sources().items()}

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not needed."""
        return (
            self.text.ignored_weights
            if self.vision_encoder is None
            else (*self.text.ignored_weights, *self.vision_encoder.ignored_weights)
        )

    def prepare(self, max_len: int | None = None, deterministic: bool = False) -> None:
        """After loading, once, as a text model."""
        self.text.prepare(max_len, deterministic)
        if self.vision_encoder is not None:
            self.vision_encoder.prepare(deterministic)
