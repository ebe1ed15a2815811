"""Memory of packed weights, in huge pages where the machine has them. The kernel may take up to 2 ms to provide such a
page, so a thread can fault pages in ahead of need, while torch is imported. Does not import torch at the top.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import lru_cache
from threading import RLock, Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 1 << 25  # bytes that are allocated at once
ALIGNMENT = 64
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14
PREFAULT_BYTES = 1 << 25  # bytes of one madvise call
MAX_PREFAULT_BYTES = 1 << 30


class WeightArena:
    """Allocator of blocks, each for several weights or one large one. A block is freed with the last of its weights,
    except the current block, from which weights are allocated. Threads may allocate at the same time."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.block: mmap.mmap | None = None
        self.used = 0
        self.thread: Thread | None = None
        self.prefaulted = 0
        """Bytes from the begin of the current block that the thread has faulted in."""

    def prefault(self, size: int) -> None:
        """Start a block of `size` bytes, at most MAX_PREFAULT_BYTES, and a thread that faults its pages in."""
        with self.lock:
            self.finish_block()
            try:
                self.block, self.used = _map_block(min(size, MAX_PREFAULT_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE), 0
            except (OSError, ValueError):  # out of memory, or less than a page
                return
            self.thread = Thread(target=self._touch, args=(self.block,), name="quire-memory", daemon=True)
            self.thread.start()

    def _touch(self, block: mmap.mmap) -> None:
        while self.thread is not None and self.prefaulted < len(block):
            size = min(PREFAULT_BYTES, len(block) - self.prefaulted)
            if _advise(block, self.prefaulted, size, POPULATE_WRITE):
                return
            self.prefaulted += size

    def finish_block(self) -> None:
        """Stop prefaulting and free the unused end of that block. Called when all weights of a model are packed."""
        with self.lock:
            thread, self.thread = self.thread, None
            if thread is None:
                return
            thread.join()
            self.prefaulted = 0
            if self.block is not None:
                begin = -(-self.used // mmap.PAGESIZE) * mmap.PAGESIZE
                if begin < len(self.block):
                    self.block.madvise(mmap.MADV_DONTNEED, begin)
                self.block, self.used = None, 0

    def drop_block(self) -> None:
        """Stop allocating from the current block, so that it is freed with the last of its weights. Called when a model
        is dropped."""
        with self.lock:
            self.finish_block()
            self.block, self.used = None, 0

    def allocate(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor [rows, columns]."""
        import torch

        size = rows * columns * dtype.itemsize
        with self.lock:
            if self.block is None or self.used + size > len(self.block):
                if size >= BLOCK_BYTES:
                    return torch.frombuffer(_map_block(size), dtype=torch.uint8).view(dtype).view(rows, columns)
                self.finish_block()
                self.block, self.used = _map_block(BLOCK_BYTES), 0
            data = torch.frombuffer(self.block, dtype=torch.uint8, count=size, offset=self.used)
            self.used += -(-size // ALIGNMENT) * ALIGNMENT
        return data.view(dtype).view(rows, columns)


def _map_block(size: int) -> mmap.mmap:
    """Map `size` bytes of zeroed memory, page-aligned, that takes no RAM until it is written."""
    block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _advise(block: mmap.mmap, begin: int, size: int, advice: int) -> bool:
    """Call madvise without the interpreter's lock, which mmap.madvise would hold. Return True if it failed."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(block, begin))
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice))


@lru_cache(maxsize=1)
def weight_arena() -> WeightArena:
    """Return the process's arena."""
    return WeightArena()
