"""Models' eyes: towers that turn tiles of pixels into features, and connectors that turn those into the rows that stand
for a picture. Torch is imported only when an encoder is built.
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
    """From pixels to rows, in three calls: `preprocess`, `encode` of all parts in any shares, `assemble`. Its weights
    are filled as a model's are: by `weight_sources`, without `weight_prefixes`, less what is `ignored_weights`; then
    `prepare`.

    A share may be any parts, of many pictures too: what a part is encoded to depends on no other. But where an encoder
    is `encodes_whole_image`, a picture is one part, all of its tiles, and a share is one picture.
    """

    tiling: ImageTiling
    encodes_whole_image: bool
    weight_prefixes: tuple[str, ...]

    def preprocess(self, pixels: Tensor, grid: TileGrid) -> Tensor:
        """A picture's pixels [tiles, side, side, 3] uint8 -> [parts, 3, side, side], or [1, tiles, 3, side, side] where
        `encodes_whole_image`: normalised, in the model's dtype."""
        ...

    def encode(self, pixels: Tensor, grid: TileGrid | None = None) -> Tensor:
        """Parts [n, ...], as opened -> features [n, tokens, width]. `grid`: of the picture, where "
        "`encodes_whole_image`."""
        ...

    def assemble(self, features: Tensor, grid: TileGrid) -> Tensor:
        """Features of all parts of a picture, in order -> its rows [tiling.rows(grid), hidden]."""
        ...

    def weight_sources(self) -> dict[str, WeightSource]:
        """Our parameters -> the checkpoint's tensors, without their prefix. Ask before `prepare`."""
        ...

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not needed."""
        ...

    def prepare(self, deterministic: bool = False) -> None:
        """After loading, once."""
        ...


def build_encoder(settings: VisionSettings, dtype: torch.dtype, device: torch.device) -> Any:
    """The Encoder (a torch module, its weights uninitialised) of these settings."""
    module, _, name = ENCODERS[settings.kind].partition(":")
    return getattr(import_module(f"quire.models.vision.{module}"), name)(settings, dtype, device)


def encode_image(encoder: Encoder, pixels: Tensor, grid: TileGrid, at_once: int) -> Tensor:
    """The rows of a picture [rows, hidden], at most `at_once` of its parts encoded at a time."""
    import torch

    shares = encoder.preprocess(pixels, grid).split(at_once)
    return encoder.assemble(torch.cat([encoder.encode(share, grid) for share in shares]), grid)
