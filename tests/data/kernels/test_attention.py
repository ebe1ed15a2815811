"""Every attention backend equals dense attention on one grid of batches, and Equation 4 holds for all page sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_steps import BATCHES, LAYER, Sizes, stored, two_steps
from grids import DEVICE

from quire.data.kernels import sdpa
from quire.data.kernels.batch import LayerCache
from quire.data.kernels.cpu.backend import NativeBackend
from quire.data.kernels.cpu.loading import library
from quire.data.kernels.reference import ReferenceBackend
from quire.data.kernels.sdpa import SdpaBackend
from quire.vocabulary.specs import LayerSpec

BACKENDS: dict[str, type[Any]] = {"reference": ReferenceBackend, "sdpa": SdpaBackend}
if DEVICE.type == "cpu" and library() is not None:
    BACKENDS["native"] = NativeBackend
EVERY = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
BATCHES = {
    **BATCHES,
    "padded": [(5, 1)] * 9 + [(400, 1)],  # nine become ten, as many as the step has tokens
    "long": [(0, 300), (260, 40), (10, 290)],
}


def check(
    backend: type[Any], sizes: Sizes, heads: int = 4, kv_heads: int = 2, page: int = 16,
    moved: Callable[[LayerCache], LayerCache] = lambda cache: cache, dtype: torch.dtype = torch.float32,
    near: float = 1e-5, **bounds: Any,
) -> None:  # fmt: skip
    """`moved` may put the layer's cache elsewhere."""
    store = stored(sizes, LayerSpec(kv_heads, 8, **bounds), heads, page, dtype)
    attention, cache = backend(), moved(store.caches[LAYER])
    attention.check(cache)
    got, want = two_steps(attention, store, cache, sizes)
    torch.testing.assert_close(got.double(), want, atol=near, rtol=near)


@pytest.mark.share(6)
@EVERY
@pytest.mark.parametrize("window", [None, 5, 24])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (7, 1), (56, 8)])
@pytest.mark.parametrize("batch", BATCHES)
def test_backends_equal_dense_attention(backend, window, heads, kv_heads, batch) -> None:
    if backend is ReferenceBackend and batch == "long":
        heads, kv_heads = 4, 2
    check(backend, BATCHES[batch], heads, kv_heads, window=window)


@EVERY
@pytest.mark.parametrize("chunk", [1, 5, 16, 24, 100])
@pytest.mark.parametrize("batch", BATCHES)
def test_chunks_of_tokens_see_nothing_before_them(backend, chunk, batch) -> None:
    check(backend, BATCHES[batch], chunk=chunk)


@EVERY
@pytest.mark.parametrize("page", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_every_page_size_equals_dense_attention(backend, page) -> None:
    check(backend, BATCHES["mixed"], page=page)


@EVERY
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("scale", "softcap"), [(0.05, None), (None, 0.7), (1.5, 2.0)])
def test_scale_and_softcap_are_the_layers(backend, batch, scale, softcap) -> None:
    check(backend, BATCHES[batch], window=24, scale=scale, softcap=softcap)


def test_a_bucket_keeps_to_the_most_scores_when_it_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    widest = 0

    def products(query: torch.Tensor, keys: torch.Tensor, *rest: Any) -> torch.Tensor:
        nonlocal widest
        widest = max(widest, query[:, :, :, :, 0].numel() * keys.shape[1])
        return torch.zeros_like(query)

    monkeypatch.setattr(sdpa, "_products", products)
    monkeypatch.setattr(sdpa, "_fused", products)
    monkeypatch.setattr(sdpa, "MAX_SCORES", 4 * 600 * 20)
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = [(int(rng.integers(500)), int(rng.integers(1, 100))) for _ in range(int(rng.integers(1, 12)))]
        store = stored(sizes, LayerSpec(2, 8), 4, 16)
        two_steps(SdpaBackend(), store, store.caches[LAYER], sizes)
    assert 4 * 600 * 10 < widest <= 4 * 600 * 20


def tokens_first(cache: LayerCache) -> LayerCache:
    """Pages [token, layer, keys or values, head, dim], the second of two layers; all but page 0 is poisoned."""
    shape = len(cache.keys), cache.page_tokens, 2, 2, cache.kv_heads, cache.head_dim
    numbers = torch.full(shape, torch.nan, dtype=cache.dtype, device=DEVICE)
    numbers[0] = 0
    keys, values = numbers[:, :, 1].permute(2, 0, 3, 1, 4)
    return replace(cache, keys=keys, values=values)


def two_buffers(cache: LayerCache) -> LayerCache:
    """Keys and values apart, with pages whose strides aren't whole head rows."""
    pages, heads, size, dim = cache.keys.shape
    views = []
    for _ in range(2):
        numbers = torch.full((pages, heads * size * dim + 40), torch.nan, dtype=cache.dtype, device=DEVICE)
        numbers[0] = 0
        views.append(numbers[:, 8:].unflatten(1, (-1, 8))[:, : heads * size].unflatten(1, (heads, size)))
    return replace(cache, keys=views[0], values=views[1])


@EVERY
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("moved", [tokens_first, two_buffers])
@pytest.mark.parametrize("window", [None, 24])
def test_any_strides(backend, batch, moved, window) -> None:
    check(backend, BATCHES[batch], moved=moved, window=window, softcap=3.0)


@EVERY
def test_a_layer_that_writes_nothing_reads_what_is_there(backend) -> None:
    """As a layer does that shares another one's keys and values."""
    seen = []

    class Sharing(backend):
        def attend(self, q, k, v, cache, plan):
            got = super().attend(q, k, v, cache, plan)
            seen.append(torch.equal(got, super().attend(q, k * 0, v * 0, replace(cache, writes=False), plan)))
            return got

    check(Sharing, BATCHES["mixed"])
    assert seen == [True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(dtype) -> None:
    check(SdpaBackend, BATCHES["mixed"], dtype=dtype, near=0.04)
