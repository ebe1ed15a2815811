"""Vision encoders: towers that turn tiles of pixels into features, and connectors that turn features into the rows of
an image. Torch is imported only when an encoder is built.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from quire.models.vision.settings import VisionSettings
from quire.protocol.image_tiling import ImageTiling, PreparedImage, TileGrid

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.models.weight_names import WeightSource

__all__ = ["Encoder", "ImageTiling", "PreparedImage", "TileGrid", "VisionSettings", "build_encoder", "encode_image"]

ENCODERS = {
    "llava": "llava:LlavaOneVision",
    "internvl": "internvl:InternVL",
    "phi3": "phi3:Phi3Vision",
    "paligemma": "paligemma:PaliGemma",
    "mllama": "mllama:MllamaVision",
}


class Encoder(Protocol):
    """From pixels to rows in three calls: `preprocess`, `encode` of all parts in any batches, `assemble`. Its weights
    are loaded as a model's: `weight_sources`, `weight_prefixes` and `ignored_weights`, then `prepare`.

    A batch may have any parts, also of several images: a part's features don't depend on other parts. But if
    `encodes_whole_image`, an image is one part of all its tiles, and a batch is one image.
    """

    tiling: ImageTiling
    encodes_whole_image: bool
    weight_prefixes: tuple[str, ...]

    def preprocess(self, pixels: Tensor, grid: TileGrid) -> Tensor:
        """Normalise an image's pixels [tiles, side, side, 3] uint8: return [parts, 3, side, side], or if
        `encodes_whole_image` [1, tiles, 3, side, side], in the model's dtype."""
        ...

    def encode(self, pixels: Tensor, grid: TileGrid | None = None) -> Tensor:
        """Return features [n, tokens, width] of preprocessed parts [n, ...]. `grid` is the image's; it is needed only
        if `encodes_whole_image`."""
        ...

    def assemble(self, features: Tensor, grid: TileGrid) -> Tensor:
        """Return an image's rows [tiling.rows(grid), hidden] from the features of all its parts, in order."""
        ...

    def weight_sources(self) -> dict[str, WeightSource]:
        """Map parameter names to the checkpoint's tensors, without prefix. Call before `prepare`."""
        ...

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not loaded."""
        ...

    def prepare(self, deterministic: bool = False) -> None:
        """Choose kernels and pack weights. Call once, after loading."""
        ...


def build_encoder(settings: VisionSettings, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the Encoder for `settings`, a torch module with uninitialised weights."""
    module, _, name = ENCODERS[settings.kind].partition(":")
    return getattr(import_module(f"quire.models.vision.{module}"), name)(settings, dtype, device)


def encode_image(encoder: Encoder, pixels: Tensor, grid: TileGrid, at_once: int) -> Tensor:
    """Return the rows [rows, hidden] of an image, encoding at most `at_once` of its parts at a time."""
    import torch

    batches = torch.split(encoder.preprocess(pixels, grid), at_once)
    return encoder.assemble(torch.cat([encoder.encode(batch, grid) for batch in batches]), grid)
