"""Attention of prompts and their chunks, all lengths in one launch (PagedAttention §4.3; FlashAttention-2's loop).

A tile is a run of queries of one sequence; the query heads that share a key/value head are folded into the tile's rows,
so that each key is read once for all of them. Tiles are made on the host, the longest contexts first. Keys and values
of a first chunk are read from its pages too: reading the step's own tensors, with other strides, took more registers
and up to 13 % longer.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.forward_batch import LayerCache
from quire.kernels.triton.decode import (
    MIN_SCORE,
    apply_softcap,
    begin_softmax,
    layout_constants,
    softmax_factors,
    token_offsets,
)
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import power_of_2

MANY_PROGRAMS = 512
"""From this many programs on, those of one warp are faster for rows of one token. An H200 runs fewer at once."""


def tile_queries(heads: int, kv_heads: int, head_dim: int, itemsize: int, small: bool = False) -> int:
    """Return the queries of a tile of `prefill` for these shapes: the argument for `make_prefill_tiles`."""
    return max(1, _tile_config(head_dim, itemsize, small)[0] // (heads // kv_heads))


def make_prefill_tiles(
    slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, offsets: np.ndarray, queries: int
) -> np.ndarray:
    """Return the tiles of R rows, int32 [n, 4]: slot, first token of the step, queries, position of the first; longest
    context first. The arrays are int64 [R], as in ForwardBatch; `queries`: the most queries of a tile.
    """
    counts = -(-lengths // queries)
    row = np.repeat(np.arange(len(counts)), counts)
    cut = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    many = np.minimum(lengths[row] - cut, queries)
    tiles = np.stack([slots[row], offsets[row] + cut, many, starts[row] + cut], 1).astype(np.int32)
    return tiles[np.argsort(-(tiles[:, 2] + tiles[:, 3]), kind="stable")]


@triton.jit
def _sweep(
    query, best, weight, total, position, own, keys, values, table, base, begin, end, oldest, stride, inner, outer,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    VALUES_AFTER: tl.constexpr, CONTIGUOUS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    CAPPED: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to the keys and values at positions begin .. end; if not MASKED every query sees all of them. A query sees
    up to `position`, and its window ends at its `own`. No query
    sees positions before `oldest`, whose pages may belong to another sequence now."""
    d = tl.arange(0, DIM_PAD)
    following = token_offsets(table, base, begin, end, stride, PAGE, UNIT, TOKEN_STRIDE, BLOCK_N, CONTIGUOUS)
    for start in range(begin, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        offsets = following  # page ids are read one iteration ahead, see decode
        following = token_offsets(
            table, base, start + BLOCK_N, end, stride, PAGE, UNIT, TOKEN_STRIDE, BLOCK_N, CONTIGUOUS
        )  # fmt: skip
        places = keys + offsets[:, None] + d[None, :]
        real = at < end
        if WINDOW is not None or CHUNK is not None:
            real &= at >= oldest
        live = real[:, None] & (d < DIM)[None, :]
        if MASKED or DIM != DIM_PAD:
            key = tl.load(places, mask=live, other=0.0)
        else:
            key = tl.load(places)
        scores = apply_softcap(tl.dot(query, tl.trans(key), input_precision="ieee"), inner, CAPPED)
        if MASKED:
            seen = at[None, :] <= position[:, None]
            if WINDOW is not None:
                seen &= at[None, :] > own[:, None] - WINDOW
            elif CHUNK is not None:
                seen &= at[None, :] >= own[:, None] // CHUNK * CHUNK
            scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 1) * outer)
        weights = tl.exp2(scores * outer - new[:, None])
        shrink = tl.exp2(best - new)
        weight = weight * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None]
        if VALUES_AFTER is not None:
            places += VALUES_AFTER
        else:
            places = values + offsets[:, None] + d[None, :]
        if MASKED or DIM != DIM_PAD:
            value = tl.load(places, mask=live, other=0.0)
        else:
            value = tl.load(places)
        total = tl.dot(weights.to(value.dtype), value, total, input_precision="ieee")
        best = new
    return best, weight, total


