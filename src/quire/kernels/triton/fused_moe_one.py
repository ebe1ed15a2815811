"""A mixture's products for one token, where reading its experts' weights is all that counts: as for one row of `linear`
without tensor cores, each expert's lines multiplied and added in fp32. Experts that it didn't choose are not read.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.activation import ACTIVATIONS, activate
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import cdiv
from quire.kernels.triton.linear import _weight_rows
from quire.kernels.triton.linear_tiles import few_rows_tile, grouped_tile


@triton.jit
def _sums(
    x, tiles, scale, lines, depth,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The products of x and BLOCK_N lines, whose first numbers and scales are at `tiles` and `scale`."""
    k, sums = tl.arange(0, BLOCK_K), tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        inside = start + k < depth
        w = tl.load(tiles + start) if EVEN else tl.load(tiles + start, mask=inside[None, :], other=0.0)
        v = tl.load(x + start + k) if EVEN else tl.load(x + start + k, mask=inside, other=0.0)
        part = w.to(tl.float32) * v.to(tl.float32)[None, :]
        if GROUP > 0:
            part *= tl.load(scale + start // GROUP * lines)[:, None]
        sums += part
    acc = tl.sum(sums, axis=1)
    if GROUP == 0:
        acc *= tl.load(scale)
    return acc


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["chosen"])
def _one_token(
    x, weight, scale, shares, out, chosen, size, depth,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With a KIND: act(gate) * up of some lines of one of the token's experts, out [TOP, size]. Without: some lines'
    products, of all its experts, each with the expert's row of x [TOP, depth], times their shares, added in order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index, k = tl.program_id(0), tl.arange(0, BLOCK_K)
    if KIND is not None:
        across = tl.cdiv(size, BLOCK_N // 2)
        pair, index = index // across, index % across
        lines = tl.load(chosen + pair) * (2 * size) + _weight_rows(index, size, BLOCK_N, KIND)
        tiles = weight + lines[:, None] * depth + k[None, :]
        acc = _sums(x, tiles, scale + lines, EXPERTS * 2 * size, depth, BLOCK_N, BLOCK_K, EVEN, STAGES, GROUP)
        gate, up = tl.split(tl.reshape(acc, (BLOCK_N // 2, 2)))
        n = index * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        tl.store(out + pair * size + n, (activate(gate, KIND) * up).to(out.dtype.element_ty), mask=n < size)
    else:
        total, rows = tl.zeros((BLOCK_N,), tl.float32), _weight_rows(index, size, BLOCK_N, KIND)
        for pair in tl.static_range(TOP):
            lines = tl.load(chosen + pair) * size + rows
            tiles = weight + lines[:, None] * depth + k[None, :]
            acc = _sums(
                x + pair * depth, tiles, scale + lines, EXPERTS * size, depth, BLOCK_N, BLOCK_K, EVEN, STAGES, GROUP
            )
            total += acc * tl.load(shares + pair)
        n = index * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(out + n, total.to(out.dtype.element_ty), mask=n < size)


def fused_moe_one_token(
    x: Tensor, weights: Tensor, expert_ids: Tensor, gate_up: Tensor, down: Tensor, activation: str,
    scales: tuple[Tensor | None, Tensor | None], groups: tuple[int, int], pdl: bool,
) -> Tensor:  # fmt: skip
    """`kernels.triton.experts.mixture` of a single token; `groups`: numbers of a row that have a scale in common."""
    (experts, hidden, inner), top = down.shape, expert_ids.shape[1]
    between, out = x.new_empty(top, inner), x.new_empty(1, hidden)
    products = ((x, gate_up, between, ACTIVATIONS[activation]), (between, down, out, None))
    for (source, weight, target, kind), scale, group in zip(products, scales, groups):
        size, depth = target.shape[1], weight.shape[2]
        of_all = size if kind is None else top * 2 * size
        tile = few_rows_tile(1, of_all, depth, fp8=scale is not None)
        if group > 0:
            tile = grouped_tile(tile, depth)
        options: dict[str, Any] = {"num_warps": tile.warps, **({"launch_pdl": True} if pdl else {})}
        programs = cdiv(size, tile.columns) if kind is None else top * cdiv(size, tile.columns // 2)
        _one_token[(programs,)](
            source, weight, target if scale is None else scale, weights, target, expert_ids, size, depth,
            EXPERTS=experts, TOP=top, BLOCK_N=tile.columns, BLOCK_K=tile.depth, EVEN=depth % tile.depth == 0,
            STAGES=tile.stages, GROUP=group, KIND=kind, PDL=pdl, **options,
        )  # fmt: skip
    return out
