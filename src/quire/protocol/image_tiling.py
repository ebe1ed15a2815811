"""How an image is cut into tiles, and how many embeddings stand for it: one class for each family of models.

Integer arithmetic on sizes, used by the preprocessing and by the encoders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_IMAGE_SIDE = 1 << 14
"""The most pixels of a side of an image."""


class TileGrid(NamedTuple):
    """`rows` x `columns` tiles cover an image of `height` x `width` pixels. 0 x 0: only the whole image, in one
    tile."""

    rows: int
    columns: int
    height: int
    width: int


class PreparedImage(NamedTuple):
    """A preprocessed image: `pixels` [tiles, side, side, 3], not normalized yet, and its tile grid."""

    pixels: npt.NDArray[np.uint8]
    grid: TileGrid


@dataclass(frozen=True, slots=True)
class ImageTiling:
    """The tiling rules of a model. A tile has `tile_size` x `tile_size` pixels, and the encoder `patches_per_side` x
    `patches_per_side` patches of it."""

    tile_size: int
    patches_per_side: int

    @property
    def max_parts(self) -> int:
        """The most parts of an image."""
        return 1

    @property
    def max_embeds(self) -> int:
        """The most embeddings of an image."""
        raise NotImplementedError

    def choose_grid(self, height: int, width: int, is_only_image: bool = True) -> TileGrid:
        """Return the grid of an image of `height` x `width` pixels, both at least 1. `is_only_image`: its prompt has no
        other image."""
        raise NotImplementedError

    def num_tiles(self, grid: TileGrid) -> int:
        """Return the number of tiles that the encoder is given."""
        return grid.rows * grid.columns

    def num_parts(self, grid: TileGrid) -> int:
        """Return the number of equal parts that can be encoded one after another: the tiles, with those that the
        encoder makes itself; or 1 if tiles attend to one another."""
        return 1

    def num_embeds(self, grid: TileGrid) -> int:
        """Return the number of embeddings."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class SingleTile(ImageTiling):
    """One tile, whatever the image's shape (PaliGemma): an embedding for each of `patches_per_side` x
    `patches_per_side` patches."""

    @property
    def max_embeds(self) -> int:
        return self.patches_per_side**2

    def choose_grid(self, height: int, width: int, is_only_image: bool = True) -> TileGrid:
        return TileGrid(0, 0, height, width)

    def num_tiles(self, grid: TileGrid) -> int:
        return 1

    def num_embeds(self, grid: TileGrid) -> int:
        return self.patches_per_side**2


@dataclass(frozen=True, slots=True)
class PooledTile(SingleTile):
    """One tile, whatever the image's shape (Gemma-3): an embedding for each of `patches_per_side` x `patches_per_side`
    squares of patches."""


