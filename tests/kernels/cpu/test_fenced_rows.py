"""Dense products, norms, activations, rows of tables and samples touch nothing behind their tensors, each of which lies
right before a page that may not be touched. Attention and weights of few bits have such tests of their own."""

from __future__ import annotations

import pytest
import torch
from native_kernels import NONE, VARIANTS, fenced

from quire.kernels.cpu import rows as row_kernels
from quire.kernels.cpu.linear import PackedLinear, linear, lookup_rows
from quire.kernels.cpu.rows import embedding, layer_norm, rms_norm
from quire.kernels.cpu.sampling import sample

pytestmark = [
    pytest.mark.skipif(not VARIANTS, reason=NONE),
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16]),
    pytest.mark.usefixtures("variant"),
]


def some(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return fenced(torch.randn(shape).to(dtype))


def test_products(dtype: torch.dtype) -> None:
    for size, columns in ((33, 64), (32, 100), (7, 1)):
        for gated in (False, True):
            packed = PackedLinear(some(2 * size, columns, dtype=dtype), some(2 * size, dtype=dtype), "silu", gated)
            packed.data = fenced(packed.data)
            for rows in (1, 5, 16, 40):
                out = some(rows, size if gated else 2 * size, dtype=dtype)
                assert linear(some(rows, columns, dtype=dtype), packed, out).isfinite().all()
        packed = PackedLinear(some(size, columns, dtype=dtype))
        packed.data = fenced(packed.data)
        assert lookup_rows(packed, fenced(torch.tensor([size - 1]))).isfinite().all()


def test_rows(dtype: torch.dtype) -> None:
    for size in (1, 8, 31, 64, 100):
        x, weight, bias = some(3, size, dtype=dtype), some(size, dtype=dtype), some(size, dtype=dtype)
        out = some(3, size, dtype=dtype)
        assert (
            rms_norm(x, weight, 1e-5, delta=some(3, size, dtype=dtype), post_norm_weight=bias, out=out).isfinite().all()
        )
        assert layer_norm(x, weight, bias, 1e-5, out=out).isfinite().all()
        assert row_kernels.act_and_mul(some(3, 2 * size, dtype=dtype), "gelu", out=out).isfinite().all()
        assert row_kernels.act(x, "gelu_new", bias).isfinite().all()
        assert row_kernels.softcap(x, 30.0).isfinite().all()
        assert embedding(fenced(torch.tensor([4, 0])), some(5, size, dtype=dtype), scale=2.0).isfinite().all()


def test_samples(dtype: torch.dtype) -> None:
    for vocab in (1, 17, 1024, 1500):
        last, tokens, faults = (fenced(torch.zeros(2, dtype=torch.int64)) for _ in range(3))
        shapes = fenced(torch.tensor([[0.8, 0.01, 5, 0.9], [0, 0, 0, 1]], dtype=torch.float64))
        seeds, positions, slots = (fenced(torch.arange(2)) for _ in range(3))
        sample(
            some(2, vocab, dtype=dtype), shapes, fenced(torch.arange(2)), seeds, positions, slots, last, tokens, faults
        )
        assert faults.tolist() == [0, 0]
        assert (tokens < vocab).all()
