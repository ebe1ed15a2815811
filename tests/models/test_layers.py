"""Layers beside what torch and transformers compute."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers

from quire.layers.linear import Linear, pack_onednn
from quire.layers.norm import ResidualSum, RMSNorm

CPU = torch.device("cpu")


def linear(rows: int | tuple[int, ...], columns: int, bias: bool, dtype: torch.dtype) -> Linear:
    layer = Linear(columns, rows, bias, dtype, CPU)
    for parameter in layer.parameters():
        parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(columns))
    return layer


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine for which no kernels are built."""
    monkeypatch.setattr("quire.kernels.cpu.linear.library", lambda: None)


@pytest.mark.usefixtures("plain")
def test_few_numbers_of_rows_are_multiplied() -> None:
    layer = linear(8, 8, False, torch.float32)
    layer.prepare()
    assert isinstance(layer.packed, functools.partial)
    seen = set()

    def product(x: torch.Tensor) -> torch.Tensor:
        seen.add(len(x))
        return x

    for rows in range(1, 2049):
        x = torch.full((rows, 1), float(rows))
        assert torch.equal(layer.packed.func(product, x), x)
    assert {1, 2, 4, 32, 256, 2048} < seen, "powers of two stay as they are"
    assert len(seen) == 72


@pytest.mark.usefixtures("plain")
def test_packing_is_given_up_where_it_is_missing_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(8, 8)
    assert pack_onednn(weight, None) is not None
    assert pack_onednn(weight * torch.nan, None) is None  # nothing to check the operator by
    real = torch.ops.mkldnn

    class Wrong:
        _reorder_linear_weight = real._reorder_linear_weight

        class _linear_pointwise:
            @staticmethod
            def default(x: torch.Tensor, *rest: Any) -> torch.Tensor:
                return real._linear_pointwise(x, *rest) * 1.1

    monkeypatch.setattr(torch.ops, "mkldnn", Wrong)
    assert pack_onednn(weight, None) is None
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    layer = linear(8, 8, True, torch.float32)
    x = torch.randn(3, 8)
    before = layer(x)
    layer.prepare()
    assert layer.packed is None
    assert torch.equal(layer(x), before)


def test_other_dtypes_stay_plain() -> None:
    layer = linear(8, 8, False, torch.float16)
    layer.prepare()
    assert layer.packed is None
    assert layer.weight is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_norms_of_gemma_equal_transformers(dtype: torch.dtype) -> None:
    """Weights near -1 and near 0, where one plus them in bf16 would lose most of them; and the norm before a sum."""
    x, delta = (torch.randn(5, 48) * 3).to(dtype), torch.randn(5, 48).to(dtype)
    theirs, ours = [], []
    for i in range(2):
        theirs.append(transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm(48, 1e-3).to(dtype))
        ours.append(RMSNorm(48, 1e-3, dtype, CPU, offset=True, post_norm=ours[0] if i else None))
        ours[i].weight.copy_(torch.cat((torch.randn(24) * 0.01, torch.randn(24) * 0.001 - 1)))
        theirs[i].weight.data.copy_(ours[i].weight)
        with pytest.raises(AssertionError, match="prepare"):
            ours[i](x)
        ours[i].prepare()
        assert torch.equal(ours[i].weight - 1, theirs[i].weight.detach().float() + 1 - 1), "nothing more is lost"
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(ours[0](x), theirs[0](x).detach(), atol=1e-6, rtol=step)
    total = x + theirs[0](delta).detach()
    torch.testing.assert_close(ours[1](x, delta), theirs[1](total).detach(), atol=1e-6, rtol=2 * step)
    torch.testing.assert_close(x, total, atol=1e-6, rtol=step)


@pytest.mark.parametrize("prepared", [True, False], ids=["kernel", "torch"])
def test_norms_in_place_and_added(prepared: bool) -> None:
    norm, rows, delta = RMSNorm(48, 1e-5, torch.float32, CPU), torch.randn(5, 96), torch.randn(5, 48)
    norm.weight.normal_()
    if prepared:
        norm.prepare()
    some, rest = rows.clone().split(48, dim=1)
    norm.normalize_(rows[:, :48])
    expected = torch.nn.functional.rms_norm(some, (48,), norm.weight, 1e-5)
    torch.testing.assert_close(rows, torch.cat((expected, rest), dim=1))
    total = some + torch.nn.functional.rms_norm(delta, (48,), norm.weight, 1e-5)
    assert ResidualSum(norm)(some, delta) is some
    torch.testing.assert_close(some, total)
    assert ResidualSum()(some) is some
