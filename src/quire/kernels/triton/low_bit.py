"""Products with weights in few bits: linear layers, and mixtures of experts (see `fused_moe`).

A program expands some rows of the weight in registers, step by step, and multiplies them as `W x^T` on the tensor cores
with the rows of x as the narrow side (`_product`). So the weight is read from memory in few bits. The experts of a
single token have their own kernel, without tensor cores (`_low_bit_token`). Many rows of x are multiplied by the
library, with a weight that is expanded in memory for the time of the product (`_expand`).

A weight's number is code * scale + shift, in fp32. Either this number is rounded to x's dtype and multiplied
(`_expand_part`), or the codes are multiplied as whole numbers, and sums over columns of one group are scaled: with the
tensor cores in x's dtype (`_whole_part`), for a single token in fp32 (`_add_steps`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cpu.low_bit_linear import GPU_WIDTH, LowBitWeight
from quire.kernels.triton.activation import ACTIVATIONS, act_and_mul, activate_gated
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.fused_moe import GROUP_TILES, ONE_TILE, Routing, find_pairs, sum_experts
from quire.kernels.triton.launch import cdiv, power_of_2, shared_memory
from quire.kernels.triton.tiles import Tile, card_tile

WIDTH = tl.constexpr(GPU_WIDTH)
"""The columns of a part of a step (see LowBitMatrix): those of one matrix product."""
EXPANDED_ROWS = 64
"""Rows of a weight that a program of `_expand` takes."""
EXPANDED_NUMBERS = 1 << 25
"""The most numbers of a weight that are expanded in memory at once."""
MAX_FUSED_ROWS = 128
"""The most rows of a linear layer's input for which the weight is not expanded in memory."""
MAX_SPLITS, SPLIT_PROGRAMS = 8, 1024
"""With few rows of x, a weight's rows alone don't occupy a GPU. Its columns are then split too, at most MAX_SPLITS
ways, until there are SPLIT_PROGRAMS programs. With tiles of more than 16 rows of x there are fewer, since adding up the
splits takes time too."""
MAX_WHOLE = tl.constexpr(32)
"""The most rows of x of a tile of `_product` that multiplies codes of 4 bits as whole numbers (see `_whole_part`)."""


def _ptx(*lines: str) -> str:
    """Return inline PTX of these lines, with scratch registers a, b and zero. It reads two int16 of
    `LowBitMatrix.codes` from register $1, and writes two 16-bit floating-point numbers to $0: those of one part."""
    return "{ .reg .b32 a, b, zero; " + " ".join(f"{line};" for line in lines) + " }"


def _whole_ptx(base: str) -> tl.constexpr:
    """Return the PTX of `_whole_part` for each part of codes of 4 bits. `base`: twice the bits of `_base`, whose last
    mantissa bit is worth 1, so that `base | code` is base + code."""
    merged = f"mov.b32 b, {base}", "lop3.b32 $0, a, 0x000f000f, b, 0xEA"  # a & mask | b
    return tl.constexpr(tuple(_ptx(f"shr.u32 a, $1, {4 * part}", *merged) for part in range(4)))


def _e2m1_ptx(part: int) -> str:
    """Return the PTX of `_expand_part` for a part of MXFP4 in bf16.

    A code's sign, exponent and mantissa are moved to their places in bf16 (0x81c0), which makes 2^-126 times its
    number. This is multiplied by 2^126 (0x7e80) and by the scale in $2. GPUs before Hopper have no product of two
    numbers in bf16, but one that adds a third, here -0."""
    moved = [f"shl.b32 a, $1, {3 * part}"]
    if part == 3:  # 66 is 1 << 1 | 1 << 6: the last two bits move by 1, the sign by 6
        moved = ["shr.u32 a, $1, 5", "and.b32 b, a, 0x02600260", "and.b32 a, a, 0x01000100", "mad.lo.u32 a, b, 66, a"]
    scaled = "mov.b32 b, 0x7e807e80", "fma.rn.bf16x2 a, a, b, zero", "fma.rn.bf16x2 $0, a, $2, zero"
    return _ptx(*moved, "and.b32 a, a, 0x81c081c0", "mov.b32 zero, 0x80008000", *scaled)


# Each has the PTX of the four parts.
_WHOLE_BF16 = _whole_ptx("0x43004300")  # 128
_WHOLE_FP16 = _whole_ptx("0x64006400")  # 1024
_SCALED_E2M1 = tl.constexpr(tuple(_e2m1_ptx(part) for part in range(4)))


