"""How a runner encodes pictures' parts, with an encoder whose rows say where they come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.protocol.image_tiling import TileGrid
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout
from quire.protocol.model_spec import LayerSpec, ModelSpec, VisionSpec
from quire.protocol.step_plan import ImageEncoding, SlotInit, TableWrite
from quire.worker.image_inputs import ImageInputs
from quire.worker.store import Store

WIDTH, KV = 4, 256  # of a row; bytes of a page, of 4 tokens or 3 rows
SPEC = ModelSpec("test", (LayerSpec(1, 8),), 10, 64, WIDTH, 1, 8, 0, vision=VisionSpec(WIDTH, 99, 0))
GROUPS = (
    KVCacheGroup((0,), KV, KV // 4, 16, range(1, 17), run_tokens=4),
    KVCacheGroup((), KV, KV // 3, 16, range(17, 33), run_tokens=3, kind="vision"),
)
GEOMETRY = KVCacheConfig(KVCacheLayout.PAGED, 33 * KV, 4, GROUPS, 4, sight="pages", row_bytes=4 * WIDTH)


class Numbered:
    """Two rows a tile: the tile's first byte, and which of the two it is. Counts what it is given at once."""

    encodes_whole_image = False

    def __init__(self) -> None:
        self.shares: list[int] = []

    def preprocess(self, pixels: Tensor, grid: TileGrid) -> Tensor:
        return pixels.float()

    def encode(self, pixels: Tensor, grid: TileGrid | None = None) -> Tensor:
        self.shares.append(len(pixels))
        return pixels[:, 0, 0, :1, None].expand(-1, 2, 1)

    def assemble(self, features: Tensor, grid: TileGrid) -> Tensor:
        rows = torch.zeros(2 * len(features), WIDTH)
        rows[:, 0], rows[1::2, 1] = features.flatten(), 1
        return rows


def test_rows_in_pages_of_their_own() -> None:
    """Behind those of an earlier picture, which begin a page of their own; parts in three steps, eight at once."""
    eyes: Any = Numbered()
    pictures = ImageInputs(eyes, Store(GEOMETRY, SPEC, torch.float32, torch.device("cpu")), WIDTH)
    for number in (1, 2):
        tiles = np.full((12, 2, 2, 3), 100 * number, np.uint8)
        tiles += np.arange(12, dtype=np.uint8)[:, None, None, None]
        pictures.add_image(ImagePixels(bytes([number]), tiles.shape, tiles.tobytes(), (1, 12, 2, 24)))
    media = ImageItem(b"\x01", 3, 24, 24, 12), ImageItem(b"\x02", 30, 24, 24, 12)
    pictures.init_slots([SlotInit(1, 1, -1, None, 0, 64, images=media)])
    pictures.store.apply_page_ops((TableWrite(1, 1, 0, tuple(range(17, 33))),))
    pictures.encode([ImageEncoding(1, 1, 0, 0, 0, 5)])
    pictures.encode([ImageEncoding(1, 1, 0, 0, 5, 6), ImageEncoding(1, 1, 1, 8, 0, 12)])
    pictures.encode([ImageEncoding(1, 1, 0, 0, 11, 1)])
    assert eyes.shares == [5, 8, 8, 2, 1]
    assert not pictures.partial_images
    rows = pictures.embed_pages[17:33, :3, :2].flatten(0, 1)
    first, second = ([[100 * number + i // 2, i % 2] for i in range(24)] for number in (1, 2))
    assert rows[:24].tolist() == first
    assert rows[24 + 8 :].tolist() == second[8:], "what isn't needed isn't written"
