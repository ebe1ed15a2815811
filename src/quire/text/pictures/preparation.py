"""From an RGB picture to tiles of bytes, one function a way of cutting: what transformers' image processors do before
they normalise. A model's tiling says where; here is how. Pillow is imported when a picture comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quire.errors import StartupError, shown
from quire.vocabulary.pictures import (
    AnyResolution,
    Closest,
    Fitted,
    Grid,
    HighDefinition,
    Picture,
    Single,
    Tiling,
)

if TYPE_CHECKING:
    from PIL.Image import Image

Bytes = npt.NDArray[np.uint8]
Colour = tuple[int, int, int]
NEAREST, LANCZOS, BILINEAR, BICUBIC, BOX, HAMMING = range(6)
"""Pillow's numbers of its filters, which preprocessor_config.json has too."""
USUAL = {AnyResolution: BICUBIC, Closest: BICUBIC, Fitted: BILINEAR, HighDefinition: BILINEAR, Single: BICUBIC}
BAND = 1 << 20  # pixels that are padded at a time
WHITE, BLACK = (255, 255, 255), (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Preparation:
    """How one model's pictures are prepared. `resample` is one of Pillow's filters; `background` is what pictures are
    padded with to a square."""

    tiling: Tiling
    resample: int
    background: Colour

    def prepare(self, image: Image, alone: bool = True) -> Picture:
        """`image` in mode RGB, at least 1 x 1. `alone`: it is its prompt's only one, which some models show in more
        tiles. The tiles are a function of its pixels and of `alone`."""
        assert image.mode == "RGB", f"a picture in mode {image.mode}"
        grid = self.tiling.grid(image.height, image.width, alone)
        return Picture(CUTTERS[type(self.tiling)](self, image, grid), grid)

    def resized(self, image: Image, height: int, width: int) -> Image:
        from PIL.Image import Resampling

        return image.resize((width, height), resample=Resampling(self.resample))


def read_preparation(said: dict[str, Any], tiling: Tiling, mean: tuple[float, float, float]) -> Preparation:
    """From preprocessor_config.json, whose sizes and numbers are in `tiling` and in `mean` already. StartupError for
    steps that quire doesn't do, or leave out, and for filters that there aren't."""
    wanted = {"do_resize": True, "do_convert_rgb": True}
    if not isinstance(tiling, Closest):  # published InternVL's says that it crops, and its code doesn't
        wanted["do_center_crop"] = False
    for name, only in wanted.items():
        if said.get(name) not in (None, only):
            cause = f"{name} of preprocessor_config.json is {shown(said[name])}"
            raise StartupError(cause, f"Only {str(only).lower()} is supported")
    resample = said.get("resample")
    resample = USUAL[type(tiling)] if resample is None else resample
    if type(resample) is not int or not NEAREST <= resample <= HAMMING:
        raise StartupError(f"resample of preprocessor_config.json is {shown(resample)}", "It must be from 0 to 5")
    red, green, blue = (min(max(int(part * 255), 0), 255) for part in mean)
    return Preparation(tiling, resample, (red, green, blue))


def single(how: Preparation, image: Image, grid: Grid) -> Bytes:
    """PaliGemma: the picture, stretched to a tile."""
    tile = how.tiling.tile
    return tiles(how.resized(image, tile, tile), tile)


def closest(how: Preparation, image: Image, grid: Grid) -> Bytes:
    """InternVL: stretched to its grid; and to a tile, last, if that is more than one."""
    assert isinstance(how.tiling, Closest), "a grid of the closest shape"
    tile = how.tiling.tile
    cut = tiles(how.resized(image, grid.rows * tile, grid.columns * tile), tile)
    if how.tiling.parts(grid) == len(cut):
        return cut
    return np.concatenate((cut, tiles(how.resized(image, tile, tile), tile)))


def fitted(how: Preparation, image: Image, grid: Grid) -> Bytes:
    """Llama 3.2 Vision: in the upper left corner of its canvas, the rest black."""
    assert isinstance(how.tiling, Fitted), "a canvas that it fits into"
    tile = how.tiling.tile
    inner = how.resized(image, *how.tiling.inner(grid))
    return tiles(framed(inner, grid.rows * tile, grid.columns * tile, 0, 0, BLACK), tile)


def high_definition(how: Preparation, image: Image, grid: Grid) -> Bytes:
    """Phi-3-Vision: as wide as its grid, white above and below; a picture that is higher than wide lies on its side
    meanwhile. The encoder makes the whole picture's tile."""
    from PIL.Image import Transpose

    assert isinstance(how.tiling, HighDefinition), "a grid of high definition"
    tile, upright = how.tiling.tile, image.width < image.height
    high, wide = how.tiling.inner(image.height, image.width)
    lying = how.resized(image.transpose(Transpose.TRANSPOSE) if upright else image, high, wide)
    total = -(-high // tile) * tile
    padded = framed(lying, total, wide, (total - high) // 2, 0, WHITE)
    return tiles(padded.transpose(Transpose.TRANSPOSE) if upright else padded, tile)


def any_resolution(how: Preparation, image: Image, grid: Grid) -> Bytes:
    """LLaVA-OneVision: the whole picture, stretched to a tile, then the tiles of the picture in the middle of its grid.
    One of several pictures: in the middle of a square, which is shrunk to a tile."""
    assert isinstance(how.tiling, AnyResolution), "tiles of any resolution"
    tile = how.tiling.tile
    if not grid.rows:
        return tiles(squared(how, image), tile)
    high, wide = how.tiling.inner(grid)
    total = grid.rows * tile, grid.columns * tile
    inner = framed(how.resized(image, high, wide), *total, (total[0] - high) // 2, (total[1] - wide) // 2, BLACK)
    return np.concatenate((tiles(how.resized(image, tile, tile), tile), tiles(inner, tile)))


CUTTERS: dict[type[Tiling], Callable[[Preparation, Image, Grid], Bytes]] = {
    Single: single,
    Closest: closest,
    Fitted: fitted,
    HighDefinition: high_definition,
    AnyResolution: any_resolution,
}


def framed(image: Image, height: int, width: int, top: int, left: int, colour: Colour) -> Image:
    """The picture on a canvas of this size and colour."""
    behind = canvas(height, width, colour)
    behind.paste(image, (left, top))
    return behind


def canvas(height: int, width: int, colour: Colour) -> Image:
    from PIL import Image as pillow

    return pillow.new("RGB", (width, height), colour)


def squared(how: Preparation, image: Image) -> Image:
    """The picture in the middle of a square as wide as its longer side, resized to a tile. The square of a long strip
    is never there as a whole: as Pillow does too, columns are resized first, a band of lines at a time."""
    tile, side, (width, height) = how.tiling.tile, max(image.size), image.size
    narrow = canvas(side, tile, how.background)
    for top in range(0, height, step := max(BAND // side, 1)):
        lines = min(step, height - top)
        band = image.crop((0, top, width, top + lines))
        band = framed(band, lines, side, 0, (side - width) // 2, how.background)
        narrow.paste(how.resized(band, lines, tile), (0, (side - height) // 2 + top))
    return how.resized(narrow, tile, tile)


def tiles(image: Image, tile: int) -> Bytes:
    """A picture of whole tiles -> [tiles, tile, tile, 3], line by line."""
    pixels = np.asarray(image, dtype=np.uint8)
    rows, columns = pixels.shape[0] // tile, pixels.shape[1] // tile
    cut = np.empty((rows, columns, tile, tile, 3), np.uint8)
    cut[:] = pixels.reshape(rows, tile, columns, tile, 3).transpose(0, 2, 1, 3, 4)
    return cut.reshape(rows * columns, tile, tile, 3)
