"""Masks over logits by the GPU's kernel equal unpacked bits, row by row, and touch nothing else."""

from __future__ import annotations

import pytest
import torch
from grids import DEVICE, check_masks

from quire.kernels.triton import sampling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 31), (3, 4096), (4, 4131), (2, 9001)])
def test_masks_equal_unpacked_bits(rows: int, vocab: int, dtype: torch.dtype) -> None:
    check_masks(sampling.mask_logits, rows, vocab, dtype, DEVICE)
