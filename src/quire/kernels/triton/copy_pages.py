"""Copies of whole pages, many in one launch: copy-on-write (PagedAttention §4.4; "fused block copy", §5.1) and, between
device memory and pinned host memory, which the device accesses directly, swaps (§4.5).

A page is bytes here: it is copied as the widest integers that divide it, so that every bit pattern is preserved.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import cdiv, power_of_2

# Bytes that a program copies at once, two or eight 16-byte accesses a thread. Measured on an H200: many small programs
# are fastest within the device (4.1 TB/s read and written, pages of 2 MiB), few with much in flight over PCIe.
TILE_BYTES = 4096
FEW_TILE_BYTES = 16384
WARPS = 4
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


# Compiled once for a page size: neither the number of pairs nor the alignment of their indices is specialized, because
# another variant would be compiled in the middle of a step.
@fast_launch
@triton.jit(do_not_specialize=["pairs", "tiles", "across"], do_not_specialize_on_alignment=["dst", "src"])
def _copy(
    target, source, dst, src, pairs, units, tiles, across, UNIT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Copy target[dst[i]] = source[src[i]], rows of units * UNIT words. A tile is ROWS pairs by WIDTH words; `across`
    tiles cover a row. Programs take tiles in turn."""
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
    """Copy pages[dst[i]] = pages[src[i]] for all i, in one launch. pages [pages, numbers] is contiguous, of any dtype;
    src and dst, int64 [pairs] on its device, are in range. No pair may write what another reads or writes."""
    copy_rows(pages, pages, dst, src)


def copy_rows(target: Tensor, source: Tensor, dst: Tensor, src: Tensor, programs: int | None = None) -> None:
    """Copy target[dst[i]] = source[src[i]] for all i. Both are [rows, numbers] of one dtype, contiguous; either may be
    pinned host memory. `programs` limits the programs, and so the share of the device that the copy uses."""
    for rows in (target, source):
        assert rows.is_contiguous(), "rows must follow one another"
    assert (target.dtype, target.shape[1]) == (source.dtype, source.shape[1]), "rows differ in type or size"
    assert len(dst) == len(src), f"{len(src)} sources for {len(dst)} destinations"
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
    """Return the widest access in bytes, at most 16, to which every row is aligned; `bits`: the row size and the
    addresses, combined by or."""
    return min(bits & -bits, 16)
