"""What rows may draw in one step, where grammars say so: bits of the plan, applied to all rows in one launch.

A step without masks costs nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.data.runner.staging import Staging
from quire.vocabulary.plan import Mask


class Masks:
    """Those of one step, for `slots` slots over a vocabulary of `vocab_size`."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.words = -(-vocab_size // 32)
        self.some = False
        self._place = np.full(slots, -1, dtype=np.int64)  # by slot: which of `_bits` is its own
        self._bits = np.zeros((0, self.words), dtype=np.int32)
        self._staging = Staging(device) if device.type == "cuda" else None

    def take(self, masks: Sequence[Mask]) -> None:
        """The masks of a step, before its rows are sampled; they hold until the next step's."""
        if self.some:
            self._place.fill(-1)
        self.some = bool(masks)
        if not masks:
            return
        size = 4 * self.words
        assert all(len(mask.allowed) == size for mask in masks), f"a mask doesn't have {size} bytes"
        self._bits = np.frombuffer(b"".join([mask.allowed for mask in masks]), dtype="<i4").reshape(-1, self.words)
        self._place[[mask.slot for mask in masks]] = np.arange(len(masks))

    def of(self, slots: Sequence[int] | np.ndarray) -> np.ndarray:
        """Which of these slots have a mask."""
        found: np.ndarray = self._place[slots] >= 0
        return found

    def apply(self, logits: Tensor, slots: np.ndarray) -> None:
        """Put -inf in logits [R, V] where the mask of the row's slot has no bit; -1 is a slot without one."""
        places = np.where(slots < 0, -1, self._place[slots])
        rows = np.flatnonzero(places >= 0)
        if not len(rows):
            return
        if self._staging is not None:
            from quire.data.kernels.triton.masking import mask_logits

            index, bits = self._staging.upload_all([places, self._bits])
            mask_logits(logits, index, bits)
            return
        bits = np.unpackbits(self._bits[places[rows]].view(np.uint8), axis=1, bitorder="little")[:, : self.vocab_size]
        barred = torch.from_numpy(bits == 0)
        if len(rows) == len(logits):
            logits.masked_fill_(barred, -torch.inf)
        else:
            index = torch.from_numpy(rows)
            logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(barred, -torch.inf))
