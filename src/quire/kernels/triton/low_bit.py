"""Products with weights in few bits: linear layers, and mixtures of experts (see `fused_moe`).

A program expands some rows of the weight in registers, step by step, and multiplies them as `W x^T` on the tensor cores
with the rows of x as the narrow side. So the weight is read from memory in few bits. Many rows of x are multiplied by
the library, with a weight that is expanded for the time of the product.

A weight's number is code * scale + shift, in fp32, rounded to x's dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cpu.low_bit_linear import LowBitWeight
from quire.kernels.triton.activation import ACTIVATIONS, act_and_mul, activate_gated
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.fused_moe import GROUP_TILES, ExpertTile, Routing, find_pairs, sum_experts
from quire.kernels.triton.launch import cdiv, power_of_2, shared_memory

WIDER_GROUPS = (64, 128)
"""How many numbers may share a scale, beside a format's own."""
MAX_FUSED_ROWS = 64
"""The most rows of a linear layer's input for which the weight is not expanded in memory."""
MAX_SPLITS, SPLIT_PROGRAMS = 8, 512
"""With few rows of x, a weight's rows alone don't occupy a GPU. Its columns are then split too, at most MAX_SPLITS
ways, until there are SPLIT_PROGRAMS programs."""
TILES = {
    8: ExpertTile(8, 64, 256, 4, 4),
    16: ExpertTile(16, 64, 256, 4, 4),
    32: ExpertTile(32, 64, 256, 3, 4),
    64: ExpertTile(64, 64, 128, 4, 4),
    sys.maxsize: ExpertTile(64, 128, 128, 3, 8),
}
"""Tiles by the most rows of a weight's input, or pairs of an expert on average; as deep as one group or several.
Measured on one H200 with groups of 128, without splits."""
ONE_TILE = TILES[32]
"""The tile for any number of rows."""


class LowBitMatrix(NamedTuple):
    """A weight [rows, columns] in few bits on a GPU, or those of several experts, one after the other.

    `codes` uint8 [rows, columns * bits / 8]. In 4 bits the bytes of a group hold the codes of its first half in their
    low bits, and those of its second half in their high bits. `scales` fp32 [rows, columns / group, 2]: a scale and a
    shift for each `group` of numbers."""

    codes: Tensor
    scales: Tensor
    bits: int
    group: int

    @property
    def columns(self) -> int:
        return self.codes.shape[1] * 8 // self.bits


