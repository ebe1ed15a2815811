"""How a picture is cut into tiles, and how many rows of a model's numbers stand for it: one class a family of models.

Arithmetic on sizes in integers, shared by those who cut pictures and those who encode them. It sees no picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_IMAGE_SIDE = 1 << 14
"""Pixels a side of any picture."""


class TileGrid(NamedTuple):
    """`rows` x `columns` tiles cover a picture of `height` x `width` pixels. No tiles at all: only the whole, in one
    tile of its own."""

    rows: int
    columns: int
    height: int
    width: int


class PreparedImage(NamedTuple):
    """A picture ready for its model: `pixels` [tiles, side, side, 3], not normalised yet, and how it was cut."""

    pixels: npt.NDArray[np.uint8]
    grid: TileGrid


class ImageTiling(Protocol):
    """The rules of a model. A tile has `tile_size` x `tile_size` pixels."""

    @property
    def tile_size(self) -> int: ...

    @property
    def max_parts(self) -> int:
        """The most parts of any picture."""
        ...

    @property
    def max_embeds(self) -> int:
        """The most rows of any picture."""
        ...

    def choose_grid(self, height: int, width: int, is_only_image: bool = True) -> TileGrid:
        """How a picture of `height` x `width` pixels, both at least 1, is cut. `is_only_image`: it is its prompt's "
        "only one."""
        ...

    def num_tiles(self, grid: TileGrid) -> int:
        """Tiles that its encoder is given."""
        ...

    def num_parts(self, grid: TileGrid) -> int:
        """Equal shares that it can be encoded in, one after another: tiles, those that the encoder makes itself
        included; or one, where tiles see one another."""
        ...

    def num_embeds(self, grid: TileGrid) -> int:
        """Rows that stand for it."""
        ...


@dataclass(frozen=True, slots=True)
class SingleTile:
    """One tile, whatever the picture's shape (PaliGemma): a row for each of `patches_per_side` x `patches_per_side` "
    "patches."""

    tile_size: int
    patches_per_side: int

    @property
    def max_parts(self) -> int:
        return 1

    @property
    def max_embeds(self) -> int:
        return self.patches_per_side**2

    def choose_grid(self, height: int, width: int, is_only_image: bool = True) -> TileGrid:
        return TileGrid(0, 0, height, width)

    def num_tiles(self, grid: TileGrid) -> int:
        return 1

    def num_parts(self, grid: TileGrid) -> int:
        return 1

    def num_embeds(self, grid: TileGrid) -> int:
        return self.patches_per_side**2


