"""The inputs of one step: all rows' tokens concatenated as one sequence (PagedAttention §4.3), without padding."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.data.kernels.batch import Batch
from quire.data.runner.store import Store
from quire.vocabulary.plan import LAST, Row


def build_batch(rows: tuple[Row, ...], store: Store, last: Tensor) -> Batch:
    """The batch of a plan's rows. `last` [slots] holds each slot's most recent sample, where LAST resolves."""
    slots = np.array([row.slot for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    lengths = np.array([len(row.tokens) for row in rows], dtype=np.int64)
    offsets = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    inputs = np.empty((3, total), dtype=np.int64)
    inputs[0] = [token for row in rows for token in row.tokens]
    inputs[1] = np.arange(total) - np.repeat(offsets - starts, lengths)
    inputs[2] = np.repeat(slots, lengths)
    asked = np.flatnonzero(np.array([row.sample for row in rows]))
    ends = (offsets + lengths - 1)[asked]
    unseen = bool((inputs[0] == LAST).any())
    there, on_device_ends = store.staging.upload_all([inputs, ends])
    tokens, positions, token_slots = there
    if unseen:
        tokens = torch.where(tokens == LAST, last[token_slots], tokens)
    return Batch(
        tokens, positions, token_slots, on_device_ends, slots, starts, lengths, offsets, asked, store.tables,
    )  # fmt: skip
