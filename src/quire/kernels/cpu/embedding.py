"""Rows of a table of vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.dispatch import DTYPE_SUFFIXES, split_rows
from quire.kernels.cpu.library_loader import library


def embedding(
    ids: Tensor, table: Tensor, *, scale: float | None = None, add_to: Tensor | None = None, offset: int = 0
) -> Tensor:
    """table[ids + first] as a fresh tensor [T, size], multiplied by `scale` if one is given; or `add_to` [T, size] +=
    it, which is returned. ids are int64 and in the table."""
    rows, size = len(ids), table.shape[1]
    out = torch.empty((rows, size), dtype=table.dtype) if add_to is None else add_to
    assert ids.dtype == torch.int64, "ids are int64"
    assert all(x.is_contiguous() for x in (ids, table, out)), "plain rows"
    assert (out.shape, out.dtype) == ((rows, size), table.dtype), "a row for each id"
    found, (per, chunks) = library(), split_rows(rows, size)
    assert found is not None, "layers choose this where there is a library"
    by = 1.0 if scale is None else float(scale)
    found.call(
        f"embedding_{DTYPE_SUFFIXES[table.dtype]}",
        chunks,
        ids,
        table,
        out,
        rows,
        per,
        size,
        offset,
        int(add_to is not None),
        by,
    )
    return out
