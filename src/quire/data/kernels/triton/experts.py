"""Products of tokens with the experts that were chosen for them, all experts' in one launch.

Pairs of token and expert are sorted by expert, on the device; a program takes some pairs of one expert and some rows of
its weight, `W x^T` as the few-row kernel of `linear` has it. There are programs for as many tiles as there may be,
however the pairs fall to experts: those without pairs end at once, so that a graph serves any choice. Nothing is added
to from two sides: a result is the same every time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.data.kernels.triton.activation import ACTIVATIONS, activate
from quire.data.kernels.triton.launch import cdiv, power_of_2, shared_memory
from quire.data.kernels.triton.quick import quick


class Tile(NamedTuple):
    """What one program computes at a time, and how."""

    pairs: int
    columns: int  # of the result
    depth: int  # of the dot products
    stages: int
    warps: int


FEW, SOME, MANY = Tile(16, 32, 256, 4, 4), Tile(32, 64, 128, 4, 4), Tile(128, 64, 64, 4, 8)
GROUP = 8
"""Tiles of pairs that go through a weight side by side, so that it is read from memory once for all of them."""


@quick
@triton.jit(do_not_specialize=["pairs", "tiles"], do_not_specialize_on_alignment=["order", "bounds"])
def _experts(
    x, weight, scales, out, order, bounds, pairs, tiles, x_stride, size, depth,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """With a KIND, act(gate) * up of the tokens that the sorted pairs are of, in the pairs' order; without, of sorted
    rows, times the pairs' scales, to where the pairs were before they were sorted."""
    across, index = tl.cdiv(size, BLOCK_N), tl.program_id(0)
    first = index // (GROUP * across) * GROUP
    beside = tl.minimum(tiles - first, GROUP)
    tile, left = first + index % (GROUP * across) % beside, index % (GROUP * across) // beside * BLOCK_N
    experts = tl.arange(0, PADDED)
    begins = tl.load(bounds + experts, mask=experts < EXPERTS, other=pairs)
    ends = tl.load(bounds + experts + 1, mask=experts < EXPERTS, other=pairs)
    counts = tl.cdiv(ends - begins, BLOCK_M)
    passed = tl.cumsum(counts, axis=0)
    expert = tl.sum((passed <= tile).to(tl.int32), axis=0)
    if expert < EXPERTS:
        mine = experts == expert
        begin, end = tl.sum(tl.where(mine, begins, 0), axis=0), tl.sum(tl.where(mine, ends, 0), axis=0)
        before = tl.sum(tl.where(mine, passed - counts, 0), axis=0)
        row = begin + (tile - before) * BLOCK_M + tl.arange(0, BLOCK_M)
        real = row < end
        pair = tl.load(order + row, mask=real, other=0)
        n, k = left + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        source = row
        if KIND is not None:
            source = pair // TOP
        inputs = x + source.to(tl.int64)[None, :] * x_stride + k[:, None]
        each = size if KIND is None else 2 * size
        rows = weight + (expert.to(tl.int64) * each + tl.minimum(n, size - 1))[:, None] * depth + k[None, :]
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        other = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for start in range(0, depth, BLOCK_K):
            inside = start + k < depth
            v = tl.load(inputs + start, mask=inside[:, None] & real[None, :], other=0.0)
            acc = tl.dot(tl.load(rows + start, mask=inside[None, :], other=0.0), v, acc, input_precision="ieee")
            if KIND is not None:
                up = tl.load(rows + start + size * depth, mask=inside[None, :], other=0.0)
                other = tl.dot(up, v, other, input_precision="ieee")
        if KIND is not None:
            acc, target = activate(acc, KIND) * other, row
        else:
            acc, target = acc * tl.load(scales + pair, mask=real, other=0.0)[None, :], pair
        place = out + target.to(tl.int64)[None, :] * size + n[:, None]
        tl.store(place, acc.to(out.dtype.element_ty), mask=(n < size)[:, None] & real[None, :])


def tile_of(pairs: int, experts: int, deterministic: bool, weight: Tensor) -> Tile:
    """By the pairs that an expert has, if all have as many; `deterministic`: whatever their number. As many stages as
    the device has room for."""
    few, many = pairs <= 16 * experts, pairs > 64 * experts
    tile = SOME if deterministic else FEW if few else MANY if many else SOME
    stage = (2 * tile.columns + tile.pairs) * tile.depth * weight.element_size()
    return tile._replace(stages=max(1, min(tile.stages, shared_memory(weight.device) // stage)))


def mixture(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, activation: str,
    *, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """x [T, hidden], weights and chosen [T, top] (fp32, int64), gate_up [experts, 2 * inner, hidden], down [experts,
    hidden, inner] -> [T, hidden]: the sum of the chosen experts' outputs, times their weights, in fp32, rounded once.

    May be captured. `deterministic`: a row's bits don't depend on the number of rows.
    """
    (tokens, hidden), top, (experts, inner) = x.shape, chosen.shape[1], (len(gate_up), down.shape[2])
    assert gate_up.shape == (experts, 2 * inner, hidden), "gates and ups of one size"
    assert down.shape == (experts, hidden, inner), "experts of one size"
    assert x.stride(1) == 1, "rows are contiguous"
    assert all(weight.is_contiguous() for weight in (gate_up, down, weights)), "weights are dense"
    pairs = tokens * top
    sorted_, order = chosen.flatten().sort(stable=True)
    bounds = torch.searchsorted(sorted_, torch.arange(experts + 1, device=x.device))
    tile = tile_of(pairs, experts, deterministic, gate_up)
    tiles = min(pairs, pairs // tile.pairs + experts)
    between = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    parts = torch.empty((tokens, top, hidden), dtype=torch.float32, device=x.device)
    for source, weight, out, kind in ((x, gate_up, between, ACTIVATIONS[activation]), (between, down, parts, None)):
        size = weight.shape[1] if kind is None else weight.shape[1] // 2
        if pairs:
            _experts[(tiles * cdiv(size, tile.columns),)](
                source, weight, weights, out, order, bounds, pairs, tiles, source.stride(0), size, weight.shape[2],
                EXPERTS=experts, PADDED=power_of_2(experts), TOP=top, BLOCK_M=tile.pairs, BLOCK_N=tile.columns,
                BLOCK_K=tile.depth, GROUP=GROUP, KIND=kind, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
    return parts.sum(dim=1).to(x.dtype)
