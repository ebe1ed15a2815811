"""Attention of long prompts on Hopper is that of `prompt`, to the bit, and dense attention in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from attention_steps import BATCHES
from grids import random
from test_paged_attention import (
    CHUNKS,
    CONTIGUOUS,
    LONG,
    Chunks,
    Memory,
    Shape,
    check_rows,
    filled,
    run_backend,
    tiles_of,
)
from torch import Tensor

from quire.kernels.forward_batch import LayerCache
from quire.kernels.triton import backend, launch, prefill, prefill_hopper
from quire.kernels.triton.backend import TritonBackend

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU: Gluon isn't interpreted")
HALVES = (torch.float16, torch.bfloat16)
MANY: Chunks = ((0, 64), (63, 1), (64, 65), (0, 129), (1, 700), (1000, 3), (511, 513), (0, 1))


def cache_of(dim: int = 128, dtype: torch.dtype = torch.bfloat16, **options: Any) -> LayerCache:
    keys, values = torch.zeros(1, 2, 4, 16, dim, dtype=dtype).unbind(1)
    return LayerCache(keys, values, 16, dim**-0.5, **options)


def test_what_it_takes() -> None:
    assert prefill_hopper.supports(cache_of())
    assert prefill_hopper.supports(cache_of(dtype=torch.float16))
    assert not prefill_hopper.supports(cache_of(dtype=torch.float32))
    assert not prefill_hopper.supports(cache_of(dim=64))
    assert prefill_hopper.supports(replace(cache_of(window=4096), softcap=30.0, contiguous=True))
    assert [prefill_hopper.tile_queries(group) for group in (1, 4, 7, 192)] == [192, 48, 27, 1]


def test_where_the_backend_chooses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(made: TritonBackend, *chunks: tuple[int, int], **options: Any) -> bool:
        starts, lengths = np.array(chunks, dtype=np.int64).reshape(-1, 2).T
        return made._choose_kernel(cache_of(**options), lengths, starts + lengths)[0] is prefill_hopper.prefill

    assert not chosen(TritonBackend(), (0, 8192)), "no such GPU"
    monkeypatch.setattr(backend, "supports_hopper_kernel", lambda device: True)
    assert chosen(TritonBackend(), (0, 4096))
    assert chosen(TritonBackend(), (0, 64), (7000, 512))
    assert not chosen(TritonBackend())
    assert not chosen(TritonBackend(), (0, 4095))
    assert not chosen(TritonBackend(), (4094, 2), *((0, 64),) * 127), "nearly all of the work is in short ones"
    assert not chosen(TritonBackend(deterministic=True), (0, 8192))
    assert chosen(TritonBackend(), (0, 8192), softcap=30.0, window=4096)
    assert not chosen(TritonBackend(), (0, 8192), window=4095)
    assert not chosen(TritonBackend(), (0, 8192), dim=64)


def test_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper, gpu = launch.supports_hopper_kernel.__wrapped__, torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    versions = (("3.9.0", False), ("3.60.0", False), ("3.6.0+git1.2", True), ("3.7.1", True))
    for version, known in versions:
        monkeypatch.setattr(triton, "__version__", version)
        assert hopper(gpu) == known
        notice = launch.hopper_notice(gpu)
        assert notice is None if known else f"Triton {version} isn't one of 3.6, 3.7" in str(notice)
    assert not hopper(torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        assert not hopper(gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not hopper(gpu)
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    assert launch.hopper_notice(gpu) is None, "it has no such kernel in any version"


def both(shape: Shape, chunks: Chunks, dtype: torch.dtype) -> tuple[Memory, Tensor, Tensor, Tensor]:
    """The memory, the queries, and their results by `prompt` and by this kernel."""
    memory = filled(shape, tuple(map(sum, chunks)), dtype)
    q = random(sum(n for _, n in chunks), shape.heads, shape.dim, dtype=dtype, seed=99)
    queries = prefill.tile_queries(shape.heads, shape.kv_heads, shape.dim, dtype.itemsize)
    where = memory.cache, memory.tables
    want = prefill.prefill(q, *where, tiles_of(chunks, queries))
    tiles = tiles_of(chunks, prefill_hopper.tile_queries(shape.heads // shape.kv_heads))
    return memory, q, want, prefill_hopper.prefill(q, *where, tiles)


@on_hopper
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (7, 1), (14, 2), (56, 8), (5, 1), (71, 1)])
@pytest.mark.parametrize("chunks", [CHUNKS, MANY])
def test_it_equals_the_other_and_dense_attention(heads, kv_heads, chunks, dtype) -> None:
    shape = Shape(heads, kv_heads, 128)
    memory, q, want, got = both(shape, chunks, dtype)
    assert torch.equal(got, want), "to the bit"
    check_rows(got, q, memory, shape, chunks)


@on_hopper
@pytest.mark.parametrize(
    "shape",
    [
        *(Shape(8, 2, 128, page) for page in (1, 2, 3, 16, 48, 64, 256)),
        *(Shape(8, 2, 128, window=w, softcap=cap) for w in (1, 40, 64, 200, 700, 1000) for cap in (None, 30.0)),
        *(Shape(8, 2, 128, window=window, layout=layout) for window in (None, 100) for layout in CONTIGUOUS),
    ],
    ids=str,
)
def test_every_page_size_window_and_cap(shape: Shape) -> None:
    """Pages are poisoned around what a sequence has written; a window's edge lies in the midst of blocks and tiles."""
    memory, q, want, got = both(shape, MANY, torch.bfloat16)
    assert torch.equal(got, want), "to the bit"
    check_rows(got, q, memory, shape, MANY)


