"""How long the prompts of the sequences in each slot are: what layers with budgets must know, on the host and on the
device. No model, no pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.protocol.step_plan import SeqSlice, SlotInit
from quire.worker.staging_buffer import StagingBuffer


class PromptLengths:
    """`host_lengths` and `device_lengths` [slots] int64, the same numbers; 0 where nobody was born yet. Prompts of more
    than `budget` tokens aren't kept whole."""

    def __init__(self, slots: int, budget: int, staging: StagingBuffer) -> None:
        self.budget, self.staging = budget, staging
        self.lengths = [0] * slots  # the same once more
        self.host_lengths = np.zeros(slots, dtype=np.int64)
        self.device_lengths = torch.zeros(slots, dtype=torch.int64, device=staging.device)

    def init_slots(self, new_slots: Sequence[SlotInit]) -> None:
        """These sequences get their slots."""
        if new_slots:
            lengths = {birth.slot: birth.prompt_len for birth in new_slots}
            slots, prompts = (np.array(list(part), dtype=np.int64) for part in (lengths, lengths.values()))
            self.host_lengths[slots] = prompts
            for slot, length in lengths.items():
                self.lengths[slot] = length
            to, new = self.staging.upload_all([slots, prompts])
            self.device_lengths.index_copy_(0, to, new)

    def gather(self, slots: np.ndarray, token_slots: Tensor) -> tuple[np.ndarray, Tensor]:
        """Those of rows, on the host, and of tokens."""
        return self.host_lengths[slots], self.device_lengths.index_select(0, token_slots)

    def ends_long_prompt(self, slices: Sequence[SeqSlice]) -> bool:
        """Whether some of these rows end a prompt that isn't kept whole."""
        lengths, budget = self.lengths, self.budget
        return any(budget < lengths[row.slot] > row.start >= lengths[row.slot] - len(row.tokens) for row in slices)
