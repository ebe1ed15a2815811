"""Prompt lengths by slot, on the host and on the device, for layers with budgets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.protocol.step_plan import SeqSlice, SlotInit
from quire.worker.staging_buffer import StagingBuffer


class PromptLengths:
    """`host_lengths` and `device_lengths` [slots] int64, with equal values; 0 for unused slots. Prompts of more than
    `budget` tokens are pruned."""

    def __init__(self, slots: int, budget: int, staging: StagingBuffer) -> None:
        self.budget, self.staging = budget, staging
        self.lengths = [0] * slots  # the same as a list: faster for single reads
        self.host_lengths = np.zeros(slots, dtype=np.int64)
        self.device_lengths = torch.zeros(slots, dtype=torch.int64, device=staging.device)

    def init_slots(self, new_slots: Sequence[SlotInit]) -> None:
        """Set the prompt lengths of new slots."""
        if new_slots:
            lengths = {init.slot: init.prompt_len for init in new_slots}
            slots, prompts = (np.array(list(part), dtype=np.int64) for part in (lengths, lengths.values()))
            self.host_lengths[slots] = prompts
            for slot, length in lengths.items():
                self.lengths[slot] = length
            device_slots, device_prompts = self.staging.upload_all([slots, prompts])
            self.device_lengths.index_copy_(0, device_slots, device_prompts)

    def gather(self, slots: np.ndarray, token_slots: Tensor) -> tuple[np.ndarray, Tensor]:
        """Return the prompt lengths of rows, on the host, and of tokens, on the device."""
        return self.host_lengths[slots], self.device_lengths.index_select(0, token_slots)

    def ends_long_prompt(self, slices: Sequence[SeqSlice]) -> bool:
        """Return True if some slice ends a prompt that is pruned."""
        lengths, budget = self.lengths, self.budget
        return any(budget < lengths[row.slot] > row.start >= lengths[row.slot] - len(row.tokens) for row in slices)