@on_hopper
def test_pages_before_a_window_are_not_read() -> None:
    memory = filled(Shape(8, 2, 128, window=100), (1000,), torch.bfloat16)
    q, tiles = random(64, 8, 128, dtype=torch.bfloat16), tiles_of(((936, 64),), 48)
    want = prefill_hopper.prefill(q, memory.cache, memory.tables, tiles)
    for logical in range((936 - 99) // 16):
        page = memory.tables[1, logical]
        memory.cache.keys[page], memory.cache.values[page] = torch.nan, torch.nan
    assert torch.equal(prefill_hopper.prefill(q, memory.cache, memory.tables, tiles), want)


@on_hopper
def test_the_same_every_time() -> None:
    """Waiting for the wrong block would show as a difference now and then."""
    chunks = tuple((1000 * i, 2000 - 100 * i) for i in range(8))
    memory, q, want, first = both(Shape(8, 2, 128), chunks, torch.bfloat16)
    assert torch.equal(first, want)
    tiles, out = tiles_of(chunks, 48), torch.empty_like(q)
    for _ in range(50):
        prefill_hopper.prefill(q, memory.cache, memory.tables, tiles, out.fill_(torch.nan))
        assert torch.equal(out, want)


@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=on_hopper)])
def test_the_backend_chooses_it_for_long_contexts(
    real: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense attention for long contexts, then for short ones. On any device: `prompt` in its place, in tiles of 7
    queries."""
    calls, attend = [], prefill_hopper.prefill if real else prefill.prefill

    def noted(*args: Any, **options: Any) -> Tensor:
        calls.append(args)
        return attend(*args, **options)

    monkeypatch.setattr(prefill_hopper, "prefill", noted)
    monkeypatch.setattr(prefill_hopper, "MIN_CONTEXT", 50)
    if not real:
        monkeypatch.setattr(backend, "supports_hopper_kernel", lambda device: True)
        monkeypatch.setattr(prefill_hopper, "supports", lambda cache: True)
        monkeypatch.setattr(prefill_hopper, "tile_queries", lambda group: 7)
    shape, dtype = (Shape(8, 2, 128), torch.bfloat16) if real else (Shape(), torch.float32)
    counts = []
    for batch in (LONG, BATCHES["mixed"]):
        run_backend(TritonBackend(), batch, shape._replace(window=window), dtype)
        counts.append(len(calls))
    assert counts[0] > 0
    assert counts[1] == counts[0], "the contexts of the second are short"
