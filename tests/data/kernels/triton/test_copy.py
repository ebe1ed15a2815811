"""Copies of pages equal plain indexing, for pages of any size and type, and touch nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

copy = pytest.importorskip("quire.data.kernels.triton.copy", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def bits(rows: int, size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random bit patterns, NaNs of all kinds among them: [rows, size bytes]."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(-128, 128, (rows, size), dtype=torch.int8, generator=generator)
    return raw.view(dtype).to(DEVICE)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int8), b.view(torch.int8))


def pairs(count: int, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sources and destinations that have none in common; sources may repeat."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=generator)
    dst, rest = order[:count], order[count:]
    src = rest[torch.randint(0, len(rest), (count,), generator=generator)]
    return src.to(DEVICE), dst.to(DEVICE)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (128, torch.float32),
        (16, torch.bfloat16),
        (24, torch.float32),
        (36, torch.float32),
        (70, torch.bfloat16),
        (13, torch.int8),
        (4096, torch.bfloat16),
        (16384, torch.float32),
        (16400, torch.float32),
        (40000, torch.float16),
    ],
)
@pytest.mark.parametrize("count", [1, 3, 40])
def test_copies_equal_indexing(size: int, dtype: torch.dtype, count: int) -> None:
    pages = bits(2 * count + 5, size, dtype, size + count)
    src, dst = pairs(count, len(pages), count)
    wanted = pages.clone()
    wanted[dst] = pages[src]
    copy.copy_pages(pages, src, dst)
    assert same(pages, wanted)


def test_many_small_pages() -> None:
    pages = bits(9000, 128, torch.float32, 0)
    src, dst = pairs(4096, len(pages), 1)
    wanted = pages.clone()
    wanted[dst] = pages[src]
    copy.copy_pages(pages, src, dst)
    assert same(pages, wanted)


@pytest.mark.parametrize("size", [4, 8, 60, 1000, 20004])
def test_nothing_beyond_the_pages_is_written(size: int) -> None:
    """The pages are the middle of a larger buffer, aligned to 4 bytes only, and the last page is a destination."""
    around = bits(1, 7 * size + 8, torch.float32, size)[0]
    before = around.clone()
    pages = around[1 : 1 + 7 * size // 4].view(7, -1)
    copy.copy_pages(pages, torch.tensor([2, 3], device=DEVICE), torch.tensor([0, 6], device=DEVICE))
    assert same(around[:1], before[:1])
    assert same(around[-1:], before[-1:])
    middle = before[1:-1].view(7, -1)
    assert same(pages, middle[[2, 1, 2, 3, 4, 5, 3]])


@pytest.mark.parametrize("programs", [None, 1, 3])
def test_rows_go_between_two_buffers(programs: int | None) -> None:
    """Few programs take the tiles in turn."""
    target, source = bits(9, 33000, torch.bfloat16, 1), bits(11, 33000, torch.bfloat16, 2)
    dst, src = torch.tensor([8, 0, 3], device=DEVICE), torch.tensor([0, 10, 10], device=DEVICE)
    wanted = target.clone()
    wanted[dst] = source[src]
    copy.copy_rows(target, source, dst, src, programs)
    assert same(target, wanted)


def test_no_pairs_no_launch() -> None:
    pages = bits(3, 64, torch.float32, 0)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    before = pages.clone()
    copy.copy_pages(pages, none, none)
    assert same(pages, before)


def test_rows_of_other_sizes_or_types_are_refused() -> None:
    one = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(AssertionError, match="type or size"):
        copy.copy_rows(bits(2, 64, torch.float32, 0), bits(2, 32, torch.float32, 0), one, one)
    with pytest.raises(AssertionError, match="type or size"):
        copy.copy_rows(bits(2, 64, torch.float32, 0), bits(2, 128, torch.float64, 0)[:, :16].contiguous(), one, one)
    with pytest.raises(AssertionError, match="follow"):
        copy.copy_pages(bits(4, 64, torch.float32, 0)[:, :8], one, one)
