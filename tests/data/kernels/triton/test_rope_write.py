"""Rotation and KV writes equal the plain composition in fp64, and nothing but the tokens' own places is written."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from grids import CUDA, DEVICE, LAUNCHES, PDL, TYPES, assert_rounded, random
from test_paged_attention import CONTIGUOUS, OTHERS, Shape, placed
from torch import Tensor

from quire.data.kernels.batch import LayerCache
from quire.data.kernels.triton.rope_write import rope_write
from quire.data.layers.rope import Rope
from quire.data.layers.rotary import cos_sin, rotate

SLOTS, LENGTH, EPS = 4, 513, 1e-6


class Case(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    page_tokens: int
    layout: str = "pages"


def norms_of(dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    return random(dim, dtype=dtype, seed=3) + 1, random(dim, dtype=dtype, seed=4) + 1, EPS


def rotary_of(dim: int) -> Tensor:
    return cos_sin(Rope(kind="default", theta=1e4, original_len=LENGTH), dim, LENGTH).to(DEVICE)


def poisoned(case: Case, dtype: torch.dtype) -> tuple[LayerCache, Tensor]:
    """The second layer's cache in pages full of NaN (but for page 0), and tables in random order. Slot 0: page 0."""
    width = 1 if case.layout in CONTIGUOUS else -(-LENGTH // case.page_tokens)
    order = torch.randperm((SLOTS - 1) * width, generator=torch.Generator().manual_seed(1)) + 1
    tables = torch.cat((torch.zeros(1, width, dtype=torch.int64), order.view(SLOTS - 1, width))).to(DEVICE)
    size = LENGTH + 2 if case.layout in CONTIGUOUS else case.page_tokens
    shape = Shape(case.heads, case.kv_heads, case.dim, size, layout=case.layout)
    return placed(shape, (SLOTS - 1) * width + 1, size, dtype), tables


def whole(part: Tensor) -> Tensor:
    """All of the buffer that a view is of."""
    return torch.empty(0, dtype=part.dtype, device=part.device).set_(part.untyped_storage())


def places(case: Case) -> tuple[Tensor, Tensor]:
    """(slots, positions): both sides of page borders, a chunk, a token alone, padding."""
    size = case.page_tokens
    at = [(1, p) for p in (0, size - 1, size, 2 * size - 1, 2 * size, LENGTH - 1)]
    at += [(2, p) for p in range(250, 260)] + [(3, 400), (0, 0)]
    slots, positions = torch.tensor(sorted(set(at), reverse=True), device=DEVICE).unbind(1)
    return slots.contiguous(), positions.contiguous()


def expected(
    qkv: Tensor, case: Case, positions: Tensor, rotary: Tensor | None, norms: tuple[Tensor, Tensor, float] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in fp64."""
    q, k, v = qkv.double().split((case.heads, case.kv_heads, case.kv_heads), dim=1)
    if norms is not None:
        q = F.rms_norm(q, (case.dim,), norms[0].double(), norms[2])
        k = F.rms_norm(k, (case.dim,), norms[1].double(), norms[2])
    if rotary is not None:
        cos, sin = rotary.double()[positions].unsqueeze(1).unbind(2)
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, k, v


def check(
    case: Case, dtype: torch.dtype, *, rotated: bool = True, normed: bool = False, in_place: bool = False,
    pdl: bool = False, gap: int = 0,
) -> None:  # fmt: skip
    cache, tables = poisoned(case, dtype)
    slots, positions = places(case)
    rotary, norms = rotary_of(case.dim) if rotated else None, norms_of(case.dim, dtype) if normed else None
    heads = case.heads + 2 * case.kv_heads
    wide = random(len(slots), heads + gap, case.dim, dtype=dtype)
    qkv = wide[:, :heads]
    elsewhere = torch.empty(len(slots), case.heads + gap, case.dim, dtype=dtype, device=DEVICE)
    q_out = qkv[:, : case.heads] if in_place else elsewhere[:, gap:]
    q, k, v = expected(qkv, case, positions, rotary, norms)
    before, rest = [whole(x).clone() for x in (cache.keys, cache.values)], wide[:, case.heads :].clone()
    rope_write(qkv, q_out, cache, tables, slots, positions, rotary=rotary, norms=norms, pdl=pdl)
    assert_rounded(q_out, q)
    assert torch.equal(wide[:, case.heads :], rest), "keys and values of qkv itself stay"
    size, keys, values = cache.page_tokens, cache.keys, cache.values
    pages, offsets = tables[slots, positions // size], positions % size
    assert_rounded(keys[pages, :, offsets], k)
    assert torch.equal(values[pages, :, offsets], v.to(dtype)), "values are copied, bit for bit"
    for view, old in zip((keys, values), before):
        view[pages, :, offsets] = old.as_strided(view.shape, view.stride(), view.storage_offset())[pages, :, offsets]
    for view, old in zip((keys, values), before):
        assert torch.equal(whole(view).nan_to_num(7.0), old.nan_to_num(7.0)), "nothing else is written"


@OTHERS
@TYPES
@pytest.mark.parametrize("page_tokens", [1, 16])
def test_any_layout(page_tokens: int, dtype: torch.dtype, layout: str) -> None:
    check(Case(6, 2, 32, page_tokens, layout), dtype)


@pytest.mark.parametrize("rotated", [False, True])
def test_a_layer_that_writes_nothing(rotated: bool) -> None:
    """Its queries are turned; what another layer wrote to the same views stays."""
    case = Case(6, 2, 32, 16)
    cache, tables = poisoned(case, torch.float32)
    slots, positions = places(case)
    rotary, q = rotary_of(32) if rotated else None, random(len(slots), 6, 32)
    qkv = torch.cat((q, torch.zeros(len(slots), 4, 32, device=DEVICE)), 1)
    before = whole(cache.keys).nan_to_num(7.0)
    rope_write(q, q, replace(cache, writes=False), tables, slots, positions, rotary=rotary)
    assert torch.equal(whole(cache.keys).nan_to_num(7.0), before)
    rope_write(qkv, qkv[:, :6], cache, tables, slots, positions, rotary=rotary)
    assert torch.equal(q, qkv[:, :6])


@TYPES
@pytest.mark.parametrize("page_tokens", [1, 4, 16, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (56, 8)])
def test_pages_and_groups(heads: int, kv_heads: int, page_tokens: int, dtype: torch.dtype) -> None:
    check(Case(heads, kv_heads, 32, page_tokens), dtype)


@LAUNCHES
@pytest.mark.parametrize("dim", [16, 80, 96, 128, 256])
@pytest.mark.parametrize("normed", [False, True])
def test_head_sizes(normed: bool, dim: int, dtype: torch.dtype, pdl: bool) -> None:
    check(Case(5, 1, dim, 16), dtype, normed=normed, pdl=pdl)


@LAUNCHES
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_queries_in_place(normed: bool, rotated: bool, dtype: torch.dtype, pdl: bool) -> None:
    check(Case(6, 3, 64, 16), dtype, rotated=rotated, normed=normed, in_place=True, pdl=pdl)


@TYPES
@pytest.mark.parametrize("rotated", [False, True])
def test_many_heads_and_strides(rotated: bool, dtype: torch.dtype) -> None:
    """More heads than a program takes, rows of qkv and q_out with gaps; without rotation, queries are copied."""
    check(Case(20, 20, 128, 16), dtype, rotated=rotated, gap=2)


@pytest.mark.parametrize("normed", [False, True])
@TYPES
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), *([(12, 12, 64), (32, 8, 128)] if CUDA else [])])
def test_a_token_has_the_same_bits_in_every_batch(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, normed: bool
) -> None:
    """On a GPU each of these is compiled anew, with other heads a program."""
    case = Case(heads, kv_heads, dim, 16)
    rotary, norms = rotary_of(dim), norms_of(dim, dtype) if normed else None
    slots, positions = torch.ones(64, dtype=torch.int64, device=DEVICE), torch.arange(300, 364, device=DEVICE)
    tokens = random(64, heads + 2 * kv_heads, dim, dtype=dtype)

    def turned(count: int, in_place: bool, pdl: bool) -> tuple[Tensor, Tensor]:
        """Queries and keys of the first `count` tokens."""
        cache, tables = poisoned(case, dtype)
        qkv = tokens[:count].clone()
        q = qkv[:, :heads] if in_place else torch.empty_like(qkv[:, :heads])
        at = slots[:count], positions[:count]
        rope_write(qkv, q, cache, tables, *at, rotary=rotary, norms=norms, pdl=pdl)
        return q, cache.keys[tables[at[0], at[1] // 16], :, at[1] % 16]

    want = turned(64, True, False)
    for count in (1, 63, 64):
        for in_place in (False, True):
            for pdl in PDL:
                for got, all_of in zip(turned(count, in_place, pdl), want):
                    assert torch.equal(got, all_of[:count])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
@TYPES
def test_bad_values_stay_theirs(dtype: torch.dtype) -> None:
    """A NaN value is copied as it is and touches nothing else; an infinite value stays infinite beside rotated keys."""
    case = Case(2, 2, 16, 4)
    cache, tables = poisoned(case, dtype)
    slots, positions = torch.tensor([1, 2], device=DEVICE), torch.tensor([3, 4], device=DEVICE)
    qkv = random(2, 6, 16, dtype=dtype)
    qkv[0, 4] = torch.nan
    qkv[1, 5] = torch.inf
    q_out = torch.empty_like(qkv[:, :2])
    rope_write(qkv, q_out, cache, tables, slots, positions, rotary=rotary_of(16))
    keys, values = cache.keys, cache.values
    pages = tables[slots, positions // 4]
    assert q_out.isfinite().all()
    assert keys[pages, :, positions % 4].isfinite().all()
    written = values[pages, :, positions % 4]
    assert written[0, 0].isnan().all()
    assert (written[1, 1] == torch.inf).all()
    assert torch.equal(written[[0, 1], [1, 0]], qkv[[0, 1], [5, 4]])


@pytest.mark.skipif(not CUDA, reason="a buffer of more than 2^31 numbers needs a GPU's memory")
def test_addresses_beyond_32_bits() -> None:
    case = Case(8, 8, 128, 16)
    stride = 2 * case.kv_heads
    pages = (1 << 31) // (stride * 16 * 128) + 8
    rows = torch.zeros(pages, 2, 8, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    keys, values = rows.unbind(1)
    cache = LayerCache(keys, values, 8, 1.0)
    tables = torch.tensor([[0, 0], [3, pages - 1]], device=DEVICE)
    slots, positions = torch.tensor([1, 1], device=DEVICE), torch.tensor([2, 21], device=DEVICE)
    qkv = random(2, 24, 128, dtype=torch.bfloat16)
    rope_write(qkv, qkv[:, :8], cache, tables, slots, positions)
    assert torch.equal(torch.stack((keys[3, :, 2], keys[pages - 1, :, 5])), qkv[:, 8:16])
    assert torch.equal(torch.stack((values[3, :, 2], values[pages - 1, :, 5])), qkv[:, 16:])
    assert int(rows.count_nonzero()) == int(qkv[:, 8:].count_nonzero())
