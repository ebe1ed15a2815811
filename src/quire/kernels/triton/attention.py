"""Decode attention over pages: one query a sequence (PagedAttention §4.1), its context split over programs.

A program takes one sequence, one key/value head with all the query heads that share it, and one part of the context;
the program that ends last joins the parts. How long each part is comes from the lengths on the device, so one captured
launch serves every length. Recycled pages hold anything: loads are masked with zeros, scores with a select.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.batch import LayerCache

MAX_SPLITS = 32
LOWEST = tl.constexpr(-1.0e30)  # below every score yet finite: the difference of two is 0, where -inf would give NaN


class Scratch(NamedTuple):
    """Where the parts of split contexts meet: `sums` fp32 [rows, kv_heads, splits, group, dim] and `stats` fp32
    [rows, kv_heads, splits, 2, group] (maximum, weight), flat; `counters` int32, all zero between launches."""

    sums: Tensor
    stats: Tensor
    counters: Tensor


def decode_scratch(rows: int, heads: int, kv_heads: int, head_dim: int, splits: int, device: torch.device) -> Scratch:
    """Scratch for launches of up to `rows` x `splits` parts; one serves all layers of a stream, one after another."""
    rows = rows if splits > 1 else 0
    sums = torch.empty(rows * heads * splits * head_dim, dtype=torch.float32, device=device)
    stats = torch.empty(rows * heads * splits * 2, dtype=torch.float32, device=device)
    return Scratch(sums, stats, torch.zeros(rows * kv_heads, dtype=torch.int32, device=device))


def choose_splits(batch: int, kv_heads: int, multiprocessors: int) -> int:
    """Parts a context for `batch` rows: programs enough to fill the GPU, a power of two. It depends on nothing that
    changes between replays of a CUDA graph."""
    wanted = 4 * multiprocessors / max(1, batch * kv_heads)
    return min(MAX_SPLITS, 1 << max(0, math.floor(math.log2(wanted)))) if wanted > 1 else 1


@triton.jit
def token_offsets(
    table, base, start, end, stride,
    PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, CONTIGUOUS: tl.constexpr,
):  # fmt: skip
    """Where tokens start .. start + BLOCK begin in a cache's buffer, before the head's own offset; int64 [BLOCK].
    Tokens from `end` on are those of the scratch page. `start` is a multiple of BLOCK. CONTIGUOUS: pages follow one
    another from page `base`, and `table` is not read."""
    across = tl.arange(0, BLOCK)
    if PAGE % BLOCK == 0:  # all in one page
        logical = start // PAGE
        if CONTIGUOUS:
            page = base + logical
        else:
            page = tl.load(table + logical, mask=start < end, other=0)
        return page * stride * (PAGE * DIM) + ((start % PAGE + across) * DIM).to(tl.int64)
    else:
        at = start + across
        logical = at // PAGE
        if CONTIGUOUS:
            page = base + logical
        else:
            page = tl.load(table + logical, mask=at < end, other=0)
        return page * stride * (PAGE * DIM) + (at % PAGE) * DIM


def factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """(inner, outer) such that the softmax of a product x of query and key is over exp2(outer * capped(x, inner)); the
    outer factor costs nothing where it joins the subtraction of the maximum."""
    log2e = math.log2(math.e)
    return (0.0, scale * log2e) if softcap is None else (2.0 * scale / softcap, softcap * log2e)


@triton.jit
def capped(scores, inner, CAPPED: tl.constexpr):
    """tanh(inner / 2 * scores), or the scores as they are."""
    if CAPPED:
        scores = 2.0 * tl.sigmoid(scores * inner) - 1.0
    return scores


@triton.jit
def _join(
    sums, stats, out, part, active,
    SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """out [GROUP, DIM] (contiguous heads) from `active` parts, added in order whoever came last."""
    splits = tl.arange(0, SPLITS_PAD)
    d = tl.arange(0, DIM_PAD)
    live = splits < active
    for g in tl.static_range(GROUP):
        stat = stats + (part * SPLITS + splits) * (2 * GROUP) + g
        # Around L1 (.cg): it may hold lines of the layer before.
        best = tl.load(stat, mask=live, other=LOWEST, cache_modifier=".cg")
        weight = tl.load(stat + GROUP, mask=live, other=0.0, cache_modifier=".cg")
        shrink = tl.exp2(best - tl.max(best, 0))
        at = ((part * SPLITS + splits) * GROUP + g) * DIM
        inside = live[:, None] & (d < DIM)[None, :]
        part_sums = tl.load(sums + at[:, None] + d[None, :], mask=inside, other=0.0, cache_modifier=".cg")
        total = tl.sum(weight * shrink, 0)
        result = tl.sum(part_sums * shrink[:, None], 0) / total
        tl.store(out + g * DIM + d, result.to(out.dtype.element_ty), mask=d < DIM)


@triton.jit(do_not_specialize=["stride", "key_row", "value_row"])
def _decode(
    q, cache, tables, slots, lengths, rows, out, sums, stats, counters,
    q_row, q_head, out_row, table_width, stride, key_row, value_row, inner, outer,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr, CONTIGUOUS: tl.constexpr, INDEXED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row)
    length = tl.load(lengths + row).to(tl.int32)
    length = tl.where(slot == 0, 0, length)  # padding sees nothing and gets zeros
    first = 0
    oldest = 0
    if WINDOW is not None:
        oldest = tl.maximum(length - WINDOW, 0)
        first = oldest // BLOCK * BLOCK
    chunk = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK) * BLOCK
    begin = first + split * chunk
    end = tl.minimum(begin + chunk, length)
    if (split > 0) & (begin >= end):
        return
    active = tl.cdiv(length - first, tl.maximum(chunk, 1))
    where = row.to(tl.int64)
    if INDEXED:
        where = tl.load(rows + row)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    inside = (g < GROUP)[:, None] & (d < DIM)[None, :]
    heads = head * GROUP + g
    query = tl.load(q + where * q_row + heads[:, None] * q_head + d[None, :], mask=inside, other=0.0)
    table = tables + slot * table_width
    base = tl.load(table) if CONTIGUOUS else 0
    keys = cache + (key_row + head).to(tl.int64) * (PAGE * DIM)
    values = cache + (value_row + head).to(tl.int64) * (PAGE * DIM)
    best = tl.full([GROUP_PAD], LOWEST, tl.float32)
    weight = tl.zeros([GROUP_PAD], tl.float32)
    total = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    # The page ids of the next tile are read a turn ahead: only then does the compiler pipeline the loads behind them.
    following = token_offsets(table, base, begin, end, stride, PAGE, DIM, BLOCK, CONTIGUOUS)
    for start in range(begin, end, BLOCK):
        offsets = following
        following = token_offsets(table, base, start + BLOCK, end, stride, PAGE, DIM, BLOCK, CONTIGUOUS)
        at = start + tl.arange(0, BLOCK)
        seen = at < end
        if WINDOW is not None:
            seen &= at >= oldest
        live = seen[:, None]
        if DIM != DIM_PAD:
            live &= (d < DIM)[None, :]
        key = tl.load(keys + offsets[:, None] + d[None, :], mask=live, other=0.0)
        scores = capped(tl.dot(query, tl.trans(key), input_precision="ieee"), inner, CAPPED)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 1) * outer)
        weights = tl.exp2(scores * outer - new[:, None])
        shrink = tl.exp2(best - new)
        value = tl.load(values + offsets[:, None] + d[None, :], mask=live, other=0.0)
        weight = weight * shrink + tl.sum(weights, 1)
        total = tl.dot(weights.to(value.dtype), value, total * shrink[:, None], input_precision="ieee")
        best = new
    target = out + where * out_row + head * GROUP * DIM
    if active <= 1:
        result = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
        tl.store(target + g[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=inside)
    elif SPLITS > 1:
        part = row.to(tl.int64) * KV_HEADS + head
        spot = part * SPLITS + split
        tl.store(sums + (spot * GROUP + g)[:, None] * DIM + d[None, :], total, mask=inside)
        tl.store(stats + spot * (2 * GROUP) + g, best, mask=g < GROUP)
        tl.store(stats + spot * (2 * GROUP) + GROUP + g, weight, mask=g < GROUP)
        tl.debug_barrier()  # all threads' stores come before the one thread's atomic, which releases them
        if tl.atomic_add(counters + part, 1, sem="acq_rel") == active - 1:
            tl.store(counters + part, 0)
            _join(sums, stats, target, part, active, SPLITS, SPLITS_PAD, GROUP, DIM, DIM_PAD)


def decode(
    q: Tensor, cache: LayerCache, tables: Tensor, slots: Tensor, lengths: Tensor, out: Tensor | None = None, *,
    scale: float, splits: int, softcap: float | None = None, pdl: bool = False, scratch: Scratch | None = None,
    contiguous: bool = False, rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one query a sequence: q [B, heads, dim] (rows and heads may be strided) -> out [B, heads, dim].

    tables [slots, logical pages] is that of the cache's group, slots and lengths [B] are int64 on the device; a length
    counts the token of this step, which is already in its page. Slot 0 or length 0 is padding: zeros come out. With
    `rows` int64 [B], sequence i's query and output are row rows[i] of q and out instead of row i. With splits=1 a row's
    result does not depend on the other rows. `contiguous` trusts that pages follow one another from each table's first
    entry and reads no other. Nothing here waits for the device.
    """
    heads, dim = q.shape[1:]
    batch, kv_heads = slots.shape[0], cache.kv_heads
    group = heads // kv_heads
    out = torch.empty((q.shape[0], heads, dim), dtype=q.dtype, device=q.device) if out is None else out
    assert (q.stride(2), *out.stride()[1:]) == (1, dim, 1), "heads are rows of `dim` numbers"
    if scratch is None:
        scratch = decode_scratch(batch, heads, kv_heads, dim, splits, q.device)
    else:
        assert splits == 1 or scratch.sums.numel() >= batch * heads * splits * dim, "scratch is too small"
    dim_pad = max(16, triton.next_power_of_2(dim))
    block, warps, stages = _shape(dim_pad, q.element_size())
    _decode[(kv_heads, splits, batch)](
        q, cache.rows, tables, slots, lengths, slots if rows is None else rows, out, *scratch,
        q.stride(0), q.stride(1), out.stride(0), tables.stride(0), cache.stride, cache.key_row, cache.value_row,
        *factors(scale, softcap),
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), DIM=dim, DIM_PAD=dim_pad,
        PAGE=cache.page_tokens, WINDOW=cache.window, CAPPED=softcap is not None, BLOCK=block, SPLITS=splits,
        SPLITS_PAD=triton.next_power_of_2(splits), CONTIGUOUS=contiguous, INDEXED=rows is not None, PDL=pdl,
        num_warps=warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _shape(dim_pad: int, itemsize: int) -> tuple[int, int, int]:
    """Tokens a tile, warps, stages of the pipeline."""
    if itemsize == 4:
        return 32, 4, 2
    return (64, 4, 3) if dim_pad <= 128 else (32, 4, 3)
