"""Masks over logits by the CPU's kernel equal unpacked bits, by each library that is built."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from grids import check_masks

from quire.kernels.cpu import sampling
from quire.kernels.cpu.library_loader import library
from quire.protocol.step_plan import TokenBitmask
from quire.worker.token_bitmasks import TokenBitmasks

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels are built")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 31), (3, 64), (5, 1001), (64, 3072)])
def test_masks_equal_unpacked_bits(rows: int, vocab: int, dtype: torch.dtype) -> None:
    check_masks(sampling.mask_logits, rows, vocab, dtype, torch.device("cpu"))


def test_by_torch_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no kernels; and a mask holds for one step."""
    vocab, slots = 77, np.array([3, 1, 2])
    masks = TokenBitmasks(5, vocab, torch.device("cpu"))
    masks.set_bitmasks((TokenBitmask(2, bytes(range(12))), TokenBitmask(3, b"\xff" * 12)))
    assert masks.is_masked(slots).tolist() == [True, False, True]
    results = []
    for name in (None, "take"):
        if name:
            monkeypatch.setattr("quire.worker.token_bitmasks.has_kernels", lambda *_: False)
        logits = torch.arange(3 * vocab, dtype=torch.float32).view(3, vocab)
        masks.apply(logits, slots, slots)
        results.append(logits)
    assert torch.equal(*results)
    assert torch.isinf(results[0][2]).sum() > 10
    assert not torch.isinf(results[0][:2]).any()
    masks.set_bitmasks(())
    assert not masks.has_masks
    assert not masks.is_masked(slots).any()
