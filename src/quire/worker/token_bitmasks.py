"""What rows may draw in one step, where grammars say so: bits of the plan, applied to all rows in one launch.

A step without masks costs nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu.dispatch import has_kernels
from quire.protocol.step_plan import TokenBitmask
from quire.worker.staging_buffer import StagingBuffer


class TokenBitmasks:
    """Those of one step, for `slots` slots over a vocabulary of `vocab_size`."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.num_words = -(-vocab_size // 32)
        self.has_masks = False
        self._masked_slot = np.full(slots, -1, dtype=np.int64)  # by slot: the slot, if it has a mask in this step
        self._bits = np.zeros(
            (slots, self.num_words), dtype=np.int32
        )  # by slot; those that nobody touches take no memory
        self._last_bitmasks: list[bytes | None] = [
            None
        ] * slots  # what is in `_bits`: in many rows what it was a step ago
        self._staging, self._copy_stream = None, None
        if device.type == "cuda":  # bits are on their way while the logits are computed
            self._staging, self._copy_stream = StagingBuffer(device, segment_bytes=1 << 21), torch.cuda.Stream(device)
        self._epilogue_slots: np.ndarray | None = None  # the slots of a tape's rows, as far as they have masks

    def set_bitmasks(self, bitmasks: Sequence[TokenBitmask]) -> None:
        """The masks of a step, before its rows are sampled; they hold until the next step's."""
        if self.has_masks:
            self._masked_slot.fill(-1)
        self.has_masks = bool(bitmasks)
        if not bitmasks:
            return
        kept = self._last_bitmasks
        slots = [mask[0] for mask in bitmasks]
        self._masked_slot[slots] = slots
        if not (new := [mask for mask in bitmasks if kept[mask[0]] is not mask[1]]):
            return
        slots, bits = map(list, zip(*new))
        assert {*map(len, bits)} == {4 * self.num_words}, f"a mask doesn't have {4 * self.num_words} bytes"
        self._bits[slots] = np.frombuffer(b"".join(bits), dtype="<i4").reshape(-1, self.num_words)
        for slot, one in new:
            kept[slot] = one

    def is_masked(self, slots: Sequence[int] | np.ndarray) -> np.ndarray:
        """Which of these slots have a mask."""
        found: np.ndarray = self._masked_slot[slots] >= 0
        return found

    def apply(self, logits: Tensor, slots: np.ndarray) -> None:
        """Put -inf in logits [R, V] where the mask of the row's slot has no bit; -1 is a slot without one."""
        places = np.where(slots < 0, -1, self._masked_slot[slots])
        if not (places >= 0).any():
            return
        if self._staging is not None:
            from quire.kernels.triton.masking import mask_logits

            with torch.cuda.stream(self._copy_stream):
                rows = np.flatnonzero(places >= 0)
                bits, places[rows] = self._bits[places[rows]], np.arange(len(rows))
                sent = self._staging.upload_all([places, bits])
            now = torch.cuda.current_stream(self.device)
            now.wait_stream(self._copy_stream)
            sent[0].record_stream(now)  # both are of one piece of memory
            mask_logits(logits, *sent)
        elif has_kernels(self.device, logits.dtype) and logits.stride(1) == 1:
            from quire.kernels.cpu import masking

            masking.mask_logits(logits, torch.from_numpy(places), torch.from_numpy(self._bits))
        else:
            rows = np.flatnonzero(places >= 0)
            bits = np.unpackbits(self._bits[places[rows]].view(np.uint8), axis=1, bitorder="little")
            barred, index = torch.from_numpy(bits[:, : self.vocab_size] == 0), torch.from_numpy(rows)
            logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(barred, -torch.inf))

    def wrap_epilogue(self, epilogue: Any, max_rows: int) -> Any:
        """A tape's tail that masks its rows, up to `max_rows` of them, and goes on as `epilogue`. `fill_epilogue` "
        "comes before."""
        from quire.kernels.cpu import masking

        if self._epilogue_slots is None or len(self._epilogue_slots) != max_rows:  # all tails of a tape have one
            self._epilogue_slots = np.full(max_rows, -1, dtype=np.int64)
        places, bits = torch.from_numpy(self._epilogue_slots), torch.from_numpy(self._bits)

        def tail(logits: Tensor, slots: Tensor) -> Any:
            masking.mask_logits(logits, places[: len(logits)], bits)
            return epilogue(logits, slots)

        return tail

    def fill_epilogue(self, slots: np.ndarray) -> None:
        """What the tail reads at its next replay, for rows of these slots; padding has no mask."""
        assert self._epilogue_slots is not None, "there is a tail"
        self._epilogue_slots[: len(slots)], self._epilogue_slots[len(slots) :] = self._masked_slot[slots], -1
