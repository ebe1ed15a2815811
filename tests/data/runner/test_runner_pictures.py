"""What a runner does with pictures, by plans made by hand: parts in their turn, rows in their pages, in pages of keys
and values to come, or nowhere, and in the places of embeddings; with an encoder whose rows say where they come from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.data.runner.inputs import Flat
from quire.data.runner.pictures import Pictures
from quire.data.runner.store import Store
from quire.errors import StartupError
from quire.vocabulary.media import Medium, Pixels
from quire.vocabulary.pictures import Closest, Grid
from quire.vocabulary.plan import Birth, Encode, Row, Table
from quire.vocabulary.specs import Geometry, Group, LayerSpec, Layout, ModelSpec, VisionSpec

WIDTH, SIDE, TOKENS, SLOTS = 4, 2, 4, 4
SPEC = ModelSpec("test", (LayerSpec(1, 8),), 10, 64, WIDTH, 1, 8, 0, vision=VisionSpec(WIDTH, 99, 0))
KV = 2 * 8 * 4 * TOKENS  # bytes of a page of keys and values


class Numbered:
    """Two rows a tile: the tile's first byte, and which of the two it is. Counts what it is given at once."""

    tiling = Closest(SIDE, SIDE, 1, 1, 99, False)
    whole = False

    def __init__(self) -> None:
        self.shares: list[int] = []

    def open(self, pixels: Tensor, grid: Grid) -> Tensor:
        assert pixels.dtype == torch.uint8
        return pixels.float()

    def encode(self, pixels: Tensor, grid: Grid | None = None) -> Tensor:
        self.shares.append(len(pixels))
        return pixels[:, 0, 0, :1, None].expand(-1, 2, 1).clone()

    def join(self, features: Tensor, grid: Grid) -> Tensor:
        at = torch.arange(2).repeat(len(features))
        both = torch.stack((features.flatten(), at), 1)
        return torch.cat((both, both.new_zeros(len(both), WIDTH - 2)), 1)


