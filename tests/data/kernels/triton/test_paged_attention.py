"""Triton's attention over pages equals dense attention in fp64: decode, prompts, and the backend that mixes them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from geometries import one_size
from torch import Tensor

from quire.data.kernels.batch import LayerCache
from quire.data.kernels.reference import paged_attention
from quire.data.kernels.triton import attention
from quire.data.kernels.triton.attention import SplitScratch, choose_splits, decode, decode_scratch
from quire.data.kernels.triton.backend import TritonBackend
from quire.data.kernels.triton.prompt import make_tiles, prompt, tile_queries
from quire.data.layers.norm import RMSNorm
from quire.data.layers.rope import Rope
from quire.data.layers.rotary import Rotary, queries_keys_values
from quire.data.runner.inputs import build_batch
from quire.data.runner.store import Store
from quire.vocabulary.plan import Row, Table
from quire.vocabulary.specs import LayerSpec, ModelSpec

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if CUDA else (torch.float32,)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
PDL = (False, True) if CUDA and torch.cuda.get_device_capability()[0] >= 9 else (False,)
LAYERS, LAYER = 3, 1
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


class Memory(NamedTuple):
    """Sequences in poisoned pages: sequence i has slot i + 1, its keys and values are histories[i] [2, n, kv, dim]."""

    cache: LayerCache
    tables: Tensor
    histories: list[Tensor]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


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


def filled(shape: Shape, lengths: tuple[int, ...], dtype: torch.dtype) -> Memory:
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


def dense(
    q: Tensor, both: Tensor, start: int, window: int | None, softcap: float | None = None, chunk: int | None = None
) -> Tensor:
    """q [n, heads, dim] at positions start ..; both [2, start + n, kv_heads, dim]; fp64."""
    k, v = both.double().repeat_interleave(q.shape[1] // both.shape[2], 2)
    at = torch.arange(len(k), device=q.device)
    query_at = at[start:, None]
    hidden = at[None] > query_at
    if window is not None:
        hidden |= at[None] <= query_at - window
    if chunk is not None:
        hidden |= at[None] // chunk != query_at // chunk
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def assert_close(got: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def slots_of(lengths: tuple[int, ...]) -> Tensor:
    return ints([i + 1 if n else 0 for i, n in enumerate(lengths)])


def check_decode(shape: Shape, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS, **options: object) -> None:
    memory = filled(shape, lengths, dtype)
    q = random(len(lengths), shape.heads, shape.dim, dtype=dtype, seed=99)
    slots, options = slots_of(lengths), {"splits": 2, **options}
    got = decode(q, memory.cache, memory.tables, slots, ints(lengths), **options)
    for i, n in enumerate(lengths):
        if n == 0:
            assert not got[i].any(), "padding gets zeros"
        else:
            want = dense(q[i : i + 1], memory.histories[i], n - 1, shape.window, shape.softcap, shape.chunk)
            assert_close(got[i : i + 1], want)


@pytest.mark.share(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5, 24, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (7, 1), (14, 2), (5, 1)])
def test_decode_equals_dense_attention(heads, kv_heads, window, dtype) -> None:
    check_decode(Shape(heads, kv_heads, window=window), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 5, 32, 33, 100])
@pytest.mark.parametrize("splits", [1, 5])
def test_decode_within_chunks_equals_dense_attention(splits, chunk, dtype) -> None:
    check_decode(Shape(chunk=chunk), dtype, (1, 5, 0, 16, 33, 150, 32, 100, 101), splits=splits)
    check_decode(Shape(7, 1, 8, 4, chunk=chunk, softcap=0.7), dtype, (64, 66, 99), splits=splits)


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 2, 5, 32])
def test_any_number_of_splits(splits, dtype, pdl) -> None:
    check_decode(Shape(window=None), dtype, (300, 0, 64, 1, 129), splits=splits, pdl=pdl)
    check_decode(Shape(window=70), dtype, (300, 0, 64, 1, 129), splits=splits, pdl=pdl)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 4])
def test_padding_without_a_place_writes_nothing(splits, dtype) -> None:
    lengths, shape = (150, 0, 33, 0), Shape()
    memory = filled(shape, lengths, dtype)
    q = random(3, shape.heads, shape.dim, dtype=dtype, seed=99)
    out = torch.full_like(q, 7.0)
    decode(q, memory.cache, memory.tables, slots_of(lengths), ints(lengths), out, splits=splits,
           rows=ints([2, -1, 0, -1]))  # fmt: skip
    for row, i in ((2, 0), (0, 2)):
        assert_close(out[row : row + 1], dense(q[row : row + 1], memory.histories[i], lengths[i] - 1, None))
    assert (out[1] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [1, 2, 3, 4, 8, 16, 32, 64, 128, 256])
def test_every_page_size(page, dtype) -> None:
    check_decode(Shape(page=page), dtype, (300, 17))
    check_prompt(Shape(page=page), dtype, ((12, 9), (0, 70), (100, 40)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 16, 64, 80, 96, 128, 256])
def test_every_head_size(dim, dtype) -> None:
    check_decode(Shape(dim=dim), dtype, (70, 3))
    check_prompt(Shape(dim=dim), dtype, ((12, 9), (0, 70)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_are_soft_capped(dtype) -> None:
    check_decode(Shape(softcap=0.7), dtype)
    check_prompt(Shape(softcap=0.7), dtype)


@OTHERS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 24])
def test_any_layout(window, dtype, layout) -> None:
    """With strides of its own, and contiguous; the memory checker allows no address between its numbers."""
    for page in (4, 64) if layout in PAGED else (1,):
        shape = Shape(6, 2, 16, page, window, layout=layout)
        check_decode(shape, dtype)
        check_prompt(shape, dtype)


def test_scale_is_the_layers_own() -> None:
    memory = filled(Shape(), (40, 7), torch.float32)
    q = random(2, 4, 16, dtype=torch.float32)
    slots, lengths = ints([1, 2]), ints([40, 7])
    want = decode(q * 0.5, memory.cache, memory.tables, slots, lengths, splits=1)
    got = decode(q, replace(memory.cache, scale=16**-0.5 / 2), memory.tables, slots, lengths, splits=1)
    torch.testing.assert_close(got, want)


def test_decode_equals_the_reference_page_by_page() -> None:
    shape = Shape(6, 2, 16, 4, window=9)
    memory = filled(shape, (31,), torch.float32)
    q = random(1, 6, 16, dtype=torch.float32)
    got = decode(q, memory.cache, memory.tables, ints([1]), ints([31]), splits=1)
    where = memory.cache.keys, memory.cache.values, memory.tables[1], 30
    torch.testing.assert_close(got[0], paged_attention(q[0], *where, scale=0.25, window=9), atol=1e-5, rtol=1e-5)
    cache = replace(memory.cache, window=None, chunk=12)
    got = decode(q, cache, memory.tables, ints([1]), ints([31]), splits=1)
    torch.testing.assert_close(got[0], paged_attention(q[0], *where, scale=0.25, chunk=12), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_may_be_a_view_of_the_projections(dtype) -> None:
    shape, lengths = Shape(4, 2), (40, 7, 200)
    memory = filled(shape, lengths, dtype)
    qkv = random(3, 4 + 2 * 2, 16, dtype=dtype)
    arguments = (memory.cache, memory.tables, ints([1, 2, 3]), ints(lengths))
    got = decode(qkv[:, :4], *arguments, splits=2)
    assert torch.equal(got, decode(qkv[:, :4].contiguous(), *arguments, splits=2))


def test_rows_name_queries_and_outputs() -> None:
    shape, lengths = Shape(), (40, 7)
    memory = filled(shape, lengths, torch.float32)
    q = random(6, 4, 16, dtype=torch.float32)
    arguments = (memory.cache, memory.tables, ints([1, 2]), ints(lengths))
    out = torch.full_like(q, 3.0)
    assert decode(q, *arguments, out, splits=1, rows=ints([4, 1])) is out
    assert torch.equal(out[[4, 1]], decode(q[[4, 1]], *arguments, splits=1))
    assert (out[[0, 2, 3, 5]] == 3.0).all()


@pytest.mark.parametrize("layout", CONTIGUOUS)
@pytest.mark.parametrize("splits", [1, 4])
def test_a_run_of_tokens_is_one_large_page(layout, splits) -> None:
    """The paged kernel, which looks into the table for each tile, computes the same to the bit."""
    shape, lengths = Shape(window=150, layout=layout), (300, 0, 33)
    memory = filled(shape, lengths, torch.float32)
    q = random(3, 4, 16, dtype=torch.float32)
    arguments = (memory.tables, slots_of(lengths), ints(lengths))
    want = decode(q, replace(memory.cache, contiguous=False), *arguments, splits=splits)
    assert torch.equal(decode(q, memory.cache, *arguments, splits=splits), want)


def test_scratch_is_used_again_whatever_is_in_it() -> None:
    shape, lengths = Shape(), (300, 40, 0, 130)
    memory = filled(shape, lengths, torch.float32)
    q = random(4, 4, 16, dtype=torch.float32)
    scratch = SplitScratch(*(x.fill_(torch.nan) for x in decode_scratch(4, 4, 2, 16, 4, DEVICE)))
    arguments = (q, memory.cache, memory.tables, slots_of(lengths), ints(lengths))
    want = decode(*arguments, splits=1)
    for splits in (4, 2, 4):
        got = decode(*arguments, splits=splits, scratch=scratch)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_split_does_not_depend_on_the_other_rows(dtype) -> None:
    shape, lengths = Shape(), (300, 40, 33, 150)
    memory = filled(shape, lengths, dtype)
    q = random(4, 4, 16, dtype=dtype)
    options = {"splits": 1}
    together = decode(q, memory.cache, memory.tables, slots_of(lengths), ints(lengths), **options)
    for i, n in enumerate(lengths):
        alone = decode(q[i : i + 1], memory.cache, memory.tables, ints([i + 1]), ints([n]), **options)
        assert torch.equal(alone[0], together[i])


def test_splits_fill_a_gpu_and_shrink_as_the_batch_grows() -> None:
    splits = [choose_splits(batch, 8, 132) for batch in (1, 2, 4, 8, 32, 128, 256, 1024)]
    assert splits[0] == 32
    assert splits[-2:] == [1, 1]
    assert splits == sorted(splits, reverse=True)
    assert choose_splits(24, 8, 132) == 2, "192 programs would leave a quarter of the places empty"
    assert choose_splits(1, 1, 132) == 32
    assert choose_splits(1, 1, 1) in (1, 2)


CHUNKS = ((12, 9), (0, 20), (40, 6), (0, 2), (130, 70))  # (tokens before, tokens of this step)


def tiled(shape: Shape, chunks: tuple[tuple[int, int], ...], dtype: torch.dtype) -> Tensor:
    starts, lengths = np.array(chunks, dtype=np.int64).T
    queries = tile_queries(shape.heads, shape.kv_heads, shape.dim, dtype.itemsize)
    offsets = np.cumsum(lengths) - lengths
    tiles = make_tiles(np.arange(len(chunks)) + 1, starts, lengths, offsets, queries)
    assert tiles.dtype == np.int32
    return torch.from_numpy(tiles).to(DEVICE)


def check_prompt(shape: Shape, dtype: torch.dtype, chunks: tuple[tuple[int, int], ...] = CHUNKS) -> None:
    memory = filled(shape, tuple(map(sum, chunks)), dtype)
    if memory.cache.bounded and shape.layout in PAGED:  # pages that all queries have left behind may hold anything
        for slot, (start, _) in enumerate(chunks, 1):
            left = start // shape.chunk * shape.chunk if shape.chunk else max(start - shape.window + 1, 0)
            memory.tables[slot, : left // shape.page] = memory.tables[slot, -1]
    q = random(sum(n for _, n in chunks), shape.heads, shape.dim, dtype=dtype, seed=99)
    tiles = tiled(shape, chunks, dtype)
    got = prompt(q, memory.cache, memory.tables, tiles)
    bounds = np.cumsum([0] + [n for _, n in chunks]).tolist()
    for (a, b), (start, _), both in zip(pairwise(bounds), chunks, memory.histories):
        assert_close(got[a:b], dense(q[a:b], both, start, shape.window, shape.softcap, shape.chunk))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5, 24, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (7, 1), (5, 1)])
def test_prompts_equal_dense_attention(heads, kv_heads, window, dtype) -> None:
    check_prompt(Shape(heads, kv_heads, window=window), dtype)


@pytest.mark.share(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 5, 32, 33, 100, 128])
@pytest.mark.parametrize("layout", ["pages", "token runs"])
def test_prompts_within_chunks_equal_dense_attention(layout, chunk, dtype) -> None:
    check_prompt(Shape(chunk=chunk, layout=layout), dtype)
    check_prompt(Shape(5, 1, 8, 4, chunk=chunk, softcap=0.7, layout=layout), dtype, ((63, 66), (127, 3), (0, 200)))


@pytest.mark.parametrize("dtype", DTYPES)
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
    assert_close(out[2:7], dense(q[2:7], memory.histories[0], 35, None))
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
    chunks = np.array(CHUNKS, dtype=np.int64)
    lengths = chunks[:, 1]
    tiles = make_tiles(np.arange(5) + 1, chunks[:, 0], lengths, np.cumsum(lengths) - lengths, 8)
    covered = np.concatenate([np.arange(token, token + many) for _, token, many, _ in tiles])
    assert sorted(covered.tolist()) == list(range(int(lengths.sum())))
    ends = (tiles[:, 2] + tiles[:, 3]).tolist()
    assert ends == sorted(ends, reverse=True)
    assert tiles[:, 2].max() == 8


BATCHES = {
    "decode": [(0, 1), (5, 1), (16, 1), (33, 1)],
    "prompts": [(0, 1), (0, 16), (0, 29)],
    "chunk": [(8, 9), (31, 7)],
    "mixed": [(12, 1), (0, 20), (4, 6), (40, 1), (3, 1)],
    "long": [(0, 100), (60, 40), (10, 90)],
}


def stored(sizes: list[tuple[int, int]], shape: Shape, dtype: torch.dtype) -> Store:
    """A store with a table for each sequence, all other pages poisoned."""
    layer = LayerSpec(shape.kv_heads, shape.dim, shape.window, softcap=shape.softcap, chunk=shape.chunk)
    spec = ModelSpec("test", (layer,) * LAYERS, 10, 4096, 16, shape.heads, 16, 0)
    width = max(-(-(a + b) // shape.page) for a, b in sizes)
    page_bytes = LAYERS * layer.token_bytes(dtype.itemsize) * shape.page
    pages = len(sizes) * width + 1
    geometry = one_size(
        (tuple(range(LAYERS)), shape.window), pages=pages, page_bytes=page_bytes, slots=len(sizes) + 1, width=width,
        tokens=shape.page, itemsize=dtype.itemsize,
    )  # fmt: skip
    store = Store(geometry, spec, dtype, DEVICE)
    store.views[0][1:].fill_(torch.nan)
    free = (np.random.default_rng(0).permutation(pages - 1) + 1).tolist()
    for slot, (before, now) in enumerate(sizes, 1):
        store.replay((Table(slot, 0, 0, tuple(free.pop() for _ in range(-(-(before + now) // shape.page)))),))
    return store


def run_backend(
    backend: TritonBackend, sizes: list[tuple[int, int]], shape: Shape, dtype: torch.dtype,
    rotary: Rotary | None = None, norms: tuple[RMSNorm, RMSNorm] | None = None, fused: bool = False,
) -> None:  # fmt: skip
    """A first step for the tokens before, a second for those of now, which is compared with dense attention."""
    store = stored(sizes, shape, dtype)
    cache, heads, kv = store.caches[LAYER], shape.heads, shape.kv_heads
    raw = [random(a + b, heads + 2 * kv, shape.dim, dtype=dtype, seed=i) for i, (a, b) in enumerate(sizes)]
    turned = []
    for x in raw:
        angles = None if rotary is None else rotary.at(torch.arange(len(x), device=DEVICE), dtype)
        turned.append(queries_keys_values(x, heads, angles, norms))
    last = torch.zeros(len(sizes) + 1, dtype=torch.int64, device=DEVICE)
    earlier = [(i, 0, before) for i, (before, _) in enumerate(sizes) if before]
    present = [(i, before, now) for i, (before, now) in enumerate(sizes)]
    for rows in filter(None, (earlier, present)):
        batch = build_batch(tuple(Row(i + 1, (1,) * n, start, 0) for i, start, n in rows), store, last)
        plan = backend.plan(batch, cache)
        if fused:
            qkv = torch.cat([raw[i][a : a + n] for i, a, n in rows])
            got = backend.rotate_and_attend(qkv, rotary, norms, cache, plan)
        else:
            q, k, v = (torch.cat([turned[i][j][a : a + n] for i, a, n in rows]) for j in range(3))
            got = backend.attend(q, k, v, cache, plan)
    bounds = np.cumsum([0] + [n for _, n in sizes]).tolist()
    for (a, b), (start, _), (q, k, v) in zip(pairwise(bounds), sizes, turned):
        want = dense(q[start:], torch.stack((k, v)), start, shape.window, shape.softcap, shape.chunk)
        assert_close(got[a:b], want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (7, 1)])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_backend_equals_dense_attention(batch, heads, kv_heads, window, dtype) -> None:
    run_backend(TritonBackend(), BATCHES[batch], Shape(heads, kv_heads, 8, window=window), dtype)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backend_attends_within_chunks(deterministic, batch) -> None:
    for fused in (False, True):
        backend = TritonBackend(deterministic=deterministic)
        run_backend(backend, BATCHES[batch], Shape(chunk=12, page=4), torch.float32, fused=fused)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_backend_caps_scores(dtype, deterministic) -> None:
    shape = Shape(softcap=0.7)
    for fused in (False, True):
        run_backend(TritonBackend(deterministic=deterministic), BATCHES["mixed"], shape, dtype, fused=fused)


@pytest.mark.share(4)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("normalised", [False, True])
def test_the_backend_rotates_and_writes_in_one_pass(normalised, batch) -> None:
    rotary = Rotary(Rope(kind="default", theta=10000.0, original_len=256), 16, 256)
    rotary.prepare(DEVICE)
    norms = None
    if normalised:
        norms = tuple(RMSNorm(16, 1e-6, torch.float32, DEVICE) for _ in range(2))
        for i, norm in enumerate(norms):
            norm.weight.data = random(16, dtype=torch.float32, seed=i)
    run_backend(TritonBackend(), BATCHES[batch], Shape(), torch.float32, rotary, norms, fused=True)


def test_without_rotation_the_fused_pass_is_only_a_write() -> None:
    run_backend(TritonBackend(deterministic=True), BATCHES["prompts"], Shape(), torch.float32, fused=True)
