"""Availability, names and chunk sizes of the kernels that work on rows of numbers."""

from __future__ import annotations

import torch

from quire.kernels.cpu.library_loader import library

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
