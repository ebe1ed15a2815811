"""Kernels of others over views of contiguous keys and values equal dense attention in fp64: chunks of two calls joined
by their sums, any strides, heads in groups. On a CPU one kernel of torch stands in for cuDNN's and FlashAttention's."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_steps import dense

from quire.kernels import vendor
from quire.kernels.forward_batch import LayerCache

CHUNKS = [(0, 1), (0, 2), (0, 300), (1, 1), (1, 64), (63, 65), (299, 1), (40, 260), (512, 7)]
HEADS = [(4, 4, 16), (8, 2, 8), (56, 8, 4), (7, 1, 20)]


def history(tokens: int, kv_heads: int, dim: int, layers: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [kv_heads, tokens, dim] of the middle layer, whose tokens are `layers` times as far apart as
    they are long; what is behind the last token isn't a number."""
    views = []
    for seed in range(2):
        numbers = torch.full((tokens + 9, layers, kv_heads, dim), torch.nan)
        numbers[:tokens] = torch.randn(tokens, layers, kv_heads, dim, generator=torch.Generator().manual_seed(seed))
        views.append(numbers[:, layers // 2].transpose(0, 1)[:, :tokens])
    return views[0], views[1]


def both(name: str, heads: int, kv_heads: int, dim: int, start: int, count: int, far: float = 1.0) -> tuple[Any, Any]:
    """What the kernel finds, and dense attention. `far`: the factor of keys before the chunk."""
    keys, values = history(start + count, kv_heads, dim)
    keys[:, :start] *= far
    width = torch.randn(count, heads + 2 * kv_heads, dim, generator=torch.Generator().manual_seed(2))
    q = width[:, :heads]  # as rotation leaves it, among keys and values
    got = vendor.KERNELS[name](q, keys, values, start, 0.3)
    return got, dense(q, keys.transpose(0, 1), values.transpose(0, 1), start, scale=0.3)


@pytest.mark.parametrize("name", ["flash", "cudnn"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize(("start", "count"), CHUNKS)
def test_chunks_equal_dense_attention(name, heads, kv_heads, dim, start, count) -> None:
    got, expected = both(name, heads, kv_heads, dim, start, count)
    assert got.shape == (count, heads, dim)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("far", [0.0, 30.0, -30.0])
def test_parts_that_outweigh_each_other(far: float) -> None:
    """Sums of exponentials many powers apart: neither overflows, and the lighter part counts for what it is."""
    got, expected = both("cudnn", 8, 2, 16, 70, 30, far)
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


def test_sums_may_come_with_one_more_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuDNN gives them, unlike FlashAttention."""
    plain, asked = vendor.SDPA_OPS["cpu"], []

    def wider(q, k, v, causal, logs, scale):
        asked.append((causal, logs))
        out, sums = plain(q, k, v, causal, logs, scale)
        return out, sums[..., None] if logs else None

    monkeypatch.setitem(vendor.SDPA_OPS, "cpu", wider)
    for start in (0, 50):
        got, expected = both("cudnn", 8, 2, 16, start, 30)
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    assert asked == [(True, False), (True, True), (False, True)]


@pytest.mark.parametrize("grouped", [False, True])
def test_what_varlen_attn_is_asked(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch 2.11's parameters and with later ones; nothing is copied on the way."""
    seen = []

    def attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size):
        assert (cu_seq_q.tolist(), cu_seq_k.tolist()) == ([0, max_q], [0, max_k])
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert window_size == (-1, 0)
        seen.append(key.data_ptr())
        return dense(query, key, value, max_k - max_q, scale=scale).float()

    def early(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        return attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)

    def later(query, key, value, *sizes, scale=None, window_size=(-1, -1), enable_gqa=False):
        assert enable_gqa
        return attend(query, key, value, *sizes, scale, window_size)

    module: Any = ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = later if grouped else early
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    keys, values = history(40, 2, 8)
    q = torch.randn(12, 8, 8)
    got = vendor.varlen(q, keys, values, 28, 0.5)
    expected = dense(q, keys.transpose(0, 1), values.transpose(0, 1), 28, scale=0.5)
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=1e-6)
    assert seen == [keys.data_ptr()]


def test_what_they_take() -> None:
    def cache(dim: int = 128, dtype: torch.dtype = torch.bfloat16, on: str = "meta", **options: Any) -> LayerCache:
        keys = torch.zeros(3, 2, 16, dim, dtype=dtype, device=on)
        return LayerCache(keys, keys, 8, 1.0, **{"contiguous": True, **options})

    for name in vendor.KERNELS:
        assert vendor.supports_layer(name, cache())
        assert vendor.supports_layer(name, cache(dtype=torch.float16))
        assert not vendor.supports_layer(name, cache(contiguous=False))
        assert not vendor.supports_layer(name, cache(window=100))
        assert not vendor.supports_layer(name, cache(softcap=30.0))
        assert not vendor.supports_layer(name, cache(sinks=torch.zeros(8, device="meta")))
        assert not vendor.supports_layer(name, cache(dtype=torch.float32))
        assert not vendor.supports_layer(name, cache(dim=100))
        assert not vendor.supports_layer(name, cache(dim=264))
        assert vendor.supports_layer(name, cache(dim=6, dtype=torch.float32, on="cpu"))
    assert [name for name in vendor.KERNELS if vendor.supports_layer(name, cache(dim=256))] == ["flash", "varlen"]
