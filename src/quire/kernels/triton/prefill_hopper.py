"""Attention of long prompts on Hopper GPUs (FlashAttention-3's warp specialization, over pages). Results equal those of
`prefill` bit for bit if keys and values are finite.

Each group of four warps has one role. The last loads blocks of keys and values from their pages into a ring in shared
memory; the others hold 64 rows of the tile each, and process one block after another from there. A group's products for
the next block's scores and the last block's values run while it computes its softmax, and while one group waits for a
product the others continue. A loaded block serves 192 rows; in `prefill` 128.

Gluon is the part of Triton with warp specialization. It is experimental: `launch.GLUON_VERSIONS` are the versions with
which this was tested, and tests/kernels/test_compiles.py checks the barriers that these put before a group's arrivals.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.forward_batch import LayerCache
from quire.kernels.triton.decode import MIN_SCORE, layout_constants, softmax_factors
from quire.kernels.triton.fast_launch import fast_launch

ROW_GROUPS = gl.constexpr(3)  # warp groups that hold rows
GROUP_ROWS = gl.constexpr(64)  # rows of a warp group
BLOCK = gl.constexpr(64)  # keys at a time: as many as in `prefill`, so that the bits are equal
STAGES = gl.constexpr(4)  # blocks in the ring: two are multiplied (scores, values), one is loaded, one is loading
COMPUTE_REGISTERS, FETCH_REGISTERS = gl.constexpr(152), gl.constexpr(56)  # registers a thread

MIN_CONTEXT = 4096
"""The context in tokens from which on this kernel is faster: on an H200 by a tenth for a whole prompt, by more for a
chunk. Up to 2,048 it is slower: a program occupies a whole multiprocessor, which is idle while the program starts."""


def supports(cache: LayerCache) -> bool:
    """Return True if `prefill` supports this cache: heads of 128 numbers in 16 bits, without chunks and sinks."""
    return cache.head_dim == 128 and cache.dtype.itemsize == 2 and cache.chunk is None and cache.sinks is None


def tile_queries(group: int) -> int:
    """Return the queries of a tile, if `group` query heads share a key head: the argument for `make_prefill_tiles`."""
    return int(ROW_GROUPS.value * GROUP_ROWS.value) // group


@gluon.jit
def _oldest(earliest, WINDOW: gl.constexpr):
    """Return the first position that a tile sees."""
    oldest = earliest * 0
    if WINDOW is not None:
        oldest = gl.maximum(earliest - WINDOW + 1, 0)
    return oldest


@gluon.jit
def _page(table, at, end, CONTIGUOUS: gl.constexpr, PAGE: gl.constexpr):
    """Return the pages of these tokens; if CONTIGUOUS all are in the first."""
    if CONTIGUOUS:
        pages = gl.load(table + at * 0, mask=at < end, other=0)
    else:
        pages = gl.load(table + at // PAGE, mask=at < end, other=0)
    return pages


@gluon.jit
def _fetch(
    keys, values, table, earliest, end, stride, ring, DIM: gl.constexpr, PAGE: gl.constexpr, UNIT: gl.constexpr,
    TOKEN_STRIDE: gl.constexpr, VALUES_AFTER: gl.constexpr, CONTIGUOUS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Load every block in turn, once the ring has a free stage; a block is signalled ready after the load of the next
    one has begun. Positions that no row sees are not read: pages before a window may belong to another sequence now."""
    k_blocks, v_blocks, ready, free = ring
    oldest = _oldest(earliest, WINDOW)
    first = oldest // BLOCK * BLOCK
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    d = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    at = first + gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    pages = _page(table, at, end, CONTIGUOUS, PAGE)
    turn = 0
    for _ in range(first, end, BLOCK):
        if CONTIGUOUS:
            offsets = (pages * stride * UNIT + at.to(gl.int64) * TOKEN_STRIDE)[:, None] + d[None, :]
        else:
            offsets = (pages * stride * UNIT + (at % PAGE) * TOKEN_STRIDE)[:, None] + d[None, :]
        real = at < end
        if WINDOW is not None:
            real &= at >= oldest
        real = real[:, None]
        places = keys + offsets
        at += BLOCK
        pages = _page(table, at, end, CONTIGUOUS, PAGE)  # one iteration ahead, to hide the latency
        mbarrier.wait(free.index(turn % STAGES), (turn // STAGES & 1) ^ 1)
        async_copy.async_copy_global_to_shared(k_blocks.index(turn % STAGES), places, mask=real)
        if VALUES_AFTER is not None:
            places += VALUES_AFTER
        else:
            places = values + offsets
        async_copy.async_copy_global_to_shared(v_blocks.index(turn % STAGES), places, mask=real)
        async_copy.commit_group()
        async_copy.wait_group(1)
        fence_async_shared()  # once here instead of in each reading group
        mbarrier.arrive(ready.index((turn + STAGES - 1) % STAGES), pred=turn > 0)
        turn += 1
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.arrive(ready.index((turn + STAGES - 1) % STAGES))


@gluon.jit
def _mask_scores(scores, at, position, WINDOW: gl.constexpr):
    """Return the scores, -inf for keys that a row does not see."""
    seen = at[None, :] <= position[:, None]
    if WINDOW is not None:
        seen &= at[None, :] > position[:, None] - WINDOW
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _apply_softcap(scores, inner, CAPPED: gl.constexpr):
    if CAPPED:
        scores = 2.0 * (1 / (1 + gl.exp(-(scores * inner)))) - 1.0
    return scores


@gluon.jit
def _softmax_step(scores, best, weight, outer):
    new = gl.maximum(best, gl.max(scores, 1) * outer)
    weights = gl.exp2(scores * outer - new[:, None])
    shrink = gl.exp2(best - new)
    return weights, new, shrink, weight * shrink + gl.sum(weights, 1)


@gluon.jit
def _sweep(
    query, shares, best, weight, total, position, ring, first, begin, end, blocks, inner, outer,
    WINDOW: gl.constexpr, CAPPED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Attend to the keys of blocks begin .. end, counted from position `first` on, and add the values of the block
    before each, weighted by `shares`. Not MASKED: every row sees all of these keys. Block `begin` must be loaded."""
    k_blocks, v_blocks, ready, free = ring
    layout: gl.constexpr = best.type.layout.parent
    for turn in range(begin, end):
        key = k_blocks.index(turn % STAGES).permute([1, 0])
        before = (turn - 1) % STAGES
        scores = gl.zeros([GROUP_ROWS, BLOCK], gl.float32, layout)
        coming = warpgroup_mma(query, key, scores, use_acc=False, is_async=True)
        adding = warpgroup_mma(shares, v_blocks.index(before), total, is_async=True)
        scores = _apply_softcap(warpgroup_mma_wait(1, deps=[coming]), inner, CAPPED)
        if MASKED:
            at = first + turn * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
            scores = _mask_scores(scores, at, position, WINDOW)
        weights, best, shrink, weight = _softmax_step(scores, best, weight, outer)
        following = gl.convert_layout(weights.to(shares.dtype), shares.type.layout)
        # This wait is a branch: it keeps the compiler from moving the softmax after the next wait, without overlap.
        mbarrier.wait(ready.index((turn + 1) % STAGES), (turn + 1) // STAGES & 1, pred=turn + 1 < blocks)
        total, _, shares = warpgroup_mma_wait(0, deps=[adding, shares, following])
        mbarrier.arrive(free.index(before))
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None]
    return shares, best, weight, total


@gluon.jit
def _attend(
    q, out, tile, q_parts, ring, inner, outer, NUMBER: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
    WINDOW: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    """Compute the rows of one warp group of the tile."""
    k_blocks, v_blocks, ready, _ = ring
    token, many, earliest, head, q_row, q_head, out_row = tile
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    row = NUMBER * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, wide))
    d = gl.arange(0, DIM, gl.SliceLayout(0, wide))
    places = (token + row // GROUP).to(gl.int64) * q_row + (head * GROUP + row % GROUP) * q_head
    inside = (row // GROUP < many)[:, None]
    query = q_parts.index(NUMBER)
    query.store(gl.load(q + places[:, None] + d[None, :], mask=inside, other=0.0))
    fence_async_shared()
    row = NUMBER * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, scored))
    position = earliest + gl.minimum(row // GROUP, many - 1)
    first = _oldest(earliest, WINDOW) // BLOCK * BLOCK
    blocks = gl.cdiv(earliest + many - first, BLOCK)
    whole = (earliest + gl.minimum(NUMBER * GROUP_ROWS // GROUP, many - 1) + 1 - first) // BLOCK
    whole = gl.maximum(whole, 1)  # every row sees all keys of the blocks before, except at the window's edge
    best = gl.full([GROUP_ROWS], MIN_SCORE, gl.float32, gl.SliceLayout(1, scored))
    weight = gl.zeros([GROUP_ROWS], gl.float32, gl.SliceLayout(1, scored))
    total = gl.zeros([GROUP_ROWS, DIM], gl.float32, summed)
    mbarrier.wait(ready.index(0), 0)
    scores = gl.zeros([GROUP_ROWS, BLOCK], gl.float32, scored)
    coming = warpgroup_mma(query, k_blocks.index(0).permute([1, 0]), scores, use_acc=False, is_async=True)
    scores = _apply_softcap(warpgroup_mma_wait(0, deps=[coming]), inner, CAPPED)
    scores = _mask_scores(scores, first + gl.arange(0, BLOCK, gl.SliceLayout(0, scored)), position, WINDOW)
    weights, best, _, weight = _softmax_step(scores, best, weight, outer)
    shares = gl.convert_layout(weights.to(q.dtype.element_ty), gl.DotOperandLayout(0, summed, 2))
    mbarrier.wait(ready.index(1), 0, pred=blocks > 1)
    begin = 1
    if WINDOW is not None:
        latest = earliest + gl.minimum((NUMBER * GROUP_ROWS + GROUP_ROWS - 1) // GROUP, many - 1)
        edge = gl.cdiv(gl.maximum(latest - WINDOW + 1 - first, 0), BLOCK)
        edge = gl.minimum(gl.maximum(edge, 1), whole)
        shares, best, weight, total = _sweep(
            query, shares, best, weight, total, position, ring, first, 1, edge, blocks, inner, outer,
            WINDOW, CAPPED, True,
        )  # fmt: skip
        begin = edge
    shares, best, weight, total = _sweep(
        query, shares, best, weight, total, position, ring, first, begin, whole, blocks, inner, outer,
        WINDOW, CAPPED, False,
    )  # fmt: skip
    shares, best, weight, total = _sweep(
        query, shares, best, weight, total, position, ring, first, whole, blocks, blocks, inner, outer,
        WINDOW, CAPPED, True,
    )  # fmt: skip
    adding = warpgroup_mma(shares, v_blocks.index((blocks - 1) % STAGES), total, is_async=True)
    total, _ = warpgroup_mma_wait(0, deps=[adding, shares])
    result = total / gl.convert_layout(weight, gl.SliceLayout(1, summed))[:, None]
    row = NUMBER * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, summed))
    d = gl.arange(0, DIM, gl.SliceLayout(0, summed))
    places = (token + row // GROUP).to(gl.int64) * out_row + (head * GROUP + row % GROUP) * DIM
    gl.store(out + places[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=(row // GROUP < many)[:, None])


@fast_launch
@gluon.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["tiles", "tables"])
def _prompt_hopper(
    q, keys, values, tables, tiles, out, q_row, q_head, out_row, table_width, stride, inner, outer,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, UNIT: gl.constexpr,
    HEAD_STRIDE: gl.constexpr, TOKEN_STRIDE: gl.constexpr, VALUES_AFTER: gl.constexpr, CONTIGUOUS: gl.constexpr,
    WINDOW: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    index, head = gl.program_id(0) // KV_HEADS, gl.program_id(0) % KV_HEADS
    slot = gl.load(tiles + index * 4)
    token = gl.load(tiles + index * 4 + 1)
    many = gl.load(tiles + index * 4 + 2)
    earliest = gl.load(tiles + index * 4 + 3)
    keys += head.to(gl.int64) * HEAD_STRIDE
    values += head.to(gl.int64) * HEAD_STRIDE
    table = tables + slot.to(gl.int64) * table_width
    dtype: gl.constexpr = q.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, DIM], dtype)
    q_parts = gl.allocate_shared_memory(dtype, [ROW_GROUPS, GROUP_ROWS, DIM], shared)
    k_blocks = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, DIM], shared)
    v_blocks = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, DIM], shared)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=ROW_GROUPS)
    ring = (k_blocks, v_blocks, ready, free)
    tile = (token, many, earliest, head, q_row, q_head, out_row)
    gl.warp_specialize(
        [
            (_attend, (q, out, tile, q_parts, ring, inner, outer, 0, GROUP, DIM, WINDOW, CAPPED)),
            (_attend, (q, out, tile, q_parts, ring, inner, outer, 1, GROUP, DIM, WINDOW, CAPPED)),
            (_attend, (q, out, tile, q_parts, ring, inner, outer, 2, GROUP, DIM, WINDOW, CAPPED)),
            (_fetch, (keys, values, table, earliest, earliest + many, stride, ring, DIM, PAGE, UNIT, TOKEN_STRIDE,
                      VALUES_AFTER, CONTIGUOUS, WINDOW)),
        ],
        [4, 4, 4],
        [COMPUTE_REGISTERS, COMPUTE_REGISTERS, FETCH_REGISTERS],
    )  # fmt: skip


def prefill(q: Tensor, cache: LayerCache, tables: Tensor, tiles: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the same as `quire.kernels.triton.prefill.prefill`, for caches that `supports` accepts and tiles of
    `tile_queries` queries."""
    heads, dim = q.shape[1:]
    group = heads // cache.kv_heads
    out = torch.empty((q.shape[0], heads, dim), dtype=q.dtype, device=q.device) if out is None else out
    assert out.stride()[1:] == (dim, 1), "a token's results are contiguous"
    assert q.stride(2) == 1, "heads are rows of `dim` numbers"
    assert supports(cache), "heads of 128 numbers in 16 bits, without sinks"
    assert tile_queries(group), "more query heads a key head than a tile has rows"
    _prompt_hopper[(tiles.shape[0] * cache.kv_heads,)](
        q, cache.keys, cache.values, tables, tiles, out, q.stride(0), q.stride(1), out.stride(0), tables.stride(0),
        cache.page_stride_units, *softmax_factors(cache.scale, cache.softcap),
        KV_HEADS=cache.kv_heads, GROUP=group, DIM=dim, WINDOW=cache.window, CAPPED=cache.softcap is not None,
        num_warps=4, **layout_constants(cache),
    )  # fmt: skip
    return out
