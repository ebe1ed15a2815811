"""The feed-forward block, gated (LLaMA) and plain (OPT, GPT-2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.errors import StartupError, short_repr
from quire.kernels.cpu import rows
from quire.kernels.cpu.linear import ACTIVATIONS as CPU_ACTIVATIONS
from quire.layers.experts_config import SWIGLU_ALPHA, SWIGLU_LIMIT
from quire.layers.linear import Linear
from quire.layers.sharding import shard_columns
from quire.protocol.parallel_layout import UNSHARDED, Shard

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square_(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def get_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation function with config.json's name `name`; StartupError for an unknown name."""
    if name not in ACTIVATIONS:
        raise StartupError(
            f"the activation {short_repr(name)} is not supported", f"Supported: {', '.join(sorted(ACTIVATIONS))}"
        )
    return ACTIVATIONS[name]


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate * sigmoid(1.702 gate) * (up + 1), where gate is at most 7 and up from -7 to 7 (gpt-oss)."""
    gate = gate.clamp(max=SWIGLU_LIMIT)
    return gate.mul_(torch.sigmoid(SWIGLU_ALPHA * gate)).mul_(up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT).add_(1))


def get_gated_activation(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of gate and up of config.json's name `name`, else of quire's own `clamped_swiglu`."""
    if name == "clamped_swiglu":
        return clamped_swiglu
    act = get_activation(name)
    return lambda gate, up: act(gate).mul_(up)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up are one product. Ranks divide the `intermediate` columns.
    `output_modified`: see Linear."""

    __call__: Callable[..., Tensor]

    def __init__(
        self, hidden: int, intermediate: int, act: str, bias: bool, dtype: torch.dtype, device: torch.device,
        shard: Shard = UNSHARDED, output_modified: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.act, self.act_name, self.dtype, self.device = get_activation(act), act, dtype, device
        inner = shard_columns(shard, intermediate)
        self.gate_up = Linear(hidden, (inner, inner), bias, dtype, device)
        self.down = Linear(inner, hidden, bias, dtype, device, output_modified=output_modified)
        self.gate_kernel: Callable[..., Tensor] | None = None  # act(gate) * up in one launch
        self.gated_kernel: Callable[..., Tensor] | None = None  # act(gate(x)) * up(x) in one launch
        self.gated_kernel_rows = 0  # the most rows for which `gated_kernel` is used
        self.packed_kernel: Callable[[Tensor], Tensor] | None = None  # the same on a CPU, for any number of rows

    def forward(self, x: Tensor) -> Tensor:
        if self.packed_kernel is not None:
            return self.down(self.packed_kernel(x))
        product = self.gate_up
        if self.gate_kernel is None:
            gate, up = product(x).chunk(2, dim=-1)
            return self.down(self.act(gate).mul_(up))
        if self.gated_kernel is not None and len(x) <= self.gated_kernel_rows:
            return self.down(self.gated_kernel(x, product.weight, self.act_name, product.scale, pdl=product.pdl))
        return self.down(self.gate_kernel(product(x), self.act_name, pdl=product.pdl))

    def prepare(self, deterministic: bool = False) -> None:
        """Choose kernels. Call once, after loading. `deterministic`: as for `Linear`."""
        self.packed_kernel = self.gate_up.pack_with_activation(self.act_name, True, deterministic)
        weight = self.gate_up.weight
        if rows.has_kernels(self.device, self.dtype) and self.act_name in CPU_ACTIVATIONS:
            self.gate_kernel = rows.act_and_mul
        if weight is None or not weight.is_cuda:
            return
        from quire.kernels.triton import activation, fp8_linear, linear

        if self.act_name in activation.ACTIVATIONS:
            self.gate_kernel = activation.act_and_mul
            if linear.supports(weight, 1) and self.gate_up.bias is None:
                self.gated_kernel, self.gated_kernel_rows = linear.gated_linear, linear.MAX_ROWS
                if deterministic:
                    self.gated_kernel = linear.batch_invariant_gated_linear
                elif self.gate_up.scale is not None:
                    self.gated_kernel, self.gated_kernel_rows = fp8_linear.gated_fp8_linear, fp8_linear.MAX_ROWS


class MLP(nn.Module):
    """down(act(up(x))). Ranks divide the `intermediate` columns."""

    __call__: Callable[..., Tensor]

    def __init__(
        self, hidden: int, intermediate: int, act: str, bias: bool, dtype: torch.dtype, device: torch.device,
        shard: Shard = UNSHARDED,
    ) -> None:  # fmt: skip
        super().__init__()
        self.act, self.act_name, self.dtype, self.device = get_activation(act), act, dtype, device
        inner = shard_columns(shard, intermediate)
        self.up = Linear(hidden, inner, bias, dtype, device)
        self.down = Linear(inner, hidden, bias, dtype, device)
        self.act_in_place: Callable[..., Tensor] | None = None
        self.packed_kernel: Callable[[Tensor], Tensor] | None = None  # act(up(x)) in one operation

    def forward(self, x: Tensor) -> Tensor:
        if self.packed_kernel is not None:
            return self.down(self.packed_kernel(x))
        inner = self.up(x)
        if self.act_in_place is not None:
            return self.down(self.act_in_place(inner, self.act_name, pdl=self.up.pdl))
        return self.down(self.act(inner))

    def prepare(self, deterministic: bool = False) -> None:
        """Choose kernels. Call once, after loading. `deterministic`: as for `Linear`."""
        self.packed_kernel = self.up.pack_with_activation(self.act_name, False, deterministic)
        if rows.has_kernels(self.device, self.dtype) and self.act_name in CPU_ACTIVATIONS:
            self.act_in_place = rows.act
        if self.up.weight is None or not self.up.weight.is_cuda:
            return
        from quire.kernels.triton import activation

        if self.act_name in activation.ACTIVATIONS:
            self.act_in_place = activation.act
