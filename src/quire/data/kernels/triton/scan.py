"""The selective scan (Mamba, arXiv:2312.00752), over rows of a step from a state and to states: equal to
`kernels.states.selective_scan`.

Time goes on within a program, channels and rows lie side by side. A channel's states after a token have the same bits
in both kernels here; the sums over them are taken in another order, which may change an output's last bit in fp32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.data.kernels.states import CONV_TILE, StateCache, StatePlan
from quire.data.kernels.triton.launch import cdiv, power_of_2
from quire.data.kernels.triton.quick import quick

MOST_UNROLLED = 32
"""States of a channel, at most, that a thread holds all of."""

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), fp32, within 3e-7 of itself, also where it is small: the steps of slow channels are. By a
    polynomial in exp(-|x|), so that of the few special functions that a GPU has a second one is left to the states."""
    e = tl.exp2(-tl.abs(x) * LOG2E)
    part = tl.fma(e, 0.00510582561, -0.0289919563)
    part = tl.fma(e, tl.fma(e, tl.fma(e, part, 0.0773807392), -0.135905996), 0.190713093)
    part = tl.fma(e, tl.fma(e, tl.fma(e, tl.fma(e, part, -0.248339459), 0.333179355), -0.499994367), 0.99999994)
    return tl.fma(e, part, tl.maximum(x, 0.0))


