"""Uploads of small host arrays to a GPU through a ring of pinned memory.

Pinning memory for each array would take the host longer than the copy. The segments of the ring are filled in turn; an
event after a segment's last copy marks when it may be filled again. NumPy fills them: to copy 128 KiB, torch would wake
a thread for every core, and these spin for some milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SEGMENTS = 4
SEGMENT_BYTES = 2**20
ALIGNMENT = 64  # bytes: arrays begin at multiples


class StagingBuffer:
    """Uploads to `device`. All calls must come from one thread with the same current stream, and not while a CUDA graph
    is captured. On a CPU arrays are only wrapped."""

    def __init__(self, device: torch.device, num_segments: int = SEGMENTS, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.device, self.segment_bytes = device, segment_bytes
        self.segment = self.segment_used = 0  # the current segment, and its bytes in use
        if device.type != "cpu":
            self.ring = torch.empty((num_segments, segment_bytes), dtype=torch.uint8, pin_memory=True)
            self.ring_array = self.ring.numpy()
            self.events = [torch.cuda.Event() for _ in range(num_segments)]

    def upload(self, array: np.ndarray, out: Tensor | None = None) -> Tensor:
        """Enqueue the copy of a host array to a new tensor or to `out`, of the same shape and dtype (such as the fixed
        input of a CUDA graph), and return it. On a CPU a new tensor shares the array's memory; elsewhere the array may
        be changed as soon as this returns."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor if out is None else out.copy_(tensor)
        pinned, filled = self._reserve(array.nbytes)
        filled.view(array.dtype).reshape(array.shape)[...] = array
        if out is None:
            out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        return out.copy_(pinned.view(tensor.dtype).view(tensor.shape), non_blocking=True)

    def upload_all(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Upload several arrays in one copy; return new tensors, which share one storage."""
        tensors = [torch.from_numpy(array) for array in arrays]
        if self.device.type == "cpu":
            return tensors
        starts = np.cumsum([0, *(_aligned(array.nbytes) for array in arrays)]).tolist()
        pinned, filled = self._reserve(starts[-1])
        there = torch.empty(starts[-1], dtype=torch.uint8, device=self.device)
        uploaded = []
        for tensor, array, start in zip(tensors, arrays, starts):
            filled[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
            uploaded.append(there[start : start + array.nbytes].view(tensor.dtype).view(tensor.shape))
        there.copy_(pinned, non_blocking=True)
        return uploaded

    def _reserve(self, count: int) -> tuple[Tensor, np.ndarray]:
        """Return `count` bytes of pinned memory that no copy reads, as a tensor and as an array. More than a segment is
        allocated separately; torch keeps that memory until its copy is done."""
        if count > self.segment_bytes:
            separate = torch.empty(count, dtype=torch.uint8, pin_memory=True)
            return separate, separate.numpy()
        if self.segment_used + count > self.segment_bytes:
            # All copies out of this segment are enqueued before this event. The next segment's event is a whole ring
            # old: the host waits only if the device is that far behind.
            self.events[self.segment].record()
            self.segment, self.segment_used = (self.segment + 1) % len(self.events), 0
            self.events[self.segment].synchronize()
        start, self.segment_used = self.segment_used, self.segment_used + _aligned(count)
        return self.ring[self.segment, start : start + count], self.ring_array[self.segment, start : start + count]


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
