"""The decode attention of vLLM 0.2.7 (`paged_attention_v1` and `_v2`), its structure written anew in Triton: a baseline
of the papers' time, for measurements only.

The same: the layouts of the caches, keys [blocks, kv_heads, dim / x, block, x], where x numbers are 16 bytes, and
values [blocks, kv_heads, dim, block]. A program of four warps for each query head and sequence (v1), and for each 512
tokens of it (v2, joined by a second kernel); `uses_v1` chooses. Each query head reads the keys and values of its KV
head for itself, without tensor cores: all scores, then all weights, then the values. Each warp goes through blocks of
its own. Of keys a thread has one token, or half of one in blocks of 16; blocks of more than 32 are read in turns. Of
values it reads 16 bytes of a row, which are tokens next to each other, and keeps an fp32 sum for each of its rows: 8,
16, 32 and 64 rows in blocks of 16, 32, 64 and 128, with dim = 128 and two bytes a number. So a thread's registers grow
with the block: v2 for sm_90 takes 64, 116, 188 and 255, with 792 bytes spilled of the last (Triton 3.6 and 3.7, whose
TTGIR shows these lanes and warps; the original's registers are not known).

Not the same: Triton's compiler assigns lanes and warps, which the shapes of tiles only suggest, and orders reads. The
original keeps queries and scores in shared memory, which Triton does not let a kernel address: here queries are read
again through the L1 cache, and scores (4 bytes a token, beside 512 of key and value) are in a buffer in global memory.
Keys in blocks of 16 are read in step by the four warps, since their scores change threads before they are stored.
Numbers after a sequence's last token, in its last block, must be finite; the original sets such values to 0. vLLM 0.2.7
compiles no blocks of 64 and 128, though its kernel takes them.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.bench.kv_batches import KVBatch
from quire.kernels.triton.launch import cdiv

PART = tl.constexpr(512)  # tokens
WARPS = tl.constexpr(4)
BLOCKS = (16, 32, 64, 128)


@triton.jit
def _attend(
    q, keys, values, tables, lengths, out, scores, maxima, divisors, scale, room, table_width, block_stride,
    head_stride, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, X: tl.constexpr,
    LEVELS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute one query head of one sequence; if SPLIT, over one part of its tokens, for _join."""
    ROWS: tl.constexpr = 32 * X // BLOCK  # of values that a warp reads at once
    head, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first, end = 0, length
    if SPLIT:
        first = part * PART
        end = tl.minimum(first + PART, length)
        if first >= length:
            return
    spot = row * tl.num_programs(0) + head
    keys += head // GROUP * head_stride
    values += head // GROUP * head_stride
    scores += spot.to(tl.int64) * room + first
    table = tables + row * table_width + first // BLOCK
    count = end - first
    rounds = tl.cdiv(count, WARPS * BLOCK)
    x = tl.arange(0, X)[None, :]

    lane = tl.arange(0, WARPS * LANES)  # one for a token, or two threads if blocks have 16
    query = q + spot * DIM + x + lane[:, None] * 0
    best = tl.full([WARPS * LANES], float("-inf"), tl.float32)
    for step in range(rounds * (BLOCK // LANES)):
        block = step // (BLOCK // LANES) * WARPS + lane // LANES
        token = step % (BLOCK // LANES) * LANES + lane % LANES
        inside = block * BLOCK < count
        page = tl.load(table + block, mask=inside, other=0).to(tl.int64) * block_stride
        places = keys + (page + token * X)[:, None] + x
        key = ()
        for i in tl.static_range(DIM // X):
            key += (tl.load(places + i * (BLOCK * X), mask=inside[:, None], other=0.0),)
        product = tl.zeros([WARPS * LANES, X], tl.float32)
        for i in tl.static_range(DIM // X):
            product += key[i].to(tl.float32) * tl.load(query + i * X).to(tl.float32)
        at = block * BLOCK + token
        score = tl.where(at < count, tl.sum(product, 1) * scale, float("-inf"))
        tl.store(scores + at, score)
        best = tl.maximum(best, score)
    most = tl.max(best, 0)

    thread = tl.arange(0, WARPS * 32)
    divisor = tl.zeros([WARPS * 32], tl.float32)
    tl.debug_barrier()
    for start in range(0, rounds * (WARPS * BLOCK), WARPS * 32):
        inside = start + thread < rounds * (WARPS * BLOCK)
        weight = tl.exp(tl.load(scores + start + thread, mask=inside, other=float("-inf")) - most)
        tl.store(scores + start + thread, weight, mask=inside)
        divisor += weight
    whole = tl.sum(divisor, 0)
    tl.debug_barrier()

    token = thread % (BLOCK // X) * X
    in_value = thread % 32 // (BLOCK // X) * BLOCK + token
    total = ()
    for _ in tl.static_range(DIM // ROWS):
        total += (tl.zeros([WARPS * 32], tl.float32),)
    for turn in range(rounds):
        block = turn * WARPS + thread // 32
        inside = block * BLOCK < count
        page = tl.load(table + block, mask=inside, other=0).to(tl.int64) * block_stride
        weight = tl.load(scores + (block * BLOCK + token)[:, None] + x)
        places = values + (page + in_value)[:, None] + x
        sums = ()
        for i in tl.static_range(DIM // ROWS):
            value = tl.load(places + i * (ROWS * BLOCK), mask=inside[:, None], other=0.0)
            sums += (total[i] + tl.sum(value.to(tl.float32) * weight, 1),)
        total = sums

    COUNT: tl.constexpr = DIM // ROWS
    for level in tl.static_range(LEVELS):  # from a tuple of tensors to one
        sums = ()
        for i in tl.static_range(COUNT >> level + 1):
            sums += (tl.join(total[i], total[(COUNT >> level + 1) + i]),)
        total = sums
    tile = total[0]  # type: ignore[misc]
    result = tl.sum(tl.sum(tl.reshape(tile, [WARPS, ROWS, BLOCK // X, COUNT]), 2), 0) / whole
    d = tl.arange(0, ROWS)[:, None] + tl.arange(0, COUNT)[None, :] * ROWS
    if SPLIT:
        spot = spot * tl.num_programs(2) + part
        tl.store(maxima + spot, most)
        tl.store(divisors + spot, whole)
    tl.store(out + spot * DIM + d, result.to(out.dtype.element_ty))


@triton.jit
def _join(parts, maxima, divisors, lengths, out, most, DIM: tl.constexpr, MOST_PAD: tl.constexpr):
    """Compute one query head of one sequence from its parts, of which there is room for `most`."""
    head, row = tl.program_id(0), tl.program_id(1)
    count = tl.cdiv(tl.load(lengths + row), PART)
    spot = row * tl.num_programs(0) + head
    d, n = tl.arange(0, DIM), tl.arange(0, MOST_PAD)
    maxima += spot * most
    divisors += spot * most
    all_best = tl.load(maxima + n, mask=n < count, other=float("-inf"))
    best = tl.max(all_best, 0)
    whole = tl.sum(tl.load(divisors + n, mask=n < count, other=0.0) * tl.exp(all_best - best), 0)
    total = tl.zeros([DIM], tl.float32)
    for i in range(count):
        share = tl.load(divisors + i) * tl.exp(tl.load(maxima + i) - best) / whole
        total += tl.load(parts + (spot * most + i) * DIM + d).to(tl.float32) * share
    tl.store(out + spot * DIM + d, total.to(out.dtype.element_ty))


def uses_v1(rows: int, heads: int, longest: int) -> bool:
    """Return True if vLLM 0.2.7 does not split contexts: there is enough work, and shared memory for all scores."""
    return longest <= 8192 and (longest <= PART.value or rows * heads > 512)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, longest: int, scale: float,
    v1: bool | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention of one query a row: q [rows, heads, dim] -> the same shape. keys and values are in vLLM's
    layouts, tables [rows, blocks] and lengths [rows] int32, no length above `longest`. `v1`: see `uses_v1`."""
    (rows, heads, dim), (_, kv_heads, _, block, x) = q.shape, keys.shape
    assert block in BLOCKS, f"blocks of {block}, not of one of {BLOCKS}"
    assert (keys.stride()[:2], x) == (values.stride()[:2], 16 // q.element_size())
    v1 = uses_v1(rows, heads, longest) if v1 is None else v1
    most = 1 if v1 else cdiv(longest, PART.value)
    out = torch.empty_like(q)
    parts = out if v1 else q.new_empty(rows, heads, most, dim)
    maxima, divisors = torch.empty(2, rows, heads, most, dtype=torch.float32, device=q.device)
    scores = torch.empty(rows, heads, cdiv(longest, PART.value) * PART.value, dtype=torch.float32, device=q.device)
    _attend[heads, rows, most](
        q, keys, values, tables, lengths, parts, scores, maxima, divisors, scale, scores.stride(1), tables.stride(0),
        *keys.stride()[:2],
        GROUP=heads // kv_heads, DIM=dim, BLOCK=block, LANES=min(block, 32), X=x,
        LEVELS=(dim * block // (32 * x)).bit_length() - 1, SPLIT=not v1, num_warps=WARPS.value, num_stages=1,
    )  # fmt: skip
    if not v1:
        _join[heads, rows](
            parts, maxima, divisors, lengths, out, most, DIM=dim, MOST_PAD=triton.next_power_of_2(most), num_warps=4
        )  # fmt: skip
    return out


def decode_calls(where: KVBatch) -> list[partial[Tensor]]:
    """Return a decode step's attention in each layer. The bytes of the pages stay where they are: numbers that are
    random in one layout are random in another."""
    first = where.caches[0]
    x, block = 16 // first.dtype.itemsize, first.page_tokens
    q = torch.randn(len(where.slots), first.heads, first.head_dim, dtype=first.dtype, device=first.device)
    tables, lengths = where.tables[where.slots].int(), where.lengths.int()
    return [
        partial(attend, q, cache.keys.view(-1, cache.kv_heads, cache.head_dim // x, block, x),
                cache.values.view(-1, cache.kv_heads, cache.head_dim, block), tables, lengths,
                int(where.lengths.max()), cache.scale)
        for cache in where.caches
    ]  # fmt: skip
