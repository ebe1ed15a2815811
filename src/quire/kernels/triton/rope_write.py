"""Rotary embedding (RoFormer) and the write of keys and values into their pages (PagedAttention §4.3), in one pass.

Queries and keys are normalised (Qwen3), then rotated, and values normalised (Gemma 4), in fp32 from the fp32 table, and
rounded once at the end: closer to the exact result than `layers.rotary.rotate`, which rounds cos, sin and each product
to the model's dtype. Where a token goes is computed here from its slot, its position and the page tables, so a step
ships no write addresses.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.forward_batch import HeadNorms, LayerCache
from quire.kernels.triton.decode import layout_constants
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import cdiv, power_of_2


@triton.jit
def _rotate(
    low, high, cos, sin, weight, eps, columns, inside, DIM: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr
):
    """Return the halves of heads [TILE, DIM / 2], of any dtype, normalised and rotated, in fp32.

    In a sum of two products one is fused with the sum. fma fixes which one: the compiler would choose differently for
    other numbers of heads a program, and a token's bits would depend on the tokens beside it.
    """
    low, high = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        squares = tl.sum(tl.fma(low, low, high * high), axis=1, keep_dims=True)
        inverse = tl.rsqrt(squares / DIM + eps)
        low = low * inverse * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        high = high * inverse * tl.load(weight + DIM // 2 + columns, mask=inside, other=0.0).to(tl.float32)
    if ROTATE:
        low, high = tl.fma(low, cos, -(high * sin)), tl.fma(high, cos, low * sin)
    return low, high


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "cells"])
def _rope_write(
    qkv, q_out, keys, values, tables, slots, positions, cells, rotary, q_weight, k_weight, v_weight,
    qkv_stride, q_stride, table_stride, page_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, VALUES_AFTER: tl.constexpr, CONTIGUOUS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, QUERY_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr,
    ROTATE: tl.constexpr, NORM: tl.constexpr, NORM_VALUES: tl.constexpr, KEYS_AS_VALUES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Process TILE heads of one token a program: the first QUERY_BLOCKS of a token's BLOCKS are queries, the others
    keys and values. Triton requires that a name used in both branches has the same type in both."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < DIM // 2
    position = tl.load(positions + token)
    cos, sin = 1.0, 0.0
    if ROTATE:
        angle = rotary + position * DIM + columns
        cos = tl.load(angle, mask=inside, other=0.0)
        sin = tl.load(angle + DIM // 2, mask=inside, other=0.0)
    if block < QUERY_BLOCKS:
        head = block * TILE + tl.arange(0, TILE)[:, None]
        mask = inside & (head < HEADS)
        source = qkv + token * qkv_stride + head * DIM + columns
        low = tl.load(source, mask=mask, other=0.0)
        high = tl.load(source + DIM // 2, mask=mask, other=0.0)
        turned_low, turned_high = _rotate(low, high, cos, sin, q_weight, eps, columns, inside, DIM, ROTATE, NORM)
        target = q_out + token * q_stride + head * DIM + columns
        tl.store(target, turned_low.to(q_out.dtype.element_ty), mask=mask)
        tl.store(target + DIM // 2, turned_high.to(q_out.dtype.element_ty), mask=mask)
    else:
        head = (block - QUERY_BLOCKS) * TILE + tl.arange(0, TILE)[:, None]
        mask = inside & (head < 2 * KV_HEADS)
        cell = position
        if cells is not None:
            cell = tl.load(cells + token)
        logical, offset = 0, cell
        if not CONTIGUOUS:
            logical, offset = cell // PAGE, cell % PAGE
        page = tl.load(tables + tl.load(slots + token) * table_stride + logical)
        is_key = head < KV_HEADS
        at_head = tl.where(is_key, head, head - KV_HEADS) if KEYS_AS_VALUES else head
        source = qkv + token * qkv_stride + (HEADS + at_head) * DIM + columns
        low = tl.load(source, mask=mask, other=0.0)
        high = tl.load(source + DIM // 2, mask=mask, other=0.0)
        turned_low, turned_high = _rotate(low, high, cos, sin, k_weight, eps, columns, inside, DIM, ROTATE, NORM)
        value_low, value_high = low, high
        if NORM_VALUES:
            value_low, value_high = _rotate(low, high, cos, sin, v_weight, eps, columns, inside, DIM, False, True)
        low = tl.where(is_key, turned_low.to(low.dtype), value_low.to(low.dtype))
        high = tl.where(is_key, turned_high.to(high.dtype), value_high.to(high.dtype))
        place = page * page_stride * UNIT + offset * TOKEN_STRIDE + columns
        at = tl.where(is_key, head, head - KV_HEADS).to(tl.int64) * HEAD_STRIDE
        if VALUES_AFTER is not None:
            target = keys + place + tl.where(is_key, at, VALUES_AFTER + at)
        else:
            target = tl.where(is_key, keys + at, values + at) + place
        tl.store(target, low.to(keys.dtype.element_ty), mask=mask)
        tl.store(target + DIM // 2, high.to(keys.dtype.element_ty), mask=mask)


def launch_config(rows: int, heads: int, block: int) -> tuple[int, int]:
    """Return (heads a program, warps), if the longer of a token's two lists (queries; keys and values) has `heads`
    heads, and half a head is padded to `block`. Warps are at most as many as the pairs fill: threads of further warps
    would hold copies, and could read a query after it was rotated in place.
    """
    tile = min(power_of_2(heads), max(1, (256 if rows < 64 else 1024) // block))
    return tile, min(max(tile * block // 128, 1), 4)


def rope_write(
    qkv: Tensor, q_out: Tensor, cache: LayerCache, tables: Tensor, slots: Tensor, positions: Tensor,
    *, rotary: Tensor | None = None, norms: HeadNorms | None = None,
    pdl: bool = False, cache_positions: Tensor | None = None,
) -> None:  # fmt: skip
    """Normalise and rotate the queries and keys of qkv [T, heads + 2 kv_heads, dim]; write queries to q_out [T, heads,
    dim] (may be qkv's own part, in place), keys and values to `cache`, at page tables[slots[t], positions[t] //
    page_tokens], offset positions[t] % page_tokens. If the layer does not write, qkv holds only queries [T, heads,
    dim]. Without values in qkv, [T, heads + kv_heads, dim], they are the keys before norm and rotation.

    With `cache_positions` [T] int64, keys and values are written to these positions of the sequence's pages, and
    `positions` are used only for the rotation.

    Token strides of qkv and q_out are free; dim is even. tables [slots, logical pages], slots and positions [T] are
    int64. `rotary` is layers.rotary's table, fp32 [length, 2, dim / 2] (None: no rotation). `norms`: RMS norms of each
    query and key before the rotation, and perhaps of each value. Padding has slot 0 and is written to scratch
    page 0. pdl: programmatic dependent launch, on GPUs of capability 9 and more.
    """
    tokens, dim, heads = qkv.shape[0], cache.head_dim, cache.heads
    kv_heads = cache.kv_heads if cache.writes_kv else 0
    _check(qkv, q_out, tables, slots, positions, dim, heads, kv_heads, rotary)
    q_weight, k_weight, v_weight = (None if norm is None else norm.weight for norm in norms or (None,) * 3)
    k_weight = q_weight if k_weight is None else k_weight  # a layer that does not write has no keys
    in_place = q_out.data_ptr() == qkv.data_ptr()
    queries = 0 if in_place and rotary is None and norms is None else heads
    if not queries and not kv_heads:
        return
    block = power_of_2(dim // 2)
    # A norm sums over a head, and must not depend on the batch: with norms, the launch ignores the number of tokens.
    tile, warps = launch_config(tokens if norms is None else 1, max(queries, 2 * kv_heads), block)
    query_blocks = cdiv(queries, tile)
    blocks = query_blocks + cdiv(2 * kv_heads, tile)
    _rope_write[(tokens * blocks,)](
        qkv, q_out, cache.keys, cache.values, tables, slots, positions, cache_positions, rotary, q_weight, k_weight,
        v_weight, qkv.stride(0), q_out.stride(0), tables.stride(0), cache.page_stride_units,
        0.0 if norms is None else norms.q.eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, TILE=tile, BLOCK=block, QUERY_BLOCKS=query_blocks, BLOCKS=blocks,
        ROTATE=rotary is not None, NORM=norms is not None, NORM_VALUES=v_weight is not None,
        KEYS_AS_VALUES=0 < qkv.shape[1] - heads < 2 * kv_heads, PDL=pdl, num_warps=warps, **layout_constants(cache),
        launch_pdl=pdl,
    )  # fmt: skip


def _check(
    qkv: Tensor, q_out: Tensor, tables: Tensor, slots: Tensor, positions: Tensor, dim: int, heads: int, kv_heads: int,
    rotary: Tensor | None,
) -> None:  # fmt: skip
    tokens = qkv.shape[0]
    assert dim % 2 == 0, "a head has two halves"
    assert q_out.shape == (tokens, heads, dim), "heads of one size"
    assert qkv.shape in [(tokens, heads + n * kv_heads, dim) for n in (1, 2)], "queries, keys and perhaps values"
    assert qkv.stride()[1:] == q_out.stride()[1:] == (dim, 1), "a token's heads are contiguous"
    assert slots.shape == positions.shape == (tokens,), "one slot and one position a token"
    assert all(x.is_contiguous() for x in (slots, positions)), "slots and positions are contiguous"
    assert tables.stride(1) == 1, "a slot's table is contiguous"
    if rotary is not None:
        assert (rotary.shape[1:], rotary.is_contiguous()) == ((2, dim // 2), True), "cos and sin for each pair"
