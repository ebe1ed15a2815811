"""A linear layer of many rows whose weight is in FP8: rows are rounded to FP8 too, each by a scale of its own, and the
library multiplies both on the tensor cores. What it doesn't take is multiplied as `invariant` does it, by weights
converted in registers: scales by groups, results that aren't bf16, sizes that are no multiples of 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.data.kernels.triton.launch import power_of_2
from quire.data.kernels.triton.linear import E4M3, invariant
from quire.data.kernels.triton.quick import quick

LARGEST = tl.constexpr(448.0)  # of e4m3
LEAST = tl.constexpr(1e-12)  # of a row's largest value: a row of zeros has a scale too
BLOCK = 8192


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, *, pdl: bool = False) -> Tensor:
    """x [M, K], weight [N, K] in e4m3, bias [N], scale [G, N] (see kernels.triton.linear) -> [M, N] in x's dtype.

    Any M >= 1; K % 16 == 0; the last dimensions dense, the stride of x's rows free.
    """
    size, depth = weight.shape
    if len(scale) > 1 or x.dtype != torch.bfloat16 or size % 16 or depth % 16 or not x.is_cuda:
        return invariant(x, weight, bias, scale, pdl=pdl)
    rounded, by = rows_in_fp8(x, pdl=pdl)
    out: Tensor = torch._scaled_mm(
        rounded, weight.t(), by[:, None], scale, bias=bias, out_dtype=x.dtype, use_fast_accum=True
    )
    return out


def rows_in_fp8(x: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """x [M, K] -> numbers [M, K] in e4m3 and scales [M]: a row is nearly number * scale, its largest value exactly 448
    times its scale. The scale of a row with a value that isn't finite is NaN, and its neighbours' aren't."""
    rows, depth = x.shape
    assert x.stride(1) == 1, "rows must be dense"
    numbers = torch.empty(rows, depth, dtype=E4M3, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = min(power_of_2(depth), BLOCK)
    options = {"BLOCK": block, "num_warps": 8 if block > 2048 else 4, "PDL": pdl}
    _rows_in_fp8[(rows,)](x, numbers, scales, depth, x.stride(0), **options, **({"launch_pdl": True} if pdl else {}))
    return numbers, scales


@quick
@triton.jit
def _rows_in_fp8(x, numbers, scales, depth, x_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A row a program, read twice: the second time it is near."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    largest, wrong = tl.full((BLOCK,), LEAST, tl.float32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, depth, BLOCK):
        v = tl.load(x + row * x_stride + start + k, mask=start + k < depth, other=0.0)
        v = tl.abs(v.to(tl.float32))
        largest = tl.maximum(largest, v)
        wrong += tl.where(v < float("inf"), 0, 1)
    most = tl.max(largest, axis=0)
    scale = tl.where(tl.sum(wrong, axis=0) > 0, float("nan"), tl.div_rn(most, 1.0 * LARGEST))
    tl.store(scales + row, scale)
    by = tl.div_rn(1.0 * LARGEST, most)
    for start in range(0, depth, BLOCK):
        v = tl.load(x + row * x_stride + start + k, mask=start + k < depth, other=0.0).to(tl.float32)
        v = tl.minimum(tl.maximum(v * by, -LARGEST), LARGEST)
        tl.store(numbers + row * depth + start + k, v.to(numbers.dtype.element_ty), mask=start + k < depth)
