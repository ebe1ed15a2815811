"""How pictures are cut and how many rows stand for them, beside transformers' arithmetic, over thousands of sizes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as intern
from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.mllama import image_processing_pil_mllama as mllama

from quire.protocol.image_tiling import (
    AnyResTiling,
    ClosestAspectTiling,
    FittedCanvasTiling,
    HDTiling,
    SingleTile,
    TileGrid,
)


def sizes(count: int, tile: int) -> Iterator[tuple[int, int]]:
    """Of all magnitudes, and near whole tiles."""
    rng = np.random.default_rng(tile)
    for _ in range(count):
        height, width = (int(2 ** rng.uniform(0, 14)) for _ in range(2))
        yield height, width
        yield height, height
        near = rng.integers(-1, 2, 2) + tile * rng.integers(1, 7, 2)
        yield int(near[0]), int(near[1])


@pytest.mark.parametrize(("tile", "side", "area", "most"), [(384, 27, 9, 6), (336, 24, 4, 3), (100, 7, 1, 5)])
def test_any_resolution(tile: int, side: int, area: int, most: int) -> None:
    pinpoints = [[tile * rows, tile * columns] for rows in range(1, most + 1) for columns in range(1, most + 1)]
    tiling = AnyResTiling(tile, side, tuple((high, wide) for high, wide in pinpoints), area)
    theirs = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=pinpoints), num_image_tokens=side**2,
        vision_aspect_ratio=f"anyres_max_{area}",
    )  # fmt: skip
    theirs._get_unpadded_features = lambda *given: LlavaOnevisionProcessor._get_unpadded_features(theirs, *given)
    for height, width in sizes(500, tile):
        grid = tiling.choose_grid(height, width)
        rows = LlavaOnevisionProcessor._get_number_of_features(theirs, height, width, tile, tile)
        assert tiling.num_embeds(grid) == rows <= tiling.max_embeds
        assert tiling.num_parts(grid) == image_size_to_num_patches((height, width), pinpoints, tile) <= tiling.max_parts
        alone = tiling.choose_grid(height, width, is_only_image=False)
        assert (tiling.num_parts(alone), tiling.num_embeds(alone)) == (1, side**2 + 1)


@pytest.mark.parametrize(("tile", "least", "most"), [(448, 1, 12), (448, 2, 6), (100, 4, 4), (30, 1, 1)])
def test_closest(tile: int, least: int, most: int) -> None:
    tiling = ClosestAspectTiling(tile, 4, 2, least, most)
    for height, width in sizes(700, tile):
        columns, rows = intern.get_optimal_tiled_canvas((height, width), (tile, tile), least, most)
        grid = tiling.choose_grid(height, width)
        assert grid == (rows, columns, height, width)
        assert tiling.num_parts(grid) == rows * columns + (rows * columns > 1) <= tiling.max_parts
        assert tiling.num_embeds(grid) == tiling.num_parts(grid) * 4 <= tiling.max_embeds


@pytest.mark.parametrize(("tile", "most"), [(560, 4), (448, 6), (100, 1), (33, 16)])
def test_fitted(tile: int, most: int) -> None:
    tiling = FittedCanvasTiling(tile, 5, most)
    for height, width in sizes(700, tile):
        high, wide = mllama.get_optimal_tiled_canvas(height, width, most, tile)
        grid = tiling.choose_grid(height, width)
        assert (grid.rows * tile, grid.columns * tile) == (high, wide)
        assert tiling.scaled_size(grid) == mllama.get_image_size_fit_to_canvas(height, width, high, wide, tile)
        shape = mllama.convert_aspect_ratios_to_ids_np([[(grid.rows, grid.columns)]], most)
        assert tiling.aspect_ratio_id(grid) == shape[0, 0]
        assert tiling.num_embeds(grid) == grid.rows * grid.columns * 26 <= tiling.max_embeds
        assert tiling.num_parts(grid) == tiling.max_parts == 1


@pytest.mark.parametrize("most", [1, 4, 16])
def test_high_definition(most: int) -> None:
    """As its image processor counts: of the padded picture's height and width."""
    tiling = HDTiling(336, 24, most)
    for height, width in sizes(700, 336):
        ratio, scale = max(height, width) / min(height, width), 1
        while scale * np.ceil(scale / ratio) <= most:
            scale += 1
        longer = (scale - 1) * 336
        shorter = int(np.ceil(max(int(longer / ratio), 1) / 336) * 336)
        high, wide = (longer, shorter) if width < height else (shorter, longer)
        grid = tiling.choose_grid(height, width)
        assert grid == (high // 336, wide // 336, height, width)
        h, w = high, wide
        assert (
            tiling.num_embeds(grid)
            == int((h // 336 * w // 336 + 1) * 144 + 1 + (h // 336 + 1) * 12)
            <= tiling.max_embeds
        )
        assert tiling.num_parts(grid) <= tiling.max_parts


def test_single() -> None:
    tiling = SingleTile(224, 16)
    assert tiling.choose_grid(3, 4) == TileGrid(0, 0, 3, 4)
    assert (
        tiling.num_parts(tiling.choose_grid(3, 4)),
        tiling.num_embeds(tiling.choose_grid(3, 4)),
        tiling.max_embeds,
    ) == (1, 256, 256)
