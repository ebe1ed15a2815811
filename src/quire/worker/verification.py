"""Verification of draft tokens. A slice with k of them is computed as rows of one sample each: its own tokens, then
each draft token in a row of one token at its position. A layer writes the keys and values of all rows before any of
them attends, so each row samples what a step of its own would have sampled. Draft tokens are accepted as far as they
are equal to the samples before them ("drafter-invariant" speculative decoding, Daliri et al. 2024). To layers with
running states a slice is one row, whose states are advanced afterwards (quire.worker.state_replay).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from torch import Tensor

from quire.kernels.forward_batch import StateRows
from quire.protocol.columns import LENGTHS_ONE, LENGTHS_ZERO
from quire.protocol.seeds import splitmix64
from quire.protocol.seq_slices import EMPTY_COLUMN, RaggedColumn, SeqSlices, split_slices
from quire.protocol.step_plan import LAST_SAMPLED, SliceResult
from quire.worker.staging_buffer import StagingBuffer

NO_TOKEN = -1


class Verification(NamedTuple):
    """The rows of a step, V slices of which have draft tokens, at most K each. Arrays are int64."""

    rows: SeqSlices
    draft_counts: list[int]  # of each slice that samples
    slots: np.ndarray  # [V]
    first_samples: np.ndarray  # [V]: index, among all samples of the step, of the slice's first one
    positions: np.ndarray  # [V]: that of the slice's first draft token
    drafts: np.ndarray  # [V, K]: tokens, FIRST_DRAFT - i, or NO_TOKEN as padding
    slices: SeqSlices  # that the rows are made of

    @classmethod
    def from_slices(cls, slices: SeqSlices) -> Verification:
        """Return the verification of slices, some of which have draft tokens. These have one sample each."""
        numbers = slices.to_array()
        fixed = numbers[: 3 * len(slices)].reshape(3, -1)
        lengths, counts, scores = slices.token_counts, slices.lengths(slices.draft_tokens), slices.score_tokens
        is_decode = slices.tokens.length_kind == LENGTHS_ONE and scores.length_kind == LENGTHS_ZERO
        if is_decode and counts.min() == counts.max():
            return cls._from_equal_slices(slices, fixed, numbers)
        verified = np.flatnonzero(counts)
        assert (fixed[0, verified] == 1).all(), "a slice with draft tokens has one sample"
        of, number = split_slices(1 + counts)  # row 0 of a slice has its own tokens, row i its i-th draft token
        first_rows = np.flatnonzero(number == 0)
        rows = fixed[:, of]
        rows[2] += np.where(number > 0, lengths[of] + number - 1, 0)
        token_slices, token_numbers = split_slices(lengths + counts)
        is_draft = token_numbers >= lengths[token_slices]
        drafts = numbers[slices.draft_tokens.start : slices.draft_tokens.end]
        tokens = np.empty(len(is_draft), dtype=np.int64)
        tokens[is_draft], tokens[~is_draft] = drafts, numbers[slices.tokens.start : slices.tokens.end]
        padded = np.full((len(verified), counts.max()), NO_TOKEN)
        padded[np.arange(counts.max()) < counts[verified, None]] = drafts
        return cls(
            SeqSlices.from_arrays(
                rows, np.where(number > 0, 1, lengths[of]), tokens,
                np.where(number > 0, 0, slices.lengths(scores)[of]), numbers[scores.start : scores.end],
            ),
            counts[fixed[0] > 0].tolist(),
            fixed[1, verified],
            (np.cumsum(rows[0]) - rows[0])[first_rows[verified]],
            fixed[2, verified] + lengths[verified],
            padded,
            slices,
        )  # fmt: skip

    @classmethod
    def _from_equal_slices(cls, slices: SeqSlices, fixed: np.ndarray, numbers: np.ndarray) -> Verification:
        """Return the same, faster, for slices that have one token and equally many draft tokens each."""
        count = len(slices)
        drafts = numbers[slices.draft_tokens.start : slices.draft_tokens.end].reshape(count, -1)
        width = 1 + drafts.shape[1]
        rows = np.empty((4, count, width), dtype=np.int64)
        rows[:3], rows[2] = fixed[:, :, None], fixed[2, :, None] + np.arange(width)
        rows[3, :, 0], rows[3, :, 1:] = numbers[slices.tokens.start : slices.tokens.end], drafts
        first = np.arange(count) * width
        tokens = RaggedColumn(LENGTHS_ONE, 3 * rows[0].size, 3 * rows[0].size, rows.size)
        expanded = SeqSlices(rows.reshape(-1), rows[0].size, tokens, EMPTY_COLUMN, EMPTY_COLUMN)
        return cls(expanded, [width - 1] * count, fixed[1], first, fixed[2] + 1, drafts, slices)

    def state_rows(self) -> StateRows:
        """Return the rows of layers with states: each slice is one, since its states follow from one another."""
        slices, counts = self.slices, self.slices.lengths(self.slices.draft_tokens)
        _, slots, starts = slices.to_array()[: 3 * len(slices)].reshape(3, -1)
        lengths = slices.token_counts + counts
        rows = StateRows.without_drafts(slots, starts, lengths, np.cumsum(lengths) - lengths)
        rows.columns[4] = counts > 0
        return rows._replace(saved_tokens=np.flatnonzero(np.repeat(counts > 0, lengths)))

    @property
    def num_drafts(self) -> np.ndarray:
        """The number of draft tokens of each slice that has some [V]."""
        counts: np.ndarray = (self.drafts != NO_TOKEN).sum(1)
        return counts

    def index_of(self, slots: np.ndarray, num_slots: int) -> np.ndarray:
        """Return the index of the slice with draft tokens of each of `slots`, -1 if it has none."""
        index = np.full(num_slots, -1)
        index[self.slots] = np.arange(len(self.slots))
        found: np.ndarray = index[slots]
        return found

    def accept(
        self, tokens: Tensor, sampled_tokens: Tensor, staging: StagingBuffer, synthetic: float | None = None
    ) -> Tensor:
        """Return the number of accepted draft tokens of each slice [V], on the device, from all samples of the step
        [D]. Set the slots' LAST_SAMPLED to the sample after these, and their draft tokens to the samples at their
        positions: the accepted ones stay as they are. `sampled_tokens`: see resolve_tokens. `synthetic`: see
        Experiment.synthetic_acceptance."""
        if synthetic is not None:
            counts = self._agree_synthetically(synthetic).cumprod(1).sum(1)
            indices = self._sample_indices(len(tokens))
            slots, first, accepted, index = staging.upload_all([self.slots, self.first_samples, counts, indices])
            sampled_tokens[0].index_copy_(0, slots, tokens[first + accepted])
            if len(sampled_tokens) > 1:
                sampled_tokens[1 : 1 + indices.shape[1]].index_copy_(1, slots, tokens[index].T)
            return accepted
        slots, first, drafts = staging.upload_all([self.slots, self.first_samples, self.drafts])
        from quire.kernels.triton.verification import accept_drafts

        return accept_drafts(tokens, sampled_tokens, slots, first, drafts)

    def accept_on_host(self, tokens: np.ndarray, sampled_tokens: np.ndarray, synthetic: float | None) -> np.ndarray:
        """Do the same on a CPU, with arrays."""
        drafts = self.drafts
        if drafts.min() < 0:
            drafts = np.where(
                drafts < 0, sampled_tokens[np.maximum(LAST_SAMPLED - drafts, 0), self.slots[:, None]], drafts
            )
        samples = tokens[self._sample_indices(len(tokens))]
        agrees = (samples == drafts) & (self.drafts != NO_TOKEN)
        if synthetic is not None:
            agrees = self._agree_synthetically(synthetic)
        accepted: np.ndarray = agrees.cumprod(1).sum(1)
        sampled_tokens[0, self.slots] = tokens[self.first_samples + accepted]
        if len(sampled_tokens) > 1:
            sampled_tokens[1 : 1 + samples.shape[1], self.slots] = samples.T
        return accepted

    def _sample_indices(self, count: int) -> np.ndarray:
        """Return the indices, among `count` samples, of those at the positions of draft tokens [V, K]; of padding any
        ones."""
        return np.minimum(self.first_samples[:, None] + np.arange(self.drafts.shape[1]), count - 1)

    def _agree_synthetically(self, probability: float) -> np.ndarray:
        """Return which draft tokens [V, K] count as right, each with `probability`, by its slot and position."""
        positions = self.positions[:, None] + np.arange(self.drafts.shape[1])
        bits = splitmix64(splitmix64(self.slots.astype(np.uint64))[:, None] + positions.astype(np.uint64))
        agrees: np.ndarray = (bits >> np.uint64(11) < probability * 2.0**53) & (self.drafts != NO_TOKEN)
        return agrees

    def merge(self, results: Sequence[SliceResult], accepted: Sequence[int]) -> list[SliceResult]:
        """Return the results of the slices that sample, from those of the rows that do and the accepted tokens of each
        slice with draft tokens."""
        merged, rows, next_accepted = [], iter(results), iter(accepted)
        for count in self.draft_counts:
            of_slice = list(islice(rows, 1 + count))
            merged.append(_join(of_slice[: 1 + next(next_accepted)]) if count else of_slice[0])
        return merged


def _join(results: Sequence[SliceResult]) -> SliceResult:
    """Return one result with the tokens of all up to the first one with an error, which is then the last token's."""
    count = next((i for i, result in enumerate(results, 1) if result.error), len(results))
    if count == 1:
        return results[0]
    tokens = tuple([token for result in results[:count] for token in result.tokens])
    logprobs = tuple([details for result in results[:count] for details in result.top_logprobs])
    return SliceResult(tokens, logprobs, error=results[count - 1].error)
