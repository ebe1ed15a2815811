"""Products of matrices for kernels whose sums go into states: numbers of 16 bits are multiplied without error, and a
number in fp32 is the sum of two in 16 bits, with an error of 2^-16, or, beside another one, its products are sums of
three in TF32, with an error of 2^-21."""

from __future__ import annotations

import triton
import triton.language as tl

FP32 = tl.constexpr("tf32x3")
"""How numbers in fp32 are multiplied with one another. Products of other numbers are not affected."""


@triton.jit
def computed_once(x):
    """Return the vector x. The compiler would compute a short vector again in each layout in which it is used, in some
    of which a thread has half of it; what it does not repeat is a scan, here of one number each."""
    return tl.reshape(tl.cumsum(x[:, None], axis=1), x.shape)


@triton.jit
def split(x, KIND: tl.constexpr):
    """Return (x, fp32, cut off to a type of 16 bits, the rest rounded to it). Cut off in fp32, since two numbers are
    converted by one instruction if only their converted values are used."""
    MASK: tl.constexpr = -(1 << 16) if tl.bfloat16 == KIND else -(1 << 13)
    high = (x.to(tl.int32, bitcast=True) & MASK).to(tl.float32, bitcast=True)
    return high.to(KIND), (x - high).to(KIND)


@triton.jit
def dot(a, b):
    """Return a b. One of them may be in fp32 and the other one in 16 bits."""
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
    """Return a b of numbers in fp32, of which each is the sum of two of a type of 16 bits, or stays as it is if KIND is
    fp32."""
    if tl.float32 == KIND:
        product = tl.dot(a, b, input_precision=FP32)
    else:
        a_high, a_low = split(a, KIND)
        b_high, b_low = split(b, KIND)
        product = tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))
    return product
