"""The inputs of one step: all rows' tokens concatenated as one sequence (PagedAttention §4.3), without padding."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import Batch, to_device
from quire.plan import LAST, Row
from quire.runner.store import Store


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
    ends = np.array([offsets[i] + lengths[i] - 1 for i, row in enumerate(rows) if row.sample], dtype=np.int64)
    unseen = bool((inputs[0] == LAST).any())
    tokens, positions, token_slots = to_device(inputs, store.device)
    if unseen:
        tokens = torch.where(tokens == LAST, last[token_slots], tokens)
    size = store.geometry.groups[0].page_tokens
    write_pages = store.tables[:, token_slots, torch.div(positions, size, rounding_mode="floor")]
    return Batch(
        tokens, positions, token_slots, write_pages, positions % size, to_device(ends, store.device),
        slots, starts, lengths, offsets, store.tables, store.host_tables, store.caches,
    )  # fmt: skip