@dataclass(frozen=True, slots=True)
class ClosestAspectTiling:
    """The grid of `min_tiles` to `max_tiles` tiles whose shape is closest to the picture's, which is stretched to fill
    it; and, if that is more than one, the whole picture in a last tile (InternVL 1.5, §3.2). A row for `merge` x
    `merge` of the `patches_per_side` x `patches_per_side` patches of a tile."""

    tile_size: int
    patches_per_side: int
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
        """Of equally close shapes the larger one, unless it has more than twice the picture's pixels."""
        best, difference = (1, 1), math.inf
        for rows, columns in sorted(grid_shapes(self.max_tiles), key=lambda shape: (shape[0] * shape[1], shape[1])):
            off = abs(width / height - columns / rows)
            fits = width * height > 0.5 * self.tile_size**2 * rows * columns
            if self.min_tiles <= rows * columns and (off < difference or (off == difference and fits)):
                best, difference = (rows, columns), off
        return TileGrid(*best, height, width)

    def num_tiles(self, grid: TileGrid) -> int:
        return self.num_parts(grid)

    def num_parts(self, grid: TileGrid) -> int:
        tiles = grid.rows * grid.columns
        return tiles + (self.thumbnail and tiles > 1)

    def num_embeds(self, grid: TileGrid) -> int:
        return self.num_parts(grid) * (self.patches_per_side // self.merge) ** 2


@dataclass(frozen=True, slots=True)
class FittedCanvasTiling:
    """The smallest canvas of up to `max_tiles` tiles that holds the picture without shrinking it, else the one that
    shrinks it least (Llama 3.2 Vision). A row for each of `patches_per_side` x `patches_per_side` patches and for each
    tile's class token. Tiles see one another, so that all of them are one part."""

    tile_size: int
    patches_per_side: int
    max_tiles: int

    @property
    def max_parts(self) -> int:
        return 1

    @property
    def max_embeds(self) -> int:
        return self.max_tiles * (self.patches_per_side**2 + 1)

    def choose_grid(self, height: int, width: int, is_only_image: bool = True) -> TileGrid:
        shapes = list(grid_shapes(self.max_tiles))
        scales = [min(rows * self.tile_size / height, columns * self.tile_size / width) for rows, columns in shapes]
        grown = [scale for scale in scales if scale >= 1]
        chosen = min(grown) if grown else max(scales)
        equal = [shape for shape, scale in zip(shapes, scales, strict=True) if scale == chosen]
        return TileGrid(*min(equal, key=math.prod), height, width)

    def scaled_size(self, grid: TileGrid) -> tuple[int, int]:
        """Height and width of the picture within its canvas: at least a tile's on one side, its shape kept."""
        high = min(max(grid.height, self.tile_size), grid.rows * self.tile_size)
        wide = min(max(grid.width, self.tile_size), grid.columns * self.tile_size)
        by_height, by_width = high / grid.height, wide / grid.width
        if by_width < by_height:
            return min(math.floor(grid.height * by_width) or 1, high), wide
        return high, min(math.floor(grid.width * by_height) or 1, wide)

    def num_tiles(self, grid: TileGrid) -> int:
        return grid.rows * grid.columns

    def num_parts(self, grid: TileGrid) -> int:
        return 1

    def num_embeds(self, grid: TileGrid) -> int:
        return self.num_tiles(grid) * (self.patches_per_side**2 + 1)

    def aspect_ratio_id(self, grid: TileGrid) -> int:
        """The number of the grid's shape, from 1 on: among those of a tile row, then of two, and so on."""
        return list(grid_shapes(self.max_tiles)).index((grid.rows, grid.columns)) + 1


@dataclass(frozen=True, slots=True)
class HDTiling:
    """The widest grid of up to `max_tiles` tiles in the shape of the picture, which is padded above and below, lying on
    its side if it is higher than wide; and the whole picture in one more tile, which the encoder makes (Phi-3-Vision).
    A row for 2 x 2 of the `patches_per_side` x `patches_per_side` patches of a tile, one at each line's end, and one
    between the two."""

    tile_size: int
    patches_per_side: int
    max_tiles: int

    @property
    def max_parts(self) -> int:
        return self.max_tiles + 1

    @property
    def max_embeds(self) -> int:
        """Of grids of one area, the highest has the most lines."""
        return max(self.num_embeds(TileGrid(*shape, 1, 1)) for shape in grid_shapes(self.max_tiles))

    def choose_grid(self, height: int, width: int, is_only_image: bool = True) -> TileGrid:
        rows, columns = -(-self.scaled_size(height, width)[0] // self.tile_size), self.long_side_tiles(height, width)
        return TileGrid(*((columns, rows) if width < height else (rows, columns)), height, width)

    def long_side_tiles(self, height: int, width: int) -> int:
        """Tiles along the longer side."""
        ratio, columns = max(height, width) / min(height, width), 1
        while columns * math.ceil(columns / ratio) <= self.max_tiles:
            columns += 1
        return columns - 1

    def scaled_size(self, height: int, width: int) -> tuple[int, int]:
        """The shorter and the longer side of the picture within its grid."""
        longer = self.long_side_tiles(height, width) * self.tile_size
        return int(longer / (max(height, width) / min(height, width))) or 1, longer

    def num_tiles(self, grid: TileGrid) -> int:
        return grid.rows * grid.columns

    def num_parts(self, grid: TileGrid) -> int:
        return self.num_tiles(grid) + 1

    def num_embeds(self, grid: TileGrid) -> int:
        half = self.patches_per_side // 2
        return self.num_parts(grid) * half**2 + (grid.rows + 1) * half + 1


@dataclass(frozen=True, slots=True)
class AnyResTiling:
    """The one of `canvas_sizes` (height, width) that shows most of the picture, which is padded to it; and before it
    the whole picture in one tile (LLaVA-OneVision). A row for each patch that isn't all padding, of those of the grid
    at most some 1.21 `max_area_tiles` tiles' worth (more are interpolated), and one at each line's end. A picture that
    isn't its prompt's only one is padded to a square, in one tile with one row behind it."""

    tile_size: int
    patches_per_side: int
    canvas_sizes: tuple[tuple[int, int], ...]
    max_area_tiles: int

    @property
    def max_parts(self) -> int:
        return 1 + max(height * width for height, width in self.canvas_sizes) // self.tile_size**2

    @property
    def max_embeds(self) -> int:
        """At most: lines are as many as a grid can have, which the largest pictures need not reach."""
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
        best, most, least = self.canvas_sizes[0], 0, math.inf
        for high, wide in self.canvas_sizes:
            scale = min(wide / width, high / height)
            shown = min(int(width * scale) * int(height * scale), width * height)
            wasted = high * wide - shown
            if shown > most or (shown == most and wasted < least):
                best, most, least = (high, wide), shown, wasted
        return TileGrid(best[0] // self.tile_size, best[1] // self.tile_size, height, width)

    def scaled_size(self, grid: TileGrid) -> tuple[int, int]:
        """Height and width of the picture within its tiles."""
        high, wide = grid.rows * self.tile_size, grid.columns * self.tile_size
        by_height, by_width = high / grid.height, wide / grid.width
        if by_width < by_height:
            return min(math.ceil(grid.height * by_width), high), wide
        return high, min(math.ceil(grid.width * by_height), wide)

    def patch_padding(self, grid: TileGrid) -> tuple[int, int]:
        """Rows of patches that are padding above and below, and columns of them left and right."""
        high, wide = grid.rows * self.patches_per_side, grid.columns * self.patches_per_side
        if grid.width / grid.height > wide / high:
            return (high - int(round(grid.height * (wide / grid.width), 7))) // 2, 0
        return 0, (wide - int(round(grid.width * (high / grid.height), 7))) // 2

    def unpadded_grid(self, grid: TileGrid) -> tuple[int, int]:
        """Lines of rows, and how many there are in each, after interpolation and without what ends them."""
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
    """Grids (rows, columns) of at most so many tiles: those of one row first."""
    for rows in range(1, max_tiles + 1):
        for columns in range(1, max_tiles // rows + 1):
            yield rows, columns
