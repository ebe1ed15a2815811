"""Image preprocessing: from an RGB image to uint8 tiles, as transformers' image processors do before normalization; one
function per kind of tiling. The model's tiling has the geometry. Pillow is imported with the first image.
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
    PooledTile,
    PreparedImage,
    ScaledTiling,
    SingleTile,
    TileGrid,
)

if TYPE_CHECKING:
    from PIL.Image import Image

PixelArray = npt.NDArray[np.uint8]
Colour = tuple[int, int, int]
NEAREST, LANCZOS, BILINEAR, BICUBIC, BOX, HAMMING = range(6)
"""Pillow's filter numbers, as used in preprocessor_config.json."""
DEFAULT_RESAMPLE = {
    AnyResTiling: BICUBIC,
    ClosestAspectTiling: BICUBIC,
    FittedCanvasTiling: BILINEAR,
    HDTiling: BILINEAR,
    SingleTile: BICUBIC,
    PooledTile: BILINEAR,
    ScaledTiling: BICUBIC,
}
BAND_PIXELS = 1 << 20  # pixels padded at a time
WHITE, BLACK = (255, 255, 255), (0, 0, 0)


@dataclass(frozen=True, slots=True)
class ImagePreprocessor:
    """The preprocessing of one model. `resample` is one of Pillow's filters; `background` is the padding colour of
    squares."""

    tiling: ImageTiling
    resample: int
    background: Colour

    def prepare(self, image: Image, only_image: bool = True) -> PreparedImage:
        """Return the tiles of `image`, which is RGB and at least 1 x 1. `only_image`: it is the only image of its
        prompt, which some models cut into more tiles. The tiles depend only on the pixels and on `only_image`."""
        assert image.mode == "RGB", f"an image in mode {image.mode}"
        grid = self.tiling.choose_grid(image.height, image.width, only_image)
        return PreparedImage(TILE_CUTTERS[type(self.tiling)](self, image, grid), grid)

    def resize(self, image: Image, height: int, width: int) -> Image:
        from PIL.Image import Resampling

        return image.resize((width, height), resample=Resampling(self.resample))


def read_image_preprocessor(
    config: dict[str, Any], tiling: ImageTiling, mean: tuple[float, float, float]
) -> ImagePreprocessor:
    """Return the preprocessing that preprocessor_config.json describes. `tiling` and `mean` already have its sizes and
    numbers. Raise StartupError for unsupported steps and for invalid filters."""
    wanted = {"do_resize": True, "do_convert_rgb": True}
    if not isinstance(tiling, ClosestAspectTiling):  # published InternVL configs set it, but their code does not crop
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
    """PaliGemma and Gemma-3: resize the image to one tile."""
    tile = preprocessor.tiling.tile_size
    return split_tiles(preprocessor.resize(image, tile, tile), tile)


def cut_scaled(preprocessor: ImagePreprocessor, image: Image, grid: TileGrid) -> PixelArray:
    """Gemma-4: resize the image to its grid."""
    tile = preprocessor.tiling.tile_size
    return split_tiles(preprocessor.resize(image, grid.rows * tile, grid.columns * tile), tile)


def cut_closest(preprocessor: ImagePreprocessor, image: Image, grid: TileGrid) -> PixelArray:
    """InternVL: resize the image to its grid; if that has several tiles, append the whole image as one."""
    assert isinstance(preprocessor.tiling, ClosestAspectTiling), "a grid of the closest shape"
    tile, cut = preprocessor.tiling.tile_size, cut_scaled(preprocessor, image, grid)
    if preprocessor.tiling.num_parts(grid) == len(cut):
        return cut
    return np.concatenate((cut, split_tiles(preprocessor.resize(image, tile, tile), tile)))


def cut_fitted(preprocessor: ImagePreprocessor, image: Image, grid: TileGrid) -> PixelArray:
    """Llama 3.2 Vision: put the image into the upper left corner of its canvas, on black."""
    assert isinstance(preprocessor.tiling, FittedCanvasTiling), "a canvas that it fits into"
    tile = preprocessor.tiling.tile_size
    inner = preprocessor.resize(image, *preprocessor.tiling.scaled_size(grid))
    return split_tiles(pad_to_canvas(inner, grid.rows * tile, grid.columns * tile, 0, 0, BLACK), tile)


def cut_high_definition(preprocessor: ImagePreprocessor, image: Image, grid: TileGrid) -> PixelArray:
    """Phi-3-Vision: resize the image to the width of its grid, with white above and below; images higher than wide are
    transposed meanwhile. The encoder makes the tile of the whole image."""
    from PIL.Image import Transpose

    assert isinstance(preprocessor.tiling, HDTiling), "a grid of high definition"
    tile, is_portrait = preprocessor.tiling.tile_size, image.width < image.height
    high, wide = preprocessor.tiling.scaled_size(image.height, image.width)
    landscape = preprocessor.resize(image.transpose(Transpose.TRANSPOSE) if is_portrait else image, high, wide)
    total = -(-high // tile) * tile
    padded = pad_to_canvas(landscape, total, wide, (total - high) // 2, 0, WHITE)
    return split_tiles(padded.transpose(Transpose.TRANSPOSE) if is_portrait else padded, tile)


def cut_any_resolution(preprocessor: ImagePreprocessor, image: Image, grid: TileGrid) -> PixelArray:
    """LLaVA-OneVision: the whole image as one tile, then the tiles of the image centred in its grid. One of several
    images is centred in a square and resized to a single tile."""
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
    PooledTile: cut_single,
    ScaledTiling: cut_scaled,
    ClosestAspectTiling: cut_closest,
    FittedCanvasTiling: cut_fitted,
    HDTiling: cut_high_definition,
    AnyResTiling: cut_any_resolution,
}


def pad_to_canvas(image: Image, height: int, width: int, top: int, left: int, colour: Colour) -> Image:
    """Return the image on a canvas of this size and colour."""
    canvas = new_canvas(height, width, colour)
    canvas.paste(image, (left, top))
    return canvas


def new_canvas(height: int, width: int, colour: Colour) -> Image:
    from PIL import Image as pillow

    return pillow.new("RGB", (width, height), colour)


def resize_in_square(preprocessor: ImagePreprocessor, image: Image) -> Image:
    """Return the image centred in a square and resized to a tile. To save memory the square of a long strip is never
    made as a whole: columns are resized first (as in Pillow), a band of lines at a time."""
    tile, side, (width, height) = preprocessor.tiling.tile_size, max(image.size), image.size
    narrow = new_canvas(side, tile, preprocessor.background)
    for top in range(0, height, step := max(BAND_PIXELS // side, 1)):
        lines = min(step, height - top)
        band = image.crop((0, top, width, top + lines))
        band = pad_to_canvas(band, lines, side, 0, (side - width) // 2, preprocessor.background)
        narrow.paste(preprocessor.resize(band, lines, tile), (0, (side - height) // 2 + top))
    return preprocessor.resize(narrow, tile, tile)


def split_tiles(image: Image, tile: int) -> PixelArray:
    """Split an image of whole tiles: [tiles, tile, tile, 3], row by row."""
    pixels = np.asarray(image, dtype=np.uint8)
    rows, columns = pixels.shape[0] // tile, pixels.shape[1] // tile
    cut = np.empty((rows, columns, tile, tile, 3), np.uint8)
    cut[:] = pixels.reshape(rows, tile, columns, tile, 3).transpose(0, 2, 1, 3, 4)
    return cut.reshape(rows * columns, tile, tile, 3)
