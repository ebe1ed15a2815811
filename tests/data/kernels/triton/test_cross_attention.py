"""Attention to the rows of pictures equals dense attention in fp64: queries that see all of a medium, of which a slot
has several, whose pages begin in the midst of its table."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from grids import DEVICE, LAUNCHES, TYPES, random
from test_paged_attention import Memory, Shape, assert_close, check_prompt, filled, ints
from torch import Tensor

from quire.data.kernels.triton.attention import decode

ROWS = (17, 68, 1, 33, 150)
"""Of media: each has a table in `filled`; here they are one slot's, one behind another."""


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


@LAUNCHES
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
        assert_close(got[row : row + 1], shape.dense(q[row : row + 1], memory.histories[i], 0, whole=True))
    assert not got[len(which) :].any(), "who sees nothing gets zeros"


OWN = (9, 1, 20, 130)
"""Rows of prompts whose tokens attend both ways, and as many queries."""


@TYPES
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(
    ("shape", "counts", "rows"),
    [
        *((shape, (40, 3, 70, 1, 5), ROWS) for shape in (Shape(page=1), Shape(4, 4, page=4), Shape(7, 1))),
        *((shape, OWN, OWN) for shape in (Shape(), Shape(7, 1, window=5), Shape(chunk=8, page=4))),
        (Shape(softcap=0.7, dim=32), OWN, OWN),
    ],
)
def test_chunks_of_prompts(
    shape: Shape, counts: tuple[int, ...], rows: tuple[int, ...], small: bool, dtype: torch.dtype
) -> None:
    """Of more tokens than a medium has rows, of fewer, and of as many; whatever bounds the layer."""
    check_prompt(shape, dtype, tuple((0, count) for count in counts), rows, small)
