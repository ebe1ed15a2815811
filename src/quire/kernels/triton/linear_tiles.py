"""Tile sizes of a linear layer's kernels, by the shape of the product. Launches nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.kernels.triton.launch import power_of_2


class LinearTile(NamedTuple):
    """The tile of one program, and its launch options."""

    rows: int  # of x
    columns: int  # of the result: rows of the weight
    depth: int  # of the dot products
    stages: int
    warps: int
    prefetch: int = 0  # tiles of the weight that are loaded before the wait for the preceding kernels


# By the most rows of x and the weight's shape. Measured on one H200 in a whole step of Llama-3-8B in bf16, with small
# kernels between the products: down is "deep", o "square", qkv "middle", gate_up "tall", the head "vocabulary". One row
# needs no tensor cores. Narrow tiles occupy every multiprocessor, wide ones read x less often.
TILES = {
    1: {
        "deep": LinearTile(0, 8, 512, 3, 4, 3),
        "square": LinearTile(0, 8, 512, 3, 4, 2),
        "middle": LinearTile(0, 8, 512, 3, 2, 1),
        "tall": LinearTile(0, 4, 2048, 3, 4),
        "vocabulary": LinearTile(0, 4, 2048, 3, 4),
    },
    8: {
        "deep": LinearTile(8, 32, 512, 4, 4, 1),
        "square": LinearTile(8, 32, 512, 3, 2, 2),
        "middle": LinearTile(8, 16, 256, 6, 1, 1),
        "tall": LinearTile(8, 32, 128, 4, 2, 2),
        "vocabulary": LinearTile(8, 32, 256, 3, 2),
    },
    16: {
        "deep": LinearTile(16, 32, 256, 6, 4),
        "square": LinearTile(16, 64, 256, 4, 4, 1),
        "middle": LinearTile(16, 64, 128, 6, 4, 1),
        "tall": LinearTile(16, 64, 128, 4, 4, 1),
        "vocabulary": LinearTile(16, 128, 128, 3, 8),
    },
    32: {
        "deep": LinearTile(32, 64, 128, 6, 4),
        "square": LinearTile(32, 64, 128, 6, 4),
        "middle": LinearTile(32, 64, 128, 5, 4),
        "tall": LinearTile(32, 64, 128, 4, 4, 1),
        "vocabulary": LinearTile(32, 128, 128, 4, 8),
    },
}

# The same for FP8 weights, whose tiles have half as many bytes. Those of one row are measured as above; those of more
# rows, which only `batch_invariant_linear` uses, are derived, and have one width for all numbers of rows: wide enough
# for a warp group to multiply together, which adds 8-bit numbers in the same order as the tiles of many rows. (A single
# warp, as in narrow tiles, adds them in another order, and a row would have other bits.)
TILES_FP8 = {
    1: {
        "deep": LinearTile(0, 8, 1024, 3, 4),
        "square": LinearTile(0, 4, 1024, 3, 2),
        "middle": LinearTile(0, 8, 512, 4, 2, 1),
        "tall": LinearTile(0, 8, 512, 5, 4),
    },
    32: {
        "deep": LinearTile(32, 64, 256, 5, 4),
        "square": LinearTile(32, 64, 256, 5, 4),
        "middle": LinearTile(32, 64, 256, 4, 4),
        "tall": LinearTile(32, 64, 256, 4, 4, 1),
    },
}

# For FP8 weights and rows that are rounded to FP8 too; measured with the rounding, weights not in the cache. A warp
# group multiplies 64 lines of one side by 16 or more of the other in FP8; a single warp, as in smaller tiles, would
# convert them first. In tiles of less than 64 columns, which are enough to occupy every multiprocessor, the 64 lines
# are rows of x, most of them padding.
TILES_ROUNDED = {
    16: {
        "deep": LinearTile(16, 64, 256, 6, 4, 1),
        "square": LinearTile(16, 64, 256, 6, 4),
        "middle": LinearTile(16, 64, 256, 6, 4, 1),
        "tall": LinearTile(16, 64, 256, 4, 4),
    },
    32: {
        "deep": LinearTile(64, 32, 256, 6, 4),
        "square": LinearTile(64, 32, 256, 6, 4, 1),
        "middle": LinearTile(32, 64, 256, 6, 4),
        "tall": LinearTile(32, 64, 256, 4, 4),
    },
    64: {
        "deep": LinearTile(64, 32, 256, 6, 4),
        "square": LinearTile(64, 32, 256, 6, 4),
        "middle": LinearTile(64, 64, 256, 4, 4, 1),
        "tall": LinearTile(64, 64, 128, 6, 4),
    },
}
SCALE_GROUP = 128
"""Numbers of a row of an FP8 weight that share a scale, if the row has several."""


# The largest weights (rows, depth) for which the tiles of 8 rows were measured. For larger ones, such as a rank's of
# Llama-3-70B, the tiles of 16 rows are faster, by 5 to 30 % ("deep" weights and the head aside:
# docs/measurements/h200_kernels_70b_tp2.json and tp4), because programs do not fill their last wave.
MEASURED_LIMITS = {"square": (4096, 8192), "middle": (6144, 8192), "tall": (65536, 4096)}


def few_rows_tile(rows: int, size: int, depth: int, fp8: bool = False) -> LinearTile:
    """Return the tile for `rows` rows and a weight [size, depth]."""
    if not fp8 and 1 < rows <= 8:
        most, deepest = MEASURED_LIMITS.get(_shape_class(size, depth, TILES[8]), (size, depth))
        rows = 16 if size > most or depth > deepest else rows
    tile = _lookup(TILES_FP8 if fp8 else TILES, rows, size, depth)
    return tile._replace(depth=min(tile.depth, max(16, power_of_2(depth))))


def fp8_rows_tile(rows: int, size: int, depth: int, groups: bool) -> LinearTile:
    """Return the tile for a weight [size, depth] in FP8 and rows rounded to FP8. `groups`: each SCALE_GROUP numbers
    have a scale, and each step of the sum has one of these, so that there are more and smaller steps."""
    tile = _lookup(TILES_ROUNDED, rows, size, depth)
    if not groups:
        return tile._replace(depth=min(tile.depth, max(32, power_of_2(depth))))
    stages = min(12, tile.stages * tile.depth // SCALE_GROUP)
    return tile._replace(
        depth=SCALE_GROUP, stages=stages, prefetch=min(tile.prefetch, 1) if depth % SCALE_GROUP == 0 else 0
    )


def _lookup(tiles: dict[int, dict[str, LinearTile]], rows: int, size: int, depth: int) -> LinearTile:
    block = next(block for block in tiles if rows <= block)
    return tiles[block][_shape_class(size, depth, tiles[block])]


def _shape_class(size: int, depth: int, named: dict[str, LinearTile]) -> str:
    if size > 8192:
        return "vocabulary" if size >= 65536 and "vocabulary" in named else "tall"
    return "deep" if depth > 8192 else "square" if size <= 5120 else "middle"


def any_rows_tile(rows: int, size: int, dtype: torch.dtype, bulk: bool) -> LinearTile:
    """Return the tile of `batch_invariant_linear`, with or without Hopper's bulk copies; measured as
    `few_rows_tile`."""
    if dtype == torch.float32:
        return LinearTile(32, 32, 32, 2, 4)
    if bulk:
        return LinearTile(128, 128, 64, 5, 8) if rows <= 1024 else LinearTile(128, 256, 64, 4, 8)
    if rows > 64:
        return LinearTile(128, 128, 64, 4, 8)
    return LinearTile(64, 64, 128, 4, 4) if size > 4096 else LinearTile(64, 32, 256, 4, 4)


def grouped_tile(tile: LinearTile, depth: int) -> LinearTile:
    """Return the tile for a weight with a scale for each SCALE_GROUP numbers: each step of the sum has one of these."""
    more = 4 if tile.rows == 0 else 1  # tiles of one row would be too small
    early = min(tile.prefetch, 1) if depth % SCALE_GROUP == 0 else 0
    return tile._replace(columns=tile.columns * more, depth=SCALE_GROUP, stages=tile.stages + 1, prefetch=early)
