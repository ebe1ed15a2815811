"""Selective scan (Mamba, arXiv:2312.00752) over the rows of a step, from a state and to states: equal to
`kernels.mamba_states.selective_scan`.

A program computes the tokens of a row in order; channels and rows are parallel. There are two kernels: `_scan`, whose
threads share a channel's states, and `_unrolled`, in which a thread holds all of them. Both compute the same bits for a
channel's states after a token; the sums over states are taken in another order, which may change an output's last bit
in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.mamba_states import CONV_TILE, StateCache, StatePlan
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import cdiv, power_of_2

LOG2E = tl.constexpr(1.4426950408889634)
MAX_UNROLLED_STATES = 32
"""The most states of a channel for `_unrolled`."""
TILE = 4
"""Tokens that `_unrolled` computes while it loads as many."""
GROUPS, WARPS, REGISTERS = 2, 1, 255
"""Channels of a thread, warps of a program, and the most registers of a thread of `_unrolled`."""
BUSY_WARPS = 2048
"""Warps with as many registers that an H200 runs at once, 16 to a multiprocessor."""
SINGLE_STATES, SINGLE_WARPS = 1024, 2
"""States of a program of `_scan`, and its warps."""


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), fp32, with a relative error below 3e-7, also for small results: those of slow channels
    are. By a polynomial in exp(-|x|), to use one special function instead of two: a GPU computes few at a time, and the
    states need one too."""
    e = tl.exp2(-tl.abs(x) * LOG2E)
    part = tl.fma(e, 0.00510582561, -0.0289919563)
    part = tl.fma(e, tl.fma(e, tl.fma(e, part, 0.0773807392), -0.135905996), 0.190713093)
    part = tl.fma(e, tl.fma(e, tl.fma(e, tl.fma(e, part, -0.248339459), 0.333179355), -0.499994367), 0.99999994)
    return tl.fma(e, part, tl.maximum(x, 0.0))


@triton.jit
def silu_gate(y, z):
    return y * (z / (1.0 + tl.exp2(-z * LOG2E)))


@triton.jit
def advance_state(h, decay, delta, moved, b):
    """Return a state after the next token. The fused operation is explicit, so that both kernels have the same bits."""
    return tl.fma(tl.exp2(delta * decay), h, moved * b)


@triton.jit
def _load_token(x, dt, B, C, z, t, channel, n, inside, real, x_stride, dt_stride, b_stride, c_stride, z_stride):
    """Return a token's (x, dt, z, B, C), in their dtypes."""
    v = tl.load(x + t * x_stride + channel, mask=inside, other=0.0)
    d = tl.load(dt + t * dt_stride + channel, mask=inside, other=0.0)
    gate = tl.load(z + t * z_stride + channel, mask=inside, other=0.0)
    b = tl.load(B + t * b_stride + n, mask=real, other=0.0)
    c = tl.load(C + t * c_stride + n, mask=real, other=0.0)
    return v, d, gate, b, c