def pack(weights: Sequence[LowBitWeight], device: torch.device) -> LowBitMatrix:
    """Return the rows of weights of one format for the kernels, with equal values. Groups with equal scales are joined
    where all can be."""
    form, columns = weights[0].form, weights[0].numbers.shape[1]
    codes, scales = torch.cat([weight.numbers.to(device) for weight in weights]), torch.cat([*map(_scales, weights)])
    bits, group, scales = 4 if form.bits == 4 else 8, form.group, scales.to(device)
    for wider in (wider for wider in WIDER_GROUPS if wider > form.group and columns % wider == 0):
        joined = torch.unflatten(scales, 1, (-1, wider // group))
        if not torch.equal(joined, joined[:, :, :1].expand_as(joined)):
            break
        scales, group = joined[:, :, 0].contiguous(), wider
    if bits == 4:
        low, high = torch.unflatten(codes, 1, (-1, 2, group // 2)).unbind(2)
        codes = (low | high << 4).flatten(1)
    return LowBitMatrix(codes, scales, bits, group)


def _scales(weight: LowBitWeight) -> Tensor:
    """Return the scales and shifts of a weight, [rows, groups, 2]."""
    scale, least = weight.scales()
    shift = -weight.form.zero * scale if least is None else least - weight.form.zero * scale
    return torch.stack((scale, shift), 2)


@triton.jit
def _whole(codes, like):
    """Return codes below 16, plus `_offset`, as numbers of the dtype of `like`, which holds them exactly."""
    if like.dtype == tl.bfloat16:
        numbers = (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif like.dtype == tl.float16:
        numbers = (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        numbers = codes.to(tl.float32)
    return numbers


@triton.jit
def _offset(like, BITS: tl.constexpr):
    """Return what `_whole` adds to a code."""
    offset: tl.constexpr = (
        0.0 if BITS == 8 or like.dtype == tl.float32 else 128.0 if like.dtype == tl.bfloat16 else 1024.0
    )
    return offset


@triton.jit
def _add(acc, codes, scale, shift, x, x_high, sums, BITS: tl.constexpr):
    """Return acc [N, M] + w x^T for one group of numbers of N rows, whose scales and shifts are [N]. `sums` [N, M] are
    x's sums over the group. In 4 bits x has the inputs of the low bits, x_high those of the high bits."""
    if BITS == 4:
        part = tl.dot(_whole(codes & 15, x), x, input_precision="ieee")
        part = tl.dot(_whole(codes >> 4, x), x_high, part, input_precision="ieee")
    else:
        part = tl.dot(codes.to(tl.float32).to(x.dtype), x, input_precision="ieee")
    return acc + part * scale[:, None] + sums * (shift - _offset(x, BITS) * scale)[:, None]


@fast_launch
@triton.jit(do_not_specialize=["tokens", "tiles"])
def _product(
    x, weight, scale, bias, shares, out, counts, pairs, tokens, tiles, x_stride, size, depth,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SIDE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `fused_moe`'s kernel of experts; with EXPERTS 0 a linear layer, each of whose rows is a pair. A step takes
    GROUPS groups, which divide a row's. With SPLITS a program takes some of the steps: out [rows, SPLITS, size]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    across, index = tl.cdiv(size, BLOCK_N), tl.program_id(0)
    first = index // (SIDE * across) * SIDE
    beside = tl.minimum(tiles - first, SIDE)
    tile, left = first + index % (SIDE * across) % beside, index % (SIDE * across) // beside * BLOCK_N
    if EXPERTS == 0:
        pair, expert = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), 0
        real = pair < tokens
    else:
        expert, pair, real = find_pairs(counts, pairs, tokens, tile, EXPERTS, PADDED, BLOCK_M)
    if expert < EXPERTS or EXPERTS == 0:
        BYTES: tl.constexpr = GROUP * BITS // 8
        n, b = left + tl.arange(0, BLOCK_N), tl.arange(0, BYTES)
        source = pair
        if KIND is not None and EXPERTS > 0:
            source = pair // TOP
        inputs = x + source[None, :] * x_stride + b[:, None]
        each = size if KIND is None else 2 * size
        line = tl.minimum(n, size - 1).to(tl.int64)
        if EXPERTS > 0:
            line += expert * each
        row_bytes, row_scales = depth // GROUP * BYTES, depth // GROUP * 2
        rows = weight + (line * row_bytes)[:, None] + b[None, :]
        scales = scale + line * row_scales
        away, scales_away = size.to(tl.int64) * row_bytes, size.to(tl.int64) * row_scales
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        other = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        ones = tl.full((BLOCK_N, BYTES), 1.0, x.dtype.element_ty)
        steps, split = depth // (GROUP * GROUPS), tl.program_id(1)
        share = tl.cdiv(steps, SPLITS)
        for step in tl.range(split * share, tl.minimum(steps, (split + 1) * share), num_stages=STAGES):
            for j in tl.static_range(GROUPS):
                group = step * GROUPS + j
                v = tl.load(inputs + group * GROUP, mask=real[None, :], other=0.0)
                sums, v_high = tl.dot(ones, v, input_precision="ieee"), v
                if BITS == 4:
                    v_high = tl.load(inputs + group * GROUP + BYTES, mask=real[None, :], other=0.0)
                    sums = tl.dot(ones, v_high, sums, input_precision="ieee")
                here, at = rows + group * BYTES, scales + group * 2
                acc = _add(acc, tl.load(here), tl.load(at), tl.load(at + 1), v, v_high, sums, BITS)
                if KIND is not None:
                    here, at = here + away, at + scales_away
                    other = _add(other, tl.load(here), tl.load(at), tl.load(at + 1), v, v_high, sums, BITS)
        if BIAS and split == 0:
            acc += tl.load(bias + line).to(tl.float32)[:, None]
            if KIND is not None:
                other += tl.load(bias + line + size).to(tl.float32)[:, None]
        if KIND is not None:
            acc = activate_gated(acc, other, KIND)
        elif EXPERTS > 0:
            acc *= tl.load(shares + pair, mask=real, other=0.0)[None, :]
        place = out + (pair * SPLITS + split)[None, :] * size + n[:, None]
        tl.store(place, acc.to(out.dtype.element_ty), mask=(n < size)[:, None] & real[None, :])


@fast_launch
@triton.jit
def _expand(
    weight, scale, out, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the numbers of BLOCK groups."""
    BYTES: tl.constexpr = GROUP * BITS // 8
    g, b = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BYTES)
    known = (g < groups)[:, None]
    codes = tl.load(weight + (g * BYTES)[:, None] + b[None, :], mask=known, other=0)
    by, shift = (
        tl.load(scale + g * 2, mask=g < groups, other=0.0),
        tl.load(scale + g * 2 + 1, mask=g < groups, other=0.0),
    )
    place = out + (g * GROUP)[:, None] + b[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # the memory of the result may be in use until now
    if BITS == 4:
        high = (codes >> 4).to(tl.float32) * by[:, None] + shift[:, None]
        tl.store(place + BYTES, high.to(out.dtype.element_ty), mask=known)
        codes = codes & 15
    tl.store(place, (codes.to(tl.float32) * by[:, None] + shift[:, None]).to(out.dtype.element_ty), mask=known)


def expand(weight: LowBitMatrix, dtype: torch.dtype, *, pdl: bool = False) -> Tensor:
    """Return the numbers of a weight, [rows, columns]."""
    rows, columns = len(weight.codes), weight.columns
    out = torch.empty(rows, columns, dtype=dtype, device=weight.codes.device)
    groups, block = rows * columns // weight.group, max(4096 // weight.group, 1)
    _expand[(cdiv(groups, block),)](
        weight.codes, weight.scales, out, groups,
        BITS=weight.bits, GROUP=weight.group, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def low_bit_linear(
    x: Tensor, weight: LowBitMatrix, bias: Tensor | None = None, activation: str | None = None, *,
    deterministic: bool = False, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Return x weight^T + bias [M, rows] for x [M, columns], rounded once. With an `activation` the weight is gate and
    up, stacked: return act(gate) * up [M, rows / 2]. `deterministic`: a row's bits do not depend on the number of rows.
    """
    rows, columns, size = len(x), weight.columns, len(weight.codes)
    assert x.shape[1] == columns, f"x {tuple(x.shape)} does not fit a weight of {columns} columns"
    assert x.stride(1) == 1, "rows are contiguous"
    kind = None if activation is None else ACTIVATIONS[activation]
    if rows > MAX_FUSED_ROWS and not deterministic:
        out = F.linear(x, expand(weight, x.dtype, pdl=pdl), bias)
        return out if activation is None else act_and_mul(out, activation, pdl=pdl)
    size, tile = size if kind is None else size // 2, choose_tile(rows, x, weight, kind is not None, deterministic)
    splits = min(MAX_SPLITS, power_of_2(cdiv(SPLIT_PROGRAMS, cdiv(size, tile.columns))))
    splits = splits if kind is None and not deterministic else 1
    out = torch.empty(rows * splits, size, dtype=x.dtype if splits == 1 else torch.float32, device=x.device)
    if rows:
        _launch(x, weight, bias, out, out, None, rows, tile, kind, pdl, splits)
    return out if splits == 1 else sum_experts(out, splits, x.dtype, pdl)


class LowBitLinear:
    """A linear layer of weights whose rows are stacked, of one format each: `low_bit_linear` with each."""

    def __init__(
        self, weights: Sequence[LowBitMatrix], bias: Tensor | None, activation: str | None, deterministic: bool,
        pdl: bool,
    ) -> None:  # fmt: skip
        self.weights, self.activation, self.deterministic, self.pdl = tuple(weights), activation, deterministic, pdl
        rows = [len(weight.codes) for weight in weights]
        self.biases = [None] * len(rows) if bias is None else bias.split(rows)
        assert len(rows) == 1 or activation is None, "an activation needs all rows"

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        parts = [
            low_bit_linear(rows, weight, bias, self.activation, deterministic=self.deterministic, pdl=self.pdl)
            for weight, bias in zip(self.weights, self.biases)
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return out.view(*x.shape[:-1], -1)


def low_bit_moe(
    x: Tensor, routing: Routing, gate_up: LowBitMatrix, down: LowBitMatrix, activation: str,
    biases: tuple[Tensor | None, Tensor | None] = (None, None), *, deterministic: bool = False, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """As `fused_moe`, with stacked weights of experts: gate_up [experts * 2 * inner, hidden], down [experts * hidden,
    inner]. `routing` has lists."""
    assert routing.counts is not None, "the products need lists"
    (tokens, hidden), top, experts = x.shape, routing.expert_ids.shape[1], len(routing.counts)
    assert x.stride(1) == 1, "rows are contiguous"
    pairs, inner = tokens * top, down.columns
    between, parts = x.new_empty(pairs, inner), x.new_empty(pairs, hidden, dtype=torch.float32)
    products = ((x, gate_up, between, ACTIVATIONS[activation]), (between, down, parts, None))
    for (source, weight, target, kind), bias in zip(products if pairs else (), biases):
        tile = choose_tile(cdiv(int(pairs * routing.share), experts), x, weight, kind is not None, deterministic)
        _launch(source, weight, bias, routing.weights, target, routing, tokens, tile, kind, pdl)
    return sum_experts(parts, top, x.dtype, pdl, routing.own_ids)


def _launch(
    x: Tensor, weight: LowBitMatrix, bias: Tensor | None, shares: Tensor, out: Tensor, routing: Routing | None,
    tokens: int, tile: ExpertTile, kind: str | None, pdl: bool, splits: int = 1,
) -> None:  # fmt: skip
    experts = 0 if routing is None or routing.counts is None else len(routing.counts)
    top = 1 if routing is None else routing.expert_ids.shape[1]
    size, groups = out.shape[1], max(tile.depth // weight.group, 1)
    while weight.columns % (groups * weight.group):
        groups //= 2
    tiles = min(len(out), len(out) // tile.pairs + experts) if experts else cdiv(tokens, tile.pairs)
    options: dict[str, Any] = {"num_warps": tile.warps, "launch_pdl": pdl}
    _product[(tiles * cdiv(size, tile.columns), splits)](
        x, weight.codes, weight.scales, out if bias is None else bias, shares, out,
        out if routing is None else routing.counts, out if routing is None else routing.pairs, tokens, tiles,
        x.stride(0), size, weight.columns,
        EXPERTS=experts, PADDED=power_of_2(max(experts, 1)), TOP=top, BLOCK_M=tile.pairs, BLOCK_N=tile.columns,
        SIDE=GROUP_TILES, BITS=weight.bits, GROUP=weight.group, GROUPS=groups, KIND=kind, BIAS=bias is not None,
        STAGES=tile.stages, SPLITS=splits, PDL=pdl, **options,
    )  # fmt: skip


def choose_tile(rows: int, x: Tensor, weight: LowBitMatrix, gated: bool, deterministic: bool) -> ExpertTile:
    """Return the tile for `rows` rows of x or, of experts, for their mean number of pairs. It has as many stages as fit
    in shared memory."""
    tile = ONE_TILE if deterministic else TILES[next(most for most in TILES if rows <= most)]
    bits = (1 + gated) * tile.columns * weight.bits + tile.pairs * 8 * x.element_size()
    stage = bits * tile.depth // 8
    return tile._replace(stages=max(1, min(tile.stages, shared_memory(x.device) // stage)))
