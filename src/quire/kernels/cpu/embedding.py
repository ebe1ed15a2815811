"""Lookup of rows of an embedding table."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.dispatch import DTYPE_SUFFIXES, split_rows
from quire.kernels.cpu.library_loader import required_library


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
