"""The kernels' libraries that are built and that this machine runs, for tests of all of them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from quire.data.kernels.cpu.library import Library
from quire.data.kernels.cpu.loading import library, suited
from quire.data.kernels.cpu.variants import variants

VARIANTS = [variant.name for variant in variants() if suited(variant.name) is not None]
NONE = "the kernels aren't built (no compiler?)"


@contextmanager
def served_by(variant: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """The process's library is this variant's, with so many threads."""
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


def fenced(tensor: Tensor) -> Tensor:
    """The same numbers right before a page that may not be touched."""
    size = tensor.numel() * tensor.itemsize
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    block = mmap.mmap(-1, whole + mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(block))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(begin + whole), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    found = torch.frombuffer(block, dtype=torch.uint8, count=size, offset=whole - size)  # which keeps the block
    found.copy_(tensor.contiguous().view(-1).view(torch.uint8))
    return found.view(tensor.dtype).view(tensor.shape)
