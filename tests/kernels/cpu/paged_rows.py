"""Rows over poisoned pages for the kernels of attention on a CPU, and what they should get in fp64."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import attention_steps
import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu.library import Library
from quire.kernels.cpu.library_loader import BUILT
from quire.kernels.forward_batch import ForwardBatch, LayerCache


@lru_cache
def kernels(variant: str, threads: int) -> Library:
    return Library(BUILT / f"{variant}.so", threads)


class Shape(NamedTuple):
    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    page: int = 16
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    layout: str = "pages"
    dtype: torch.dtype = torch.float32
    whole: bool = False
    rounded: bool = False
    sinks: bool = False


class Rows(NamedTuple):
    """A step whose earlier tokens are in the pages; `expected` is fp64."""

    batch: ForwardBatch
    cache: LayerCache
    q: Tensor
    k: Tensor
    v: Tensor
    expected: Tensor


def cells(cache: LayerCache) -> tuple[Tensor, Tensor]:
    """Keys and values in 8 bits with their scales: [pages, kv_heads, page_tokens, dim + 4]."""
    keys, values = (
        x.as_strided((*x.shape[:3], cache.head_dim + 4), x.stride(), x.storage_offset())
        for x in (cache.keys, cache.values)
    )
    return keys, values


def cells_of(x: Tensor) -> Tensor:
    """x [..., dim] as 127ths of each row's largest number, behind which is how large one is, in fp32: int8."""
    scales = x.float().abs().amax(-1, keepdim=True) / 127
    return torch.cat(((x.float() / scales).round().to(torch.int8), scales.view(torch.int8)), -1)


def of_cells(cells: Tensor) -> Tensor:
    """[..., dim] in fp64: what such cells hold."""
    return cells[..., :-4].double() * cells[..., -4:].contiguous().view(torch.float32).double()


def exact_in_8_bits(x: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers in the shape and dtype of x that such cells hold exactly, of many sizes."""
    numbers = torch.randint(-127, 128, x.shape, generator=generator)
    numbers[..., 0] = 127 * (numbers[..., 0].sign() | 1)
    return (numbers * 2.0 ** torch.randint(-9, -4, (*x.shape[:-1], 1), generator=generator)).to(x.dtype)


def filled(shape: Shape, sizes: list[tuple[int, int]], seed: int = 0) -> Rows:
    """Rows of (tokens before, tokens of this step), each in pages of its own, in random order."""
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    lengths = [a + b for a, b in sizes]
    page = max(lengths) + 3 if shape.layout == "contiguous" else shape.page
    counts = [-(-length // page) for length in lengths]
    cell, kept = (shape.dim + 4, torch.int8) if shape.rounded else (shape.dim, shape.dtype)
    keys, values = attention_steps.placed(
        shape.layout, sum(counts) + 1, page, shape.kv_heads, cell, kept, torch.device("cpu")
    )
    cache = LayerCache(
        keys[..., : shape.dim], values[..., : shape.dim], shape.heads, shape.dim**-0.5, window=shape.window,
        chunk=shape.chunk, softcap=shape.softcap, contiguous=shape.layout == "contiguous",
        sinks=attention_steps.sinks_of(shape.heads, torch.device("cpu")) if shape.sinks else None,
    )  # fmt: skip
    table = torch.zeros(len(sizes) + 1, max(counts), dtype=torch.int64)
    free = (rng.permutation(sum(counts)) + 1).tolist()
    histories = [
        torch.randn(2, length, shape.kv_heads, shape.dim, generator=generator).to(shape.dtype) for length in lengths
    ]
    if shape.rounded:
        histories = [exact_in_8_bits(x, generator) for x in histories]
    for slot, count in enumerate(counts, 1):
        table[slot, :count] = torch.tensor([free.pop() for _ in range(count)])
        for at in range(sizes[slot - 1][0]):
            for i, part in enumerate((keys, values)):
                token = histories[slot - 1][i, at]
                part[table[slot, at // page], :, at % page] = cells_of(token) if shape.rounded else token
    now = np.array([b for _, b in sizes])
    starts, slots = np.array([a for a, _ in sizes]), np.arange(1, len(sizes) + 1)
    offsets = np.cumsum(now) - now
    positions = torch.from_numpy(np.concatenate([np.arange(a, a + b) for a, b in sizes]))
    batch = ForwardBatch(
        torch.zeros_like(positions), positions, torch.from_numpy(np.repeat(slots, now)), positions[:0], slots, starts,
        now, offsets, np.arange(0), [table], bidirectional=np.ones(len(sizes), dtype=np.bool_) if shape.whole else None,
    )  # fmt: skip
    q = torch.randn(len(positions), shape.heads, shape.dim, generator=generator).to(shape.dtype)
    k, v = (torch.cat([x[i, a:] for x, (a, _) in zip(histories, sizes)]) for i in (0, 1))
    bounds = pairwise([*offsets.tolist(), len(q)])
    parts = [dense(q[a:b], history, before, shape) for (a, b), history, (before, _) in zip(bounds, histories, sizes)]
    return Rows(batch, cache, q, k, v, torch.cat(parts))


def dense(q: Tensor, history: Tensor, start: int, shape: Shape) -> Tensor:
    """q [n, heads, dim] at positions start .., of history [2, start + n, kv_heads, dim], in fp64."""
    bounds = {"window": shape.window, "chunk": shape.chunk, "softcap": shape.softcap}
    bounds["sinks"] = attention_steps.sinks_of(shape.heads, torch.device("cpu")) if shape.sinks else None
    return attention_steps.dense(q, *history, start, **bounds, whole=shape.whole)
