"""From an RGB picture to tiles of bytes, one function a way of cutting: what transformers' image processors do before
they normalise. A model's tiling says where; here is how. Pillow is imported when a picture comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quire.errors import StartupError, short_repr
from quire.protocol.image_tiling import (
    AnyResTiling,
    ClosestAspectTiling,
    FittedCanvasTiling,
    HDTiling,
    ImageTiling,
    PreparedImage,
    SingleTile,
    TileGrid,
)

if TYPE_CHECKING:
    from PIL.Image import Image

PixelArray = npt.NDArray[np.uint8]
Colour = tuple[int, int, int]
NEAREST, LANCZOS, BILINEAR, BICUBIC, BOX, HAMMING = range(6)
"""Pillow's numbers of its filters, which preprocessor_config.json has too."""
DEFAULT_RESAMPLE = {
    AnyResTiling: BICUBIC,
    ClosestAspectTiling: BICUBIC,
    FittedCanvasTiling: BILINEAR,
    HDTiling: BILINEAR,
    SingleTile: BICUBIC,
}
BAND_PIXELS = 1 << 20  # pixels that are padded at a time
WHITE, BLACK = (255, 255, 255), (0, 0, 0)


@dataclass(frozen=True, slots=True)
class ImagePreprocessor:
    """How one model's pictures are prepared. `resample` is one of Pillow's filters; `background` is what pictures are
    padded with to a square."""

    tiling: ImageTiling
    resample: int
    background: Colour

    def prepare(self, image: Image, only_image: bool = True) -> PreparedImage:
        """`image` in mode RGB, at least 1 x 1. `only_image`: it is its prompt's only one, which some models show in
        more tiles. The tiles are a function of its pixels and of `only_image`."""
        assert image.mode == "RGB", f"a picture in mode {image.mode}"
        grid = self.tiling.choose_grid(image.height, image.width, only_image)
        return PreparedImage(TILE_CUTTERS[type(self.tiling)](self, image, grid), grid)

    def resize(self, image: Image, height: int, width: int) -> Image:
        from PIL.Image import Resampling

        return image.resize((width, height), resample=Resampling(self.resample))


def read_image_preprocessor(
    config: dict[str, Any], tiling: ImageTiling, mean: tuple[float, float, float]
) -> ImagePreprocessor:
    """From preprocessor_config.json, whose sizes and numbers are in `tiling` and in `mean` already. StartupError for
    steps that quire doesn't do, or leave out, and for filters that there aren't."""
    wanted = {"do_resize": True, "do_convert_rgb": True}
    if not isinstance(tiling, ClosestAspectTiling):  # published InternVL's says that it crops, and its code doesn't
        wanted["do_center_crop"] = False
    for name, only in wanted.items():
        if config.get(name) not in (None, only):
            cause = f"{name} of preprocessor_config.json is {short_repr(config[name])}"
            raise StartupError(cause, f"Only {str(only).lower()} is supported")
    resample = config.get("resample")
    resample = DEFAULT_RESAMPLE[type(tiling)] if resample is None else resample
    if type(resample) is not int or not NEAREST <= resample <= HAMMING:
        raise StartupError(f"resample of preprocessor_config.json is {short_repr(resample)}", "It must be from 0 to 5")
    red, green, blue = (min(max(int(part * 255), 0), 255) for part in mean)
    return ImagePreprocessor(tiling, resample, (red, green, blue))


def cut_single(preprocessor: ImagePreprocessor, image: Image, grid: TileGrid) -> PixelArray:
    """PaliGemma: the picture, stretched to a tile."""
    tile = preprocessor.tiling.tile_size
    return split_tiles(preprocessor.resize(image, tile, tile), tile)


def cut_closest(preprocessor: ImagePreprocessor, image: Image, grid: TileGrid) -> PixelArray:
    """InternVL: stretched to its grid; and to a tile, last, if that is more than one."""
    assert isinstance(preprocessor.tiling, ClosestAspectTiling), "a grid of the closest shape"
    tile = preprocessor.tiling.tile_size
    cut = split_tiles(preprocessor.resize(image, grid.rows * tile, grid.columns * tile), tile)
    if preprocessor.tiling.num_parts(grid) == len(cut):
        return cut
    return np.concatenate((cut, split_tiles(preprocessor.resize(image, tile, tile), tile)))


