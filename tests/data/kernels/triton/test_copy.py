"""Copies of pages equal plain indexing, for pages of any size and type, and touch nothing else."""

from __future__ import annotations

import pytest
import torch
from grids import DEVICE
from torch import Tensor

from quire.data.kernels.triton import copy


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
    copy.copy_pages(pages, src, dst)
    assert same(pages, wanted)


@pytest.mark.parametrize("size", [4, 8, 60, 1000, 20004])
def test_nothing_beyond_the_pages_is_written(size: int) -> None:
    """The pages are the middle of a larger buffer, aligned to 4 bytes only, and the last page is a destination."""
    around = bits(1, 7 * size + 8, seed=size)[0]
    before = around.clone()
    pages = around[1 : 1 + 7 * size // 4].view(7, -1)
    copy.copy_pages(pages, ints(2, 3), ints(0, 6))
    assert same(around[:1], before[:1])
    assert same(around[-1:], before[-1:])
    middle = before[1:-1].view(7, -1)
    assert same(pages, middle[[2, 1, 2, 3, 4, 5, 3]])


@pytest.mark.parametrize("programs", [None, 1, 3])
def test_rows_go_between_two_buffers(programs: int | None) -> None:
    """Few programs take the tiles in turn."""
    target, source = bits(9, 33000, torch.bfloat16, 1), bits(11, 33000, torch.bfloat16, 2)
    dst, src = ints(8, 0, 3), ints(0, 10, 10)
    wanted = target.clone()
    wanted[dst] = source[src]
    copy.copy_rows(target, source, dst, src, programs)
    assert same(target, wanted)


def test_no_pairs_no_launch() -> None:
    pages = bits(3, 64)
    before = pages.clone()
    copy.copy_pages(pages, ints(), ints())
    assert same(pages, before)


def test_rows_of_other_sizes_or_types_are_refused() -> None:
    for other in (bits(2, 32), bits(2, 128, torch.float64)[:, :16].contiguous()):
        with pytest.raises(AssertionError, match="type or size"):
            copy.copy_rows(bits(2, 64), other, ints(0), ints(0))
    with pytest.raises(AssertionError, match="follow"):
        copy.copy_pages(bits(4, 64)[:, :8], ints(0), ints(0))
