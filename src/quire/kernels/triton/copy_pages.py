"""Copies of whole pages, many in one launch: copy-on-write (PagedAttention §4.4; "fused block copy", §5.1) and, between
device memory and pinned host memory that the device addresses itself, swaps (§4.5).

A page is bytes here: it is moved as the widest integers that divide it, so every bit pattern arrives as it was.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import cdiv, power_of_2

# Bytes that a program moves at once, two or eight 16-byte accesses a thread. Measured on an H200: many small programs
# copy best within the device (4.1 TB/s read and written, pages of 2 MiB), few with much in flight best over PCIe.
TILE_BYTES = 4096
FEW_TILE_BYTES = 16384
WARPS = 4
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


# Compiled once for a page size: neither the number of pairs nor where their indices lie makes another variant, which
# would be compiled in the middle of a step.
@fast_launch
@triton.jit(do_not_specialize=["pairs", "tiles", "across"], do_not_specialize_on_alignment=["dst", "src"])
def _copy(
    target, source, dst, src, pairs, units, tiles, across, UNIT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """target[dst[i]] = source[src[i]], rows of units * UNIT words. A tile is ROWS pairs by WIDTH words, `across`
    of them side by side; programs take tiles in turn."""
    words = units * UNIT  # so the compiler knows that 16-byte accesses are aligned
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        pair = (tile // across) * ROWS + tl.arange(0, ROWS)
        word = (tile % across) * WIDTH + tl.arange(0, WIDTH)
        real = pair < pairs
        come = tl.load(src + pair, mask=real, other=0)
        go = tl.load(dst + pair, mask=real, other=0)
        mask = real[:, None] & (word < words)[None, :]
        moved = tl.load(source + come[:, None] * words + word[None, :], mask=mask)
        tl.store(target + go[:, None] * words + word[None, :], moved, mask=mask)


def copy_pages(pages: Tensor, src: Tensor, dst: Tensor) -> None:
    """pages[dst[i]] = pages[src[i]] for all i, in one launch. pages: [pages, numbers], contiguous, any type; src and
    dst: int64 [pairs] on its device, within range. No pair may write what another reads or writes."""
    copy_rows(pages, pages, dst, src)


def copy_rows(target: Tensor, source: Tensor, dst: Tensor, src: Tensor, programs: int | None = None) -> None:
    """target[dst[i]] = source[src[i]] for all i. Both [rows, numbers] of one type, contiguous; either may be pinned
    host memory. `programs` bounds how many run, and so how much of the device it takes."""
    for rows in (target, source):
        assert rows.is_contiguous(), "rows must follow one another"
    assert (target.dtype, target.shape[1]) == (source.dtype, source.shape[1]), "rows differ in type or size"
    assert len(dst) == len(src), "as many sources as destinations"
    size = target.shape[1] * target.element_size()
    if not len(dst) or not size:
        return
    width = _access(size | target.data_ptr() | source.data_ptr())
    word = min(width, 8)
    words = size // word
    tile = (TILE_BYTES if programs is None else FEW_TILE_BYTES) // word
    columns = min(power_of_2(words), tile)
    height = tile // columns
    across = cdiv(words, columns)
    tiles = cdiv(len(dst), height) * across
    _copy[(min(tiles, programs or tiles),)](
        target.view(WORDS[word]), source.view(WORDS[word]), dst, src, len(dst), size // width, tiles, across,
        UNIT=width // word, ROWS=height, WIDTH=columns, num_warps=WARPS,
    )  # fmt: skip


def _access(bits: int) -> int:
    """The most bytes, 16 at most, that every row's beginning is a multiple of."""
    return min(bits & -bits, 16)
