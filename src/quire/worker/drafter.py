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

    def launch(self, rows: SeqSlices) -> Any:
        """See ModelRunner."""
        ...


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
        counts, slots, _ = fixed = slices.to_array()[: 3 * len(slices)].reshape(3, -1)
        lengths, last = slices.token_counts, self.runner.last_sampled
        ends = fixed[2] + lengths
        tokens = slices.to_array()[slices.tokens.start : slices.tokens.end]
        samples, final = self._compute_known(fixed, lengths, tokens)
        if not counts.any():
            return
        if len(samples) > len(final):  # a slot has several: keep the last one
            index, proposing = self.runner.store.staging.upload_all([final, slots[counts > 0]])
            last.index_copy_(0, proposing, samples.index_select(0, index))
        self.drafts[0].copy_(last)
        for i in range(1, int(counts.max())):
            active = np.flatnonzero(counts > i)
            ones = np.ones(len(active), dtype=np.int64)
            rows = np.stack((ones, slots[active], ends[active] + i - 1))
            self._launch(rows, ones, np.full(len(active), LAST_SAMPLED))
            self.drafts[i].copy_(last)

    def _compute_known(self, fixed: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Compute known tokens. Return all samples, and the indices of those that follow a slice which proposes."""
        proposes = fixed[0] > 0
        splits = np.where(lengths <= MAX_SPLIT_TOKENS, lengths, 1)  # rows of each slice
        of = np.repeat(np.arange(len(lengths)), splits)
        number = np.arange(len(of)) - (np.cumsum(splits) - splits)[of]
        rows = fixed[:, of]
        rows[2] += number
        # If all tokens are in rows of one token, all sample, as graphs of decode steps do.
        is_final = (number == splits[of] - 1) & proposes[of]
        rows[0] = is_final | (proposes.all() and len(of) == len(tokens))
        rows[0, -1] |= not rows[0].any()  # graphs of steps with prompts have at least one sample
        samples = self._launch(rows, np.where(splits[of] > 1, 1, lengths[of]), tokens)
        return samples, np.flatnonzero(is_final[rows[0] > 0])

    def _launch(self, rows: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> Tensor:
        """Enqueue rows and return their samples."""
        none = np.zeros(len(lengths), dtype=np.int64)
        launched = self.runner.launch(SeqSlices.from_arrays(rows, lengths, tokens, none, none[:0]))
        return torch.as_tensor(launched.samples.tokens if launched.samples is not None else none[:0])
