"""Matrix products for kernels whose sums go into states.

Two factors in 16 bits are multiplied without error. An fp32 factor is split in two of 16 bits (a relative error of
2^-16) if the other factor has 16 bits. Two fp32 factors are multiplied by three products in TF32 (a relative error of
2^-21).
"""

from __future__ import annotations

import triton
import triton.language as tl

FP32 = tl.constexpr("tf32x3")
"""The precision of a product of two fp32 factors; it has no effect on other products."""
MIN_DOT = 16
"""The least size of a dimension of a product."""


@triton.jit
def computed_once(x):
    """Return the vector x, computed once. The compiler computes a short vector again for each layout in which it is
    used, and in some layouts a thread has half of the vector. It does not repeat a scan: here one over single
    numbers."""
    return tl.reshape(tl.cumsum(x[:, None], axis=1), x.shape)


@triton.jit
def split(x, KIND: tl.constexpr):
    """Return the fp32 x as two numbers of a 16-bit type: x truncated, and the rest rounded. x is truncated in fp32, so
    that only the converted values are used: then one instruction converts two numbers."""
    MASK: tl.constexpr = -(1 << 16) if tl.bfloat16 == KIND else -(1 << 13)
    high = (x.to(tl.int32, bitcast=True) & MASK).to(tl.float32, bitcast=True)
    return high.to(KIND), (x - high).to(KIND)


@triton.jit
def dot(a, b):
    """Return a b, in fp32. Each factor is in fp32 or in 16 bits."""
    if a.dtype == b.dtype:
        product = tl.dot(a, b, input_precision=FP32)
    elif a.dtype == tl.float32:
        high, low = split(a, b.dtype)
        product = tl.dot(high, b, tl.dot(low, b))
    else:
        high, low = split(b, a.dtype)
        product = tl.dot(a, high, tl.dot(a, low))
    return product


@triton.jit
def dot_split(a, b, KIND: tl.constexpr):
    """Return a b for fp32 factors: each is split in two of the 16-bit type KIND, or stays whole if KIND is fp32."""
    if tl.float32 == KIND:
        product = tl.dot(a, b, input_precision=FP32)
    else:
        a_high, a_low = split(a, KIND)
        b_high, b_low = split(b, KIND)
        product = tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))
    return product
