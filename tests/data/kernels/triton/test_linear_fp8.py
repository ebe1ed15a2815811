"""Products with weights in FP8, for few rows and for any number, equal those with what the weights stand for within the
rounding, with scales by row and by group; rows that are rounded to FP8 are scaled by themselves alone, and a few of
them are multiplied as they are then."""

from __future__ import annotations

import pytest
import torch
from test_linear import CUDA, DEVICE, INFINITE, PDL, assert_rounded, random
from torch import Tensor

from quire.data.kernels.triton import linear as kernels
from quire.data.kernels.triton import scaled
from quire.data.kernels.triton.linear import E4M3, MAX_ROWS, SHARED, gated, invariant, linear, supports
from quire.data.kernels.triton.tiles import (
    GROUP,
    TILES_FP8,
    TILES_ROUNDED,
    Tile,
    few_rows,
    grouped,
    rounded_rows,
)
from quire.data.layers import mlp
from quire.data.weights.fp8 import by_rows, rounded
from quire.data.weights.fp8 import scaled as product

FP8 = not CUDA or torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(not FP8, reason="this GPU has no FP8")
DTYPES = (torch.float16, torch.bfloat16) if CUDA else (torch.float32,)
# [N, K], also such as fill no tile and no group; and the shapes of real layers.
SHAPES = [(1, 16), (48, 64), (100, 272), (33, 528), (130, 256)]
REAL = [(6144, 4096), (28672, 4096), (4096, 14336)] if CUDA else []
ROWS = [1, 2, 3, 7, 8, 16, 17, MAX_ROWS]


def weights(size: int, depth: int, groups: bool, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """A weight in e4m3, its scales, and what both stand for, in fp64."""
    full = random(size, depth, dtype=torch.float32, seed=seed)
    full *= torch.logspace(-2, 2, size, device=DEVICE)[:, None] ** 0.5  # a wrong row's scale shows
    if groups:
        blocks = random(-(-size // GROUP), -(-depth // GROUP), dtype=torch.float32, seed=seed + 1).abs() * 0.1 + 0.01
        scale = by_rows(blocks, size, depth, blocks=True)
        assert scale is not None
        scale = scale.contiguous()
        spread = scale.t().repeat_interleave(GROUP, 1)[:, :depth]
        numbers = (full / spread).clamp(-448, 448).to(E4M3)
    else:
        numbers, scales = rounded(full)
        scale = scales[None].contiguous()
    return numbers, scale, product(numbers, scale).double()


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, *REAL])
@pytest.mark.parametrize("rows", ROWS)
def test_few_rows(rows: int, shape: tuple[int, int], groups: bool, dtype: torch.dtype, pdl: bool) -> None:
    numbers, scale, full = weights(*shape, groups)
    x = random(rows, shape[1], dtype=dtype) * 0.05
    bias, want = random(shape[0], dtype=dtype, seed=2), x.double() @ full.T
    assert_rounded(linear(x, numbers, None, scale, pdl=pdl), want)
    assert_rounded(linear(x, numbers, bias, scale, pdl=pdl), want + bias.double())


@pytest.mark.share(4)
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [16, 144, 1040, 1024])
@pytest.mark.parametrize("early", [0, 1, 3])
@pytest.mark.parametrize("tile", [(0, 8, 64, 3, 4), (0, 2, 128, 3, 2), (8, 16, 64, 3, 1), (16, 64, 64, 3, 4)])
def test_every_kind_of_tile(
    tile: tuple[int, ...], early: int, depth: int, dtype: torch.dtype, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "few_rows", lambda rows, size, depth, fp8: Tile(*tile, early))
    rows = max(tile[0] - 1, 1)
    numbers, scale, full = weights(74, depth, groups)
    x = random(rows, depth, dtype=dtype) * 0.02
    want = x.double() @ full.T
    assert_rounded(linear(x, numbers, None, scale), want)
    gate, up = want.chunk(2, dim=-1)
    assert_rounded(gated(x, numbers, "silu", scale), mlp.activation("silu")(gate) * up)


