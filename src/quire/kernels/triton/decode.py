"""Decode attention over pages: one query a sequence (PagedAttention §4.1), its context split over programs.

A program computes one sequence, one key/value head with all the query heads that share it, and one part (split) of the
context; a second kernel joins the parts. The length of a part is computed from the lengths on the device, so that one
captured launch serves every length. Reused pages may hold any bytes: loads are masked with zeros, scores by a select.

The verification of draft tokens makes adjacent rows of one slot. With `shared_rows` a program computes several of them,
which are called a tile, and reads their keys and values once; the programs of a tile's other rows exit at once. Tiles
are found on the device, from the slots.
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
from quire.kernels.triton.launch import cdiv, power_of_2, shared_memory
from quire.kernels.triton.tiles import Tile, card_tile

MAX_SPLITS = 32
RESIDENCIES = (2, 3)  # numbers of programs that a multiprocessor may run at once
SLOT_WINDOW = tl.constexpr(32)  # slots that a program reads to find its tile
MAX_SHARED_ROWS = 16
MIN_SCORE = tl.constexpr(-1.0e30)  # below every score but finite: a difference of two is 0, where -inf would give NaN


class SplitScratch(NamedTuple):
    """Partial results of split contexts, flat, four bytes a number: `sums` [rows, kv_heads, splits, group, dim],
    `maxima` and `weights` [rows, kv_heads, splits, group]. The contents are valid only within a call of `decode`."""

    sums: Tensor
    maxima: Tensor
    weights: Tensor


def decode_scratch(
    rows: int, heads: int, kv_heads: int, head_dim: int, splits: int, device: torch.device
) -> SplitScratch:
    """Allocate a scratch for launches of up to `rows` x `splits` parts; all layers of a stream can share it."""
    parts = rows * heads * splits if splits > 1 else 0
    return SplitScratch(*(torch.empty(n, dtype=torch.float32, device=device) for n in (parts * head_dim, parts, parts)))


def choose_splits(batch: int, kv_heads: int, multiprocessors: int) -> int:
    """Return the parts of a context for `batch` rows. Programs run in waves, so the last wave should be nearly full;
    each doubling of the parts costs about a tenth in joining them. Depends on nothing that changes between replays of
    a CUDA graph."""
    best, most = 1, 0.0
    for doublings in range(MAX_SPLITS.bit_length()):
        programs = max(1, batch * kv_heads) << doublings
        worth = 0.9**doublings * max(wave_occupancy(programs, multiprocessors * n) for n in RESIDENCIES)
        if worth > most:
            best, most = 1 << doublings, worth
    return best


def num_shared_rows(most: int, cache: LayerCache) -> int:
    """Return how many of up to `most` adjacent rows of one slot a program should compute: as many as fill two tiles of
    tensor cores, or one if heads are so large that the results of two take too many registers."""
    queries = 32 if cache.head_dim <= 128 else 16
    return max(1, min(most, queries // (cache.heads // cache.kv_heads), MAX_SHARED_ROWS))


def representative_batches(most: int, cache: LayerCache, device: torch.device, shared_rows: int = 1) -> list[int]:
    """Return batch sizes up to `most` that together use every compiled kernel of batches up to `most` rows."""
    batches: dict[tuple[int, ...], int] = {}
    padded = _padded_tile(shared_rows * (cache.heads // cache.kv_heads), cache.head_dim)
    for batch in range(1, most + 1):
        tiles = cdiv(batch, shared_rows)
        splits = choose_splits(tiles, cache.kv_heads, multiprocessors(device))
        tile = choose_tile(*padded, cache.dtype.itemsize, tiles * cache.kv_heads * splits, device)
        batches.setdefault((splits, *tile), batch)
    return list(batches.values())


def wave_occupancy(programs: int, places: int) -> float:
    """Return the share of their waves of `places` that `programs` fill."""
    return programs / (-(-programs // places) * places)


@triton.jit
def token_offsets(
    table, base, start, end, stride, PAGE: tl.constexpr, UNIT: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr, CONTIGUOUS: tl.constexpr,
):  # fmt: skip
    """Return the offsets of tokens start .. start + BLOCK from the begin of a head's keys or values, int64 [BLOCK].
    Pages are `stride` units apart. Tokens from `end` on are read from the scratch page. `start` is a multiple of BLOCK.
    CONTIGUOUS: all tokens are adjacent in page `base`, and `table` and PAGE are not used."""
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
    """Return (inner, outer) such that the softmax of a product x of query and key is over exp2(outer * capped(x,
    inner)). The outer factor costs nothing, because it is fused with the subtraction of the maximum."""
    log2e = math.log2(math.e)
    return (0.0, scale * log2e) if softcap is None else (2.0 * scale / softcap, softcap * log2e)


@triton.jit
def apply_softcap(scores, inner, CAPPED: tl.constexpr):
    """Return tanh(inner / 2 * scores) if CAPPED, else the scores."""
    if CAPPED:
        scores = 2.0 * tl.sigmoid(scores * inner) - 1.0
    return scores


@triton.jit
def begin_softmax(sinks, heads, mask):
    """Return the maximum and the sum of the running softmax of each row, which begins with the sink of its head where
    `mask` is true: a score without a value."""
    LOG2E: tl.constexpr = 1.4426950408889634
    sink = tl.load(sinks + heads, mask=mask, other=float("-inf")) * LOG2E
    return tl.maximum(sink, MIN_SCORE), tl.where(mask, 1.0, 0.0)


@triton.jit
def oldest_visible(length, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the oldest position that the last of `length` tokens sees."""
    oldest = 0
    if WINDOW is not None:
        oldest = tl.maximum(length - WINDOW, 0)
    elif CHUNK is not None:
        oldest = tl.maximum(length - 1, 0) // CHUNK * CHUNK
    return oldest