def geometry_of(sight: str, page_rows: int = 3) -> Geometry:
    """16 pages of tokens, and as many of rows behind them."""
    groups = [Group((0,), KV, KV // TOKENS, 16, range(1, 17), run_tokens=TOKENS)]
    if sight == "pages":
        groups.append(Group((), KV, KV // page_rows, 16, range(17, 33), run_tokens=page_rows, kind="vision"))
    return Geometry(Layout.PAGED, 33 * KV, SLOTS, tuple(groups), 4, sight=sight, row_bytes=4 * WIDTH)


def pictures_of(sight: str, debug: bool = False) -> tuple[Pictures, Store, Numbered]:
    store = Store(geometry_of(sight), SPEC, torch.float32, torch.device("cpu"), debug)
    store.sized[KV].fill_(torch.nan)
    eyes: Any = Numbered()
    found = Pictures(eyes, store, WIDTH)
    for number in (1, 2):
        tiles = np.full((12, SIDE, SIDE, 3), 0, np.uint8)
        tiles[:] = (number * 100 + np.arange(12))[:, None, None, None]
        found.see(Pixels(bytes([number]), tiles.shape, tiles.tobytes(), (1, 12, SIDE, 12 * SIDE)))
    return found, store, eyes


def medium(number: int, start: int, parts: int = 12) -> Medium:
    return Medium(bytes([number]), start, 2 * parts, 2 * parts, parts)


def born(slot: int, *media: Medium) -> Birth:
    return Birth(slot, slot, -1, None, 0, 64, media=media)


def put(pictures: Pictures, *rows: Row) -> Any:
    """Embeddings, all -1, with rows of pictures in their places; None if they are nobody's."""
    flat = Flat.of(rows)
    shown = pictures.of(flat)
    assert pictures.touch(rows) or shown is None
    return None if shown is None else shown(torch.full((flat.inputs.shape[1], WIDTH), -1.0))


def row(slot: int, start: int, count: int) -> Row:
    return Row(slot, (5,) * count, start, 0)


def expected(number: int, first: int, stop: int) -> list[list[float]]:
    return [[number * 100.0 + at // 2, float(at % 2)] for at in range(first, stop)]


def test_rows_in_pages_of_their_own() -> None:
    """Behind those of an earlier picture, which begin a page of their own; parts in three steps."""
    pictures, store, eyes = pictures_of("pages")
    pictures.born([born(1, medium(1, 3), medium(2, 30))])
    pages = tuple(range(17, 33))
    store.replay((Table(1, 1, 0, pages),))
    pictures.encode([Encode(1, 1, 0, 0, 0, 5)])
    pictures.encode([Encode(1, 1, 0, 0, 5, 6), Encode(1, 1, 1, 8, 0, 12)])
    assert put(pictures, row(2, 0, 9)) is None
    pictures.encode([Encode(1, 1, 0, 0, 11, 1)])
    assert eyes.shares == [5, 8, 8, 2, 1], "eight at once"
    assert not pictures.coming
    x = put(pictures, row(3, 0, 2), row(1, 0, 32))
    assert x[: 2 + 3].eq(-1).all()
    assert x[2 + 3 : 2 + 27, :2].tolist() == expected(1, 0, 24)
    assert x[2 + 27 : 2 + 30].eq(-1).all()
    assert x[2 + 30 :, :2].tolist() == expected(2, 0, 2)
    flat = store.views[1][17:20].view(3, -1)[:, : 3 * WIDTH].reshape(9, WIDTH)
    assert flat[:, :2].tolist() == expected(1, 0, 9), "three rows a page"
    assert flat.isfinite().all()


def test_what_was_given_up_is_dropped_when_another_picture_is_begun() -> None:
    """A preempted sequence's parts; but not those of a picture that the same step ends."""
    pictures, store, _ = pictures_of("pages")
    pictures.born([born(1, medium(1, 0)), born(2, medium(2, 0))])
    for slot in (1, 2):
        store.replay((Table(slot, 1, 0, tuple(range(9 + 8 * slot, 17 + 8 * slot))),))
    pictures.encode([Encode(1, 1, 0, 0, 0, 5)])
    pictures.encode([Encode(1, 2, 0, 0, 0, 3)])
    assert list(pictures.coming) == [(2, 0)]
    pictures.encode([Encode(1, 2, 0, 0, 3, 9), Encode(1, 1, 0, 0, 0, 1)])
    assert list(pictures.coming) == [(1, 0)]
    pictures.encode([Encode(1, 1, 0, 0, 1, 11)])
    x = put(pictures, row(1, 0, 24))
    assert x[:, :2].tolist() == expected(1, 0, 24)
    assert not pictures.coming


@pytest.mark.parametrize("chunk", [1, 3, 24])
def test_rows_inside_pages_of_keys_and_values(chunk: int) -> None:
    """The row of a position lies in the page behind its token's; those that were passed aren't written."""
    pictures, store, _ = pictures_of("inside")
    pictures.born([born(1, medium(1, 6))])
    store.replay((Table(1, 0, 0, tuple(range(1, 10))),))
    pictures.encode([Encode(0, 1, 0, 2, 0, 12)])
    for start in range(0, 30, chunk):
        x = put(pictures, row(1, start, min(chunk, 30 - start)))
        first, stop = max(start, 6), min(start + chunk, 30)
        if first >= stop:
            assert x is None
            continue
        assert x[first - start :, :2].tolist() == expected(1, first - 6, stop - 6)
        for position in range(start, stop):  # keys and values come now
            store.views[0][1 + position // TOKENS, 16 * (position % TOKENS) : 16 * (position % TOKENS + 1)] = 7.0
    pictures.encode([Encode(0, 1, 0, 2, 0, 12, 9)])
    assert store.views[0][1 + 3, : 3 * WIDTH].eq(7).all(), "what isn't needed isn't written"
    assert store.views[0][1 + 4, : 4 * WIDTH].view(4, WIDTH)[-1, :2].tolist() == expected(1, 9, 10)[0]


def test_rows_of_one_step() -> None:
    pictures, _, _ = pictures_of("off")
    pictures.born([born(1, medium(1, 0)), born(2, medium(2, 4), medium(1, 28))])
    pictures.encode([Encode(-1, 1, 0, 0, 0, 12), Encode(-1, 2, 0, 0, 0, 12), Encode(-1, 2, 1, 0, 0, 12)])
    x = put(pictures, row(2, 20, 12), row(1, 10, 4))
    assert x[:8, :2].tolist() == expected(2, 16, 24)
    assert x[8:12, :2].tolist() == expected(1, 0, 4)
    assert x[12:, :2].tolist() == expected(1, 10, 14)
    pictures.passed()
    assert not pictures.passing
    with pytest.raises(KeyError):
        put(pictures, row(1, 14, 4))


def test_a_slot_is_another_sequences() -> None:
    """What its last one was encoding is void, and a picture may begin again."""
    pictures, store, _ = pictures_of("pages")
    store.replay((Table(1, 1, 0, tuple(range(17, 33))),))
    pictures.born([born(1, medium(1, 0)), born(2, medium(2, 0))])
    pictures.encode([Encode(1, 1, 0, 0, 0, 5)])
    pictures.born([born(1, medium(2, 0))])
    assert not pictures.coming
    pictures.encode([Encode(1, 1, 0, 0, 0, 4)])
    pictures.encode([Encode(1, 1, 0, 0, 0, 12)])
    x = put(pictures, row(1, 0, 24))
    assert x[:, :2].tolist() == expected(2, 0, 24)
    pictures.born([born(1)])
    assert put(pictures, row(1, 0, 24)) is None
    assert not pictures.touch([row(2, 24, 3)]), "behind its pictures"


def test_parts_come_in_order() -> None:
    pictures, store, _ = pictures_of("pages")
    store.replay((Table(1, 1, 0, tuple(range(17, 33))),))
    pictures.born([born(1, medium(1, 0))])
    pictures.encode([Encode(1, 1, 0, 0, 0, 5)])
    with pytest.raises(AssertionError, match="part 6"):
        pictures.encode([Encode(1, 1, 0, 0, 6, 6)])


def test_pixels_stay_until_they_are_forgotten() -> None:
    pictures, _, _ = pictures_of("pages")
    assert set(pictures.held) == {b"\x01", b"\x02"}
    pictures.forget(b"\x01")
    pictures.forget(b"\x03")
    assert set(pictures.held) == {b"\x02"}


def test_an_encoder_that_makes_too_few_rows() -> None:
    pictures, store, _ = pictures_of("pages")
    store.replay((Table(1, 1, 0, tuple(range(17, 33))),))
    pictures.born([born(1, medium(1, 0)._replace(rows=25))])
    with pytest.raises(AssertionError, match="24 rows of a picture that has 25"):
        pictures.encode([Encode(1, 1, 0, 0, 0, 12)])


def test_pages_too_small_for_rows_are_refused() -> None:
    small = replace(geometry_of("pages"), row_bytes=KV)
    with pytest.raises(StartupError, match="doesn't hold 3 tokens"):
        Store(small, SPEC, torch.float32, torch.device("cpu"))
