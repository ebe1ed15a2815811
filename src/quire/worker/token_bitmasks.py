"""Bitmasks of the tokens that rows may sample in one step (structured output), applied to all rows in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu.rows import has_kernels
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import SeqSlice, TokenBitmask
from quire.worker.staging_buffer import StagingBuffer


class TokenBitmasks:
    """The bitmasks of one step, for `slots` slots over a vocabulary of `vocab_size`, up to `max_masks` for each."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device, max_masks: int = 1) -> None:
        self.slots, self.vocab_size, self.device = slots, vocab_size, device
        self.num_words = -(-vocab_size // 32)
        self.has_masks = False
        self._masked_slot = np.full(slots, -1, dtype=np.int64)  # by slot: the slot, if it has a mask in this step
        # The i-th mask of a slot is row i * slots + slot. Untouched rows take no memory.
        self._bits = np.zeros((max_masks * slots, self.num_words), dtype=np.int32)
        # The content of `_bits`: often the same as a step ago.
        self._last_bitmasks: list[bytes | None] = [None] * len(self._bits)
        # By slot, the position of the token that its first mask is for; None if no slot has several masks.
        self._first_positions: np.ndarray | None = None
        self._upload: tuple[StagingBuffer, torch.cuda.Stream] | None = None
        if device.type == "cuda":  # bits are copied while the logits are computed
            self._upload = StagingBuffer(device, segment_bytes=1 << 21), torch.cuda.Stream(device)
        self._epilogue_rows: np.ndarray | None = None  # rows of `_bits` for a recorded step; -1: no mask

    def set_bitmasks(self, bitmasks: Sequence[TokenBitmask], slices: Sequence[SeqSlice] = ()) -> None:
        """Set the masks of a step, before its rows are sampled. They hold until the next call. The masks of a slot are
        in the order of positions. `slices` are the step's; they are needed if a slot has several masks."""
        if self.has_masks:
            self._masked_slot.fill(-1)
        self.has_masks = bool(bitmasks)
        if not bitmasks:
            return
        slots, masks = zip(*bitmasks)
        self._masked_slot[list(slots)] = slots
        self._first_positions = None
        rows: Sequence[int] = slots
        if len(set(slots)) < len(slots):
            columns = SeqSlices.from_slices(slices)
            self._first_positions = np.zeros(self.slots, dtype=np.int64)
            self._first_positions[columns.slots] = columns.ends
            next_rows = {slot: count(slot, self.slots) for slot in slots}
            rows = [next(next_rows[slot]) for slot in slots]
        last = self._last_bitmasks
        if not (new := [(row, mask) for row, mask in zip(rows, masks) if last[row] is not mask]):
            return
        rows, bits = zip(*new)
        assert {*map(len, bits)} == {4 * self.num_words}, f"a mask doesn't have {4 * self.num_words} bytes"
        self._bits[list(rows)] = np.frombuffer(b"".join(bits), dtype="<i4").reshape(-1, self.num_words)
        for row, allowed in new:
            last[row] = allowed

    def is_masked(self, slots: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return for each of these slots whether it has a mask."""
        masked: np.ndarray = self._masked_slot[slots] >= 0
        return masked

    def _mask_rows(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the rows of `_bits` for samples of the tokens at `positions` of `slots`; -1: no mask."""
        rows = np.where(slots < 0, -1, self._masked_slot[slots])
        if self._first_positions is not None:
            rows = np.where(rows < 0, -1, rows + self.slots * (positions - self._first_positions[slots]))
        return rows

    def apply(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> None:
        """Set logits [R, V], of which the tokens at `positions` [R] of `slots` [R] are sampled, to -inf where the row's
        mask has no bit. Slot -1 has no mask."""
        places = self._mask_rows(slots, positions)
        if not (places >= 0).any():
            return
        if self._upload is not None:
            from quire.kernels.triton.sampling import mask_logits

            staging, copy_stream = self._upload
            with torch.cuda.stream(copy_stream):
                rows = np.flatnonzero(places >= 0)
                bits, places[rows] = self._bits[places[rows]], np.arange(len(rows))
                device_places, device_bits = staging.upload_all([places, bits])
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(copy_stream)
            device_places.record_stream(current)  # both tensors share one storage
            mask_logits(logits, device_places, device_bits)
        elif has_kernels(self.device, logits.dtype) and logits.stride(1) == 1:
            from quire.kernels.cpu import sampling

            sampling.mask_logits(logits, torch.from_numpy(places), torch.from_numpy(self._bits))
        else:
            rows = np.flatnonzero(places >= 0)
            unpacked = np.unpackbits(self._bits[places[rows]].view(np.uint8), axis=1, bitorder="little")
            banned, index = torch.from_numpy(unpacked[:, : self.vocab_size] == 0), torch.from_numpy(rows)
            logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(banned, -torch.inf))

    def wrap_epilogue(self, epilogue: Any, max_rows: int) -> Any:
        """Return an epilogue of a recorded step that masks up to `max_rows` rows, then calls `epilogue`. Call
        `fill_epilogue` before each replay."""
        from quire.kernels.cpu import sampling

        if self._epilogue_rows is None or len(self._epilogue_rows) != max_rows:  # shared by all epilogues
            self._epilogue_rows = np.full(max_rows, -1, dtype=np.int64)
        places, bits = torch.from_numpy(self._epilogue_rows), torch.from_numpy(self._bits)

        def masked_epilogue(logits: Tensor, slots: Tensor) -> Any:
            sampling.mask_logits(logits, places[: len(logits)], bits)
            return epilogue(logits, slots)

        return masked_epilogue

    def fill_epilogue(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Set the slots and positions of the rows of the next replay; padding has no mask."""
        assert self._epilogue_rows is not None, "`wrap_epilogue` comes first"
        self._epilogue_rows[: len(slots)] = self._mask_rows(slots, positions)
        self._epilogue_rows[len(slots) :] = -1