@INFINITE
@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("size", [1, 24, 100, *([14336] if CUDA else [])])
@pytest.mark.parametrize("rows", [1, 3, 16, MAX_ROWS])
def test_gated(rows: int, size: int, groups: bool, dtype: torch.dtype, pdl: bool) -> None:
    numbers, scale, full = weights(2 * size, 272, groups)
    x = random(rows, 272, dtype=dtype) * 0.02
    gate, up = (x.double() @ full.T).chunk(2, dim=-1)
    for name in ("silu", "gelu_new"):
        assert_rounded(gated(x, numbers, name, scale, pdl=pdl), mlp.activation(name)(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("shape", [(16, 16), (100, 272), (136, 528), *REAL])
@pytest.mark.parametrize("rows", [1, 5, 64, 65, 150])
def test_any_rows_of_their_own_bits(rows: int, shape: tuple[int, int], groups: bool, dtype: torch.dtype) -> None:
    numbers, scale, full = weights(*shape, groups)
    x = random(rows, shape[1], dtype=dtype) * 0.05
    bias, want = random(shape[0], dtype=dtype, seed=2), x.double() @ full.T
    assert_rounded(invariant(x, numbers, None, scale), want)
    assert_rounded(invariant(x, numbers, bias, scale), want + bias.double())


@pytest.mark.skipif(not CUDA, reason="the interpreter multiplies with NumPy, whose order of summation is its own")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (1000, 1040), (2304, 768), (6144, 768), (768, 2048)],
)
def test_a_row_has_the_same_bits_in_every_batch(shape: tuple[int, int], groups: bool, dtype: torch.dtype) -> None:
    numbers, scale, _ = weights(*shape, groups)
    x = random(1100, shape[1], dtype=dtype)
    want = invariant(x, numbers, None, scale)
    for rows in (1, 2, 5, 8, 9, 16, 17, 32, 33, 64, 65, 100, 257, 1024, 1025):
        for first in (0, 7, 1100 - rows):
            assert torch.equal(invariant(x[first : first + rows], numbers, None, scale), want[first : first + rows])


