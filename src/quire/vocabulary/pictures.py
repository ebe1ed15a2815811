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

MAX_SIDE = 1 << 14
"""Pixels a side of any picture."""


class Grid(NamedTuple):
    """`rows` x `columns` tiles cover a picture of `height` x `width` pixels. No tiles at all: only the whole, in one
    tile of its own."""

    rows: int
    columns: int
    height: int
    width: int


class Picture(NamedTuple):
    """A picture ready for its model: `pixels` [tiles, side, side, 3], not normalised yet, and how it was cut."""

    pixels: npt.NDArray[np.uint8]
    grid: Grid


class Tiling(Protocol):
    """The rules of a model. A tile has `tile` x `tile` pixels."""

    @property
    def tile(self) -> int: ...

    @property
    def most_parts(self) -> int:
        """The most parts of any picture."""
        ...

    @property
    def most_rows(self) -> int:
        """The most rows of any picture."""
        ...

    def grid(self, height: int, width: int, alone: bool = True) -> Grid:
        """How a picture of `height` x `width` pixels, both at least 1, is cut. `alone`: it is its prompt's only one."""
        ...

    def tiles(self, grid: Grid) -> int:
        """Tiles that its encoder is given."""
        ...

    def parts(self, grid: Grid) -> int:
        """Equal shares that it can be encoded in, one after another: tiles, those that the encoder makes itself
        included; or one, where tiles see one another."""
        ...

    def rows(self, grid: Grid) -> int:
        """Rows that stand for it."""
        ...


@dataclass(frozen=True, slots=True)
class Single:
    """One tile, whatever the picture's shape (PaliGemma): a row for each of `side` x `side` patches."""

    tile: int
    side: int

    @property
    def most_parts(self) -> int:
        return 1

    @property
    def most_rows(self) -> int:
        return self.side**2

    def grid(self, height: int, width: int, alone: bool = True) -> Grid:
        return Grid(0, 0, height, width)

    def tiles(self, grid: Grid) -> int:
        return 1

    def parts(self, grid: Grid) -> int:
        return 1

    def rows(self, grid: Grid) -> int:
        return self.side**2


