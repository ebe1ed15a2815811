"""The draft model's part of a step, after the samples of the model: it computes known tokens of some slots, then those
that the step has sampled and accepted, and proposes tokens after them, which the slots' next slices verify.

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
from quire.protocol.step_plan import FIRST_DRAFT, LAST_SAMPLED, MAX_SPLIT_TOKENS, SlotInit
from quire.worker.sampler import Sampler
from quire.worker.store import Store
from quire.worker.verification import Verification


class DraftRunner(Protocol):
    """The parts of a ModelRunner of the draft model that the drafter uses."""

    store: Store
    sampler: Sampler

    def launch(self, rows: SeqSlices) -> Any: ...
    def can_replay(self, rows: int) -> bool: ...
    def decode(self, columns: np.ndarray) -> Tensor | np.ndarray: ...


class HostDrafts(NamedTuple):
    """The `drafts` of a Drafter on the host."""

    tokens: Tensor  # [D, slots]
    ready_event: torch.cuda.Event | None  # after which they are valid


class Drafter:
    """Proposes tokens by the draft model of `runner`: the i-th one, from 0, for a slot is [1 + i, slot] of
    `sampled_tokens` [1 + D, slots] (see resolve_tokens), on the device. `base_positions` [slots]: see
    resolve_positions."""

    def __init__(self, runner: DraftRunner, sampled_tokens: Tensor, base_positions: Tensor) -> None:
        self.runner, self.sampled_tokens, self.base_positions = runner, sampled_tokens, base_positions
        self.drafts = sampled_tokens[1:]
        self.num_proposed = np.zeros(len(base_positions), dtype=np.int64)  # by slot, in its last step

    def init_slots(self, new_slots: Sequence[SlotInit]) -> None:
        """Assign slots to new sequences."""
        for init in new_slots:
            sampling = init.sampling
            if sampling is not None:
                sampling = DeviceSamplingParams(
                    temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
                )
            self.runner.sampler.init_slot(init._replace(sampling=sampling, history=(), num_logprobs=-1))

    def propose(
        self, slices: SeqSlices, verification: Verification | None, accepted: Tensor | np.ndarray | None
    ) -> None:
        """Enqueue the computation of draft slices, whose `num_samples` are the numbers of tokens to propose, after a
        step with `verification`, if it had draft tokens, of which it `accepted` [V] ones."""
        numbers, lengths = slices.to_array(), slices.token_counts
        fixed = numbers[: 3 * len(slices)].reshape(3, -1)
        if lengths.any():
            self._compute_known(fixed, lengths, numbers[slices.tokens.start : slices.tokens.end])
        proposing = np.flatnonzero(fixed[0])
        counts, slots, ends = fixed[0, proposing], fixed[1, proposing], (fixed[2] + lengths)[proposing]
        if len(proposing):
            widths, index = np.ones(len(slots), dtype=np.int64), np.full(len(slots), -1)
            if verification is not None:
                index = verification.index_of(slots, len(self.num_proposed))
                widths[index >= 0] += verification.num_drafts[index[index >= 0]]
            if self.runner.can_replay(int(widths.sum())):
                self._propose_on_device(counts, slots, ends, widths, index, accepted)
            else:
                self._propose_on_host(counts, slots, ends, index, verification, accepted)
        self.num_proposed[fixed[1]] = fixed[0]

    def _propose_on_device(
        self,
        counts: np.ndarray,
        slots: np.ndarray,
        ends: np.ndarray,
        widths: np.ndarray,
        index: np.ndarray,
        accepted: Tensor | np.ndarray | None,
    ) -> None:
        """Propose tokens for `slots` without waiting for the numbers of `accepted` tokens: the first pass has a row for
        each token that may be the slot's last one, from position `ends` on, and later passes go on after the row of the
        token that is."""
        from quire.kernels.triton.verification import take_proposals

        of, number = split_slices(widths)
        tokens = np.where(number < widths[of] - 1, FIRST_DRAFT - number, LAST_SAMPLED)
        samples = self.runner.decode(np.stack((slots[of], ends[of] + number, tokens)))
        arrays = self.runner.store.staging.upload_all([slots, widths.cumsum() - widths, index, ends])
        take_proposals(torch.as_tensor(samples), accepted, *arrays, self.sampled_tokens, self.base_positions)
        for i in range(1, int(counts.max())):
            active = counts > i
            positions, tokens = np.full(len(slots), -i), np.full(len(slots), FIRST_DRAFT - (i - 1))
            samples = self.runner.decode(np.stack((slots, positions, tokens))[:, active])
            device_slots = arrays[0] if active.all() else self.runner.store.staging.upload(slots[active])
            self.drafts[i].index_copy_(0, device_slots, torch.as_tensor(samples))

    def _propose_on_host(
        self,
        counts: np.ndarray,
        slots: np.ndarray,
        ends: np.ndarray,
        index: np.ndarray,
        verification: Verification | None,
        accepted: Tensor | np.ndarray | None,
    ) -> None:
        """Do the same once the numbers of accepted tokens are known, without rows of rejected tokens and of those that
        were computed when they were proposed."""
        number, first = np.zeros(len(slots), dtype=np.int64), np.zeros(len(slots), dtype=np.int64)
        if verification is not None and accepted is not None:
            known = accepted.cpu().numpy() if isinstance(accepted, Tensor) else accepted
            number = np.where(index >= 0, known[index], 0)
            computed = np.where(verification.drafts[index, 0] <= FIRST_DRAFT, self.num_proposed[slots] - 1, 0)
            first = np.minimum(number, np.maximum(computed, 0))
        of, row = split_slices(number - first + 1)
        row += first[of]
        tokens = np.where(row < number[of], FIRST_DRAFT - row, LAST_SAMPLED)
        samples = self.runner.decode(np.stack((slots[of], ends[of] + row, tokens)))
        self._set_drafts(0, slots, samples[(number - first + 1).cumsum() - 1])
        columns = np.stack((slots, ends + number + 1, np.full(len(slots), FIRST_DRAFT)))
        for i in range(1, int(counts.max())):
            active = counts > i
            self._set_drafts(i, slots[active], self.runner.decode(columns[:, active]))
            columns += np.array([[0], [1], [-1]])

    def _set_drafts(self, i: int, slots: np.ndarray, tokens: Tensor | np.ndarray) -> None:
        index = self.runner.store.staging.upload(slots)
        self.drafts[i].index_copy_(0, index, torch.as_tensor(tokens))

    def copy_to_host(self) -> HostDrafts:
        """Enqueue a copy of `drafts` to the host."""
        if self.drafts.device.type == "cpu":
            return HostDrafts(self.drafts, None)
        pinned = torch.empty(self.drafts.shape, dtype=self.drafts.dtype, pin_memory=True)
        pinned.copy_(self.drafts, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return HostDrafts(pinned, ready)

    def _compute_known(self, fixed: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> None:
        """Compute known tokens, of prompts too. Samples are not used."""
        row_counts = np.where(lengths <= MAX_SPLIT_TOKENS, lengths, 1)
        of, number = split_slices(row_counts)
        rows, row_lengths = fixed[:, of], np.where(row_counts[of] > 1, 1, lengths[of])
        rows[2] += number
        if (row_lengths == 1).all():
            self.runner.decode(np.stack((*rows[1:], tokens)))
            return
        rows[0] = 0
        rows[0, -1] = 1  # graphs of steps with prompts have at least one sample
        none = np.zeros(len(of), dtype=np.int64)
        self.runner.launch(SeqSlices.from_arrays(rows, row_lengths, tokens, none, none[:0]))
