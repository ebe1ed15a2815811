"""The selective scan (Mamba, arXiv:2312.00752), over rows of a step from a state and to states: equal to
`kernels.states.selective_scan`.

Time goes on within a program, channels and rows lie side by side. A channel's states after a token have the same bits
in both kernels here; the sums over them are taken in another order, which may change an output's last bit in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.data.kernels.states import StateCache, StatePlan
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
def _token(x, dt, z, bc, t, channel, inside, x_stride, dt_stride, z_stride, SIZE: tl.constexpr):
    """A token's numbers: x, dt and z of the channels, and those of B and of C, one by one; two in a load, as they are
    the same for all channels, and loads would be a third of all that is done."""
    v = tl.load(x + t * x_stride + channel, mask=inside, other=0.0)
    d = tl.load(dt + t * dt_stride + channel, mask=inside, other=0.0)
    g = tl.load(z + t * z_stride + channel, mask=inside, other=0.0)
    both = ()
    for n in tl.static_range(SIZE):
        two = tl.load(bc + t * SIZE + n)
        low, high = two.to(tl.int32), (two >> 32).to(tl.int32)
        both += (low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True))
    return v, d, g, both


@triton.jit
def _after(h, decays, token, real, skip, shift, SIZE: tl.constexpr):
    """(states after a token, its output). A token that isn't real leaves them as they are."""
    v, d, g, both = token
    v = v.to(tl.float32)
    delta = tl.where(real, _softplus(d.to(tl.float32) + shift), 0.0)
    moved, y, states = delta * v, skip * v, ()
    for n in tl.static_range(SIZE):
        state = _advanced(h[n], decays[n], delta, moved, both[n])
        y = tl.fma(state, both[SIZE + n], y)
        states += (state,)
    return states, _gated(y, g.to(tl.float32))


@quick
@triton.jit(do_not_specialize_on_alignment=["offsets", "lengths", "starts", "reads", "writes"])
def _unrolled(
    x, dt, A, bc, D, z, bias, out, states, offsets, lengths, starts, reads, writes,
    x_stride, dt_stride, z_stride, page_stride, width,
    RUN: tl.constexpr, INNER: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_scan`, and each thread holds all SIZE states of its channels: no sum crosses threads. Two tokens are
    computed while the next two are loaded. `bc`: B and C side by side, fp32, in pairs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channel = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = channel < INNER
    skip = tl.load(D + channel, mask=inside, other=0.0)
    shift = tl.load(bias + channel, mask=inside, other=0.0) if BIAS else 0.0
    decays = ()
    for n in tl.static_range(SIZE):
        decays += (tl.load(A + channel * SIZE + n, mask=inside, other=0.0) * LOG2E,)
    if PDL:
        tl.extra.cuda.gdc_wait()
    offset, length = tl.load(offsets + row), tl.load(lengths + row)
    start, read = tl.load(starts + row), tl.load(reads + row)
    h = ()
    old = states + read * page_stride + channel * SIZE
    for n in tl.static_range(SIZE):
        h += (tl.load(old + n, mask=inside & (read >= 0), other=0.0).to(tl.float32),)
    tl.debug_barrier()  # what is written may be what another thread reads
    x, dt, z, bc = x + offset * x_stride, dt + offset * dt_stride, z + offset * z_stride, bc + offset * SIZE
    out += offset * INNER
    last = length - 1  # what is loaded past the end is this one again, and comes to nothing
    stop = tl.where(length > 0, (start + last) // RUN + 1, start // RUN)
    for run in range(start // RUN, stop):
        first = tl.maximum(run * RUN - start, 0)
        end = tl.minimum((run + 1) * RUN - start, length)
        one = _token(x, dt, z, bc, first, channel, inside, x_stride, dt_stride, z_stride, SIZE)
        t = tl.minimum(first + 1, last)
        two = _token(x, dt, z, bc, t, channel, inside, x_stride, dt_stride, z_stride, SIZE)
        for pair in range(first, end, 4):
            for half in tl.static_range(0, 4, 2):  # so that what is loaded stays in its registers
                t = pair + half
                at, beyond = tl.minimum(t + 2, last), tl.minimum(t + 3, last)
                third = _token(x, dt, z, bc, at, channel, inside, x_stride, dt_stride, z_stride, SIZE)
                fourth = _token(x, dt, z, bc, beyond, channel, inside, x_stride, dt_stride, z_stride, SIZE)
                h, y = _after(h, decays, one, t < end, skip, shift, SIZE)
                h, later = _after(h, decays, two, t + 1 < end, skip, shift, SIZE)
                place = out + t * INNER + channel
                tl.store(place, y.to(out.dtype.element_ty), mask=inside & (t < end))
                tl.store(place + INNER, later.to(out.dtype.element_ty), mask=inside & (t + 1 < end))
                one, two = third, fourth
        page = tl.load(writes + row * width + run - start // RUN)
        place = states + page * page_stride + channel * SIZE
        for n in tl.static_range(SIZE):
            tl.store(place + n, h[n].to(states.dtype.element_ty), mask=inside)


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
        block = min(max(power_of_2(inner), 32), 64 if size <= 16 else 32)
        blocks, bc = cdiv(inner, block), torch.cat((B, C), dim=1).float().view(torch.int64)
        _unrolled[(rows * blocks,)](
            x, dt, A, bc, D, z, bias, out, cache.ssm, *numbers, x.stride(0), dt.stride(0), z.stride(0), *ends,
            BLOCK=block, BLOCKS=blocks, num_warps=1, **options,
        )  # fmt: skip
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
