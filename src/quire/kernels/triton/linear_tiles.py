"""The choice of a linear layer's tile by the shape of the product. Launches nothing."""

from __future__ import annotations

import torch

from quire.kernels.triton.launch import cdiv, power_of_2
from quire.kernels.triton.tiles import Tile, card_tile

INVARIANT_FP8 = {
    "deep": Tile(32, 64, 256, 5, 4), "square": Tile(32, 64, 256, 5, 4), "middle": Tile(32, 64, 256, 4, 4),
    "tall": Tile(32, 64, 256, 4, 4, 1),
}  # fmt: skip
"""Tiles for FP8 weights and several rows, which only `batch_invariant_linear` uses. They were not measured, and are the
same on every card and for all numbers of rows. They are so wide that a warp group multiplies together, which adds 8-bit
numbers in the same order as the tiles of many rows. (A single warp, as in narrow tiles, adds them in another order, and
a row would have other bits.)"""
BULK_TILES = {Tile(64, 128, 64, 7, 4): 0.335, Tile(128, 128, 64, 5, 8): 0.58, Tile(128, 256, 64, 4, 8): 1.0}
"""Tiles for Hopper's bulk copies -> the time of one tile as a fraction of the largest tile's, while every
multiprocessor computes one (measured on an H200). All tiles give the same bits: their instructions differ in the number
of columns, and each adds products of 16 numbers of the depth to the sum before."""
SCALE_GROUP = 128
"""Numbers of a row of an FP8 weight that share a scale, if the row has several."""
MEASURED_LIMITS = {"square": (4096, 8192), "middle": (6144, 8192), "tall": (65536, 4096)}
"""The largest weights [rows, depth] for which the tiles of 8 rows were measured. For larger ones, such as those of a
rank of Llama-3-70B, the tiles of 16 rows are faster, by 5 to 30 %, because programs do not fill their last wave. "deep"
weights and the head have no limit (docs/measurements/h200_kernels_70b_tp2.json and tp4)."""


def few_rows_tile(device: torch.device, rows: int, size: int, depth: int, fp8: bool = False) -> Tile:
    """Return the tile for `rows` rows and a weight [size, depth]."""
    shape = _shape_class(size, depth, fp8)
    if not fp8 and 1 < rows <= 8:
        max_size, max_depth = MEASURED_LIMITS.get(shape, (size, depth))
        rows = 16 if size > max_size or depth > max_depth else rows
    if fp8 and rows > 1:
        tile = INVARIANT_FP8[shape]
    else:
        tile = card_tile(device, f"linear/{'fp8' if fp8 else 'half'}/{shape}", rows)
    return tile._replace(depth=min(tile.depth, max(16, power_of_2(depth))))


def fp8_rows_tile(device: torch.device, rows: int, size: int, depth: int, groups: bool) -> Tile:
    """Return the tile for `rows` rows rounded to FP8 and a weight [size, depth] in FP8. With `groups` each SCALE_GROUP
    numbers of a row have a scale. A step of the sum then has one scale, so there are more and smaller steps."""
    tile = card_tile(device, f"linear/rounded/{_shape_class(size, depth, True)}", rows)
    if not groups:
        return tile._replace(depth=min(tile.depth, max(32, power_of_2(depth))))
    stages = min(12, tile.stages * tile.depth // SCALE_GROUP)
    return tile._replace(
        depth=SCALE_GROUP, stages=stages, prefetch=min(tile.prefetch, 1) if depth % SCALE_GROUP == 0 else 0
    )


def _shape_class(size: int, depth: int, fp8: bool) -> str:
    if size > 8192:
        return "vocabulary" if size >= 65536 and not fp8 else "tall"
    return "deep" if depth > 8192 else "square" if size <= 5120 else "middle"


def bulk_is_faster(rows: int, size: int) -> bool:
    """Return True if `batch_invariant_linear` should use bulk copies where it can, for a weight [size, K]. Up to 64
    rows the narrower tiles without them are faster, unless the weight is large."""
    return rows > 64 or size > 8192


def any_rows_tile(rows: int, size: int, dtype: torch.dtype, bulk: bool, programs: int) -> Tile:
    """Return the tile of `batch_invariant_linear` for x [rows, K] and a weight [size, K] of `dtype`.

    With Hopper's `bulk` copies it is the tile with which `programs` programs, one for each multiprocessor, take the
    least time. Rows are first rounded up to a power of two, so that a warm-up with these numbers runs every tile."""
    if dtype == torch.float32:
        return Tile(32, 32, 32, 2, 4)
    if bulk:
        rows = power_of_2(rows)
        return min(BULK_TILES, key=lambda tile: _waves(rows, size, tile, programs) * BULK_TILES[tile])
    if rows > 64:
        return Tile(128, 128, 64, 4, 8)
    return Tile(64, 64, 128, 4, 4) if size > 4096 else Tile(64, 32, 256, 4, 4)


def _waves(rows: int, size: int, tile: Tile, programs: int) -> int:
    """Return the most tiles that one of `programs` programs computes."""
    return cdiv(cdiv(rows, tile.rows) * cdiv(size, tile.columns), programs)


def grouped_tile(tile: Tile, depth: int) -> Tile:
    """Return the tile for a weight with a scale for each SCALE_GROUP numbers: each step of the sum has one of these."""
    more = 4 if tile.rows == 0 else 1  # tiles of one row would be too small
    early = min(tile.prefetch, 1) if depth % SCALE_GROUP == 0 else 0
    return tile._replace(columns=tile.columns * more, depth=SCALE_GROUP, stages=tile.stages + 1, prefetch=early)
