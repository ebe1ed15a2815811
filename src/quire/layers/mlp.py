"""The feed-forward block, gated (LLaMA) and plain (OPT, GPT-2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.errors import StartupError
from quire.layers.linear import Linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that a config calls `name`."""
    if name not in ACTIVATIONS:
        raise StartupError(f"the activation {name!r} is not supported", f"Supported: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up are one product."""

    def __init__(
        self, hidden: int, intermediate: int, act: str, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.act = activation(act)
        self.gate_up = Linear(hidden, (intermediate, intermediate), bias, dtype, device)
        self.down = Linear(intermediate, hidden, bias, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate).mul_(up))


class MLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(
        self, hidden: int, intermediate: int, act: str, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.act = activation(act)
        self.up = Linear(hidden, intermediate, bias, dtype, device)
        self.down = Linear(intermediate, hidden, bias, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))
