"""A picture as the bundled vision model sees it: tiles of equal size, and the order of their features in a prompt.

What transformers' LLaVA-OneVision processor and `pack_image_features` do (dynamic grid, newline rows), for one picture.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

TILE, PATCH = 48, 8  # pixels a side
SIDE = TILE // PATCH  # patches a side of a tile
GRIDS = ((TILE, TILE), (TILE, 2 * TILE), (2 * TILE, TILE), (2 * TILE, 2 * TILE))  # heights and widths
TILES = 5  # at most: the whole picture, then its parts
NEWLINE = TILES * SIDE * SIDE  # the index of the newline's feature, after all tiles' features
MOST_FEATURES = SIDE * SIDE + 2 * SIDE * (2 * SIDE + 1)
MEAN = STD = 0.5  # pixels from 0 to 1 are shifted and scaled by these


def best_grid(height: int, width: int) -> tuple[int, int]:
    """The grid that keeps most of the picture's pixels, and of those the one that wastes least."""

    def rating(grid: tuple[int, int]) -> tuple[int, int]:
        scale = min(grid[1] / width, grid[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - grid[0] * grid[1]

    return max(GRIDS, key=rating)


def tile_count(height: int, width: int) -> int:
    down, across = best_grid(height, width)
    return 1 + down * across // TILE**2


def prepared_size(height: int, width: int) -> tuple[int, int]:
    """The picture's height and width once it fits its grid."""
    down, across = best_grid(height, width)
    scale_x, scale_y = across / width, down / height
    if scale_x < scale_y:
        return min(math.ceil(height * scale_x), down), across
    return down, min(math.ceil(width * scale_y), across)


def tiles_of(pixels: NDArray[np.uint8], resample: Image.Resampling = Image.Resampling.BICUBIC) -> NDArray[np.uint8]:
    """[tiles, TILE, TILE, channels]: the whole picture, squeezed, then the grid's parts by rows, padded with black."""
    height, width = pixels.shape[:2]
    down, across = best_grid(height, width)
    high, wide = prepared_size(height, width)
    picture = Image.fromarray(pixels)
    parts = np.zeros((down, across, *pixels.shape[2:]), np.uint8)
    top, left = (down - high) // 2, (across - wide) // 2
    parts[top : top + high, left : left + wide] = picture.resize((wide, high), resample)
    cut = [parts[y : y + TILE, x : x + TILE] for y in range(0, down, TILE) for x in range(0, across, TILE)]
    return np.stack([np.asarray(picture.resize((TILE, TILE), resample)), *cut])


def features_of(height: int, width: int) -> NDArray[np.int64]:
    """Which feature stands where in the prompt: tile * SIDE^2 + patch, or NEWLINE.

    First the whole picture's, then the parts' as rows across the whole grid, without the rows or columns that are
    padding, each row ended by a newline.
    """
    down, across = (side // TILE for side in best_grid(height, width))
    index = SIDE * SIDE + np.arange(down * across * SIDE * SIDE).reshape(down, across, SIDE, SIDE)
    rows = index.transpose(0, 2, 1, 3).reshape(down * SIDE, across * SIDE)
    high, wide = rows.shape
    if width / height > wide / high:
        padding = (high - int(round(height * (wide / width), 7))) // 2
        rows = rows[padding : high - padding]
    else:
        padding = (wide - int(round(width * (high / height), 7))) // 2
        rows = rows[:, padding : wide - padding]
    ended = np.concatenate((rows, np.full((len(rows), 1), NEWLINE)), axis=1)
    return np.concatenate((np.arange(SIDE * SIDE), ended.ravel()))
