"""RMS norm and layer norm of rows, with the residual addition before them (x += delta) and an optional norm of delta in
the same pass. Same contracts as quire.kernels.triton.norm."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.dispatch import DTYPE_SUFFIXES, split_rows
from quire.kernels.cpu.library_loader import required_library


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, delta: Tensor | None = None, post_norm_weight: Tensor | None = None,
    scale: float = 1.0, out: Tensor | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Return x / sqrt(mean(x^2) + eps) * weight for x [T, size], in `out` (None: a new tensor). Weights are in x's
    dtype or in fp32.

    With `delta` [T, size], x += delta in place first; with `post_norm_weight`, x += rms_norm(delta, post_norm_weight);
    then x *= scale. Any row strides. Without delta and out, x may be [..., size]. `pdl` has no effect on a CPU.
    """
    return _norm(x, weight, None, eps, delta, post_norm_weight, out, scale)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *,
    delta: Tensor | None = None, out: Tensor | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Return (x - mean) / sqrt(variance + eps) * weight + bias for x [T, size]; else as `rms_norm`."""
    return _norm(x, weight, bias, eps, delta, None, out)


def _norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, delta: Tensor | None, post_norm_weight: Tensor | None,
    out: Tensor | None, scale: float = 1.0,
) -> Tensor:  # fmt: skip
    if x.dim() != 2 and delta is None and out is None:
        return _norm(x.reshape(-1, x.shape[-1]), weight, bias, eps, None, None, None).view(x.shape)
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype) if out is None else out
    for tensor in (x, out) if delta is None else (x, out, delta):
        assert (tensor.shape, tensor.dtype, tensor.stride(1)) == (x.shape, x.dtype, 1), "rows of one shape and dtype"
    assert delta is not None or post_norm_weight is None, "post_norm_weight needs delta"
    for vector in (weight, bias, post_norm_weight):
        assert vector is None or (vector.shape, vector.stride(), vector.dtype) == ((size,), (1,), weight.dtype), (
            "one weight and one bias a column, of one dtype"
        )
    per, chunks = split_rows(rows, size)
    name = f"norm_{DTYPE_SUFFIXES[x.dtype]}" + ("" if weight.dtype == x.dtype else f"_{DTYPE_SUFFIXES[weight.dtype]}")
    strides = x.stride(0), 0 if delta is None else delta.stride(0), out.stride(0)
    args = x, delta, post_norm_weight, weight, bias, out, rows, per, size, *strides, float(eps), float(scale)
    required_library().call(name, chunks, *args)
    return out
