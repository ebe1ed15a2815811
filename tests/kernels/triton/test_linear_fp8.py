"""Rows that are rounded to FP8 are scaled by themselves alone, and a few of them are multiplied as they are then, by
weights in FP8; products with both equal those with what they stand for within the rounding."""

from __future__ import annotations

import pytest
import torch
from grids import CUDA, DEVICE, INFINITE, random
from test_linear import FP8, LAUNCHES, REAL, SHAPES, TYPES, assert_rounded, weights
from torch import Tensor

from quire.kernels.triton import fp8_linear
from quire.kernels.triton.linear import E4M3, MIN_SHARED_MEMORY
from quire.kernels.triton.linear_tiles import SCALE_GROUP, fp8_rows_tile
from quire.kernels.triton.tiles import ENTRIES, Tile
from quire.layers import mlp
from quire.weights.fp8 import quantize

pytestmark = pytest.mark.skipif(not FP8, reason="this GPU has no FP8")
GROUPS = pytest.mark.parametrize("groups", [False, True])


def rows_in_fp8(rows: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of unlike sizes in e4m3, their scales, and what both stand for, in fp64."""
    full = random(rows, depth) * torch.logspace(-3, 1, rows, device=DEVICE)[:, None]
    numbers, by = quantize(full)
    return numbers, by, numbers.double() * by.double()[:, None]


def assert_near(got: Tensor, want: Tensor) -> None:
    """Each row by its own size: on a GPU sums over numbers in FP8 are less exact than fp32. Numbers below the dtype's
    normal ones are rounded to multiples of its least number."""
    info = torch.finfo(got.dtype)
    least = info.smallest_normal * info.eps
    for one, other in zip(got.double(), want):
        if CUDA:
            assert (one - other).norm() <= 1e-2 * other.norm() + 0.5 * least * len(other) ** 0.5
        else:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())


@LAUNCHES
@GROUPS
@pytest.mark.parametrize("shape", [*SHAPES, *REAL])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, fp8_linear.MAX_ROWS])
def test_few_rounded_rows(rows: int, shape: tuple[int, int], groups: bool, dtype: torch.dtype, pdl: bool) -> None:
    numbers, scale, full = weights(*shape, groups)
    x, by, exact = rows_in_fp8(rows, shape[1])
    bias, want = random(shape[0], dtype=dtype, seed=2), exact @ full.T
    assert_near(fp8_linear.scaled_matmul(x, by, numbers, None, scale, dtype, pdl=pdl), want)
    assert_near(fp8_linear.scaled_matmul(x, by, numbers, bias, scale, dtype, pdl=pdl), want + bias.double())


@INFINITE
@GROUPS
@TYPES
@pytest.mark.parametrize("depth", [16, 144, 1040, 1024])
@pytest.mark.parametrize("early", [0, 1, 3])
@pytest.mark.parametrize("tile", [(16, 64, 64, 3, 4), (64, 16, 128, 3, 4), (64, 32, 32, 2, 4), (32, 128, 64, 3, 8)])
def test_every_kind_of_rounded_tile(
    tile: tuple[int, ...], early: int, depth: int, dtype: torch.dtype, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either side may be the wide one; gated or not."""

    def chosen(device: torch.device, rows: int, size: int, depth: int, groups: bool) -> Tile:
        found = Tile(*tile, early)
        return (
            found._replace(depth=SCALE_GROUP, prefetch=min(early, 1) if depth % SCALE_GROUP == 0 else 0)
            if groups
            else found
        )

    monkeypatch.setattr(fp8_linear, "fp8_rows_tile", chosen)
    numbers, scale, full = weights(74, depth, groups)
    x, by, exact = rows_in_fp8(13, depth)
    factor = 4 * depth**-0.5  # products of gate and up are neither subnormal nor infinite in fp16
    want = exact @ full.T * factor
    got = fp8_linear.scaled_matmul(x, by * factor, numbers, None, scale, dtype)
    assert_near(got, want)
    gate, up = want.chunk(2, dim=-1)
    for name in ("silu", "gelu_new"):
        got = fp8_linear.scaled_matmul(x, by * factor, numbers, None, scale, dtype, name)
        assert_near(got, mlp.get_activation(name)(gate) * up)


@GROUPS
@TYPES
def test_two_rows_are_rounded_and_one_is_not(dtype: torch.dtype, groups: bool) -> None:
    numbers, scale, full = weights(48, 272, groups)
    bias = random(48, dtype=dtype, seed=2)
    x = random(3, 272)
    x[:, 0] = 448.0
    x = x.to(E4M3).to(dtype)  # rounding leaves these as they are
    assert_rounded(fp8_linear.fp8_linear_few_rows(x[:1], numbers, bias, scale), x[:1].double() @ full.T + bias.double())
    assert_near(fp8_linear.fp8_linear_few_rows(x, numbers, bias, scale), x.double() @ full.T + bias.double())
    x *= 2**-10
    gate, up = (x.double() @ full.T).chunk(2, dim=-1)
    want = mlp.get_activation("silu")(gate) * up
    assert_rounded(fp8_linear.gated_fp8_linear(x[:1], numbers, "silu", scale), want[:1])
    assert_near(fp8_linear.gated_fp8_linear(x, numbers, "silu", scale), want)
    if not CUDA:
        return
    x = random(3, 272, dtype=dtype)  # and here they don't: one row is multiplied as it is, three are not
    want = x.double() @ full.T
    errors = [
        (fp8_linear.fp8_linear_few_rows(rows, numbers, None, scale)[0] - want[0]).abs().max().item()
        for rows in (x[:1], x)
    ]
    assert errors[0] < errors[1] / 2


@INFINITE
@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
@LAUNCHES
@pytest.mark.parametrize("depth", [16, 272, 4096, 8192, 14336, 16400])
def test_rows_are_rounded_by_themselves(depth: int, dtype: torch.dtype, pdl: bool) -> None:
    wide = random(6, depth + 16, dtype=dtype)
    wide[:, depth:], x = torch.nan, wide[:, :depth]
    x[:, 0] = 448.0
    if not CUDA:  # the interpreter's rounding to e4m3 doesn't carry: only what is in it already
        x.copy_(x.to(E4M3))
    x[1:3] *= 0.25
    x[3] = 0
    x[4, -1], x[5, 3] = torch.inf, torch.nan
    numbers, scales = fp8_linear.quantize_rows(x, pdl=pdl)
    good = x[:3].float()
    assert torch.equal(scales[:3], good.abs().amax(1) / 448)
    assert torch.equal(numbers[:3].float(), (good * (448 / good.abs().amax(1))[:, None]).to(E4M3).float())
    assert (scales[3] > 0).all()
    assert (numbers[3].float() == 0).all()
    assert scales[4:].isnan().all()


@GROUPS
@TYPES
@pytest.mark.parametrize(
    "shape", [(48, 64), (100, 272), (4096, 4096), (6144, 4096), (4096, 14336)] if CUDA else [(48, 64)]
)
@pytest.mark.parametrize("rows", [1, 33, 64, 150, 1000])
def test_many_rows(rows: int, shape: tuple[int, int], dtype: torch.dtype, groups: bool) -> None:
    """Where the library multiplies, what rows are rounded to counts; else rows are as they are."""
    numbers, scale, full = weights(*shape, groups)
    x = random(rows, shape[1], dtype=dtype) * torch.logspace(-3, 1, rows, device=DEVICE).to(dtype)[:, None]
    bias = random(shape[0], dtype=dtype, seed=2)
    plain, biased = (fp8_linear.fp8_linear(x, numbers, added, scale) for added in (None, bias))
    exact = x.double() @ full.T
    if rows == 1 or len(scale) > 1 or dtype != torch.bfloat16 or shape[0] % 16:
        assert_rounded(plain, exact)
        assert_rounded(biased, exact + bias.double())
        return
    numbers_of_x, scales = fp8_linear.quantize_rows(x)
    want = (numbers_of_x.double() * scales.double()[:, None]) @ full.T
    assert_near(plain, want)
    assert_near(biased, want + bias.double())
    assert (want - exact).norm() / exact.norm() < 0.05


def test_tiles_of_rounded_rows() -> None:
    """Whole groups a step, both sides wide enough for a group of warps, and no more stages than there is room for."""
    most_rows = ENTRIES["linear/rounded/deep"]
    for rows in most_rows:
        for size, depth in ((100_000, 4096), (6144, 4096), (4096, 4096), (4096, 14336)):
            tile = fp8_rows_tile(DEVICE, rows, size, depth, False)
            assert tile.warps % 4 == 0
            assert tile.rows >= (64 if tile.columns < 64 else max(rows, 16))
            assert (tile.rows + tile.columns) * tile.depth * tile.stages <= MIN_SHARED_MEMORY
        for depth in (16, 144, 4096):
            found = fp8_rows_tile(DEVICE, rows, 4096, depth, True)
            assert found.depth == SCALE_GROUP
            assert not found.prefetch or depth % SCALE_GROUP == 0
            assert (found.rows + found.columns) * found.depth * found.stages <= MIN_SHARED_MEMORY
            assert fp8_rows_tile(DEVICE, rows, 4096, depth, False).depth % 32 == 0
    assert max(most_rows) == fp8_linear.MAX_ROWS
