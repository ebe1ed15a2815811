"""How operations on rows of numbers are named and cut, and for what there are any."""

from __future__ import annotations

import torch

from quire.data.kernels.cpu.loading import library

NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}
"""The dtypes of kernels, as their names end."""

NUMBERS = 1 << 15
"""Of a chunk: a few microseconds of work, beside the tenth of one that a chunk costs."""


def take(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for tensors like this."""
    return device.type == "cpu" and dtype in NAMES and library() is not None


def parts_of(rows: int, size: int) -> tuple[int, int]:
    """Rows of a chunk, and how many chunks that makes."""
    per = max(1, NUMBERS // size)
    return per, -(-rows // per)


def columns_of(size: int) -> tuple[int, int]:
    """The same within each row."""
    part = min(size, NUMBERS // 4)
    return part, -(-size // part)
