"""The number of accepted draft tokens by the GPU's kernel equals that by torch, which is compared with steps of one
token elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from grids import DEVICE

from quire.kernels.triton.verification import accept_drafts
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import FIRST_DRAFT, SeqSlice
from quire.worker.verification import Verification


@pytest.mark.parametrize(("slices", "most"), [(1, 1), (1, 16), (5, 3), (40, 9)])
def test_accepted_tokens_are_those_of_torch(slices: int, most: int) -> None:
    """Few tokens, so that many are equal by chance; a slice in three has known drafts, one in three none."""
    rng, slots = np.random.default_rng(slices + most), slices + 3
    for _ in range(8):
        rows = []
        for i, slot in enumerate(rng.permutation(slots)[:slices].tolist()):
            count = int(rng.integers(1, most + 1))
            known, proposed = rng.integers(0, 2, count).tolist(), [FIRST_DRAFT - j for j in range(count)]
            rows.append(SeqSlice(slot, (1,), 5, 1, (), tuple((proposed, known, [])[i % 3])))
        verification = Verification.from_slices(SeqSlices.from_slices(rows))
        sampled = torch.from_numpy(rng.integers(0, 2, (1 + most, slots)))
        tokens = torch.from_numpy(rng.integers(0, 2, len(verification.rows)))
        columns = verification.slots, verification.first_samples, verification.drafts
        there = sampled.clone().to(DEVICE)
        got = accept_drafts(tokens.to(DEVICE), there, *(torch.from_numpy(column).to(DEVICE) for column in columns))
        assert got.tolist() == verification.accept_on_host(tokens.numpy(), sampled.numpy(), None).tolist()
        assert torch.equal(there[0].cpu(), sampled[0])
        for row in rows:  # what follows a slot's draft tokens is of no use
            kept = slice(1, 1 + len(row.draft_tokens))
            assert torch.equal(there[kept, row.slot].cpu(), sampled[kept, row.slot])