@dataclass(frozen=True, slots=True)
class ScaledTiling(ImageTiling):
    """The image is scaled to fill at most `max_tiles` tiles (Gemma-4). Its aspect ratio is kept, up to rounding to
    whole tiles. There is one embedding for each tile, a square of `patches_per_side` x `patches_per_side` patches.
    Tiles attend to one another, so all of them are one part."""

    max_tiles: int

    @property
    def max_embeds(self) -> int:
        return self.max_tiles

    def choose_grid(self, height: int, width: int, is_only_image: bool = True) -> TileGrid:
        """See ImageTiling. Sides are rounded down. An image that would be less than a tile high becomes one tile high
        and width // height tiles wide; an image that would be less than a tile wide becomes one tile wide."""
        factor = math.sqrt(self.max_tiles * self.tile_size**2 / (height * width))
        rows, columns = (math.floor(factor * side / self.tile_size) for side in (height, width))
        if not rows:
            rows, columns = 1, min(width // height, self.max_tiles)
        elif not columns:
            rows, columns = min(height // width, self.max_tiles), 1
        return TileGrid(rows, max(columns, 1), height, width)

    def num_embeds(self, grid: TileGrid) -> int:
        return self.num_tiles(grid)


@dataclass(frozen=True, slots=True)
class ClosestAspectTiling(ImageTiling):
    """The grid of `min_tiles` to `max_tiles` tiles whose shape is closest to the image's, which is stretched to fill
    it; if it has several tiles, the whole image is added as a last tile (InternVL 1.5, §3.2). One embedding for `merge`
    x `merge` of the `patches_per_side` x `patches_per_side` patches of a tile."""

    merge: int
    min_tiles: int
    max_tiles: int
    thumbnail: bool = True

    @property
    def max_parts(self) -> int:
        return self.max_tiles + (self.thumbnail and self.max_tiles > 1)

    @property
    def max_embeds(self) -> int:
        return self.max_parts * (self.patches_per_side // self.merge) ** 2

    def choose_grid(self, height: int, width: int, is_only_image: bool = True) -> TileGrid:
        """Return the closest grid; of equally close ones the largest with less than twice the image's pixels."""
        best, best_difference = (1, 1), math.inf
        for rows, columns in sorted(grid_shapes(self.max_tiles), key=lambda shape: (shape[0] * shape[1], shape[1])):
            difference = abs(width / height - columns / rows)
            fits = width * height > 0.5 * self.tile_size**2 * rows * columns
            if self.min_tiles <= rows * columns and (
                difference < best_difference or (difference == best_difference and fits)
            ):
                best, best_difference = (rows, columns), difference
        return TileGrid(*best, height, width)

    def num_tiles(self, grid: TileGrid) -> int:
        return self.num_parts(grid)

    def num_parts(self, grid: TileGrid) -> int:
        tiles = grid.rows * grid.columns
        return tiles + (self.thumbnail and tiles > 1)

    def num_embeds(self, grid: TileGrid) -> int:
        return self.num_parts(grid) * (self.patches_per_side // self.merge) ** 2


@dataclass(frozen=True, slots=True)
class FittedCanvasTiling(ImageTiling):
    """The smallest canvas of up to `max_tiles` tiles that holds the image without shrinking it, else the one that
    shrinks it least (Llama 3.2 Vision). One embedding for each of `patches_per_side` x `patches_per_side` patches and
    for each tile's class token. Tiles attend to one another, so all of them are one part."""

    max_tiles: int

    @property
    def max_embeds(self) -> int:
        return self.max_tiles * (self.patches_per_side**2 + 1)

    def choose_grid(self, height: int, width: int, is_only_image: bool = True) -> TileGrid:
        shapes = list(grid_shapes(self.max_tiles))
        scales = [min(rows * self.tile_size / height, columns * self.tile_size / width) for rows, columns in shapes]
        enlarging = [scale for scale in scales if scale >= 1]
        chosen = min(enlarging) if enlarging else max(scales)
        equal = [shape for shape, scale in zip(shapes, scales, strict=True) if scale == chosen]
        return TileGrid(*min(equal, key=math.prod), height, width)

    def scaled_size(self, grid: TileGrid) -> tuple[int, int]:
        """Return height and width of the image in its canvas: at least a tile on one side, with its aspect ratio."""
        high = min(max(grid.height, self.tile_size), grid.rows * self.tile_size)
        wide = min(max(grid.width, self.tile_size), grid.columns * self.tile_size)
        by_height, by_width = high / grid.height, wide / grid.width
        if by_width < by_height:
            return min(math.floor(grid.height * by_width) or 1, high), wide
        return high, min(math.floor(grid.width * by_height) or 1, wide)

    def num_embeds(self, grid: TileGrid) -> int:
        return self.num_tiles(grid) * (self.patches_per_side**2 + 1)

    def aspect_ratio_id(self, grid: TileGrid) -> int:
        """Return the number of the grid's shape, from 1 on, in the order of `grid_shapes`."""
        return list(grid_shapes(self.max_tiles)).index((grid.rows, grid.columns)) + 1


@dataclass(frozen=True, slots=True)
class HDTiling(ImageTiling):
    """The widest grid of up to `max_tiles` tiles in the shape of the image, which is padded above and below (an image
    that is higher than wide is treated as if on its side); and the whole image in one more tile, which the encoder
    makes (Phi-3-Vision). One embedding for 2 x 2 of the `patches_per_side` x `patches_per_side` patches of a tile, one
    at the end of each line, and one between the tiles and the whole image."""

    max_tiles: int

    @property
    def max_parts(self) -> int:
        return self.max_tiles + 1

    @property
    def max_embeds(self) -> int:
        """See ImageTiling. Of grids with equal area, the highest has the most lines."""
        return max(self.num_embeds(TileGrid(*shape, 1, 1)) for shape in grid_shapes(self.max_tiles))

    def choose_grid(self, height: int, width: int, is_only_image: bool = True) -> TileGrid:
        rows, columns = -(-self.scaled_size(height, width)[0] // self.tile_size), self.long_side_tiles(height, width)
        return TileGrid(*((columns, rows) if width < height else (rows, columns)), height, width)

    def long_side_tiles(self, height: int, width: int) -> int:
        """Return the tiles along the longer side."""
        ratio, columns = max(height, width) / min(height, width), 1
        while columns * math.ceil(columns / ratio) <= self.max_tiles:
            columns += 1
        return columns - 1

    def scaled_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the shorter and the longer side of the image in its grid."""
        longer = self.long_side_tiles(height, width) * self.tile_size
        return int(longer / (max(height, width) / min(height, width))) or 1, longer

    def num_parts(self, grid: TileGrid) -> int:
        return self.num_tiles(grid) + 1

    def num_embeds(self, grid: TileGrid) -> int:
        half = self.patches_per_side // 2
        return self.num_parts(grid) * half**2 + (grid.rows + 1) * half + 1


@dataclass(frozen=True, slots=True)
class AnyResTiling(ImageTiling):
    """The canvas of `canvas_sizes` (height, width) that shows most of the image, which is padded to it; before it the
    whole image in one tile (LLaVA-OneVision). One embedding for each patch that isn't all padding, and one at the end
    of each line of the grid. If the grid's patches exceed those of about 1.21 `max_area_tiles` tiles, they are
    interpolated to fewer. An image that isn't the only one of its prompt is padded to a square, in one tile with one
    more embedding."""

    canvas_sizes: tuple[tuple[int, int], ...]
    max_area_tiles: int

    @property
    def max_parts(self) -> int:
        return 1 + max(height * width for height, width in self.canvas_sizes) // self.tile_size**2

    @property
    def max_embeds(self) -> int:
        """An upper bound: it assumes the most lines of any grid with the most patches of any grid."""
        lines = max(height for height, _ in self.canvas_sizes) // self.tile_size * self.patches_per_side
        patches = (
            max(height * width for height, width in self.canvas_sizes) // self.tile_size**2 * self.patches_per_side**2
        )
        return (
            self.patches_per_side**2
            + lines
            + min(patches, math.ceil(1.1**2 * self.max_area_tiles * self.patches_per_side**2))
        )

    def choose_grid(self, height: int, width: int, is_only_image: bool = True) -> TileGrid:
        if not is_only_image:
            return TileGrid(0, 0, height, width)
        best, most_shown, least_wasted = self.canvas_sizes[0], 0, math.inf
        for high, wide in self.canvas_sizes:
            scale = min(wide / width, high / height)
            shown = min(int(width * scale) * int(height * scale), width * height)
            wasted = high * wide - shown
            if shown > most_shown or (shown == most_shown and wasted < least_wasted):
                best, most_shown, least_wasted = (high, wide), shown, wasted
        return TileGrid(best[0] // self.tile_size, best[1] // self.tile_size, height, width)

    def scaled_size(self, grid: TileGrid) -> tuple[int, int]:
        """Return height and width of the image in its tiles."""
        high, wide = grid.rows * self.tile_size, grid.columns * self.tile_size
        by_height, by_width = high / grid.height, wide / grid.width
        if by_width < by_height:
            return min(math.ceil(grid.height * by_width), high), wide
        return high, min(math.ceil(grid.width * by_height), wide)

    def patch_padding(self, grid: TileGrid) -> tuple[int, int]:
        """Return the lines of padding patches above (and below), and the columns of them left (and right)."""
        high, wide = grid.rows * self.patches_per_side, grid.columns * self.patches_per_side
        if grid.width / grid.height > wide / high:
            return (high - int(round(grid.height * (wide / grid.width), 7))) // 2, 0
        return 0, (wide - int(round(grid.width * (high / grid.height), 7))) // 2

    def unpadded_grid(self, grid: TileGrid) -> tuple[int, int]:
        """Return the lines and columns of patches, after interpolation, without padding and line ends."""
        above, left = self.patch_padding(grid)
        high, wide = grid.rows * self.patches_per_side - 2 * above, grid.columns * self.patches_per_side - 2 * left
        ratio = math.sqrt(high * wide / (self.max_area_tiles * self.patches_per_side**2))
        return (int(high // ratio), int(wide // ratio)) if ratio > 1.1 else (high, wide)

    def num_tiles(self, grid: TileGrid) -> int:
        return self.num_parts(grid)

    def num_parts(self, grid: TileGrid) -> int:
        return 1 + grid.rows * grid.columns

    def num_embeds(self, grid: TileGrid) -> int:
        if not grid.rows:
            return self.patches_per_side**2 + 1
        lines, length = self.unpadded_grid(grid)
        return self.patches_per_side**2 + lines * (length + 1)


def grid_shapes(max_tiles: int) -> Iterator[tuple[int, int]]:
    """Yield all grids (rows, columns) of at most `max_tiles` tiles, by rows, then columns."""
    for rows in range(1, max_tiles + 1):
        for columns in range(1, max_tiles // rows + 1):
            yield rows, columns


TILING_NAMES: dict[type[ImageTiling], str] = {
    SingleTile: "single",
    PooledTile: "pooled",
    ScaledTiling: "scaled",
    ClosestAspectTiling: "closest",
    FittedCanvasTiling: "fitted",
    HDTiling: "hd",
    AnyResTiling: "anyres",
}
"""Names of tilings in the keys of cached images. They stay if a class is renamed."""


def tiling_settings(tiling: ImageTiling) -> str:
    """Return the name of a tiling and its numbers in order, which differ for any two different tilings."""
    return f"{TILING_NAMES[type(tiling)]} {' '.join(_number_texts(astuple(tiling)))}"


def _number_texts(numbers: tuple[Any, ...]) -> Iterator[str]:
    """Yield each number as text, a bool as 0 or 1, nested tuples in parentheses."""
    for number in numbers:
        if isinstance(number, tuple):
            yield f"({' '.join(_number_texts(number))})"
        else:
            yield str(int(number) if isinstance(number, bool) else number)
