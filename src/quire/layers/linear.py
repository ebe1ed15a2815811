"""A linear layer whose weight may be several projections stacked (q, k, v or gate, up), computed by one product.

On a CPU `prepare` packs the weight for quire's kernels; without those, into oneDNN's layout, which F.linear would
otherwise do at every call. The input is then padded with rows, so that there are few shapes. On a GPU the weight may be
in FP8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.onednn import limit_onednn_cache, round_up_bits
from quire.layers.exchange import Exchange, OverlappedAllReduce, ShardedModule
from quire.layers.sharding import ShardRange, as_shard_range

if TYPE_CHECKING:
    from quire.kernels.cpu.low_bit_linear import LowBitWeight

# The row count for which oneDNN packs the weight. On Zen 5, 1 slows fp32 by a factor of 1.5 to 3 at 4 to 32 rows; the
# other values (and all of them in bf16) are equal at every row count from 1 to 2048.
ROWS_HINT = 32
ROW_COUNT_BITS = 4  # of a padded row count: at most an eighth more rows
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


class Linear(ShardedModule):
    """x [..., in_features] -> x weight^T + bias [..., out_features].

    `out_features` may be a tuple: the rows of the stacked projections, also in `output_sizes`. A `weight` that is given
    is shared (a head tied to the embedding), not allocated.

    With tensor parallelism a layer has a ShardRange of each projection's rows, or of the columns. In the latter case
    its output is one rank's term of a sum, and only the first rank adds the bias (from `prepare` on). With
    `output_modified` the output is changed before the sum, so it must not be sent while it is computed.
    """

    FP8: ClassVar[dict[str, str]] = {"weight": "scale"}
    """Parameters [N, K] that may be in FP8 -> the attribute with their scales, None if they are not in FP8 (see
    quire.weights.fp8). FP8 needs a GPU."""

    __call__: Callable[..., Tensor]

    def __init__(
        self, in_features: int | ShardRange, out_features: int | ShardRange | tuple[int | ShardRange, ...], bias: bool,
        dtype: torch.dtype, device: torch.device, weight: nn.Parameter | None = None, output_modified: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.column_shard = as_shard_range(in_features)
        self.row_shards = tuple(
            map(as_shard_range, out_features if isinstance(out_features, tuple) else (out_features,))
        )
        self.output_sizes = tuple(part.padded for part in self.row_shards)
        rows, columns = sum(self.output_sizes), self.column_shard.padded
        if weight is None:
            weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=device), requires_grad=False)
        assert weight.shape == (rows, columns), f"weight {tuple(weight.shape)} is not {(rows, columns)}"
        self.weight: Tensor | None = weight
        self.bias = nn.Parameter(torch.empty(rows, dtype=dtype, device=device), requires_grad=False) if bias else None
        self.scale: Tensor | None = None  # of an FP8 weight: [groups, rows], see quire.kernels.triton.linear
        self.low_bit_parts: list[Callable[[], LowBitWeight] | None] | None = None
        """For a low-bit weight (quire.weights.low_bit), a meta tensor: the functions that make its parts."""
        self.low_bit_device = torch.device("cpu")
        self.deferred_loads: list[Callable[[], object]] = []
        """Functions that copy parts of the weight from a mapped file: at `prepare`, so that only one layer's copy is in
        memory at a time."""
        self.packed: Callable[[Tensor], Tensor] | None = None
        self.small_kernel: Callable[..., Tensor] | None = None  # for up to `small_kernel_rows` rows
        self.small_kernel_rows = 0
        self.any_rows_kernel: Callable[..., Tensor] | None = None  # for any number of rows; None: F.linear
        self.pdl = False
        self.overlap: OverlappedAllReduce | None = None
        self.output_modified = output_modified

    def connect(self, exchange: Exchange) -> None:
        """See ShardedModule: send pieces of a term of a sum while the rest is computed, if `exchange` can. The last
        product of a pipeline stage is summed by the next stage."""
        if self.column_shard.is_sharded and not self.output_modified and isinstance(exchange, OverlappedAllReduce):
            self.overlap = exchange if exchange.shard.pp_size == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed(x)
        if self.overlap is not None and (
            pieces := self.overlap.split_rows(len(x), len(x) * sum(self.output_sizes) * x.itemsize)
        ):
            return self._forward_overlapped(x, pieces, self.overlap)
        return self._matmul(x)

    def _forward_overlapped(self, x: Tensor, pieces: tuple[slice, ...], sending: OverlappedAllReduce) -> Tensor:
        """Compute the product in pieces, each of which is sent to the other ranks while the next is computed."""
        out = x.new_empty(len(x), sum(self.output_sizes))
        plain = (
            self.weight.t() if self.weight is not None and self.any_rows_kernel is None and self.bias is None else None
        )
        for rows in pieces:
            if plain is not None:
                torch.mm(x[rows], plain, out=out[rows])
            else:
                out[rows] = self._matmul(x[rows])
            sending.send_rows(out, rows)
        return out

    def _matmul(self, x: Tensor) -> Tensor:
        if self.small_kernel is not None and len(x) <= self.small_kernel_rows:
            return self.small_kernel(x, self.weight, self.bias, self.scale, pdl=self.pdl)
        if self.any_rows_kernel is not None:
            return self.any_rows_kernel(x, self.weight, self.bias, self.scale, pdl=self.pdl)
        assert self.weight is not None, "a weight is plain or packed"
        return F.linear(x, self.weight, self.bias)

    @torch.no_grad()
    def prepare(self, deterministic: bool = False) -> None:
        """Pack the weight and choose kernels. Call once, after loading.

        On a CPU the weight is packed, if possible, and the plain one dropped. On a GPU few rows get a kernel that reads
        the weight faster than the library's. If `deterministic`, all row counts get one kernel that computes each row
        alike (the library chooses by row count). With an FP8 weight one row is multiplied unquantized; more rows are
        quantized to FP8 too, unless `deterministic`."""
        self.load_deferred()
        if not self.column_shard.shard.is_first_tp_rank:
            self.bias = None
        if self.weight is None:
            return
        if self.low_bit_parts is not None:
            self.packed, self.weight = self.pack_low_bit(deterministic), None
            return
        if self.weight.is_cuda:
            from quire.kernels.triton import fp8_linear, linear
            from quire.kernels.triton.launch import supports_pdl

            if deterministic:
                linear.check_batch_invariant(self.weight)
                self.any_rows_kernel, self.pdl = linear.batch_invariant_linear, supports_pdl(self.weight.device)
            elif self.scale is not None:
                self.any_rows_kernel, self.pdl = fp8_linear.fp8_linear, supports_pdl(self.weight.device)
            if not deterministic and linear.supports(self.weight, 1):
                self.pdl = supports_pdl(self.weight.device)
                if self.scale is None:
                    self.small_kernel, self.small_kernel_rows = linear.linear, linear.max_fast_rows(self.weight)
                else:
                    self.small_kernel, self.small_kernel_rows = fp8_linear.fp8_linear_few_rows, fp8_linear.MAX_ROWS
        if self.weight.device.type != "cpu":
            return
        from quire.kernels.cpu import linear as cpu

        if cpu.supports(self.weight):
            self.packed, self.weight = cpu.PackedLinear(self.weight, self.bias, deterministic=deterministic), None
            return
        limit_onednn_cache()
        if self.weight.dtype not in TOLERANCE:
            return
        packed = pack_onednn(self.weight, self.bias)
        if packed is not None:
            self.packed, self.weight = packed, None

    def pack_with_activation(
        self, name: str, gated: bool, deterministic: bool = False
    ) -> Callable[[Tensor], Tensor] | None:
        """Return the product with its activation as one operation, if there are kernels for it, and drop the plain
        weight; else return None. `gated`: the weight is gate and up, stacked."""
        if self.weight is None or self.weight.device.type not in ("cpu", "meta"):
            return None
        from quire.kernels.cpu import linear

        packed: Callable[[Tensor], Tensor] | None = None
        if self.low_bit_device.type == "cuda":
            from quire.kernels.triton.activation import ACTIVATIONS

            packed = self.pack_low_bit(deterministic, name, gated) if gated and name in ACTIVATIONS else None
            self.weight = self.weight if packed is None else None
            return packed
        if name in linear.ACTIVATIONS and self.low_bit_parts is not None:
            packed = self.pack_low_bit(deterministic, name, gated)
        elif name in linear.ACTIVATIONS and linear.supports(self.weight):
            self.load_deferred()
            packed = linear.PackedLinear(self.weight, self.bias, name, gated, deterministic)
        self.weight = self.weight if packed is None else None
        return packed

    def load_deferred(self) -> None:
        """Run the deferred loads: the weight is complete afterwards."""
        for load in self.deferred_loads:
            load()
        self.deferred_loads.clear()

    def pack_low_bit(
        self, deterministic: bool, activation: str | None = None, gated: bool = False
    ) -> Callable[[Tensor], Tensor] | None:
        """Return the product with a low-bit weight, packed, and delete the functions that make its parts. The parts are
        made here, so that no other layer's are in memory at the same time. Return None if an activation is to be fused
        and the parts have different formats."""
        assert self.low_bit_parts is not None, "not a low-bit weight"
        assert self.weight is not None, "packed twice"
        formats: list[list[LowBitWeight]] = []
        for make in self.low_bit_parts:
            assert make is not None, "all parts are loaded"
            part = make()
            if formats and formats[-1][0].form == part.form:
                formats[-1].append(part)
            else:
                formats.append([part])
        if activation is not None and len(formats) > 1:
            return None
        self.low_bit_parts = make = None  # `make` too holds what its part is made of
        if self.low_bit_device.type == "cuda":
            return self._pack_for_gpu(formats, deterministic, activation)
        from quire.kernels.cpu.low_bit_linear import LowBitWeight, PackedLowBitLinear, StackedLowBitLinear

        made = [reduce(LowBitWeight.concat_rows, parts) for parts in formats]
        dtype, rows = self.weight.dtype, [len(part.numbers) for part in made]
        if len(made) == 1:
            return PackedLowBitLinear(made[0], dtype, self.bias, activation, gated, deterministic)
        biases = [None] * len(made) if self.bias is None else torch.split(self.bias, rows)
        return StackedLowBitLinear(
            [PackedLowBitLinear(part, dtype, bias, deterministic=deterministic) for part, bias in zip(made, biases)]
        )

    def _pack_for_gpu(
        self, formats: list[list[LowBitWeight]], deterministic: bool, activation: str | None
    ) -> Callable[[Tensor], Tensor]:
        from quire.kernels.triton.launch import supports_pdl
        from quire.kernels.triton.low_bit import LowBitLinear, pack

        device = self.low_bit_device
        weights = [pack(parts, device) for parts in formats]
        return LowBitLinear(weights, self.bias, activation, deterministic, supports_pdl(device))


def pack_onednn(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """Return x -> F.linear(x, weight, bias) through torch's oneDNN operators; None if they are missing or wrong.

    These operators are private, so they are tested here on this weight.
    """
    try:
        linear = torch.ops.mkldnn._linear_pointwise.default
        blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
        seed = torch.Generator().manual_seed(0)
        x = torch.randn(2, weight.shape[1], generator=seed).to(weight.dtype)
        got, want = linear(x, blocks, bias, "none", [], "").float(), F.linear(x, weight, bias).float()
    except (AttributeError, RuntimeError):
        return None
    error, scale = (got - want).abs().max(), want.abs().max()
    if not error <= TOLERANCE[weight.dtype] * scale:  # false for NaN as well
        return None
    return partial(_pad_rows, lambda x: linear(x, blocks, bias, "none", [], ""))


def _pad_rows(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return product(x) for x [T, in_features]. x is padded with rows, so that there are few shapes."""
    rows = len(x)
    more = round_up_bits(rows, ROW_COUNT_BITS) - rows
    return product(F.pad(x, (0, 0, 0, more)))[:rows] if more else product(x)