def rows_in_fp8(rows: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of unlike sizes in e4m3, their scales, and what both stand for, in fp64."""
    full = random(rows, depth, dtype=torch.float32) * torch.logspace(-3, 1, rows, device=DEVICE)[:, None]
    numbers, by = rounded(full)
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


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, *REAL])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, scaled.MAX_ROWS])
def test_few_rounded_rows(rows: int, shape: tuple[int, int], groups: bool, dtype: torch.dtype, pdl: bool) -> None:
    numbers, scale, full = weights(*shape, groups)
    x, by, exact = rows_in_fp8(rows, shape[1])
    bias, want = random(shape[0], dtype=dtype, seed=2), exact @ full.T
    assert_near(scaled.product(x, by, numbers, None, scale, dtype, pdl=pdl), want)
    assert_near(scaled.product(x, by, numbers, bias, scale, dtype, pdl=pdl), want + bias.double())


@INFINITE
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [16, 144, 1040, 1024])
@pytest.mark.parametrize("early", [0, 1, 3])
@pytest.mark.parametrize("tile", [(16, 64, 64, 3, 4), (64, 16, 128, 3, 4), (64, 32, 32, 2, 4), (32, 128, 64, 3, 8)])
def test_every_kind_of_rounded_tile(
    tile: tuple[int, ...], early: int, depth: int, dtype: torch.dtype, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either side may be the wide one; gated or not."""

    def chosen(rows: int, size: int, depth: int, groups: bool) -> Tile:
        found = Tile(*tile, early)
        return found._replace(depth=GROUP, early=min(early, 1) if depth % GROUP == 0 else 0) if groups else found

    monkeypatch.setattr(scaled, "rounded_rows", chosen)
    numbers, scale, full = weights(74, depth, groups)
    x, by, exact = rows_in_fp8(13, depth)
    factor = 4 * depth**-0.5  # products of gate and up are neither subnormal nor infinite in fp16
    want = exact @ full.T * factor
    got = scaled.product(x, by * factor, numbers, None, scale, dtype)
    assert_near(got, want)
    gate, up = want.chunk(2, dim=-1)
    for name in ("silu", "gelu_new"):
        got = scaled.product(x, by * factor, numbers, None, scale, dtype, name)
        assert_near(got, mlp.activation(name)(gate) * up)


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_rows_are_rounded_and_one_is_not(dtype: torch.dtype, groups: bool) -> None:
    numbers, scale, full = weights(48, 272, groups)
    bias = random(48, dtype=dtype, seed=2)
    x = random(3, 272, dtype=torch.float32)
    x[:, 0] = 448.0
    x = x.to(E4M3).to(dtype)  # rounding leaves these as they are
    assert_rounded(scaled.few(x[:1], numbers, bias, scale), x[:1].double() @ full.T + bias.double())
    assert_near(scaled.few(x, numbers, bias, scale), x.double() @ full.T + bias.double())
    x *= 2**-10
    gate, up = (x.double() @ full.T).chunk(2, dim=-1)
    want = mlp.activation("silu")(gate) * up
    assert_rounded(scaled.gated(x[:1], numbers, "silu", scale), want[:1])
    assert_near(scaled.gated(x, numbers, "silu", scale), want)
    if not CUDA:
        return
    x = random(3, 272, dtype=dtype)  # and here they don't: one row is multiplied as it is, three are not
    want = x.double() @ full.T
    errors = [(scaled.few(rows, numbers, None, scale)[0] - want[0]).abs().max().item() for rows in (x[:1], x)]
    assert errors[0] < errors[1] / 2


@INFINITE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(100, 528), (3000, 272)])
@pytest.mark.parametrize("rows", [2, 16, scaled.MAX_ROWS])
def test_a_rounded_row_does_not_see_the_others(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    numbers, scale, _ = weights(*shape, groups=False)
    x, by, _ = rows_in_fp8(rows, shape[1])
    before = scaled.product(x, by, numbers, None, scale, dtype)[0].clone()
    by[1:] = torch.nan
    x.view(torch.uint8)[1:] = 0x7F  # NaN
    after = scaled.product(x, by, numbers, None, scale, dtype)
    assert torch.equal(after[0], before)
    assert after[1:].isnan().all()


@INFINITE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 16, MAX_ROWS])
def test_a_row_does_not_see_the_others(rows: int, dtype: torch.dtype) -> None:
    numbers, scale, _ = weights(100, 528, groups=True)
    x = random(rows, 528, dtype=dtype)
    before = linear(x, numbers, None, scale)[0].clone()
    for value in (torch.inf, torch.nan):
        x[1:] = value
        assert torch.equal(linear(x, numbers, None, scale)[0], before)


