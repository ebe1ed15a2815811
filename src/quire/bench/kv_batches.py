"""Keys and values in pages for the benchmarks of kernels, and the calls of decode attention over them."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire.bench.replay import Call
from quire.kernels.forward_batch import LayerCache


class KVBatch(NamedTuple):
    """Sequences in pages: `caches` of several layers, each of which is read in turn, and device tensors."""

    caches: list[LayerCache]
    tables: Tensor
    slots: Tensor
    lengths: Tensor


def random_kv(
    batch: int, context: int, kv_heads: int, dim: int, page: int, layers: int, dtype: torch.dtype, heads: int,
    contiguous: bool = False, on: str = "cuda",
) -> KVBatch:  # fmt: skip
    """Return `batch` sequences of `context` random tokens in all layers, for `heads` query heads: in pages in random
    order, or each contiguous, with the tokens of a head one after another."""
    device = torch.device(on)
    page = context if contiguous else page
    count = -(-context // page)
    rows = torch.empty(batch * count + 1, layers, 2, kv_heads, page, dim, dtype=dtype, device=device).normal_()
    tables = torch.zeros(batch + 1, count, dtype=torch.int64, device=device)
    tables[1:] = torch.randperm(batch * count, device=device).view(batch, count) + 1
    caches = []
    for i in range(layers):
        keys, values = rows[:, i].unbind(1)
        caches.append(LayerCache(keys, values, heads, dim**-0.5, contiguous=contiguous))
    return KVBatch(
        caches, tables, torch.arange(1, batch + 1, device=device), torch.full((batch,), context, device=device)
    )


def random_tensor(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def with_drafts(where: KVBatch, drafts: int) -> KVBatch:
    """Return the same with 1 + `drafts` rows for each sequence, those of its last tokens."""
    back = torch.arange(drafts, -1, -1, device=where.slots.device)
    return where._replace(
        slots=where.slots.repeat_interleave(1 + drafts), lengths=(where.lengths[:, None] - back).flatten()
    )


def decode_calls(where: KVBatch, max_drafts: int = 0) -> list[Call]:
    """Return a decode step's attention in each layer, by the backend of up to `max_drafts` draft tokens of a slot."""
    from quire.kernels.triton.backend import TritonBackend
    from quire.kernels.triton.decode import decode, decode_scratch

    batch, cache, heads = len(where.slots), where.caches[0], where.caches[0].heads
    device, dtype, backend = where.slots.device, cache.dtype, TritonBackend(max_drafts=max_drafts)
    splits, shared = backend.num_splits(batch, cache), backend.shared_rows(cache)
    scratch = decode_scratch(batch, heads, cache.kv_heads, cache.head_dim, splits, device)
    q, out = (torch.randn(batch, heads, cache.head_dim, dtype=dtype, device=device) for _ in range(2))
    call = partial(decode, q, splits=splits, scratch=scratch, shared_rows=shared)
    return [partial(call, layer, where.tables, where.slots, where.lengths, out) for layer in where.caches]
