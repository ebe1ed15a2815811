"""Linear layers of several rows with a weight in FP8: rows are rounded to FP8 too, each with its own scale, and tensor
cores multiply both in FP8. Few rows by a kernel that takes the time of reading the weight, many by cuBLAS. What cuBLAS
does not support (scales by groups, results not in bf16, sizes that are no multiples of 16) is computed by
`batch_invariant_linear`, which converts the weight in registers. One row is not rounded: see `fp8_linear`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton import linear as linear_kernels
from quire.kernels.triton.activation import ACTIVATIONS, activate
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import cdiv, power_of_2
from quire.kernels.triton.linear import E4M3, _scales, _weight_rows, batch_invariant_linear
from quire.kernels.triton.linear_tiles import fp8_rows_tile
from quire.kernels.triton.tiles import Tile

MAX_ROWS = 64
E4M3_MAX = tl.constexpr(448.0)  # the largest number in e4m3
MIN_ROW_MAX = tl.constexpr(1e-12)  # lower limit of a row's largest value, so that the scale of zeros is not 0
ROW_BLOCK, MAX_SINGLE_PASS = 8192, 16384
"""Numbers of a row that are rounded at a time, and the longest row that is read only once."""


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, *, pdl: bool = False) -> Tensor:
    """Return x weight^T + bias [M, N] in x's dtype, for x [M, K], weight [N, K] in e4m3, bias [N], scale [G, N] (see
    kernels.triton.linear).

    Any M >= 1; K % 16 == 0; the last dimensions contiguous, any stride of x's rows. One row is not rounded, because
    cuBLAS does not support it for some shapes.
    """
    size, depth = weight.shape
    if len(x) == 1 or len(scale) > 1 or x.dtype != torch.bfloat16 or size % 16 or depth % 16 or not x.is_cuda:
        return batch_invariant_linear(x, weight, bias, scale, pdl=pdl)
    rounded, by = quantize_rows(x, pdl=pdl)
    out: Tensor = torch._scaled_mm(
        rounded, weight.t(), by[:, None], scale, bias=bias, out_dtype=x.dtype, use_fast_accum=True
    )
    return out


def fp8_linear_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, *, pdl: bool = False) -> Tensor:
    """Return the same as `fp8_linear`, for 1 <= M <= MAX_ROWS and a weight that kernels.triton.linear supports. One row
    is computed by that module."""
    if len(x) == 1:
        return linear_kernels.linear(x, weight, bias, scale, pdl=pdl)
    return scaled_matmul(*quantize_rows(x, pdl=pdl), weight, bias, scale, x.dtype, pdl=pdl)


def gated_fp8_linear(x: Tensor, weight: Tensor, activation: str, scale: Tensor, *, pdl: bool = False) -> Tensor:
    """Return act(gate) * up [M, I] for x [M, K], weight [2 I, K] (the gate's rows, then up's); else as
    `fp8_linear_few_rows`."""
    if len(x) == 1:
        return linear_kernels.gated_linear(x, weight, activation, scale, pdl=pdl)
    return scaled_matmul(*quantize_rows(x, pdl=pdl), weight, None, scale, x.dtype, activation, pdl=pdl)


def scaled_matmul(
    x: Tensor, by: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, dtype: torch.dtype,
    activation: str | None = None, *, pdl: bool = False, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Return the product [M, N] in `dtype`, rounded once, of rows x [M, K] in e4m3 with scales `by` [M], and weight,
    bias and scale as above; with an activation [M, N / 2]. 1 <= M <= MAX_ROWS. `tile`: another one than the card's.

    Tensor cores add the products of a group of numbers, or of a whole row, with less precision than fp32, as in cuBLAS.
    """
    (rows, depth), (size, _) = x.shape, weight.shape
    assert 1 <= rows <= MAX_ROWS, f"{rows} rows are not 1 to {MAX_ROWS}"
    assert depth % 16 == 0, f"{depth} is not a multiple of 16"
    assert x.dtype == weight.dtype == E4M3, "both in FP8"
    assert x.is_contiguous(), "rows must be dense"
    assert by.shape == (rows,), "a scale a row"
    group = linear_kernels._check_operands(x, weight, scale)
    tile = tile or fp8_rows_tile(x.device, rows, size, depth, group > 0)
    kind = None if activation is None else ACTIVATIONS[activation]
    size = size if kind is None else size // 2
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    early = min(tile.prefetch, depth // tile.depth)
    even = (depth - early * tile.depth) % tile.depth == 0
    _rounded[(cdiv(size, tile.columns if kind is None else tile.columns // 2),)](
        x, by, weight, scale, out if bias is None else bias, out, rows, size, depth,
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, EARLY=early, EVEN=even, GROUP=group,
        BIAS=bias is not None, KIND=kind, PDL=pdl, num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def _add(acc, w, v, scale, start, size, GROUP: tl.constexpr, KIND: tl.constexpr, NARROW: tl.constexpr):
    """Return acc + w [N, K] v^T, v [M, K], for the numbers from `start` on: [N, M], or if NARROW [M, N]."""
    if GROUP > 0:
        by = tl.load(_scales(scale, start, size, GROUP, KIND))
        if NARROW:
            part = tl.dot(v, tl.trans(w))
            acc = tl.fma(part, tl.broadcast_to(by[None, :], part.shape), acc)
        else:
            part = tl.dot(w, tl.trans(v))
            acc = tl.fma(part, tl.broadcast_to(by[:, None], part.shape), acc)
    elif NARROW:
        acc = tl.dot(v, tl.trans(w), acc)
    else:
        acc = tl.dot(w, tl.trans(v), acc)
    return acc


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _rounded(
    x, by, weight, scale, bias, out, rows, size, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr, EVEN: tl.constexpr,
    GROUP: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute as `_few` of kernels.triton.linear. A warp group multiplies 64 lines of one side: the weight's, or, if a
    program has fewer of these, x's, most of which are padding."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    NARROW: tl.constexpr = BLOCK_N < 64
    k = tl.arange(0, BLOCK_K)
    lines = _weight_rows(tl.program_id(0), size, BLOCK_N, KIND)
    tiles = weight + lines[:, None] * depth + k[None, :]
    scale += lines
    body = depth - EARLY * BLOCK_K
    early = ()
    for i in tl.static_range(EARLY):
        early += (tl.load(tiles + body + i * BLOCK_K),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    m = tl.arange(0, BLOCK_M)
    real = m < rows
    inputs = x + m[:, None] * depth + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N) if NARROW else (BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, body, BLOCK_K):
        inside = (start + k < body)[None, :]
        w = tl.load(tiles + start) if EVEN else tl.load(tiles + start, mask=inside, other=0.0)
        v = tl.load(inputs + start, mask=real[:, None] if EVEN else real[:, None] & inside, other=0.0)
        acc = _add(acc, w, v, scale, start, size, GROUP, KIND, NARROW)
    for i in tl.static_range(EARLY):
        v = tl.load(inputs + body + i * BLOCK_K, mask=real[:, None], other=0.0)
        acc = _add(acc, early[i], v, scale, body + i * BLOCK_K, size, GROUP, KIND, NARROW)
    if NARROW:
        acc = tl.trans(acc)
    if GROUP == 0:
        acc *= tl.load(scale)[:, None]
    acc *= tl.load(by + m, mask=real, other=0.0)[None, :]
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if KIND is not None:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N // 2, 2, BLOCK_M)), (0, 2, 1)))
        acc = activate(gate, KIND) * up
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    if BIAS:
        acc += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[:, None]
    mask = (n < size)[:, None] & real[None, :]
    tl.store(out + m[None, :] * size + n[:, None], acc.to(out.dtype.element_ty), mask=mask)


def quantize_rows(x: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """Round x [M, K] to (numbers [M, K] in e4m3, scales [M]), such that a row is approximately number * scale, and its
    largest value 448 times its scale. The scale of a row with a value that is not finite is NaN; other rows are not
    affected."""
    rows, depth = x.shape
    assert x.stride(1) == 1, "rows must be dense"
    numbers = torch.empty(rows, depth, dtype=E4M3, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = power_of_2(depth) if depth <= MAX_SINGLE_PASS else ROW_BLOCK
    warps = 16 if block > ROW_BLOCK else 8 if block > 2048 else 4
    options = {"BLOCK": block, "ONCE": depth <= MAX_SINGLE_PASS, "num_warps": warps, "PDL": pdl}
    _rows_in_fp8[(rows,)](x, numbers, scales, depth, x.stride(0), **options, launch_pdl=pdl)
    return numbers, scales


@triton.jit
def _update_max(v, largest, wrong):
    """Return (largest magnitudes so far, number of values that are not finite), with `v` included."""
    v = tl.abs(v.to(tl.float32))
    return tl.maximum(largest, v), wrong + tl.where(v < float("inf"), 0, 1)


@triton.jit
def _store_scaled(v, by, numbers, mask):
    v = tl.minimum(tl.maximum(v.to(tl.float32) * by, -E4M3_MAX), E4M3_MAX)
    tl.store(numbers, v.to(numbers.dtype.element_ty), mask=mask)


@fast_launch
@triton.jit
def _rows_in_fp8(x, numbers, scales, depth, x_stride, BLOCK: tl.constexpr, ONCE: tl.constexpr, PDL: tl.constexpr):
    """Round one row a program. If it does not fit in BLOCK it is read twice, the second time from a cache."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x += row * x_stride + k
    numbers += row * depth + k
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    largest, wrong = tl.full((BLOCK,), MIN_ROW_MAX, tl.float32), tl.zeros((BLOCK,), tl.int32)
    if ONCE:
        v = tl.load(x, mask=k < depth, other=0.0)
        largest, wrong = _update_max(v, largest, wrong)
    else:
        for start in range(0, depth, BLOCK):
            largest, wrong = _update_max(tl.load(x + start, mask=start + k < depth, other=0.0), largest, wrong)
    most = tl.max(largest, axis=0)
    scale = tl.where(tl.sum(wrong, axis=0) > 0, float("nan"), tl.div_rn(most, 1.0 * E4M3_MAX))
    tl.store(scales + row, scale)
    by = tl.div_rn(1.0 * E4M3_MAX, most)
    if ONCE:
        _store_scaled(v, by, numbers, k < depth)
    else:
        for start in range(0, depth, BLOCK):
            mask = start + k < depth
            _store_scaled(tl.load(x + start, mask=mask, other=0.0), by, numbers + start, mask)
