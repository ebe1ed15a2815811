"""Triton's attention over pages equals dense attention in fp64: decode, prompts, and the backend that mixes them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from attention_steps import BATCHES, LAYER, Sizes, dense, placed, sinks_of, stored, two_steps
from grids import DEVICE, LAUNCHES, PDL, TYPES, random
from torch import Tensor

from quire.kernels.forward_batch import LayerCache
from quire.kernels.triton import decode as attention
from quire.kernels.triton import prefill as prompts
from quire.kernels.triton.backend import TritonBackend
from quire.kernels.triton.decode import (
    MAX_SHARED_ROWS,
    SplitScratch,
    choose_splits,
    decode,
    decode_scratch,
    find_tile,
    num_shared_rows,
)
from quire.kernels.triton.prefill import MANY_PROGRAMS, make_prefill_tiles, prefill, tile_queries
from quire.protocol.model_spec import LayerSpec

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
LENGTHS = (1, 5, 0, 16, 33, 150, 100, 101, 300)  # 0: padding


class Shape(NamedTuple):
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page: int = 16
    window: int | None = None
    softcap: float | None = None
    layout: str = "pages"
    chunk: int | None = None
    sinks: bool = False

    def dense(self, q: Tensor, both: Tensor, start: int, whole: bool = False) -> Tensor:
        bounds = {"window": self.window, "chunk": self.chunk, "softcap": self.softcap}
        return dense(q, *both, start, **bounds, whole=whole, sinks=sinks_of(self.heads) if self.sinks else None)


class Memory(NamedTuple):
    """Sequences in poisoned pages: sequence i has slot i + 1, its keys and values are histories[i] [2, n, kv, dim]."""

    cache: LayerCache
    tables: Tensor
    histories: list[Tensor]


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


# How tokens lie, see `placed`: in pages; and in a run of them a sequence, each of all layers and heads, or of a head.
PAGED = ("pages", "tokens first", "gaps", "two buffers")
CONTIGUOUS = ("token runs", "head runs")


def cache_of(shape: Shape, pages: int, size: int, dtype: torch.dtype) -> LayerCache:
    """The second layer of three in `pages` pages of `size` tokens, full of NaN but for page 0."""
    return LayerCache(
        *placed(shape.layout, pages, size, shape.kv_heads, shape.dim, dtype), shape.heads, shape.dim**-0.5,
        window=shape.window, softcap=shape.softcap, contiguous=shape.layout in CONTIGUOUS, chunk=shape.chunk,
        sinks=sinks_of(shape.heads) if shape.sinks else None,
    )  # fmt: skip


def filled(shape: Shape, lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Memory:
    """Pages are in random order, table entries past a sequence's end name a poisoned page."""
    kv, dim, size = shape.kv_heads, shape.dim, shape.page
    width = max(-(-n // size) for n in lengths) + 1
    if shape.layout in CONTIGUOUS:
        size, width = max(lengths) + 3, 1
    order = torch.randperm(len(lengths) * width).view(-1, width)
    tables = torch.cat((torch.zeros(1, width, dtype=torch.int64), order + 1)).to(DEVICE)
    cache = cache_of(shape, tables.numel() + 1, size, dtype)
    keys, values = cache.keys, cache.values
    histories = []
    for i, n in enumerate(lengths):
        both = random(2, n, kv, dim, dtype=dtype, seed=i)
        at = torch.arange(n, device=DEVICE)
        pages = tables[i + 1, at // size]
        keys[pages, :, at % size], values[pages, :, at % size] = both
        histories.append(both)
    return Memory(cache, tables, histories)


def assert_close(got: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def slots_of(lengths: tuple[int, ...]) -> Tensor:
    return ints([i + 1 if n else 0 for i, n in enumerate(lengths)])


def check_decode(shape: Shape, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> None:
    memory = filled(shape, lengths, dtype)
    q = random(len(lengths), shape.heads, shape.dim, dtype=dtype, seed=99)
    slots, options = slots_of(lengths), {"splits": 2, **options}
    got = decode(q, memory.cache, memory.tables, slots, ints(lengths), **options)
    for i, n in enumerate(lengths):
        if n == 0:
            assert not got[i].any(), "padding gets zeros"
        else:
            assert_close(got[i : i + 1], shape.dense(q[i : i + 1], memory.histories[i], n - 1))


SHAPES = pytest.mark.parametrize(
    "shape",
    [
        *(Shape(*of, window=w) for of in ((4, 4), (4, 2), (7, 1), (56, 8), (5, 1)) for w in (None, 5, 24, 100)),
        *(Shape(page=page) for page in (1, 2, 3, 4, 8, 32, 64, 128, 256)),
        *(Shape(dim=dim) for dim in (8, 64, 80, 96, 128, 256)),
        *(Shape(*heads, 512, window=window) for heads in ((8, 1), (16, 1), (4, 2)) for window in (None, 24)),
        *(Shape(chunk=chunk, layout=layout) for chunk in (1, 5, 32, 33, 100) for layout in ("pages", "token runs")),
        *(Shape(7, 1, 8, 4, chunk=chunk, softcap=0.7) for chunk in (5, 33, 128)),
        *(Shape(6, 2, 16, page, w, layout=layout) for page, w in ((4, None), (64, 24)) for layout in PAGED[1:]),
        *(Shape(6, 2, 16, 1, window, layout=layout) for window in (None, 24) for layout in CONTIGUOUS),
        Shape(softcap=0.7),
        *(Shape(*of, window=w, sinks=True) for of in ((4, 4), (7, 1)) for w in (None, 24)),
    ],
    ids=str,
)  # fmt: skip


@TYPES
@SHAPES
def test_decode_equals_dense_attention(shape, dtype) -> None:
    """The memory checker allows no address between the numbers of a layout with strides of its own."""
    check_decode(shape, dtype)


@LAUNCHES
@pytest.mark.parametrize("splits", [1, 2, 5, 32])
def test_any_number_of_splits(splits, dtype, pdl) -> None:
    """Scratch is used again, whatever is in it."""
    scratch = SplitScratch(*(x.fill_(torch.nan) for x in decode_scratch(5, 4, 2, 16, splits, DEVICE)))
    for shape in (Shape(), Shape(window=70), Shape(chunk=33), Shape(sinks=True)):
        check_decode(shape, dtype, (300, 0, 64, 1, 129), splits=splits, pdl=pdl, scratch=scratch)


@TYPES
@pytest.mark.parametrize("splits", [1, 4])
def test_padding_without_a_place_writes_nothing(splits, dtype) -> None:
    """Rows name queries and outputs."""
    lengths, shape = (150, 0, 33, 0), Shape()
    memory = filled(shape, lengths, dtype)
    q = random(4, shape.heads, shape.dim, dtype=dtype, seed=99)
    out = torch.full_like(q, 7.0)
    arguments = q, memory.cache, memory.tables, slots_of(lengths), ints(lengths), out
    assert decode(*arguments, splits=splits, rows=ints([2, -1, 0, -1])) is out
    for row, i in ((2, 0), (0, 2)):
        assert_close(out[row : row + 1], shape.dense(q[row : row + 1], memory.histories[i], lengths[i] - 1))
    assert (out[[1, 3]] == 7).all()


Runs = tuple[tuple[int, int], ...]
RUNS: Runs = ((0, 2), (33, 1), (90, 4), (9, 5), (0, 3), (200, 6), (1, 1), (40, 2))
"""Length of a sequence, and how many of its last tokens are rows; length 0 is padding."""


def check_runs(
    shape: Shape, dtype: torch.dtype, shared: int, runs: Runs = RUNS, indexed: bool = False, **options: Any
) -> None:
    """Rows are those of `runs`, in order. If `indexed`, queries are in another order, and padding has none."""
    memory = filled(shape, tuple(length for length, _ in runs), dtype)
    slots = np.repeat([i + 1 if length else 0 for i, (length, _) in enumerate(runs)], [count for _, count in runs])
    lengths = [max(length - count + j + 1, 0) for length, count in runs for j in range(count)]
    places = np.random.default_rng(0).permutation(len(slots)) if indexed else np.arange(len(slots))
    q = random(len(slots), shape.heads, shape.dim, dtype=dtype, seed=99)
    out, rows = torch.full_like(q, 7.0), ints(np.where(slots > 0, places, -1)) if indexed else None
    arguments = q, memory.cache, memory.tables, ints(slots), ints(lengths), out
    decode(*arguments, rows=rows, shared_rows=shared, **{"splits": 4, **options})
    for i, (length, count) in enumerate(runs):
        (at, places) = np.split(places, [count])
        if length:
            assert_close(out[at], shape.dense(q[at], memory.histories[i], length - count))
        else:
            assert (out[at] == (7 if indexed else 0)).all()


@TYPES
@SHAPES
def test_rows_of_one_slot_equal_dense_attention(shape: Shape, dtype: torch.dtype) -> None:
    check_runs(shape, dtype, num_shared_rows(6, cache_of(shape, 1, 1, dtype)), RUNS[1:6], splits=2)


@LAUNCHES
@pytest.mark.parametrize("splits", [1, 4, 32])
@pytest.mark.parametrize("shared", [2, 3, 4, 16])
@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(window=30), Shape(chunk=33, page=4), Shape(window=70, layout="token runs"), Shape(sinks=True)],
    ids=str,
)
def test_any_number_of_rows_shares_a_read(
    shape: Shape, shared: int, splits: int, dtype: torch.dtype, pdl: bool
) -> None:
    """Scratch is used again, whatever is in it."""
    count = sum(count for _, count in RUNS)
    scratch = SplitScratch(*(x.fill_(torch.nan) for x in decode_scratch(count, 4, 2, 16, splits, DEVICE)))
    check_runs(shape, dtype, shared, indexed=shared % 2 == 0, splits=splits, pdl=pdl, scratch=scratch)


@TYPES
def test_runs_of_more_rows_than_a_program_looks_at(dtype: torch.dtype) -> None:
    check_runs(Shape(2, 1), dtype, 4, ((60, 39), (0, 35), (20, 2)), splits=1)


@triton.jit
def _tiles(slots, lengths, tiles, SHARED: tl.constexpr):
    row = tl.program_id(0)
    found = find_tile(slots, lengths, row, tl.num_programs(0), SHARED)
    for i in tl.static_range(4):
        tl.store(tiles + row * 4 + i, found[i])


@pytest.mark.parametrize("shared", [2, 5, MAX_SHARED_ROWS])
def test_tiles_divide_every_run_and_programs_agree(shared: int) -> None:
    """Runs that verify draft tokens are divided into as few tiles as possible, longer ones somehow."""
    rng = np.random.default_rng(3)
    counts = [*rng.integers(1, 9, 4).tolist(), 40, 1, 17]
    slots = np.repeat(rng.permutation(len(counts)), counts)
    lengths, tiles = rng.integers(1, 99, len(slots)), ints(np.zeros((len(slots), 4)))
    _tiles[(len(slots),)](ints(slots), ints(lengths), tiles, shared)
    found = [tuple(tile) for tile in tiles.tolist()]
    row = 0
    for count in counts:
        own = list(dict.fromkeys(found[row : row + count]))
        if count <= 17:
            assert len(own) == -(-count // shared)
        for first, end, shortest, longest in own:
            assert row == first < end <= first + shared
            assert set(found[first:end]) == {(first, end, shortest, longest)}
            assert (shortest, longest) == (lengths[first:end].min(), lengths[first:end].max())
            row = end


def test_splits_fill_a_gpu_and_shrink_as_the_batch_grows() -> None:
    splits = [choose_splits(batch, 8, 132) for batch in (1, 2, 4, 8, 32, 128, 256, 1024)]
    assert splits[0] == 32
    assert splits[-2:] == [1, 1]
    assert splits == sorted(splits, reverse=True)
    assert choose_splits(24, 8, 132) == 2, "192 programs would leave a quarter of the places empty"
    assert choose_splits(1, 1, 132) == 32
    assert choose_splits(1, 1, 1) in (1, 2)


Chunks = tuple[tuple[int, int], ...]
CHUNKS: Chunks = ((12, 9), (0, 20), (40, 6), (0, 2), (130, 70), (127, 3))  # (tokens before, tokens of this step)


def tiles_of(chunks: Chunks, queries: int) -> Tensor:
    starts, lengths = np.array(chunks, dtype=np.int64).T
    tiles = make_prefill_tiles(np.arange(len(chunks)) + 1, starts, lengths, np.cumsum(lengths) - lengths, queries)
    assert tiles.dtype == np.int32
    return torch.from_numpy(tiles).to(DEVICE)


def check_rows(got: Tensor, q: Tensor, memory: Memory, shape: Shape, chunks: Chunks, whole: bool = False) -> None:
    row = 0
    for (start, count), both in zip(chunks, memory.histories):
        own, row = slice(row, row + count), row + count
        assert_close(got[own], shape.dense(q[own], both, start, whole))


def check_prompt(
    shape: Shape, dtype: torch.dtype, chunks: Chunks = CHUNKS, rows: tuple[int, ...] = (), small: bool = False
) -> None:
    """With `rows`, sequences have these lengths, and each query sees all of its sequence's."""
    memory = filled(shape, rows or tuple(map(sum, chunks)), dtype)
    if memory.cache.is_local and shape.layout in PAGED:  # pages that all queries have left behind may hold anything
        for slot, (start, _) in enumerate(chunks, 1):
            left = start // shape.chunk * shape.chunk if shape.chunk else max(start - shape.window + 1, 0)
            memory.tables[slot, : left // shape.page] = memory.tables[slot, -1]
    q = random(sum(n for _, n in chunks), shape.heads, shape.dim, dtype=dtype, seed=99)
    tiles = tiles_of(chunks, tile_queries(shape.heads, shape.kv_heads, shape.dim, dtype.itemsize, small))
    if rows:
        last = ints(rows)[tiles[:, 0] - 1] - 1
        tiles = torch.column_stack((tiles[:, :3], last.to(torch.int32), tiles[:, 3])).contiguous()
    for pdl in PDL:
        got = prefill(q, memory.cache, memory.tables, tiles, small=small, bidirectional=bool(rows), pdl=pdl)
        check_rows(got, q, memory, shape, chunks, bool(rows))


@TYPES
@SHAPES
def test_prompts_equal_dense_attention(shape, dtype) -> None:
    check_prompt(shape, dtype)


@TYPES
@pytest.mark.parametrize("small", [False, True])
def test_tiles_of_padding_get_zeros(small, dtype) -> None:
    """As many as they have queries; of none, nothing is written. Scratch pages aren't read."""
    shape = Shape()
    memory = filled(shape, (40,), dtype)
    memory.cache.keys[0], memory.cache.values[0] = torch.nan, torch.nan
    q = random(12, shape.heads, shape.dim, dtype=dtype, seed=99)
    q[8:] = torch.nan
    tiles = torch.tensor([(1, 2, 5, 35), (0, 8, 3, 0), (0, 0, 0, 0)], dtype=torch.int32, device=DEVICE)
    out = torch.full_like(q, 7.0)
    prefill(q, memory.cache, memory.tables, tiles, out, small=small)
    assert_close(out[2:7], shape.dense(q[2:7], memory.histories[0], 35))
    assert not out[8:11].any()
    assert (out[[0, 1, 7, 11]] == 7).all()


@pytest.mark.parametrize("room", [101_376, 166_912, 232_448])  # of an L4, an A100, an H200
def test_programs_fit_the_shared_memory_of_smaller_gpus(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "shared_memory", lambda device: room)
    for group, dim, programs in product((1, 4, 16, 64), (64, 128, 256), (1, 4, 2000)):
        padded = attention._padded_tile(group, dim)
        tile = attention.choose_tile(*padded, 2, programs, DEVICE)
        assert attention.program_bytes(*padded, 2, tile.columns, tile.stages) <= room
        assert tile.stages >= 3 or room == 101_376
    for group in (1, 8, 16):
        padded = attention._padded_tile(group, 512)
        tile = attention.choose_tile(*padded, 2, 4, DEVICE)
        assert attention.program_bytes(*padded, 2, tile.columns, tile.stages) <= room
    # What the compiler gave these for Hopper, in bytes.
    assert attention.program_bytes(16, 128, 2, 64, 4) == 104_448
    assert attention.program_bytes(64, 256, 2, 32, 4) == 135_168


def test_tiles_cover_every_query_once_and_the_longest_context_comes_first() -> None:
    tiles = tiles_of(CHUNKS, 8)
    covered = [row for _, token, many, _ in tiles.tolist() for row in range(token, token + many)]
    assert sorted(covered) == list(range(sum(count for _, count in CHUNKS)))
    ends = (tiles[:, 2] + tiles[:, 3]).tolist()
    assert ends == sorted(ends, reverse=True)
    assert tiles[:, 2].max() == 8


LONG: Sizes = [(0, 100), (60, 40), (10, 90)]
BATCH = pytest.mark.parametrize("batch", [*BATCHES.values(), LONG], ids=[*BATCHES, "long"])


def run_backend(
    backend: TritonBackend, sizes: Sizes, shape: Shape, dtype: torch.dtype = torch.float32, fused: bool = False
) -> None:
    layer = LayerSpec(shape.kv_heads, shape.dim, shape.window, softcap=shape.softcap, chunk=shape.chunk)
    store = stored(sizes, layer, shape.heads, shape.page, dtype)
    cache = replace(store.caches[LAYER], sinks=sinks_of(shape.heads) if shape.sinks else None)
    assert_close(*two_steps(backend, store, cache, sizes, fused=fused))


@pytest.mark.parametrize(
    "shape",
    [
        *(Shape(heads, kv, 8, window=window) for heads, kv in ((4, 2), (7, 1)) for window in (None, 24)),
        Shape(chunk=12, page=4),
        Shape(softcap=0.7),
        Shape(7, 1, 8, window=24, sinks=True),
    ],
)
@TYPES
@pytest.mark.parametrize("deterministic", [False, True])
@BATCH
def test_the_backend_equals_dense_attention(batch, deterministic, dtype, shape) -> None:
    """With windows, caps and chunks; queries, keys and values given apart, and as a product has them."""
    for fused in (False, True):
        run_backend(TritonBackend(deterministic=deterministic), batch, shape, dtype, fused=fused)


def test_deterministic_rows_of_few_tokens_have_small_tiles() -> None:
    """Those that fit in one; other rows have the tiles of prompts."""
    shape = Shape(heads=8, kv_heads=2)
    store = stored([(5, 1), (3, 16), (2, 17), (0, 100), (9, 1)], LayerSpec(2, shape.dim), shape.heads, shape.page)
    cache, backend = store.caches[LAYER], TritonBackend(deterministic=True)
    slots, lengths = np.arange(1, 6), np.array([1, 16, 17, 100, 1])
    offsets = np.cumsum(lengths) - lengths
    batch = SimpleNamespace(
        slots=slots, starts=np.array([5, 3, 2, 0, 9]), lengths=lengths, offsets=offsets, tables=store.tables,
        bidirectional_mask=np.zeros(5, np.bool_), bidirectional_in_window=False, device=DEVICE, token_slots=None,
        positions=None, context_lens=lambda group: np.array([6, 19, 19, 100, 10]),
    )  # fmt: skip
    batch.for_cache = lambda cache: batch
    assert backend.tile_queries(cache) == 16
    plan = backend.plan(batch, cache)  # type: ignore[arg-type]
    assert plan.slots is None
    assert sorted(plan.small_tiles[:, 0].tolist()) == [1, 2, 5]
    assert set(plan.tiles[:, 0].tolist()) == {3, 4}
    assert TritonBackend().plan(batch, cache).small_tiles is None  # type: ignore[arg-type]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter multiplies with NumPy, in an order of its own")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "more", [{}, {"window": 300}, {"softcap": 0.7}, {"chunk": 256, "page": 16}, {"sinks": True}], ids=str
)
@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 8, 64), (8, 2, 96), (7, 1, 16)])
def test_small_and_large_tiles_give_the_same_bits(heads, more, dtype) -> None:
    shape = Shape(*heads, **more)
    chunks = ((0, 300), (700, 1), (64, 129), (1000, 17), (127, 64))
    memory = filled(shape, tuple(map(sum, chunks)), dtype)
    q = random(sum(n for _, n in chunks), shape.heads, shape.dim, dtype=dtype, seed=99)
    results = []
    for small in (False, True):
        tiles = tiles_of(chunks, tile_queries(shape.heads, shape.kv_heads, shape.dim, 2, small))
        results.append(prefill(q, memory.cache, memory.tables, tiles, small=small))
    assert torch.equal(*results)
    many = -(-MANY_PROGRAMS // (len(q) * shape.kv_heads))
    ones = tiles_of(chunks, 1).repeat(many, 1)  # all write the same
    single = prefill(q, memory.cache, memory.tables, ones, small=True, single=True)
    assert torch.equal(single, results[0])


def test_tiles_of_one_query_equal_dense_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float16  # the tiles of fp32 are as without `single`
    shape, chunks = Shape(), ((0, 40), (70, 1), (16, 3))
    memory = filled(shape, tuple(map(sum, chunks)), dtype)
    q = random(sum(n for _, n in chunks), shape.heads, shape.dim, dtype=dtype, seed=99)
    monkeypatch.setattr(prompts, "MANY_PROGRAMS", 1)
    for pdl in PDL:
        got = prefill(q, memory.cache, memory.tables, tiles_of(chunks, 1), small=True, single=True, pdl=pdl)
        check_rows(got, q, memory, shape, chunks)


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
