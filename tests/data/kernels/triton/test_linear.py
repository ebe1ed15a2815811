"""Products for few rows equal torch's in fp64 within the rounding; rows do not see one another; `invariant` gives a row
the same bits in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.data.kernels.limits import SCORED_AT_ONCE
from quire.data.kernels.triton import linear as kernels
from quire.data.kernels.triton import scaled
from quire.data.kernels.triton.linear import MAX_ROWS, Tile, gated, invariant, linear, supports
from quire.data.kernels.triton.tiles import rounded_rows
from quire.data.layers import mlp
from quire.data.runner.rehearsal import _plans

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = (torch.float16, torch.bfloat16) if CUDA else (torch.float32,)
PDL = (False, True) if CUDA and torch.cuda.get_device_capability()[0] >= 9 else (False,)
# [N, K]: N not a multiple of a tile, K not of one, but of 16; and the shapes of a real layer.
SHAPES = [(1, 16), (48, 64), (100, 272), (33, 528), *([(6144, 4096), (20000, 1040), (4096, 14336)] if CUDA else [])]
ROWS = [1, 2, 3, 7, 8, 16, 17, MAX_ROWS]
# Infinite values on the way are wanted; NumPy warns of them in the interpreter.
INFINITE = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def assert_rounded(got: Tensor, want: Tensor) -> None:
    """got is want (fp64) rounded to got's dtype, but for fp32 sums on the way, which tensor cores truncate."""
    scale = want.abs().max().item() + 1
    rtol, atol = 0.51 * torch.finfo(got.dtype).eps + 2e-6, (2e-5 if CUDA else 4e-6) * scale
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_linear(rows: int, shape: tuple[int, int], dtype: torch.dtype, pdl: bool) -> None:
    x, weight = random(rows, shape[1], dtype=dtype), random(*shape, dtype=dtype, seed=1)
    bias, want = random(shape[0], dtype=dtype, seed=2), x.double() @ weight.double().T
    assert_rounded(linear(x, weight, pdl=pdl), want)
    assert_rounded(linear(x, weight, bias, pdl=pdl), want + bias.double())


