"""Activations of feed-forward blocks, gated (act(gate) * up) and plain (with a bias, in place), and the softcap of
logits. Same contracts as quire.kernels.triton.activation."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.dispatch import DTYPE_SUFFIXES, split_columns
from quire.kernels.cpu.library_loader import required_library
from quire.kernels.cpu.linear import ACTIVATIONS


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
