"""The draft model's part of a step, after the samples of the model: it computes known tokens of some slots, then those
that the step has sampled and accepted, and proposes tokens after them, which the slots' next slices verify. A
speculation head instead computes all tokens of the slots' slices, from their hidden states, before it proposes.

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

from quire.models.hidden_states import HiddenStates
from quire.protocol.device_params import DeviceSamplingParams
from quire.protocol.seq_slices import SeqSlices, split_slices
from quire.protocol.step_plan import FIRST_DRAFT, LAST_SAMPLED, MAX_SPLIT_TOKENS, SlotInit, StepPlan
from quire.worker.inputs import FlatInputs
from quire.worker.sampler import Sampler
from quire.worker.store import Store
from quire.worker.verification import Verification


class DraftRunner(Protocol):
    """The parts of a ModelRunner of the draft model that the drafter uses."""

    model: Any
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

    def propose(self, plan: StepPlan, verification: Verification | None, accepted: Tensor | np.ndarray | None) -> None:
        """Enqueue the computation of a plan's draft slices, after the step with `verification`, if it had draft tokens,
        of which it `accepted` [V] ones."""
        slices = SeqSlices.from_slices(plan.draft_slices)
        numbers, lengths = slices.to_array(), slices.token_counts
        fixed = numbers[: 3 * len(slices)].reshape(3, -1)
        if lengths.any():
            self._compute_known(fixed, lengths, numbers[slices.tokens.start : slices.tokens.end])
        proposing = np.flatnonzero(fixed[0])
        counts, slots, ends = fixed[0, proposing], fixed[1, proposing], (fixed[2] + lengths)[proposing]
        if len(proposing):
            widths, index = np.ones(len(slots), dtype=np.int64), self._verified_index(slots, verification)
            if verification is not None:
                widths[index >= 0] += verification.num_drafts[index[index >= 0]]
            if self.runner.can_replay(int(widths.sum())):
                self._propose_on_device(counts, slots, ends, widths, index, accepted)
            else:
                self._propose_on_host(counts, slots, ends, index, verification, accepted)
        self.num_proposed[fixed[1]] = fixed[0]

    def _verified_index(self, slots: np.ndarray, verification: Verification | None) -> np.ndarray:
        """Return the index of each slot's slice in a verification; -1 if there is none."""
        if verification is None:
            return np.full(len(slots), -1)
        return verification.index_of(slots, len(self.num_proposed))

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
        of, number = split_slices(widths)
        tokens = np.where(number < widths[of] - 1, FIRST_DRAFT - number, LAST_SAMPLED)
        samples = self.runner.decode(np.stack((slots[of], ends[of] + number, tokens)))
        uploaded = self._take_proposals(samples, slots, widths.cumsum() - widths, index, ends, accepted)
        self._continue(counts, slots, None, uploaded[0])

    def _take_proposals(
        self,
        samples: Tensor | np.ndarray,
        slots: np.ndarray,
        first_samples: np.ndarray,
        index: np.ndarray,
        ends: np.ndarray,
        accepted: Tensor | np.ndarray | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Set the first proposals and `base_positions` of `slots` from the samples of a first pass, whose rows end at
        positions from `ends` on. Return slots, first samples and indices on the device."""
        from quire.kernels.triton.verification import take_proposals

        assert not isinstance(accepted, np.ndarray), "graphs take positions that only the device has"
        arrays = [slots, first_samples, index, ends]
        on_device, firsts, indices, device_ends = self.runner.store.staging.upload_all(arrays)
        take_proposals(
            torch.as_tensor(samples), accepted, on_device, firsts, indices, device_ends, self.sampled_tokens,
            self.base_positions,
        )  # fmt: skip
        return on_device, firsts, indices

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
            number = np.where(index >= 0, _on_host(accepted)[index], 0)
            computed = np.where(verification.drafts[index, 0] <= FIRST_DRAFT, self.num_proposed[slots] - 1, 0)
            first = np.minimum(number, np.maximum(computed, 0))
        of, row = split_slices(number - first + 1)
        row += first[of]
        tokens = np.where(row < number[of], FIRST_DRAFT - row, LAST_SAMPLED)
        samples = self.runner.decode(np.stack((slots[of], ends[of] + row, tokens)))
        self._set_drafts(0, slots, samples[(number - first + 1).cumsum() - 1])
        self._continue(counts, slots, ends + number + 1)

    def _continue(
        self, counts: np.ndarray, slots: np.ndarray, next_positions: np.ndarray | None, uploaded: Tensor | None = None
    ) -> None:
        """Propose the tokens after the first ones, `counts` [S] in all. `next_positions` [S] are those of the rows
        that read the first ones; with None only the device has them. `uploaded`: the slots on the device, if they are
        there."""
        for i in range(1, int(counts.max())):
            active = counts > i
            if not active.all():
                self._keep_active(active)
                counts, slots, uploaded = counts[active], slots[active], None
                next_positions = None if next_positions is None else next_positions[active]
            positions = np.full(len(slots), -i) if next_positions is None else next_positions + (i - 1)
            columns = np.stack((slots, positions, np.full(len(slots), FIRST_DRAFT - (i - 1))))
            self._set_drafts(i, slots, self.runner.decode(columns), uploaded)

    def _keep_active(self, active: np.ndarray) -> None:
        """Prepare a pass of fewer rows than the one before: the `active` [S] ones."""

    def _set_drafts(
        self, i: int, slots: np.ndarray, tokens: Tensor | np.ndarray, uploaded: Tensor | None = None
    ) -> None:
        index = self.runner.store.staging.upload(slots) if uploaded is None else uploaded
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


class FirstPass(NamedTuple):
    """The rows of a head over the slices of a step. The rows of one slice follow one another."""

    inputs: FlatInputs
    tokens: np.ndarray  # [T]: the token after each token of the step
    number: np.ndarray  # [R]: the number of a row in its slice, from 0
    kept: np.ndarray  # [R]: rows that the head runs
    sampled: np.ndarray  # [R]: rows whose samples are the first proposals

    @classmethod
    def from_inputs(cls, inputs: FlatInputs, next_tokens: np.ndarray, last_rows: np.ndarray) -> FirstPass:
        """Keep the rows of each slot up to number `last_rows` [slots], and sample those whose next token is sampled or
        a draft token. `next_tokens` [slots]: the token after the slot's slice."""
        widths = np.diff(_first_rows(inputs), append=len(inputs.slots))
        of, number = split_slices(widths)
        is_last = number == widths[of] - 1
        after_rows = np.where(is_last, next_tokens[inputs.slots], FIRST_DRAFT - number)
        tokens = np.append(inputs.token_columns[0, 1:], 0)
        tokens[inputs.offsets + inputs.lengths - 1] = after_rows
        kept = number <= last_rows[inputs.slots]
        return cls(inputs, tokens, number, kept, kept & (after_rows < 0))

    def first_samples(self, num_slots: int) -> np.ndarray:
        """Return by slot the index of the first sample of its slice, among all samples."""
        indices, rows = np.zeros(num_slots, dtype=np.int64), _first_rows(self.inputs)
        indices[self.inputs.slots[rows]] = (self.sampled.cumsum() - self.sampled)[rows]
        return indices


class HeadDrafter(Drafter):
    """Proposes tokens by a speculation head, which reads the `hidden_states` that the model left in the step. Each row
    needs the token after it: the next one of the slice, a sample, or where the step samples none the only token of the
    slot's draft slice."""

    def __init__(
        self, runner: DraftRunner, sampled_tokens: Tensor, base_positions: Tensor, hidden_states: HiddenStates
    ) -> None:
        super().__init__(runner, sampled_tokens, base_positions)
        self.hidden_states = hidden_states

    def warm_up(self, row_counts: Sequence[int]) -> None:
        """Compile the kernels of `start_pass` for these numbers of rows. They run outside graphs."""
        for count in row_counts:
            self.runner.model.start_pass(self.hidden_states.rows(count))

    def propose(self, plan: StepPlan, verification: Verification | None, accepted: Tensor | np.ndarray | None) -> None:
        """See Drafter."""
        drafted = SeqSlices.from_slices(plan.draft_slices)
        numbers, given = drafted.to_array(), drafted.token_counts
        counts, slots, ends = numbers[: 3 * len(drafted)].reshape(3, -1)
        index = self._verified_index(slots, verification)
        inputs = FlatInputs.from_slices(plan.slices if verification is None else verification.rows)
        num_slots, on_device = len(self.num_proposed), not isinstance(accepted, np.ndarray)
        if counts.any() and not self.runner.can_replay(len(inputs.slots)):
            on_device = False
        num_accepted = 0 if on_device or accepted is None else np.where(index >= 0, _on_host(accepted)[index], 0)

        next_tokens, last_rows = np.full(num_slots, LAST_SAMPLED), np.full(num_slots, -1)  # of slices, by slot
        next_tokens[slots[given > 0]] = numbers[drafted.tokens.start : drafted.tokens.end]
        last_rows[slots] = len(inputs.slots) if on_device else num_accepted
        first_pass = FirstPass.from_inputs(inputs, next_tokens, last_rows)
        if not counts.any():
            first_pass.sampled[:] = False
        elif not on_device:
            first_pass.sampled[first_pass.number != last_rows[inputs.slots]] = False
        firsts = first_pass.first_samples(num_slots)[slots]
        samples = self._run_first_pass(first_pass)

        proposing = counts > 0
        if not proposing.any():
            return
        counts, slots, ends, index, firsts = (x[proposing] for x in (counts, slots, ends, index, firsts))
        if on_device:
            device_slots, rows, verified = self._take_proposals(samples, slots, firsts, index, ends - 1, accepted)
            if isinstance(accepted, Tensor):
                rows = rows + torch.where(verified >= 0, accepted[verified], 0)
            self.runner.model.keep_rows(rows)
            self._continue(counts, slots, None, device_slots)
        else:
            self._set_drafts(0, slots, samples[firsts])
            self.runner.model.keep_rows(self.runner.store.staging.upload(firsts))
            self._continue(counts, slots, ends + last_rows[slots])

    def _run_first_pass(self, first_pass: FirstPass) -> Tensor | np.ndarray:
        """Run the `kept` rows of a first pass. Return the samples of the `sampled` ones."""
        inputs, tokens, kept, sampled = first_pass.inputs, first_pass.tokens, first_pass.kept, first_pass.sampled
        if not kept.any():
            return np.zeros(0, dtype=np.int64)
        if not sampled.any():
            sampled[np.flatnonzero(kept)[-1]] = True  # graphs have at least one sample
        token_rows = np.repeat(kept, inputs.lengths)
        states = self.hidden_states.rows(len(tokens))
        if not kept.all():
            states = self.hidden_states.select(self.runner.store.staging.upload(np.flatnonzero(token_rows)))
        self.runner.model.start_pass(states)
        slots, starts, lengths, samples = (x[kept] for x in (inputs.slots, inputs.starts, inputs.lengths, sampled))
        if samples.all() and (lengths == 1).all():
            return self.runner.decode(np.stack((slots, starts, tokens[token_rows])))
        none = np.zeros(len(slots), dtype=np.int64)
        rows = np.stack((samples.astype(np.int64), slots, starts))
        taken: Tensor | np.ndarray = self.runner.launch(
            SeqSlices.from_arrays(rows, lengths, tokens[token_rows], none, none[:0])
        ).samples.tokens
        return taken

    def _keep_active(self, active: np.ndarray) -> None:
        self.runner.model.keep_rows(self.runner.store.staging.upload(np.flatnonzero(active)))


def _on_host(counts: Tensor | np.ndarray) -> np.ndarray:
    return counts.cpu().numpy() if isinstance(counts, Tensor) else counts


def _first_rows(inputs: FlatInputs) -> np.ndarray:
    """Return the indices of the first row of each slice."""
    return np.flatnonzero(np.diff(inputs.slots, prepend=-1))
