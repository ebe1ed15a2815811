"""Causal convolution of each channel (Mamba) over the rows of a step, from a state and to states: equal to
`kernels.mamba_states.causal_conv`.

All outputs are computed in parallel, along time too. The state that a row's first tokens read may be in the page to
which the row's new state is written, so the program that reads it also writes all states of the row, from the inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.mamba_states import CONV_TILE, StateCache, StatePlan
from quire.kernels.triton.activation import activate
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import cdiv, power_of_2

SINGLE_BLOCK = 256
"""Channels of a program for a row of one token."""


@triton.jit
def _input(x, old, read, at, columns, mask, x_stride, HISTORY: tl.constexpr, FIRST: tl.constexpr):
    """Return the inputs at positions `at` of a row, fp32. With FIRST, positions below 0 are read from the state, or are
    zero if there is none. `x`: address of the row's first input; `old`: of the state."""
    values = tl.load(x + at.to(tl.int64) * x_stride + columns, mask=mask & (at >= 0), other=0.0).to(tl.float32)
    if FIRST:
        stored = tl.load(old + columns * HISTORY + at + HISTORY, mask=mask & (at < 0) & (read >= 0), other=0.0)
        values = tl.where(at < 0, stored.to(tl.float32), values)
    return values


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["offsets", "lengths", "starts", "reads", "writes", "tiles"])
def _conv(
    x, weight, bias, out, states, offsets, lengths, starts, reads, writes, tiles,
    x_stride, out_stride, page_stride, width,
    RUN: tl.constexpr, INNER: tl.constexpr, TAPS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute TILE tokens of a row by BLOCK channels a program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    columns = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INNER
    tile = tiles + (tl.program_id(0) // BLOCKS).to(tl.int64) * 2
    first, row = tl.load(tile + 1), tl.load(tile).to(tl.int64)
    length, read, offset = tl.load(lengths + row), tl.load(reads + row), tl.load(offsets + row)
    x += offset * x_stride
    old = states + read * page_stride
    t = (first + tl.arange(0, TILE))[:, None]
    mask = (t < length) & inside[None, :]
    acc = tl.zeros((TILE, BLOCK), tl.float32)
    if BIAS:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(TAPS):
        scale = tl.load(weight + columns * TAPS + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        at = t - (TAPS - 1) + k
        if first == 0:
            values = _input(x, old, read, at, columns[None, :], mask, x_stride, TAPS - 1, True)
        else:
            values = _input(x, old, read, at, columns[None, :], mask, x_stride, TAPS - 1, False)
        acc = tl.fma(values, scale, acc)
    if SILU:
        acc = activate(acc, "silu")
    target = out + (offset + t) * out_stride + columns[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=mask)
    if first == 0 and length > 0:
        start, before = tl.load(starts + row), ()
        for k in tl.static_range(TAPS - 1):
            before += (tl.load(old + columns * (TAPS - 1) + k, mask=inside & (read >= 0), other=0.0),)
        tl.debug_barrier()  # the page that is written may be the one that other threads read
        for run in range(start // RUN, (start + length - 1) // RUN + 1):
            end = tl.minimum((run + 1) * RUN - start, length)
            page = tl.load(writes + row * width + run - start // RUN)
            if page >= 0:
                for k in tl.static_range(TAPS - 1):
                    token = end + k - (TAPS - 1)
                    last = tl.load(x + token * x_stride + columns, mask=inside & (token >= 0), other=0.0)
                    last = last.to(states.dtype.element_ty)
                    for m in tl.static_range(TAPS - 1):
                        last = tl.where(end + k == m, before[m], last)
                    tl.store(states + page * page_stride + columns * (TAPS - 1) + k, last, mask=inside)


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["reads", "writes"])
def _conv_single(
    x, weight, bias, out, states, reads, writes, x_stride, out_stride, page_stride, width,
    INNER: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BIAS: tl.constexpr,
    SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the same for rows of one token: BLOCK channels, one a thread, so that a warp's accesses are adjacent, as
    the few numbers of a channel in a state are. States are written in memory order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HISTORY: tl.constexpr = TAPS - 1
    row, begin = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(0) % BLOCKS * BLOCK
    columns = begin + tl.arange(0, BLOCK)
    inside, scales = columns < INNER, ()
    for k in tl.static_range(TAPS):
        scales += (tl.load(weight + columns * TAPS + k, mask=inside, other=0.0).to(tl.float32),)
    acc = tl.zeros((BLOCK,), tl.float32)
    if BIAS:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    read, page = tl.load(reads + row), tl.load(writes + row * width)
    x, old, new = x + row * x_stride, states + read * page_stride, states + page * page_stride
    token, before, after = tl.load(x + columns, mask=inside, other=0.0), (), ()
    for k in tl.static_range(HISTORY):
        before += (tl.load(old + columns * HISTORY + k, mask=inside & (read >= 0), other=0.0),)
    for k in tl.static_range(HISTORY):
        place = begin * HISTORY + k * BLOCK + tl.arange(0, BLOCK)
        here, latest = place < INNER * HISTORY, place % HISTORY == HISTORY - 1
        moved = tl.load(old + place + 1, mask=here & (read >= 0) & (latest == 0), other=0.0)
        added = tl.load(x + place // HISTORY, mask=here & latest, other=0.0)
        after += (tl.where(latest, added.to(moved.dtype), moved),)
    for k in tl.static_range(HISTORY):
        acc = tl.fma(before[k].to(tl.float32), scales[k], acc)
    acc = tl.fma(token.to(tl.float32), scales[HISTORY], acc)
    if SILU:
        acc = activate(acc, "silu")
    tl.store(out + row * out_stride + columns, acc.to(out.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # the page that is written may be the one that other threads read
    for k in tl.static_range(HISTORY):
        place = begin * HISTORY + k * BLOCK + tl.arange(0, BLOCK)
        tl.store(new + place, after[k], mask=place < INNER * HISTORY)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: StateCache,
    plan: StatePlan,
    *,
    silu: bool = True,
    pdl: bool = False,
) -> Tensor:
    """Return the causal convolution of x, as quire.kernels.mamba_states.causal_conv. x's rows may have any stride. A
    token's bits depend neither on other rows of the step, nor on how its row is cut into steps. pdl: programmatic
    dependent launch, on GPUs of capability 9 and more."""
    (tokens, inner), taps, states = x.shape, weight.shape[1], cache.conv
    assert x.stride(1) == 1, "rows are contiguous"
    assert (weight.shape, weight.is_contiguous()) == ((inner, taps), True), "a weight for each tap of a channel"
    assert states.shape[1:] == (inner, taps - 1), f"states of {tuple(states.shape[1:])} do not fit the weight"
    out = torch.empty((tokens, inner), dtype=x.dtype, device=x.device)
    if plan.tiles is None:
        block, programs = min(max(power_of_2(inner), 32), SINGLE_BLOCK), len(plan.offsets)
    else:
        block, programs = min(power_of_2(inner), 64), len(plan.tiles)
    if not programs:
        return out
    blocks = cdiv(inner, block)
    options = {"INNER": inner, "TAPS": taps, "BLOCK": block, "BLOCKS": blocks, "BIAS": bias is not None}
    options |= {"SILU": silu, "PDL": pdl, "launch_pdl": pdl}
    strides = x.stride(0), out.stride(0), states.stride(0), plan.write_pages.stride(0)
    if plan.tiles is None:
        _conv_single[(programs * blocks,)](
            x, weight, bias, out, states, plan.read_pages, plan.write_pages, *strides, num_warps=block // 32, **options,
        )  # fmt: skip
        return out
    _conv[(programs * blocks,)](
        x, weight, bias, out, states, plan.offsets, plan.lengths, plan.starts, plan.read_pages, plan.write_pages,
        plan.tiles, *strides, RUN=plan.page_tokens, TILE=CONV_TILE, num_warps=8, **options,
    )  # fmt: skip
    return out
