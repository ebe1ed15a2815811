"""Products with weights in few bits: linear layers, and mixtures of experts (see `fused_moe`).

A program expands some rows of the weight in registers, step by step, and multiplies them as `W x^T` on the tensor cores
with the rows of x as the narrow side (`_product`). So the weight is read from memory in few bits. A single row of x has
its own kernel (`_one_row`), which divides the steps among warps. Many rows of x are multiplied by the library, with a
weight that is expanded in memory for the time of the product (`_expand`).

A weight's number is code * scale + shift, in fp32. Either this number is rounded to x's dtype and multiplied
(`_expand_part`), or the codes are multiplied as whole numbers, and the sum over a group is scaled (`_whole_part`).
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
MMA_M, MMA_N = tl.constexpr(16), tl.constexpr(8)
"""The fewest rows of a weight, and of x, that an instruction of the tensor cores multiplies."""


def _ptx(*lines: str) -> str:
    """Return inline PTX of these lines, with scratch registers a, b and zero. It reads two int16 of
    `LowBitMatrix.codes` from register $1, and writes two 16-bit floating-point numbers to $0: those of one part."""
    return "{ .reg .b32 a, b, zero; " + " ".join(f"{line};" for line in lines) + " }"


def _whole_ptx(base: str) -> tl.constexpr:
    """Return the PTX of `_whole_part` for each part of codes of 4 bits. `base`: twice the bits of `_base`, whose last
    mantissa bit is worth 1, so that `base | code` is base + code."""
    merged = f"mov.b32 b, {base}", "lop3.b32 $0, a, 0x000f000f, b, 0xEA"  # a & mask | b
    return tl.constexpr(tuple(_ptx(f"shr.u32 a, $1, {4 * part}", *merged) for part in range(4)))


def _e2m1_ptx(part: int, scaled: bool) -> str:
    """Return the PTX for a part of MXFP4 in bf16: of `_expand_part` if `scaled`, else of `_whole_part`.

    A code's sign, exponent and mantissa are moved to their places in bf16 (0x81c0), which makes 2^-126 times its
    number. If `scaled`, this is multiplied by 2^126 (0x7e80) and by the scale in $2. GPUs before Hopper have no product
    of two numbers in bf16, but one that adds a third, here -0."""
    moved = [f"shl.b32 a, $1, {3 * part}"]
    if part == 3:  # 66 is 1 << 1 | 1 << 6: the last two bits move by 1, the sign by 6
        moved = ["shr.u32 a, $1, 5", "and.b32 b, a, 0x02600260", "and.b32 a, a, 0x01000100", "mad.lo.u32 a, b, 66, a"]
    if not scaled:
        return _ptx(*moved, "and.b32 $0, a, 0x81c081c0")
    scale = "mov.b32 b, 0x7e807e80", "fma.rn.bf16x2 a, a, b, zero", "fma.rn.bf16x2 $0, a, $2, zero"
    return _ptx(*moved, "and.b32 a, a, 0x81c081c0", "mov.b32 zero, 0x80008000", *scale)


# Each has the PTX of the four parts.
_WHOLE_BF16 = _whole_ptx("0x43004300")  # 128
_WHOLE_FP16 = _whole_ptx("0x64006400")  # 1024
_WHOLE_E2M1 = tl.constexpr(tuple(_e2m1_ptx(part, False) for part in range(4)))
_SCALED_E2M1 = tl.constexpr(tuple(_e2m1_ptx(part, True) for part in range(4)))


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
):  # fmt: skip
    """Return the scales and shifts of a step's part for the weight rows `line` [N], in fp32: [N], or [N, WIDTH] if
    SCALES is "halves". With steps [S, N] and rows [1, N] they are [S, N], or [S, N, WIDTH]."""
    PARTS: tl.constexpr = 16 // BITS
    if SCALES == "e2m1":
        word = tl.load(scales + step * lines + line)
        scale = ((word >> (8 * PART) & 255) << 23).to(tl.float32, bitcast=True)
        shift = tl.zeros_like(scale)
    elif SCALES == "halves":
        word, unit = tl.load(scales + step * 2 * lines + line), tl.load(scales + (step * 2 + 1) * lines + line)
        first = (word << (24 - 16 * PART) >> 24).to(tl.float32) * _half(unit, False)
        second = (word << (16 - 16 * PART) >> 24).to(tl.float32) * _half(unit, False)
        scale = tl.where(tl.arange(0, WIDTH) < WIDTH // 2, tl.expand_dims(first, -1), tl.expand_dims(second, -1))
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
def _whole_part(codes, like, PART: tl.constexpr, E2M1: tl.constexpr):
    """Return a part's codes of 4 bits, plus `_base`, as exact numbers of the dtype of `like`, in the shape of `codes`.
    Two of them take two instructions. The caller scales the sums of a group.

    With E2M1 return the numbers of MXFP4 without their scales; in bf16 they are divided by the square of `_unit`, and
    two of them take 2.5 instructions on average."""
    if E2M1 and like.dtype != tl.bfloat16:
        whole = _e2m1(codes, PART).to(like.dtype)
    elif like.dtype == tl.float32:
        whole = (codes.to(tl.int32) >> (4 * PART) & 15).to(tl.float32)
    else:
        ptx: tl.constexpr = _WHOLE_E2M1 if E2M1 else _WHOLE_BF16 if like.dtype == tl.bfloat16 else _WHOLE_FP16
        whole = tl.inline_asm_elementwise(ptx[PART], "=r,r", [codes], dtype=like.dtype, is_pure=True, pack=2)
    return whole


@triton.jit
def _e2m1(codes, PART: tl.constexpr):
    """Return the numbers of a part of MXFP4 without their scales, in fp32."""
    wide = codes.to(tl.int32)
    if PART < 3:
        bits = wide << (16 + 3 * PART) & -0x7E400000  # 0x81C00000 as a signed number
    else:
        bits = (wide << 17 & -0x80000000) | (wide << 11 & 0x01000000) | (wide << 12 & 0x00C00000)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def _add_whole(piece, codes, v, PART: tl.constexpr, BITS: tl.constexpr, E2M1: tl.constexpr):
    """Return piece [N, M] plus the product of a part's codes [N, WIDTH], each plus `_base`, and v [WIDTH, M]. Codes of
    8 bits are multiplied as two halves of 4, since the mantissa of bf16 has no room for more beside the base."""
    if BITS == 8:
        high = tl.dot(_whole_part(codes, v, 2 * PART + 1, False), v, tl.zeros_like(piece), input_precision="ieee")
        piece = high * 16.0 + piece
    return tl.dot(_whole_part(codes, v, PART * BITS // 4, E2M1), v, piece, input_precision="ieee")


@triton.jit
def _base(like, BITS: tl.constexpr):
    """Return the number that `_whole_part` adds to a code of 4 bits; of 8 bits, what it adds to both halves together:
    to the high one 16 times."""
    base: tl.constexpr = 128.0 if like.dtype == tl.bfloat16 else 1024.0 if like.dtype == tl.float16 else 0.0
    return base * 17 if BITS == 8 else base


@triton.jit
def _unit(dtype: tl.constexpr):
    """Return the number by which x, and then the sums, are multiplied, because `_whole_part` divides MXFP4 by its
    square, 2^126. In two steps, so that no sum is rounded as a subnormal number, unless all of x is below about 1e-17.
    Numbers of x from 2^65 on become infinite."""
    unit: tl.constexpr = 9.223372036854775808e18 if dtype == tl.bfloat16 else 1.0  # 2^63
    return unit


@triton.jit
def _add_scaled(acc, piece, sums, scale, shift):
    """Return acc + piece * scale + sums * shift, [N, M]; scales and shifts [N]. There is no shift if `sums` is None."""
    acc = tl.fma(piece, tl.broadcast_to(tl.expand_dims(scale, -1), acc.shape), acc)
    if sums is not None:
        acc = tl.fma(sums, tl.broadcast_to(tl.expand_dims(shift, -1), acc.shape), acc)
    return acc


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
    if SCALES == "e2m1":
        numbers = _e2m1(codes, PART) * scale
    else:
        # base + code: the code is put at the place of the mantissa of `base` that is worth 1.
        place: tl.constexpr = 16 if BITS == 4 else 15
        base: tl.constexpr = 128.0 if BITS == 4 else 256.0
        one: tl.constexpr = 0x43000000 if BITS == 4 else 0x43800000
        bits = (codes.to(tl.int32) << (place - BITS * PART) & ((1 << BITS) - 1 << place)) | one
        numbers = bits.to(tl.float32, bitcast=True) * scale + (shift - base * scale)
    return numbers.to(dtype)


@triton.jit
def _add_step(
    acc, other, codes, scales, step, line, lines, away, inputs, first, real, depth,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, TWO: tl.constexpr, EVEN: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Return (acc, other), each [N, M], with the products of a step's columns added: of M rows of x and, in acc, of the
    weight rows `line` [N]; if TWO, in `other`, of those `away` after them, else it is unchanged. `lines`: the rows of
    the whole weight.

    `first` [WIDTH, M] are the columns of the step's first part, and `inputs` the address of x's rows. x is read where
    `real` [1, M], and 0 elsewhere; everywhere if `real` is None. If not EVEN, columns may lie after the last one.

    WHOLE: codes are multiplied as whole numbers, and the sums of MXFP4 stay divided by `_unit`.

    There may be S steps, each with sums of its own: `step` is [S, N], `line` [1, N], `first` [S, WIDTH, M], and acc and
    `other` are [S, N, M]."""
    PARTS: tl.constexpr = 16 // BITS
    E2M1: tl.constexpr = SCALES == "e2m1"
    here = codes + tl.expand_dims(line + step * lines, -1) * WIDTH + tl.arange(0, WIDTH)
    h = tl.load(here)
    h_other = h
    if TWO:
        h_other = tl.load(here + away * WIDTH)
    for part in tl.static_range(PARTS):
        column = first + part * WIDTH
        inside = real
        if not EVEN:
            inside = column < depth if real is None else real & (column < depth)
        v = tl.load(inputs + column, mask=inside, other=None if inside is None else 0.0)
        if E2M1 and WHOLE:
            v *= _unit(v.dtype)
        if part * WIDTH % GROUP == 0 or SCALES == "halves":
            scale, shift = _load_scale(scales, step, line, lines, depth, part, BITS, GROUP, SCALES, EVEN)
            scale_other, shift_other = scale, shift
            if TWO:
                scale_other, shift_other = _load_scale(
                    scales, step, line + away, lines, depth, part, BITS, GROUP, SCALES, EVEN
                )
            piece, piece_other = tl.zeros_like(acc), tl.zeros_like(acc)
            sums = None if E2M1 else tl.zeros_like(acc)
        if WHOLE:
            if not E2M1:
                sums = tl.dot(tl.full(h.shape, 1.0, v.dtype), v, sums, input_precision="ieee")
            piece = _add_whole(piece, h, v, part, BITS, E2M1)
            if TWO:
                piece_other = _add_whole(piece_other, h_other, v, part, BITS, E2M1)
            if (part + 1) * WIDTH % GROUP == 0 or part == PARTS - 1:
                acc = _add_scaled(acc, piece, sums, scale, shift - _base(v, BITS) * scale)
                if TWO:
                    gap = shift_other - _base(v, BITS) * scale_other
                    other = _add_scaled(other, piece_other, sums, scale_other, gap)
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
    """Do the same as `fused_moe`'s kernel of experts. If EXPERTS is 0, this is a linear layer, each of whose rows is a
    pair. `lines`: the weight's rows. UNROLL divides the steps of a row. With SPLITS a program takes some of the steps:
    out [rows, SPLITS, size]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    WHOLE: tl.constexpr = BITS == 4 and SCALES != "e2m1" and BLOCK_M <= MAX_WHOLE
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
                step = turn * UNROLL + j
                first_column = (tl.arange(0, WIDTH) + step * (16 // BITS * WIDTH))[:, None]
                acc, other = _add_step(
                    acc, other, codes, scales, step, line, lines, size, inputs, first_column, real[None, :], depth,
                    BITS, GROUP, SCALES, KIND is not None, EVEN, WHOLE,
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
def _row_sums(
    x, codes, scales, rows, lines, away, depth,
    STEPS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, EVEN: tl.constexpr,
    TWO: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the products [ROWS] of a row of x and the weight rows `rows` [ROWS], and, if TWO, of those `away` after
    them, else zeros.

    STEPS steps are multiplied at a time, as a batch of STEPS // STACKED matrix products, which the warps divide. The
    tensor cores need MMA_M weight rows. If there are fewer, a product has those of STACKED steps, one step below the
    other. Its MMA_N columns are the row of x at these steps in turn: column c at step c % STACKED. A sum counts only if
    its row and its column are of the same step (`matched`, in the first STACKED columns)."""
    ROWS: tl.constexpr = rows.shape[0]
    STACKED: tl.constexpr = max(MMA_M // ROWS, 1)
    COLUMNS: tl.constexpr = 16 // BITS * WIDTH
    WHOLE: tl.constexpr = SCALES != "halves"  # whose parts have two scales
    tl.static_assert(STACKED <= MMA_N, "each stacked step needs a column")
    line = tl.reshape(tl.broadcast_to(rows[None, :], (STACKED, ROWS)), (1, STACKED * ROWS))
    batch, column = tl.arange(0, STEPS // STACKED)[:, None] * STACKED, tl.arange(0, MMA_N)[None, :]
    stacked = tl.arange(0, STACKED * ROWS)[None, :] // ROWS
    acc = tl.zeros((STEPS // STACKED, STACKED * ROWS, MMA_N), tl.float32)
    other = tl.zeros((STEPS // STACKED, STACKED * ROWS, MMA_N), tl.float32)
    for turn in tl.range(0, tl.cdiv(depth, STEPS * COLUMNS), num_stages=STAGES):
        step, x_step = turn * STEPS + batch + stacked, turn * STEPS + batch + column % STACKED
        first = tl.arange(0, WIDTH)[:, None] + x_step[:, None, :] * COLUMNS
        if not EVEN:
            step = tl.minimum(step, tl.cdiv(depth, COLUMNS) - 1)  # steps after the last multiply zeros of x
        acc, other = _add_step(
            acc, other, codes, scales, step, line, lines, away, x, first, None, depth,
            BITS, GROUP, SCALES, TWO, EVEN, WHOLE,
        )  # fmt: skip
    matched = stacked[:, :, None] == column[:, None, :]
    return _sum_steps(acc, matched, x, SCALES, ROWS), _sum_steps(other, matched, x, SCALES, ROWS)


@triton.jit
def _sum_steps(acc, matched, x, SCALES: tl.constexpr, ROWS: tl.constexpr):
    """Return the sums [ROWS] over all steps of the `matched` numbers of acc [S, STACKED * ROWS, MMA_N]."""
    unit: tl.constexpr = _unit(x.dtype.element_ty) if SCALES == "e2m1" else 1.0
    sums = tl.sum(tl.sum(tl.where(matched, acc * unit, 0.0), axis=2), axis=0)
    return tl.sum(tl.reshape(sums, (acc.shape[1] // ROWS, ROWS)), axis=0)


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["chosen"])
def _one_row(
    x, codes, scales, bias, shares, out, chosen, size, lines, depth,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr,
    DIVIDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Do the same as `fused_moe`'s kernel of one token, for BLOCK_N columns of `out` a program. If EXPERTS is 0, this
    is a linear layer, and TOP is 1. `lines`: the weight's rows. STEPS: see `_row_sums`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    TWO: tl.constexpr = KIND is not None
    across, index = tl.cdiv(size, BLOCK_N), tl.program_id(0)
    n = index % across * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, total = tl.minimum(n, size - 1).to(tl.int64), tl.zeros((BLOCK_N,), tl.float32)
    for rank in tl.range(0, 1 if TWO else TOP, flatten=True):  # flat: loads of an expert begin in the one before
        pair, expert = index // across + rank, 0  # without a KIND the index is less than `across`
        if EXPERTS > 0:
            expert = tl.load(chosen + pair)
        if not DIVIDED or expert >= 0:
            line, source = rows, x
            if EXPERTS > 0:
                line += expert * (2 * size if TWO else size)
            if not TWO:
                source += pair * depth
            acc, other = _row_sums(
                source, codes, scales, line, lines, size, depth, STEPS, BITS, GROUP, SCALES, EVEN, TWO, STAGES
            )
            if bias is not None:
                acc += tl.load(bias + line).to(tl.float32)
                if TWO:
                    other += tl.load(bias + line + size).to(tl.float32)
            if TWO:
                acc = activate_gated(acc, other, KIND)
            elif EXPERTS > 0:
                acc *= tl.load(shares + pair)
            total += acc
    place = out + n
    if TWO:
        place += index // across * size
    tl.store(place, total.to(out.dtype.element_ty), mask=n < size)


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
    if tile.rows == 0:
        return launch_one_row(x, weight, bias, x.new_empty(1, size), None, tile, kind, pdl)
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
        first, second = choose_tile(1, x, gate_up, True, False), choose_tile(1, x, down, False, False)
        launch_one_row(x, gate_up, biases[0], between, routing, first, ACTIVATIONS[activation], pdl, experts)
        return launch_one_row(between, down, biases[1], x.new_empty(1, hidden), routing, second, None, pdl, experts)
    assert routing.counts is not None, "several tokens need lists"
    parts = x.new_empty(pairs, hidden, dtype=torch.float32)
    products = ((x, gate_up, between, ACTIVATIONS[activation]), (between, down, parts, None))
    for (source, weight, target, kind), bias in zip(products if pairs else (), biases):
        mean = max(cdiv(int(pairs * routing.share), experts), 2)
        tile = choose_tile(mean, x, weight, kind is not None, deterministic)
        launch(source, weight, bias, target, routing, tokens, tile, kind, pdl, experts=experts)
    return sum_experts(parts, top, x.dtype, pdl, routing.own_ids)


def launch(
    x: Tensor, weight: LowBitMatrix, bias: Tensor | None, out: Tensor, routing: Routing | None, tokens: int,
    tile: Tile, kind: str | None, pdl: bool, splits: int = 1, experts: int = 0,
) -> None:  # fmt: skip
    """Launch `_product` for the experts of `routing` or, without it, for a linear layer."""
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


def launch_one_row(
    x: Tensor, weight: LowBitMatrix, bias: Tensor | None, out: Tensor, routing: Routing | None, tile: Tile,
    kind: str | None, pdl: bool, experts: int = 0,
) -> Tensor:  # fmt: skip
    """Launch `_one_row` for the experts of a single token or, without `routing`, for a linear layer. Return `out`: of
    experts with a `kind` it is [top, size], else [1, size]. `experts`: how many `weight` has, 0 of a linear layer."""
    top, shares, chosen, divided = 1, out, out, False  # the kernel of a linear layer reads none of these tensors
    if routing is not None:
        top, shares, chosen = routing.expert_ids.shape[1], routing.weights, routing.expert_ids
        divided = routing.share < 1
    size, columns = out.shape[1], 16 // weight.bits * GPU_WIDTH
    steps = max(tile.depth // columns, 1)
    options: dict[str, Any] = {"num_warps": tile.warps, "launch_pdl": pdl}
    _one_row[(len(out) * cdiv(size, tile.columns),)](
        x, weight.codes, weight.scales, bias, shares, out, chosen, size, weight.rows, weight.columns,
        EXPERTS=experts, TOP=top, BLOCK_N=tile.columns, STEPS=steps, BITS=weight.bits, GROUP=weight.group,
        SCALES=weight.kind, EVEN=weight.columns % (steps * columns) == 0, STAGES=tile.stages, KIND=kind,
        DIVIDED=divided, PDL=pdl, **options,
    )  # fmt: skip
    return out


def choose_tile(rows: int, x: Tensor, weight: LowBitMatrix, gated: bool, deterministic: bool) -> Tile:
    """Return the tile for `rows` rows of x or, of experts, for their mean number of pairs. It has as many stages as fit
    in shared memory. A tile of 0 rows is for `_one_row`."""
    tile = ONE_TILE if deterministic else card_tile(x.device, f"low_bit/half/{'gated' if gated else 'plain'}", rows)
    column_bits = (1 + gated) * tile.columns * weight.bits + max(tile.rows, MMA_N.value) * 8 * x.element_size()
    stage_bytes = column_bits * tile.depth // 8
    return tile._replace(stages=max(1, min(tile.stages, shared_memory(x.device) // stage_bytes)))