@pytest.mark.share(4)
@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [16, 144, 1040])
@pytest.mark.parametrize("early", [0, 1, 3])
@pytest.mark.parametrize("tile", [(0, 8, 64, 3, 4), (0, 2, 128, 3, 2), (8, 16, 64, 3, 1), (16, 64, 64, 3, 4)])
def test_every_kind_of_tile(
    tile: tuple[int, ...], early: int, depth: int, dtype: torch.dtype, pdl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles loaded early are the whole depth, or a part of it, or more than it has."""
    monkeypatch.setattr(kernels, "few_rows", lambda rows, size, depth: Tile(*tile, early))
    rows = max(tile[0] - 1, 1)
    x, weight = random(rows, depth, dtype=dtype), random(74, depth, dtype=dtype, seed=1).mul_(0.2)
    bias, want = random(74, dtype=dtype, seed=2), x.double() @ weight.double().T
    assert_rounded(linear(x, weight, bias, pdl=pdl), want + bias.double())
    gate, up = want.chunk(2, dim=-1)
    assert_rounded(gated(x, weight, "silu", pdl=pdl), mlp.activation("silu")(gate) * up)


@INFINITE
@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 24, 100, *([14336] if CUDA else [])])
@pytest.mark.parametrize("rows", [1, 3, 16, MAX_ROWS])
def test_gated(rows: int, size: int, dtype: torch.dtype, pdl: bool) -> None:
    x, weight = random(rows, 272, dtype=dtype), random(2 * size, 272, dtype=dtype, seed=1).mul_(0.2)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    for name in ("silu", "relu", "gelu", "gelu_new"):
        assert_rounded(gated(x, weight, name, pdl=pdl), mlp.activation(name)(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_gaps(dtype: torch.dtype) -> None:
    """Rows of x are parts of wider ones; what lies between is not read."""
    wide, weight = random(5, 400, dtype=dtype), random(50, 272, dtype=dtype, seed=1)
    wide[:, 272:], x = torch.nan, wide[:, :272]
    assert_rounded(linear(x, weight), x.double() @ weight.double().T)


@INFINITE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 16, MAX_ROWS])
def test_a_row_does_not_see_the_others(rows: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, 528, dtype=dtype), random(100, 528, dtype=dtype, seed=1)
    before = linear(x, weight)[0].clone()
    x[1:] = torch.inf
    assert torch.equal(linear(x, weight)[0], before)
    x[1:] = torch.nan
    assert torch.equal(linear(x, weight)[0], before)


def test_what_is_supported() -> None:
    assert supports(torch.empty(8, 32, dtype=torch.bfloat16), MAX_ROWS)
    assert supports(torch.empty(8, 32, dtype=torch.float16), 1)
    assert not supports(torch.empty(8, 32, dtype=torch.bfloat16), MAX_ROWS + 1)
    assert not supports(torch.empty(8, 32), 1)
    assert not supports(torch.empty(8, 40, dtype=torch.bfloat16), 1)
    assert not supports(torch.empty(32, 8, dtype=torch.bfloat16).T, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 16), (100, 272), (136, 528)])
@pytest.mark.parametrize("rows", [1, 5, 64, 65, 150])
def test_invariant(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = random(rows, shape[1], dtype=dtype), random(*shape, dtype=dtype, seed=1)
    bias, want = random(shape[0], dtype=dtype, seed=2), x.double() @ weight.double().T
    assert_rounded(invariant(x, weight), want)
    assert_rounded(invariant(x, weight, bias), want + bias.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_invariant_without_bulk_copies(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(130, 272, dtype=dtype), random(100, 272, dtype=dtype, seed=1)
    want = invariant(x, weight)
    monkeypatch.setattr(kernels, "_bulk_copies", lambda *tensors: False)
    assert_rounded(invariant(x, weight), x.double() @ weight.double().T)
    if CUDA:
        assert torch.equal(invariant(x, weight), want)
    assert_rounded(
        invariant(x[:, 1:257], weight[:, :256].contiguous()), x[:, 1:257].double() @ weight[:, :256].double().T
    )


@pytest.mark.skipif(not CUDA, reason="the interpreter multiplies with NumPy, whose order of summation is its own")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (1000, 1040)])
def test_a_row_has_the_same_bits_in_every_batch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = random(2048, shape[1], dtype=dtype), random(*shape, dtype=dtype, seed=1)
    want = invariant(x, weight)
    for rows in (1, 2, 5, 16, 33, 64, 65, 100, 257, 1024, 1025):
        for first in (0, 7, 2048 - rows):
            for pdl in PDL:
                assert torch.equal(invariant(x[first : first + rows], weight, pdl=pdl), want[first : first + rows])
            if rows > 1 and supports(weight, rows):  # the fast product too, but for a single row
                assert torch.equal(linear(x[first : first + rows], weight), want[first : first + rows])


@pytest.mark.parametrize("slots", [4, 256])
@pytest.mark.parametrize("tokens", [16, 100, 1024, 8192])
def test_every_tile_is_rehearsed(tokens: int, slots: int) -> None:
    """By the rehearsal at start: whatever the tokens of a step, and whatever the rows that have logits."""

    def tiles(rows: int, size: int) -> set[Tile]:
        few = {kernels.few_rows(r, size, 4096) for r in (rows, max(rows, 2)) if rows <= MAX_ROWS}
        few |= {rounded_rows(rows, size, 4096, False)} if 1 < rows <= scaled.MAX_ROWS else set()
        return few | {kernels.any_rows(rows, size, torch.bfloat16, bulk) for bulk in (False, rows > 64)}

    plans = list(_plans(tokens, 4096, slots))
    computed = {sum(len(row.tokens) for row in plan.rows) for plan in plans}
    scored = {len(row.score) for plan in plans for row in plan.rows if row.score}
    for size in (6144, 4096):
        assert set.union(*(tiles(n, size) for n in range(1, tokens + 1))) == set.union(
            *(tiles(n, size) for n in computed)
        )
    possible = range(1, min(tokens, SCORED_AT_ONCE) + 1)
    assert set.union(*(tiles(n, 128256) for n in possible)) == set.union(*(tiles(n, 128256) for n in scored))


@pytest.mark.parametrize(
    ("size", "depth", "rows"),
    [(6144, 4096, 8), (4096, 4096, 8), (28672, 4096, 8), (4096, 14336, 8), (128256, 4096, 8), (2560, 8192, 8),
     (5120, 8192, 16), (8192, 4096, 16), (8192, 2048, 16), (14336, 8192, 16), (8192, 14336, 8), (128256, 8192, 8)],
)  # fmt: skip
def test_few_rows_of_larger_weights_have_the_tiles_of_more(size: int, depth: int, rows: int) -> None:
    """Llama-3-8B's have those that were measured with them; so do the head and what is deep of Llama-3-70B's."""
    assert {kernels.few_rows(few, size, depth).rows for few in (2, 5, 8)} == {rows}
    assert kernels.few_rows(1, size, depth).rows == 0
    assert kernels.few_rows(9, size, depth).rows == 16