@INFINITE
@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("dtype", DTYPES)
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
    numbers, scales = scaled.rows_in_fp8(x, pdl=pdl)
    good = x[:3].float()
    assert torch.equal(scales[:3], good.abs().amax(1) / 448)
    assert torch.equal(numbers[:3].float(), (good * (448 / good.abs().amax(1))[:, None]).to(E4M3).float())
    assert (scales[3] > 0).all()
    assert (numbers[3].float() == 0).all()
    assert scales[4:].isnan().all()


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(48, 64), (100, 272), (4096, 4096), (6144, 4096), (4096, 14336)] if CUDA else [(48, 64)]
)
@pytest.mark.parametrize("rows", [1, 33, 64, 150, 1000])
def test_many_rows(rows: int, shape: tuple[int, int], dtype: torch.dtype, groups: bool) -> None:
    """Where the library multiplies, what rows are rounded to counts; else rows are as they are."""
    numbers, scale, full = weights(*shape, groups)
    x = random(rows, shape[1], dtype=dtype) * torch.logspace(-3, 1, rows, device=DEVICE).to(dtype)[:, None]
    bias = random(shape[0], dtype=dtype, seed=2)
    plain, biased = (scaled.linear(x, numbers, added, scale) for added in (None, bias))
    exact = x.double() @ full.T
    if rows == 1 or groups or dtype != torch.bfloat16 or shape[0] % 16:
        assert_rounded(plain, exact)
        assert_rounded(biased, exact + bias.double())
        return
    numbers_of_x, scales = scaled.rows_in_fp8(x)
    want = (numbers_of_x.double() * scales.double()[:, None]) @ full.T
    assert_near(plain, want)
    assert_near(biased, want + bias.double())
    assert (want - exact).norm() / exact.norm() < 0.05


@pytest.mark.skipif(not CUDA or not FP8, reason="graphs are captured on a GPU")
@pytest.mark.parametrize("rows", [1, 16, 64, 256])
def test_a_graph_gives_the_same(rows: int) -> None:
    numbers, scale, _ = weights(4096, 4096, groups=False)
    x = random(rows, 4096, dtype=torch.bfloat16)
    product = scaled.few if rows <= scaled.MAX_ROWS else scaled.linear
    want = product(x, numbers, None, scale).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = product(x, numbers, None, scale)
    got.zero_()
    graph.replay()
    assert torch.equal(got, want)


def test_what_is_supported() -> None:
    assert supports(torch.empty(8, 32, dtype=E4M3), MAX_ROWS)
    assert not supports(torch.empty(8, 40, dtype=E4M3), 1)
    assert not supports(torch.empty(8, 32, dtype=torch.float8_e5m2), 1)


def test_scales_that_do_not_fit_are_a_mistake() -> None:
    numbers, scale, _ = weights(48, 272, groups=True)
    x = random(2, 272, dtype=DTYPES[0])
    for wrong in (None, scale[:2].contiguous(), scale[:, 1:].contiguous()):
        with pytest.raises(AssertionError):
            linear(x, numbers, None, wrong)
    with pytest.raises(AssertionError):
        linear(x, numbers.to(x.dtype), None, scale)


def test_tiles_of_groups_hold_whole_ones() -> None:
    """Every step of the sum has one scale a row, also where a part of the weight is loaded early."""
    for rows, shapes in TILES_FP8.items():
        for tile in shapes.values():
            for depth in (16, 144, 4096):
                found = grouped(tile, depth)
                assert (found.depth, found.rows) == (GROUP, tile.rows)
                assert not found.early or depth % GROUP == 0
        assert few_rows(rows, 100_000, 4096, fp8=True) == shapes["tall"]


def test_tiles_of_rounded_rows() -> None:
    """Whole groups a step, both sides wide enough for a group of warps, and no more stages than there is room for."""
    for rows, shapes in TILES_ROUNDED.items():
        for size, shape in ((100_000, "tall"), (6144, "middle"), (4096, "square")):
            assert rounded_rows(rows, size, 4096, False) == shapes[shape]
        assert rounded_rows(rows, 4096, 14336, False) == shapes["deep"]
        for tile in shapes.values():
            assert tile.warps % 4 == 0
            assert tile.rows >= (64 if tile.columns < 64 else max(rows, 16))
            assert (tile.rows + tile.columns) * tile.depth * tile.stages <= SHARED
        for depth in (16, 144, 4096):
            found = rounded_rows(rows, 4096, depth, True)
            assert found.depth == GROUP
            assert not found.early or depth % GROUP == 0
            assert (found.rows + found.columns) * found.depth * found.stages <= SHARED
            assert rounded_rows(rows, 4096, depth, False).depth % 32 == 0
    assert max(TILES_ROUNDED) == scaled.MAX_ROWS
