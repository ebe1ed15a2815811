"""The block formats of quantised weights in GGUF files (those of ggml-common.h), and their dequantization: each row is
a sequence of blocks with scales. NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ByteArray = NDArray[np.uint8]
FloatArray = NDArray[np.float32]
PIECE_NUMBERS = 1 << 17  # numbers dequantized at once: they stay in a core's cache


class BlockFormat(NamedTuple):
    """A format: `block_size` numbers in `block_bytes` bytes, with fp16 scales at `scale_offsets`. `zero`: the unpacked
    number that stands for 0."""

    block_size: int
    block_bytes: int
    scale_offsets: tuple[int, ...] = ()
    zero: int = 0


BLOCK_FORMATS = {
    "f32": BlockFormat(1, 4),
    "f16": BlockFormat(1, 2),
    "bf16": BlockFormat(1, 2),
    "q4_0": BlockFormat(32, 18, (0,), 8),
    "q4_1": BlockFormat(32, 20, (0, 2)),
    "q5_0": BlockFormat(32, 22, (0,), 128),
    "q5_1": BlockFormat(32, 24, (0, 2)),
    "q8_0": BlockFormat(32, 34, (0,), 128),
    "q4_k": BlockFormat(256, 144, (0, 2)),
    "q5_k": BlockFormat(256, 176, (0, 2)),
    "q6_k": BlockFormat(256, 210, (208,), 32),
    "mxfp4": BlockFormat(32, 17),
}


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The numbers of MXFP4, of 4 bits each."""
E8M0_BIAS, E8M0_NAN = 127, 255
"""A scale of MXFP4 is the exponent of 2, plus the bias."""


class UnpackedBlocks(NamedTuple):
    """B blocks: `numbers` uint8 [B, block_size], fp16 scales `d` and minima `e` [B, 1]; in K formats int8 [B, groups]
    multiply both. A number stands for (number - zero) * (d * a) + e, with -e * b for e in K formats; in MXFP4 for
    2 * E2M1[number] * d, where d is a power of 2."""

    numbers: ByteArray
    d: NDArray[np.float16]
    e: NDArray[np.float16] | None = None
    a: NDArray[np.int8] | None = None
    b: NDArray[np.int8] | None = None


