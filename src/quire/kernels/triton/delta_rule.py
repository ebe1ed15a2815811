"""The gated delta rule over the rows of a step, from a state and to states, and the gated norm of its outputs: equal to
`kernels.delta_rule`.

A program computes the tokens of a row in order, for some columns of a head's state, which stay in registers; rows,
heads and columns are parallel. Sums are over the rows of a state, so columns are independent of one another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.delta_rule import L2_EPS
from quire.kernels.mamba_states import StatePlan
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import cdiv, power_of_2
from quire.kernels.triton.mamba_scan import LOG2E, silu_gate, softplus

STATE_NUMBERS = 1024
"""Numbers of a state that one warp, a program, holds: 32 a thread."""
EPS = tl.constexpr(L2_EPS)


@triton.jit
def _load_token(token, ba, head, i, j, own_keys, own_values, qkv_stride, ba_stride, t, KEYS: tl.constexpr,
                SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """Return a token's (q, k, v, b, a), in their dtypes."""
    place = token + t * qkv_stride
    q = tl.load(place + head // SHARED * KEY + i, mask=own_keys, other=0.0)
    k = tl.load(place + KEYS + head // SHARED * KEY + i, mask=own_keys, other=0.0)
    v = tl.load(place + 2 * KEYS + head * VALUE + j, mask=own_values, other=0.0)
    b = tl.load(ba + t * ba_stride + head)
    a = tl.load(ba + t * ba_stride + HEADS + head)
    return q, k, v, b, a


@triton.jit
def _unit(x):
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + EPS)


@fast_launch
@triton.jit(
    do_not_specialize=["qkv_stride", "ba_stride", "width"],  # one kernel, and so the same bits, for all steps
    do_not_specialize_on_alignment=["offsets", "lengths", "starts", "reads", "writes"],
)
def _delta_rule(
    qkv, ba, A, dt_bias, out, states, offsets, lengths, starts, reads, writes, qkv_stride, ba_stride, page_stride,
    width, scale,
    RUN: tl.constexpr, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    PADDED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute all tokens of a row for a head and BLOCK columns of its state."""
    KEYS: tl.constexpr = HEADS // SHARED * KEY
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0) // BLOCKS % HEADS
    row = (tl.program_id(0) // (BLOCKS * HEADS)).to(tl.int64)
    i, j = tl.arange(0, PADDED), tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    own_keys, own_values = i < KEY, j < VALUE
    cells = (head * KEY + i[:, None]) * VALUE + j[None, :]
    mask = own_keys[:, None] & own_values[None, :]
    slope, shift = tl.load(A + head) * LOG2E, tl.load(dt_bias + head)
    if PDL:
        tl.extra.cuda.gdc_wait()
    start, read = tl.load(starts + row), tl.load(reads + row)
    offset, length = tl.load(offsets + row), tl.load(lengths + row)
    h = tl.load(states + read * page_stride + cells, mask=mask & (read >= 0), other=0.0).to(tl.float32)
    tl.debug_barrier()  # the page that is written may be the one that other threads read
    if length == 0:
        return
    qkv += offset * qkv_stride
    ba += offset * ba_stride
    numbers = _load_token(
        qkv, ba, head, i, j, own_keys, own_values, qkv_stride, ba_stride, 0, KEYS, SHARED, KEY, VALUE, HEADS
    )
    for t in range(length):
        q, k, v, b, a = numbers
        numbers = _load_token(  # the next token's, while this one is computed; after the last one, it again
            qkv, ba, head, i, j, own_keys, own_values, qkv_stride, ba_stride, tl.minimum(t + 1, length - 1), KEYS,
            SHARED, KEY, VALUE, HEADS,
        )  # fmt: skip
        q, k = _unit(q) * scale, _unit(k)
        rate = 1.0 / (1.0 + tl.exp2(-b.to(tl.float32) * LOG2E))
        h *= tl.exp2(slope * softplus(a.to(tl.float32) + shift))
        u = rate * (v.to(tl.float32) - tl.sum(h * k[:, None], axis=0))
        h = tl.fma(k[:, None], u[None, :], h)
        y = tl.sum(h * q[:, None], axis=0)
        target = out + (offset + t) * (HEADS * VALUE) + head * VALUE + j
        tl.store(target, y.to(out.dtype.element_ty), mask=own_values)
        after = start + t + 1
        if (after % RUN == 0) | (t + 1 == length):
            page = tl.load(writes + row * width + (after - 1) // RUN - start // RUN)
            tl.store(states + page * page_stride + cells, h.to(states.dtype.element_ty), mask=mask & (page >= 0))


def gated_delta_rule(
    qkv: Tensor, ba: Tensor, A: Tensor, dt_bias: Tensor, states: Tensor, plan: StatePlan, *, pdl: bool = False
) -> Tensor:  # fmt: skip
    """Return the outputs of the gated delta rule, as quire.kernels.delta_rule.gated_delta_rule. Rows of qkv and ba may
    have any stride. With states in fp32 a token's bits depend neither on other rows of the step, nor on how its row is
    cut into steps. pdl: programmatic dependent launch, on GPUs of capability 9 and more."""
    (tokens, numbers), (_, heads, key_dim, value_dim) = qkv.shape, states.shape
    key_heads, rest = divmod(numbers - heads * value_dim, 2 * key_dim)
    assert not rest, f"{numbers} queries, keys and values do not fit states of {tuple(states.shape[1:])}"
    assert heads % key_heads == 0, f"{heads} heads of values and {key_heads} of keys"
    assert ba.shape == (tokens, 2 * heads), "b and a for each head"
    assert qkv.stride(1) == ba.stride(1) == 1, "rows are contiguous"
    assert states.stride()[1:] == (key_dim * value_dim, value_dim, 1), "a page's numbers are contiguous"
    for vector in (A, dt_bias):
        assert (vector.shape, vector.dtype, vector.is_contiguous()) == ((heads,), torch.float32, True), "in fp32"
    out = torch.empty((tokens, heads * value_dim), dtype=qkv.dtype, device=qkv.device)
    padded = power_of_2(key_dim)
    block = min(power_of_2(value_dim), max(1, STATE_NUMBERS // padded))
    blocks = cdiv(value_dim, block)
    if len(plan.offsets):
        _delta_rule[(len(plan.offsets) * heads * blocks,)](
            qkv, ba, A, dt_bias, out, states, plan.offsets, plan.lengths, plan.starts, plan.read_pages,
            plan.write_pages, qkv.stride(0), ba.stride(0), states.stride(0), plan.write_pages.stride(0),
            key_dim**-0.5, RUN=plan.page_tokens, HEADS=heads, SHARED=heads // key_heads, KEY=key_dim, VALUE=value_dim,
            PADDED=padded, BLOCK=block, BLOCKS=blocks, PDL=pdl, num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
    return out


@fast_launch
@triton.jit
def _norm_gate(
    x, gate, weight, out, gate_stride, eps, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One head of a token a program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    inside = columns < DIM
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    head, token = tl.program_id(0) % HEADS, (tl.program_id(0) // HEADS).to(tl.int64)
    place = token * (HEADS * DIM) + head * DIM + columns
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + token * gate_stride + head * DIM + columns, mask=inside, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / DIM + eps) * scale
    tl.store(out + place, silu_gate(normed, g).to(out.dtype.element_ty), mask=inside)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """Return the gated norm, as quire.kernels.delta_rule.gated_norm. Rows of `gate` may have any stride."""
    (tokens, numbers), dim = x.shape, len(weight)
    assert x.shape == gate.shape, "a gate for each number"
    assert x.is_contiguous(), "x is contiguous"
    assert gate.stride(1) == 1, "rows of the gate are contiguous"
    out, heads = torch.empty_like(x), numbers // dim
    if tokens:
        _norm_gate[(tokens * heads,)](
            x, gate, weight, out, gate.stride(0), eps, HEADS=heads, DIM=dim, BLOCK=power_of_2(dim), PDL=pdl,
            num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
    return out
