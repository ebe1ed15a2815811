"""The fused norms equal torch's in fp64, within one rounding, for all sizes and strides; the residual sum is exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from grids import DEVICE, LAUNCHES, TYPES, assert_rounded, random
from torch import Tensor

from quire.kernels.triton.norm import layer_norm, rms_norm, rms_norm_parts

EPS = 1e-5
NORMS = pytest.mark.parametrize("norm", ["rms", "layer"])


def check(norm: str, x: Tensor, delta: Tensor | None = None, out: Tensor | None = None, pdl: bool = False) -> None:
    size = x.shape[-1]
    weight, bias = (random(size, dtype=x.dtype, seed=seed) + 1 for seed in (5, 6))
    total = x.clone() if delta is None else x + delta
    if norm == "rms":
        want = F.rms_norm(total.double(), (size,), weight.double(), EPS)
        got = rms_norm(x, weight, EPS, delta=delta, out=out, pdl=pdl)
    else:
        want = F.layer_norm(total.double(), (size,), weight.double(), bias.double(), EPS)
        got = layer_norm(x, weight, bias, EPS, delta=delta, out=out, pdl=pdl)
    assert torch.equal(x, total), "x itself changes by delta, and by nothing else"
    assert out is None or got is out
    assert_rounded(got, want)


@LAUNCHES
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("size", [16, 48, 768, 4096, 5120, 16384])
@NORMS
def test_equal_to_torch(norm: str, size: int, add: bool, dtype: torch.dtype, pdl: bool) -> None:
    """Of many rows several share a program, and the last program isn't full."""
    for rows in (1, 5, 515) if size < 768 else (1, 5):
        check(norm, random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=1) if add else None, pdl=pdl)


@TYPES
@NORMS
def test_rows_may_have_strides(norm: str, dtype: torch.dtype) -> None:
    """x, delta and out are columns of wider tensors, whose other columns stay as they were."""
    wide = [random(3, 300 + 16 * seed, dtype=dtype, seed=seed) for seed in range(3)]
    before = [tensor.clone() for tensor in wide]
    check(norm, *(tensor[:, 50:150] for tensor in wide))
    for old, new in zip(before, wide):
        assert torch.equal(old[:, :50], new[:, :50])
        assert torch.equal(old[:, 150:], new[:, 150:])
    assert torch.equal(before[1], wide[1])
    check("rms", random(3, 9, 64, dtype=dtype)[:, 2:6])  # heads of a product: a view with gaps


@TYPES
def test_layer_norm_of_values_far_from_zero(dtype: torch.dtype) -> None:
    """The variance is that of the differences from the mean: no cancellation."""
    x = (random(2, 256) + 100).to(dtype)
    weight, bias = torch.ones(256, dtype=dtype, device=DEVICE), torch.zeros(256, dtype=dtype, device=DEVICE)
    want = F.layer_norm(x.double(), (256,), weight.double(), bias.double(), EPS)
    half_ulp = 0.5 * torch.finfo(dtype).eps
    torch.testing.assert_close(layer_norm(x, weight, bias, EPS).double(), want, rtol=1.01 * half_ulp, atol=2e-5)


@LAUNCHES
@pytest.mark.parametrize("size", [16, 100, 3584])
def test_the_sum_may_go_through_a_norm_first(size: int, dtype: torch.dtype, pdl: bool) -> None:
    """x += norm(delta), rounded where two launches would round; weights may be wider than x. delta stays as it was."""
    x, delta = random(5, size, dtype=dtype), 3 * random(5, size, dtype=dtype, seed=1)
    weight, behind = (random(size, seed=seed) + 1 for seed in (5, 6))
    before, total = delta.clone(), x + rms_norm(delta, behind, EPS)
    assert_rounded(rms_norm(delta, behind, EPS), F.rms_norm(delta.double(), (size,), behind.double(), EPS))
    want = F.rms_norm(total.double(), (size,), weight.double(), EPS)
    got = rms_norm(x, weight, EPS, delta=delta, post_norm_weight=behind, pdl=pdl)
    torch.testing.assert_close(x, total, atol=1e-6, rtol=torch.finfo(dtype).eps)
    assert_rounded(got, F.rms_norm(x.double(), (size,), weight.double(), EPS))
    torch.testing.assert_close(got.double(), want, atol=0.05 if dtype != torch.float32 else 1e-5, rtol=0)
    assert torch.equal(delta, before)
    total = x + delta
    got = rms_norm(x, weight, EPS, delta=delta, scale=0.3, pdl=pdl)
    torch.testing.assert_close(x, total * 0.3, atol=0, rtol=torch.finfo(dtype).eps)
    assert_rounded(got, F.rms_norm(x.double(), (size,), weight.double(), EPS))


@LAUNCHES
@pytest.mark.parametrize(("size", "pair"), [(256, 16), (6, 5), (160, 64), (3000, 16)])
def test_three_norms_at_once(size: int, pair: int, dtype: torch.dtype, pdl: bool) -> None:
    """The same numbers as one by one, each row by itself."""
    x = random(7, size + 2 * pair + 8, dtype=dtype)[:, : size + 2 * pair]
    x[3, 0] = x[4, size] = x[5, size + pair] = torch.nan
    x[:, size:] *= 3
    sizes = (size, pair, pair)
    weights = [random(many, dtype=dtype, seed=seed) + 1 for seed, many in enumerate(sizes, 1)]
    got = rms_norm_parts(x, tuple(weights), EPS, pdl=pdl)
    for one, part, weight in zip(got, x.split(sizes, dim=1), weights):
        want = F.rms_norm(part.double(), weight.shape, weight.double(), EPS)
        assert want.isnan().any(dim=1).sum() == 1
        assert_rounded(one.to(dtype), want)
        assert_rounded(one, rms_norm(part, weight, EPS).double())
    assert got[0].dtype == dtype
    assert got[1].dtype == got[2].dtype == torch.float32
    assert got[2].data_ptr() - got[1].data_ptr() == 4 * pair