class GGUFTensor(NamedTuple):
    """A weight [rows, columns]: `data` [rows, bytes of a row] uint8 has its rows, each of whole blocks of `format`. It
    is a view of a file that is mapped read-only, or an array."""

    format: str
    rows: int
    columns: int
    data: ByteArray

    @property
    def is_float(self) -> bool:
        """Return True if the numbers are floats, not blocks."""
        return BLOCK_FORMATS[self.format].block_size == 1

    def slice_rows(self, start: int, stop: int) -> GGUFTensor:
        """Return rows `start` to `stop`."""
        data = self.data[start:stop]
        return GGUFTensor(self.format, len(data), self.columns, data)

    def slice_columns(self, columns: range) -> GGUFTensor:
        """Return these columns, which must be whole blocks."""
        kind = BLOCK_FORMATS[self.format]
        assert columns.start % kind.block_size == columns.stop % kind.block_size == 0, (
            f"{columns} are no blocks of {self.format}"
        )
        blocks = self.data.reshape(self.rows, -1, kind.block_bytes)
        data = blocks[:, columns.start // kind.block_size : columns.stop // kind.block_size].reshape(self.rows, -1)
        return GGUFTensor(self.format, self.rows, len(columns), data)

    def pad_rows(self, rows: int) -> GGUFTensor:
        """Return the tensor with `rows` rows; the added ones are zeros."""
        data = np.concatenate([self.data, np.zeros((rows - self.rows, self.data.shape[1]), np.uint8)])
        return GGUFTensor(self.format, rows, self.columns, data)

    def select_rows(self, order: NDArray[np.intp]) -> GGUFTensor:
        """Return a copy of the rows with these numbers, in this order."""
        return GGUFTensor(self.format, len(order), self.columns, self.data[order])

    def is_finite(self) -> bool:
        """Return True if every scale is finite; of floats, every number."""
        if self.is_float:
            return all(bool(np.isfinite(piece).all()) for _, piece in self.iter_dequantized())
        kind = BLOCK_FORMATS[self.format]
        blocks = self.data.reshape(self.rows, -1, kind.block_bytes)
        if self.format == "mxfp4":
            return not bool((blocks[:, :, 0] == E8M0_NAN).any())
        # An fp16 is infinite or NaN if its 5 exponent bits, in its upper byte, are all set.
        return not any(bool(((blocks[:, :, at + 1] & 0x7C) == 0x7C).any()) for at in kind.scale_offsets)

    def iter_dequantized(self) -> Iterator[tuple[int, FloatArray]]:
        """Yield (first row, numbers [n, columns] in fp32) for consecutive runs of n rows."""
        step = max(1, PIECE_NUMBERS // self.columns)
        for start in range(0, self.rows, step):
            yield start, self.slice_rows(start, start + step).dequantize()

    def dequantize(self) -> FloatArray:
        """Return the numbers in fp32 [rows, columns], bit for bit as ggml dequantizes them."""
        if self.is_float:
            return _to_float32(self.format, np.ascontiguousarray(self.data)).reshape(self.rows, self.columns)
        if self.format == "mxfp4":
            return self._dequantize_mxfp4()
        numbers, d, e, a, b = self.unpack()
        scale = d.astype(np.float32)
        scale = scale if a is None else scale * a
        groups = numbers.reshape(*scale.shape, numbers.shape[1] // scale.shape[1]).astype(np.float32)
        if zero := BLOCK_FORMATS[self.format].zero:
            groups -= zero
        groups *= scale[:, :, None]
        if e is not None:
            minimum = e.astype(np.float32)
            groups += (minimum if b is None else -minimum * b)[:, :, None]
        return groups.reshape(self.rows, self.columns)

    def _dequantize_mxfp4(self) -> FloatArray:
        blocks = np.ascontiguousarray(self.data).reshape(-1, BLOCK_FORMATS[self.format].block_bytes)
        exponents = blocks[:, :1].astype(np.int32) - E8M0_BIAS
        return np.ldexp(E2M1[_nibbles(blocks[:, 1:])], exponents).astype(np.float32).reshape(self.rows, self.columns)

    def unpack(self) -> UnpackedBlocks:
        """Return the numbers and scales of all blocks, row by row."""
        blocks = np.ascontiguousarray(self.data).reshape(-1, BLOCK_FORMATS[self.format].block_bytes)
        return UnpackedBlocks(*UNPACKERS[self.format](blocks))


def row_bytes(kind: str, columns: int) -> int:
    """Return the bytes of a row; `columns` must be a multiple of the format's block size."""
    assert columns % BLOCK_FORMATS[kind].block_size == 0, f"{columns} columns aren't whole blocks of {kind}"
    return columns // BLOCK_FORMATS[kind].block_size * BLOCK_FORMATS[kind].block_bytes


def _to_float32(kind: str, data: ByteArray) -> FloatArray:
    if kind == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.float16 if kind == "f16" else np.float32).astype(np.float32, copy=False)


def _half(blocks: ByteArray, at: int) -> NDArray[np.float16]:
    """Return the fp16 at byte `at` of each block, [B, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _nibbles(packed: ByteArray) -> ByteArray:
    """[B, n] -> [B, 2 n]: the lower four bits of all bytes, then the upper ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(blocks: ByteArray, at: int) -> ByteArray:
    """Return the fifth bits of 32 numbers at their place: [B, 32] of 0 or 16."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _k_scales(blocks: ByteArray) -> tuple[Any, ...]:
    """Return d, e, and the scales and minima of a K block's 8 groups of 32 numbers, [B, 8] each. They have six bits
    each, in 12 bytes. Of the last four groups, the lower four bits are in the last four bytes, and the upper two are
    the upper bits of the first groups' bytes."""
    low, high, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=1)
    return _half(blocks, 0), _half(blocks, 2), scales.view(np.int8), minima.view(np.int8)


def _k_nibbles(packed: ByteArray) -> ByteArray:
    """[B, 128] -> [B, 256]: each run of 32 bytes has a group in its lower four bits, and the next in the upper."""
    runs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 256)


def _q5_k(blocks: ByteArray) -> tuple[Any, ...]:
    fifth = (blocks[:, 16:48, None] >> np.arange(8, dtype=np.uint8) & 1).swapaxes(1, 2)
    return _k_nibbles(blocks[:, 48:]) | (fifth << 4).reshape(-1, 256), *_k_scales(blocks)


def _q6_k(blocks: ByteArray) -> tuple[Any, ...]:
    """Two halves of 128 numbers. Each has its lower four bits in 64 bytes and its upper two bits in 32 bytes."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return (low | high << 4).reshape(-1, 256), _half(blocks, 208), None, blocks[:, 192:208].view(np.int8)


def mxfp4_scales(exponents: ByteArray) -> NDArray[np.float16]:
    """Return half of the scales of MXFP4 blocks, as fp16: the numbers are multiplied by 2. Exact from 2^-23 to 2^16,
    below 0."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - E8M0_BIAS - 1).astype(np.float16)


UNPACKERS: dict[str, Callable[[ByteArray], tuple[Any, ...]]] = {
    "q8_0": lambda blocks: (blocks[:, 2:] ^ 128, _half(blocks, 0)),
    "q5_0": lambda blocks: ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)) + 112, _half(blocks, 0)),
    "q5_1": lambda blocks: (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2)),
    "q4_0": lambda blocks: (_nibbles(blocks[:, 2:]), _half(blocks, 0)),
    "q4_1": lambda blocks: (_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)),
    "q4_k": lambda blocks: (_k_nibbles(blocks[:, 16:]), *_k_scales(blocks)),
    "q5_k": _q5_k, "q6_k": _q6_k,
    "mxfp4": lambda blocks: (_nibbles(blocks[:, 1:]), mxfp4_scales(blocks[:, :1])),
}  # fmt: skip
"""Blocks [B, bytes of one] -> UnpackedBlocks."""