@dataclass(frozen=True, slots=True)
class Closest:
    """The grid of `least` to `most` tiles whose shape is closest to the picture's, which is stretched to fill it; and,
    if that is more than one, the whole picture in a last tile (InternVL 1.5, §3.2). A row for `merge` x `merge` of the
    `side` x `side` patches of a tile."""

    tile: int
    side: int
    merge: int
    least: int
    most: int
    thumbnail: bool = True

    @property
    def most_parts(self) -> int:
        return self.most + (self.thumbnail and self.most > 1)

    @property
    def most_rows(self) -> int:
        return self.most_parts * (self.side // self.merge) ** 2

    def grid(self, height: int, width: int, alone: bool = True) -> Grid:
        """Of equally close shapes the larger one, unless it has more than twice the picture's pixels."""
        best, difference = (1, 1), math.inf
        for rows, columns in sorted(arrangements(self.most), key=lambda shape: (shape[0] * shape[1], shape[1])):
            off = abs(width / height - columns / rows)
            fits = width * height > 0.5 * self.tile**2 * rows * columns
            if self.least <= rows * columns and (off < difference or (off == difference and fits)):
                best, difference = (rows, columns), off
        return Grid(*best, height, width)

    def tiles(self, grid: Grid) -> int:
        return self.parts(grid)

    def parts(self, grid: Grid) -> int:
        tiles = grid.rows * grid.columns
        return tiles + (self.thumbnail and tiles > 1)

    def rows(self, grid: Grid) -> int:
        return self.parts(grid) * (self.side // self.merge) ** 2


@dataclass(frozen=True, slots=True)
class Fitted:
    """The smallest canvas of up to `most` tiles that holds the picture without shrinking it, else the one that shrinks
    it least (Llama 3.2 Vision). A row for each of `side` x `side` patches and for each tile's class token. Tiles see
    one another, so that all of them are one part."""

    tile: int
    side: int
    most: int

    @property
    def most_parts(self) -> int:
        return 1

    @property
    def most_rows(self) -> int:
        return self.most * (self.side**2 + 1)

    def grid(self, height: int, width: int, alone: bool = True) -> Grid:
        shapes = list(arrangements(self.most))
        scales = [min(rows * self.tile / height, columns * self.tile / width) for rows, columns in shapes]
        grown = [scale for scale in scales if scale >= 1]
        chosen = min(grown) if grown else max(scales)
        equal = [shape for shape, scale in zip(shapes, scales, strict=True) if scale == chosen]
        return Grid(*min(equal, key=math.prod), height, width)

    def inner(self, grid: Grid) -> tuple[int, int]:
        """Height and width of the picture within its canvas: at least a tile's on one side, its shape kept."""
        high = min(max(grid.height, self.tile), grid.rows * self.tile)
        wide = min(max(grid.width, self.tile), grid.columns * self.tile)
        by_height, by_width = high / grid.height, wide / grid.width
        if by_width < by_height:
            return min(math.floor(grid.height * by_width) or 1, high), wide
        return high, min(math.floor(grid.width * by_height) or 1, wide)

    def tiles(self, grid: Grid) -> int:
        return grid.rows * grid.columns

    def parts(self, grid: Grid) -> int:
        return 1

    def rows(self, grid: Grid) -> int:
        return self.tiles(grid) * (self.side**2 + 1)

    def shape(self, grid: Grid) -> int:
        """The number of the grid's shape, from 1 on: among those of a tile row, then of two, and so on."""
        return list(arrangements(self.most)).index((grid.rows, grid.columns)) + 1


@dataclass(frozen=True, slots=True)
class HighDefinition:
    """The widest grid of up to `most` tiles in the shape of the picture, which is padded above and below, lying on its
    side if it is higher than wide; and the whole picture in one more tile, which the encoder makes (Phi-3-Vision). A
    row for 2 x 2 of the `side` x `side` patches of a tile, one at each line's end, and one between the two."""

    tile: int
    side: int
    most: int

    @property
    def most_parts(self) -> int:
        return self.most + 1

    @property
    def most_rows(self) -> int:
        """Of grids of one area, the highest has the most lines."""
        return max(self.rows(Grid(*shape, 1, 1)) for shape in arrangements(self.most))

    def grid(self, height: int, width: int, alone: bool = True) -> Grid:
        rows, columns = -(-self.inner(height, width)[0] // self.tile), self.columns(height, width)
        return Grid(*((columns, rows) if width < height else (rows, columns)), height, width)

    def columns(self, height: int, width: int) -> int:
        """Tiles along the longer side."""
        ratio, columns = max(height, width) / min(height, width), 1
        while columns * math.ceil(columns / ratio) <= self.most:
            columns += 1
        return columns - 1

    def inner(self, height: int, width: int) -> tuple[int, int]:
        """The shorter and the longer side of the picture within its grid."""
        longer = self.columns(height, width) * self.tile
        return int(longer / (max(height, width) / min(height, width))) or 1, longer

    def tiles(self, grid: Grid) -> int:
        return grid.rows * grid.columns

    def parts(self, grid: Grid) -> int:
        return self.tiles(grid) + 1

    def rows(self, grid: Grid) -> int:
        half = self.side // 2
        return self.parts(grid) * half**2 + (grid.rows + 1) * half + 1


@dataclass(frozen=True, slots=True)
class AnyResolution:
    """The one of `sizes` (height, width) that shows most of the picture, which is padded to it; and before it the whole
    picture in one tile (LLaVA-OneVision). A row for each patch that isn't all padding, of those of the grid at most
    some 1.21 `area` tiles' worth (more are interpolated), and one at each line's end. A picture that isn't its prompt's
    only one is padded to a square, in one tile with one row behind it."""

    tile: int
    side: int
    sizes: tuple[tuple[int, int], ...]
    area: int

    @property
    def most_parts(self) -> int:
        return 1 + max(height * width for height, width in self.sizes) // self.tile**2

    @property
    def most_rows(self) -> int:
        """At most: lines are as many as a grid can have, which the largest pictures need not reach."""
        lines = max(height for height, _ in self.sizes) // self.tile * self.side
        patches = max(height * width for height, width in self.sizes) // self.tile**2 * self.side**2
        return self.side**2 + lines + min(patches, math.ceil(1.1**2 * self.area * self.side**2))

    def grid(self, height: int, width: int, alone: bool = True) -> Grid:
        if not alone:
            return Grid(0, 0, height, width)
        best, most, least = self.sizes[0], 0, math.inf
        for high, wide in self.sizes:
            scale = min(wide / width, high / height)
            shown = min(int(width * scale) * int(height * scale), width * height)
            wasted = high * wide - shown
            if shown > most or (shown == most and wasted < least):
                best, most, least = (high, wide), shown, wasted
        return Grid(best[0] // self.tile, best[1] // self.tile, height, width)

    def inner(self, grid: Grid) -> tuple[int, int]:
        """Height and width of the picture within its tiles."""
        high, wide = grid.rows * self.tile, grid.columns * self.tile
        by_height, by_width = high / grid.height, wide / grid.width
        if by_width < by_height:
            return min(math.ceil(grid.height * by_width), high), wide
        return high, min(math.ceil(grid.width * by_height), wide)

    def padding(self, grid: Grid) -> tuple[int, int]:
        """Rows of patches that are padding above and below, and columns of them left and right."""
        high, wide = grid.rows * self.side, grid.columns * self.side
        if grid.width / grid.height > wide / high:
            return (high - int(round(grid.height * (wide / grid.width), 7))) // 2, 0
        return 0, (wide - int(round(grid.width * (high / grid.height), 7))) // 2

    def lines(self, grid: Grid) -> tuple[int, int]:
        """Lines of rows, and how many there are in each, after interpolation and without what ends them."""
        above, left = self.padding(grid)
        high, wide = grid.rows * self.side - 2 * above, grid.columns * self.side - 2 * left
        ratio = math.sqrt(high * wide / (self.area * self.side**2))
        return (int(high // ratio), int(wide // ratio)) if ratio > 1.1 else (high, wide)

    def tiles(self, grid: Grid) -> int:
        return self.parts(grid)

    def parts(self, grid: Grid) -> int:
        return 1 + grid.rows * grid.columns

    def rows(self, grid: Grid) -> int:
        if not grid.rows:
            return self.side**2 + 1
        lines, length = self.lines(grid)
        return self.side**2 + lines * (length + 1)


def arrangements(most: int) -> Iterator[tuple[int, int]]:
    """Grids (rows, columns) of at most so many tiles: those of one row first."""
    for rows in range(1, most + 1):
        for columns in range(1, most // rows + 1):
            yield rows, columns
