"""Masks of one step after another: rows come, go and keep theirs."""

from __future__ import annotations

import numpy as np
import torch

from quire.data.runner.masks import Masks
from quire.vocabulary.plan import Mask

SLOTS, VOCAB = 8, 100


def made(rng: np.random.Generator) -> bytes:
    bits = np.zeros(128, dtype=np.uint8)
    bits[:VOCAB] = rng.integers(0, 2, VOCAB)
    return np.packbits(bits, bitorder="little").tobytes()


def test_each_step_has_its_own_masks() -> None:
    masks, rng = Masks(SLOTS, VOCAB, torch.device("cpu")), np.random.default_rng(0)
    given = [made(rng) for _ in range(4)]
    for _ in range(40):
        some = rng.permutation(SLOTS)[: rng.integers(0, SLOTS)]
        step = {int(slot): given[rng.integers(4)] if rng.random() < 0.7 else made(rng) for slot in some}
        masks.take([Mask(slot, bits) for slot, bits in step.items()])
        slots = rng.permutation(SLOTS)
        logits = torch.zeros(SLOTS, VOCAB)
        masks.apply(logits, slots)
        for slot, row in zip(slots.tolist(), logits):
            bits = np.frombuffer(step.get(slot, b"\xff" * 16), np.uint8)
            assert ((row == 0).numpy() == np.unpackbits(bits, bitorder="little")[:VOCAB]).all()


def test_a_mask_that_a_row_keeps_is_copied_once() -> None:
    masks, rng = Masks(SLOTS, VOCAB, torch.device("cpu")), np.random.default_rng(0)
    kept, other = made(rng), made(rng)
    masks.take([Mask(3, kept), Mask(5, kept)])
    masks._bits[3] = 0
    masks.take([Mask(3, kept), Mask(5, other)])
    assert not masks._bits[3].any()
    assert masks._bits[5].tobytes() == other
    masks.take([Mask(3, other)])
    assert masks._bits[3].tobytes() == other
