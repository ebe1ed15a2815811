"""Host memory that several engines map, and the addresses of pages in it. One engine copies pages there, and another
one copies them into pages of its own."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable
from typing import NamedTuple


class SharedPage(NamedTuple):
    """A page of a group in shared host memory: the address that SwapOut and SwapIn use, and the key of its content."""

    group: int
    host_page: int
    key: bytes


class SharedHostMemory(NamedTuple):
    """The file `descriptor` in `num_parts` equal parts. Part `part` is this engine's, for `size` bytes of pages. All
    engines map the whole file, and a page has the same address in all of them."""

    descriptor: int
    part: int
    num_parts: int
    size: int

    def part_bytes(self, page_sizes: Iterable[int]) -> int:
        """Return the bytes of a part: a multiple of each page size, so that addresses are whole numbers of pages."""
        sizes = set(page_sizes)
        unit = math.lcm(*sizes)
        return -(-(self.size + sum(sizes)) // unit) * unit  # pages of several sizes are aligned within a part

    def part_start(self, page_sizes: Iterable[int]) -> int:
        """Return the first byte of this engine's part."""
        return self.part * self.part_bytes(page_sizes)

    def map(self, page_sizes: Iterable[int]) -> mmap.mmap:
        """Map the file, which is extended for the first engine. Pages that are never written take no memory."""
        total = self.num_parts * self.part_bytes(page_sizes)
        if os.fstat(self.descriptor).st_size < total:
            os.ftruncate(self.descriptor, total)
        return mmap.mmap(self.descriptor, total)
