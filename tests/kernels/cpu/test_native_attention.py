"""Attention on a CPU by kernels of our own equals dense attention in fp64, on every instruction set that is built here,
and over keys and values in 8 bits over what their cells hold (`rounded`); nothing depends on threads or on neighbours,
and nothing outside of a sequence is read."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from native_kernels import NONE, VARIANTS, guarded
from paged_rows import Rows, Shape, cells, cells_of, filled, kernels, of_cells
from torch import Tensor

from quire.errors import StartupError
from quire.kernels.cpu.backend import NativeBackend, supports, tile_queries
from quire.kernels.cpu.library import RecordedOps
from quire.kernels.forward_batch import ForwardBatch, HeadNorms, LayerCache

pytestmark = pytest.mark.skipif(not VARIANTS, reason=NONE)
SIZES = {
    "decode": [(0, 1), (5, 1), (16, 1), (63, 1), (300, 1)],
    "long": [(5000, 1), (700, 1)],
    "prompts": [(0, 1), (0, 16), (0, 29), (0, 200), (0, 290)],
    "mixed": [(12, 1), (0, 20), (4, 6), (140, 3), (200, 70), (300, 1)],
    "longer": [(12, 1), (0, 20), (4, 6), (140, 3), (200, 70), (300, 1), (600, 1), (0, 1)],
}
SHAPES = {
    "plain": Shape(),
    "window": Shape(window=24, page=4),
    "wide window": Shape(window=150, kv_heads=6),
    "chunk": Shape(chunk=40, page=32),
    "softcap": Shape(softcap=0.7, page=1),
    "sinks": Shape(sinks=True),
    "sinks in windows": Shape(8, 1, 40, sinks=True, window=24, page=4),
    "one key head": Shape(7, 1, 80),
    "eight and one": Shape(9, 1, 96),
    "odd": Shape(4, 2, 7, page=3),
    "narrow": Shape(4, 4, 8, page=2),
    "128": Shape(5, 1, 128, page=64),
    "256": Shape(4, 2, 256, window=100),
    "512": Shape(8, 1, 512),
    "tokens first": Shape(dim=40, layout="tokens first"),
    "two buffers": Shape(window=24, softcap=3.0, layout="two buffers"),
    "gaps": Shape(page=8, layout="gaps"),
    "contiguous": Shape(layout="contiguous", window=30),
}
BOTH_WAYS = {"both ways": Shape(whole=True), "both ways in windows": Shape(whole=True, window=5)}
LONG = ("plain", "window", "softcap", "odd", "sinks")
LONGER = ("plain", "softcap", "eight and one")


def answers(rows: Rows, backend: NativeBackend, cache: LayerCache | None = None) -> Tensor:
    cache = cache or rows.cache
    backend.check_cache(cache)
    return backend.attend(rows.q, rows.k, rows.v, cache, backend.plan(rows.batch, cache))


def part_of(rows: Rows, cut: slice, **more: Any) -> Rows:
    """A step of some of its tokens alone."""
    positions, slots = rows.batch.positions[cut], rows.batch.token_slots[cut]
    batch = replace(rows.batch, positions=positions, token_slots=slots, _per_budget={}, _slot_mappings={}, **more)
    return rows._replace(batch=batch, q=rows.q[cut], k=rows.k[cut], v=rows.v[cut])


def taped(
    backend: NativeBackend, qkv: Tensor, singles: Sequence[Any], table: Tensor, cache: LayerCache
) -> tuple[RecordedOps, Tensor]:
    """A tape of a step of single tokens, and where it will leave what it finds."""
    with backend.library.record() as tape:
        plan = backend.plan_captured(backend.decode_batch(*singles), table, cache)
        return tape, backend.rotate_and_attend(qkv, None, None, cache, plan)


def assert_close(got: Tensor, want: Tensor) -> None:
    near = 1e-5 if got.dtype == torch.float32 else 0.02
    torch.testing.assert_close(got.double(), want, atol=near, rtol=near)


@pytest.mark.share(6)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "sizes", "rounded"),
    [(shape, sizes, False) for shape in SHAPES for sizes in ("decode", "prompts", "mixed")]
    + [(shape, "long", False) for shape in LONG]
    + [(shape, "longer" if shape in LONGER else "mixed", True) for shape in SHAPES]
    + [(shape, "prompts", rounded) for shape in BOTH_WAYS for rounded in (False, True)],
)
def test_rows_equal_dense_attention(variant, dtype, shape, sizes, rounded) -> None:
    rows = filled((SHAPES | BOTH_WAYS)[shape]._replace(dtype=dtype, rounded=rounded), SIZES[sizes])
    assert rows.cache.is_int8 == rounded
    assert_close(answers(rows, NativeBackend(kernels=kernels(variant, 2))), rows.expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounded", [False, True])
def test_threads_change_no_bit(variant, dtype, rounded) -> None:
    rows = filled(Shape(dtype=dtype, rounded=rounded), [*SIZES["mixed"], (2000, 1)])
    one, *others = (answers(rows, NativeBackend(kernels=kernels(variant, threads))) for threads in (1, 2, 3, 8))
    assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rounded", [False, True])
def test_neighbours_change_no_bit(deterministic, rounded) -> None:
    backend = NativeBackend(deterministic=deterministic, kernels=kernels(VARIANTS[0], 2))
    rows = filled(Shape(window=90, dtype=torch.bfloat16, rounded=rounded), SIZES["mixed"])
    together = answers(rows, backend)
    for i in range(len(rows.batch.slots)):
        a, n = int(rows.batch.offsets[i]), int(rows.batch.lengths[i])
        own = {name: getattr(rows.batch, name)[i : i + 1] for name in ("slots", "starts", "lengths")}
        alone = part_of(rows, slice(a, a + n), offsets=np.zeros(1, dtype=np.int64), **own)
        assert torch.equal(answers(alone, backend), together[a : a + n])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_in_any_pieces_has_the_same_bits_if_asked(variant) -> None:
    backend = NativeBackend(deterministic=True, kernels=kernels(variant, 2))
    whole = filled(Shape(window=70, dtype=torch.bfloat16), [(0, 150)])
    expected = answers(whole, backend)
    for first, last in ((100, 150), (149, 150), (37, 40)):
        piece = part_of(whole, slice(first, last), starts=np.array([first]), lengths=np.array([last - first]))
        assert torch.equal(answers(piece, backend), expected[first:last])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("budget", "rounded"), [(None, False), (24, False), (None, True)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tape_serves_whatever_its_memory_holds(variant, budget, rounded, deterministic) -> None:
    """Recorded with rows of padding, replayed with others."""
    library = kernels(variant, 2)
    backend = NativeBackend(deterministic=deterministic, kernels=library)
    rows = filled(Shape(dtype=torch.bfloat16, rounded=rounded), [(40, 1), (7, 1), (1300, 1)])
    cache = replace(rows.cache, budget=budget)
    step = rows.batch.token_slots, rows.batch.positions, rows.batch.tables[0]
    slots, positions, table = (torch.zeros_like(x) for x in step)
    prompts = torch.tensor([0, 30, 8, 9]) if budget else None
    qkv = torch.zeros(3, 10, 64, dtype=torch.bfloat16)
    tape, out = taped(backend, qkv, (slots, positions, prompts), table, cache)
    qkv.copy_(torch.cat((rows.q, rows.k, rows.v), 1))
    for place, x in zip((slots, positions, table), step):
        place.copy_(x)
    library.run(tape)
    batch = rows.batch
    if prompts is not None:
        batch = replace(batch, prompt_lens=(prompts[1:].numpy(), prompts[batch.token_slots]))
    expected = backend.attend(rows.q, rows.k, rows.v, cache, backend.plan(batch, cache))
    assert torch.equal(out, expected)
    if budget is None:
        assert_close(out, rows.expected)


def rotated(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    cos, sin = table[positions].double().unsqueeze(1).unbind(2)
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [6, 64, 80])
@pytest.mark.parametrize("normed", [None, "as the cache", "fp32", "values too", "keys as values"])
def test_rotation_is_rounded_once(variant, dtype, dim, normed) -> None:
    backend = NativeBackend(kernels=kernels(variant, 3))
    rows = filled(Shape(dim=dim, dtype=dtype), [(40, 1), (3, 9)])
    qkv = torch.cat((rows.q, rows.k, rows.v), 1)
    turned, generator = qkv.double(), torch.Generator().manual_seed(1)
    weights = torch.randn(2, dim, generator=generator).to(torch.float32 if normed == "fp32" else dtype)

    class Plain:
        table = torch.randn(50, 2, dim // 2, generator=generator)
        eps = 1e-5

        def __init__(self, weight: Tensor) -> None:
            self.weight = weight

    if normed == "keys as values":
        qkv, turned[:, 8:] = qkv[:, :8], turned[:, 6:8]
    norm_values = normed in ("values too", "keys as values")
    if normed:
        turned *= (turned.square().mean(-1, keepdim=True) + Plain.eps).rsqrt()
        turned *= torch.cat((weights[0].expand(6, dim), weights[1].expand(2, dim), weights[0].expand(2, dim)))
    values = turned[:, 8:] if norm_values else rows.v
    turned = rotated(turned, Plain.table, rows.batch.positions)
    plan = backend.plan(rows.batch, rows.cache)
    norms = HeadNorms(*(Plain(weights[i]) for i in (0, 1, 0)[: 2 + norm_values])) if normed else None
    backend.rotate_and_attend(qkv, Plain(weights[0]), norms, rows.cache, plan)
    pages, places = rows.batch.slot_mapping(rows.cache)
    near = {"atol": 1e-6, "rtol": 0.51 * torch.finfo(dtype).eps + 2e-6}
    torch.testing.assert_close(qkv[:, :6].double(), turned[:, :6], **near)
    torch.testing.assert_close(rows.cache.keys[pages, :, places].double(), turned[:, 6:8], **near)
    if norm_values:
        torch.testing.assert_close(rows.cache.values[pages, :, places].double(), values, **near)
    else:
        assert torch.equal(rows.cache.values[pages, :, places], rows.v)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
    pages, places = rows.batch.slot_mapping(rows.cache)
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_rounded_once_behind_their_rotation(variant, dtype) -> None:
    backend = NativeBackend(kernels=kernels(variant, 2))
    rows = filled(Shape(dtype=dtype, rounded=True), [(40, 1), (3, 9)])
    qkv, generator = torch.cat((rows.q, rows.k, rows.v), 1), torch.Generator().manual_seed(1)

    class Turned:
        table = torch.randn(50, 2, 32, generator=generator)

    k = rotated(rows.k.double(), Turned.table, rows.batch.positions)
    backend.rotate_and_attend(qkv, Turned(), None, rows.cache, backend.plan(rows.batch, rows.cache))
    pages, places = rows.batch.slot_mapping(rows.cache)
    keys, values = (of_cells(x[pages, :, places]) for x in cells(rows.cache))
    assert ((keys - k).abs() <= 0.5001 / 127 * k.abs().amax(-1, keepdim=True)).all()
    assert torch.equal(values, rows.v.double())


def test_other_numbers_and_larger_heads_are_refused() -> None:
    backend = NativeBackend(kernels=kernels(VARIANTS[0], 1))
    assert supports(torch.float32, 64, 256)
    for shape in (Shape(dtype=torch.float16), Shape(64, 1, 2048, page=1)):
        cache = filled(shape._replace(heads=shape.kv_heads), [(0, 1)]).cache
        with pytest.raises(StartupError, match="--attention is native"):
            backend.check_cache(replace(cache, heads=shape.heads))


def between_guards(
    backend: NativeBackend, dtype: torch.dtype, dim: int, page: int, end: int, lengths: int, first: bool, rounded: bool,
    beyond: bool = False,
) -> None:  # fmt: skip
    """A sequence of `end` tokens whose last `lengths` are computed; its tokens fill its pages. `beyond` reads one token
    more than a page has."""
    heads, kv, pages = 6, 2, end // page
    kept, cell = (torch.int8, dim + 4) if rounded else (dtype, dim)
    views = []
    for _ in range(2):
        numbers, stride = guarded(pages * kv, page * cell, kept, first)
        view = numbers.as_strided((pages, kv, page, dim), (kv * stride, stride, cell, 1))
        views.append(view.copy_(torch.randn(view.shape)))
    if beyond:
        page, end, lengths = page + 1, page + 1, 1
        views = [view.as_strided((pages, kv, page, dim), view.stride()) for view in views]
    q = guarded(1, lengths * heads * dim, dtype, first)[0][: lengths * heads * dim].view(lengths, heads, dim)
    q.copy_(torch.randn(q.shape))
    k = torch.randn(lengths, kv, dim).to(dtype)
    cache = LayerCache(*views, heads, dim**-0.5, window=page + 3 if first else None, writes_kv=not beyond)
    table, positions = torch.arange(pages + 1)[None].clamp(max=pages - 1), torch.arange(end - lengths, end)
    one = np.zeros(1, dtype=np.int64)
    batch = ForwardBatch(positions, positions, positions * 0, positions[:0], one, one + end - lengths, one + lengths,
                         one, one, [table])  # fmt: skip
    backend.attend(q, k, k, cache, backend.plan(batch, cache))


@pytest.mark.share(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_outside_of_a_sequence_is_touched(variant) -> None:
    """Every head's tokens of a page, and the queries, stand between pages that nobody may touch."""
    backend = NativeBackend(kernels=kernels(variant, 2))
    dtypes, dims = (torch.float32, torch.bfloat16), (64, 80, 7, 8, 40, 128)
    pages = (16, 48), (1, 5), (137, 137), (300, 600)
    for dtype, dim, (page, end), most, *how in product(dtypes, dims, pages, (1, 21), *[(False, True)] * 2):
        between_guards(backend, dtype, dim, page, end, min(end, most), *how)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_token_beyond_ends_the_process(variant) -> None:
    """The guards of the test above are seen."""
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            backend = NativeBackend(kernels=kernels(variant, 1))
            between_guards(backend, torch.float32, 64, 16, 48, 1, False, False, beyond=True)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


@pytest.mark.parametrize("other", [(1, 64), (2, 512)])
def test_layers_of_unlike_heads_have_plans_of_their_own(other: tuple[int, int]) -> None:
    """Their tiles differ, as a thread's scratch has room for fewer rows of larger heads."""
    caches = []
    for kv_heads, dim in ((2, 64), other):
        pages = torch.zeros(2, kv_heads, 16, dim)
        caches.append(LayerCache(pages, pages, 8, dim**-0.5))
    one, two = (tile_queries(cache.heads // cache.kv_heads, cache.head_dim) for cache in caches)
    assert one != two
    assert caches[0].plan_key != caches[1].plan_key
