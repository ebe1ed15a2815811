"""The causal convolution of layers with states (see quire.kernels.mamba_states)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.library_loader import required_library
from quire.kernels.cpu.rows import DTYPE_SUFFIXES
from quire.kernels.mamba_states import StateCache, StatePlan

CHUNK_CHANNELS = 256
MAX_TAPS = 16


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, plan: StatePlan, *, silu: bool = True,
    gates: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """As `mamba_states.causal_conv`, by one operation for all rows. With `gates`, of x's shape and strides, x is
    multiplied by the first and the result by the second. All are in one dtype."""
    (_, channels), taps = x.shape, weight.shape[1]
    before, after = gates or (None, None)
    assert x.stride(1) == 1, "rows are contiguous"
    assert all(gate is None or gate.stride() == x.stride() for gate in (before, after)), "gates lie as x does"
    assert weight.is_contiguous(), "the weight must be dense"
    kinds = {part.dtype for part in (x, weight, bias, cache.conv, before, after) if part is not None}
    assert kinds == {x.dtype}, f"all are in one dtype, not in {kinds}"
    assert 2 <= taps <= MAX_TAPS, f"{taps} taps"
    columns = plan.offsets, plan.lengths, plan.starts, plan.read_pages, plan.write_pages
    assert all(column.is_contiguous() and column.dtype == torch.int64 for column in columns), "plans must be dense"
    out = torch.empty(x.shape, dtype=x.dtype)
    rows, part = len(plan.offsets), min(CHUNK_CHANNELS, channels)
    if rows:
        required_library().call(
            f"convolution_{DTYPE_SUFFIXES[x.dtype]}", rows * -(-channels // part), x, out, weight, bias, cache.conv,
            *columns, before, after, x.stride(0), channels, taps, cache.conv.stride(0), plan.write_pages.shape[1],
            plan.page_tokens, int(silu), part,
        )  # fmt: skip
    return out


def plan_decode(table: Tensor, slots: Tensor, positions: Tensor, page_tokens: int) -> StatePlan:
    """As `StatePlan.for_decode`, by one operation."""
    columns = torch.empty((4, len(slots)), dtype=torch.int64)
    if len(slots):
        assert all(part.is_contiguous() for part in (table, slots, positions)), "tensors must be contiguous"
        required_library().call(
            "decode_states", 1, columns, table, slots, positions, len(slots), table.shape[1], page_tokens
        )
    offsets, lengths, read, write = columns.unbind()
    return StatePlan(offsets, lengths, positions, read, write.view(-1, 1), page_tokens)
