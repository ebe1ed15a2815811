"""RMS norm and layer norm of rows, with the residual addition before them (x += delta) and an optional norm of delta
(Gemma's norms after attention and MLP) in the same pass.

Computed in fp32 and rounded once, as torch's fused norms are; the norm of delta and the sum with it are each rounded to
x's dtype first, as `x.add_(delta)` rounds it, so that the residual stream is the same as unfused.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import power_of_2


@triton.jit
def add_residual(place, added, added_scale, eps, inside, SIZE: tl.constexpr, POST_NORM: tl.constexpr, sum_scale=None):
    """Compute x[place] += added in place and return the sum. POST_NORM: `added` is normalised first. The sum is
    multiplied by `sum_scale`, if given."""
    values = tl.load(place, mask=inside, other=0.0)
    if POST_NORM:
        wide = added.to(tl.float32)
        added_variance = tl.sum(wide * wide, axis=0) / SIZE
        added = (wide * tl.rsqrt(added_variance + eps) * added_scale).to(values.dtype)
    values = (values.to(tl.float32) + added.to(tl.float32)).to(values.dtype)
    if sum_scale is not None:
        values = (values.to(tl.float32) * sum_scale).to(values.dtype)
    tl.store(place, values, mask=inside)
    return values


@triton.jit
def normalize(values, scale, shift, eps, inside, SIZE: tl.constexpr, LAYER: tl.constexpr):
    """Return a row's norm in fp32. LAYER: subtract the mean and add the bias."""
    values = values.to(tl.float32)
    if LAYER:
        mean = tl.sum(values, axis=0) / SIZE
        values = tl.where(inside, values - mean, 0.0)
    variance = tl.sum(values * values, axis=0) / SIZE
    result = values * tl.rsqrt(variance + eps) * scale
    if LAYER:
        result += shift
    return result


