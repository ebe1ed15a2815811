"""Activations equal torch's in fp64 within one rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grids import DEVICE, INFINITE, LAUNCHES, TYPES, assert_rounded
from grids import random as normal
from torch import Tensor

from quire.kernels.triton.activation import act, act_and_mul, softcap
from quire.layers import mlp

NAMES = pytest.mark.parametrize("name", sorted(mlp.ACTIVATIONS))
FAR = INFINITE  # exp(-x) of a far value, and 1 / (1 + that) is the 0 wanted


def random(*shape: int, **options: Any) -> Tensor:
    """Mostly in [-6, 6], where activations bend."""
    return normal(*shape, **options).mul_(2)


@FAR
@LAUNCHES
@pytest.mark.parametrize("size", [16, 100, 1376, 14336])
@NAMES
def test_gate(name: str, size: int, dtype: torch.dtype, pdl: bool) -> None:
    """Also of rows with gaps into rows with gaps; the gaps stay."""
    for rows in (1, 3, 70):
        x, out = random(rows, 2 * size + 24, dtype=dtype)[:, : 2 * size], random(rows, size + 16, dtype=dtype, seed=1)
        before, gap = x.clone(), out[:, size:].clone()
        low, high = x.double().chunk(2, dim=-1)
        want = mlp.get_activation(name)(low) * high
        assert_rounded(act_and_mul(x, name, pdl=pdl), want)
        assert act_and_mul(x, name, out=out[:, :size], pdl=pdl).data_ptr() == out.data_ptr()
        assert_rounded(out[:, :size], want)
        assert torch.equal(x, before)
        assert torch.equal(out[:, size:], gap)


@FAR
@LAUNCHES
@pytest.mark.parametrize("biased", [False, True])
@NAMES
def test_act_in_place(name: str, biased: bool, dtype: torch.dtype, pdl: bool) -> None:
    for rows, size in ((1, 20480), (70, 600)):
        x = random(rows, size, dtype=dtype)
        bias = random(size, dtype=dtype, seed=1) if biased else None
        total = x.double() if bias is None else x.double() + bias.double()
        assert act(x, name, bias, pdl=pdl) is x
        assert_rounded(x, mlp.get_activation(name)(total))


@FAR
@TYPES
def test_far_values(dtype: torch.dtype) -> None:
    """No overflow on the way, and NaN is not hidden; by every activation of the layers."""
    x = torch.tensor([[-3e4, -100.0, -0.0, 0.0, 100.0, 3e4, torch.nan]], dtype=dtype, device=DEVICE)
    for name in mlp.ACTIVATIONS:
        want = mlp.get_activation(name)(x.double())
        assert want.isnan().sum() == 1
        torch.testing.assert_close(act(x.clone(), name).double(), want, rtol=1e-6, atol=1e-6, equal_nan=True)


@FAR
@LAUNCHES
@pytest.mark.parametrize(("rows", "size"), [(1, 7), (3, 5000), (70, 1500)])
def test_softcap_in_place(rows: int, size: int, dtype: torch.dtype, pdl: bool) -> None:
    """Also of logits far beyond the bound, in rows with gaps, which stay."""
    wide = (random(rows, size + 9) * 20).to(dtype)
    wide[0, :2] = torch.tensor([1e4, -torch.inf])
    x, before = wide[:, :size], wide.clone()
    assert softcap(x, 30.0, pdl=pdl).data_ptr() == wide.data_ptr()
    assert_rounded(x, 30 * torch.tanh(before[:, :size].double() / 30), atol=2e-5)
    assert torch.equal(wide[:, size:], before[:, size:])
