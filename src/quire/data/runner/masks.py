"""What rows may draw in one step, where grammars say so: bits of the plan, applied to all rows in one launch.

A step without masks costs nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.data.kernels.cpu.rows import take
from quire.data.runner.staging import Staging
from quire.vocabulary.plan import Mask


class Masks:
    """Those of one step, for `slots` slots over a vocabulary of `vocab_size`."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.words = -(-vocab_size // 32)
        self.some = False
        self._place = np.full(slots, -1, dtype=np.int64)  # by slot: the slot, if it has a mask in this step
        self._bits = np.zeros((slots, self.words), dtype=np.int32)  # by slot; those that nobody touches take no memory
        self._kept: list[bytes | None] = [None] * slots  # what is in `_bits`: in many rows what it was a step ago
        self._staging, self._side = None, None
        if device.type == "cuda":  # bits are on their way while the logits are computed
            self._staging, self._side = Staging(device, size=1 << 21), torch.cuda.Stream(device)
        self._tape: np.ndarray | None = None  # the slots of a tape's rows, as far as they have masks

    def take(self, masks: Sequence[Mask]) -> None:
        """The masks of a step, before its rows are sampled; they hold until the next step's."""
        if self.some:
            self._place.fill(-1)
        self.some = bool(masks)
        if not masks:
            return
        kept = self._kept
        slots = [mask[0] for mask in masks]
        self._place[slots] = slots
        if not (new := [mask for mask in masks if kept[mask[0]] is not mask[1]]):
            return
        slots, bits = map(list, zip(*new))
        assert {*map(len, bits)} == {4 * self.words}, f"a mask doesn't have {4 * self.words} bytes"
        self._bits[slots] = np.frombuffer(b"".join(bits), dtype="<i4").reshape(-1, self.words)
        for slot, one in new:
            kept[slot] = one

    def of(self, slots: Sequence[int] | np.ndarray) -> np.ndarray:
        """Which of these slots have a mask."""
        found: np.ndarray = self._place[slots] >= 0
        return found

    def apply(self, logits: Tensor, slots: np.ndarray) -> None:
        """Put -inf in logits [R, V] where the mask of the row's slot has no bit; -1 is a slot without one."""
        places = np.where(slots < 0, -1, self._place[slots])
        if not (places >= 0).any():
            return
        if self._staging is not None:
            from quire.data.kernels.triton.masking import mask_logits

            with torch.cuda.stream(self._side):
                rows = np.flatnonzero(places >= 0)
                bits, places[rows] = self._bits[places[rows]], np.arange(len(rows))
                sent = self._staging.upload_all([places, bits])
            now = torch.cuda.current_stream(self.device)
            now.wait_stream(self._side)
            sent[0].record_stream(now)  # both are of one piece of memory
            mask_logits(logits, *sent)
        elif take(self.device, logits.dtype) and logits.stride(1) == 1:
            from quire.data.kernels.cpu import masking

            masking.mask_logits(logits, torch.from_numpy(places), torch.from_numpy(self._bits))
        else:
            rows = np.flatnonzero(places >= 0)
            bits = np.unpackbits(self._bits[places[rows]].view(np.uint8), axis=1, bitorder="little")
            barred, index = torch.from_numpy(bits[:, : self.vocab_size] == 0), torch.from_numpy(rows)
            logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(barred, -torch.inf))

    def tail(self, after: Any, largest: int) -> Any:
        """A tape's tail that masks its rows, up to `largest` of them, and goes on as `after`. `fill` comes before."""
        from quire.data.kernels.cpu import masking

        if self._tape is None or len(self._tape) != largest:  # all tails of a tape have one
            self._tape = np.full(largest, -1, dtype=np.int64)
        places, bits = torch.from_numpy(self._tape), torch.from_numpy(self._bits)

        def tail(logits: Tensor, slots: Tensor) -> Any:
            masking.mask_logits(logits, places[: len(logits)], bits)
            return after(logits, slots)

        return tail

    def fill(self, slots: np.ndarray) -> None:
        """What the tail reads at its next replay, for rows of these slots; padding has no mask."""
        assert self._tape is not None, "there is a tail"
        self._tape[: len(slots)], self._tape[len(slots) :] = self._place[slots], -1
