"""Masks over logits: bits of the tokens that a grammar allows, applied to all rows of a step in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.fast_launch import fast_launch

BLOCK = 4096  # tokens of a program


@fast_launch
@triton.jit
def _mask(logits, places, bits, vocab, row_stride, words, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    if place >= 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = token < vocab
        word = tl.load(bits + place * words + (token >> 5), mask=there, other=0)
        barred = ((word >> (token & 31)) & 1) == 0
        least = tl.full((BLOCK,), float("-inf"), tl.float32)  # the store converts it to the logits' dtype
        tl.store(logits + row * row_stride + token, least, mask=there & barred)


def mask_logits(logits: Tensor, mask_rows: Tensor, bits: Tensor) -> None:
    """Set logits [R, V], whose rows are contiguous, to -inf where the row's mask has no bit. The mask of row r is
    bits[mask_rows[r]], int32 [M, ceil(V / 32)], the lowest bit of a word first. mask_rows [R] int64; -1: no mask."""
    rows, vocab = logits.shape
    if rows:
        grid = (rows, -(-vocab // BLOCK))
        _mask[grid](logits, mask_rows, bits, vocab, logits.stride(0), bits.shape[1], BLOCK=BLOCK)
