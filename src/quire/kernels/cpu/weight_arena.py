"""Where packed weights lie: memory in huge pages, where the machine has them. A machine may take up to 2 ms to hand out
such a page, so a thread can have it do so ahead of need. That is while torch is imported: no torch here.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import lru_cache
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 1 << 25  # bytes of packed weights that are allocated at once
ALIGNMENT = 64
POPULATE_WRITE = 23  # of madvise, since Linux 5.14
PREFAULT_BYTES = 1 << 25  # bytes that are asked for at once
MAX_PREFAULT_BYTES = 1 << 30


class WeightArena:
    """Blocks, each of several weights, or of one large one. A block is given back with the last of its weights, but for
    the one that is being filled."""

    def __init__(self) -> None:
        self.block: mmap.mmap | None = None
        self.used = 0
        self.thread: Thread | None = None
        self.prefaulted = 0
        """Bytes that the thread has made ready, or that were taken of these."""

    def prefault(self, size: int) -> None:
        """The next block has so many bytes, MOST_AHEAD at most, and a thread makes them ready."""
        self.finish_block()
        try:
            self.block, self.used = _map_block(min(size, MAX_PREFAULT_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE), 0
        except (OSError, ValueError):  # there isn't so much; or it's nothing
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
        """All weights of a model are packed: what is left of a block that was begun for them is given back."""
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
        """A model was dropped: the block that is being filled goes with the last of its weights too."""
        self.finish_block()
        self.block, self.used = None, 0

    def allocate(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, columns], not written yet."""
        import torch

        size = rows * columns * dtype.itemsize
        if self.block is None or self.used + size > len(self.block):
            if size >= BLOCK_BYTES:
                return torch.frombuffer(_map_block(size), dtype=torch.uint8).view(dtype).view(rows, columns)
            self.finish_block()
            self.block, self.used = _map_block(BLOCK_BYTES), 0
        found = torch.frombuffer(self.block, dtype=torch.uint8, count=size, offset=self.used)
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        return found.view(dtype).view(rows, columns)


def _map_block(size: int) -> mmap.mmap:
    """Memory that takes no room until it is written, at a page's start."""
    block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _advise(block: mmap.mmap, begin: int, size: int, advice: int) -> bool:
    """Without the interpreter's lock, which mmap's own madvise keeps. True if it isn't followed."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(block, begin))
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice))


@lru_cache(maxsize=1)
def weight_arena() -> WeightArena:
    """The process's own."""
    return WeightArena()
