"""Models' eyes: towers that turn tiles of pixels into features, and connectors that turn those into the rows that stand
for a picture. Torch is imported only when an encoder is built.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from quire.data.models.vision.settings import VisionSettings
from quire.vocabulary.pictures import Grid, Picture, Tiling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.data.models.names import Stored

__all__ = ["Encoder", "Grid", "Picture", "Tiling", "VisionSettings", "build_encoder", "rows_of"]

ENCODERS = {
    "llava": "llava:LlavaOneVision",
    "internvl": "internvl:InternVL",
    "phi3": "phi3:Phi3Vision",
    "paligemma": "paligemma:PaliGemma",
    "mllama": "mllama:MllamaVision",
}


class Encoder(Protocol):
    """From pixels to rows, in three calls: `open`, `encode` of all parts in any shares, `join`. Its weights are filled
    as a model's are: by `names`, without `prefixes`, less what is `ignored`; then `prepare`.

    A share may be any parts, of many pictures too: what a part is encoded to depends on no other. But where an encoder
    is `whole`, a picture is one part, all of its tiles, and a share is one picture.
    """

    tiling: Tiling
    whole: bool
    prefixes: tuple[str, ...]

    def open(self, pixels: Tensor, grid: Grid) -> Tensor:
        """A picture's pixels [tiles, side, side, 3] uint8 -> [parts, 3, side, side], or [1, tiles, 3, side, side] where
        `whole`: normalised, in the model's dtype."""
        ...

    def encode(self, pixels: Tensor, grid: Grid | None = None) -> Tensor:
        """Parts [n, ...], as opened -> features [n, tokens, width]. `grid`: of the picture, where `whole`."""
        ...

    def join(self, features: Tensor, grid: Grid) -> Tensor:
        """Features of all parts of a picture, in order -> its rows [tiling.rows(grid), hidden]."""
        ...

    def names(self) -> dict[str, Stored]:
        """Our parameters -> the checkpoint's tensors, without their prefix. Ask before `prepare`."""
        ...

    @property
    def ignored(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not needed."""
        ...

    def prepare(self, deterministic: bool = False) -> None:
        """After loading, once."""
        ...


def build_encoder(settings: VisionSettings, dtype: torch.dtype, device: torch.device) -> Any:
    """The Encoder (a torch module, its weights uninitialised) of these settings."""
    module, _, name = ENCODERS[settings.kind].partition(":")
    return getattr(import_module(f"quire.data.models.vision.{module}"), name)(settings, dtype, device)


def rows_of(encoder: Encoder, pixels: Tensor, grid: Grid, at_once: int) -> Tensor:
    """The rows of a picture [rows, hidden], at most `at_once` of its parts encoded at a time."""
    import torch

    shares = encoder.open(pixels, grid).split(at_once)
    return encoder.join(torch.cat([encoder.encode(share, grid) for share in shares]), grid)
