"""Attention where every head's tokens of a page stand between pages that nobody may touch: run as
`guarded_attention.py VARIANT BEYOND`; BEYOND 1 asks for one token more than there is, which must end the process."""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import torch
from torch import Tensor

from quire.data.kernels.batch import Batch, LayerCache
from quire.data.kernels.cpu.backend import NativeBackend
from quire.data.kernels.cpu.library import Library
from quire.data.kernels.cpu.loading import BUILT

SIZE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
HELD: list[mmap.mmap] = []


def guarded(regions: int, numbers: int, dtype: torch.dtype, first: bool) -> tuple[Tensor, int]:
    """Regions of so many numbers, each ending before a page that nobody may touch, or beginning behind one (`first`);
    as the first region's tensor, and numbers from one to the next."""
    pages = -(-numbers * dtype.itemsize // SIZE)
    stride = (pages + 1) * SIZE
    held = mmap.mmap(-1, SIZE + regions * stride)
    HELD.append(held)
    address = ctypes.addressof(ctypes.c_char.from_buffer(held))
    for i in range(regions + 1):
        assert LIBC.mprotect(ctypes.c_void_p(address + i * stride), ctypes.c_size_t(SIZE), 0) == 0, "it is protected"
    begin = SIZE if first else SIZE + pages * SIZE - numbers * dtype.itemsize
    every = torch.frombuffer(held, dtype=dtype)
    return every[begin // dtype.itemsize :], stride // dtype.itemsize


def case(
    variant: str, beyond: int, dtype: torch.dtype, dim: int, page: int, end: int, lengths: int, first: bool,
    rounded: bool,
) -> None:  # fmt: skip
    """A sequence of `end` tokens whose last `lengths` are computed; its tokens fill its pages."""
    heads, kv, pages = 6, 2, end // page
    kept, cell = (torch.int8, dim + 4) if rounded else (dtype, dim)
    views = []
    for _ in range(2):
        numbers, stride = guarded(pages * kv, page * cell, kept, first)
        view = numbers.as_strided((pages, kv, page, dim), (kv * stride, stride, cell, 1))
        view.copy_(torch.randn(view.shape))
        views.append(view)
    if beyond:
        page, end, lengths = page + 1, page + 1, 1
        views = [view.as_strided((pages, kv, page, dim), view.stride()) for view in views]
    q, _ = guarded(1, lengths * heads * dim, dtype, first)
    q = q[: lengths * heads * dim].view(lengths, heads, dim).copy_(torch.randn(lengths, heads, dim))
    k = torch.randn(lengths, kv, dim).to(dtype)
    cache = LayerCache(
        views[0], views[1], heads, dim**-0.5, window=page + 3 if first else None,
        writes=not beyond,  # so that it is a read that ends the process
    )  # fmt: skip
    table = torch.arange(pages + 1)[None].clamp(max=pages - 1)
    positions = torch.arange(end - lengths, end)
    one = np.zeros(1, dtype=np.int64)
    batch = Batch(positions, positions, positions * 0, positions[:0], one, one + end - lengths, one + lengths, one, one,
                  [table])  # fmt: skip
    backend = NativeBackend(kernels=Library(BUILT / f"{variant}.so", 2))
    plan = backend.plan(batch, cache)
    backend.attend(q, k, k, cache, plan)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        for dim in (64, 80, 7, 8, 40, 128):
            for page, end in ((16, 48), (1, 5), (137, 137), (300, 600)):
                for lengths in (1, min(end, 21)):
                    for first in (False, True):
                        for rounded in (False, True):
                            case(sys.argv[1], int(sys.argv[2]), dtype, dim, page, end, lengths, first, rounded)
