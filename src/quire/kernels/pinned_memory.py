"""Pinned memory for host pages, which a thread allocates while torch is imported: the driver takes 0.4 s for a GiB
(H200). Does not import torch at the top.
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
"""A function that makes a context of a GPU the thread's. It returns CUDA's driver and the context, or None."""


class PinnedBlock:
    """A block of pinned memory, which one tensor uses at a time. Thread-safe."""

    def __init__(self) -> None:
        self.lock = RLock()  # a garbage collection in a method may free the tensor
        self.thread: Thread | None = None
        self.gpu: tuple[Any, ctypes.c_void_p] | None = None  # CUDA's driver and a context
        self.is_needed = False
        self.address, self.num_bytes = 0, 0  # of the block while no tensor uses it

    def allocate_in_thread(self, open_gpu: OpenGPU, num_bytes: int) -> None:
        """Start a thread that opens the GPU and allocates the block, if it is of more than 0 bytes and not larger than
        the GPU's free memory, as no host pages are. The thread does not hold the interpreter's lock. If it fails there
        is no block. A second call has no effect."""
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
        """Wait for the thread, and return the block's first bytes as a uint8 tensor; once the tensor is freed they can
        be taken again. Return None if there is no unused block. A block of too few bytes, or of more than torch would
        allocate, which are the next power of two, is freed."""
        import torch

        if self.thread is not None:
            self.thread.join()
        with self.lock:
            if not num_bytes <= self.num_bytes <= 1 << (num_bytes - 1).bit_length():
                self.free()
            if not self.address:
                return None
            array = (ctypes.c_uint8 * self.num_bytes).from_address(self.address)
            weakref.finalize(array, self._put_back, self.address, self.num_bytes).atexit = False
            self.address, self.num_bytes = 0, 0
        return torch.frombuffer(array, dtype=torch.uint8, count=num_bytes)

    def _put_back(self, address: int, num_bytes: int) -> None:
        with self.lock:
            self.address, self.num_bytes = address, num_bytes

    def free(self) -> None:
        """Free the block, unless a tensor uses it. If the thread has not allocated it yet, it does not or frees it."""
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
