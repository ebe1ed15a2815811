"""Masks over logits: bits that say which tokens a grammar allows, applied to all rows of a step by one operation."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.cpu.dispatch import DTYPE_SUFFIXES
from quire.kernels.cpu.library_loader import library


def mask_logits(logits: Tensor, mask_rows: Tensor, bits: Tensor) -> None:
    """Put -inf in logits [R, V], whose rows are contiguous, where the row's mask has no bit: the mask of row r is
    bits[places[r]], int32 [M, ceil(V / 32)], the lowest bit of a word first. places [R] int64; rows of -1 stay."""
    rows, vocab = logits.shape
    found = library()
    assert found is not None, "masks choose this where there is a library"
    assert logits.stride(1) == 1, "a row's logits must be contiguous"
    assert mask_rows.is_contiguous() and bits.is_contiguous(), "plain vectors"  # noqa: PT018
    if rows:
        found.call(
            f"mask_{DTYPE_SUFFIXES[logits.dtype]}", rows, logits, mask_rows, bits, logits.stride(0), vocab,
            bits.shape[1]
        )  # fmt: skip
