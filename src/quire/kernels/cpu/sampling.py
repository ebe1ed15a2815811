"""Greedy and random sampling with temperature, min_p, top_k and top_p, equal to quire.worker.gumbel given the same
likelihoods; and masks over logits. One operation samples or masks all rows of a step, and a row's result depends only
on that row."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.cpu.library_loader import required_library
from quire.kernels.cpu.rows import DTYPE_SUFFIXES


def sample(
    logits: Tensor, params: Tensor | None, draw_rows: Tensor | None, seeds: Tensor | None, positions: Tensor | None,
    slots: Tensor, last_sampled: Tensor, tokens: Tensor, faults: Tensor,
) -> None:  # fmt: skip
    """Draw tokens [D] from the rows draw_rows [D] (ascending; None: one draw a row) of logits [R, V]. Where the
    temperature is 0 the token is the lowest id of the greatest logit.

    params [R, 4] float64: temperature, min_p, top_k (0: off), top_p; None: all rows are greedy. seeds and positions
    [D] define the noise. faults[r] = 0; a row with a logit that is NaN or +infinite, or with none above -infinity, gets
    token 0 and fault 1. The first draw of a row is also written to last_sampled[slots[r]]. All other tensors are int64.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, "a row's logits must be contiguous"
    for tensor in (params, draw_rows, seeds, positions, slots, last_sampled, tokens, faults):
        assert tensor is None or tensor.is_contiguous(), "vectors must be contiguous"
    required_library().call(
        f"sample_{DTYPE_SUFFIXES[logits.dtype]}", rows, logits, params, draw_rows, seeds, positions, slots,
        last_sampled, tokens, faults, logits.stride(0), vocab, len(tokens),
    )  # fmt: skip


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
