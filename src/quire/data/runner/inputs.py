"""The inputs of one step: all rows' tokens concatenated as one sequence (PagedAttention §4.3), without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.data.kernels.batch import Batch
from quire.data.runner.store import Store
from quire.vocabulary.plan import LAST, Row
from quire.vocabulary.rows import Rows


class Flat(NamedTuple):
    """A step's rows as int64 arrays. `inputs` [3, T]: each token, its position, its slot. Of each row [R]: `slots`,
    `starts`, `lengths`, and `offsets`, its first token. `asked` [S]: the rows that sample; `ends` [S]: their last
    tokens."""

    inputs: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    asked: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Flat:
        rows = Rows.of(rows)
        samples, slots, starts = (numbers := rows.array())[: 3 * len(rows)].reshape(3, -1)
        lengths = rows.lengths
        offsets = np.cumsum(lengths) - lengths
        total = int(lengths.sum())
        inputs = np.empty((3, total), dtype=np.int64)
        inputs[0] = numbers[rows.tokens.first : rows.tokens.last]
        inputs[1] = np.arange(total) - np.repeat(offsets - starts, lengths)
        inputs[2] = np.repeat(slots, lengths)
        asked = np.flatnonzero(samples)
        return cls(inputs, slots, starts, lengths, offsets, asked, (offsets + lengths - 1)[asked])


def build_batch(rows: Sequence[Row], store: Store, last: Tensor) -> Batch:
    """The batch of a plan's rows. `last` [slots] holds each slot's most recent sample, where LAST resolves."""
    return batch_of(Flat.of(rows), store, last)


def batch_of(flat: Flat, store: Store, last: Tensor, whole: np.ndarray | None = None) -> Batch:
    """The same of rows that are flat already. `whole`: see Batch."""
    unseen = bool((flat.inputs[0] == LAST).any())
    there, ends = store.staging.upload_all([flat.inputs, flat.ends])
    tokens, positions, token_slots = there
    if unseen:
        tokens = torch.where(tokens == LAST, last[token_slots], tokens)
    return Batch(
        tokens, positions, token_slots, ends, flat.slots, flat.starts, flat.lengths, flat.offsets, flat.asked,
        store.tables, None if store.prompts is None else store.prompts.of(flat.slots, token_slots),
        whole,
    )  # fmt: skip