def cut_fitted(preprocessor: ImagePreprocessor, image: Image, grid: TileGrid) -> PixelArray:
    """Llama 3.2 Vision: in the upper left corner of its canvas, the rest black."""
    assert isinstance(preprocessor.tiling, FittedCanvasTiling), "a canvas that it fits into"
    tile = preprocessor.tiling.tile_size
    inner = preprocessor.resize(image, *preprocessor.tiling.scaled_size(grid))
    return split_tiles(pad_to_canvas(inner, grid.rows * tile, grid.columns * tile, 0, 0, BLACK), tile)


def cut_high_definition(preprocessor: ImagePreprocessor, image: Image, grid: TileGrid) -> PixelArray:
    """Phi-3-Vision: as wide as its grid, white above and below; a picture that is higher than wide lies on its side
    meanwhile. The encoder makes the whole picture's tile."""
    from PIL.Image import Transpose

    assert isinstance(preprocessor.tiling, HDTiling), "a grid of high definition"
    tile, upright = preprocessor.tiling.tile_size, image.width < image.height
    high, wide = preprocessor.tiling.scaled_size(image.height, image.width)
    lying = preprocessor.resize(image.transpose(Transpose.TRANSPOSE) if upright else image, high, wide)
    total = -(-high // tile) * tile
    padded = pad_to_canvas(lying, total, wide, (total - high) // 2, 0, WHITE)
    return split_tiles(padded.transpose(Transpose.TRANSPOSE) if upright else padded, tile)


def cut_any_resolution(preprocessor: ImagePreprocessor, image: Image, grid: TileGrid) -> PixelArray:
    """LLaVA-OneVision: the whole picture, stretched to a tile, then the tiles of the picture in the middle of its grid.
    One of several pictures: in the middle of a square, which is shrunk to a tile."""
    assert isinstance(preprocessor.tiling, AnyResTiling), "tiles of any resolution"
    tile = preprocessor.tiling.tile_size
    if not grid.rows:
        return split_tiles(resize_in_square(preprocessor, image), tile)
    high, wide = preprocessor.tiling.scaled_size(grid)
    total = grid.rows * tile, grid.columns * tile
    inner = pad_to_canvas(
        preprocessor.resize(image, high, wide), *total, (total[0] - high) // 2, (total[1] - wide) // 2, BLACK
    )
    return np.concatenate((split_tiles(preprocessor.resize(image, tile, tile), tile), split_tiles(inner, tile)))


TILE_CUTTERS: dict[type[ImageTiling], Callable[[ImagePreprocessor, Image, TileGrid], PixelArray]] = {
    SingleTile: cut_single,
    ClosestAspectTiling: cut_closest,
    FittedCanvasTiling: cut_fitted,
    HDTiling: cut_high_definition,
    AnyResTiling: cut_any_resolution,
}


def pad_to_canvas(image: Image, height: int, width: int, top: int, left: int, colour: Colour) -> Image:
    """The picture on a canvas of this size and colour."""
    behind = new_canvas(height, width, colour)
    behind.paste(image, (left, top))
    return behind


def new_canvas(height: int, width: int, colour: Colour) -> Image:
    from PIL import Image as pillow

    return pillow.new("RGB", (width, height), colour)


def resize_in_square(preprocessor: ImagePreprocessor, image: Image) -> Image:
    """The picture in the middle of a square as wide as its longer side, resized to a tile. The square of a long strip
    is never there as a whole: as Pillow does too, columns are resized first, a band of lines at a time."""
    tile, side, (width, height) = preprocessor.tiling.tile_size, max(image.size), image.size
    narrow = new_canvas(side, tile, preprocessor.background)
    for top in range(0, height, step := max(BAND_PIXELS // side, 1)):
        lines = min(step, height - top)
        band = image.crop((0, top, width, top + lines))
        band = pad_to_canvas(band, lines, side, 0, (side - width) // 2, preprocessor.background)
        narrow.paste(preprocessor.resize(band, lines, tile), (0, (side - height) // 2 + top))
    return preprocessor.resize(narrow, tile, tile)


def split_tiles(image: Image, tile: int) -> PixelArray:
    """A picture of whole tiles -> [tiles, tile, tile, 3], line by line."""
    pixels = np.asarray(image, dtype=np.uint8)
    rows, columns = pixels.shape[0] // tile, pixels.shape[1] // tile
    cut = np.empty((rows, columns, tile, tile, 3), np.uint8)
    cut[:] = pixels.reshape(rows, tile, columns, tile, 3).transpose(0, 2, 1, 3, 4)
    return cut.reshape(rows * columns, tile, tile, 3)