@triton.jit
def _exp2(x):
    """2 ** x, fp32, within 2e-7 of itself, by a polynomial alone; below -126 that of -126, which is next to nothing."""
    x = tl.minimum(tl.maximum(x, -126.0), 127.0)
    moved = x + 12582912.0  # 1.5 * 2 ** 23: rounds to a whole number, which the last bits are
    f = x - (moved - 12582912.0)
    p = tl.fma(f, tl.fma(f, 0.00133989, 0.00961844), 0.05550327)
    p = tl.fma(f, tl.fma(f, tl.fma(f, p, 0.24022650), 0.69314718), 1.0)
    return ((moved.to(tl.int32, bitcast=True) << 23) + p.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _gated(y, z):
    return y * (z / (1.0 + tl.exp2(-z * LOG2E)))


@triton.jit
def _advanced(h, decay, delta, moved, b):
    """A state after the next token. What is fused with what is said, so that its bits are the same everywhere."""
    return tl.fma(tl.exp2(delta * decay), h, moved * b)


@quick
@triton.jit(do_not_specialize_on_alignment=["offsets", "lengths", "starts", "reads", "writes"])
def _scan(
    x, dt, A, B, C, D, z, bias, out, states, offsets, lengths, starts, reads, writes,
    x_stride, dt_stride, b_stride, c_stride, z_stride, page_stride, width,
    RUN: tl.constexpr, INNER: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, BIAS: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All of a row's tokens by BLOCK channels a program, whose states [BLOCK, SIZE] several threads share."""
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
    offset, length, start, read = row, 1, tl.load(starts + row), tl.load(reads + row)
    if not SINGLE:
        offset, length = tl.load(offsets + row), tl.load(lengths + row)
    h = tl.load(states + read * page_stride + cells, mask=mask & (read >= 0), other=0.0).to(tl.float32)
    tl.debug_barrier()  # what is written may be what another thread reads
    for i in range(length):
        t = offset + i
        v = tl.load(x + t * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
        delta = _softplus(tl.load(dt + t * dt_stride + channel, mask=inside, other=0.0).to(tl.float32) + shift)
        b = tl.load(B + t * b_stride + n, mask=real, other=0.0).to(tl.float32)[None, :]
        c = tl.load(C + t * c_stride + n, mask=real, other=0.0).to(tl.float32)[None, :]
        h = _advanced(h, decay, delta[:, None], (delta * v)[:, None], b)
        y = tl.fma(skip, v, tl.sum(h * c, axis=1))
        gate = tl.load(z + t * z_stride + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + t * INNER + channel, _gated(y, gate).to(out.dtype.element_ty), mask=inside)
        after = start + i + 1
        if (after % RUN == 0) | (i + 1 == length):
            page = tl.load(writes + row * width + (after - 1) // RUN - start // RUN)
            tl.store(states + page * page_stride + cells, h.to(states.dtype.element_ty), mask=mask)


@triton.jit
def _apart(numbers, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """The columns of [BLOCK, WIDE], of which a thread holds whole rows: nothing moves."""
    if WIDE == 1:
        return (tl.reshape(numbers, (BLOCK,)),)
    if WIDE == 2:
        return tl.split(numbers)
    even, odd = tl.split(tl.reshape(numbers, (BLOCK, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _beside(columns, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """[BLOCK, WIDE] of these columns."""
    if WIDE == 1:
        return tl.reshape(columns[0], (BLOCK, 1))
    if WIDE == 2:
        return tl.join(columns[0], columns[1])
    return tl.reshape(tl.join(tl.join(columns[0], columns[2]), tl.join(columns[1], columns[3])), (BLOCK, 4))


@triton.jit
def _of_channels(place, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """SIZE numbers of each channel from `place` [BLOCK] on, fp32, WIDE in a load."""
    numbers = ()
    for n in tl.static_range(0, SIZE, WIDE):
        wide = tl.load(place[:, None] + n + tl.arange(0, WIDE)[None, :], mask=mask[:, None], other=0.0)
        numbers += _apart(wide.to(tl.float32), BLOCK, WIDE)
    return numbers


@triton.jit
def _written(
    place, channel, inside, h, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """All channels' states are, from `place` on."""
    for k in tl.static_range(GROUPS):
        for n in tl.static_range(0, SIZE, WIDE):
            some = ()
            for m in tl.static_range(WIDE):
                some += (h[k * SIZE + n + m],)
            target = place + (channel[k] * SIZE)[:, None] + n + tl.arange(0, WIDE)[None, :]
            tl.store(target, _beside(some, BLOCK, WIDE).to(place.dtype.element_ty), mask=inside[k][:, None])


@triton.jit
def _of_tokens(base, stride, channel, inside, TILE: tl.constexpr, GROUPS: tl.constexpr):
    """The channels' numbers of TILE tokens from `base` on."""
    numbers = ()
    for i in tl.static_range(TILE):
        for k in tl.static_range(GROUPS):
            numbers += (tl.load(base + i * stride + channel[k], mask=inside[k], other=0.0),)
    return numbers


@triton.jit
def _after(
    h, decays, v, delta, skip, both,
    FIRST: tl.constexpr, SIZE: tl.constexpr, FMA: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """(A channel's states after a token, h from FIRST on before it; its output before the gate). FMA: states, the last
    ones, whose exponentials are computed without special functions."""
    moved, y, states = delta * v, skip * v, ()
    for n in tl.static_range(SIZE):
        if n < SIZE - FMA:
            state = _advanced(h[FIRST + n], decays[FIRST + n], delta, moved, both[n])
        else:
            state = tl.fma(_exp2(delta * decays[FIRST + n]), h[FIRST + n], moved * both[n])
        if not ENDS:
            y = tl.fma(state, both[SIZE + n], y)
        states += (state,)
    return states, y


@triton.jit
def _computed(
    h, totals, tokens, bc, out, channel, inside, decays, skips, shifts, INNER: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr, FMA: tl.constexpr,
    ENDS: tl.constexpr,
):  # fmt: skip
    """(States after TILE tokens, sums of steps with theirs). Their outputs are written, unless ENDS."""
    vs, ds, gs = tokens
    everywhere = tl.full((BLOCK,), True, tl.int1)
    for i in tl.static_range(TILE):
        same = bc + i * 2 * SIZE + tl.zeros((BLOCK,), tl.int32)
        both = _of_channels(same, everywhere, SIZE if ENDS else 2 * SIZE, BLOCK, WIDE)
        states, sums = (), ()
        for k in tl.static_range(GROUPS):
            delta = _softplus(ds[i * GROUPS + k].to(tl.float32) + shifts[k])
            left, y = _after(h, decays, vs[i * GROUPS + k].to(tl.float32), delta, skips[k], both, k * SIZE, SIZE, FMA, ENDS)
            states += left
            sums += (totals[k] + delta,)
            if not ENDS:
                y = _gated(y, gs[i * GROUPS + k].to(tl.float32))
                tl.store(out + i * INNER + channel[k], y.to(out.dtype.element_ty), mask=inside[k])
        h, totals = states, sums
    return h, totals


@quick
@triton.jit(do_not_specialize_on_alignment=["offsets", "lengths", "starts", "reads", "writes", "tiles"])
def _unrolled(
    x, dt, A, bc, D, z, bias, out, states, ends, totals, offsets, lengths, starts, reads, writes, tiles,
    x_stride, dt_stride, z_stride, page_stride, width,
    RUN: tl.constexpr, INNER: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    BIAS: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr, FMA: tl.constexpr,
    PART: tl.constexpr, ENDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_scan`, and each thread holds all SIZE states of its GROUPS channels: no sum crosses threads. TILE tokens are
    computed while the next ones are loaded. `bc`: B and C side by side, fp32.

    PART: tokens of a part of a row, which has a program of its own; 0: rows are whole. A part starts from what those
    before it leave, which another launch, with ENDS, has found and written: their last states when they start from
    none (the first one: from the row's), and the sums of their steps."""
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
        channel, inside = channel + (c,), inside + (there,)
        skips += (tl.load(D + c, mask=there, other=0.0),)
        shifts += (tl.load(bias + c, mask=there, other=0.0) if BIAS else 0.0,)
        slopes = _of_channels(A + c * SIZE, there, SIZE, BLOCK, WIDE)
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
        old, known = states + read * page_stride + channel[k] * SIZE, inside[k] & (read >= 0) & (begin == 0)
        h += _of_channels(old, known, SIZE, BLOCK, WIDE)
    if PART and not ENDS:
        for part in range(begin // PART):
            place, left = (slot + part) * INNER, ()
            for k in tl.static_range(GROUPS):
                delta = tl.load(totals + place + channel[k], mask=inside[k], other=0.0)
                found = _of_channels(ends + (place + channel[k]) * SIZE, inside[k], SIZE, BLOCK, WIDE)
                for n in tl.static_range(SIZE):
                    left += (tl.fma(tl.exp2(delta * decays[k * SIZE + n]), h[k * SIZE + n], found[n]),)
            h = left
    tl.debug_barrier()  # what is written may be what another thread reads
    x, dt, z, bc = x + offset * x_stride, dt + offset * dt_stride, z + offset * z_stride, bc + offset * (2 * SIZE)
    out += offset * INNER
    final = tl.where(stop > begin, (start + stop - 1) // RUN + 1, (start + begin) // RUN)
    for run in range((start + begin) // RUN, final):
        first = tl.maximum(run * RUN - start, begin)
        end = tl.minimum((run + 1) * RUN - start, stop)
        whole = first + (end - first) // TILE * TILE
        if whole > first:
            vs = _of_tokens(x + first * x_stride, x_stride, channel, inside, TILE, GROUPS)
            ds = _of_tokens(dt + first * dt_stride, dt_stride, channel, inside, TILE, GROUPS)
            gs = vs
            if not ENDS:
                gs = _of_tokens(z + first * z_stride, z_stride, channel, inside, TILE, GROUPS)
            for t in range(first, whole, TILE):
                then = tl.minimum(t + TILE, whole - TILE)  # behind the last tile that one again
                later_vs = _of_tokens(x + then * x_stride, x_stride, channel, inside, TILE, GROUPS)
                later_ds = _of_tokens(dt + then * dt_stride, dt_stride, channel, inside, TILE, GROUPS)
                later_gs = later_vs
                if not ENDS:
                    later_gs = _of_tokens(z + then * z_stride, z_stride, channel, inside, TILE, GROUPS)
                h, sums = _computed(
                    h, sums, (vs, ds, gs), bc + t * (2 * SIZE), out + t * INNER, channel, inside, decays, skips,
                    shifts, INNER, SIZE, BLOCK, TILE, GROUPS, WIDE, FMA, ENDS,
                )  # fmt: skip
                vs, ds, gs = later_vs, later_ds, later_gs
        for t in range(whole, end):
            vs = _of_tokens(x + t * x_stride, x_stride, channel, inside, 1, GROUPS)
            ds = _of_tokens(dt + t * dt_stride, dt_stride, channel, inside, 1, GROUPS)
            gs = _of_tokens(z + t * z_stride, z_stride, channel, inside, 1, GROUPS)
            h, sums = _computed(
                h, sums, (vs, ds, gs), bc + t * (2 * SIZE), out + t * INNER, channel, inside, decays, skips, shifts,
                INNER, SIZE, BLOCK, 1, GROUPS, WIDE, FMA, ENDS,
            )  # fmt: skip
        if not ENDS and ((start + end) % RUN == 0 or end == length):
            page = tl.load(writes + row * width + run - start // RUN)
            _written(states + page * page_stride, channel, inside, h, SIZE, BLOCK, GROUPS, WIDE)
    if ENDS:
        place = (slot + begin // PART) * INNER
        for k in tl.static_range(GROUPS):
            tl.store(totals + place + channel[k], sums[k], mask=inside[k])
        _written(ends + place * SIZE, channel, inside, h, SIZE, BLOCK, GROUPS, WIDE)


class Unrolled(NamedTuple):
    """How prompts are divided: tokens computed while as many are loaded, channels of a thread, warps of a program,
    registers that a thread may have, and exponentials of a channel's that are left to polynomials."""

    tile: int = 4
    groups: int = 1
    warps: int = 1
    registers: int = 128
    fma: int = 0


UNROLLED = Unrolled()

BUSY = 2048
"""Warps that an H200 computes at once, of these registers, 16 to a multiprocessor."""


def part_tokens(plan: StatePlan, tokens: int, inner: int) -> int:
    """Tokens of the parts that rows are cut into, such that a long row keeps the GPU busy, where that is at least twice
    as quick for all that parts but the last are computed twice; 0 where it isn't. No less than a run: a row's page that
    is read and written is in its first part then."""
    if plan.tiles is None or plan.writes.shape[1] < 4:
        return 0
    fair = tokens * cdiv(inner, 32) // BUSY  # tokens of a warp if all were as busy
    part = power_of_2(max(CONV_TILE, plan.run_tokens, fair))
    return part if plan.writes.shape[1] * plan.run_tokens >= 4 * part else 0


def _prompts(
    x: Tensor, dt: Tensor, A: Tensor, bc: Tensor, D: Tensor, z: Tensor, bias: Tensor | None, out: Tensor,
    states: Tensor, plan: StatePlan, part: int, options: dict[str, Any], how: Unrolled = UNROLLED,
) -> None:  # fmt: skip
    """Rows whole, or in parts: their ends first."""
    (tokens, inner), size, ends, totals = x.shape, A.shape[1], None, None
    block = 32 * how.warps
    blocks, wide = cdiv(inner, block * how.groups), min(4, size & -size)
    programs = len(plan.offsets)
    if part:
        assert plan.tiles is not None, "rows of one token each are whole"
        assert part % CONV_TILE == 0 and part >= plan.run_tokens, "a part starts with a tile, and has its row's page"
        programs = len(plan.tiles)
        ends = torch.empty((tokens // part + 1, inner, size), dtype=torch.float32, device=x.device)
        totals = torch.empty((tokens // part + 1, inner), dtype=torch.float32, device=x.device)
    for only_ends in (True, False) if part else (False,):
        _unrolled[(programs * blocks,)](
            x, dt, A, bc, D, z, bias, out, states, ends, totals,
            plan.offsets, plan.lengths, plan.starts, plan.reads, plan.writes, plan.tiles,
            x.stride(0), dt.stride(0), z.stride(0), states.stride(0), plan.writes.stride(0),
            BLOCK=block, BLOCKS=blocks, TILE=how.tile, GROUPS=how.groups, WIDE=wide, FMA=how.fma, PART=part, ENDS=only_ends,
            **options, num_warps=how.warps, maxnreg=how.registers,
        )  # fmt: skip


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, bias: Tensor | None,
    cache: StateCache, plan: StatePlan, *, deterministic: bool = False, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """See quire.data.kernels.states. The strides of rows of x, dt, B, C and z are free. A token's bits don't depend on
    the rows beside it. `deterministic`: nor, with states in fp32, on how its row is cut into steps; then d_state may be
    `MOST_UNROLLED` at most. pdl: programmatic dependent launch, on GPUs of capability 9 and more."""
    (tokens, inner), size = x.shape, A.shape[1]
    _check(x, dt, A, B, C, D, z, bias, cache)
    assert not deterministic or size <= MOST_UNROLLED, f"{size} states of a channel are more than a thread holds"
    out, rows = torch.empty((tokens, inner), dtype=x.dtype, device=x.device), len(plan.offsets)
    if not rows:
        return out
    numbers = (plan.offsets, plan.lengths, plan.starts, plan.reads, plan.writes)
    options = {"RUN": plan.run_tokens, "INNER": inner, "SIZE": size, "BIAS": bias is not None, "PDL": pdl}
    options |= {"launch_pdl": True} if pdl else {}
    ends = (cache.ssm.stride(0), plan.writes.stride(0))
    if size <= MOST_UNROLLED and (deterministic or plan.tiles is not None):
        bc = torch.cat((B, C), dim=1).float()
        part = 0 if deterministic else part_tokens(plan, tokens, inner)
        _prompts(x, dt, A, bc, D, z, bias, out, cache.ssm, plan, part, options)
        return out
    padded = power_of_2(size)
    block = min(power_of_2(inner), max(1, 1024 // padded))
    blocks = cdiv(inner, block)
    _scan[(rows * blocks,)](
        x, dt, A, B, C, D, z, bias, out, cache.ssm, *numbers,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0), z.stride(0), *ends,
        PADDED=padded, BLOCK=block, BLOCKS=blocks, SINGLE=plan.tiles is None, num_warps=2, **options,
    )  # fmt: skip
    return out


def _check(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, bias: Tensor | None, cache: StateCache
) -> None:
    (tokens, inner), size = x.shape, A.shape[1]
    assert x.shape == dt.shape == z.shape, "x, dt and z of each channel"
    assert B.shape == C.shape == (tokens, size), "B and C of each state"
    assert all(tensor.stride(1) == 1 for tensor in (x, dt, B, C, z)), "rows are contiguous"
    assert cache.ssm.shape[1:] == A.shape == (inner, size), "the cache is another layer's"
    for vector in (A, D, bias):
        assert vector is None or (vector.dtype, vector.is_contiguous()) == (torch.float32, True), "A, D, bias in fp32"
        assert vector is None or len(vector) == inner, "one of a channel"
