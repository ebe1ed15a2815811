"""Every attention backend equals dense attention on one grid of batches, and Equation 4 holds for all page sizes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention_steps import BATCHES, LAYER, Sizes, placed, sinks_of, stored, two_steps
from grids import DEVICE, random
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from quire.kernels import sdpa
from quire.kernels.contiguous import ContiguousBackend
from quire.kernels.cpu.backend import NativeBackend
from quire.kernels.cpu.library_loader import library
from quire.kernels.forward_batch import ForwardBatch, LayerCache
from quire.kernels.reference import ReferenceBackend, paged_attention
from quire.kernels.sdpa import SdpaBackend
from quire.kernels.triton.backend import TritonBackend
from quire.protocol.model_spec import LayerSpec

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
    layout: str = "", **bounds: Any,
) -> None:  # fmt: skip
    store = stored(sizes, LayerSpec(kv_heads, 8, **bounds), heads, page)
    attention, cache = backend(), store.caches[LAYER]
    if layout:
        keys, values = placed(layout, len(cache.keys), page, kv_heads, 8, cache.dtype)
        cache = replace(cache, keys=keys, values=values)
    if bounds.get("has_sinks"):
        cache = replace(cache, sinks=sinks_of(heads))
    attention.check_cache(cache)
    got, want = two_steps(attention, store, cache, sizes)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bounds", [{}, {"window": 24}, {"softcap": 0.7}, {"has_sinks": True}], ids=str)
@pytest.mark.parametrize("sizes", [(0, 300), (260, 40), (33, 1)], ids=str)
def test_contiguous_tokens_equal_dense_attention(sizes: tuple[int, int], bounds: dict[str, Any]) -> None:
    """One sequence of one page, whose number is that of its slot."""
    check(ContiguousBackend, [sizes], page=512, **bounds)


@pytest.mark.share(3)
@EVERY
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "given",
    [
        *({"heads": heads, "kv_heads": kv, "window": window}
          for heads, kv in ((4, 4), (4, 2), (7, 1), (56, 8)) for window in (None, 5, 24)),
        *({"chunk": chunk} for chunk in (1, 5, 16, 24, 100)),
        *({"page": page} for page in (1, 2, 4, 8, 32, 64, 128, 256)),
        *({"layout": layout, "window": w} for layout in ("tokens first", "gaps", "two buffers") for w in (None, 24)),
        *({"window": 24, "scale": scale, "softcap": cap} for scale, cap in ((0.05, None), (None, 0.7), (1.5, 2.0))),
        *({"has_sinks": True, "heads": heads, "kv_heads": kv, **bounds}
          for heads, kv in ((4, 4), (7, 1)) for bounds in ({}, {"window": 5}, {"chunk": 16}, {"softcap": 0.7})),
    ],
    ids=str,
)  # fmt: skip
def test_backends_equal_dense_attention(backend, batch, given) -> None:
    if backend is ReferenceBackend and batch == "long":
        given = {**given, "heads": 4, "kv_heads": 2}
    check(backend, BATCHES[batch], **given)


def test_sinks_are_those_of_gpt_oss() -> None:
    """As transformers computes them: a column of scores that is dropped after the softmax."""
    heads, kv_heads, dim, tokens, size = 6, 2, 16, 21, 4
    q, k, v = (random(n, tokens, dim, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    module = SimpleNamespace(sinks=sinks_of(heads), num_key_value_groups=heads // kv_heads, training=False)
    expected, _ = eager_attention_forward(module, q[None, :, -1:], k[None], v[None], None, dim**-0.5)
    order = torch.randperm(6).to(DEVICE)
    padded = torch.nn.functional.pad(torch.stack((k, v)), (0, 0, 0, 6 * size - tokens))
    keys, values = torch.zeros(2, 6, kv_heads, size, dim, device=DEVICE)
    for pages, numbers in zip((keys, values), padded):
        pages[order] = numbers.view(kv_heads, 6, size, dim).transpose(0, 1)
    got = paged_attention(q[:, -1], keys, values, order, tokens - 1, scale=dim**-0.5, sinks=module.sinks)
    torch.testing.assert_close(got, expected[0, 0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 7, 24])
@pytest.mark.parametrize("backend", [*BACKENDS.values(), TritonBackend], ids=[*BACKENDS, "triton"])
def test_the_tokens_of_an_image_see_one_another(backend, window) -> None:
    """And what is before, within their windows (Gemma-3). The step begins within an image, and has another row."""
    images, size, start, length = {1: [(3, 12), (20, 37), (37, 41)]}, 4, 6, 50
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(length, heads, 16, generator=generator) for heads in (4, 2, 2))
    keys, values = pages = torch.full((2, 30, 2, size, 16), torch.nan)
    pages[:, 0] = 0  # the scratch page is finite
    table = torch.zeros(3, 13, dtype=torch.int64)
    table[1], table[2] = torch.randperm(13, generator=generator) + 1, torch.arange(13) + 15
    at = torch.arange(length)
    for slot, count in ((1, start), (2, 45)):
        for part, history in ((keys, k), (values, v)):
            part[table[slot, at[:count] // size], :, at[:count] % size] = history[:count]
    cache = LayerCache(keys.to(DEVICE), values.to(DEVICE), 4, 0.25, window=window)
    positions, counts = torch.cat((at[start:], at[45:46])), np.array([length - start, 1])
    batch = ForwardBatch(
        torch.zeros_like(positions, device=DEVICE), positions.to(DEVICE),
        torch.tensor([1] * (length - start) + [2], device=DEVICE), torch.tensor([43, 44], device=DEVICE),
        np.array([1, 2]), np.array([start, 45]), counts, np.array([0, length - start]), np.array([0, 1]),
        [table.to(DEVICE)],
    )  # fmt: skip
    batch, attention = batch.split_at_images(images), backend()
    assert batch.sampled_rows.tolist() == [4, 5]
    rows = torch.cat((at[start:], at[45:46]))
    got = attention.attend(*(x[rows].to(DEVICE) for x in (q, k, v)), cache, attention.plan(batch, cache))
    image = torch.tensor([next((i for i, (a, b) in enumerate(images[1]) if a <= p < b), -1) for p in range(length)])
    seen = (at <= at[:, None]) | ((image[:, None] == image) & (image >= 0))
    seen &= torch.ones_like(seen) if window is None else at > at[:, None] - window
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 0.25
    want = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(2), v.repeat_interleave(2, 1))
    torch.testing.assert_close(got.cpu(), want[rows], atol=1e-5, rtol=1e-4)


def test_a_bucket_keeps_to_the_most_scores_when_it_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    widest = 0

    def products(query: torch.Tensor, keys: torch.Tensor, *rest: Any) -> torch.Tensor:
        nonlocal widest
        widest = max(widest, query[:, :, :, :, 0].numel() * keys.shape[1])
        return torch.zeros_like(query)

    monkeypatch.setattr(sdpa, "_attend_bmm", products)
    monkeypatch.setattr(sdpa, "_attend_sdpa", products)
    monkeypatch.setattr(sdpa, "MAX_SCORES", 4 * 600 * 20)
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = [(int(rng.integers(500)), int(rng.integers(1, 100))) for _ in range(int(rng.integers(1, 12)))]
        store = stored(sizes, LayerSpec(2, 8), 4, 16)
        two_steps(SdpaBackend(), store, store.caches[LAYER], sizes)
    assert 4 * 600 * 10 < widest <= 4 * 600 * 20


@EVERY
def test_a_layer_that_writes_nothing_reads_what_is_there(backend) -> None:
    """As a layer does that shares another one's keys and values."""
    seen = []

    class Sharing(backend):
        def attend(self, q, k, v, cache, plan):
            got = super().attend(q, k, v, cache, plan)
            seen.append(torch.equal(got, super().attend(q, k * 0, v * 0, replace(cache, writes_kv=False), plan)))
            return got

    check(Sharing, BATCHES["mixed"])
    assert seen == [True, True]
