"""Activations of feed-forward blocks, gated (act(gate) * up) and plain (with a bias, in place), and the softcap of
logits. Computed in fp32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import cdiv, power_of_2

# Names in model configs -> names in the kernels.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "quick_gelu": "gelu_quick",
    "gelu_new": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "clamped_swiglu": "clamped_swiglu",  # of a gate and up alone: see `activate_gated`
}


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Return the activation KIND of x, fp32."""
    tl.static_assert(
        KIND == "silu"
        or KIND == "relu"
        or KIND == "relu2"
        or KIND == "gelu"
        or KIND == "gelu_tanh"
        or KIND == "gelu_quick"
    )
    if KIND == "silu":
        return x * tl.sigmoid(x)
    elif KIND == "relu":
        return tl.where(x < 0, 0.0, x)  # NaN stays NaN
    elif KIND == "relu2":
        return tl.where(x < 0, 0.0, x * x)
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_quick":  # CLIP's
        return x * tl.sigmoid(1.702 * x)
    else:  # 0.5 (1 + tanh u) = sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def activate_gated(gate, up, KIND: tl.constexpr):
    """Return act(gate) * up, fp32; of gpt-oss gate * sigmoid(1.702 gate) * (up + 1), both clamped."""
    if KIND == "clamped_swiglu":
        gate = tl.where(gate > 7.0, 7.0, gate)  # NaN stays NaN
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return activate(gate, "gelu_quick") * (up + 1.0)
    else:
        return activate(gate, KIND) * up


@fast_launch
@triton.jit
def _gate(
    gate_up, out, x_stride, out_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK numbers of one row a program, BLOCKS programs a row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    columns = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    place = gate_up + row * x_stride + columns
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + SIZE, mask=mask, other=0.0).to(tl.float32)
    result = activate_gated(gate, up, KIND)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=mask)


@fast_launch
@triton.jit
def _act(
    x, bias, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    columns = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    if BIAS:
        shift = tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    place = x + row * x_stride + columns
    values = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        values += shift
    tl.store(place, activate(values, KIND).to(x.dtype.element_ty), mask=mask)


@fast_launch
@triton.jit
def _softcap(x, x_stride, cap, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    columns = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    place = x + row * x_stride + columns
    values = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    values = cap * (2.0 * tl.sigmoid(values * (2.0 / cap)) - 1.0)
    tl.store(place, values.to(x.dtype.element_ty), mask=mask)


def launch_config(rows: int, size: int) -> tuple[int, int]:
    """Return (numbers a program, warps): many small programs for few rows, 16 bytes a thread for many. On an H200 all
    blocks from 512 to 4096 are within 2 % of each other at 8192 rows of 14336, and all from 128 to 2048 within 0.1 us
    at one row.
    """
    block = min(power_of_2(size), 512 if rows < 64 else 1024)
    return block, min(max(block // 256, 1), 4)


def act_and_mul(gate_up: Tensor, activation: str, *, out: Tensor | None = None, pdl: bool = False) -> Tensor:
    """Return act(gate_up[:, :I]) * gate_up[:, I:] for gate_up [T, 2 I], in `out` [T, I] (None: a new tensor).

    `activation` is a key of ACTIVATIONS. Any row strides. pdl: programmatic dependent launch, on GPUs of capability 9
    and more.
    """
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    assert (gate_up.shape[1], out.shape) == (2 * size, (rows, size)), "two halves in, one out"
    assert gate_up.stride(1) == out.stride(1) == 1, "rows are contiguous"
    block, warps = launch_config(rows, size)
    blocks = cdiv(size, block)
    _gate[(rows * blocks,)](
        gate_up, out, gate_up.stride(0), out.stride(0), size, block, blocks, ACTIVATIONS[activation], pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def act(x: Tensor, activation: str, bias: Tensor | None = None, *, pdl: bool = False) -> Tensor:
    """Compute x [T, I] = act(x + bias) in place and return x. `bias` [I] is read before the kernel waits (pdl)."""
    rows, size = x.shape
    assert x.stride(1) == 1, "rows are contiguous"
    assert bias is None or (bias.is_contiguous() and bias.shape == (size,)), "one bias a column"
    block, warps = launch_config(rows, size)
    blocks = cdiv(size, block)
    _act[(rows * blocks,)](
        x, bias, x.stride(0), size, block, blocks, ACTIVATIONS[activation], bias is not None, pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return x


def softcap(x: Tensor, cap: float, *, pdl: bool = False) -> Tensor:
    """Compute x [R, V] = cap * tanh(x / cap) in place and return x. Any row strides."""
    rows, size = x.shape
    assert x.stride(1) == 1, "rows are contiguous"
    block, warps = launch_config(rows, size)
    blocks = cdiv(size, block)
    _softcap[(rows * blocks,)](x, x.stride(0), cap, size, block, blocks, pdl, num_warps=warps, launch_pdl=pdl)
    return x
