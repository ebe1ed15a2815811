"""Pixels that aren't cut as a model cuts pictures are refused before anything is queued, and whatever else a request
says of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from quire.core.validation import check_pixels
from quire.errors import InputError
from quire.protocol.image_tiling import (
    AnyResTiling,
    ClosestAspectTiling,
    FittedCanvasTiling,
    HDTiling,
    ImageTiling,
    SingleTile,
)
from quire.protocol.images import ImageItem, ImagePixels

TILE, KEY = 4, bytes(32)
TILINGS: list[ImageTiling] = [
    SingleTile(TILE, 2), ClosestAspectTiling(TILE, 2, 1, 1, 6), ClosestAspectTiling(TILE, 2, 2, 2, 4,
    thumbnail=False), HDTiling(TILE, 2, 6),
    AnyResTiling(TILE, 2, tuple((TILE * high, TILE * wide) for high, wide in product((1, 2), (1, 2, 3))), 2),
    FittedCanvasTiling(TILE, 2, 4),
]  # fmt: skip
SIDES = (1, 3, 4, 5, 9, 40, 1 << 14)
FAR = (-(2**63), -1, 0, 1, 2, 3, 4, 5, 2**14 + 1, 2**31, 2**63 - 1)


def shown(tiling: ImageTiling, height: int, width: int, alone: bool = True) -> tuple[ImageItem, ImagePixels]:
    """What an honest front says of a picture of this size."""
    grid = tiling.choose_grid(height, width, alone)
    shape, rows = (tiling.num_tiles(grid), TILE, TILE, 3), tiling.num_embeds(grid)
    tokens = 1 if isinstance(tiling, FittedCanvasTiling) else rows
    return ImageItem(KEY, 0, tokens, rows, tiling.num_parts(grid)), ImagePixels(
        KEY, shape, bytes(shape[0] * 3 * TILE**2), grid
    )


def check(tiling: ImageTiling, medium: ImageItem, pixels: ImagePixels) -> None:
    check_pixels(0, medium, pixels, tiling, isinstance(tiling, FittedCanvasTiling))


def refused(tiling: ImageTiling, medium: ImageItem, pixels: ImagePixels) -> str:
    with pytest.raises(InputError, match="image 0") as caught:
        check(tiling, medium, pixels)
    assert len(str(caught.value)) < 300
    return str(caught.value)


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: type(tiling).__name__)
def test_what_is_cut_as_it_is_passes_and_nothing_else_does(tiling: ImageTiling) -> None:
    for height, width, alone in product(SIDES, SIDES, (True, False)):
        medium, pixels = shown(tiling, height, width, alone)
        check(tiling, medium, pixels)
        for field, value in product(("num_tokens", "num_embeds", "num_parts"), FAR):
            if value != getattr(medium, field):
                assert "with its tile grid it must have" in refused(tiling, medium._replace(**{field: value}), pixels)
        for at, value in product(range(4), FAR):
            sides = (*pixels.shape[:at], value, *pixels.shape[at + 1 :])
            if sides != pixels.shape:
                assert "of shape" in refused(tiling, medium, pixels._replace(shape=sides))
        for data in (b"", pixels.data[:-1], pixels.data + b"\0"):
            assert f"{len(data)} bytes" in refused(tiling, medium, pixels._replace(data=data))
        assert "of shape" in refused(tiling, medium, pixels._replace(shape=pixels.shape[:3]))
    medium, pixels = shown(tiling, 9, 5)
    grids: list[tuple[int, ...]] = [(), pixels.grid[:3], pixels.grid + pixels.grid[:1]]
    far = *product((0, 1), FAR), *product((2, 3), (-(2**63), -1, 0, 2**14 + 1, 2**63 - 1))  # and tiles of others
    grids += [(*pixels.grid[:at], value, *pixels.grid[at + 1 :]) for at, value in far]
    for grid in grids:
        if grid != pixels.grid:
            assert "has the tile grid" in refused(tiling, medium, pixels._replace(grid=grid))


def test_several_pictures_are_seen_as_one_only_where_neighbours_are() -> None:
    for tiling in TILINGS:
        (medium, pixels), (other, more) = shown(tiling, 9, 5), shown(tiling, 3, 4)
        both = medium._replace(
            num_tokens=medium.num_tokens + other.num_tokens,
            num_embeds=medium.num_embeds + other.num_embeds,
            num_parts=medium.num_parts + other.num_parts,
        )
        shape = pixels.shape[0] + more.shape[0], *pixels.shape[1:]
        joined = ImagePixels(KEY, shape, pixels.data + more.data, (*pixels.grid, *more.grid))
        if isinstance(tiling, FittedCanvasTiling):
            check(tiling, both, joined)
            assert "with its tile grid" in refused(tiling, medium, joined)
            assert "has the tile grid" in refused(replace(tiling, max_tiles=1), both, joined)
        else:
            assert "has the tile grid" in refused(tiling, both, joined)
