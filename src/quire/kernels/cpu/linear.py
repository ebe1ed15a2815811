"""Products with weights that are packed once (native/linear.h): linear layers, the gated half of feed-forward blocks,
and single rows of a packed weight, for an embedding that is tied to the head.

A packed weight takes as much memory as a plain one. A row's bits depend neither on the number of rows (but see
`PackedWeight.deterministic`) nor on threads.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from quire.kernels.cpu.library import SCRATCH
from quire.kernels.cpu.library_loader import library, required_library
from quire.kernels.cpu.weight_arena import weight_arena

PANEL, KTILE, BLOCK = 32, 32, 256  # as in native/linear.h
DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}
ACTIVATIONS = {
    "silu": 1, "swish": 1, "relu": 2, "gelu": 3, "gelu_new": 4, "gelu_pytorch_tanh": 4, "quick_gelu": 5,
    "clamped_swiglu": 6,
}  # fmt: skip
"""Activations by their names in model configs, as numbers of native/lanes.h."""

MAX_CHUNK_ROWS = 256  # rows that a core's cache holds beside a panel
TILED_ROWS = 384  # the same where AMX tiles multiply; of long rows as many as TILED_BYTES hold, but at least 64
TILED_BYTES = 1 << 19
CHUNKS_PER_THREAD = 8  # at least, where there are enough panels and several threads
MIN_CHUNK_BYTES = 1 << 16  # bytes of a weight that are not split among threads: 3 to 5 us
MEMORY_BOUND_ROWS = 64  # up to as many rows, a product takes the time of reading its weight
LOOKUP_ROWS = 16  # rows of an embedding in a chunk


class PackedWeight:
    """A packed weight [rows, columns] with its bias and activation; calling it with x returns `linear`(x, self).
    `gated`: the weight is gate and up, stacked. `dtype`: of x and of results. `deterministic`: a row's bits do not
    depend on the number of rows; else they may where that is faster."""

    __slots__ = ("activation", "bias", "columns", "data", "deterministic", "dtype", "gated", "panels", "rows")
    data: Tensor

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, bias: Tensor | None, activation: str | None, gated: bool,
        deterministic: bool,
    ) -> None:  # fmt: skip
        self.rows, self.columns = shape
        self.activation = 0 if activation is None else ACTIVATIONS[activation]
        self.dtype, self.gated, self.deterministic = dtype, gated, deterministic
        self.panels = -(-self.rows // 2 // (PANEL // 2)) if gated else -(-self.rows // PANEL)
        self.bias = None if bias is None else pack_bias(bias, self.panels, gated)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self)

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.rows // 2 if self.gated else self.rows

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Write `linear` of x [T, columns], whose rows are contiguous, to `out`; there is at least one row."""
        raise NotImplementedError

    def read_rows(self, ids: Tensor, out: Tensor, scale: float) -> None:
        """Write the rows `ids` of the weight, times `scale`, to `out`; there is at least one."""
        raise NotImplementedError