@triton.jit
def _scan_step(h, decay, numbers, skip, shift):
    """Return (states [BLOCK, SIZE] after a token, its output)."""
    v, d, gate, b, c = numbers
    v, delta = v.to(tl.float32), softplus(d.to(tl.float32) + shift)
    h = advance_state(h, decay, delta[:, None], (delta * v)[:, None], b.to(tl.float32)[None, :])
    y = tl.fma(skip, v, tl.sum(h * c.to(tl.float32)[None, :], axis=1))
    return h, silu_gate(y, gate.to(tl.float32))


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["offsets", "lengths", "starts", "reads", "writes"])
def _scan(
    x, dt, A, B, C, D, z, bias, out, states, offsets, lengths, starts, reads, writes,
    x_stride, dt_stride, b_stride, c_stride, z_stride, page_stride, width,
    RUN: tl.constexpr, INNER: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, BIAS: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scan all tokens of a row by BLOCK channels a program; several threads share the states [BLOCK, SIZE]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channel = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, PADDED)
    inside, real = channel < INNER, n < SIZE
    cells, mask = channel[:, None] * SIZE + n[None, :], inside[:, None] & real[None, :]
    decay = tl.load(A + cells, mask=mask, other=0.0) * LOG2E
    skip = tl.load(D + channel, mask=inside, other=0.0)
    shift = tl.load(bias + channel, mask=inside, other=0.0) if BIAS else 0.0
    if PDL:
        tl.extra.cuda.gdc_wait()
    start, read = tl.load(starts + row), tl.load(reads + row)
    old = tl.load(states + read * page_stride + cells, mask=mask & (read >= 0), other=0.0)
    if SINGLE:  # issue all loads at once
        numbers = _load_token(
            x, dt, B, C, z, row, channel, n, inside, real, x_stride, dt_stride, b_stride, c_stride, z_stride
        )
        page = tl.load(writes + row * width)
        h, y = _scan_step(old.to(tl.float32), decay, numbers, skip, shift)
        tl.store(out + row * INNER + channel, y.to(out.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # the page that is written may be the one that other threads read
        tl.store(states + page * page_stride + cells, h.to(states.dtype.element_ty), mask=mask)
        return
    offset, length, h = tl.load(offsets + row), tl.load(lengths + row), old.to(tl.float32)
    tl.debug_barrier()  # as above
    for i in range(length):
        t = offset + i
        numbers = _load_token(
            x, dt, B, C, z, t, channel, n, inside, real, x_stride, dt_stride, b_stride, c_stride, z_stride
        )
        h, y = _scan_step(h, decay, numbers, skip, shift)
        tl.store(out + t * INNER + channel, y.to(out.dtype.element_ty), mask=inside)
        after = start + i + 1
        if (after % RUN == 0) | (i + 1 == length):
            page = tl.load(writes + row * width + (after - 1) // RUN - start // RUN)
            tl.store(states + page * page_stride + cells, h.to(states.dtype.element_ty), mask=mask & (page >= 0))


@triton.jit
def _split_columns(numbers, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return the columns of `numbers` [BLOCK, WIDE]. A thread holds whole rows, so no data moves between threads."""
    if WIDE == 1:
        return (tl.reshape(numbers, (BLOCK,)),)
    elif WIDE == 2:
        return tl.split(numbers)
    else:  # an else, because the compiler also checks unreachable code after a return
        even, odd = tl.split(tl.reshape(numbers, (BLOCK, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.jit
def _join_columns(columns, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return the columns joined to [BLOCK, WIDE]."""
    if WIDE == 1:
        return tl.reshape(columns[0], (BLOCK, 1))
    elif WIDE == 2:
        return tl.join(columns[0], columns[1])
    else:
        return tl.reshape(tl.join(tl.join(columns[0], columns[2]), tl.join(columns[1], columns[3])), (BLOCK, 4))


@triton.jit
def _load_channels(place, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return SIZE numbers of each channel from addresses `place` [BLOCK] on, fp32, WIDE in a load."""
    numbers = ()
    for n in tl.static_range(0, SIZE, WIDE):
        wide = tl.load(place[:, None] + n + tl.arange(0, WIDE)[None, :], mask=mask[:, None], other=0.0)
        numbers += _split_columns(wide.to(tl.float32), BLOCK, WIDE)
    return numbers


@triton.jit
def _store_states(
    place, channel, inside, h, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Store all channels' states from `place` on."""
    for k in tl.static_range(GROUPS):
        for n in tl.static_range(0, SIZE, WIDE):
            some = ()
            for m in tl.static_range(WIDE):
                some += (h[k * SIZE + n + m],)
            target = place + (channel[k] * SIZE)[:, None] + n + tl.arange(0, WIDE)[None, :]
            tl.store(target, _join_columns(some, BLOCK, WIDE).to(place.dtype.element_ty), mask=inside[k][:, None])


@triton.jit
def _load_tokens(base, stride, channel, inside, TILE: tl.constexpr, GROUPS: tl.constexpr):
    """Return the channels' numbers of TILE tokens from `base` on."""
    numbers = ()
    for i in tl.static_range(TILE):
        for k in tl.static_range(GROUPS):
            numbers += (tl.load(base + i * stride + channel[k], mask=inside[k], other=0.0),)
    return numbers


@triton.jit
def _step_states(
    h, decays, v, delta, skip, both, FIRST: tl.constexpr, SIZE: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """Return (a channel's states after a token, its output before the gate). Its states before are h from FIRST on."""
    moved, y, states = delta * v, skip * v, ()
    for n in tl.static_range(SIZE):
        state = advance_state(h[FIRST + n], decays[FIRST + n], delta, moved, both[n])
        if not ENDS:
            y = tl.fma(state, both[SIZE + n], y)
        states += (state,)
    return states, y


@triton.jit
def _scan_tile(
    h, totals, tokens, bc, out, channel, inside, decays, skips, shifts, INNER: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """Return (states after TILE tokens, sums of the steps delta including theirs). Unless ENDS their outputs are
    stored, all after the last token: the compiler moves no load before a store, and so it can load B and C early if
    there are registers."""
    vs, ds, gs = tokens
    ys = ()
    everywhere = tl.full((BLOCK,), True, tl.int1)
    for i in tl.static_range(TILE):
        same = bc + i * 2 * SIZE + tl.zeros((BLOCK,), tl.int32)
        both = _load_channels(same, everywhere, SIZE if ENDS else 2 * SIZE, BLOCK, WIDE)
        states, sums = (), ()
        for k in tl.static_range(GROUPS):
            delta = softplus(ds[i * GROUPS + k].to(tl.float32) + shifts[k])
            left, y = _step_states(
                h, decays, vs[i * GROUPS + k].to(tl.float32), delta, skips[k], both, k * SIZE, SIZE, ENDS
            )
            states += left
            sums += (totals[k] + delta,)
            if not ENDS:
                ys += (silu_gate(y, gs[i * GROUPS + k].to(tl.float32)).to(out.dtype.element_ty),)
        h, totals = states, sums
    if not ENDS:
        for i in tl.static_range(TILE):
            for k in tl.static_range(GROUPS):
                tl.store(out + i * INNER + channel[k], ys[i * GROUPS + k], mask=inside[k])
    return h, totals


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["offsets", "lengths", "starts", "reads", "writes", "tiles"])
def _unrolled(
    x, dt, A, bc, D, z, bias, out, states, ends, totals, offsets, lengths, starts, reads, writes, tiles,
    x_stride, dt_stride, z_stride, page_stride, width,
    RUN: tl.constexpr, INNER: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    BIAS: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr, PART: tl.constexpr,
    ENDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Do the same as `_scan`, with all SIZE states of GROUPS channels in each thread: no sum crosses threads. TILE
    tokens are computed while the next ones are loaded. `bc`: B and C side by side, fp32.

    PART: tokens of a part of a row, which has its own program; 0: rows are not split. A part's first state is computed
    from the parts before it. An earlier launch, with ENDS, has stored for each part its last states, starting from
    zero (the first part: from the row's state), and the sums of its steps delta."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    begin = 0
    if PART:
        if PDL:
            tl.extra.cuda.gdc_wait()
        begin = tl.load(tiles + 2 * row + 1)
        row = tl.load(tiles + 2 * row).to(tl.int64)
        if begin % PART != 0:
            return
    channel, inside, skips, shifts, decays, sums = (), (), (), (), (), ()
    for k in tl.static_range(GROUPS):
        c = (tl.program_id(0) % BLOCKS * GROUPS + k) * BLOCK + tl.arange(0, BLOCK)
        there = c < INNER if INNER % (BLOCK * GROUPS) else tl.full((BLOCK,), True, tl.int1)
        channel += (c,)
        inside += (there,)
        skips += (tl.load(D + c, mask=there, other=0.0),)
        shifts += (tl.load(bias + c, mask=there, other=0.0) if BIAS else 0.0,)
        slopes = _load_channels(A + c * SIZE, there, SIZE, BLOCK, WIDE)
        for n in tl.static_range(SIZE):
            decays += (slopes[n] * LOG2E,)
        sums += (tl.zeros((BLOCK,), tl.float32),)
    if PDL and not PART:
        tl.extra.cuda.gdc_wait()
    offset, length = tl.load(offsets + row), tl.load(lengths + row)
    start, read = tl.load(starts + row), tl.load(reads + row)
    stop, slot, h = length, 0, ()
    if PART:
        stop, slot = tl.minimum(length, begin + PART), offset // PART
        if ENDS and begin + PART >= length:
            return
    for k in tl.static_range(GROUPS):
        old, has_state = states + read * page_stride + channel[k] * SIZE, inside[k] & (read >= 0) & (begin == 0)
        h += _load_channels(old, has_state, SIZE, BLOCK, WIDE)
    if PART and not ENDS:
        for part in range(begin // PART):
            place, left = (slot + part) * INNER, ()
            for k in tl.static_range(GROUPS):
                delta = tl.load(totals + place + channel[k], mask=inside[k], other=0.0)
                found = _load_channels(ends + (place + channel[k]) * SIZE, inside[k], SIZE, BLOCK, WIDE)
                for n in tl.static_range(SIZE):
                    left += (tl.fma(tl.exp2(delta * decays[k * SIZE + n]), h[k * SIZE + n], found[n]),)
            h = left
    tl.debug_barrier()  # the page that is written may be the one that other threads read
    x, dt, z, bc = x + offset * x_stride, dt + offset * dt_stride, z + offset * z_stride, bc + offset * (2 * SIZE)
    out += offset * INNER
    final = tl.where(stop > begin, (start + stop - 1) // RUN + 1, (start + begin) // RUN)
    for run in range((start + begin) // RUN, final):
        first = tl.maximum(run * RUN - start, begin)
        end = tl.minimum((run + 1) * RUN - start, stop)
        whole = first + (end - first) // TILE * TILE
        if whole > first:
            vs = _load_tokens(x + first * x_stride, x_stride, channel, inside, TILE, GROUPS)
            ds = _load_tokens(dt + first * dt_stride, dt_stride, channel, inside, TILE, GROUPS)
            gs = vs
            if not ENDS:
                gs = _load_tokens(z + first * z_stride, z_stride, channel, inside, TILE, GROUPS)
            for t in range(first, whole, TILE):
                then = tl.minimum(t + TILE, whole - TILE)  # after the last tile, load it again
                later_vs = _load_tokens(x + then * x_stride, x_stride, channel, inside, TILE, GROUPS)
                later_ds = _load_tokens(dt + then * dt_stride, dt_stride, channel, inside, TILE, GROUPS)
                later_gs = later_vs
                if not ENDS:
                    later_gs = _load_tokens(z + then * z_stride, z_stride, channel, inside, TILE, GROUPS)
                h, sums = _scan_tile(
                    h, sums, (vs, ds, gs), bc + t * (2 * SIZE), out + t * INNER, channel, inside, decays, skips,
                    shifts, INNER, SIZE, BLOCK, TILE, GROUPS, WIDE, ENDS,
                )  # fmt: skip
                vs, ds, gs = later_vs, later_ds, later_gs
        for t in range(whole, end):
            vs = _load_tokens(x + t * x_stride, x_stride, channel, inside, 1, GROUPS)
            ds = _load_tokens(dt + t * dt_stride, dt_stride, channel, inside, 1, GROUPS)
            gs = _load_tokens(z + t * z_stride, z_stride, channel, inside, 1, GROUPS)
            h, sums = _scan_tile(
                h, sums, (vs, ds, gs), bc + t * (2 * SIZE), out + t * INNER, channel, inside, decays, skips, shifts,
                INNER, SIZE, BLOCK, 1, GROUPS, WIDE, ENDS,
            )  # fmt: skip
        if not ENDS and ((start + end) % RUN == 0 or end == length):
            page = tl.load(writes + row * width + run - start // RUN)
            if page >= 0:
                _store_states(states + page * page_stride, channel, inside, h, SIZE, BLOCK, GROUPS, WIDE)
    if ENDS:
        place = (slot + begin // PART) * INNER
        for k in tl.static_range(GROUPS):
            tl.store(totals + place + channel[k], sums[k], mask=inside[k])
        _store_states(ends + place * SIZE, channel, inside, h, SIZE, BLOCK, GROUPS, WIDE)


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, bias: Tensor | None,
    cache: StateCache, plan: StatePlan, *, deterministic: bool = False, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Return the selective scan of x, as quire.kernels.mamba_states.selective_scan. Rows of x, dt, B, C and z may have
    any strides. `deterministic`: a token's bits depend neither on other rows of the step nor, with states in fp32, on
    how its row is cut into steps; d_state may be at most MAX_UNROLLED_STATES then. Else only rows computed in parts
    (`scan_part_tokens`), and an output's last bit in fp32, may depend on these. pdl: programmatic dependent launch, on
    GPUs of capability 9 and more."""
    (tokens, inner), size = x.shape, A.shape[1]
    assert cache.ssm is not None, "a scan has states"
    _check(x, dt, A, B, C, D, z, bias, cache.ssm)
    assert not deterministic or size <= MAX_UNROLLED_STATES, f"{size} states of a channel exceed {MAX_UNROLLED_STATES}"
    out, rows = torch.empty((tokens, inner), dtype=x.dtype, device=x.device), len(plan.offsets)
    if not rows:
        return out
    numbers = (plan.offsets, plan.lengths, plan.starts, plan.read_pages, plan.write_pages)
    options = {"RUN": plan.page_tokens, "INNER": inner, "SIZE": size, "BIAS": bias is not None}
    options |= {"PDL": pdl, "launch_pdl": pdl}
    ends = (cache.ssm.stride(0), plan.write_pages.stride(0))
    if size <= MAX_UNROLLED_STATES and (deterministic or plan.tiles is not None):
        bc = _interleave_bc(B, C)
        part = 0 if deterministic else scan_part_tokens(plan, tokens, inner)
        scan_prefill(x, dt, A, bc, D, z, bias, out, cache.ssm, plan, part, options)
        return out
    padded = power_of_2(size)
    block = min(power_of_2(inner), max(1, SINGLE_STATES // padded))
    blocks = cdiv(inner, block)
    _scan[(rows * blocks,)](
        x, dt, A, B, C, D, z, bias, out, cache.ssm, *numbers,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0), z.stride(0), *ends,
        PADDED=padded, BLOCK=block, BLOCKS=blocks, SINGLE=plan.tiles is None, num_warps=SINGLE_WARPS, **options,
    )  # fmt: skip
    return out


def scan_part_tokens(plan: StatePlan, tokens: int, inner: int) -> int:
    """Return the tokens of a part, if splitting rows into parts is at least twice as fast, else 0. Parts occupy the GPU
    where a row is long, but all except the last are computed twice. A part is at least a run, so that a page that is
    both read and written belongs to the row's first part."""
    if plan.tiles is None or plan.write_pages.shape[1] < 4:
        return 0
    fair = tokens * cdiv(inner, 32) // BUSY_WARPS  # tokens of a warp if all have equal work
    part = power_of_2(max(CONV_TILE, plan.page_tokens, fair))
    return part if plan.write_pages.shape[1] * plan.page_tokens >= 4 * part else 0


def scan_prefill(
    x: Tensor, dt: Tensor, A: Tensor, bc: Tensor, D: Tensor, z: Tensor, bias: Tensor | None, out: Tensor,
    states: Tensor, plan: StatePlan, part: int, options: dict[str, Any],
) -> None:  # fmt: skip
    """Launch `_unrolled` for whole rows, or with `part` tokens a part, after a launch for the parts' last states."""
    (tokens, inner), size, ends, totals = x.shape, A.shape[1], None, None
    block = 32 * WARPS
    blocks, wide = cdiv(inner, block * GROUPS), min(4, size & -size)
    programs = len(plan.offsets)
    if part:
        assert plan.tiles is not None, "rows of one token are not split"
        assert part % CONV_TILE == 0, f"a part of {part} tokens is no multiple of tiles of {CONV_TILE}"
        assert part >= plan.page_tokens, f"a part of {part} tokens is shorter than a run of {plan.page_tokens}"
        programs = len(plan.tiles)
        ends = torch.empty((tokens // part + 1, inner, size), dtype=torch.float32, device=x.device)
        totals = torch.empty((tokens // part + 1, inner), dtype=torch.float32, device=x.device)
    for only_ends in (True, False) if part else (False,):
        _unrolled[(programs * blocks,)](
            x, dt, A, bc, D, z, bias, out, states, ends, totals,
            plan.offsets, plan.lengths, plan.starts, plan.read_pages, plan.write_pages, plan.tiles,
            x.stride(0), dt.stride(0), z.stride(0), states.stride(0), plan.write_pages.stride(0),
            BLOCK=block, BLOCKS=blocks, TILE=TILE, GROUPS=GROUPS, WIDE=wide, PART=part,
            ENDS=only_ends, **options, num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip


def _interleave_bc(B: Tensor, C: Tensor) -> Tensor:
    """Return B and C [T, d_state] side by side in fp32; without a copy if they are so in memory."""
    (tokens, size), wide = B.shape, (B.dtype, C.dtype) == (torch.float32, torch.float32)
    if wide and B.stride() == C.stride() == (2 * size, 1) and C.data_ptr() == B.data_ptr() + 4 * size:
        return B.as_strided((tokens, 2 * size), (2 * size, 1))
    return torch.cat((B, C), dim=1).float()


def _check(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, bias: Tensor | None, states: Tensor
) -> None:
    (tokens, inner), size = x.shape, A.shape[1]
    assert x.shape == dt.shape == z.shape, "x, dt and z of each channel"
    assert B.shape == C.shape == (tokens, size), "B and C of each state"
    assert all(tensor.stride(1) == 1 for tensor in (x, dt, B, C, z)), "rows are contiguous"
    assert states.shape[1:] == A.shape == (inner, size), f"states of {tuple(states.shape[1:])} do not fit A"
    for vector in (A, D, bias):
        assert vector is None or (vector.dtype, vector.is_contiguous()) == (torch.float32, True), "A, D, bias in fp32"
        assert vector is None or len(vector) == inner, "A, D and bias have a row for each channel"
