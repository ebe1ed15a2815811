"""Triton's attention over pages equals dense attention in fp64: decode, prompts, and the backend that mixes them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from attention_steps import BATCHES, LAYER, LAYERS, Sizes, dense, stored, two_steps
from grids import DEVICE, LAUNCHES, TYPES, random
from torch import Tensor

from quire.data.kernels.batch import LayerCache
from quire.data.kernels.triton import attention
from quire.data.kernels.triton.attention import SplitScratch, choose_splits, decode, decode_scratch
from quire.data.kernels.triton.backend import TritonBackend
from quire.data.kernels.triton.prompt import make_tiles, prompt, tile_queries
from quire.data.layers.norm import RMSNorm
from quire.data.layers.rope import Rope
from quire.data.layers.rotary import Rotary
from quire.vocabulary.specs import LayerSpec

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
LENGTHS = (1, 5, 0, 16, 33, 150)  # 0: padding


class Shape(NamedTuple):
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page: int = 16
    window: int | None = None
    softcap: float | None = None
    layout: str = "pages"
    chunk: int | None = None

    def dense(self, q: Tensor, both: Tensor, start: int, whole: bool = False) -> Tensor:
        return dense(q, *both, start, window=self.window, chunk=self.chunk, softcap=self.softcap, whole=whole)


class Memory(NamedTuple):
    """Sequences in poisoned pages: sequence i has slot i + 1, its keys and values are histories[i] [2, n, kv, dim]."""

    cache: LayerCache
    tables: Tensor
    histories: list[Tensor]


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


# How tokens lie: pages of heads of tokens (the store's), also of tokens of heads, with a gap behind each page, or with
# values in a buffer of their own; and one run of tokens a sequence, each of all layers and heads, or of a head alone.
PAGED = ("pages", "tokens first", "gaps", "two buffers")
CONTIGUOUS = ("token runs", "head runs")
OTHERS = pytest.mark.parametrize("layout", [*PAGED[1:], *CONTIGUOUS])


def placed(shape: Shape, pages: int, size: int, dtype: torch.dtype) -> LayerCache:
    """The second layer of three in `pages` pages of `size` tokens, full of NaN but for page 0."""
    kv, dim = shape.kv_heads, shape.dim

    def buffer(*of: int) -> Tensor:
        whole = torch.full((pages, *of), torch.nan, dtype=dtype, device=DEVICE)
        whole[0] = 0
        return whole

    if shape.layout == "two buffers":
        keys, values = (buffer(LAYERS, kv, size, dim)[:, LAYER] for _ in range(2))
    elif shape.layout in ("tokens first", "token runs"):
        keys, values = buffer(size, LAYERS, 2, kv, dim)[:, :, LAYER].permute(2, 0, 3, 1, 4)
    elif shape.layout == "gaps":
        whole = buffer(LAYERS * 2 * kv * size * dim + 24)[:, : LAYERS * 2 * kv * size * dim]
        keys, values = whole.view(pages, LAYERS, 2, kv, size, dim)[:, LAYER].unbind(1)
    else:
        keys, values = buffer(LAYERS, 2, kv, size, dim)[:, LAYER].unbind(1)
    return LayerCache(
        keys, values, shape.heads, dim**-0.5, window=shape.window, softcap=shape.softcap,
        contiguous=shape.layout in CONTIGUOUS, chunk=shape.chunk,
    )  # fmt: skip


def filled(shape: Shape, lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Memory:
    """Pages are in random order, table entries past a sequence's end name a poisoned page."""
    kv, dim, size = shape.kv_heads, shape.dim, shape.page
    width = max(-(-n // size) for n in lengths) + 1
    if shape.layout in CONTIGUOUS:
        size, width = max(lengths) + 3, 1
    order = torch.randperm(len(lengths) * width).view(-1, width)
    tables = torch.cat((torch.zeros(1, width, dtype=torch.int64), order + 1)).to(DEVICE)
    cache = placed(shape, tables.numel() + 1, size, dtype)
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


@pytest.mark.share(4)
@TYPES
@pytest.mark.parametrize("window", [None, 5, 24, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (7, 1), (56, 8), (5, 1)])
def test_decode_equals_dense_attention(heads, kv_heads, window, dtype) -> None:
    check_decode(Shape(heads, kv_heads, window=window), dtype)


@TYPES
@pytest.mark.parametrize("chunk", [1, 5, 32, 33, 100])
@pytest.mark.parametrize("splits", [1, 5])
def test_decode_within_chunks_equals_dense_attention(splits, chunk, dtype) -> None:
    check_decode(Shape(chunk=chunk), dtype, (1, 5, 0, 16, 33, 150, 32, 100, 101), splits=splits)
    check_decode(Shape(7, 1, 8, 4, chunk=chunk, softcap=0.7), dtype, (64, 66, 99), splits=splits)


@LAUNCHES
@pytest.mark.parametrize("splits", [1, 2, 5, 32])
def test_any_number_of_splits(splits, dtype, pdl) -> None:
    for window in (None, 70):
        check_decode(Shape(window=window), dtype, (300, 0, 64, 1, 129), splits=splits, pdl=pdl)


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


@TYPES
@pytest.mark.parametrize("page", [1, 2, 3, 4, 8, 16, 32, 64, 128, 256])
def test_every_page_size(page, dtype) -> None:
    check_decode(Shape(page=page), dtype, (300, 17))
    check_prompt(Shape(page=page), dtype, ((12, 9), (0, 70), (100, 40)))


@TYPES
@pytest.mark.parametrize("dim", [8, 16, 64, 80, 96, 128, 256])
def test_every_head_size(dim, dtype) -> None:
    check_decode(Shape(dim=dim), dtype, (70, 3))
    check_prompt(Shape(dim=dim), dtype, ((12, 9), (0, 70)))


@TYPES
def test_scores_are_soft_capped(dtype) -> None:
    check_decode(Shape(softcap=0.7), dtype)
    check_prompt(Shape(softcap=0.7), dtype)


@OTHERS
@TYPES
@pytest.mark.parametrize("window", [None, 24])
def test_any_layout(window, dtype, layout) -> None:
    """With strides of its own, and contiguous; the memory checker allows no address between its numbers."""
    for page in (4, 64) if layout in PAGED else (1,):
        shape = Shape(6, 2, 16, page, window, layout=layout)
        check_decode(shape, dtype)
        check_prompt(shape, dtype)


@pytest.mark.parametrize("layout", CONTIGUOUS)
@pytest.mark.parametrize("splits", [1, 4])
def test_a_run_of_tokens_is_one_large_page(layout, splits) -> None:
    """The paged kernel, which looks into the table for each tile, computes the same to the bit."""
    lengths = (300, 0, 33)
    memory = filled(Shape(window=150, layout=layout), lengths)
    q = random(3, 4, 16)
    arguments = (memory.tables, slots_of(lengths), ints(lengths))
    want = decode(q, replace(memory.cache, contiguous=False), *arguments, splits=splits)
    assert torch.equal(decode(q, memory.cache, *arguments, splits=splits), want)


def test_scratch_is_used_again_whatever_is_in_it() -> None:
    lengths = (300, 40, 0, 130)
    memory = filled(Shape(), lengths)
    scratch = SplitScratch(*(x.fill_(torch.nan) for x in decode_scratch(4, 4, 2, 16, 4, DEVICE)))
    arguments = (random(4, 4, 16), memory.cache, memory.tables, slots_of(lengths), ints(lengths))
    want = decode(*arguments, splits=1)
    for splits in (4, 2, 4):
        got = decode(*arguments, splits=splits, scratch=scratch)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@TYPES
def test_one_split_does_not_depend_on_the_other_rows(dtype) -> None:
    lengths = (300, 40, 33, 150)
    memory = filled(Shape(), lengths, dtype)
    q = random(4, 4, 16, dtype=dtype)
    together = decode(q, memory.cache, memory.tables, slots_of(lengths), ints(lengths), splits=1)
    for i, n in enumerate(lengths):
        alone = decode(q[i : i + 1], memory.cache, memory.tables, ints([i + 1]), ints([n]), splits=1)
        assert torch.equal(alone[0], together[i])


def test_splits_fill_a_gpu_and_shrink_as_the_batch_grows() -> None:
    splits = [choose_splits(batch, 8, 132) for batch in (1, 2, 4, 8, 32, 128, 256, 1024)]
    assert splits[0] == 32
    assert splits[-2:] == [1, 1]
    assert splits == sorted(splits, reverse=True)
    assert choose_splits(24, 8, 132) == 2, "192 programs would leave a quarter of the places empty"
    assert choose_splits(1, 1, 132) == 32
    assert choose_splits(1, 1, 1) in (1, 2)


Chunks = tuple[tuple[int, int], ...]
CHUNKS: Chunks = ((12, 9), (0, 20), (40, 6), (0, 2), (130, 70))  # (tokens before, tokens of this step)


def tiles_of(chunks: Chunks, queries: int) -> Tensor:
    starts, lengths = np.array(chunks, dtype=np.int64).T
    tiles = make_tiles(np.arange(len(chunks)) + 1, starts, lengths, np.cumsum(lengths) - lengths, queries)
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
    """With `rows`, so many are all there, and each query sees all of its sequence's."""
    memory = filled(shape, rows or tuple(map(sum, chunks)), dtype)
    if memory.cache.bounded and shape.layout in PAGED:  # pages that all queries have left behind may hold anything
        for slot, (start, _) in enumerate(chunks, 1):
            left = start // shape.chunk * shape.chunk if shape.chunk else max(start - shape.window + 1, 0)
            memory.tables[slot, : left // shape.page] = memory.tables[slot, -1]
    q = random(sum(n for _, n in chunks), shape.heads, shape.dim, dtype=dtype, seed=99)
    tiles = tiles_of(chunks, tile_queries(shape.heads, shape.kv_heads, shape.dim, dtype.itemsize, small))
    if rows:
        tiles[:, 3] = ints(rows)[tiles[:, 0] - 1] - 1
    got = prompt(q, memory.cache, memory.tables, tiles, small=small, whole=bool(rows))
    check_rows(got, q, memory, shape, chunks, bool(rows))


@TYPES
@pytest.mark.parametrize("window", [None, 5, 24, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (7, 1), (56, 8), (5, 1)])
def test_prompts_equal_dense_attention(heads, kv_heads, window, dtype) -> None:
    check_prompt(Shape(heads, kv_heads, window=window), dtype)


@pytest.mark.share(3)
@TYPES
@pytest.mark.parametrize("chunk", [1, 5, 32, 33, 100, 128])
@pytest.mark.parametrize("layout", ["pages", "token runs"])
def test_prompts_within_chunks_equal_dense_attention(layout, chunk, dtype) -> None:
    check_prompt(Shape(chunk=chunk, layout=layout), dtype)
    check_prompt(Shape(5, 1, 8, 4, chunk=chunk, softcap=0.7, layout=layout), dtype, ((63, 66), (127, 3), (0, 200)))


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
    prompt(q, memory.cache, memory.tables, tiles, out, small=small)
    assert_close(out[2:7], shape.dense(q[2:7], memory.histories[0], 35))
    assert not out[8:11].any()
    assert (out[[0, 1, 7, 11]] == 7).all()


@pytest.mark.parametrize("room", [101_376, 166_912, 232_448])  # of an L4, an A100, an H200
def test_programs_fit_the_shared_memory_of_smaller_gpus(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "shared_memory", lambda device: room)
    for group, dim, programs in product((1, 4, 16, 64), (64, 128, 256), (1, 4, 2000)):
        padded = attention._padded(group, dim)
        block, _, stages = attention._shape(*padded, 2, programs, DEVICE)
        assert attention.program_bytes(*padded, 2, block, stages) <= room
        assert stages >= 3 or room == 101_376
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
    backend: TritonBackend, sizes: Sizes, shape: Shape, dtype: torch.dtype = torch.float32, *more: Any, **fused: bool
) -> None:
    layer = LayerSpec(shape.kv_heads, shape.dim, shape.window, softcap=shape.softcap, chunk=shape.chunk)
    store = stored(sizes, layer, shape.heads, shape.page, dtype)
    assert_close(*two_steps(backend, store, store.caches[LAYER], sizes, *more, **fused))


@TYPES
@pytest.mark.parametrize("deterministic", [False, True])
@BATCH
def test_the_backend_equals_dense_attention(batch, deterministic, dtype) -> None:
    """With windows, caps and chunks; queries, keys and values given apart, and as a product has them."""
    shapes = [Shape(heads, kv, 8, window=window) for heads, kv in ((4, 2), (7, 1)) for window in (None, 24)]
    for shape in (*shapes, Shape(chunk=12, page=4), Shape(softcap=0.7)):
        for fused in (False, True):
            run_backend(TritonBackend(deterministic=deterministic), batch, shape, dtype, fused=fused)


@pytest.mark.share(4)
@BATCH
@pytest.mark.parametrize("normalised", [False, True])
def test_the_backend_rotates_and_writes_in_one_pass(normalised, batch) -> None:
    rotary = Rotary(Rope(kind="default", theta=10000.0, original_len=256), 16, 256)
    rotary.prepare(DEVICE)
    norms = None
    if normalised:
        norms = tuple(RMSNorm(16, 1e-6, torch.float32, DEVICE) for _ in range(2))
        for i, norm in enumerate(norms):
            norm.weight.data = random(16, seed=i)
    run_backend(TritonBackend(), batch, Shape(), torch.float32, rotary, norms, fused=True)
