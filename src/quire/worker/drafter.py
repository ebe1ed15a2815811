"""The draft model's part of a step: it computes known tokens of some slots, then proposes tokens after them.

It samples as the model does, with the same noise at the same positions, so that both agree as often as their
probabilities allow. Only temperature, top_k, top_p and min_p count: what depends on earlier tokens does not. All
proposals stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.protocol.device_params import DeviceSamplingParams
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import LAST_SAMPLED, SlotInit
from quire.worker.sampler import Sampler
from quire.worker.store import Store

MAX_SPLIT_TOKENS = 4
"""A slice of up to this many tokens is computed as rows of one token, as decode steps have: of two tokens if the model
accepted all drafts."""


class DraftRunner(Protocol):
    """The parts of a ModelRunner of the draft model that the drafter uses."""

    store: Store
    sampler: Sampler
    last_sampled: Tensor

    def launch(self, rows: SeqSlices) -> Any: ...
    def decode(self, columns: np.ndarray) -> Tensor | np.ndarray: ...


class Drafter:
    """Proposes tokens by the draft model of `runner`. `drafts` [D, slots], on the device, get the i-th token, from 0,
    that it proposes for a slot."""

    def __init__(self, runner: DraftRunner, drafts: Tensor) -> None:
        self.runner, self.drafts = runner, drafts

    def init_slots(self, new_slots: Sequence[SlotInit]) -> None:
        """Assign slots to new sequences."""
        for init in new_slots:
            sampling = init.sampling
            if sampling is not None:
                sampling = DeviceSamplingParams(
                    temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
                )
            self.runner.sampler.init_slot(init._replace(sampling=sampling, history=(), num_logprobs=-1))

    def propose(self, slices: SeqSlices) -> None:
        """Enqueue the computation of draft slices, whose `num_samples` are the numbers of tokens to propose, and set
        `drafts` of their slots."""
        numbers, lengths, last = slices.to_array(), slices.token_counts, self.runner.last_sampled
        counts, slots, starts = fixed = numbers[: 3 * len(slices)].reshape(3, -1)
        tokens = numbers[slices.tokens.start : slices.tokens.end]
        longest = int(lengths.max())
        if longest == 1 and counts.all():
            self.runner.decode(np.stack((slots, starts, tokens)))
        else:
            samples, final = self._compute_known(fixed, lengths, tokens)
            if not counts.any():
                return
            if len(samples) > len(final):  # a slot has several: keep the last one
                index, proposing = self.runner.store.staging.upload_all([final, slots[counts > 0]])
                last.index_copy_(0, proposing, samples.index_select(0, index))
        self.drafts[0].copy_(last)
        columns = np.stack((slots, starts + lengths, np.full(len(slots), LAST_SAMPLED)))
        for i in range(1, int(counts.max())):
            self.runner.decode(columns[:, counts > i])
            self.drafts[i].copy_(last)
            columns[1] += 1

    def _compute_known(self, fixed: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Compute known tokens. Return all samples, and the indices of those that follow a slice which proposes."""
        proposes = fixed[0] > 0
        splits = np.where(lengths <= MAX_SPLIT_TOKENS, lengths, 1)  # rows of each slice
        of = np.repeat(np.arange(len(lengths)), splits)
        number = np.arange(len(of)) - (np.cumsum(splits) - splits)[of]
        rows = fixed[:, of]
        rows[2] += number
        is_final = (number == splits[of] - 1) & proposes[of]
        if proposes.all() and len(of) == len(tokens):  # all rows sample, as graphs of decode steps do
            samples = self.runner.decode(np.stack((rows[1], rows[2], tokens)))
            return torch.as_tensor(samples), np.flatnonzero(is_final)
        rows[0] = is_final
        rows[0, -1] |= not is_final.any()  # graphs of steps with prompts have at least one sample
        none = np.zeros(len(of), dtype=np.int64)
        slices = SeqSlices.from_arrays(rows, np.where(splits[of] > 1, 1, lengths[of]), tokens, none, none[:0])
        launched = self.runner.launch(slices)
        return torch.as_tensor(launched.samples.tokens), np.flatnonzero(is_final[rows[0] > 0])
