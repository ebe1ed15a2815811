"""Attention over keys and values in 8 bits equals dense attention in fp64 over what the cells hold, on each instruction
set that is built here; what is written is the nearest that a cell holds, and nothing else is written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from paged_rows import VARIANTS, Shape, cells_of, filled, kernels, of_cells
from test_native_attention import SHAPES, SIZES, answers, assert_close
from torch import Tensor

from quire.data.kernels.batch import LayerCache
from quire.data.kernels.cpu.backend import NativeBackend
from quire.data.kernels.cpu.library import Tape

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no kernels are built that this machine runs")
DTYPES = [torch.float32, torch.bfloat16]
MIXED = [*SIZES["mixed"], (600, 1), (0, 1)]


def cells(cache: LayerCache) -> tuple[Tensor, Tensor]:
    """Keys and values with their scales: [pages, kv_heads, page_tokens, dim + 4]."""
    keys, values = (
        x.as_strided((*x.shape[:3], cache.head_dim + 4), x.stride(), x.storage_offset())
        for x in (cache.keys, cache.values)
    )
    return keys, values


@pytest.mark.share(6)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_equal_dense_attention(variant, dtype, shape) -> None:
    sizes = MIXED if shape in ("plain", "softcap", "eight and one") else SIZES["mixed"]
    rows = filled(SHAPES[shape]._replace(dtype=dtype, rounded=True), sizes)
    assert rows.cache.rounded
    assert_close(answers(rows, NativeBackend(kernels=kernels(variant, 2))), rows.expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_that_see_one_another_both_ways(dtype) -> None:
    rows = filled(Shape(whole=True, window=5, dtype=dtype, rounded=True), [(0, 1), (0, 40), (0, 290)])
    assert_close(answers(rows, NativeBackend(kernels=kernels(VARIANTS[0], 2))), rows.expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(variant, dtype) -> None:
    rows = filled(Shape(dtype=dtype, rounded=True), MIXED)
    one, *others = (answers(rows, NativeBackend(kernels=kernels(variant, threads))) for threads in (1, 2, 3, 8))
    assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("deterministic", [False, True])
def test_neighbours_change_no_bit(deterministic) -> None:
    backend = NativeBackend(deterministic=deterministic, kernels=kernels(VARIANTS[0], 2))
    rows = filled(Shape(window=90, dtype=torch.bfloat16, rounded=True), SIZES["mixed"])
    together = answers(rows, backend)
    for i in range(len(rows.batch.slots)):
        a, n = int(rows.batch.offsets[i]), int(rows.batch.lengths[i])
        part, own = slice(a, a + n), slice(i, i + 1)
        batch = replace(
            rows.batch, positions=rows.batch.positions[part], token_slots=rows.batch.token_slots[part],
            slots=rows.batch.slots[own], starts=rows.batch.starts[own], lengths=rows.batch.lengths[own],
            offsets=np.zeros(1, dtype=np.int64), _inside={}, _places={},
        )  # fmt: skip
        alone = rows._replace(batch=batch, q=rows.q[part], k=rows.k[part], v=rows.v[part])
        assert torch.equal(answers(alone, backend), together[part])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_tape_gives_what_a_step_gives(variant, deterministic) -> None:
    library = kernels(variant, 2)
    backend = NativeBackend(deterministic=deterministic, kernels=library)
    rows = filled(Shape(dtype=torch.bfloat16, rounded=True), [(40, 1), (7, 1), (600, 1)])
    qkv = torch.cat((rows.q, rows.k, rows.v), 1)
    library.tape = tape = Tape()
    try:
        step = backend.singles(rows.batch.token_slots, rows.batch.positions)
        plan = backend.plan_singles(step, rows.batch.tables[0], rows.cache)
        out = backend.rotate_and_attend(qkv, None, None, rows.cache, plan)
    finally:
        library.tape = None
    library.run(tape)
    assert torch.equal(out, answers(rows, backend))
    assert_close(out, rows.expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [6, 7, 64, 80])
def test_cells_are_the_nearest_and_nothing_else_is_written(variant, dtype, dim) -> None:
    """A head's numbers are off by half of a 127th of its largest one at most. All bytes of other tokens stay."""
    backend = NativeBackend(kernels=kernels(variant, 3))
    rows = filled(Shape(dim=dim, dtype=dtype, rounded=True), [(40, 1), (3, 9)])
    generator = torch.Generator().manual_seed(1)
    size = 10 ** torch.randn(len(rows.k), 2, 1, generator=generator)
    k, v = ((torch.randn(x.shape, generator=generator) * size).to(dtype) for x in (rows.k, rows.v))
    k[1, 0], v[1, 1] = 0, 1e-32
    k[2, 0, 3], v[2, 1, 5] = torch.inf, torch.nan
    before = [x.clone() for x in cells(rows.cache)]
    backend.attend(rows.q, k, v, rows.cache, backend.plan(rows.batch, rows.cache))
    pages, places = rows.batch.places(rows.cache)
    for x, old, now in zip((k, v), before, cells(rows.cache)):
        found, wanted = now[pages, :, places], x.double()
        bound = wanted.abs().amax(-1, keepdim=True) / 127
        off = (of_cells(found) - wanted).abs()
        finite = wanted.isfinite().all(-1)
        assert (off <= 0.5001 * bound + 1e-30)[finite].all()
        assert of_cells(found)[~finite].isnan().all()
        assert (~finite).sum() == 1
        usual = finite & (bound[..., 0] > 1e-20)
        assert (found[..., :dim].int() - cells_of(x)[..., :dim].int()).abs()[usual].max() <= 1
        old[pages, :, places] = found
        assert torch.equal(old, now)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_are_rounded_once_behind_their_rotation(variant, dtype) -> None:
    backend = NativeBackend(kernels=kernels(variant, 2))
    rows = filled(Shape(dtype=dtype, rounded=True), [(40, 1), (3, 9)])
    qkv, generator = torch.cat((rows.q, rows.k, rows.v), 1), torch.Generator().manual_seed(1)

    class Turned:
        table = torch.randn(50, 2, 32, generator=generator)

    k, (cos, sin) = rows.k.double(), Turned.table[rows.batch.positions].double().unsqueeze(1).unbind(2)
    low, high = k.chunk(2, -1)
    k = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    backend.rotate_and_attend(qkv, Turned(), None, rows.cache, backend.plan(rows.batch, rows.cache))
    pages, places = rows.batch.places(rows.cache)
    keys, values = (of_cells(x[pages, :, places]) for x in cells(rows.cache))
    assert ((keys - k).abs() <= 0.5001 / 127 * k.abs().amax(-1, keepdim=True)).all()
    assert torch.equal(values, rows.v.double())