class LowBitMatrix(NamedTuple):
    """A weight [rows, columns] in few bits on a GPU, or those of several experts, one after the other.

    `codes` int16 [steps, rows, WIDTH]: an integer holds one code from each of the `16 // bits` parts of a step, each of
    WIDTH columns, the first part's in its lowest bits. The last step may reach beyond the columns: its codes there are
    0. `group` columns share a scale and a shift, which `scales` (int32) has by `kind`:

    - "shifts" [groups, rows]: scale (the low half) and shift in fp16.
    - "zeros" [groups, rows]: scale and, in place of the shift, the code that stands for 0, in fp16.
    - "e2m1" [steps, rows]: the exponents of a step's parts as E8M0; codes are the floating-point numbers of MXFP4, with
      their bits where `_place_e2m1` puts them.
    - "superblocks" [steps, words, rows]: a word for each two parts has the 8 bits of their scales and minima; the last
      has what multiplies them, in fp16.
    - "halves" [steps, 2, rows]: the 8 bits of the scale of each half of a step's two parts, and what multiplies them,
      in fp16; the code 32 stands for 0."""

    codes: Tensor
    scales: Tensor
    kind: str
    bits: int
    group: int
    columns: int

    @property
    def rows(self) -> int:
        return self.codes.shape[1]


def pack(weights: Sequence[LowBitWeight], device: torch.device) -> LowBitMatrix:
    """Return the rows of weights of one format for the kernels, with equal values."""
    form, columns = weights[0].form, weights[0].numbers.shape[1]
    bits, parts = form.gpu_bits, 16 // form.gpu_bits
    steps = cdiv(columns, parts * GPU_WIDTH)
    codes = torch.zeros(steps, sum(len(each.numbers) for each in weights), GPU_WIDTH, dtype=torch.int16, device=device)
    start = 0
    for weight in weights:
        numbers = F.pad(weight.numbers.to(device), (0, steps * parts * GPU_WIDTH - columns))
        here = codes[:, start : start + len(numbers)]
        for part, plane in enumerate(torch.unflatten(numbers, 1, (steps, parts, GPU_WIDTH)).unbind(2)):
            plane = plane.transpose(0, 1).to(torch.int16)
            here |= _place_e2m1(plane, part) if form.is_e2m1 else plane << bits * part
        start += len(numbers)
    scales = torch.cat([_scales(weight, steps).to(device) for weight in weights], -1)
    return LowBitMatrix(codes, scales.contiguous(), form.gpu_scales, bits, form.gpu_group, columns)


def _place_e2m1(codes: Tensor, part: int) -> Tensor:
    """Return codes of MXFP4, int16, with their bits at a part's places. A sign is 7 bits before the first bit of the
    exponent, as in bf16, so that one shift moves all; the last part gets the bits that are left."""
    if part < 3:
        return (codes & 8) << 12 - 3 * part | (codes & 7) << 6 - 3 * part
    return (codes & 12) << 11 | (codes & 3) << 10