@triton.jit
def context_extent(oldest, length, splits, BLOCK: tl.constexpr):
    """Return (start of the first block, tokens of a part, parts) of the positions `oldest` .. length - 1, in up to
    `splits` parts."""
    first = oldest // BLOCK * BLOCK
    chunk = tl.cdiv(tl.cdiv(length - first, splits), BLOCK) * BLOCK
    return first, chunk, tl.cdiv(length - first, tl.maximum(chunk, 1))


@triton.jit
def find_tile(slots, lengths, row, rows, SHARED: tl.constexpr):
    """Return (first row, end, least and greatest length) of the tile to which `row` of `rows` belongs. A run of rows of
    one slot is divided into tiles of SHARED rows; rows from whose place the begin of the run cannot be seen, as in a
    long run of padding, are tiles of their own."""
    if SHARED == 1:
        first, end = row, row + 1
        longest = tl.load(lengths + row).to(tl.int32)
        shortest = longest
    else:
        reach: tl.constexpr = (SLOT_WINDOW - SHARED) // SHARED * SHARED
        near = row - reach + tl.arange(0, SLOT_WINDOW)
        exists = (near >= 0) & (near < rows)
        differs = tl.load(slots + near, mask=exists, other=-1) != tl.load(slots + row)
        length = tl.load(lengths + near, mask=exists, other=0).to(tl.int32)
        place = row - tl.max(tl.where(differs & (near < row), near + 1, row - reach), 0)  # in its run
        first = tl.where(place == reach, row, row - place % SHARED)
        end = tl.minimum(first + SHARED, tl.min(tl.where(differs & (near > row), near, row + SHARED), 0))
        end = tl.where(place == reach, row + 1, end)
        inside = (near >= first) & (near < end)
        longest = tl.max(tl.where(inside, length, 0), 0)
        shortest = tl.min(tl.where(inside, length, longest), 0)
    return first, end, shortest, longest


