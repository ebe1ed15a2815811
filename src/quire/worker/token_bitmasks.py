"""Bitmasks of the tokens that rows may sample in one step (structured output), applied to all rows in one launch."""

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
    """The bitmasks of one step, for `slots` slots over a vocabulary of `vocab_size`."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.num_words = -(-vocab_size // 32)
        self.has_masks = False
        self._masked_slot = np.full(slots, -1, dtype=np.int64)  # by slot: the slot, if it has a mask in this step
        self._bits = np.zeros((slots, self.num_words), dtype=np.int32)  # by slot; untouched rows take no memory
        self._last_bitmasks: list[bytes | None] = [None] * slots  # the content of `_bits`: often the same as a step ago
        self._upload: tuple[StagingBuffer, torch.cuda.Stream] | None = None
        if device.type == "cuda":  # bits are copied while the logits are computed
            self._upload = StagingBuffer(device, segment_bytes=1 << 21), torch.cuda.Stream(device)
        self._epilogue_slots: np.ndarray | None = None  # slots of a recorded step's rows; -1 for those without a mask

    def set_bitmasks(self, bitmasks: Sequence[TokenBitmask]) -> None:
        """Set the masks of a step, before its rows are sampled. They hold until the next call."""
        if self.has_masks:
            self._masked_slot.fill(-1)
        self.has_masks = bool(bitmasks)
        if not bitmasks:
            return
        last = self._last_bitmasks
        slots = [mask[0] for mask in bitmasks]
        self._masked_slot[slots] = slots
        if not (new := [mask for mask in bitmasks if last[mask[0]] is not mask[1]]):
            return
        slots, bits = [mask[0] for mask in new], [mask[1] for mask in new]
        assert {*map(len, bits)} == {4 * self.num_words}, f"a mask doesn't have {4 * self.num_words} bytes"
        self._bits[slots] = np.frombuffer(b"".join(bits), dtype="<i4").reshape(-1, self.num_words)
        for slot, allowed in new:
            last[slot] = allowed

    def is_masked(self, slots: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return for each of these slots whether it has a mask."""
        masked: np.ndarray = self._masked_slot[slots] >= 0
        return masked

    def apply(self, logits: Tensor, slots: np.ndarray) -> None:
        """Set logits [R, V] to -inf where the mask of the row's slot has no bit. Slot -1 has no mask."""
        places = np.where(slots < 0, -1, self._masked_slot[slots])
        if not (places >= 0).any():
            return
        if self._upload is not None:
            from quire.kernels.triton.masking import mask_logits

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
            from quire.kernels.cpu import masking

            masking.mask_logits(logits, torch.from_numpy(places), torch.from_numpy(self._bits))
        else:
            rows = np.flatnonzero(places >= 0)
            unpacked = np.unpackbits(self._bits[places[rows]].view(np.uint8), axis=1, bitorder="little")
            banned, index = torch.from_numpy(unpacked[:, : self.vocab_size] == 0), torch.from_numpy(rows)
            logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(banned, -torch.inf))

    def wrap_epilogue(self, epilogue: Any, max_rows: int) -> Any:
        """Return an epilogue of a recorded step that masks up to `max_rows` rows, then calls `epilogue`. Call
        `fill_epilogue` before each replay."""
        from quire.kernels.cpu import masking

        if self._epilogue_slots is None or len(self._epilogue_slots) != max_rows:  # shared by all epilogues
            self._epilogue_slots = np.full(max_rows, -1, dtype=np.int64)
        places, bits = torch.from_numpy(self._epilogue_slots), torch.from_numpy(self._bits)

        def masked_epilogue(logits: Tensor, slots: Tensor) -> Any:
            masking.mask_logits(logits, places[: len(logits)], bits)
            return epilogue(logits, slots)

        return masked_epilogue

    def fill_epilogue(self, slots: np.ndarray) -> None:
        """Set the slots of the rows of the next replay; padding has no mask."""
        assert self._epilogue_slots is not None, "`wrap_epilogue` comes first"
        self._epilogue_slots[: len(slots)], self._epilogue_slots[len(slots) :] = self._masked_slot[slots], -1
