"""Products with weights of few bits that are packed once (native/quantised.h), as `low_bit_linear` has them with dense
ones.

Rows in bf16 are multiplied as int8, with a scale for each group of columns: products of integers keep up with memory
where rows are few. Where there are tiles, many rows are multiplied in bf16 as they are, and rows in fp32 always are. A
row's bits don't depend on the number of rows but for tiles, which `deterministic` leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu.library import SCRATCH, Library
from quire.kernels.cpu.library_loader import library
from quire.kernels.cpu.linear import ACTIVATIONS, CHUNKS_PER_THREAD, DTYPES, LOOKUP_ROWS, MEMORY_BOUND_ROWS, PANEL
from quire.kernels.cpu.weight_arena import weight_arena

MAX_CHUNK_ROWS = 256  # of a chunk
MAX_TILED_CHUNK_ROWS = 512  # ... on tiles, for which each chunk unpacks the weight
MIN_CHUNK_BYTES = 1 << 16  # bytes of a weight that are not cut for another thread
MAX_UNSTAGED_ROWS = 4  # which each chunk rounds for itself
TILED_ROWS = 40  # from which on tiles in bf16 are faster than integers
TILED_COLUMNS = 8192  # a panel in bf16 lies in a thread's own memory


class LowBitFormat(NamedTuple):
    """How numbers lie and what they stand for: see native/quantised.h."""

    bits: int
    superblock: int
    zero: int
    has_min: bool

    @property
    def group(self) -> int:
        return 16 if self.bits == 6 else 32

    @property
    def kernel_args(self) -> tuple[int, int, int, int]:
        """What kernels are told."""
        return self.bits, self.superblock, self.zero, int(self.has_min)

    def scale_unit_bytes(self) -> int:
        """Bytes of a unit's scales, of a panel."""
        return PANEL * (1 + self.has_min) * (2 + (self.superblock // self.group if self.superblock else 0))

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of the weight."""
        return (
            columns * PANEL * self.bits // 8 + columns // (self.superblock or self.group) * self.scale_unit_bytes()
        ) // PANEL


class LowBitWeight(NamedTuple):
    """A weight [rows, columns] of few bits: `numbers` uint8 [rows, columns], 0 to 2^bits - 1, and of its form's scales
    those that there are: d and e fp16 [rows, units], a and b int8 [rows, groups]."""

    form: LowBitFormat
    numbers: Tensor
    d: Tensor
    e: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None

    def scales(self) -> tuple[Tensor, Tensor | None]:
        """Of each group, in fp32 [rows, groups]: what a number is multiplied by, less zero, and what is added."""
        per = self.form.superblock // self.form.group if self.form.superblock else 1
        d, e, a, b = (None if part is None else part.float() for part in self[2:])
        assert d is not None, "it has scales"
        scale, least = d.repeat_interleave(per, 1), None if e is None else e.repeat_interleave(per, 1)
        if a is not None:
            scale = scale * a
        if least is not None and b is not None:
            least = -least * b
        return scale, least

    def dequantize(self) -> Tensor:
        """What it stands for, in fp32 [rows, columns]."""
        rows, columns = self.numbers.shape
        scale, least = self.scales()
        found = (self.numbers.float() - self.form.zero).unflatten(1, (-1, self.form.group)) * scale[:, :, None]
        return (found if least is None else found + least[:, :, None]).view(rows, columns)

    def concat_rows(self, other: LowBitWeight) -> LowBitWeight:
        """The rows of this one, and below them those of `other`, which has the same form. One thread copies: at every
        new page torch's several would wait for each other."""
        assert self.form == other.form, f"{self.form} is not {other.form}"
        pairs = zip(self[1:], other[1:])
        parts = (None if x is None or y is None else torch.from_numpy(np.concatenate([x, y])) for x, y in pairs)
        return LowBitWeight(self.form, *parts)  # type: ignore[arg-type]


class PackedLowBitLinear:
    """A weight of few bits, packed, and its bias; called with x, their product (see `low_bit_linear`), activated if so.
    `gated`: it is two stacked ones, gate and up. `dtype` is that of x and of results. `deterministic`: a row's bits
    don't depend on the number of rows."""

    __slots__ = ("activation", "bias", "columns", "data", "deterministic", "dtype", "form", "gated", "rows")

    def __init__(
        self,
        weight: LowBitWeight,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        activation: str | None = None,
        gated: bool = False,
        deterministic: bool = False,
    ) -> None:
        own = library()
        assert own is not None, "supports() said so"
        form = weight.form
        self.rows, self.columns = weight.numbers.shape
        self.form, self.dtype, self.gated, self.deterministic = form, dtype, gated, deterministic
        self.activation = 0 if activation is None else ACTIVATIONS[activation]
        assert self.columns % (form.superblock or form.group) == 0, f"{self.columns} columns are not whole groups"
        panels = -(-self.rows // 2 // (PANEL // 2)) if gated else -(-self.rows // PANEL)
        self.data = weight_arena().allocate(panels * PANEL, form.row_bytes(self.columns), torch.uint8)
        tensors = [None if part is None else part.contiguous() for part in weight[1:]]
        own.call("pack_quantised", panels, *tensors, self.data, self.rows, self.columns, int(gated), *form.kernel_args)
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = torch.empty(panels * PANEL)
            column = bias.detach().float()[:, None].contiguous()
            own.call("pack_f32", panels, column, self.bias, self.rows, 1, 1, int(gated))

    def __call__(self, x: Tensor) -> Tensor:
        return low_bit_linear(x, self)

    @property
    def panels(self) -> int:
        return len(self.data) // PANEL


class StackedLowBitLinear:
    """Packed weights of unlike forms, whose rows are stacked; called as one."""

    def __init__(self, parts: Sequence[PackedLowBitLinear]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            return self(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        rows = [part.rows for part in self.parts]
        out = torch.empty(len(x), sum(rows), dtype=x.dtype, device=x.device)
        for part, place in zip(self.parts, out.split(rows, 1)):
            low_bit_linear(x, part, place)
        return out


def supports(columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of so many columns can be multiplied here, by rows in `dtype`."""
    few = columns * MAX_UNSTAGED_ROWS * 2 <= SCRATCH // 2
    return library() is not None and device.type == "cpu" and dtype in DTYPES and few


def low_bit_linear(x: Tensor, packed: PackedLowBitLinear, out: Tensor | None = None) -> Tensor:
    """x [..., columns] -> x W^T + bias [..., rows], as `quire.kernels.cpu.linear.linear`."""
    if x.dim() != 2:
        assert out is None, "rows have no shape in `out`"
        return low_bit_linear(x.reshape(-1, x.shape[-1]), packed).view(*x.shape[:-1], -1)
    assert x.dtype == packed.dtype, f"{x.dtype} is not {packed.dtype}"
    assert x.shape[1:] == (packed.columns,), f"{tuple(x.shape)} is not [T, {packed.columns}]"
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, width = len(x), packed.rows // 2 if packed.gated else packed.rows
    if out is None:
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    own = library()
    assert own is not None, "supports() said so"
    tiled = rows >= TILED_ROWS and packed.columns <= TILED_COLUMNS and not packed.deterministic and has_tiles(own)
    tiled = tiled and x.dtype == torch.bfloat16
    span, groups = _split_work(rows, packed, own.threads, tiled)
    staged = None
    if rows > MAX_UNSTAGED_ROWS and x.dtype == torch.bfloat16 and not tiled:
        staged = torch.empty(rows, _staged_bytes(packed), dtype=torch.uint8, device=x.device)
        each = 1 if rows < 64 else 16
        own.call(
            "quantised_stage",
            -(-rows // each),
            x,
            staged,
            rows,
            packed.columns,
            x.stride(0),
            each,
            *packed.form.kernel_args,
        )
    own.call(
        f"quantised_{DTYPES[x.dtype]}", -(-rows // span) * groups, x, packed.data, packed.bias, out, rows,
        packed.columns, width, x.stride(0), out.stride(0), span, groups, packed.panels, packed.activation,
        int(packed.gated), int(packed.deterministic), staged, *packed.form.kernel_args, int(tiled),
        reads=packed.data if rows <= MEMORY_BOUND_ROWS else None,
    )  # fmt: skip
    return out


def has_tiles(own: Library) -> bool:
    return bool(own.native.linear_has_tiles())


def _staged_bytes(packed: PackedLowBitLinear) -> int:
    return -(-(packed.columns + packed.columns // packed.form.group * 12) // 64) * 64


def _split_work(rows: int, packed: PackedLowBitLinear, threads: int, tiled: bool) -> tuple[int, int]:
    """Rows of a chunk at most, and in how many groups panels are cut."""
    most = MAX_TILED_CHUNK_ROWS if tiled else MAX_CHUNK_ROWS
    parts = -(-rows // most)
    size = packed.data.numel() * -(-rows // 64)
    return -(-rows // parts), max(1, min(packed.panels, threads * CHUNKS_PER_THREAD // parts, size // MIN_CHUNK_BYTES))


def lookup_rows(packed: PackedLowBitLinear, ids: Tensor, scale: float = 1.0) -> Tensor:
    """ids [T] int64, below the number of rows -> those rows of the weight [T, columns], times `scale`."""
    assert not packed.gated, "gate and up are no embedding"
    out = torch.empty(len(ids), packed.columns, dtype=packed.dtype, device=ids.device)
    own = library()
    assert own is not None, "supports() said so"
    if len(ids):
        args = ids, packed.data, out, len(ids), packed.columns, out.stride(0), scale, LOOKUP_ROWS
        own.call(f"quantised_rows_{DTYPES[packed.dtype]}", -(-len(ids) // LOOKUP_ROWS), *args, *packed.form.kernel_args)
    return out
