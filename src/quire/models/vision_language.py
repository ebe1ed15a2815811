"""Models that put image rows in place of token embeddings: a vision encoder, and a decoder independent of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.models.decoder import Decoder
from quire.models.forward_context import ForwardContext
from quire.models.per_layer_inputs import PerLayerInputDecoder
from quire.models.vision import build_encoder
from quire.protocol.parallel_layout import UNSHARDED, Shard

TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.")


class VisionLanguageModel(Decoder):
    """See Decoder. The caller runs `vision_encoder` before. It is None, and the model is a text model alone, if the
    config has no encoder of images."""

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__(config, dtype, device, shard)
        vision = self.config.vision if self.uses_images(shard) else None
        self.vision_encoder = None if vision is None else build_encoder(vision, dtype, device)
        vision_prefixes = () if self.vision_encoder is None else self.vision_encoder.weight_prefixes
        self.weight_prefixes = (*TEXT_PREFIXES, *vision_prefixes, *self.config.weight_prefixes)

    def uses_images(self, shard: Shard) -> bool:
        """Return True if the layers of the shard's stage need images."""
        return shard.is_first_stage

    def embed_inputs(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """See Decoder."""
        return ctx.merge_image_embeddings(super().embed_inputs(tokens, ctx))

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """See Decoder."""
        vision = () if self.vision_encoder is None else self.vision_encoder.ignored_weights
        return (*super().ignored_weights, *vision)


class PerLayerInputVisionLanguageModel(VisionLanguageModel, PerLayerInputDecoder):
    """A VisionLanguageModel each of whose layers may have an input of its own for a token (Gemma-4)."""
