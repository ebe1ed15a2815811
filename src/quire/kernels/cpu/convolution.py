"""The causal convolution of layers with states (see quire.kernels.mamba_states)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.dispatch import DTYPE_SUFFIXES
from quire.kernels.cpu.library_loader import required_library
from quire.kernels.mamba_states import StateCache, StatePlan

CHUNK_CHANNELS = 256
MAX_TAPS = 16


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, plan: StatePlan, *, silu: bool = True
) -> Tensor:
    """As `mamba_states.causal_conv`, by one operation for all rows. States are in x's dtype."""
    (_, channels), taps = x.shape, weight.shape[1]
    assert x.stride(1) == 1, "rows are contiguous"
    assert cache.conv.dtype == x.dtype, f"states in {cache.conv.dtype}, and inputs in {x.dtype}"
    assert 2 <= taps <= MAX_TAPS, f"{taps} taps"
    out = torch.empty(x.shape, dtype=x.dtype)
    columns = plan.offsets, plan.lengths, plan.starts, plan.read_pages, plan.write_pages
    rows, parts = len(plan.offsets), -(-channels // CHUNK_CHANNELS)
    if rows:
        required_library().call(
            f"convolution_{DTYPE_SUFFIXES[x.dtype]}", rows * parts, x, out, weight.float().t().contiguous(),
            None if bias is None else bias.float(), cache.conv, *(column.contiguous() for column in columns),
            x.stride(0), channels, taps, cache.conv.stride(0), plan.write_pages.shape[1], plan.page_tokens, int(silu),
            min(CHUNK_CHANNELS, channels),
        )  # fmt: skip
    return out
