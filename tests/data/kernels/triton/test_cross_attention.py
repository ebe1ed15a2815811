"""Attention to the rows of pictures equals dense attention in fp64: queries that see all of a medium, of which a slot
has several, whose pages begin in the midst of its table."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_paged_attention import DEVICE, DTYPES, PDL, Memory, Shape, assert_close, filled, ints, random
from torch import Tensor

from quire.data.kernels.reference import paged_attention
from quire.data.kernels.triton.attention import decode
from quire.data.kernels.triton.prompt import make_tiles, prompt, tile_queries

ROWS = (17, 68, 1, 33, 150)
"""Of media: each has a table in `filled`; here they are one slot's, one behind another."""


def dense(q: Tensor, both: Tensor) -> Tensor:
    """q [n, heads, dim], each of which sees all of both [2, rows, kv_heads, dim]; fp64."""
    k, v = both.double().repeat_interleave(q.shape[1] // both.shape[2], 2)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def in_one_table(memory: Memory, shape: Shape) -> tuple[Tensor, list[int]]:
    """All media's pages in the table of slot 1 of 2, as one column; and where each begins, counted from the first entry
    of slot 0's."""
    pages = [-(-rows // shape.page) for rows in ROWS]
    width = sum(pages) + 2
    table = torch.zeros((2, width), dtype=torch.int64, device=DEVICE)
    firsts = np.cumsum([0, *pages[:-1]]).tolist()
    for i, (first, count) in enumerate(zip(firsts, pages)):
        table[1, first : first + count] = memory.tables[i + 1, :count]
    return table.view(-1, 1), [width + first for first in firsts]


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_rows_that_decode(page: int, splits: int, dtype: torch.dtype, pdl: bool) -> None:
    shape = Shape(page=page)
    memory = filled(shape, ROWS, dtype)
    entries, firsts = in_one_table(memory, shape)
    which = [4, 0, 2, 2, 3, 1]  # two of them see the same one
    q = random(len(which) + 2, shape.heads, shape.dim, dtype=dtype, seed=9)
    named = ints([firsts[i] for i in which] + [0, 0])
    lengths = ints([ROWS[i] for i in which] + [0, 0])
    got = decode(q, memory.cache, entries, named, lengths, splits=splits, pdl=pdl)
    for row, i in enumerate(which):
        assert_close(got[row : row + 1], dense(q[row : row + 1], memory.histories[i]))
    assert not got[len(which) :].any(), "who sees nothing gets zeros"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(("page", "heads", "kv_heads"), [(1, 4, 2), (4, 4, 4), (16, 7, 1)])
def test_chunks_of_prompts(page: int, heads: int, kv_heads: int, small: bool, dtype: torch.dtype) -> None:
    """Of more tokens than a medium has rows, and of fewer."""
    shape = Shape(heads, kv_heads, page=page)
    memory = filled(shape, ROWS, dtype)
    counts = np.array([40, 3, 70, 1, 5])
    offsets = np.cumsum(counts) - counts
    queries = tile_queries(heads, kv_heads, shape.dim, dtype.itemsize, small)
    tiles = make_tiles(np.arange(1, 6), np.zeros(5, dtype=np.int64), counts, offsets, queries)
    tiles[:, 3] = np.array(ROWS)[tiles[:, 0] - 1] - 1
    q = random(int(counts.sum()), heads, shape.dim, dtype=dtype, seed=9)
    placed = torch.from_numpy(tiles).to(DEVICE)
    got = prompt(q, memory.cache, memory.tables, placed, small=small, whole=True)
    for i, (count, offset) in enumerate(zip(counts, offsets)):
        own = slice(offset, offset + count)
        assert_close(got[own], dense(q[own], memory.histories[i]))
    if dtype == torch.float32:
        last = ROWS[1] - 1
        alone = paged_attention(
            q[40], memory.cache.keys, memory.cache.values, memory.tables[2], last, scale=memory.cache.scale
        )
        torch.testing.assert_close(got[40], alone, atol=1e-5, rtol=1e-5)
