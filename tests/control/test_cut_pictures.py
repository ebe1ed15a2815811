"""Pixels that aren't cut as a model cuts pictures are refused before anything is queued, and whatever else a request
says of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from quire.control.edge import check_pixels
from quire.errors import InputError
from quire.vocabulary.media import Medium, Pixels
from quire.vocabulary.pictures import AnyResolution, Closest, Fitted, HighDefinition, Single, Tiling

TILE, KEY = 4, bytes(32)
TILINGS: list[Tiling] = [
    Single(TILE, 2), Closest(TILE, 2, 1, 1, 6), Closest(TILE, 2, 2, 2, 4, thumbnail=False), HighDefinition(TILE, 2, 6),
    AnyResolution(TILE, 2, tuple((TILE * high, TILE * wide) for high, wide in product((1, 2), (1, 2, 3))), 2),
    Fitted(TILE, 2, 4),
]  # fmt: skip
SIDES = (1, 3, 4, 5, 9, 40, 1 << 14)
FAR = (-(2**63), -1, 0, 1, 2, 3, 4, 5, 2**14 + 1, 2**31, 2**63 - 1)


def shown(tiling: Tiling, height: int, width: int, alone: bool = True) -> tuple[Medium, Pixels]:
    """What an honest front says of a picture of this size."""
    grid = tiling.grid(height, width, alone)
    shape, rows = (tiling.tiles(grid), TILE, TILE, 3), tiling.rows(grid)
    tokens = 1 if isinstance(tiling, Fitted) else rows
    return Medium(KEY, 0, tokens, rows, tiling.parts(grid)), Pixels(KEY, shape, bytes(shape[0] * 3 * TILE**2), grid)


def check(tiling: Tiling, medium: Medium, pixels: Pixels) -> None:
    check_pixels(0, medium, pixels, tiling, isinstance(tiling, Fitted))


def refused(tiling: Tiling, medium: Medium, pixels: Pixels) -> str:
    with pytest.raises(InputError, match="picture 0") as caught:
        check(tiling, medium, pixels)
    assert len(str(caught.value)) < 300
    return str(caught.value)


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: type(tiling).__name__)
def test_what_is_cut_as_it_is_passes_and_nothing_else_does(tiling: Tiling) -> None:
    for height, width, alone in product(SIDES, SIDES, (True, False)):
        medium, pixels = shown(tiling, height, width, alone)
        check(tiling, medium, pixels)
        for field, value in product(("tokens", "rows", "parts"), FAR):
            if value != getattr(medium, field):
                assert "cut as it is, it has" in refused(tiling, medium._replace(**{field: value}), pixels)
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
            assert "is cut as" in refused(tiling, medium, pixels._replace(grid=grid))


def test_several_pictures_are_seen_as_one_only_where_neighbours_are() -> None:
    for tiling in TILINGS:
        (medium, pixels), (other, more) = shown(tiling, 9, 5), shown(tiling, 3, 4)
        both = medium._replace(
            tokens=medium.tokens + other.tokens, rows=medium.rows + other.rows, parts=medium.parts + other.parts
        )
        shape = pixels.shape[0] + more.shape[0], *pixels.shape[1:]
        joined = Pixels(KEY, shape, pixels.data + more.data, (*pixels.grid, *more.grid))
        if isinstance(tiling, Fitted):
            check(tiling, both, joined)
            assert "cut as it is" in refused(tiling, medium, joined)
            assert "is cut as" in refused(replace(tiling, most=1), both, joined)
        else:
            assert "is cut as" in refused(tiling, both, joined)
