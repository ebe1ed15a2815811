"""The scan of Mamba-2 (arXiv:2405.21060) over the rows of a step, from a state and to states, and its gated norm: equal
to those of `quire.kernels.ssd`.

A program has some channels of a head, whose states it keeps; it computes the tokens of a row in order. `_recurrent`
takes one at a time, `_chunked` as many as meet in matrix products (see kernels.triton.products).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import ssd
from quire.kernels.mamba_states import StateCache, StatePlan
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import cdiv, power_of_2, shared_memory
from quire.kernels.triton.mamba_scan import LOG2E, softplus
from quire.kernels.triton.products import MIN_DOT, computed_once, dot

RECURRENT_STATES, RECURRENT_WARPS = 1024, 2
"""States of a program of `_recurrent`, and its warps."""
CHUNK, BLOCK, CHUNK_STATES = 64, 64, 8192
"""Of `_chunked`: the most tokens of a chunk and channels of a program; and the most numbers of a chunk's B, for which
there is room in shared memory."""
CHUNKED_WARPS, STAGES = 4, 2
"""Warps of `_chunked`, and the most chunks that are in shared memory at once."""
FEW = 4
"""The most tokens of a row that `_chunked` takes one at a time: products take as long for one as for a whole chunk."""


@triton.jit
def _step_size(dt, bias, least, most):
    """Return softplus(dt + bias) within the limits."""
    return tl.minimum(tl.maximum(softplus(dt.to(tl.float32) + bias), least), most)


@triton.jit
def _scan_tokens(
    h, x, dt, B, C, out, states, writes, offset, length, start, head, columns, group, inside, real, cells,
    decay, skip, shift, least, most, x_stride, dt_stride, b_stride, c_stride, page_stride,
    RUN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Scan the tokens of a row one by one from states h. WIDTH: the channels of all heads."""
    for i in range(length):
        t = offset + i
        v = tl.load(x + t * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        delta = _step_size(tl.load(dt + t * dt_stride + head), shift, least, most)
        b = tl.load(B + t * b_stride + group, mask=real, other=0.0).to(tl.float32)
        c = tl.load(C + t * c_stride + group, mask=real, other=0.0).to(tl.float32)
        h = tl.fma(tl.zeros_like(h) + tl.exp2(delta * decay), h, (delta * v)[:, None] * b[None, :])
        y = tl.fma(tl.zeros_like(v) + skip, v, tl.sum(h * c[None, :], axis=1))
        tl.store(out + t * WIDTH + columns, y.to(out.dtype.element_ty), mask=inside)
        after = start + i + 1
        if (after % RUN == 0) | (i + 1 == length):
            page = tl.load(writes + (after - 1) // RUN - start // RUN)
            mask = inside[:, None] & real[None, :] & (page >= 0)
            tl.store(states + page * page_stride + cells, h.to(states.dtype.element_ty), mask=mask)


@fast_launch
@triton.jit(
    do_not_specialize=["dt_stride", "width"],  # one kernel, and so the same bits, whatever the number of rows
    do_not_specialize_on_alignment=["offsets", "lengths", "starts", "reads", "writes"],
)
def _recurrent(
    x, dt, A, B, C, D, bias, out, states, offsets, lengths, starts, reads, writes, x_stride, dt_stride, b_stride,
    c_stride, page_stride, width, least, most,
    RUN: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    SHARED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Scan a row by BLOCK channels of a head a program. SHARED: the heads of a group."""
    row, rest = (tl.program_id(0) // (HEADS * BLOCKS)).to(tl.int64), tl.program_id(0) % (HEADS * BLOCKS)
    head, channel, n = rest // BLOCKS, rest % BLOCKS * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PADDED)
    inside, real = channel < DIM, n < SIZE
    columns, group = head * DIM + channel, head // SHARED * SIZE + n
    cells, mask = columns[:, None] * SIZE + n[None, :], inside[:, None] & real[None, :]
    decay, skip, shift = tl.load(A + head) * LOG2E, tl.load(D + head), tl.load(bias + head)
    start, read = tl.load(starts + row), tl.load(reads + row)
    offset, length = tl.load(offsets + row), tl.load(lengths + row)
    h = tl.load(states + read * page_stride + cells, mask=mask & (read >= 0), other=0.0).to(tl.float32)
    tl.debug_barrier()  # the page that is written may be the one that other threads read
    _scan_tokens(
        h, x, dt, B, C, out, states, writes + row * width, offset, length, start, head, columns, group, inside, real,
        cells, decay, skip, shift, least, most, x_stride, dt_stride, b_stride, c_stride, page_stride, RUN, HEADS * DIM,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["offsets", "lengths", "starts", "reads", "writes"])
def _chunked(
    x, dt, A, B, C, D, bias, out, states, offsets, lengths, starts, reads, writes, x_stride, dt_stride, b_stride,
    c_stride, page_stride, width, least, most,
    RUN: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    SHARED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Do the same as `_recurrent`, CHUNK tokens of a run at a time, but one by one in rows of at most FEW tokens."""
    row, rest = (tl.program_id(0) // (HEADS * BLOCKS)).to(tl.int64), tl.program_id(0) % (HEADS * BLOCKS)
    head, channel, n = rest // BLOCKS, rest % BLOCKS * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PADDED)
    inside, real, i = channel < DIM, n < SIZE, tl.arange(0, CHUNK)
    columns, group = head * DIM + channel, head // SHARED * SIZE + n
    cells, mask = columns[:, None] * SIZE + n[None, :], inside[:, None] & real[None, :]
    decay, skip, shift = tl.load(A + head) * LOG2E, tl.load(D + head), tl.load(bias + head)
    start, read = tl.load(starts + row), tl.load(reads + row)
    offset, length = tl.load(offsets + row), tl.load(lengths + row)
    h = tl.load(states + read * page_stride + cells, mask=mask & (read >= 0), other=0.0).to(tl.float32)
    tl.debug_barrier()  # the page that is written may be the one that other threads read
    if length <= FEW:
        _scan_tokens(
            h, x, dt, B, C, out, states, writes + row * width, offset, length, start, head, columns, group, inside,
            real, cells, decay, skip, shift, least, most, x_stride, dt_stride, b_stride, c_stride, page_stride, RUN,
            HEADS * DIM,
        )  # fmt: skip
        return
    # One loop over the chunks of all runs: loads of the next chunk do not wait for the end of a run.
    CHUNKS: tl.constexpr = (RUN + CHUNK - 1) // CHUNK  # of a run
    position = start + length - 1
    final = position // RUN * CHUNKS + position % RUN // CHUNK + 1
    for chunk in range(start // RUN * CHUNKS + start % RUN // CHUNK, final):
        run = chunk // CHUNKS
        begin = run * RUN + chunk % CHUNKS * CHUNK - start  # in the row; the first chunk's may be below 0
        run_end = tl.minimum((run + 1) * RUN - start, length)
        t, there = (offset + begin + i).to(tl.int64), (begin + i >= 0) & (begin + i < run_end)
        delta = _step_size(tl.load(dt + t * dt_stride + head, mask=there, other=0.0), shift, least, most)
        delta = computed_once(tl.where(there, delta, 0.0))
        some = delta * decay
        total, last = tl.cumsum(some, axis=0), tl.sum(some, axis=0)
        # Sums from each token (the columns) to each later one. Differences of sums from the chunk's start would lose
        # small ones beside large ones.
        between = tl.cumsum(tl.where(i[:, None] > i[None, :], some[:, None], 0.0), axis=0)
        until_end = tl.sum(tl.where(i[:, None] > i[None, :], some[:, None], 0.0), axis=0)
        v = tl.load(x + t[:, None] * x_stride + columns[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        b = tl.load(B + t[:, None] * b_stride + group[None, :], mask=there[:, None] & real[None, :], other=0.0)
        c = tl.load(C + t[:, None] * c_stride + group[None, :], mask=there[:, None] & real[None, :], other=0.0)
        apart = tl.where(i[:, None] >= i[None, :], between, float("-inf"))
        pairs = dot(c, tl.trans(b)) * tl.exp2(apart) * delta[None, :]
        y = dot(c, tl.trans(h)) * tl.exp2(total)[:, None]
        y += dot(pairs, v) + skip * v.to(tl.float32)
        place = out + t[:, None] * (HEADS * DIM) + columns[None, :]
        tl.store(place, y.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])
        left = v.to(tl.float32) * (tl.exp2(until_end) * delta)[:, None]
        h = h * tl.exp2(last) + dot(tl.trans(left), b)
        if begin + CHUNK >= run_end:
            page = tl.load(writes + row * width + run - start // RUN)
            tl.store(states + page * page_stride + cells, h.to(states.dtype.element_ty), mask=mask & (page >= 0))


def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor, limits: tuple[float, float],
    cache: StateCache, plan: StatePlan, *, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """Return the scan of x, as quire.kernels.ssd.ssd_scan. Tokens of x, dt, B and C may have any stride.
    `deterministic`: a token's bits depend neither on other rows of the step nor, with states in fp32, on how its row is
    cut into steps."""
    (tokens, heads, dim), (groups, size), states = x.shape, B.shape[1:], cache.ssm
    assert states is not None, "a scan has states"
    assert states.shape[1:] == (heads, dim, size), f"states of {tuple(states.shape[1:])}, not {(heads, dim, size)}"
    assert C.shape == B.shape, "B and C of each group"
    assert x.stride()[1:] == (dim, 1), "a token's channels are contiguous"
    assert B.stride()[1:] == C.stride()[1:] == (size, 1), "B and C of a token are contiguous"
    assert dt.stride(1) == 1, "steps of a token are contiguous"
    for vector in (A, D, bias):
        assert (vector.shape, vector.dtype, vector.stride()) == ((heads,), torch.float32, (1,)), "A, D, bias in fp32"
    out, rows = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device), len(plan.offsets)
    if not rows:
        return out
    tensors = (x, dt, A, B, C, D, bias, out, states)
    numbers = (plan.offsets, plan.lengths, plan.starts, plan.read_pages, plan.write_pages)
    strides = (x.stride(0), dt.stride(0), B.stride(0), C.stride(0), states.stride(0), plan.write_pages.stride(0))
    options = {"RUN": plan.page_tokens, "HEADS": heads, "DIM": dim, "SIZE": size, "SHARED": heads // groups}
    if deterministic or plan.tiles is None:
        padded = power_of_2(size)
        block = min(power_of_2(dim), max(1, RECURRENT_STATES // padded))
        blocks = cdiv(dim, block)
        _recurrent[(rows * heads * blocks,)](
            *tensors, *numbers, *strides, *limits, PADDED=padded, BLOCK=block, BLOCKS=blocks, **options,
            num_warps=RECURRENT_WARPS,
        )  # fmt: skip
        return out
    padded, block = max(power_of_2(size), MIN_DOT), min(max(power_of_2(dim), MIN_DOT), BLOCK)
    chunk = max(min(CHUNK, CHUNK_STATES // padded, power_of_2(plan.page_tokens)), MIN_DOT)
    blocks = cdiv(dim, block)
    of_chunk = chunk * (2 * padded + block) * x.element_size()
    stages = min(STAGES, (shared_memory(x.device) - 4 * (2 * padded * block + chunk * (block + chunk))) // of_chunk)
    _chunked[(rows * heads * blocks,)](
        *tensors, *numbers, *strides, *limits, PADDED=padded, BLOCK=block, BLOCKS=blocks, CHUNK=chunk, FEW=FEW,
        **options, num_warps=CHUNKED_WARPS, num_stages=max(stages, 1),
    )  # fmt: skip
    return out


@fast_launch
@triton.jit
def _gated_norm(
    x, gate, weight, out, x_stride, gate_stride, out_stride, eps, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one group of a row a program."""
    row, group, i = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS, tl.arange(0, BLOCK)
    columns, inside = group * SIZE + i, i < SIZE
    z = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32) * z * tl.sigmoid(z)
    v *= tl.rsqrt(tl.sum(v * v, axis=0) / SIZE + eps)
    v *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, v.to(out.dtype.element_ty), mask=inside)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return the gated norm, as quire.kernels.ssd.gated_norm. Rows of x and gate may have any stride."""
    if reduce is not None:
        return ssd.gated_norm(x, gate, weight, groups, eps, reduce)
    assert x.stride(1) == gate.stride(1) == 1, "rows are contiguous"
    out, size = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[1] // groups
    if len(x):
        block = power_of_2(size)
        _gated_norm[(len(x) * groups,)](
            x, gate, weight, out, x.stride(0), gate.stride(0), out.stride(0), eps, GROUPS=groups, SIZE=size,
            BLOCK=block, num_warps=min(max(block // 256, 1), 16),
        )  # fmt: skip
    return out