# The alignment of indices is not specialized, because another variant would be compiled in the middle of a step.
@fast_launch
@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["slots", "lengths", "rows"])
def _decode(
    q, keys, values, tables, slots, lengths, rows, sinks, out, sums, maxima, divisors,
    q_row, q_head, out_row, table_width, stride, inner, outer,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, QUERIES: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, VALUES_AFTER: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr, CONTIGUOUS: tl.constexpr, INDEXED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one head and part of a tile of up to SHARED rows a program: GROUP queries of each row. VALUES_AFTER:
    offset in numbers from a key to its value; None: values are in another buffer, at `values`."""
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)  # not a constant, because each number would be another kernel to compile
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row)
    first_row, end_row, shortest, longest = find_tile(slots, lengths, row, tl.num_programs(2), SHARED)
    shortest = tl.where(slot == 0, 0, shortest)  # padding sees nothing, and its result is zeros
    longest = tl.where(slot == 0, 0, longest)
    oldest = oldest_visible(shortest, WINDOW, CHUNK)
    first, chunk, active = context_extent(oldest, longest, splits, BLOCK)
    begin = first + split * chunk
    end = tl.minimum(begin + chunk, longest)
    idle = (split > 0) & (begin >= end)
    where = row.to(tl.int64)
    if SHARED > 1:
        idle |= row != first_row
    elif INDEXED:
        where = tl.load(rows + row)
        idle |= where < 0
    if idle:
        return
    query_index = tl.arange(0, QUERIES)
    g, used = query_index, query_index < GROUP
    if SHARED > 1:
        own_row = row + query_index // GROUP
        g, used = query_index % GROUP, own_row < end_row
        own_length = tl.where(slot == 0, 0, tl.load(lengths + own_row, mask=used, other=0).to(tl.int32))[:, None]
        where = own_row.to(tl.int64)
        if INDEXED:
            where = tl.load(rows + own_row, mask=used, other=-1)
            used &= where >= 0
        where = where[:, None]
    d = tl.arange(0, DIM_PAD)
    inside = used[:, None] & (d < DIM)[None, :]
    heads = head * GROUP + g
    query = tl.load(q + where * q_row + heads[:, None] * q_head + d[None, :], mask=inside, other=0.0)
    table = tables + slot * table_width
    base = tl.load(table) if CONTIGUOUS else 0
    keys += head.to(tl.int64) * HEAD_STRIDE
    values += head.to(tl.int64) * HEAD_STRIDE
    best = tl.full([QUERIES], MIN_SCORE, tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    if sinks is not None:
        best, weight = begin_softmax(sinks, heads, used & (split == 0))
    total = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    # Page ids are read one iteration ahead: only then does the compiler pipeline the loads that depend on them.
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
        seen = seen[None, :]
        if SHARED > 1:
            seen &= at[None, :] < own_length
            if WINDOW is not None or CHUNK is not None:
                seen &= at[None, :] >= oldest_visible(own_length, WINDOW, CHUNK)
        scores = tl.where(seen, scores, float("-inf"))
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
    else:
        part = row.to(tl.int64) * KV_HEADS + head
        if SHARED > 1:
            part = own_row.to(tl.int64) * KV_HEADS + head
        spot = part * splits + split
        tl.store(sums + (spot * GROUP + g)[:, None] * DIM + d[None, :], total, mask=inside)
        tl.store(maxima + spot * GROUP + g, best, mask=used)
        tl.store(divisors + spot * GROUP + g, weight, mask=used)


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["slots", "lengths", "rows"])
def _join(
    sums, maxima, divisors, slots, lengths, rows, out, out_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
    INDEXED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one head's result from the parts that _decode stored, if there is more than one."""
    g, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # Only the mask depends on the lengths, so all loads run at once. Numbers that no part wrote are not used.
    _, _, shortest, longest = find_tile(slots, lengths, row, tl.num_programs(2), SHARED)
    longest = tl.where(tl.load(slots + row) == 0, 0, longest)
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
    active = context_extent(oldest_visible(shortest, WINDOW, CHUNK), longest, SPLITS, BLOCK)[2]
    live = (splits < active) & (active > 1)
    best = tl.where(live, best, MIN_SCORE)
    shrink = tl.exp2(best - tl.max(best, 0))
    whole = tl.sum(tl.where(live, weight, 0.0) * shrink, 0)
    total = tl.sum(tl.where(live[:, None], total, 0.0) * shrink[:, None], 0)
    sees = active > 1
    if SHARED > 1:
        sees &= whole > 0.0  # a row of length 0 may be in a tile of others
    result = total / tl.where(sees, whole, 1.0)
    target = out + where * out_row + (head * GROUP + g) * DIM + d
    tl.store(target, result.to(out.dtype.element_ty), mask=(d < DIM) & (active > 1))


def layout_constants(cache: LayerCache) -> dict[str, object]:
    """Return the properties of a cache's layout for which kernels are compiled."""
    return {
        "PAGE": None if cache.contiguous else cache.page_tokens, "UNIT": cache.page_alignment,
        "HEAD_STRIDE": cache.head_stride,
        "TOKEN_STRIDE": cache.token_stride, "VALUES_AFTER": cache.value_offset, "CONTIGUOUS": cache.contiguous,
    }  # fmt: skip


def decode(
    q: Tensor, cache: LayerCache, tables: Tensor, slots: Tensor, lengths: Tensor, out: Tensor | None = None, *,
    splits: int, pdl: bool = False, scratch: SplitScratch | None = None, rows: Tensor | None = None,
    shared_rows: int = 1, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention of one query a row: q [B, heads, dim], with any strides of rows and heads, -> out [B, heads,
    dim].

    tables [slots, logical pages] is that of the cache's group; slots and lengths [B] are int64 on the device. A length
    includes the token of this step, which must be in its page. Slot 0 or length 0 is padding, whose output is zeros.
    With `rows` int64 [B], sequence i's query and output are row rows[i] of q and out instead of row i; rows[i] = -1 is
    padding without query and output. Of up to `shared_rows` adjacent rows of one slot, keys and values are read once.
    With splits=1 a row's result does not depend on the other rows. `tile`: another one than the card's. Does not
    synchronize with the device.
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
    queries, dim_pad = _padded_tile(shared_rows * group, dim)
    programs = cdiv(batch, shared_rows) * kv_heads * splits  # that work, if rows fill their tiles
    tile = tile or choose_tile(queries, dim_pad, q.element_size(), programs, q.device)
    parts = [x.view(torch.float32) for x in scratch]
    indices = slots if rows is None else rows
    shared = {
        "KV_HEADS": kv_heads, "GROUP": group, "SHARED": shared_rows, "DIM": dim, "DIM_PAD": dim_pad,
        "WINDOW": cache.window, "CHUNK": cache.chunk, "BLOCK": tile.columns,
        "INDEXED": rows is not None, "PDL": pdl, "launch_pdl": pdl,
    }  # fmt: skip
    _decode[(kv_heads, splits, batch)](
        q, cache.keys, cache.values, tables, slots, lengths, indices, cache.sinks, out, *parts, q.stride(0),
        q.stride(1), out.stride(0), tables.stride(0), cache.page_stride_units,
        *softmax_factors(cache.scale, cache.softcap), QUERIES=queries, CAPPED=cache.softcap is not None,
        num_warps=tile.warps, num_stages=tile.stages, **layout_constants(cache), **shared,
    )  # fmt: skip
    if splits > 1:
        _join[(group, kv_heads, batch)](
            *parts, slots, lengths, indices, out, out.stride(0), SPLITS=splits, SPLITS_PAD=power_of_2(splits),
            num_warps=4, **shared,
        )  # fmt: skip
    return out


def _padded_tile(queries: int, dim: int) -> tuple[int, int]:
    """Return the rows and columns of a tile of queries, padded for tensor cores."""
    return max(16, power_of_2(queries)), max(16, power_of_2(dim))


def choose_tile(queries: int, dim_pad: int, itemsize: int, programs: int, device: torch.device) -> Tile:
    """Return the tile of `programs` programs, of this many queries each. In 16 bits, with heads of up to 256, it is the
    card's. Stages are reduced until a program fits in the device's shared memory.

    On an H200 two warps hide latencies as well as four, and reduce less among each other. Few programs have as many
    stages as leave shared memory for all of them at once. Many waves of programs are short programs, whose start is
    hidden best by many others: small tiles of one warp. Between large products, which slow the clock, 256 rows of 250
    and 650 tokens take 63 and 149 us; with two warps and 3 stages 63 and 154, with 4 stages 74 and 165. With heads of
    256, 133 rows of 300 and 500 tokens reach 3.92 and 4.02 TB/s; with the tile of smaller heads 3.58 and 3.93."""
    if itemsize == 4:
        tile = Tile(0, 32, 0, 2, 4)
    elif dim_pad > 256:  # Gemma 4
        tile = Tile(0, 16, 0, 3, max(2, queries * dim_pad // 4096))
    else:
        tile = card_tile(device, f"decode/half/{max(dim_pad, 64)}", cdiv(programs, multiprocessors(device)))
    while tile.stages > 1 and program_bytes(queries, dim_pad, itemsize, tile.columns, tile.stages) > shared_memory(
        device
    ):
        tile = tile._replace(stages=tile.stages - 1)
    return tile


def program_bytes(queries: int, dim_pad: int, itemsize: int, block: int, stages: int) -> int:
    """Return the bytes of shared memory of a program: keys and values of all stages but one, queries and weights."""
    return ((stages - 1) * 2 * block * dim_pad + queries * (dim_pad + block)) * itemsize


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; 1 for a CPU, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
