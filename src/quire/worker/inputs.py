"""The inputs of one step: all rows' tokens concatenated as one sequence (PagedAttention §4.3), without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.forward_batch import ForwardBatch
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import LAST_SAMPLED, SeqSlice
from quire.worker.store import Store


class FlatInputs(NamedTuple):
    """A step's rows as int64 arrays. `token_columns` [3, T]: each token, its position, its slot. Of each row [R]:
    `slots`, `starts`, `lengths`, and `offsets`, its first token. `sampled_rows` [S]: the rows that sample;
    `logits_indices` [S]: their last tokens."""

    token_columns: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    sampled_rows: np.ndarray
    logits_indices: np.ndarray

    @classmethod
    def from_slices(cls, slices: Sequence[SeqSlice]) -> FlatInputs:
        slices = SeqSlices.from_slices(slices)
        samples, slots, starts = (numbers := slices.to_array())[: 3 * len(slices)].reshape(3, -1)
        lengths = slices.token_counts
        offsets = np.cumsum(lengths) - lengths
        total = int(lengths.sum())
        inputs = np.empty((3, total), dtype=np.int64)
        inputs[0] = numbers[slices.tokens.start : slices.tokens.end]
        inputs[1] = np.arange(total) - np.repeat(offsets - starts, lengths)
        inputs[2] = np.repeat(slots, lengths)
        asked = np.flatnonzero(samples)
        return cls(inputs, slots, starts, lengths, offsets, asked, (offsets + lengths - 1)[asked])


def build_batch(slices: Sequence[SeqSlice], store: Store, last_sampled: Tensor) -> ForwardBatch:
    """The batch of a plan's rows. `last_sampled` [slots] holds each slot's most recent sample, where LAST resolves."""
    return build_flat_batch(FlatInputs.from_slices(slices), store, last_sampled)


def build_flat_batch(
    flat_inputs: FlatInputs, store: Store, last_sampled: Tensor, bidirectional_rows: np.ndarray | None = None
) -> ForwardBatch:
    """The same of rows that are flat already. `bidirectional_rows`: see Batch."""
    unseen = bool((flat_inputs.token_columns[0] == LAST_SAMPLED).any())
    there, ends = store.staging.upload_all([flat_inputs.token_columns, flat_inputs.logits_indices])
    tokens, positions, token_slots = there
    if unseen:
        tokens = torch.where(tokens == LAST_SAMPLED, last_sampled[token_slots], tokens)
    return ForwardBatch(
        tokens, positions, token_slots, ends, flat_inputs.slots, flat_inputs.starts, flat_inputs.lengths,
        flat_inputs.offsets, flat_inputs.sampled_rows,
        store.tables, None if store.prompt_lengths is None else store.prompt_lengths.gather(flat_inputs.slots,
        token_slots),
        bidirectional_rows,
    )  # fmt: skip
