"""Products for few rows and for any number equal torch's in fp64 within the rounding, with weights as they are and in
FP8, with scales by row and by group; rows do not see one another; `invariant` gives a row the same bits in every
batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from grids import CUDA, DEVICE, HALVES, INFINITE, PDL, random
from torch import Tensor

from quire.kernels.limits import MAX_SCORED_POSITIONS
from quire.kernels.triton import fp8_linear
from quire.kernels.triton import linear as kernels
from quire.kernels.triton.activation import ACTIVATIONS, act_and_mul
from quire.kernels.triton.linear import (
    E4M3,
    MAX_ROWS,
    batch_invariant_gated_linear,
    batch_invariant_linear,
    gated_linear,
    linear,
    max_fast_rows,
    supports,
)
from quire.kernels.triton.linear_tiles import (
    BULK_TILES,
    SCALE_GROUP,
    any_rows_tile,
    bulk_is_faster,
    few_rows_tile,
    fp8_rows_tile,
    grouped_tile,
)
from quire.kernels.triton.tiles import Tile, measured_card
from quire.layers import mlp
from quire.weights.fp8 import dequantize as product
from quire.weights.fp8 import expand_scales, quantize
from quire.worker.warmup import _warmup_plans

FP8 = not CUDA or torch.cuda.get_device_capability() >= (8, 9)
TYPES = pytest.mark.parametrize("dtype", HALVES)
LAUNCHES = pytest.mark.parametrize(("dtype", "pdl"), [(dtype, pdl) for dtype in HALVES for pdl in PDL])
# [N, K], also such as fill no tile and no group; and the shapes of real layers.
SHAPES = [(1, 16), (48, 64), (100, 272), (33, 528), (130, 256)]
REAL = [(6144, 4096), (20000, 1040), (28672, 4096), (4096, 14336)] if CUDA else []
ROWS = [1, 2, 3, 7, 8, 16, 17, MAX_ROWS]


def assert_rounded(got: Tensor, want: Tensor) -> None:
    """got is want (fp64) rounded to got's dtype, but for fp32 sums on the way, which tensor cores truncate."""
    scale = want.abs().max().item() + 1
    rtol, atol = 0.51 * torch.finfo(got.dtype).eps + 2e-6, (2e-5 if CUDA else 4e-6) * scale
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


