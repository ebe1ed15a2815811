"""Copies of pages equal plain indexing, for pages of any size and type, and touch nothing else."""

from __future__ import annotations

import pytest
import torch
from grids import DEVICE
from torch import Tensor

from quire.kernels.triton import copy_pages


def bits(rows: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random bit patterns, NaNs of all kinds among them: [rows, size bytes]."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(-128, 128, (rows, size), dtype=torch.int8, generator=generator)
    return raw.view(dtype).to(DEVICE)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int8), b.view(torch.int8))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


GRID = [
    (count, size, dtype)
    for count in (1, 3, 40)
    for size, dtype in (
        (128, torch.float32), (24, torch.float32), (36, torch.float32), (16384, torch.float32), (16400, torch.float32),
        (16, torch.bfloat16), (70, torch.bfloat16), (4096, torch.bfloat16), (40000, torch.float16), (13, torch.int8),
    )
]  # fmt: skip


@pytest.mark.parametrize(("count", "size", "dtype"), [*GRID, (4096, 128, torch.float32)])
def test_copies_equal_indexing(count: int, size: int, dtype: torch.dtype) -> None:
    """Sources and destinations have none in common; sources may repeat."""
    pages = bits(2 * count + 5, size, dtype, size + count)
    generator = torch.Generator().manual_seed(count)
    dst, rest = torch.randperm(len(pages), generator=generator).to(DEVICE).split((count, count + 5))
    src = rest[torch.randint(0, len(rest), (count,), generator=generator)]
    wanted = pages.clone()
    wanted[dst] = pages[src]
    copy_pages.copy_pages(pages, src, dst)
    assert same(pages, wanted)


@pytest.mark.parametrize("programs", [None, 1, 3])
def test_rows_go_between_two_buffers(programs: int | None) -> None:
    """Few programs take the tiles in turn."""
    target, source = bits(9, 33000, torch.bfloat16, 1), bits(11, 33000, torch.bfloat16, 2)
    dst, src = ints(8, 0, 3), ints(0, 10, 10)
    wanted = target.clone()
    wanted[dst] = source[src]
    copy_pages.copy_rows(target, source, dst, src, programs)
    assert same(target, wanted)


def test_no_pairs_no_launch() -> None:
    pages = bits(3, 64)
    before = pages.clone()
    copy_pages.copy_pages(pages, ints(), ints())
    assert same(pages, before)
