"""Vision encoders: towers that turn tiles of pixels into features, and connectors that turn features into the rows of
an image. Torch is imported only when an encoder is built.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from quire.models.vision.settings import VisionSettings
from quire.protocol.image_tiling import ImageTiling, PreparedImage, TileGrid

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.models.vision.encoder import VisionEncoder

__all__ = ["ImageTiling", "PreparedImage", "TileGrid", "VisionSettings", "build_encoder", "encode_image"]

ENCODERS = {
    "llava": "llava:LlavaOneVision",
    "internvl": "internvl:InternVL",
    "phi3": "phi3:Phi3Vision",
    "paligemma": "paligemma:PaliGemma",
    "gemma3": "gemma3:Gemma3Vision",
    "gemma4": "gemma4:Gemma4Vision",
    "mllama": "mllama:MllamaVision",
}


def build_encoder(settings: VisionSettings, dtype: torch.dtype, device: torch.device) -> VisionEncoder:
    """Return the encoder for `settings`, with uninitialised weights."""
    module, _, name = ENCODERS[settings.kind].partition(":")
    encoder: VisionEncoder = getattr(import_module(f"quire.models.vision.{module}"), name)(settings, dtype, device)
    return encoder


def encode_image(encoder: VisionEncoder, pixels: Tensor, grid: TileGrid, at_once: int) -> Tensor:
    """Return the rows [rows, hidden] of an image, encoding at most `at_once` of its parts at a time."""
    import torch

    batches = torch.split(encoder.preprocess(pixels, grid), at_once)
    return encoder.assemble(torch.cat([encoder.encode(batch, grid) for batch in batches]), grid)
