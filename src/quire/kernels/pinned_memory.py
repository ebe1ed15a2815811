"""Pinned memory for host pages. A thread allocates it while torch is imported, because the driver takes 0.4 s for a GiB
(H200). So this module does not import torch at the top.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import lru_cache
from threading import RLock, Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

OpenGPU = Callable[[], tuple[Any, ctypes.c_void_p] | None]
"""A function that makes a GPU's context current in the calling thread. It returns CUDA's driver library and the
context, or None if it fails."""


class PinnedBlock:
    """A block of pinned memory, which at most one tensor uses at a time. Thread-safe."""

    def __init__(self) -> None:
        self.lock = RLock()  # a garbage collection in a method may free the tensor
        self.thread: Thread | None = None
        self.gpu: tuple[Any, ctypes.c_void_p] | None = None  # CUDA's driver and a context
        self.is_needed = False  # before `allocate_in_thread` and after `free`
        self.address, self.num_bytes = 0, 0  # of the block; 0 if there is none or a tensor uses it

    def allocate_in_thread(self, open_gpu: OpenGPU, num_bytes: int) -> None:
        """Start a thread that calls `open_gpu` and then allocates `num_bytes` bytes, or nothing if they are 0. It calls
        the driver without the interpreter's lock. If it fails there is no block. A second call has no effect.

        Nothing is allocated either if the GPU has less free memory: it has at least as many pages as the host."""
        with self.lock:
            if self.thread is None:
                self.is_needed, arguments = True, (open_gpu, num_bytes)
                self.thread = Thread(target=self._allocate, args=arguments, name="quire-gpu", daemon=True)
                self.thread.start()

    def _allocate(self, open_gpu: OpenGPU, num_bytes: int) -> None:
        self.gpu, address = open_gpu(), ctypes.c_void_p()
        if self.gpu is None or not num_bytes or not self.is_needed:
            return
        driver, free, total = self.gpu[0], ctypes.c_size_t(), ctypes.c_size_t()
        if driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) != 0 or num_bytes > free.value:
            return
        if driver.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(num_bytes), 0) == 0:
            self._put_back(address.value or 0, num_bytes)
            if not self.is_needed:
                self.free()

    def take(self, num_bytes: int) -> Tensor | None:
        """Wait for the thread. Return the block's first bytes as a tensor, uint8 [num_bytes], or None if there is no
        unused block. Once the tensor and its views are deleted, the block can be taken again.

        A block is freed if it is too small, or larger than what torch would allocate: the next power of two."""
        import torch

        if self.thread is not None:
            self.thread.join()
        with self.lock:
            if not num_bytes <= self.num_bytes <= 1 << (num_bytes - 1).bit_length():
                self.free()
            if not self.address:
                return None
            array = (ctypes.c_uint8 * self.num_bytes).from_address(self.address)  # the tensor and its views keep it
            weakref.finalize(array, self._put_back, self.address, self.num_bytes).atexit = False
            self.address, self.num_bytes = 0, 0
        return torch.frombuffer(array, dtype=torch.uint8, count=num_bytes)

    def _put_back(self, address: int, num_bytes: int) -> None:
        with self.lock:
            self.address, self.num_bytes = address, num_bytes

    def free(self) -> None:
        """Free the block, unless a tensor uses it. If the thread still runs, it allocates none or frees it."""
        with self.lock:
            self.is_needed = False
            if self.address and self.gpu is not None:
                driver, context = self.gpu
                driver.cuCtxPushCurrent_v2(context)  # this thread may have none yet
                driver.cuMemFreeHost(ctypes.c_void_p(self.address))
                driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
                self.address, self.num_bytes = 0, 0


@lru_cache(maxsize=1)
def pinned_block() -> PinnedBlock:
    """Return the process's block."""
    return PinnedBlock()
