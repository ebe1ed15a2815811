"""Kernels that work on rows of numbers: norms, activations and lookups of embeddings, with the contracts of
quire.kernels.triton.norm and .activation; and the availability, names and chunk sizes of such kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.library_loader import library, required_library
from quire.kernels.cpu.linear import ACTIVATIONS

DTYPE_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}
"""Suffixes of kernel names by dtype."""

CHUNK_NUMBERS = 1 << 15
"""Numbers in a chunk: a few microseconds of work, at an overhead of a tenth of a microsecond a chunk."""


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if there are kernels for tensors of this device and dtype."""
    return device.type == "cpu" and dtype in DTYPE_SUFFIXES and library() is not None


def split_rows(rows: int, size: int) -> tuple[int, int]:
    """Return (rows of a chunk, number of chunks)."""
    per = max(1, CHUNK_NUMBERS // size)
    return per, -(-rows // per)


def split_columns(size: int) -> tuple[int, int]:
    """Return (columns of a chunk, chunks of a row)."""
    part = min(size, CHUNK_NUMBERS // 4)
    return part, -(-size // part)


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


def act_and_mul(gate_up: Tensor, activation: str, *, out: Tensor | None = None, pdl: bool = False) -> Tensor:
    """Return act(gate_up[:, :I]) * gate_up[:, I:] for gate_up [T, 2 I], in `out` [T, I] (None: a new tensor).

    `activation` is a key of ACTIVATIONS. Any row strides. `pdl` has no effect on a CPU.
    """
    size = gate_up.shape[1] // 2
    assert gate_up.shape[1] == 2 * size, "two halves"
    return act_times(gate_up[:, :size], gate_up[:, size:], activation, out)


def act_times(gate: Tensor, up: Tensor, activation: str, out: Tensor | None = None) -> Tensor:
    """Return act(gate) * up for gate and up [T, I], in `out` [T, I] (None: a new tensor). Any row strides."""
    (rows, size), dtype = gate.shape, gate.dtype
    out = torch.empty((rows, size), dtype=dtype) if out is None else out
    assert gate.shape == up.shape == out.shape, "one shape"
    assert gate.dtype == up.dtype == out.dtype, "one dtype"
    assert gate.stride(1) == up.stride(1) == out.stride(1) == 1, "rows are contiguous"
    kind, (part, parts) = ACTIVATIONS[activation], split_columns(size)
    required_library().call(
        f"gate_{DTYPE_SUFFIXES[dtype]}", rows * parts, gate, out, size, part, gate.stride(0), out.stride(0), kind,
        up, up.stride(0),
    )  # fmt: skip
    return out


def act(x: Tensor, activation: str, bias: Tensor | None = None, *, pdl: bool = False) -> Tensor:
    """Compute x [T, I] = act(x + bias) in place and return x."""
    rows, size = x.shape
    assert x.stride(1) == 1, "rows are contiguous"
    assert bias is None or (bias.is_contiguous() and (bias.shape, bias.dtype) == ((size,), x.dtype)), (
        "one bias a column"
    )
    kind, (part, parts) = ACTIVATIONS[activation], split_columns(size)
    required_library().call(f"act_{DTYPE_SUFFIXES[x.dtype]}", rows * parts, x, bias, size, part, x.stride(0), kind)
    return x


def softcap(x: Tensor, cap: float, *, pdl: bool = False) -> Tensor:
    """Compute x [R, V] = cap * tanh(x / cap) in place and return x. Any row strides."""
    rows, size = x.shape
    assert x.stride(1) == 1, "rows are contiguous"
    part, parts = split_columns(size)
    required_library().call(f"softcap_{DTYPE_SUFFIXES[x.dtype]}", rows * parts, x, size, part, x.stride(0), float(cap))
    return x


def embedding(
    ids: Tensor, table: Tensor, *, scale: float | None = None, add_to: Tensor | None = None, offset: int = 0,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return table[ids + offset], multiplied by `scale` if given, in `out` [T, size] (None: a new tensor); or add it to
    `add_to` [T, size] and return that. ids are int64 and in range."""
    rows, size = len(ids), table.shape[1]
    if out is None:
        out = torch.empty((rows, size), dtype=table.dtype) if add_to is None else add_to
    assert ids.dtype == torch.int64, "ids are int64"
    assert all(x.is_contiguous() for x in (ids, table, out)), "tensors must be contiguous"
    assert (out.shape, out.dtype) == ((rows, size), table.dtype), "a row for each id"
    per, chunks = split_rows(rows, size)
    by = 1.0 if scale is None else float(scale)
    name = f"embedding_{DTYPE_SUFFIXES[table.dtype]}"
    required_library().call(name, chunks, ids, table, out, rows, per, size, offset, int(add_to is not None), by)
    return out
