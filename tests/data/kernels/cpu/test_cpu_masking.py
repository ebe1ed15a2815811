"""Masks over logits by the CPU's kernel equal unpacked bits, by each library that is built."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.data.kernels.cpu import masking
from quire.data.kernels.cpu.loading import library
from quire.data.runner.masks import Masks
from quire.vocabulary.plan import Mask

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels are built")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 31), (3, 64), (5, 1001), (64, 3072)])
def test_masks_equal_unpacked_bits(rows: int, vocab: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocab)
    words = -(-vocab // 32)
    bits = rng.integers(-(2**31), 2**31, (3, words), dtype=np.int64).astype(np.int32)
    bits[0, : words // 2], bits[1, : words // 3] = 0, -1
    places = rng.integers(-1, 3, rows)
    whole = torch.randn(rows, vocab + 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits, before = whole[:, :vocab], whole.clone()
    masking.mask_logits(logits, torch.from_numpy(places), torch.from_numpy(bits))
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)
    kept = torch.from_numpy(np.stack([allowed[p] if p >= 0 else np.ones(vocab, bool) for p in places]))
    assert torch.equal(logits, torch.where(kept, before[:, :vocab], -torch.inf))
    assert torch.equal(whole[:, vocab:], before[:, vocab:])


def test_by_torch_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no kernels; and a mask holds for one step."""
    vocab, slots = 77, np.array([3, 1, 2])
    masks = Masks(5, vocab, torch.device("cpu"))
    masks.take((Mask(2, bytes(range(12))), Mask(3, b"\xff" * 12)))
    assert masks.of(slots).tolist() == [True, False, True]
    results = []
    for name in (None, "take"):
        if name:
            monkeypatch.setattr("quire.data.runner.masks.take", lambda *_: False)
        logits = torch.arange(3 * vocab, dtype=torch.float32).view(3, vocab)
        masks.apply(logits, slots)
        results.append(logits)
    assert torch.equal(*results)
    assert torch.isinf(results[0][2]).sum() > 10
    assert not torch.isinf(results[0][:2]).any()
    masks.take(())
    assert not masks.some
    assert not masks.of(slots).any()
