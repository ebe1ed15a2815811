"""Products with low-bit weights that are packed once (native/quantised.h).

Rows in bf16 are rounded to int8, with a scale for each group of columns: with few rows, integer products are as fast as
memory. Where there are AMX tiles, many rows are multiplied in bf16 without rounding; rows in fp32 never are rounded. A
row's bits do not depend on the number of rows, except by tiles, which `deterministic` disables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu.library import SCRATCH, Library
from quire.kernels.cpu.library_loader import library, required_library
from quire.kernels.cpu.linear import (
    CHUNKS_PER_THREAD,
    DTYPES,
    LOOKUP_ROWS,
    MEMORY_BOUND_ROWS,
    PANEL,
    PackedWeight,
    linear,
    split_work,
)
from quire.kernels.cpu.weight_arena import weight_arena

MAX_CHUNK_ROWS = 256
MAX_TILED_CHUNK_ROWS = 512  # the same on tiles, for which each chunk unpacks the weight
MAX_UNSTAGED_ROWS = 4  # up to as many rows, each chunk rounds them itself
TILED_ROWS = 40  # the fewest rows for which tiles in bf16 are faster than integers
TILED_COLUMNS = 8192  # the most on tiles: a panel in bf16 must fit in a thread's scratch memory
GPU_WIDTH = 32
"""The columns of a weight that a GPU's kernels expand together, and multiply by one scale."""
MAX_GPU_GROUP = 128
"""The most columns of a superblock whose columns all share a scale on a GPU: those of AWQ and GPTQ."""
E2M1_DOUBLED = torch.tensor([0.0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12])


