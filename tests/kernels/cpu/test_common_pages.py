"""Rows of one query whose first pages are the same ones: what they get is what each gets alone, whichever rows they
are, and who has what in common is found in the page tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from native_kernels import NONE, VARIANTS
from paged_rows import Rows, Shape, cells, dense, filled, kernels, of_cells
from test_native_attention import answers, assert_close, taped

from quire.kernels.cpu.backend import MIN_SHARED_PREFIX_ROWS, NativeBackend

pytestmark = pytest.mark.skipif(not VARIANTS, reason=NONE)
SOME = [pytest.param(one, marks=() if one in (VARIANTS[0], VARIANTS[-1]) else pytest.mark.soak) for one in VARIANTS]
Group = tuple[list[int], int]
"""Rows, and how many tokens of their first pages are the same."""

MIXED: list[Group] = [([0, 2, 3, 5, 9], 304), ([1, 4, 7, 8], 128)]
OWN = [1, 16, 17, 700, 5, 33, 90, 300, 2, 1]
SHAPES = {
    "plain": Shape(),
    "softcap": Shape(softcap=0.7, page=1),
    "sinks": Shape(sinks=True),
    "one key head": Shape(7, 1, 80),
    "odd": Shape(4, 2, 7, page=4),
    "128": Shape(5, 1, 128, page=8),
    "as many": Shape(3, 3, 40, page=8),
    "8 bits": Shape(rounded=True),
    "odd in 8 bits": Shape(4, 2, 7, page=4, rounded=True),
}


def together(shape: Shape, groups: list[Group] = MIXED, own: list[int] = OWN) -> Rows:
    """Rows with `own` tokens behind those of their groups; a row without a group has its own alone."""
    before = [next((tokens for rows, tokens in groups if i in rows), 0) for i in range(len(own))]
    rows = filled(shape, [(a + b - 1, 1) for a, b in zip(before, own)])
    table, cache = rows.batch.tables[0], rows.cache
    for (first, *others), tokens in groups:
        assert tokens % shape.page == 0, "whole pages"
        for other in others:
            table[other + 1, : tokens // shape.page] = table[first + 1, : tokens // shape.page]
    kept = [of_cells(x) for x in cells(cache)] if cache.is_int8 else [cache.keys, cache.values]
    expected = []
    for i, position in enumerate(rows.batch.positions.tolist()):
        at = torch.arange(position)
        pages = table[i + 1, at // shape.page]
        parts = [torch.cat((x[pages, :, at % shape.page], now[i : i + 1])) for x, now in zip(kept, (rows.k, rows.v))]
        expected.append(dense(rows.q[i : i + 1], torch.stack(parts), position, shape))
    return rows._replace(expected=torch.cat(expected))


def found(rows: Rows, backend: NativeBackend) -> dict[tuple[int, ...], int]:
    """The tiles of rows, and what each has in common."""
    common = backend.plan(rows.batch, rows.cache).shared_prefixes
    assert common is not None
    count = len(rows.q)
    order = common[1 + 2 * count : 1 + 3 * count]
    tiles = common[1 + 3 * count :].view(count, 4)[: int(common[0])].tolist()
    return {tuple(order[first : first + some].tolist()): tokens for first, some, tokens, _ in tiles}


@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_with_common_pages_equal_dense_attention(variant, dtype, shape) -> None:
    rows = together(SHAPES[shape]._replace(dtype=dtype))
    assert_close(answers(rows, NativeBackend(kernels=kernels(variant, 2))), rows.expected)


def test_who_has_what_in_common_is_found() -> None:
    backend = NativeBackend(kernels=kernels(VARIANTS[0], 1))
    assert found(together(Shape()), backend) == {tuple(rows): tokens for rows, tokens in MIXED}
    few = together(Shape(), [([0, 1, 2], 304), ([3, 4, 5, 6], 64)])
    assert found(few, backend) == {}, "too few rows, or too few tokens"
    assert found(together(Shape(), [([0, 1, 2, 3], 320)], [1] * 4), backend) == {(0, 1, 2, 3): 320}
    last = together(Shape(), [([0, 1, 2, 3], 320)], [1] * 4)
    last.batch.starts[2] -= 1  # its token is the last one of the last of these pages, which nobody else may write
    assert found(last, backend) == {(0, 1, 2, 3): 304}


def test_a_row_goes_with_those_that_have_most_in_common_with_it() -> None:
    """One that has little in common with the others doesn't take from them what they have."""
    rows = together(Shape(), [([0, 1, 2, 3, 5], 480), ([4], 0)], [9] * 6)
    rows.batch.tables[0][5, :12] = rows.batch.tables[0][1, :12]
    rows.batch.starts[4] = 470
    assert found(rows, NativeBackend(kernels=kernels(VARIANTS[0], 1))) == {(0, 1, 2, 3, 5): 480}


def test_many_rows_are_cut_into_tiles() -> None:
    rows = together(Shape(), [(list(range(70)), 112)], [3] * 70)
    backend = NativeBackend(kernels=kernels(VARIANTS[0], 2))
    assert sorted(map(len, found(rows, backend))) == [35, 35]
    assert_close(answers(rows, backend), rows.expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_change_no_bit(variant) -> None:
    rows = together(Shape(dtype=torch.bfloat16), [(list(range(10)), 400)], [3] * 10)
    one, *others = (answers(rows, NativeBackend(kernels=kernels(variant, threads))) for threads in (1, 2, 3, 8))
    assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("shape", [Shape(window=400), Shape(chunk=512)])
def test_nothing_is_shared_where_it_must_not_be(shape: Shape) -> None:
    """Layers that see a part of what is before a token, those that keep a part, and where bits must not depend on
    other rows."""
    kept = kernels(VARIANTS[0], 2)
    rows = together(Shape())
    assert NativeBackend(kernels=kept).plan(rows.batch, replace(rows.cache, budget=32)).shared_prefixes is None
    assert NativeBackend(kernels=kept, deterministic=True).plan(rows.batch, rows.cache).shared_prefixes is None
    bounded = filled(shape, [(600, 1)] * MIN_SHARED_PREFIX_ROWS)
    assert NativeBackend(kernels=kept).plan(bounded.batch, bounded.cache).shared_prefixes is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tape_finds_anew_what_rows_have_in_common(variant) -> None:
    """Recorded where there is nothing, replayed with two groups, then with the same rows in another order."""
    library = kernels(variant, 2)
    backend = NativeBackend(kernels=library)
    rows = together(Shape(dtype=torch.bfloat16))
    slots, positions, table = (
        torch.zeros_like(x) for x in (rows.batch.token_slots, rows.batch.positions, rows.batch.tables[0])
    )
    qkv = torch.zeros(len(rows.q), 10, 64, dtype=torch.bfloat16)
    tape, out = taped(backend, qkv, (slots, positions), table, rows.cache)
    table.copy_(rows.batch.tables[0])
    for order in (torch.arange(10), torch.tensor([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])):
        qkv.copy_(torch.cat((rows.q, rows.k, rows.v), 1)[order])
        slots.copy_(rows.batch.token_slots[order])
        positions.copy_(rows.batch.positions[order])
        library.run(tape)
        assert_close(out, rows.expected[order])
