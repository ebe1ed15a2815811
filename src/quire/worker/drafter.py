"""The draft model's part of a step: it computes known tokens of some slots, then proposes tokens after them.

It samples as the model does, with the same noise at the same positions, so that both agree as often as their
probabilities allow. Only temperature, top_k, top_p and min_p count: what depends on earlier tokens does not, nor do
grammars. All proposals stay on the device; the host gets a copy for the masks of grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.protocol.device_params import DeviceSamplingParams
from quire.protocol.seq_slices import SeqSlices, split_slices
from quire.protocol.step_plan import LAST_SAMPLED, SlotInit
from quire.worker.sampler import Sampler
from quire.worker.store import Store

MAX_SPLIT_TOKENS = 4
"""A slice of up to this many tokens is computed as rows of one token, as in decode steps. After a step that accepts all
draft tokens it has two tokens."""


class DraftRunner(Protocol):
    """The parts of a ModelRunner of the draft model that the drafter uses."""

    store: Store
    sampler: Sampler
    last_sampled: Tensor

    def launch(self, rows: SeqSlices) -> Any: ...
    def decode(self, columns: np.ndarray) -> Tensor | np.ndarray: ...


class HostDrafts(NamedTuple):
    """The `drafts` of a Drafter on the host."""

    tokens: Tensor  # [D, slots]
    ready_event: torch.cuda.Event | None  # after which they are valid


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
        `drafts` of their slots: one pass over the known tokens, then one for each later proposal."""
        numbers, lengths, last = slices.to_array(), slices.token_counts, self.runner.last_sampled
        fixed = numbers[: 3 * len(slices)].reshape(3, -1)
        counts, slots, starts = fixed
        tokens = numbers[slices.tokens.start : slices.tokens.end]
        if not counts.all() or lengths.max() > MAX_SPLIT_TOKENS:
            samples, final = self._compute_known(fixed, lengths, tokens)
        elif len(tokens) == len(slots):
            samples, final = self.runner.decode(np.stack((slots, starts, tokens))), None
        else:
            of, number = split_slices(lengths)
            samples = self.runner.decode(np.stack((slots[of], starts[of] + number, tokens)))
            final = lengths.cumsum() - 1
        if final is not None and len(samples) > len(final):  # a slot has several samples: keep the last one
            self._keep_last(slots[counts > 0], samples, final)
        self.drafts[0].copy_(last)
        columns = np.stack((slots, starts + lengths, np.full(len(slots), LAST_SAMPLED)))
        for i in range(1, int(counts.max())):
            self.runner.decode(columns[:, counts > i])
            self.drafts[i].copy_(last)
            columns[1] += 1

    def copy_to_host(self) -> HostDrafts:
        """Enqueue a copy of `drafts` to the host."""
        if self.drafts.device.type == "cpu":
            return HostDrafts(self.drafts, None)
        pinned = torch.empty(self.drafts.shape, dtype=self.drafts.dtype, pin_memory=True)
        pinned.copy_(self.drafts, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return HostDrafts(pinned, ready)

    def _keep_last(self, slots: np.ndarray, samples: Tensor | np.ndarray, final: np.ndarray) -> None:
        """Set the latest samples of `slots` to those at the indices `final`."""
        if isinstance(samples, np.ndarray):
            self.runner.last_sampled.numpy()[slots] = samples[final]
            return
        index, proposing = self.runner.store.staging.upload_all([final, slots])
        self.runner.last_sampled.index_copy_(0, proposing, samples.index_select(0, index))

    def _compute_known(
        self, fixed: np.ndarray, lengths: np.ndarray, tokens: np.ndarray
    ) -> tuple[Tensor | np.ndarray, np.ndarray]:
        """Compute known tokens, of prompts too. Return all samples, and the indices of those after a slice that
        proposes tokens."""
        row_counts = np.where(lengths <= MAX_SPLIT_TOKENS, lengths, 1)
        of, number = split_slices(row_counts)
        rows = fixed[:, of]
        rows[2] += number
        rows[0] = (number == row_counts[of] - 1) & (fixed[0] > 0)[of]
        is_final = rows[0] > 0
        rows[0, -1] |= not is_final.any()  # graphs of steps with prompts have at least one sample
        none = np.zeros(len(of), dtype=np.int64)
        slices = SeqSlices.from_arrays(rows, np.where(row_counts[of] > 1, 1, lengths[of]), tokens, none, none[:0])
        samples: Tensor | np.ndarray = self.runner.launch(slices).samples.tokens
        return samples, np.flatnonzero(is_final[rows[0] > 0])
