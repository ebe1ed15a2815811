"""How a runner encodes pictures' parts, with an encoder whose rows say where they come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.data.runner.pictures import Pictures
from quire.data.runner.store import Store
from quire.vocabulary.media import Medium, Pixels
from quire.vocabulary.pictures import Grid
from quire.vocabulary.plan import Birth, Encode, Table
from quire.vocabulary.specs import Geometry, Group, LayerSpec, Layout, ModelSpec, VisionSpec

WIDTH, KV = 4, 256  # of a row; bytes of a page, of 4 tokens or 3 rows
SPEC = ModelSpec("test", (LayerSpec(1, 8),), 10, 64, WIDTH, 1, 8, 0, vision=VisionSpec(WIDTH, 99, 0))
GROUPS = (
    Group((0,), KV, KV // 4, 16, range(1, 17), run_tokens=4),
    Group((), KV, KV // 3, 16, range(17, 33), run_tokens=3, kind="vision"),
)
GEOMETRY = Geometry(Layout.PAGED, 33 * KV, 4, GROUPS, 4, sight="pages", row_bytes=4 * WIDTH)


class Numbered:
    """Two rows a tile: the tile's first byte, and which of the two it is. Counts what it is given at once."""

    whole = False

    def __init__(self) -> None:
        self.shares: list[int] = []

    def open(self, pixels: Tensor, grid: Grid) -> Tensor:
        return pixels.float()

    def encode(self, pixels: Tensor, grid: Grid | None = None) -> Tensor:
        self.shares.append(len(pixels))
        return pixels[:, 0, 0, :1, None].expand(-1, 2, 1)

    def join(self, features: Tensor, grid: Grid) -> Tensor:
        rows = torch.zeros(2 * len(features), WIDTH)
        rows[:, 0], rows[1::2, 1] = features.flatten(), 1
        return rows


def test_rows_in_pages_of_their_own() -> None:
    """Behind those of an earlier picture, which begin a page of their own; parts in three steps, eight at once."""
    eyes: Any = Numbered()
    pictures = Pictures(eyes, Store(GEOMETRY, SPEC, torch.float32, torch.device("cpu")), WIDTH)
    for number in (1, 2):
        tiles = np.full((12, 2, 2, 3), 100 * number, np.uint8)
        tiles += np.arange(12, dtype=np.uint8)[:, None, None, None]
        pictures.see(Pixels(bytes([number]), tiles.shape, tiles.tobytes(), (1, 12, 2, 24)))
    media = Medium(b"\x01", 3, 24, 24, 12), Medium(b"\x02", 30, 24, 24, 12)
    pictures.born([Birth(1, 1, -1, None, 0, 64, media=media)])
    pictures.store.replay((Table(1, 1, 0, tuple(range(17, 33))),))
    pictures.encode([Encode(1, 1, 0, 0, 0, 5)])
    pictures.encode([Encode(1, 1, 0, 0, 5, 6), Encode(1, 1, 1, 8, 0, 12)])
    pictures.encode([Encode(1, 1, 0, 0, 11, 1)])
    assert eyes.shares == [5, 8, 8, 2, 1]
    assert not pictures.coming
    rows = pictures.rows[17:33, :3, :2].flatten(0, 1)
    first, second = ([[100 * number + i // 2, i % 2] for i in range(24)] for number in (1, 2))
    assert rows[:24].tolist() == first
    assert rows[24 + 8 :].tolist() == second[8:], "what isn't needed isn't written"
