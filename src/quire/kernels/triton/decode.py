"""Decode attention over pages: one query a sequence (PagedAttention §4.1), its context split over programs.

A program takes one sequence, one key/value head with all the query heads that share it, and one part of the context;
a second kernel joins the parts. How long each part is comes from the lengths on the device, so one captured launch
serves every length. Recycled pages hold anything: loads are masked with zeros, scores with a select.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.forward_batch import LayerCache
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import power_of_2, shared_memory

MAX_SPLITS = 32
STAGES_BY_RESIDENCY = {
    2: 4,
    3: 3,
}  # programs a multiprocessor holds -> stages of their pipelines, which shared memory allows then
MIN_SCORE = tl.constexpr(-1.0e30)  # below every score yet finite: the difference of two is 0, where -inf would give NaN


class SplitScratch(NamedTuple):
    """Where the parts of split contexts meet, flat, four bytes a number: `sums` [rows, kv_heads, splits, group, dim],
    `maxima` and `weights` [rows, kv_heads, splits, group]. Nothing in it outlives a call of `decode`."""

    sums: Tensor
    maxima: Tensor
    weights: Tensor


def decode_scratch(
    rows: int, heads: int, kv_heads: int, head_dim: int, splits: int, device: torch.device
) -> SplitScratch:
    """For launches of up to `rows` x `splits` parts; one serves all layers of a stream, one after another."""
    parts = rows * heads * splits if splits > 1 else 0
    return SplitScratch(*(torch.empty(n, dtype=torch.float32, device=device) for n in (parts * head_dim, parts, parts)))


def choose_splits(batch: int, kv_heads: int, multiprocessors: int) -> int:
    """Parts a context for `batch` rows. Programs come in waves, so the last wave should be nearly full; each doubling
    of the parts costs about a tenth in joining them. Nothing that changes between replays of a CUDA graph matters."""
    best, most = 1, 0.0
    for doublings in range(MAX_SPLITS.bit_length()):
        programs = max(1, batch * kv_heads) << doublings
        worth = 0.9**doublings * max(wave_occupancy(programs, multiprocessors * n) for n in STAGES_BY_RESIDENCY)
        if worth > most:
            best, most = 1 << doublings, worth
    return best


def representative_batches(most: int, cache: LayerCache, device: torch.device) -> list[int]:
    """Batches of up to `most` rows such that whatever kernel a batch needs, one of these needs it too."""
    found: dict[tuple[int, ...], int] = {}
    padded = _padded_tile(cache.heads // cache.kv_heads, cache.head_dim)
    for batch in range(1, most + 1):
        splits = choose_splits(batch, cache.kv_heads, multiprocessors(device))
        shape = _tile_config(*padded, cache.dtype.itemsize, batch * cache.kv_heads * splits, device)
        found.setdefault((splits, *shape), batch)
    return list(found.values())


def wave_occupancy(programs: int, places: int) -> float:
    """How full `programs` fill their waves of `places`."""
    return programs / (-(-programs // places) * places)


@triton.jit
def token_offsets(
    table, base, start, end, stride, PAGE: tl.constexpr, UNIT: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr, CONTIGUOUS: tl.constexpr,
):  # fmt: skip
    """Where tokens start .. start + BLOCK begin behind the keys or values of a head; int64 [BLOCK]. Pages are `stride`
    units apart. Tokens from `end` on are those of the scratch page. `start` is a multiple of BLOCK. CONTIGUOUS: all
    tokens follow one another in page `base`, and neither `table` is read nor PAGE used."""
    across = tl.arange(0, BLOCK)
    if CONTIGUOUS:
        return base * stride * UNIT + (start + across).to(tl.int64) * TOKEN_STRIDE
    elif PAGE % BLOCK == 0:  # all in one page
        page = tl.load(table + start // PAGE, mask=start < end, other=0)
        return page * stride * UNIT + ((start % PAGE + across) * TOKEN_STRIDE).to(tl.int64)
    else:
        at = start + across
        page = tl.load(table + at // PAGE, mask=at < end, other=0)
        return page * stride * UNIT + (at % PAGE) * TOKEN_STRIDE


def softmax_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """(inner, outer) such that the softmax of a product x of query and key is over exp2(outer * capped(x, inner)); the
    outer factor costs nothing where it joins the subtraction of the maximum."""
    log2e = math.log2(math.e)
    return (0.0, scale * log2e) if softcap is None else (2.0 * scale / softcap, softcap * log2e)


@triton.jit
def apply_softcap(scores, inner, CAPPED: tl.constexpr):
    """tanh(inner / 2 * scores), or the scores as they are."""
    if CAPPED:
        scores = 2.0 * tl.sigmoid(scores * inner) - 1.0
    return scores


@triton.jit
def context_extent(length, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """(oldest position seen, start of its tile, tokens a part, parts) of a context of `length` tokens."""
    oldest = 0
    if WINDOW is not None:
        oldest = tl.maximum(length - WINDOW, 0)
    elif CHUNK is not None:
        oldest = tl.maximum(length - 1, 0) // CHUNK * CHUNK
    first = oldest // BLOCK * BLOCK
    chunk = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK) * BLOCK
    return oldest, first, chunk, tl.cdiv(length - first, tl.maximum(chunk, 1))


# Where indices lie is no reason to compile a kernel once more, in the middle of a step.
@fast_launch
@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["slots", "lengths", "rows"])
def _decode(
    q, keys, values, tables, slots, lengths, rows, out, sums, maxima, divisors,
    q_row, q_head, out_row, table_width, stride, inner, outer,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr, UNIT: tl.constexpr, HEAD_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    VALUES_AFTER: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, CONTIGUOUS: tl.constexpr, INDEXED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """VALUES_AFTER: numbers from a key to its value; None: they are in another buffer, where `values` points."""
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row)
    length = tl.load(lengths + row).to(tl.int32)
    length = tl.where(slot == 0, 0, length)  # padding sees nothing and gets zeros
    oldest, first, chunk, active = context_extent(length, WINDOW, CHUNK, BLOCK, SPLITS)
    begin = first + split * chunk
    end = tl.minimum(begin + chunk, length)
    idle = (split > 0) & (begin >= end)
    where = row.to(tl.int64)
    if INDEXED:
        where = tl.load(rows + row)
        idle |= where < 0
    if idle:
        return
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    inside = (g < GROUP)[:, None] & (d < DIM)[None, :]
    heads = head * GROUP + g
    query = tl.load(q + where * q_row + heads[:, None] * q_head + d[None, :], mask=inside, other=0.0)
    table = tables + slot * table_width
    base = tl.load(table) if CONTIGUOUS else 0
    keys += head.to(tl.int64) * HEAD_STRIDE
    values += head.to(tl.int64) * HEAD_STRIDE
    best = tl.full([GROUP_PAD], MIN_SCORE, tl.float32)
    weight = tl.zeros([GROUP_PAD], tl.float32)
    total = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    # The page ids of the next tile are read a turn ahead: only then does the compiler pipeline the loads behind them.
    following = token_offsets(table, base, begin, end, stride, PAGE, UNIT, TOKEN_STRIDE, BLOCK, CONTIGUOUS)
    for start in range(begin, end, BLOCK):
        offsets = following
        following = token_offsets(
            table, base, start + BLOCK, end, stride, PAGE, UNIT, TOKEN_STRIDE, BLOCK, CONTIGUOUS
        )  # fmt: skip
        at = start + tl.arange(0, BLOCK)
        seen = at < end
        if WINDOW is not None or CHUNK is not None:
            seen &= at >= oldest
        live = seen[:, None]
        if DIM != DIM_PAD:
            live &= (d < DIM)[None, :]
        places = keys + offsets[:, None] + d[None, :]
        key = tl.load(places, mask=live, other=0.0)
        scores = apply_softcap(tl.dot(query, tl.trans(key), input_precision="ieee"), inner, CAPPED)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 1) * outer)
        weights = tl.exp2(scores * outer - new[:, None])
        shrink = tl.exp2(best - new)
        if VALUES_AFTER is not None:
            places += VALUES_AFTER
        else:
            places = values + offsets[:, None] + d[None, :]
        value = tl.load(places, mask=live, other=0.0)
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
        tl.store(maxima + spot * GROUP + g, best, mask=g < GROUP)
        tl.store(divisors + spot * GROUP + g, weight, mask=g < GROUP)


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["slots", "lengths", "rows"])
def _join(
    sums, maxima, divisors, slots, lengths, rows, out, out_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, INDEXED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One head's result from the parts that _decode left, if there is more than one."""
    g, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # Nothing here waits for the length but the mask: all loads are under way at once. What no part wrote is not used.
    length = tl.load(lengths + row).to(tl.int32)
    length = tl.where(tl.load(slots + row) == 0, 0, length)
    where = row.to(tl.int64)
    if INDEXED:
        where = tl.load(rows + row)
    splits = tl.arange(0, SPLITS_PAD)
    d = tl.arange(0, DIM_PAD)
    inside = (splits < SPLITS)[:, None] & (d < DIM)[None, :]
    part = ((row.to(tl.int64) * KV_HEADS + head) * SPLITS + splits) * GROUP + g
    best = tl.load(maxima + part, mask=splits < SPLITS, other=MIN_SCORE)
    weight = tl.load(divisors + part, mask=splits < SPLITS, other=0.0)
    total = tl.load(sums + (part * DIM)[:, None] + d[None, :], mask=inside, other=0.0)
    active = context_extent(length, WINDOW, CHUNK, BLOCK, SPLITS)[3]
    live = (splits < active) & (active > 1)
    best = tl.where(live, best, MIN_SCORE)
    shrink = tl.exp2(best - tl.max(best, 0))
    whole = tl.sum(tl.where(live, weight, 0.0) * shrink, 0)
    total = tl.sum(tl.where(live[:, None], total, 0.0) * shrink[:, None], 0)
    result = total / tl.where(active > 1, whole, 1.0)
    target = out + where * out_row + (head * GROUP + g) * DIM + d
    tl.store(target, result.to(out.dtype.element_ty), mask=(d < DIM) & (active > 1))