class LowBitFormat(NamedTuple):
    """Storage format of low-bit numbers and their scales: see native/quantised.h. With `is_e2m1` the 4 bits are a
    floating-point number of MXFP4, whose double is multiplied by the scale."""

    bits: int
    superblock: int
    zero: int
    has_min: bool
    is_e2m1: bool = False

    @property
    def group(self) -> int:
        """Return the columns that share a scale."""
        return 16 if self.bits == 6 else 32

    @property
    def kernel_args(self) -> tuple[int, int, int, int]:
        """Return the format as kernel arguments."""
        return -self.bits if self.is_e2m1 else self.bits, self.superblock, self.zero, int(self.has_min)

    def scale_unit_bytes(self) -> int:
        """Return the bytes of a panel's scales for one unit of columns: a superblock, or without these a group."""
        return PANEL * (1 + self.has_min) * (2 + (self.superblock // self.group if self.superblock else 0))

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a packed row of the weight."""
        return (
            columns * PANEL * self.bits // 8 + columns // (self.superblock or self.group) * self.scale_unit_bytes()
        ) // PANEL

    @property
    def gpu_bits(self) -> int:
        """Return the bits of a code on a GPU."""
        return 4 if self.bits == 4 else 8

    @property
    def gpu_scales(self) -> str:
        """Return the kind of scales on a GPU (quire.kernels.triton.low_bit.LowBitMatrix)."""
        if self.is_e2m1:
            return "e2m1"
        if self.group < GPU_WIDTH:
            return "halves"
        if self.superblock > MAX_GPU_GROUP:
            return "superblocks"
        return "shifts" if self.has_min and not self.superblock else "zeros"

    @property
    def gpu_group(self) -> int:
        """Return the number of columns that share a scale on a GPU: with "zeros" a whole superblock."""
        return self.superblock if self.gpu_scales == "zeros" and self.superblock else self.group

    def gpu_row_bytes(self, columns: int) -> int:
        """Return the bytes of a weight's row with this number of columns on a GPU, scales included."""
        steps = -(-columns // (16 // self.gpu_bits * GPU_WIDTH))
        by_step = {"e2m1": 1, "halves": 2, "superblocks": 8 // self.gpu_bits + 1}.get(self.gpu_scales)
        words = columns // self.gpu_group if by_step is None else steps * by_step
        return steps * GPU_WIDTH * 2 + words * 4


class LowBitWeight(NamedTuple):
    """A low-bit weight [rows, columns]: `numbers` uint8 [rows, columns], 0 to 2^bits - 1, and the scales of its format:
    d and e fp16 [rows, units], a and b int8 [rows, groups]."""

    form: LowBitFormat
    numbers: Tensor
    d: Tensor
    e: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None

    def scales(self) -> tuple[Tensor, Tensor | None]:
        """Return each group's (scale, minimum or None), fp32 [rows, groups]: number -> (number - zero) * scale +
        minimum."""
        per = self.form.superblock // self.form.group if self.form.superblock else 1
        d, e, a, b = (None if part is None else part.float() for part in self[2:])
        assert d is not None, "d is set"
        scale, least = d.repeat_interleave(per, 1), None if e is None else e.repeat_interleave(per, 1)
        if a is not None:
            scale = scale * a
        if least is not None and b is not None:
            least = -least * b
        return scale, least

    def dequantize(self) -> Tensor:
        """Return the weight in fp32 [rows, columns]."""
        rows, columns = self.numbers.shape
        scale, least = self.scales()
        if self.form.is_e2m1:
            numbers = E2M1_DOUBLED.to(self.numbers.device)[self.numbers.long()]
        else:
            numbers = self.numbers.float() - self.form.zero
        values = numbers.view(rows, -1, self.form.group) * scale[:, :, None]
        return (values if least is None else values + least[:, :, None]).view(rows, columns)

    def concat_rows(self, other: LowBitWeight) -> LowBitWeight:
        """Return the rows of this weight followed by those of `other`, which has the same format. NumPy copies with one
        thread: torch's threads would wait for each other at every new page of memory."""
        assert self.form == other.form, f"{self.form} is not {other.form}"
        pairs = zip(self[1:], other[1:])
        parts = (None if x is None or y is None else torch.from_numpy(np.concatenate([x, y])) for x, y in pairs)
        return LowBitWeight._make((self.form, *parts))


class PackedLowBitLinear(PackedWeight):
    """A packed low-bit weight."""

    __slots__ = ("form",)

    def __init__(
        self, weight: LowBitWeight, dtype: torch.dtype, bias: Tensor | None = None, activation: str | None = None,
        gated: bool = False, deterministic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(weight.numbers.shape, dtype, bias, activation, gated, deterministic)
        self.form = form = weight.form
        assert self.columns % (form.superblock or form.group) == 0, f"{self.columns} columns are no multiple of a group"
        self.data = weight_arena().allocate(self.panels * PANEL, form.row_bytes(self.columns), torch.uint8)
        tensors = [None if part is None else part.contiguous() for part in weight[1:]]
        args = *tensors, self.data, self.rows, self.columns, int(gated), *form.kernel_args
        required_library().call("pack_quantised", self.panels, *args)

    @property
    def kernel(self) -> str:
        return f"quantised_{DTYPES[self.dtype]}"

    def max_chunk_rows(self) -> int:
        """Return the most rows of a chunk that may be computed without tiles."""
        return MAX_CHUNK_ROWS

    def min_tiled_rows(self) -> int:
        """Return the fewest rows that are multiplied on tiles, or 0 if none are."""
        fits = self.columns <= TILED_COLUMNS and not self.deterministic and self.dtype == torch.bfloat16
        return TILED_ROWS if fits and has_tiles(required_library()) else 0

    def stage(self, x: Tensor) -> Tensor | None:
        """Return rows of x rounded to int8; None if they are not rounded."""
        if x.dtype != torch.bfloat16:
            return None
        size = -(-(self.columns + self.columns // self.form.group * 12) // 64) * 64
        staged = torch.empty(len(x), size, dtype=torch.uint8, device=x.device)
        each = 1 if len(x) < 64 else 16
        args = x, staged, len(x), self.columns, x.stride(0), each, *self.form.kernel_args
        required_library().call("quantised_stage", -(-len(x) // each), *args)
        return staged

    def product_args(
        self, x: Tensor, out: Tensor, per: int, groups: int, staged: Tensor | None
    ) -> tuple[Tensor | int | None, ...]:
        """Return the kernel's arguments (native/quantised.cpp), the last one as `min_tiled_rows`."""
        return (
            x, self.data, self.bias, out, len(x), self.columns, self.width, x.stride(0), out.stride(0), per, groups,
            self.panels, self.activation, int(self.gated), int(self.deterministic), staged, *self.form.kernel_args,
            self.min_tiled_rows(),
        )  # fmt: skip

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """See PackedWeight."""
        kernels, rows = required_library(), len(x)
        tiled = 0 < self.min_tiled_rows() <= rows
        most = MAX_TILED_CHUNK_ROWS if tiled else MAX_CHUNK_ROWS
        per, groups = split_work(self, rows, most, kernels.threads * CHUNKS_PER_THREAD)
        staged = self.stage(x) if rows > MAX_UNSTAGED_ROWS and not tiled else None
        kernels.call(
            self.kernel, -(-rows // per) * groups, *self.product_args(x, out, per, groups, staged)[:-1], int(tiled),
            reads=self.data if rows <= MEMORY_BOUND_ROWS else None,
        )  # fmt: skip

    def read_rows(self, ids: Tensor, out: Tensor, scale: float) -> None:
        """See PackedWeight."""
        args = ids, self.data, out, len(ids), self.columns, out.stride(0), scale, LOOKUP_ROWS, *self.form.kernel_args
        required_library().call(f"quantised_rows_{DTYPES[self.dtype]}", -(-len(ids) // LOOKUP_ROWS), *args)


class StackedLowBitLinear:
    """Packed low-bit weights of different formats whose rows are stacked; called as one linear layer."""

    def __init__(self, parts: Sequence[PackedLowBitLinear]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            return self(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        rows = [part.rows for part in self.parts]
        out = torch.empty(len(x), sum(rows), dtype=x.dtype, device=x.device)
        for part, part_out in zip(self.parts, out.split_with_sizes(rows, 1)):
            linear(x, part, part_out)
        return out


def supports(columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the kernels can multiply rows in `dtype` with weights of this number of columns."""
    fits = columns * MAX_UNSTAGED_ROWS * 2 <= SCRATCH // 2
    return library() is not None and device.type == "cpu" and dtype in DTYPES and fits


def has_tiles(own: Library) -> bool:
    """Return True if the library multiplies by AMX tiles."""
    return bool(own.native.linear_has_tiles())
