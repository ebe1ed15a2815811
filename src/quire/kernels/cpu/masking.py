"""Masks over logits: bits of the tokens that a grammar allows, applied to all rows of a step by one operation."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.cpu.dispatch import DTYPE_SUFFIXES
from quire.kernels.cpu.library_loader import required_library


def mask_logits(logits: Tensor, mask_rows: Tensor, bits: Tensor) -> None:
    """Set logits [R, V], whose rows are contiguous, to -inf where the row's mask has no bit. The mask of row r is
    bits[mask_rows[r]], int32 [M, ceil(V / 32)], the lowest bit of a word first. mask_rows [R] int64; -1: no mask."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, "a row's logits must be contiguous"
    assert mask_rows.is_contiguous() and bits.is_contiguous(), "masks must be contiguous"  # noqa: PT018
    if rows:
        required_library().call(
            f"mask_{DTYPE_SUFFIXES[logits.dtype]}", rows, logits, mask_rows, bits, logits.stride(0), vocab,
            bits.shape[1]
        )  # fmt: skip
