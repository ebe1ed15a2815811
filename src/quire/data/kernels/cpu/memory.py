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

MAPPED = 1 << 25  # bytes of packed weights that are allocated at once
ALIGNED = 64
POPULATE_WRITE = 23  # of madvise, since Linux 5.14
PIECE = 1 << 25  # bytes that are asked for at once
MOST_AHEAD = 1 << 30


class Memory:
    """Blocks, each of several weights, or of one large one. A block is given back with the last of its weights, but for
    the one that is being filled."""

    def __init__(self) -> None:
        self.block: mmap.mmap | None = None
        self.used = 0
        self.thread: Thread | None = None
        self.ready = 0
        """Bytes that the thread has made ready, or that were taken of these."""

    def ahead(self, size: int) -> None:
        """The next block has so many bytes, MOST_AHEAD at most, and a thread makes them ready."""
        self.settle()
        try:
            self.block, self.used = _mapped(min(size, MOST_AHEAD) // mmap.PAGESIZE * mmap.PAGESIZE), 0
        except (OSError, ValueError):  # there isn't so much; or it's nothing
            return
        self.thread = Thread(target=self._touch, args=(self.block,), name="quire-memory", daemon=True)
        self.thread.start()

    def _touch(self, block: mmap.mmap) -> None:
        while self.thread is not None and self.ready < len(block):
            size = min(PIECE, len(block) - self.ready)
            if _advise(block, self.ready, size, POPULATE_WRITE):
                return
            self.ready += size

    def settle(self) -> None:
        """All weights of a model are packed: what is left of a block that was begun for them is given back."""
        thread, self.thread = self.thread, None
        if thread is None:
            return
        thread.join()
        self.ready = 0
        if self.block is not None:
            begin = -(-self.used // mmap.PAGESIZE) * mmap.PAGESIZE
            if begin < len(self.block):
                self.block.madvise(mmap.MADV_DONTNEED, begin)
            self.block, self.used = None, 0

    def leave(self) -> None:
        """A model was dropped: the block that is being filled goes with the last of its weights too."""
        self.settle()
        self.block, self.used = None, 0

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, columns], not written yet."""
        import torch

        size = rows * columns * dtype.itemsize
        if self.block is None or self.used + size > len(self.block):
            if size >= MAPPED:
                return torch.frombuffer(_mapped(size), dtype=torch.uint8).view(dtype).view(rows, columns)
            self.settle()
            self.block, self.used = _mapped(MAPPED), 0
        found = torch.frombuffer(self.block, dtype=torch.uint8, count=size, offset=self.used)
        self.used += -(-size // ALIGNED) * ALIGNED
        return found.view(dtype).view(rows, columns)


def _mapped(size: int) -> mmap.mmap:
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
def memory() -> Memory:
    """The process's own."""
    return Memory()
