"""What the tests of all attention share: dense attention in fp64, and steps of a backend over poisoned pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from geometries import one_size
from grids import DEVICE, random
from torch import Tensor

from quire.kernels.forward_batch import LayerCache
from quire.layers.rotary import RotaryEmbedding, prepare_qkv
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.step_plan import SeqSlice, TableWrite
from quire.worker.inputs import FlatInputs, build_flat_batch
from quire.worker.store import Store

LAYERS, LAYER = 3, 1
Sizes = list[tuple[int, int]]
"""Tokens before and tokens of this step, of each sequence."""

BATCHES: dict[str, Sizes] = {
    "decode": [(0, 1), (5, 1), (16, 1), (33, 1)],
    "prompts": [(0, 1), (0, 16), (0, 29)],
    "chunk": [(8, 9), (31, 7)],
    "mixed": [(12, 1), (0, 20), (4, 6), (40, 1), (3, 1)],
}


def dense(
    q: Tensor, k: Tensor, v: Tensor, start: int, *, window: int | None = None, chunk: int | None = None,
    softcap: float | None = None, scale: float | None = None, whole: bool = False, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [n, heads, dim] at positions start ..; k, v [rows, kv_heads, dim]; fp64. `whole`: each query sees all rows.
    sinks [heads]: one more score of each head, dropped after the softmax."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    at = torch.arange(len(k), device=q.device)
    query_at = torch.arange(start, start + len(q), device=q.device)[:, None]
    hidden = at[None] > query_at
    if window is not None:
        hidden |= at[None] <= query_at - window
    if chunk is not None:
        hidden |= at[None] // chunk != query_at // chunk
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * (scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if not whole:
        scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


def sinks_of(heads: int, device: torch.device = DEVICE) -> Tensor:
    """Sinks of all sizes: the least takes nothing of the weights, the largest nearly all."""
    return torch.linspace(-6, 6, heads, device=device).roll(1)


def placed(
    layout: str, pages: int, size: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device = DEVICE
) -> tuple[Tensor, Tensor]:
    """Keys and values [pages, kv_heads, size, dim] of the second layer of three, poisoned but for page 0. Pages have
    heads of tokens (the store's), or tokens of heads, or a gap behind each; or keys and values have buffers of their
    own."""

    def buffer(*of: int) -> Tensor:
        whole = torch.full((pages, *of), -1 if dtype == torch.int8 else torch.nan, dtype=dtype, device=device)
        whole[0] = 0
        return whole

    if layout == "two buffers":
        keys, values = (buffer(LAYERS, kv_heads, size, dim)[:, LAYER] for _ in range(2))
    elif layout in ("tokens first", "token runs"):
        keys, values = buffer(size, LAYERS, 2, kv_heads, dim)[:, :, LAYER].permute(2, 0, 3, 1, 4)
    elif layout == "gaps":
        whole = buffer(LAYERS * 2 * kv_heads * size * dim + 24)[:, :-24]
        keys, values = whole.view(pages, LAYERS, 2, kv_heads, size, dim)[:, LAYER].unbind(1)
    else:
        keys, values = buffer(LAYERS, 2, kv_heads, size, dim)[:, LAYER].unbind(1)
    return keys, values


def stored(sizes: Sizes, layer: LayerSpec, heads: int, page: int, dtype: torch.dtype = torch.float32) -> Store:
    """A store of three layers with a table for each sequence, in random order; all other pages are poisoned."""
    spec = ModelSpec("test", (layer,) * LAYERS, 10, 4096, 16, heads, 16, 0)
    width = max(-(-(a + b) // page) for a, b in sizes)
    page_bytes = LAYERS * layer.token_bytes(dtype.itemsize) * page
    pages = len(sizes) * width + 1
    geometry = one_size(
        (tuple(range(LAYERS)), layer.window), pages=pages, page_bytes=page_bytes, slots=len(sizes) + 1, width=width,
        tokens=page, itemsize=dtype.itemsize,
    )  # fmt: skip
    store = Store(geometry, spec, dtype, DEVICE)
    store.group_pages[0][1:].fill_(torch.nan)  # recycled pages hold anything
    free = (np.random.default_rng(0).permutation(pages - 1) + 1).tolist()
    for slot, (before, now) in enumerate(sizes, 1):
        store.apply_page_ops((TableWrite(slot, 0, 0, tuple(free.pop() for _ in range(-(-(before + now) // page)))),))
    return store


def two_steps(
    backend: Any, store: Any, cache: LayerCache, sizes: Sizes, rotary: RotaryEmbedding | None = None,
    fused: bool = False, asked: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What a backend finds in a second step, for the tokens of now, behind a first one for the tokens before; and dense
    attention. `asked`: for each sequence's last token alone."""
    heads, dtype = cache.heads, cache.dtype
    raw = [
        random(a + b, heads + 2 * cache.kv_heads, cache.head_dim, dtype=dtype, seed=i) for i, (a, b) in enumerate(sizes)
    ]
    turned = []
    for x in raw:
        angles = None if rotary is None else rotary.angles_at(torch.arange(len(x), device=DEVICE), dtype)
        turned.append(prepare_qkv(x, heads, cache.kv_heads, angles, None))
    last = torch.zeros(len(sizes) + 1, dtype=torch.int64, device=DEVICE)
    earlier = [(i, 0, before) for i, (before, _) in enumerate(sizes) if before]
    present = [(i, before, now) for i, (before, now) in enumerate(sizes)]
    for rows in filter(None, (earlier, present)):
        slices = tuple(SeqSlice(i + 1, (1,) * n, start, int(asked)) for i, start, n in rows)
        batch = build_flat_batch(FlatInputs.from_slices(slices), store, last)
        plan = backend.plan(batch, cache, batch.select_sampled() if asked else None)
        if fused:
            qkv = torch.cat([raw[i][a : a + n] for i, a, n in rows])
            got = backend.rotate_and_attend(qkv, rotary, None, cache, plan)
        else:
            q, k, v = (torch.cat([turned[i][j][a : a + n] for i, a, n in rows]) for j in range(3))
            got = backend.attend(q, k, v, cache, plan)
    bounds = {name: getattr(cache, name) for name in ("window", "chunk", "softcap", "scale", "sinks")}
    firsts = [before + now - 1 if asked else before for before, now in sizes]
    want = [dense(q[first:], k, v, first, **bounds) for first, (q, k, v) in zip(firsts, turned)]
    return got, torch.cat(want)