def _scales(weight: LowBitWeight, steps: int) -> Tensor:
    """Return a weight's scales, int32 in the shape that LowBitMatrix has for its kind."""
    form, parts = weight.form, 16 // weight.form.gpu_bits
    d, kind = weight.d, form.gpu_scales
    if kind == "e2m1":
        exponents = d.float().log2().round_().add_(128).clamp_(0).to(torch.int32)  # d is of numbers twice as large
        planes = torch.unflatten(F.pad(exponents, (0, steps * parts - exponents.shape[1])), 1, (steps, parts))
        return reduce(torch.bitwise_or, (plane.T << 8 * part for part, plane in enumerate(planes.unbind(2))))
    units = torch.arange(steps, device=d.device) * (parts * GPU_WIDTH) // max(form.superblock, 1)
    if kind == "halves":
        assert weight.a is not None, "superblocks have scales"
        scales = F.pad(weight.a.to(torch.int32) & 255, (0, steps * 4 - weight.a.shape[1]))
        words = reduce(torch.bitwise_or, (scales[:, part::4] << 8 * part for part in range(4)))
        return torch.stack((words, _halves(d, d)[:, units]), 2).permute(1, 2, 0)
    if kind == "superblocks":
        assert weight.a is not None, "superblocks have scales"
        assert weight.b is not None, "superblocks have minima"
        pairs = _join_bits(weight.a.to(torch.int32) & 255, weight.b.to(torch.int32), 8)
        pairs = F.pad(pairs, (0, steps * parts - pairs.shape[1]))
        words = [
            _join_bits(pairs[:, part::parts] & 0xFFFF, pairs[:, part + 1 :: parts], 16) for part in range(0, parts, 2)
        ]
        return torch.stack([*words, _halves(d, weight.e)[:, units]], 2).permute(1, 2, 0)
    if kind == "shifts":
        return _halves(d, weight.e).T
    zero = torch.full_like(d, form.zero)
    return _halves(d, zero if weight.b is None else zero + weight.b[:, :: form.gpu_group // form.group]).T


def _join_bits(low: Tensor, high: Tensor, bits: int) -> Tensor:
    """Return integers whose last `bits` bits are `low`, the others `high`."""
    return low | high << bits


def _halves(low: Tensor, high: Tensor | None) -> Tensor:
    """Return int32 words, each with two numbers in fp16."""
    assert high is not None, "a format with minima has them"
    return _join_bits(low.view(torch.int16).to(torch.int32) & 0xFFFF, high.half().view(torch.int16).to(torch.int32), 16)


@triton.jit
def _half(word, HIGH: tl.constexpr):
    """Return one of the two fp16 numbers of a word, in fp32."""
    bits = word >> 16 if HIGH else word
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _load_scale(
    scales, step, line, lines, depth,
    PART: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, EVEN: tl.constexpr,
    LANES: tl.constexpr = WIDTH,
):  # fmt: skip
    """Return the scales and shifts of a step's part for the weight rows `line`, in fp32. They have the shape to which
    `step` and `line` are broadcast. If SCALES is "halves", a last dimension follows: LANES numbers, for equal shares of
    the part's columns. If not EVEN, the part may lie beyond the `depth` columns."""
    PARTS: tl.constexpr = 16 // BITS
    if SCALES == "e2m1":
        word = tl.load(scales + step * lines + line)
        scale = ((word >> (8 * PART) & 255) << 23).to(tl.float32, bitcast=True)
        shift = tl.zeros_like(scale)
    elif SCALES == "halves":
        word, unit = tl.load(scales + step * 2 * lines + line), tl.load(scales + (step * 2 + 1) * lines + line)
        first = (word << (24 - 16 * PART) >> 24).to(tl.float32) * _half(unit, False)
        second = (word << (16 - 16 * PART) >> 24).to(tl.float32) * _half(unit, False)
        scale = tl.where(tl.arange(0, LANES) < LANES // 2, tl.expand_dims(first, -1), tl.expand_dims(second, -1))
        shift = -32 * scale
    elif SCALES == "superblocks":
        words = scales + step * (PARTS // 2 + 1) * lines + line
        word, unit = tl.load(words + PART // 2 * lines), tl.load(words + PARTS // 2 * lines)
        scale = (word << (24 - 16 * (PART % 2)) >> 24).to(tl.float32) * _half(unit, False)
        shift = -(word << (16 - 16 * (PART % 2)) >> 24).to(tl.float32) * _half(unit, True)
    else:
        group = (step * PARTS + PART) * WIDTH // GROUP
        if not EVEN:
            group = tl.minimum(group, depth // GROUP - 1)
        word = tl.load(scales + group * lines + line)
        scale, shift = _half(word, False), _half(word, True)
        if SCALES == "zeros":
            shift = -shift * scale
    return scale, shift


@triton.jit
def _whole_part(codes, like, PART: tl.constexpr):
    """Return a part's codes of 4 bits, plus `_base`, as exact numbers of the dtype of `like`, [N, WIDTH]. Two of them
    take two instructions. The caller scales the sums of a group."""
    if like.dtype == tl.float32:
        whole = (codes.to(tl.int32) >> (4 * PART) & 15).to(tl.float32)
    else:
        ptx: tl.constexpr = _WHOLE_BF16 if like.dtype == tl.bfloat16 else _WHOLE_FP16
        whole = tl.inline_asm_elementwise(ptx[PART], "=r,r", [codes], dtype=like.dtype, is_pure=True, pack=2)
    return whole


@triton.jit
def _raw_part(codes, PART: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr):
    """Return a part's codes plus `_raw_base`, or the numbers of MXFP4 without their scales, times 2^-126, in fp32. Only
    the lower 16 bits of `codes` are read."""
    wide = codes.to(tl.int32)
    if SCALES == "e2m1" and PART < 3:
        bits = wide << (16 + 3 * PART) & -0x7E400000  # 0x81C00000 as a signed number
    elif SCALES == "e2m1":
        bits = (wide << 17 & -0x80000000) | (wide << 11 & 0x01000000) | (wide << 12 & 0x00C00000)
    else:  # a code's last bit becomes the bit of the base's mantissa that is worth 1
        place: tl.constexpr = 16 if BITS == 4 else 15
        base: tl.constexpr = 0x43000000 if BITS == 4 else 0x43800000
        bits = (wide << (place - BITS * PART) & ((1 << BITS) - 1 << place)) | base
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _raw_base(BITS: tl.constexpr):
    """Return the number that `_raw_part` adds to a code."""
    base: tl.constexpr = 128.0 if BITS == 4 else 256.0
    return base


@triton.jit
def _base(like):
    """Return the number that `_whole_part` adds to a code."""
    base: tl.constexpr = 128.0 if like.dtype == tl.bfloat16 else 1024.0 if like.dtype == tl.float16 else 0.0
    return base


@triton.jit
def _add_scaled(acc, piece, sums, scale, shift):
    """Return acc + piece * scale + sums * shift, [N, M]; scales and shifts [N]."""
    acc = tl.fma(piece, tl.broadcast_to(scale[:, None], acc.shape), acc)
    return tl.fma(sums, tl.broadcast_to(shift[:, None], acc.shape), acc)


@triton.jit
def _expand_part(
    codes, scale, shift, dtype: tl.constexpr, PART: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr
):  # fmt: skip
    """Return the numbers of a part, [N, WIDTH], from `codes` int16 [N, WIDTH] and their scales and shifts."""
    if SCALES != "halves":
        scale, shift = tl.expand_dims(scale, -1), tl.expand_dims(shift, -1)
    if SCALES == "e2m1" and dtype == tl.bfloat16:
        high = scale.to(tl.int32, bitcast=True) >> 16
        twice = tl.broadcast_to(high | high << 16, codes.shape)
        ptx: tl.constexpr = _SCALED_E2M1[PART]
        return tl.inline_asm_elementwise(ptx, "=r,r,r,r", [codes, twice], dtype=tl.bfloat16, is_pure=True, pack=2)
    numbers = _raw_part(codes, PART, BITS, SCALES)
    if SCALES == "e2m1":
        numbers = numbers * 8.507059173023462e37 * scale  # 2^126
    else:
        numbers = numbers * scale + (shift - _raw_base(BITS) * scale)
    return numbers.to(dtype)


@triton.jit
def _add_step(
    acc, other, codes, scales, step, line, lines, away, inputs, real, depth,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, TWO: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return (acc, other), each [N, M], with the products of a step's columns added: of M rows of x and, in acc, of the
    weight rows `line` [N]; if TWO, in `other`, of those `away` after them, else it is unchanged. `lines`: the rows of
    the whole weight.

    `inputs` [1, M] are the addresses of x's rows, which are read where `real` [M]. If not EVEN, columns may lie after
    the last one."""
    PARTS: tl.constexpr = 16 // BITS
    WHOLE: tl.constexpr = BITS == 4 and SCALES != "e2m1" and acc.shape[1] <= MAX_WHOLE
    k = tl.arange(0, WIDTH)
    here = codes + (line + step * lines)[:, None] * WIDTH + k[None, :]
    h = tl.load(here)
    h_other = h
    if TWO:
        h_other = tl.load(here + away * WIDTH)
    for part in tl.static_range(PARTS):
        column = (step * PARTS + part) * WIDTH + k
        inside = real[None, :]
        if not EVEN:
            inside = inside & (column < depth)[:, None]
        v = tl.load(inputs + column[:, None], mask=inside, other=0.0)
        if part * WIDTH % GROUP == 0 or SCALES == "halves":
            scale, shift = _load_scale(scales, step, line, lines, depth, part, BITS, GROUP, SCALES, EVEN)
            scale_other, shift_other = scale, shift
            if TWO:
                scale_other, shift_other = _load_scale(
                    scales, step, line + away, lines, depth, part, BITS, GROUP, SCALES, EVEN
                )
            piece, piece_other, sums = tl.zeros_like(acc), tl.zeros_like(acc), tl.zeros_like(acc)
        if WHOLE:
            sums = tl.dot(tl.full(h.shape, 1.0, v.dtype), v, sums, input_precision="ieee")
            piece = tl.dot(_whole_part(h, v, part), v, piece, input_precision="ieee")
            if TWO:
                piece_other = tl.dot(_whole_part(h_other, v, part), v, piece_other, input_precision="ieee")
            if (part + 1) * WIDTH % GROUP == 0 or part == PARTS - 1:
                acc = _add_scaled(acc, piece, sums, scale, shift - _base(v) * scale)
                if TWO:
                    other = _add_scaled(other, piece_other, sums, scale_other, shift_other - _base(v) * scale_other)
        else:
            acc = tl.dot(_expand_part(h, scale, shift, v.dtype, part, BITS, SCALES), v, acc, input_precision="ieee")
            if TWO:
                w = _expand_part(h_other, scale_other, shift_other, v.dtype, part, BITS, SCALES)
                other = tl.dot(w, v, other, input_precision="ieee")
    return acc, other


@fast_launch
@triton.jit(do_not_specialize=["tokens", "tiles"])
def _product(
    x, codes, scales, bias, shares, out, counts, pairs, tokens, tiles, x_stride, size, lines, depth,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    UNROLL: tl.constexpr, SIDE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
    EVEN: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Do the same as `fused_moe._experts`. If EXPERTS is 0, this is a linear layer, each of whose rows is a pair.
    `lines`: the weight's rows. UNROLL divides the steps of a row. With SPLITS a program takes some of the steps: out
    [rows, SPLITS, size]."""
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
        n = left + tl.arange(0, BLOCK_N)
        source = pair
        if KIND is not None and EXPERTS > 0:
            source = pair // TOP
        inputs = x + source[None, :] * x_stride
        each = size if KIND is None else 2 * size
        line = tl.minimum(n, size - 1).to(tl.int64)
        if EXPERTS > 0:
            line += expert * each
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        other = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        turns, split = tl.cdiv(depth, 16 // BITS * WIDTH) // UNROLL, tl.program_id(1)
        share = tl.cdiv(turns, SPLITS)
        for turn in tl.range(split * share, tl.minimum(turns, (split + 1) * share), num_stages=STAGES):
            for j in tl.static_range(UNROLL):
                acc, other = _add_step(
                    acc, other, codes, scales, turn * UNROLL + j, line, lines, size, inputs, real, depth,
                    BITS, GROUP, SCALES, KIND is not None, EVEN,
                )  # fmt: skip
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


@triton.jit
def _unit(SCALES: tl.constexpr):
    """Return the number by which first x and then the sums are multiplied: 2^63 for MXFP4, which `_raw_part` returns
    times 2^-126, else 1. With x as it is, sums would be subnormal and lose bits; with 2^63 x they do only if all of x
    is below about 1e-17. Numbers of x from 2^65 on become infinite."""
    unit: tl.constexpr = 9.223372036854775808e18 if SCALES == "e2m1" else 1.0
    return unit


@triton.jit
def _add_steps(
    sums, x, codes, scales, step, line, lines, factor, real,
    DEPTH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, EVEN: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """Return `sums` [N, S, 4, WIDTH / 4] with the products of the steps `step` [1, S, 1] added: of the weight rows
    `line` [N, S or 1, 4] and the rows of x at the addresses `x` [1, S, 1], times `factor` [1, S, 1]. A sum is over 4
    columns of each part, whose `codes` are in one int64. If not ALL, only columns of x before DEPTH are read, and only
    where `real` [1, S, 1]. EVEN: see `_load_scale`."""
    PARTS: tl.constexpr = 16 // BITS
    FOUR: tl.constexpr = x.dtype.element_ty.primitive_bitwidth == 16  # load 4 numbers of x at once
    k = tl.arange(0, WIDTH // 4)
    h = tl.load(codes + tl.expand_dims(line + step * lines, 3) * (WIDTH // 4) + k)
    for part in tl.static_range(PARTS):
        column = tl.expand_dims((step * PARTS + part) * WIDTH, 3) + 4 * k
        inputs, inside = tl.expand_dims(x, 3) + column, None if ALL else (column < DEPTH) & tl.expand_dims(real, 3)
        if FOUR:
            four = tl.load(inputs.to(tl.pointer_type(tl.int64)), mask=inside, other=None if ALL else 0)
        piece, x_sum = tl.zeros_like(sums), tl.zeros_like(column).to(tl.float32)
        for j in tl.static_range(4):
            if FOUR:
                v = (four >> (16 * j)).to(tl.int16).to(x.dtype.element_ty, bitcast=True)
            else:
                v = tl.load(inputs + j, mask=inside, other=None if ALL else 0.0)
            v = v.to(tl.float32) * tl.expand_dims(factor, 3)
            piece += _raw_part((h >> (16 * j)).to(tl.int32), part, BITS, SCALES) * v
            x_sum += v
        scale, shift = _load_scale(scales, step, line, lines, DEPTH, part, BITS, GROUP, SCALES, EVEN, WIDTH // 4)
        if SCALES != "halves":
            scale, shift = tl.expand_dims(scale, 3), tl.expand_dims(shift, 3)
        if SCALES == "e2m1":
            sums += piece * (scale * _unit(SCALES))
        else:
            sums += piece * scale + x_sum * (shift - _raw_base(BITS) * scale)
    return sums


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["chosen"])
def _low_bit_token(
    x, codes, scales, bias, shares, out, chosen, size, lines,
    DEPTH: tl.constexpr, STEPS: tl.constexpr, TOP: tl.constexpr, BLOCK_N: tl.constexpr, TOGETHER: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    KIND: tl.constexpr, DIVIDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Do the same as `fused_moe._one_token`, for BLOCK_N rows of the weight a program, gate's and up's together.
    `lines`: the rows of the whole weight, of STEPS steps each. If not EVEN, the last step of a row, or the last turn of
    the loop, is not full.

    One loop runs over the steps of all pairs, TOGETHER at a time. Its tensors are [BLOCK_N / 4, TOGETHER, 4,
    WIDTH / 4]: a warp has 4 rows of the weight at a time, and the warps have different steps, so that a thread loads
    numbers of x once for several rows. `codes` are int64, each with those of 4 columns."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    PAIRS: tl.constexpr = TOP if KIND is None else 1
    WEIGHTS: tl.constexpr = 1 if KIND is None else 2  # gate and up
    COLUMNS: tl.constexpr = BLOCK_N // WEIGHTS  # of `out`
    across, index = tl.cdiv(size, COLUMNS), tl.program_id(0)
    first_pair, first = index // across, index % across * COLUMNS  # without a KIND the first pair is 0
    # Not loaded in the loop, where the weight's loads would wait for them.
    experts = (tl.load(chosen + first_pair).to(tl.int32),)
    factors = (tl.load(shares) if KIND is None else 1.0,)
    for i in tl.static_range(1, PAIRS):
        experts += (tl.load(chosen + i).to(tl.int32),)
        factors += (tl.load(shares + i),)
    own, turns = experts[0], tl.cdiv(PAIRS * STEPS, TOGETHER)
    if DIVIDED:
        for i in tl.static_range(1, PAIRS):
            own = tl.maximum(own, experts[i])
        turns = tl.where(own >= 0, turns, 0)
    if not DIVIDED or KIND is None or own >= 0:
        row = tl.arange(0, BLOCK_N // 4)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
        row = tl.minimum(first + row % COLUMNS, size - 1) + row // COLUMNS * size
        sums = tl.zeros((BLOCK_N // 4, TOGETHER, 4, WIDTH // 4), tl.float32)
        for turn in tl.range(0, turns, num_stages=STAGES):
            step = turn * TOGETHER + tl.arange(0, TOGETHER)[None, :, None]
            pair, expert, factor = step // STEPS, experts[0], factors[0]
            for i in tl.static_range(1, PAIRS):
                expert, factor = tl.where(pair == i, experts[i], expert), tl.where(pair == i, factors[i], factor)
            real = pair < PAIRS
            if DIVIDED:  # steps of other ranks' pairs load what another pair loads anyway
                real, expert = real & (expert >= 0), tl.where(expert >= 0, expert, own)
            step -= pair * STEPS
            factor = tl.zeros_like(step).to(tl.float32) + factor * _unit(SCALES)
            sums = _add_steps(
                sums, x + pair * DEPTH, codes, scales, step, expert * (size * WEIGHTS) + row, lines, factor, real,
                DEPTH, BITS, GROUP, SCALES, EVEN, EVEN and not DIVIDED,
            )  # fmt: skip
        total = tl.reshape(tl.sum(tl.sum(sums, axis=3), axis=1), (BLOCK_N,))
        n = first + tl.arange(0, BLOCK_N) % COLUMNS
        if bias is not None:
            rows = tl.minimum(n, size - 1) + tl.arange(0, BLOCK_N) // COLUMNS * size
            for i in tl.static_range(PAIRS):
                if not DIVIDED or experts[i] >= 0:
                    total += tl.load(bias + experts[i] * (size * WEIGHTS) + rows).to(tl.float32) * factors[i]
        if KIND is not None:
            gate, up = tl.split(tl.trans(tl.reshape(total, (2, COLUMNS))))
            total, n = activate_gated(gate, up, KIND), first + tl.arange(0, COLUMNS)
        tl.store(out + first_pair * size + n, total.to(out.dtype.element_ty), mask=n < size)


@fast_launch
@triton.jit
def _expand(
    codes, scales, out, lines, first_line, end_line, depth,
    BLOCK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the numbers of BLOCK weight rows of a step. `out` has the rows from `first_line` to `end_line`."""
    PARTS: tl.constexpr = 16 // BITS
    step, k = tl.program_id(1), tl.arange(0, WIDTH)
    n = first_line + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    line = tl.minimum(n, lines - 1).to(tl.int64)
    h = tl.load(codes + (line + step * lines)[:, None] * WIDTH + k[None, :])
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # the memory of the result may be in use until now
    for part in tl.static_range(PARTS):
        first = (step * PARTS + part) * WIDTH
        scale, shift = _load_scale(scales, step, line, lines, depth, part, BITS, GROUP, SCALES, False)
        numbers = _expand_part(h, scale, shift, out.dtype.element_ty, part, BITS, SCALES)
        place = out + (line - first_line)[:, None] * depth + (first + k)[None, :]
        tl.store(place, numbers, mask=(n < end_line)[:, None] & (first + k < depth)[None, :])


def expand(
    weight: LowBitMatrix, dtype: torch.dtype, start: int = 0, stop: int | None = None, *, pdl: bool = False
) -> Tensor:
    """Return the numbers of a weight, [rows, columns], or of its rows from `start` to `stop`, in `dtype`."""
    stop = weight.rows if stop is None else min(stop, weight.rows)
    out = torch.empty(stop - start, weight.columns, dtype=dtype, device=weight.codes.device)
    _expand[(cdiv(stop - start, EXPANDED_ROWS), len(weight.codes))](
        weight.codes, weight.scales, out, weight.rows, start, stop, weight.columns,
        BLOCK=EXPANDED_ROWS, BITS=weight.bits, GROUP=weight.group, SCALES=weight.kind, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def low_bit_linear(
    x: Tensor, weight: LowBitMatrix, bias: Tensor | None = None, activation: str | None = None, *,
    deterministic: bool = False, pdl: bool = False, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Return x weight^T + bias [M, rows] for x [M, columns], rounded once. With an `activation` the weight is gate and
    up, stacked: return act(gate) * up [M, rows / 2]. `deterministic`: a row's bits do not depend on the number of rows.
    `tile`: another one than the card's."""
    rows, size = len(x), weight.rows
    assert x.shape[1] == weight.columns, f"x {tuple(x.shape)} does not fit a weight of {weight.columns} columns"
    assert x.stride(1) == 1, "rows are contiguous"
    kind = None if activation is None else ACTIVATIONS[activation]
    if rows > MAX_FUSED_ROWS and not deterministic:
        out, step = x.new_empty(rows, size), max(EXPANDED_NUMBERS // weight.columns, 1)
        for start in range(0, size, step):
            numbers, part = expand(weight, x.dtype, start, start + step, pdl=pdl), out[:, start : start + step]
            if bias is None:
                torch.mm(x, numbers.T, out=part)
            else:
                torch.addmm(bias[start : start + step], x, numbers.T, out=part)
        return out if activation is None else act_and_mul(out, activation, pdl=pdl)
    size = size if kind is None else size // 2
    if not rows:
        return x.new_empty(0, size)
    tile = tile or choose_tile(rows, x, weight, kind is not None, deterministic)
    programs = SPLIT_PROGRAMS * 16 // max(tile.rows, 16)
    splits = min(MAX_SPLITS, power_of_2(cdiv(programs, cdiv(size, tile.columns))))
    splits = splits if kind is None and not deterministic else 1
    out = torch.empty(rows * splits, size, dtype=x.dtype if splits == 1 else torch.float32, device=x.device)
    launch(x, weight, bias, out, None, rows, tile, kind, pdl, splits)
    return out if splits == 1 else sum_experts(out, splits, x.dtype, pdl)


class LowBitLinear:
    """A linear layer of weights whose rows are stacked, of one format each: `low_bit_linear` with each."""

    def __init__(
        self, weights: Sequence[LowBitMatrix], bias: Tensor | None, activation: str | None, deterministic: bool,
        pdl: bool,
    ) -> None:  # fmt: skip
        self.weights, self.activation, self.deterministic, self.pdl = tuple(weights), activation, deterministic, pdl
        rows = [weight.rows for weight in weights]
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
    """Do the same as `fused_moe` with weights in few bits: gate_up [experts * 2 * inner, hidden], down [experts *
    hidden, inner]."""
    (tokens, hidden), top = x.shape, routing.expert_ids.shape[1]
    experts = down.rows // hidden
    assert x.stride(1) == 1, "rows are contiguous"
    pairs, inner = tokens * top, down.columns
    between = x.new_empty(pairs, inner)
    if tokens == 1 and not deterministic:
        first, second = choose_tile(0, x, gate_up, True, False), choose_tile(0, x, down, False, False)
        launch_one_token(x, gate_up, biases[0], between, routing, first, ACTIVATIONS[activation], pdl)
        return launch_one_token(between, down, biases[1], x.new_empty(1, hidden), routing, second, None, pdl)
    assert routing.counts is not None, "several tokens need lists"
    parts = x.new_empty(pairs, hidden, dtype=torch.float32)
    products = ((x, gate_up, between, ACTIVATIONS[activation]), (between, down, parts, None))
    for (source, weight, target, kind), bias in zip(products if pairs else (), biases):
        mean = max(cdiv(int(pairs * routing.share), experts), 1)
        tile = choose_tile(mean, x, weight, kind is not None, deterministic)
        launch(source, weight, bias, target, routing, tokens, tile, kind, pdl, experts=experts)
    return sum_experts(parts, top, x.dtype, pdl, routing.own_ids)


def launch(
    x: Tensor, weight: LowBitMatrix, bias: Tensor | None, out: Tensor, routing: Routing | None, tokens: int,
    tile: Tile, kind: str | None, pdl: bool, splits: int = 1, experts: int = 0,
) -> None:  # fmt: skip
    """Launch `_product` for the `experts` of `routing` or, without it, for a linear layer, whose columns are split
    `splits` ways."""
    top, shares, counts, pairs = 1, out, out, out  # the kernel of a linear layer reads none of these tensors
    if routing is not None:
        top, shares, counts, pairs = routing.expert_ids.shape[1], routing.weights, routing.counts, routing.pairs
    size, columns = out.shape[1], 16 // weight.bits * GPU_WIDTH
    steps, unroll = len(weight.codes), max(tile.depth // columns, 1)
    while steps % unroll:
        unroll //= 2
    tiles = min(len(out), len(out) // tile.rows + experts) if experts else cdiv(tokens, tile.rows)
    options: dict[str, Any] = {"num_warps": tile.warps, "launch_pdl": pdl}
    _product[(tiles * cdiv(size, tile.columns), splits)](
        x, weight.codes, weight.scales, out if bias is None else bias, shares, out,
        counts, pairs, tokens, tiles, x.stride(0), size, weight.rows, weight.columns,
        EXPERTS=experts, PADDED=power_of_2(max(experts, 1)), TOP=top, BLOCK_M=tile.rows, BLOCK_N=tile.columns,
        UNROLL=unroll, SIDE=GROUP_TILES, BITS=weight.bits, GROUP=weight.group, SCALES=weight.kind,
        EVEN=weight.columns % columns == 0, KIND=kind, BIAS=bias is not None, STAGES=tile.stages, SPLITS=splits,
        PDL=pdl, **options,
    )  # fmt: skip


def launch_one_token(
    x: Tensor, weight: LowBitMatrix, bias: Tensor | None, out: Tensor, routing: Routing, tile: Tile, kind: str | None,
    pdl: bool,
) -> Tensor:  # fmt: skip
    """Launch `_low_bit_token`. Return `out`: with an activation `kind` x is [1, columns] and out [top, size], without
    x is [top, columns] and out [1, size]."""
    top, size = routing.expert_ids.shape[1], out.shape[1]
    steps, columns = len(weight.codes), 16 // weight.bits * GPU_WIDTH  # of a step
    together = max(tile.depth // columns, 1)
    even = weight.columns % columns == 0 and steps * (top if kind is None else 1) % together == 0
    assert x.data_ptr() % 8 == 0, "4 numbers of x are loaded at once"
    assert weight.codes.numel() < 1 << 33, "int32 offsets reach 2^31 groups of 4 codes"
    options: dict[str, Any] = {"num_warps": tile.warps, "launch_pdl": pdl}
    _low_bit_token[(len(out) * cdiv(size, tile.columns),)](
        x, weight.codes.view(torch.int64), weight.scales, bias, routing.weights, out, routing.expert_ids, size,
        weight.rows, DEPTH=weight.columns, STEPS=steps, TOP=top, BLOCK_N=tile.columns * (1 if kind is None else 2),
        TOGETHER=together, BITS=weight.bits, GROUP=weight.group, SCALES=weight.kind, EVEN=even, STAGES=tile.stages,
        KIND=kind, DIVIDED=routing.share < 1, PDL=pdl, **options,
    )  # fmt: skip
    return out


def choose_tile(rows: int, x: Tensor, weight: LowBitMatrix, gated: bool, deterministic: bool) -> Tile:
    """Return the tile for `rows` rows of x or, of experts, for `rows` pairs on average; 0: for `_low_bit_token`. It has
    as many stages as fit in shared memory, at most the card's."""
    entry = f"low_bit/{'half' if rows else 'one_token'}/{'gated' if gated else 'plain'}"
    tile = ONE_TILE if deterministic else card_tile(x.device, entry, rows)
    column_bits = (1 + gated) * tile.columns * weight.bits + max(tile.rows, 1) * 8 * x.element_size()
    stage_bytes = column_bits * tile.depth // 8
    return tile._replace(stages=max(1, min(tile.stages, shared_memory(x.device) // stage_bytes)))
