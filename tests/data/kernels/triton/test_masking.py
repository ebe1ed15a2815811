"""Masks over logits by the GPU's kernel equal unpacked bits, row by row, and touch nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from grids import DEVICE

from quire.data.kernels.triton import masking


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 31), (3, 4096), (4, 4131), (2, 9001)])
def test_masks_equal_unpacked_bits(rows: int, vocab: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocab)
    words, there = -(-vocab // 32), 2
    bits = rng.integers(-(2**31), 2**31, (there, words), dtype=np.int64).astype(np.int32)
    bits[0, : words // 2], bits[1, : words // 3] = 0, -1
    places = rng.integers(-1, there, rows)
    places[0] = 0
    whole = torch.randn(rows, vocab + 5, generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)
    logits, before = whole[:, :vocab], whole.clone()
    masking.mask_logits(logits, torch.from_numpy(places).to(DEVICE), torch.from_numpy(bits).to(DEVICE))
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)
    for row, place in enumerate(places):
        kept = torch.from_numpy(allowed[place] if place >= 0 else np.ones(vocab, bool)).to(DEVICE)
        assert torch.equal(logits[row], torch.where(kept, before[row, :vocab], -torch.inf))
    assert torch.equal(whole[:, vocab:], before[:, vocab:])
