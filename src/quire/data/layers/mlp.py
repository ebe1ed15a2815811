"""The feed-forward block, gated (LLaMA) and plain (OPT, GPT-2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.data.kernels.cpu import activation as cpu
from quire.data.kernels.cpu import rows
from quire.data.layers.cut import Cut
from quire.data.layers.linear import Linear
from quire.errors import StartupError, shown

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that a config calls `name`."""
    if name not in ACTIVATIONS:
        raise StartupError(
            f"the activation {shown(name)} is not supported", f"Supported: {', '.join(sorted(ACTIVATIONS))}"
        )
    return ACTIVATIONS[name]


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up are one product."""

    def __init__(
        self, hidden: int, intermediate: int | Cut, act: str, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.act, self.name, self.dtype, self.device = activation(act), act, dtype, device
        self.gate_up = Linear(hidden, (intermediate, intermediate), bias, dtype, device)
        self.down = Linear(intermediate, hidden, bias, dtype, device)
        self.gate: Callable[..., Tensor] | None = None  # act(gate) * up in one launch
        self.gated: Callable[..., Tensor] | None = None  # and the product before it too, for few rows
        self.inner: Callable[[Tensor], Tensor] | None = None  # all that comes before `down`, in one operation

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is not None:
            return self.down(self.inner(x))
        product = self.gate_up
        if self.gate is None:
            gate, up = product(x).chunk(2, dim=-1)
            return self.down(self.act(gate).mul_(up))
        if self.gated is not None and len(x) <= product.few_rows:
            return self.down(self.gated(x, product.weight, self.name, product.scale, pdl=product.pdl))
        return self.down(self.gate(product(x), self.name, pdl=product.pdl))

    def prepare(self, deterministic: bool = False) -> None:
        """Call once, after loading. `deterministic`: as for `Linear`."""
        self.inner = _inner(self.gate_up, self.name, True, deterministic)
        weight = self.gate_up.weight
        if rows.take(self.device, self.dtype) and self.name in cpu.ACTIVATIONS:
            self.gate = cpu.gate
        if weight is None or not weight.is_cuda:
            return
        from quire.data.kernels.triton import activation, linear, scaled

        if self.name in activation.ACTIVATIONS:
            self.gate = activation.gate
            if linear.supports(weight, 1) and self.gate_up.bias is None and not deterministic:
                self.gated = linear.gated if self.gate_up.scale is None else scaled.gated


class MLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(
        self, hidden: int, intermediate: int | Cut, act: str, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.act, self.name, self.dtype, self.device = activation(act), act, dtype, device
        self.up = Linear(hidden, intermediate, bias, dtype, device)
        self.down = Linear(intermediate, hidden, bias, dtype, device)
        self.act_in_place: Callable[..., Tensor] | None = None
        self.inner: Callable[[Tensor], Tensor] | None = None  # act(up(x)) in one operation

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is not None:
            return self.down(self.inner(x))
        inner = self.up(x)
        if self.act_in_place is not None:
            return self.down(self.act_in_place(inner, self.name, pdl=self.up.pdl))
        return self.down(self.act(inner))

    def prepare(self, deterministic: bool = False) -> None:
        """Call once, after loading. `deterministic`: as for `Linear`."""
        self.inner = _inner(self.up, self.name, False, deterministic)
        if rows.take(self.device, self.dtype) and self.name in cpu.ACTIVATIONS:
            self.act_in_place = cpu.act
        if self.up.weight is None or not self.up.weight.is_cuda:
            return
        from quire.data.kernels.triton import activation

        if self.name in activation.ACTIVATIONS:
            self.act_in_place = activation.act


def _inner(product: Linear, name: str, gated: bool, deterministic: bool) -> Callable[[Tensor], Tensor] | None:
    """On a CPU that has our kernels: the product and the activation as one operation; the weight is packed for it, and
    the plain one dropped. Else None."""
    if product.weight is None or product.weight.device.type not in ("cpu", "meta"):
        return None
    from quire.data.kernels.cpu import linear

    if name not in linear.ACTIVATIONS:
        return None
    if product.bits is not None:
        inner = product.packed_bits(deterministic, name, gated)
        product.weight = product.weight if inner is None else None
        return inner
    if not linear.supports(product.weight):
        return None
    product.fill()
    packed = linear.Packed(product.weight, product.bias, name, gated, deterministic)
    product.weight = None
    return packed