class PackedLinear(PackedWeight):
    """A packed weight in bf16 or fp32."""

    __slots__ = ()

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, gated: bool = False,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(weight.shape, weight.dtype, bias, activation, gated, deterministic)
        kind = DTYPES[self.dtype]
        width = -(-self.columns // KTILE) * KTILE if kind == "bf16" else self.columns
        self.data = weight_arena().allocate(self.panels * PANEL, width, self.dtype)
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        args = weight, self.data, self.rows, self.columns, weight.stride(0), int(gated)
        required_library().call(f"pack_{kind}", self.panels, *args)

    @property
    def kernel(self) -> str:
        return f"linear_{DTYPES[self.dtype]}"

    def max_chunk_rows(self) -> int:
        """Return the most rows of a chunk."""
        steps = self.data.shape[1] * self.dtype.itemsize // 4
        tiled = self.dtype == torch.bfloat16 and self.columns % KTILE == 0
        if tiled and required_library().native.linear_has_tiles():
            return min(TILED_ROWS, max(64, TILED_BYTES // (2 * self.columns) // 32 * 32))
        return min(MAX_CHUNK_ROWS, SCRATCH // _staged_bytes(steps, self.dtype))

    def product_args(
        self, x: Tensor, out: Tensor, per: int, groups: int, staged: Tensor | None = None
    ) -> tuple[Tensor | int | None, ...]:
        """Return the kernel's arguments (native/linear.h) for chunks of `per` rows by one of `groups` of panels."""
        assert staged is None, "rows are staged for low-bit weights only"
        return (
            x, self.data, self.bias, out, len(x), self.columns, self.width, x.stride(0), out.stride(0), per, groups,
            self.panels, self.activation, int(self.gated), int(self.deterministic), int(has_fast_bf16_dot()),
        )  # fmt: skip

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """See PackedWeight."""
        kernels, rows = required_library(), len(x)
        chunks = kernels.threads * CHUNKS_PER_THREAD if kernels.threads > 1 else 1
        per, groups = split_work(self, rows, self.max_chunk_rows(), chunks)
        kernels.call(
            self.kernel, -(-rows // per) * groups, *self.product_args(x, out, per, groups),
            reads=self.data if rows <= MEMORY_BOUND_ROWS else None,
        )  # fmt: skip

    def read_rows(self, ids: Tensor, out: Tensor, scale: float) -> None:
        """See PackedWeight."""
        args = ids, self.data, out, len(ids), self.columns, out.stride(0), scale, LOOKUP_ROWS
        required_library().call(f"packed_rows_{DTYPES[self.dtype]}", -(-len(ids) // LOOKUP_ROWS), *args)


def pack_bias(bias: Tensor, panels: int, gated: bool) -> Tensor:
    """Return the bias in fp32, in the order of a packed weight's rows."""
    packed, column = torch.empty(panels * PANEL), bias.detach().float()[:, None].contiguous()
    required_library().call("pack_f32", panels, column, packed, len(bias), 1, 1, int(gated))
    return packed


def supports(weight: Tensor) -> bool:
    """Return True if the kernels can pack and multiply this weight."""
    if library() is None or weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return False
    return 12 * _staged_bytes(weight.shape[1] * weight.element_size() // 4 + KTILE, weight.dtype) <= SCRATCH


def linear(x: Tensor, packed: PackedWeight, out: Tensor | None = None) -> Tensor:
    """Return x W^T + bias [..., rows] for x [..., columns], with the weight's activation, computed in fp32 and rounded
    once. For a gated weight return activation(gate) * up [..., rows / 2]. The result is written to `out`, if given, of
    the same shape; x must be 2-D then."""
    if x.dim() != 2:
        assert out is None, "x must be 2-D if `out` is given"
        return linear(x.reshape(-1, x.shape[-1]), packed).view(*x.shape[:-1], -1)
    assert x.dtype == packed.dtype, f"{x.dtype} is not {packed.dtype}"
    assert x.shape[1] == packed.columns, f"{tuple(x.shape)} is not [T, {packed.columns}]"
    if out is None:
        out = torch.empty(len(x), packed.width, dtype=x.dtype, device=x.device)
    if len(x):
        packed.multiply(x if x.stride(1) == 1 else x.contiguous(), out)
    return out


def split_work(packed: PackedWeight, rows: int, most: int, chunks: int) -> tuple[int, int]:
    """Return (rows of a chunk, at most `most`; number of groups of panels) for about `chunks` chunks: each is some rows
    by one group."""
    parts = -(-rows // most)
    size = packed.data.nbytes * -(-rows // 64)
    return -(-rows // parts), max(1, min(packed.panels, chunks // parts, size // MIN_CHUNK_BYTES))


@lru_cache(maxsize=1)
def has_fast_bf16_dot() -> bool:
    """Return True if vdpbf16ps is faster than fp32: on AMD, where it multiplies twice as many numbers. On Intel it
    takes two cycles, and multiplying in fp32 after a conversion by shifts is 1.6 times as fast."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False


def _staged_bytes(steps: int, dtype: torch.dtype) -> int:
    """Return the bytes of a thread's scratch memory for a row: its numbers in fp32, and sums."""
    return -(-steps // BLOCK) * (BLOCK + 8) * (16 // dtype.itemsize) + 4 * PANEL


def lookup_rows(packed: PackedWeight, ids: Tensor, scale: float = 1.0) -> Tensor:
    """Return the rows `ids` [T] (int64, in range) of the weight, [T, columns], times `scale`."""
    assert not packed.gated, "a gated weight is no embedding"
    out = torch.empty(len(ids), packed.columns, dtype=packed.dtype, device=ids.device)
    if len(ids):
        packed.read_rows(ids, out, scale)
    return out
