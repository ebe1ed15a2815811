"""Rotation and KV writes equal the plain composition in fp64, and nothing but the tokens' own places is written."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from grids import CUDA, DEVICE, LAUNCHES, assert_rounded, random
from test_paged_attention import CONTIGUOUS, PAGED, Shape, cache_of
from torch import Tensor

from quire.kernels.forward_batch import HeadNorms, LayerCache
from quire.kernels.triton.rope_write import rope_write
from quire.layers.rope_config import RopeConfig
from quire.layers.rotary import cos_sin_table, rotate

SLOTS, LENGTH, EPS = 4, 513, 1e-6


class Case(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    page_tokens: int
    layout: str = "pages"


def norms_of(dim: int, dtype: torch.dtype, of_values: bool = False) -> HeadNorms:
    norms = [SimpleNamespace(weight=random(dim, dtype=dtype, seed=seed) + 1, eps=EPS) for seed in (3, 4, 5)]
    return HeadNorms(*norms[: 2 + of_values])


def rotary_of(dim: int) -> Tensor:
    return cos_sin_table(RopeConfig(kind="default", theta=1e4, original_max_len=LENGTH), dim, LENGTH).to(DEVICE)


def poisoned(case: Case, dtype: torch.dtype) -> tuple[LayerCache, Tensor]:
    """The second layer's cache in pages full of NaN (but for page 0), and tables in random order. Slot 0: page 0."""
    width = 1 if case.layout in CONTIGUOUS else -(-LENGTH // case.page_tokens)
    order = torch.randperm((SLOTS - 1) * width, generator=torch.Generator().manual_seed(1)) + 1
    tables = torch.cat((torch.zeros(1, width, dtype=torch.int64), order.view(SLOTS - 1, width))).to(DEVICE)
    size = LENGTH + 2 if case.layout in CONTIGUOUS else case.page_tokens
    shape = Shape(case.heads, case.kv_heads, case.dim, size, layout=case.layout)
    return cache_of(shape, (SLOTS - 1) * width + 1, size, dtype), tables


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
    qkv: Tensor, case: Case, positions: Tensor, rotary: Tensor | None, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in fp64."""
    heads, kv_heads = case.heads, case.kv_heads
    q, k, v = (qkv.double()[:, part] for part in (slice(heads), slice(heads, heads + kv_heads), slice(-kv_heads, None)))
    q, k, v = (
        x if norm is None else F.rms_norm(x, (case.dim,), norm.weight.double(), norm.eps)
        for x, norm in zip((q, k, v), norms or (None,) * 3)
    )
    if rotary is not None:
        cos, sin = rotary.double()[positions].unsqueeze(1).unbind(2)
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, k, v


def check(
    case: Case, dtype: torch.dtype, *, rotated: bool = True, normed: bool = False, in_place: bool = False,
    pdl: bool = False, gap: int = 0, norm_values: bool = False, keys_as_values: bool = False,
) -> None:  # fmt: skip
    cache, tables = poisoned(case, dtype)
    slots, positions = places(case)
    rotary, norms = rotary_of(case.dim) if rotated else None, norms_of(case.dim, dtype, norm_values) if normed else None
    heads = case.heads + (1 if keys_as_values else 2) * case.kv_heads
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
    if norm_values:
        assert_rounded(values[pages, :, offsets], v)
    else:
        assert torch.equal(values[pages, :, offsets], v.to(dtype)), "values are copied, bit for bit"
    for view, old in zip((keys, values), before):
        view[pages, :, offsets] = old.as_strided(view.shape, view.stride(), view.storage_offset())[pages, :, offsets]
    for view, old in zip((keys, values), before):
        assert torch.equal(whole(view).nan_to_num(7.0), old.nan_to_num(7.0)), "nothing else is written"


BOTH = (False, True)


@LAUNCHES
@pytest.mark.parametrize(
    ("case", "options"),
    [
        *((Case(6, 2, 32, page, layout), {}) for page in (1, 16) for layout in (*PAGED[1:], *CONTIGUOUS)),
        *((Case(*heads, 32, page), {}) for heads in ((4, 4), (8, 2), (56, 8)) for page in (1, 4, 16, 256)),
        *((Case(5, 1, dim, 16), {"normed": normed}) for dim in (16, 80, 96, 128, 256) for normed in BOTH),
        *((Case(6, 3, 64, 16), {"rotated": r, "normed": n, "in_place": True}) for r in BOTH for n in BOTH),
        *((Case(8, 1, 512, 16), {"normed": True, "norm_values": True, "keys_as_values": k}) for k in BOTH),
        (Case(6, 3, 32, 16), {"keys_as_values": True, "in_place": True}),
        *((Case(20, 20, 128, 16), {"rotated": r, "gap": 2}) for r in BOTH),  # more heads than a program takes
    ],
    ids=str,
)  # fmt: skip
def test_rotation_and_writes(case: Case, options: dict[str, Any], dtype: torch.dtype, pdl: bool) -> None:
    """Whatever the pages, the sizes and the strides; without rotation, queries are copied."""
    check(case, dtype, pdl=pdl, **options)


@pytest.mark.parametrize("rotated", [False, True])
def test_a_layer_that_writes_nothing(rotated: bool) -> None:
    """Its queries are turned; what another layer wrote to the same views stays. A layer whose queries stay as they are,
    in place, writes all the same."""
    case = Case(6, 2, 32, 16)
    cache, tables = poisoned(case, torch.float32)
    slots, positions = places(case)
    rotary, q = rotary_of(32) if rotated else None, random(len(slots), 6, 32)
    qkv = torch.cat((q, torch.zeros(len(slots), 4, 32, device=DEVICE)), 1)
    before = whole(cache.keys).nan_to_num(7.0)
    rope_write(q, q, replace(cache, writes_kv=False), tables, slots, positions, rotary=rotary)
    assert torch.equal(whole(cache.keys).nan_to_num(7.0), before)
    rope_write(qkv, qkv[:, :6], cache, tables, slots, positions, rotary=rotary)
    assert torch.equal(q, qkv[:, :6])
    pages, offsets = tables[slots, positions // 16], positions % 16
    assert cache.keys[pages, :, offsets].eq(0).all()
    assert cache.values[pages, :, offsets].eq(0).all()


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
