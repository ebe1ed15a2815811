"""How operations on rows of numbers are named and cut, and for what there are any."""

from __future__ import annotations

import torch

from quire.kernels.cpu.library_loader import library

DTYPE_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}
"""The dtypes of kernels, as their names end."""

CHUNK_NUMBERS = 1 << 15
"""Of a chunk: a few microseconds of work, beside the tenth of one that a chunk costs."""


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for tensors like this."""
    return device.type == "cpu" and dtype in DTYPE_SUFFIXES and library() is not None


def split_rows(rows: int, size: int) -> tuple[int, int]:
    """Rows of a chunk, and how many chunks that makes."""
    per = max(1, CHUNK_NUMBERS // size)
    return per, -(-rows // per)


def split_columns(size: int) -> tuple[int, int]:
    """The same within each row."""
    part = min(size, CHUNK_NUMBERS // 4)
    return part, -(-size // part)