def layout_constants(cache: LayerCache) -> dict[str, object]:
    """What kernels are compiled for, of a cache's layout."""
    return {
        "PAGE": None if cache.contiguous else cache.page_tokens, "UNIT": cache.page_alignment,
        "HEAD_STRIDE": cache.head_stride,
        "TOKEN_STRIDE": cache.token_stride, "VALUES_AFTER": cache.value_offset, "CONTIGUOUS": cache.contiguous,
    }  # fmt: skip


def decode(
    q: Tensor, cache: LayerCache, tables: Tensor, slots: Tensor, lengths: Tensor, out: Tensor | None = None, *,
    splits: int, pdl: bool = False, scratch: SplitScratch | None = None, rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one query a sequence: q [B, heads, dim] (rows and heads may be strided) -> out [B, heads, dim].

    tables [slots, logical pages] is that of the cache's group, slots and lengths [B] are int64 on the device; a length
    counts the token of this step, which is already in its page. Slot 0 or length 0 is padding: zeros come out. With
    `rows` int64 [B], sequence i's query and output are row rows[i] of q and out instead of row i; at -1, which is for
    padding, it has neither. With splits=1 a row's result does not depend on the other rows. Nothing here waits for the
    device.
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
    group_pad, dim_pad = _padded_tile(group, dim)
    block, warps, stages = _tile_config(group_pad, dim_pad, q.element_size(), batch * kv_heads * splits, q.device)
    parts = [x.view(torch.float32) for x in scratch]
    named = slots if rows is None else rows
    shared = {
        "KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "DIM_PAD": dim_pad, "WINDOW": cache.window,
        "CHUNK": cache.chunk, "BLOCK": block, "SPLITS": splits, "INDEXED": rows is not None, "PDL": pdl,
        "launch_pdl": pdl,
    }  # fmt: skip
    _decode[(kv_heads, splits, batch)](
        q, cache.keys, cache.values, tables, slots, lengths, named, out, *parts, q.stride(0), q.stride(1),
        out.stride(0), tables.stride(0), cache.page_stride_units, *softmax_factors(cache.scale, cache.softcap),
        GROUP_PAD=group_pad, CAPPED=cache.softcap is not None, num_warps=warps, num_stages=stages,
        **layout_constants(cache), **shared,
    )  # fmt: skip
    if splits > 1:
        _join[(group, kv_heads, batch)](
            *parts, slots, lengths, named, out, out.stride(0),
            SPLITS_PAD=power_of_2(splits), num_warps=4, **shared,
        )  # fmt: skip
    return out


def _padded_tile(group: int, dim: int) -> tuple[int, int]:
    """Rows and columns of a tile of queries."""
    return max(16, power_of_2(group)), max(16, power_of_2(dim))


def _tile_config(
    group_pad: int, dim_pad: int, itemsize: int, programs: int, device: torch.device
) -> tuple[int, int, int]:
    """Tokens a tile, warps, stages of the pipeline. Two warps hide latencies as well as four and join less; stages are
    as many as leave room for all programs at once, or for the most. Many waves of programs are short ones, whose starts
    are hidden best behind many others: small tiles of one warp. (H200, between large products, which slow its clock:
    256 rows of 250 and 650 tokens 63 and 149 us; with two warps and 3 stages 63 and 154, with 4 stages 74 and 165.)
    Fewer stages where one program's shared memory would be more than the device has."""
    count = multiprocessors(device)
    if itemsize == 4:
        block, warps, stages = 32, 4, 2
    elif dim_pad == 128 and programs > 3 * max(STAGES_BY_RESIDENCY) * count:
        block, warps, stages = 32, 1, 4
    elif dim_pad == 256:  # 133 rows of 300 and 500 tokens: 3.92 and 4.02 TB/s; 3.58 and 3.93 as for smaller heads
        block, warps, stages = 16, 1, 3
    else:
        most = next((n for n in sorted(STAGES_BY_RESIDENCY) if programs <= count * n), max(STAGES_BY_RESIDENCY))
        block, warps, stages = min(max(8192 // dim_pad, 32), 128), 2, STAGES_BY_RESIDENCY[most]
    while stages > 1 and program_bytes(group_pad, dim_pad, itemsize, block, stages) > shared_memory(device):
        stages -= 1
    return block, warps, stages


def program_bytes(group_pad: int, dim_pad: int, itemsize: int, block: int, stages: int) -> int:
    """Shared memory that the compiler gives a program: keys and values of all stages but one, queries and weights."""
    return ((stages - 1) * 2 * block * dim_pad + group_pad * (dim_pad + block)) * itemsize


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 of a CPU, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
