"""The inputs of one step: the tokens of all slices, concatenated without padding (PagedAttention §4.3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.forward_batch import ForwardBatch
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


def build_flat_batch(
    flat_inputs: FlatInputs, store: Store, last_sampled: Tensor, bidirectional_rows: np.ndarray | None = None
) -> ForwardBatch:
    """Return the batch of flat inputs. `last_sampled` [slots] has each slot's latest sample, for LAST_SAMPLED.
    `bidirectional_rows`: see ForwardBatch."""
    has_last_sampled = bool((flat_inputs.token_columns[0] == LAST_SAMPLED).any())
    columns, ends = store.staging.upload_all([flat_inputs.token_columns, flat_inputs.logits_indices])
    tokens, positions, token_slots = columns
    prompt_lens = None
    if store.prompt_lengths is not None:
        prompt_lens = store.prompt_lengths.gather(flat_inputs.slots, token_slots)
    if has_last_sampled:
        tokens = torch.where(tokens == LAST_SAMPLED, last_sampled[token_slots], tokens)
    return ForwardBatch(
        tokens, positions, token_slots, ends, flat_inputs.slots, flat_inputs.starts, flat_inputs.lengths,
        flat_inputs.offsets, flat_inputs.sampled_rows, store.tables, prompt_lens, bidirectional_rows,
    )  # fmt: skip
