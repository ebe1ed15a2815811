"""Masks on a GPU: bits that go by a stream of their own are there when the logits are, in every step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.protocol.step_plan import TokenBitmask
from quire.worker.token_bitmasks import TokenBitmasks

pytestmark = pytest.mark.gpu

SLOTS, VOCAB = 64, 128_256


def test_each_step_has_its_own_masks() -> None:
    """Many steps enqueued behind a device that is held up, memory that is used again among them: each row keeps what
    its own step's mask allows."""
    device = torch.device("cuda")
    masks, rng = TokenBitmasks(SLOTS, VOCAB, device), np.random.default_rng(0)
    torch.cuda._sleep(100_000_000)
    steps = []
    for step in range(12):
        rows = np.arange(1, SLOTS) if step % 3 else np.arange(1, 8)
        bits = rng.integers(0, 2**32, size=(len(rows), masks.num_words), dtype=np.uint32)
        bits[:, -1] &= (1 << VOCAB % 32) - 1 if VOCAB % 32 else 2**32 - 1
        masks.set_bitmasks([TokenBitmask(int(slot), one.tobytes()) for slot, one in zip(rows, bits) if slot % 5])
        logits = torch.zeros(len(rows), VOCAB, device=device, dtype=torch.bfloat16)
        masks.apply(logits, rows, rows)
        steps.append((rows, bits, logits))
        del logits
    for rows, bits, logits in steps:
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB].astype(bool)
        allowed[rows % 5 == 0] = True
        assert ((logits == 0).cpu().numpy() == allowed).all()
