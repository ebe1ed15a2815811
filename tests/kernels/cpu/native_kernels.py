"""The kernels' libraries that are built and that this machine runs, for tests of all of them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.library import Library
from quire.kernels.cpu.library_loader import find_library, library
from quire.kernels.cpu.variants import machine_variants

VARIANTS = [variant.name for variant in machine_variants() if find_library(variant.name) is not None]
NONE = "the kernels aren't built (no compiler?)"


@contextmanager
def served_by(variant: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """Make the process's library this variant's, with `threads` threads."""
    before = torch.get_num_threads()
    monkeypatch.setenv("QUIRE_CPU_KERNELS", variant)
    library.cache_clear()
    torch.set_num_threads(threads)
    try:
        found = library()
        assert found is not None, "it is built"
        yield found
        found.close()
    finally:
        torch.set_num_threads(before)
        library.cache_clear()


def guarded(regions: int, numbers: int, dtype: torch.dtype, first: bool = False) -> tuple[Tensor, int]:
    """Regions of `numbers` numbers, each ending before a page that nobody may touch, or beginning behind one (`first`):
    all memory from the first region on, which the tensor keeps, and numbers from one region to the next."""
    size, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    pages = -(-numbers * dtype.itemsize // size)
    stride = (pages + 1) * size
    block = mmap.mmap(-1, size + regions * stride)
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    for i in range(regions + 1):
        assert libc.mprotect(ctypes.c_void_p(address + i * stride), ctypes.c_size_t(size), 0) == 0, "it is protected"
    begin = size if first else size + pages * size - numbers * dtype.itemsize
    return torch.frombuffer(block, dtype=dtype)[begin // dtype.itemsize :], stride // dtype.itemsize


def fenced(tensor: Tensor) -> Tensor:
    """The same numbers right before a page that may not be touched."""
    every, _ = guarded(1, tensor.numel(), tensor.dtype)
    return every[: tensor.numel()].view(tensor.shape).copy_(tensor)