def weights(size: int, depth: int, groups: bool, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """A weight in e4m3, its scales, and what both stand for, in fp64."""
    full = random(size, depth, seed=seed)
    full *= torch.logspace(-2, 2, size, device=DEVICE)[:, None] ** 0.5  # a wrong row's scale shows
    if groups:
        blocks = random(-(-size // SCALE_GROUP), -(-depth // SCALE_GROUP), seed=seed + 1).abs() * 0.1 + 0.01
        scale = expand_scales(blocks, size, depth, in_blocks=True)
        assert scale is not None
        scale = scale.contiguous()
        spread = scale.t().repeat_interleave(SCALE_GROUP, 1)[:, :depth]
        numbers = (full / spread).clamp(-448, 448).to(E4M3)
    else:
        numbers, scales = quantize(full)
        scale = scales[None].contiguous()
    return numbers, scale, product(numbers, scale).double()


class Weight(NamedTuple):
    """One of a kind; rows for it are `small` times as large, so that no product is infinite in fp16."""

    numbers: Tensor
    scale: Tensor | None
    full: Tensor
    small: float

    def wanted(self, x: Tensor, activation: str | None = None) -> Tensor:
        """In fp64."""
        out = x.double() @ self.full.T
        if activation is None:
            return out
        gate, up = out.chunk(2, dim=-1)
        return mlp.get_activation(activation)(gate) * up

    def check(self, x: Tensor, bias: Tensor, product: Any = linear, **options: bool) -> None:
        """Without the bias and with it."""
        want = self.wanted(x)
        assert_rounded(product(x, self.numbers, None, self.scale, **options), want)
        assert_rounded(product(x, self.numbers, bias, self.scale, **options), want + bias.double())

    def check_gated(self, x: Tensor, activation: str, pdl: bool) -> None:
        assert_rounded(gated_linear(x, self.numbers, activation, self.scale, pdl=pdl), self.wanted(x, activation))


def every_kind(size: int, depth: int, dtype: torch.dtype) -> Iterator[Weight]:
    plain = random(size, depth, dtype=dtype, seed=1)
    yield Weight(plain, None, plain.double(), 1.0)
    for groups in (False, True) if FP8 else ():
        yield Weight(*weights(size, depth, groups), 0.1)


@LAUNCHES
@pytest.mark.parametrize("shape", [*SHAPES, *REAL])
@pytest.mark.parametrize("rows", ROWS)
def test_linear(rows: int, shape: tuple[int, int], dtype: torch.dtype, pdl: bool) -> None:
    x, bias = random(rows, shape[1], dtype=dtype), random(shape[0], dtype=dtype, seed=2)
    for weight in every_kind(*shape, dtype):
        weight.check(x * weight.small, bias, pdl=pdl)


@pytest.mark.share(4)
@LAUNCHES
@pytest.mark.parametrize("depth", [16, 144, 1040, 1024])
@pytest.mark.parametrize("early", [0, 1, 3])
@pytest.mark.parametrize("tile", [(0, 8, 64, 3, 4), (0, 2, 128, 3, 2), (8, 16, 64, 3, 1), (16, 64, 64, 3, 4)])
def test_every_kind_of_tile(
    tile: tuple[int, ...], early: int, depth: int, dtype: torch.dtype, pdl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles loaded early are the whole depth, or a part of it, or more than it has."""
    monkeypatch.setattr(kernels, "_few_rows_tile", lambda rows, weight: Tile(*tile, early))
    x, bias = random(max(tile[0] - 1, 1), depth, dtype=dtype) * 0.2, random(74, dtype=dtype, seed=2)
    for weight in every_kind(74, depth, dtype):
        weight.check(x * weight.small, bias, pdl=pdl)
        weight.check_gated(x * weight.small, "silu", pdl)


@INFINITE
@LAUNCHES
@pytest.mark.parametrize("size", [1, 24, 100, *([14336] if CUDA else [])])
@pytest.mark.parametrize("rows", [1, 3, 16, MAX_ROWS])
def test_gated(rows: int, size: int, dtype: torch.dtype, pdl: bool) -> None:
    x = random(rows, 272, dtype=dtype) * 0.2
    for weight in every_kind(2 * size, 272, dtype):
        for name in ("silu", "relu", "gelu", "gelu_new"):
            weight.check_gated(x * weight.small, name, pdl)


@TYPES
def test_rows_with_gaps(dtype: torch.dtype) -> None:
    """Rows of x are parts of wider ones; what lies between is not read."""
    wide = random(5, 400, dtype=dtype)
    wide[:, 272:] = torch.nan
    for weight in every_kind(50, 272, dtype):
        weight.check((wide * weight.small)[:, :272], random(50, dtype=dtype, seed=2))


def test_what_is_supported() -> None:
    for dtype in (torch.bfloat16, torch.float16, E4M3):
        weight = torch.empty(8, 32, dtype=dtype)
        assert supports(weight, 1)
        assert supports(weight, MAX_ROWS)
        assert not supports(weight, MAX_ROWS + 1)
        assert not supports(torch.empty(8, 40, dtype=dtype), 1)
        assert not supports(torch.empty(32, 8, dtype=dtype).T, 1)
    for dtype in (torch.float32, torch.float8_e5m2):
        assert not supports(torch.empty(8, 32, dtype=dtype), 1)


@TYPES
@pytest.mark.parametrize("shape", [(16, 16), (100, 272), (136, 528), *REAL])
@pytest.mark.parametrize("rows", [1, 5, 64, 65, 150])
def test_invariant(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, bias = random(rows, shape[1], dtype=dtype), random(shape[0], dtype=dtype, seed=2)
    for weight in every_kind(*shape, dtype):
        weight.check(x * weight.small, bias, batch_invariant_linear)


@TYPES
def test_invariant_without_bulk_copies(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(130, 272, dtype=dtype), random(100, 272, dtype=dtype, seed=1)
    want = batch_invariant_linear(x, weight)
    monkeypatch.setattr(kernels, "_bulk_copies", lambda *tensors: False)
    assert_rounded(batch_invariant_linear(x, weight), x.double() @ weight.double().T)
    if CUDA:
        assert torch.equal(batch_invariant_linear(x, weight), want)
    part, narrow = x[:, 1:257], weight[:, :256].contiguous()
    assert_rounded(batch_invariant_linear(part, narrow), part.double() @ narrow.double().T)


@pytest.mark.skipif(not CUDA, reason="the interpreter multiplies with NumPy, whose order of summation is its own")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (1000, 1040), (2304, 768), (6144, 768), (768, 2048)],
)
def test_a_row_has_the_same_bits_in_every_batch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = random(2048, shape[1], dtype=dtype)
    for numbers, scale, _, _ in every_kind(*shape, dtype):
        if scale is not None and dtype == torch.float32:
            continue
        want = batch_invariant_linear(x, numbers, None, scale)
        for rows in (1, 2, 5, 8, 9, 16, 17, 32, 33, 64, 65, 100, 257, 1024, 1025):
            for first in (0, 7, 2048 - rows):
                some, same = x[first : first + rows], want[first : first + rows]
                for pdl in PDL:
                    assert torch.equal(batch_invariant_linear(some, numbers, None, scale, pdl=pdl), same)
                if scale is None and rows > 1 and supports(numbers, rows):  # the fast product too, but for a single row
                    assert torch.equal(linear(some, numbers), same)


@pytest.mark.parametrize(
    ("size", "depth", "rows"),
    [(4096, 14336, 16), (3584, 18944, 16), (8192, 14336, 32), (4096, 8192, 32), (28672, 4096, 32)],
)
def test_cublas_divides_the_depth_of_deep_weights(
    size: int, depth: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_multiprocessors", lambda device: 132)
    assert max_fast_rows(torch.empty(size, depth, dtype=torch.bfloat16, device="meta")) == rows


@pytest.mark.skipif(not CUDA, reason="the interpreter multiplies with NumPy, whose order of summation is its own")
@TYPES
def test_all_tiles_give_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of many rows, and the card's tiles of several rows, which may have a single row too."""
    x, weight = random(1025, 4096, dtype=dtype), random(4096, 4096, dtype=dtype, seed=1)
    entries = measured_card(DEVICE).tiles.items()
    few = {tile for entry, by_rows in entries if entry.startswith("linear/half") for tile in by_rows.values()}
    want = linear(x[:MAX_ROWS], weight)
    for tile in (tile for tile in few if tile.rows > 0):
        for rows in {1, 2, tile.rows}:
            for pdl in PDL:
                assert torch.equal(linear(x[:rows], weight, pdl=pdl, tile=tile), want[:rows]), tile
    for tile in BULK_TILES:
        monkeypatch.setattr(kernels, "any_rows_tile", lambda *shape, tile=tile: tile)
        whole = batch_invariant_linear(x, weight)
        assert torch.equal(whole[:MAX_ROWS], want), tile
        for rows in (65, 100, 128, 129, 257, 512, 1000):
            for pdl in PDL:
                assert torch.equal(batch_invariant_linear(x[:rows], weight, pdl=pdl), whole[:rows]), tile


@pytest.mark.parametrize("dtype", [torch.float16, *HALVES])
@pytest.mark.parametrize("rows", [1, 2, 9, MAX_ROWS])
def test_invariant_gated(rows: int, dtype: torch.dtype) -> None:
    """Sums are rounded before the activation, as if it was another launch. These sums are exact until then."""
    x = random(rows, 272, dtype=dtype).mul(64).round() / 64
    weight = random(2 * 100, 272, dtype=dtype, seed=1).mul(2).round()
    sums = x.double() @ weight.double().T
    rounded = sums.to(dtype).double()
    assert dtype == torch.float32 or not torch.equal(rounded, sums)
    gate, up = rounded.chunk(2, dim=-1)
    for pdl in PDL:
        got = batch_invariant_gated_linear(x, weight, "relu", pdl=pdl)
        assert torch.equal(got, (gate.clamp(min=0) * up).to(dtype))
        for activation in set(ACTIVATIONS) - {"clamped_swiglu"} if CUDA else ():
            for numbers, scale, _, _ in every_kind(*weight.shape, dtype):
                want = act_and_mul(batch_invariant_linear(x, numbers, None, scale), activation)
                got = batch_invariant_gated_linear(x, numbers, activation, scale, pdl=pdl)
                assert torch.equal(got.nan_to_num(), want.nan_to_num()), activation


@pytest.mark.parametrize(
    ("rows", "size", "tile"),
    [(64, 28672, (64, 128)), (65, 4096, (64, 128)), (256, 4096, (64, 128)), (128, 28672, (128, 256)),
     (256, 6144, (128, 128)), (512, 4096, (128, 128)), (512, 6144, (128, 256)), (8192, 28672, (128, 256))],
)  # fmt: skip
def test_tiles_of_many_rows_fill_waves(rows: int, size: int, tile: tuple[int, int]) -> None:
    """Of 132 multiprocessors."""
    assert any_rows_tile(rows, size, torch.bfloat16, True, 132)[:2] == tile


@pytest.mark.parametrize("tile", BULK_TILES, ids=str)
def test_bulk_tiles_fit_in_shared_memory(tile: Tile) -> None:
    """The stages of x and weight, and half a tile of results."""
    numbers = tile.stages * (tile.rows + tile.columns) * tile.depth + tile.rows * tile.columns // 2
    assert 2 * numbers <= 232_448


@pytest.mark.parametrize("slots", [4, 256])
@pytest.mark.parametrize("tokens", [16, 100, 1024, 8192])
def test_every_tile_is_rehearsed(tokens: int, slots: int) -> None:
    """By the rehearsal at start: whatever the tokens of a step, and whatever the rows that have logits."""

    def tiles(rows: int, size: int) -> set[Tile]:
        few = {few_rows_tile(DEVICE, r, size, 4096) for r in (rows, max(rows, 2)) if rows <= MAX_ROWS}
        few |= {fp8_rows_tile(DEVICE, rows, size, 4096, False)} if 1 < rows <= fp8_linear.MAX_ROWS else set()
        return few | {
            any_rows_tile(rows, size, torch.bfloat16, bulk, 132) for bulk in (False, bulk_is_faster(rows, size))
        }

    def of_all(numbers: Iterable[int], size: int) -> set[Tile]:
        return set.union(*(tiles(n, size) for n in numbers))

    plans = list(_warmup_plans(tokens, 4096, slots, True))
    computed = {sum(len(row.tokens) for row in plan.slices) for plan in plans}
    scored = {len(row.score_tokens) for plan in plans for row in plan.slices if row.score_tokens}
    for size in (6144, 4096, 1024, 28672):
        assert of_all(range(1, tokens + 1), size) == of_all(computed, size)
    assert of_all(range(1, min(tokens, MAX_SCORED_POSITIONS) + 1), 128256) == of_all(scored, 128256)


@pytest.mark.parametrize(
    ("size", "depth", "rows"),
    [(6144, 4096, 8), (4096, 4096, 8), (28672, 4096, 8), (4096, 14336, 8), (128256, 4096, 8), (2560, 8192, 8),
     (5120, 8192, 16), (8192, 4096, 16), (8192, 2048, 16), (14336, 8192, 16), (8192, 14336, 8), (128256, 8192, 8)],
)  # fmt: skip
def test_few_rows_of_larger_weights_have_the_tiles_of_more(size: int, depth: int, rows: int) -> None:
    """Llama-3-8B's have those that were measured with them; so do the head and what is deep of Llama-3-70B's."""
    assert {few_rows_tile(DEVICE, few, size, depth).rows for few in (2, 5, 8)} == {rows}
    assert few_rows_tile(DEVICE, 1, size, depth).rows == 0
    assert few_rows_tile(DEVICE, 9, size, depth).rows == 16


def test_tiles_of_groups_hold_whole_ones() -> None:
    """Every step of the sum has one scale a row, also where a part of the weight is loaded early."""
    for rows, (size, depth) in ((1, (4096, 4096)), (1, (4096, 14336)), (2, (4096, 4096)), (32, (100_000, 4096))):
        tile = few_rows_tile(DEVICE, rows, size, depth, fp8=True)
        for deep in (16, 144, 4096):
            found = grouped_tile(tile, deep)
            assert (found.depth, found.rows) == (SCALE_GROUP, tile.rows)
            assert not found.prefetch or deep % SCALE_GROUP == 0
