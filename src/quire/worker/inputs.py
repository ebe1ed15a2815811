"""The inputs of one step: the tokens of all slices, concatenated without padding (PagedAttention §4.3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.forward_batch import ForwardBatch, StateRows
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import LAST_SAMPLED, SeqSlice
from quire.worker.store import Store


class FlatInputs(NamedTuple):
    """A step of R rows and T tokens, of which S rows sample, as int64 arrays."""

    token_columns: np.ndarray  # [3, T]: tokens, positions, slots
    slots: np.ndarray  # [R]
    starts: np.ndarray  # [R]: position of the first token
    lengths: np.ndarray  # [R]
    offsets: np.ndarray  # [R]: index of the first token
    sampled_rows: np.ndarray  # [S]: the rows that sample
    logits_indices: np.ndarray  # [S]: index of their last tokens
    state_rows: StateRows | None = None  # the rows of layers with states, if these have others

    @classmethod
    def from_slices(cls, slices: Sequence[SeqSlice]) -> FlatInputs:
        slices = SeqSlices.from_slices(slices)
        values = slices.to_array()
        samples, slots, starts = values[: 3 * len(slices)].reshape(3, -1)
        lengths = slices.token_counts
        offsets = np.cumsum(lengths) - lengths
        total = int(lengths.sum())
        inputs = np.empty((3, total), dtype=np.int64)
        inputs[0] = values[slices.tokens.start : slices.tokens.end]
        inputs[1] = np.arange(total) - np.repeat(offsets - starts, lengths)
        inputs[2] = np.repeat(slots, lengths)
        sampled = np.flatnonzero(samples)
        return cls(inputs, slots, starts, lengths, offsets, sampled, (offsets + lengths - 1)[sampled])

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Return the slot, start, length and offset of each row."""
        return zip(*(column.tolist() for column in (self.slots, self.starts, self.lengths, self.offsets)))


def resolve_tokens(tokens: Tensor, slots: Tensor, sampled_tokens: Tensor) -> Tensor:
    """Return `tokens` with those that only the device has: LAST_SAMPLED is entry [0, slot] of `sampled_tokens`
    [1 + D, slots], and FIRST_DRAFT - i entry [1 + i, slot]. `slots` is of the same shape, or can be broadcast to it."""
    if len(sampled_tokens) == 1:
        return torch.where(tokens == LAST_SAMPLED, sampled_tokens[0, slots], tokens)
    return torch.where(tokens < 0, sampled_tokens[(LAST_SAMPLED - tokens).clamp_(min=0), slots], tokens)


def resolve_positions(positions: Tensor, slots: Tensor, base_positions: Tensor | None) -> Tensor:
    """Return `positions` with those that only the device has: -1 - i is the i-th one, from 0, after `base_positions`
    [slots] of the slot."""
    if base_positions is None:
        return positions
    return torch.where(positions < 0, base_positions[slots] - 1 - positions, positions)


def build_flat_batch(
    flat_inputs: FlatInputs, store: Store, sampled_tokens: Tensor, bidirectional_rows: np.ndarray | None = None
) -> ForwardBatch:
    """Return the batch of flat inputs. `sampled_tokens`: see resolve_tokens. `bidirectional_rows`: see ForwardBatch."""
    needs_sampled = bool((flat_inputs.token_columns[0] < 0).any())
    columns, ends = store.staging.upload_all([flat_inputs.token_columns, flat_inputs.logits_indices])
    tokens, positions, token_slots = columns
    prompt_lens = None
    if store.prompt_lengths is not None:
        prompt_lens = store.prompt_lengths.gather(flat_inputs.slots, token_slots)
    if needs_sampled:
        tokens = resolve_tokens(tokens, token_slots, sampled_tokens)
    return ForwardBatch(
        tokens, positions, token_slots, ends, flat_inputs.slots, flat_inputs.starts, flat_inputs.lengths,
        flat_inputs.offsets, flat_inputs.sampled_rows, store.tables, prompt_lens, bidirectional_rows,
        state_rows=flat_inputs.state_rows,
    )  # fmt: skip
