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

from quire.kernels.mamba_states import StateCache, StatePlan
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import cdiv, power_of_2
from quire.kernels.triton.mamba_scan_prefill import (
    LOG2E,
    MAX_UNROLLED_STATES,
    advance_state,
    scan_part_tokens,
    scan_prefill,
    silu_gate,
    softplus,
)

SINGLE_STATES, SINGLE_WARPS = 1024, 2
"""States of a program that has one row's single token, and its warps."""


@triton.jit
def _load_token(x, dt, B, C, z, t, channel, n, inside, real, x_stride, dt_stride, b_stride, c_stride, z_stride):
    """A token's, as they are."""
    v = tl.load(x + t * x_stride + channel, mask=inside, other=0.0)
    d = tl.load(dt + t * dt_stride + channel, mask=inside, other=0.0)
    gate = tl.load(z + t * z_stride + channel, mask=inside, other=0.0)
    b = tl.load(B + t * b_stride + n, mask=real, other=0.0)
    c = tl.load(C + t * c_stride + n, mask=real, other=0.0)
    return v, d, gate, b, c


@triton.jit
def _scan_step(h, decay, numbers, skip, shift):
    """(States [BLOCK, SIZE] after a token, its output)."""
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
    start, read = tl.load(starts + row), tl.load(reads + row)
    old = tl.load(states + read * page_stride + cells, mask=mask & (read >= 0), other=0.0)
    if SINGLE:  # all that there is to load is on its way at once
        numbers = _load_token(
            x, dt, B, C, z, row, channel, n, inside, real, x_stride, dt_stride, b_stride, c_stride, z_stride
        )
        page = tl.load(writes + row * width)
        h, y = _scan_step(old.to(tl.float32), decay, numbers, skip, shift)
        tl.store(out + row * INNER + channel, y.to(out.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # what is written may be what another thread reads
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
            tl.store(states + page * page_stride + cells, h.to(states.dtype.element_ty), mask=mask)


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, bias: Tensor | None,
    cache: StateCache, plan: StatePlan, *, deterministic: bool = False, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """See quire.kernels.mamba_states. The strides of rows of x, dt, B, C and z are free. `deterministic`: a token's
    bits
    don't depend on the rows beside it, nor, with states in fp32, on how its row is cut into steps; then d_state may be
    `MOST_UNROLLED` at most. Else neither do they, but for rows that are computed in
    parts (`part_tokens`). pdl: programmatic dependent launch, on GPUs of capability 9 and more."""
    (tokens, inner), size = x.shape, A.shape[1]
    _check(x, dt, A, B, C, D, z, bias, cache)
    assert not deterministic or size <= MAX_UNROLLED_STATES, f"{size} states of a channel are more than a thread holds"
    out, rows = torch.empty((tokens, inner), dtype=x.dtype, device=x.device), len(plan.offsets)
    if not rows:
        return out
    numbers = (plan.offsets, plan.lengths, plan.starts, plan.read_pages, plan.write_pages)
    options = {"RUN": plan.page_tokens, "INNER": inner, "SIZE": size, "BIAS": bias is not None, "PDL": pdl}
    options |= {"launch_pdl": True} if pdl else {}
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
        PADDED=padded, BLOCK=block, BLOCKS=blocks, SINGLE=plan.tiles is None,
        num_warps=SINGLE_WARPS, **options,
    )  # fmt: skip
    return out


def _interleave_bc(B: Tensor, C: Tensor) -> Tensor:
    """B and C [T, d_state] side by side in fp32: as they are, if they lie so in memory."""
    (tokens, size), wide = B.shape, (B.dtype, C.dtype) == (torch.float32, torch.float32)
    if wide and B.stride() == C.stride() == (2 * size, 1) and C.data_ptr() == B.data_ptr() + 4 * size:
        return B.as_strided((tokens, 2 * size), (2 * size, 1))
    return torch.cat((B, C), dim=1).float()


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