@fast_launch
@triton.jit
def _norm(
    x, delta, post_norm_weight, weight, bias, out, x_stride, delta_stride, out_stride, eps, sum_scale,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, DELTA: tl.constexpr, POST_NORM: tl.constexpr, LAYER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row a program. POST_NORM: delta is normalised before it is added. LAYER: subtract the mean, add the bias."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift, added_scale = scale, scale  # placeholders, replaced below if used
    if LAYER:
        shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if POST_NORM:
        added_scale = tl.load(post_norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place = x + row * x_stride + columns
    if DELTA:
        added = tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0)
        values = add_residual(place, added, added_scale, eps, inside, SIZE, POST_NORM, sum_scale)
    else:
        values = tl.load(place, mask=inside, other=0.0)
    result = normalize(values, scale, shift, eps, inside, SIZE, LAYER)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


def num_warps_for(block: int) -> int:
    """Return the warps for a row padded to `block` numbers: 32 numbers a thread. Of 2 to 32 warps, 4 were the fastest
    on an H200 for one row of 4096 (bf16, 1.4 us) and within 1 % of it for 8192 rows, where several rows a program
    gained nothing. The number of rows does not matter, so that a row's sum is the same in every batch. Warps are at
    most as many as the numbers fill: threads of further warps would hold copies, and could read x after it was changed
    in place.
    """
    return min(max(block // 1024, 1), 16)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, delta: Tensor | None = None, post_norm_weight: Tensor | None = None,
    scale: float = 1.0, out: Tensor | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Return x / sqrt(mean(x^2) + eps) * weight for x [T, size], in `out` (None: a new tensor). Weights of any dtype.

    With `delta` [T, size], x += delta in place first; with `post_norm_weight`, x += rms_norm(delta, post_norm_weight);
    then x *= scale. Any row strides. Without delta and out, x may be [..., size]. pdl: programmatic dependent launch,
    on GPUs of capability 9 and more; weights are read before the kernel waits for its predecessor.
    """
    return _launch(x, weight, None, eps, delta, post_norm_weight, out, pdl, scale)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *,
    delta: Tensor | None = None, out: Tensor | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Return (x - mean) / sqrt(variance + eps) * weight + bias for x [T, size]; else as `rms_norm`."""
    return _launch(x, weight, bias, eps, delta, None, out, pdl)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, delta: Tensor | None, post_norm_weight: Tensor | None,
    out: Tensor | None, pdl: bool, scale: float = 1.0,
) -> Tensor:  # fmt: skip
    if x.dim() != 2 and delta is None and out is None:
        return _launch(x.reshape(-1, x.shape[-1]), weight, bias, eps, None, None, None, pdl).view(x.shape)
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device) if out is None else out
    for tensor in (x, out) if delta is None else (x, out, delta):
        assert (tensor.shape, tensor.stride(1)) == (x.shape, 1), "rows of one shape, each contiguous"
    assert delta is not None or post_norm_weight is None, "post_norm_weight needs delta"
    for vector in (weight, bias, post_norm_weight):
        assert vector is None or (vector.shape, vector.stride()) == ((size,), (1,)), "one weight and one bias a column"
    block = power_of_2(size)
    _norm[(rows,)](
        x, delta, post_norm_weight, weight, bias, out, x.stride(0), 0 if delta is None else delta.stride(0),
        out.stride(0), eps, None if scale == 1 else scale,
        size, block, delta is not None, post_norm_weight is not None, bias is not None, pdl,
        num_warps=num_warps_for(block), launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def _normalize_part(place, scale, eps, inside, SIZE: tl.constexpr):
    """Return the RMS norm, as in `_norm`, of a row's SIZE numbers from `place` on."""
    values = tl.load(place, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    variance = tl.sum(wide * wide, axis=0) / SIZE
    return (wide * tl.rsqrt(variance + eps) * scale).to(values.dtype)


@fast_launch
@triton.jit
def _parts(
    x, first, second, third, out, pair, x_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PAIR: tl.constexpr, PAIR_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program: a part of SIZE numbers, and two parts of PAIR."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    columns, few = tl.arange(0, BLOCK), tl.arange(0, PAIR_BLOCK)
    inside, real = columns < SIZE, few < PAIR
    scale = tl.load(first + columns, mask=inside, other=0.0).to(tl.float32)
    left = tl.load(second + few, mask=real, other=0.0).to(tl.float32)
    right = tl.load(third + few, mask=real, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place = x + row * x_stride
    tl.store(out + row * SIZE + columns, _normalize_part(place + columns, scale, eps, inside, SIZE), mask=inside)
    target = pair + row * (2 * PAIR) + few
    tl.store(target, _normalize_part(place + SIZE + few, left, eps, real, PAIR).to(tl.float32), mask=real)
    tl.store(
        target + PAIR, _normalize_part(place + SIZE + PAIR + few, right, eps, real, PAIR).to(tl.float32), mask=real
    )


def rms_norm_parts(
    x: Tensor, weights: tuple[Tensor, Tensor, Tensor], eps: float, *, pdl: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the RMS norms of the three parts of rows x [T, size + 2 pair], with weights [size], [pair], [pair], in one
    launch. Each is rounded to x's dtype, as by `rms_norm`; the latter two are returned in fp32, adjacent in memory."""
    (rows, width), (size, pair, other) = x.shape, map(len, weights)
    assert (width, pair) == (size + pair + other, other), "a weight a column, and two parts of one size"
    assert x.stride(1) == 1, "rows are contiguous"
    assert all(weight.is_contiguous() for weight in weights), "weights are dense"
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    both = torch.empty((rows, 2 * pair), dtype=torch.float32, device=x.device)
    if rows:
        block = power_of_2(size)
        _parts[(rows,)](
            x, *weights, out, both, x.stride(0), eps, size, block, pair, power_of_2(pair), pdl,
            num_warps=num_warps_for(block), launch_pdl=pdl,
        )  # fmt: skip
    return out, both[:, :pair], both[:, pair:]
