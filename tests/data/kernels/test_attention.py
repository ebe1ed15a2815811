"""Every attention backend equals dense attention on one grid of batches, and Equation 4 holds for all page sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from geometries import one_size

from quire.data.kernels import sdpa
from quire.data.kernels.batch import LayerCache
from quire.data.kernels.cpu.backend import NativeBackend
from quire.data.kernels.cpu.loading import library
from quire.data.kernels.reference import ReferenceBackend, paged_attention
from quire.data.kernels.sdpa import SdpaBackend
from quire.data.runner.inputs import build_batch
from quire.data.runner.store import Store
from quire.vocabulary.plan import Row, Table
from quire.vocabulary.specs import LayerSpec, ModelSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS: dict[str, Callable[[], Any]] = {"reference": ReferenceBackend, "sdpa": SdpaBackend}
if DEVICE.type == "cpu" and library() is not None:
    BACKENDS["native"] = NativeBackend
BATCHES = {  # (tokens before, tokens of this step) a sequence
    "decode": [(0, 1), (5, 1), (16, 1), (33, 1)],
    "prompts": [(0, 1), (0, 16), (0, 29)],
    "chunk": [(8, 9), (31, 7)],
    "mixed": [(12, 1), (0, 20), (4, 6), (40, 1), (3, 1)],
    "padded": [(5, 1)] * 9 + [(400, 1)],  # nine become ten, as many as the step has tokens
    "long": [(0, 300), (260, 40), (10, 290)],
}


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None, scale: float,
    softcap: float | None, chunk: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """q [n, heads, dim] at positions start ..; k, v [start + n, kv_heads, dim]; fp64."""
    q, k, v = q.double(), k.double(), v.double()
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    at = torch.arange(len(k))
    query_at = at[start:, None]
    hidden = at[None] > query_at
    if window is not None:
        hidden |= at[None] <= query_at - window
    if chunk is not None:
        hidden |= at[None] // chunk != query_at // chunk
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def run(
    backend: str, sizes: list[tuple[int, int]], heads: int, kv_heads: int, page: int, window: int | None,
    dtype: torch.dtype = torch.float32, layers: int = 2, scale: float | None = None, softcap: float | None = None,
    moved: Callable[[LayerCache], LayerCache] = lambda cache: cache, chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One step's attention in the second of `layers` layers over poisoned pages in random order -> (got, expected).
    `moved` may put the layer's cache elsewhere."""
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    dim = 8
    layer = LayerSpec(kv_heads, dim, window, scale=scale, softcap=softcap, chunk=chunk)
    spec = ModelSpec("test", (layer,) * layers, 10, 4096, 16, heads, 16, 0)
    width = max(-(-(a + b) // page) for a, b in sizes)
    page_bytes = layers * layer.token_bytes(dtype.itemsize) * page
    pages = len(sizes) * width + 1
    geometry = one_size(
        (tuple(range(layers)), window), pages=pages, page_bytes=page_bytes, slots=len(sizes) + 1, width=width,
        tokens=page, itemsize=dtype.itemsize,
    )  # fmt: skip
    store = Store(geometry, spec, dtype, DEVICE)
    store.views[0][1:].fill_(torch.nan)  # recycled pages hold anything
    free = (rng.permutation(pages - 1) + 1).tolist()
    attention, cache = BACKENDS[backend](), moved(store.caches[1])
    attention.check(cache)
    histories = [torch.randn(2, a + b, kv_heads, dim, generator=generator).to(dtype) for a, b in sizes]
    for slot, (before, now) in enumerate(sizes, 1):
        store.replay((Table(slot, 0, 0, tuple(free.pop() for _ in range(-(-(before + now) // page)))),))
    earlier = [(slot, 0, before) for slot, (before, _) in enumerate(sizes, 1) if before]
    present = [(slot, before, now) for slot, (before, now) in enumerate(sizes, 1)]
    last = torch.zeros(len(sizes) + 1, dtype=torch.int64, device=DEVICE)
    for rows in filter(None, (earlier, present)):
        batch = build_batch(tuple(Row(slot, (1,) * count, start, 0) for slot, start, count in rows), store, last)
        k, v = (torch.cat([histories[s - 1][i, a : a + n] for s, a, n in rows]) for i in (0, 1))
        q = torch.randn(len(k), heads, dim, generator=generator).to(dtype)
        plan = attention.plan(batch, cache)
        got = attention.attend(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), cache, plan).cpu()
    bounds = np.cumsum([0] + [n for _, n in sizes]).tolist()
    expected = torch.cat(
        [
            dense(q[a:b], *histories[i], sizes[i][0], window, scale or dim**-0.5, softcap, chunk)
            for i, (a, b) in enumerate(pairwise(bounds))
        ]
    )
    return got, expected


@pytest.mark.share(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 5, 24])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (7, 1), (14, 2)])
@pytest.mark.parametrize("batch", BATCHES)
def test_backends_equal_dense_attention(backend, window, heads, kv_heads, batch) -> None:
    if backend == "reference" and batch == "long" and heads != 4:
        heads, kv_heads = 4, 2
    got, expected = run(backend, BATCHES[batch], heads, kv_heads, 16, window)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 5, 16, 24, 100])
@pytest.mark.parametrize("batch", BATCHES)
def test_chunks_of_tokens_see_nothing_before_them(backend, chunk, batch) -> None:
    got, expected = run(backend, BATCHES[batch], 4, 2, 16, None, chunk=chunk)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", ["decode", "chunk", "mixed"])
def test_the_heads_of_yi_34b(backend, batch) -> None:
    got, expected = run(backend, BATCHES[batch], 56, 8, 16, None)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_every_page_size_equals_dense_attention(backend, page) -> None:
    got, expected = run(backend, BATCHES["mixed"], 4, 2, page, None)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("scale", "softcap"), [(0.05, None), (None, 0.7), (1.5, 2.0)])
def test_scale_and_softcap_are_the_layers(backend, batch, scale, softcap) -> None:
    got, expected = run(backend, BATCHES[batch], 4, 2, 16, 24, scale=scale, softcap=softcap)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


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
        run("sdpa", [(int(rng.integers(500)), int(rng.integers(1, 100))) for _ in range(int(rng.integers(1, 12)))],
            4, 2, 16, None)  # fmt: skip
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("moved", [tokens_first, two_buffers])
@pytest.mark.parametrize("window", [None, 24])
def test_any_strides(backend, batch, moved, window) -> None:
    got, expected = run(backend, BATCHES[batch], 4, 2, 16, window, softcap=3.0, moved=moved)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_that_writes_nothing_reads_what_is_there(backend) -> None:
    """As a layer does that shares another one's keys and values."""
    seen = []

    class Sharing(BACKENDS[backend]):
        def attend(self, q, k, v, cache, plan):
            got = super().attend(q, k, v, cache, plan)
            seen.append(torch.equal(got, super().attend(q, k * 0, v * 0, replace(cache, writes=False), plan)))
            return got

    BACKENDS["sharing"] = Sharing
    try:
        run("sharing", BATCHES["mixed"], 4, 2, 16, None)
    finally:
        del BACKENDS["sharing"]
    assert seen == [True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(dtype) -> None:
    got, expected = run("sdpa", BATCHES["mixed"], 4, 2, 16, None, dtype)
    torch.testing.assert_close(got.double(), expected, atol=0.04, rtol=0.04)


def test_reference_soft_caps_scores() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 8), torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4, 8)
    got = paged_attention(q, k, v, torch.tensor([2, 0]), 6, scale=1.0, softcap=2.0)
    keys, values = (x[[2, 0]].transpose(1, 2).reshape(8, 2, 8)[:7] for x in (k, v))
    scores = torch.tanh(torch.einsum("hd,khd->hk", q, keys) / 2) * 2
    torch.testing.assert_close(got, torch.einsum("hk,khd->hd", scores.softmax(-1), values))