@fast_launch
@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["tiles"])
def _prompt(
    q, keys, values, tables, tiles, sinks, out, q_row, q_head, out_row, table_width, stride, inner, outer,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr,
    UNIT: tl.constexpr, HEAD_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, VALUES_AFTER: tl.constexpr,
    CONTIGUOUS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLLOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one tile and key head a program. See _decode for the constants of the layout. Not FOLLOW: all queries of
    a tile see up to its position, and windows end at those from its fifth number on."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    FIELDS: tl.constexpr = 4 if FOLLOW else 5
    slot = tl.load(tiles + tile * FIELDS)
    token = tl.load(tiles + tile * FIELDS + 1)
    many = tl.load(tiles + tile * FIELDS + 2)
    earliest = tl.load(tiles + tile * FIELDS + 3)
    latest = earliest + many - 1 if FOLLOW else earliest
    first_own = earliest if FOLLOW else tl.load(tiles + tile * FIELDS + 4)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM_PAD)
    position = tl.minimum(earliest + m // GROUP, latest)
    own = tl.minimum(first_own + m // GROUP, first_own + many - 1)
    inside = (m // GROUP < many)[:, None] & (d < DIM)[None, :]
    at = (token + m // GROUP).to(tl.int64)
    heads = head * GROUP + m % GROUP
    if slot == 0:  # padding
        places = out + (at * out_row + heads * DIM)[:, None] + d[None, :]
        tl.store(places, tl.zeros([BLOCK_M, DIM_PAD], out.dtype.element_ty), mask=inside)
        return
    query = tl.load(q + (at * q_row + heads * q_head)[:, None] + d[None, :], mask=inside, other=0.0)
    keys += head.to(tl.int64) * HEAD_STRIDE
    values += head.to(tl.int64) * HEAD_STRIDE
    table = tables + slot.to(tl.int64) * table_width
    base = tl.load(table) if CONTIGUOUS else 0
    best = tl.full([BLOCK_M], MIN_SCORE, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        best, weight = begin_softmax(sinks, heads, m // GROUP < many)
    total = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    whole_end = (earliest + 1) // BLOCK_N * BLOCK_N  # all queries see all tiles before it, except at the window's edge
    whole, oldest = 0, 0
    if WINDOW is not None or CHUNK is not None:
        if WINDOW is not None:
            oldest = tl.maximum(first_own - WINDOW + 1, 0)
            whole = tl.maximum(first_own + many - 1 - WINDOW + BLOCK_N, 0) // BLOCK_N * BLOCK_N
        else:
            oldest = first_own // CHUNK * CHUNK
            whole = ((first_own + many - 1) // CHUNK * CHUNK + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        first = oldest // BLOCK_N * BLOCK_N
        whole = tl.minimum(whole, whole_end)
        best, weight, total = _sweep(
            query, best, weight, total, position, own, keys, values, table, base, first, whole, oldest, stride,
            inner, outer, DIM, DIM_PAD, PAGE, UNIT, TOKEN_STRIDE, VALUES_AFTER, CONTIGUOUS, WINDOW, CHUNK, CAPPED,
            BLOCK_N, True,
        )  # fmt: skip
    best, weight, total = _sweep(
        query, best, weight, total, position, own, keys, values, table, base, whole, whole_end, oldest, stride,
        inner, outer, DIM, DIM_PAD, PAGE, UNIT, TOKEN_STRIDE, VALUES_AFTER, CONTIGUOUS, WINDOW, CHUNK, CAPPED, BLOCK_N,
        False,
    )  # fmt: skip
    best, weight, total = _sweep(
        query, best, weight, total, position, own, keys, values, table, base, whole_end, latest + 1, oldest, stride,
        inner, outer, DIM, DIM_PAD, PAGE, UNIT, TOKEN_STRIDE, VALUES_AFTER, CONTIGUOUS, WINDOW, CHUNK, CAPPED, BLOCK_N,
        True,
    )  # fmt: skip
    result = (total / weight[:, None]).to(out.dtype.element_ty)
    tl.store(out + (at * out_row + heads * DIM)[:, None] + d[None, :], result, mask=inside)


def prefill(
    q: Tensor, cache: LayerCache, tables: Tensor, tiles: Tensor, out: Tensor | None = None, *, small: bool = False,
    single: bool = False, bidirectional: bool = False, in_window: bool = False, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Return the causal attention of the queries in `tiles` (of make_prefill_tiles, on the device): q [T, heads, dim]
    -> out [T, heads, dim]. Rows of `out` in no tile are not written. A tile of slot 0 is padding, which sees nothing;
    zeros are written for its queries, if it has any.

    With `bidirectional` the position of a tile is that of the last key that its queries see; they see all up to it,
    or with `in_window` those from their windows on. A fifth number of a tile is the position of its first query.

    The keys and values of all queries must be in their pages. `small` tiles waste less on rows of one token.
    `single`: all rows have one token. The step's other queries do not change the bits of a query's result. In 16 bits,
    neither do `small` and `single`.

    pdl: programmatic dependent launch, on GPUs of capability 9 and more.
    """
    heads, dim = q.shape[1:]
    group = heads // cache.kv_heads
    out = torch.empty((q.shape[0], heads, dim), dtype=q.dtype, device=q.device) if out is None else out
    assert out.stride()[1:] == (dim, 1), "a token's results are contiguous"
    assert q.stride(2) == 1, "heads are rows of `dim` numbers"
    block_m, block_n, warps, stages, registers = _tile_config(dim, q.element_size(), small)
    many = tiles.shape[0] * cache.kv_heads >= MANY_PROGRAMS
    if single and many and dim <= 128 and group <= 16 and q.element_size() == 2:  # fp32 might have other bits
        block_m, warps, stages = 16, 1, 2
    assert group <= block_m, "more query heads a key head than a tile has rows"
    _prompt[(tiles.shape[0] * cache.kv_heads,)](
        q, cache.keys, cache.values, tables, tiles, cache.sinks, out, q.stride(0), q.stride(1), out.stride(0),
        tables.stride(0), cache.page_stride_units, *softmax_factors(cache.scale, cache.softcap),
        KV_HEADS=cache.kv_heads, GROUP=group, DIM=dim, DIM_PAD=max(16, power_of_2(dim)),
        WINDOW=None if bidirectional and not in_window else cache.window,
        CHUNK=None if bidirectional and not in_window else cache.chunk,
        CAPPED=cache.softcap is not None, BLOCK_M=block_m, BLOCK_N=block_n, FOLLOW=not bidirectional,
        PDL=pdl, launch_pdl=pdl, num_warps=warps, num_stages=stages, maxnreg=registers, **layout_constants(cache),
    )  # fmt: skip
    return out


def _tile_config(head_dim: int, itemsize: int, small: bool) -> tuple[int, int, int, int, int | None]:
    """Return (rows of a tile, keys at a time, warps, stages of the pipeline, registers a thread; None: no limit)."""
    if itemsize == 4:  # for large heads 16 keys, because more would exceed the shared memory of small GPUs
        return (64, 32 if head_dim <= 128 else 16, 4, 1, None) if head_dim <= 256 else (16, 16, 4, 1, None)
    if head_dim > 256:
        return 32, 32, 4, 2, None
    if head_dim > 128:
        return 64, 32, 4, 2, None
    return (64, 64, 4, 3, None) if small else (128, 64, 8, 2, 128)
