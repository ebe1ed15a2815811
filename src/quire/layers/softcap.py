"""The soft cap on logits, cap * tanh(x / cap) (Gemma 2, section 2)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quire.kernels.cpu import rows


class Softcap(nn.Module):
    """x [R, size] of `dtype` -> cap * tanh(x / cap), computed in fp32, rounded once. Kernels overwrite x."""

    __call__: Callable[..., Tensor]

    def __init__(self, cap: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.cap, self.dtype, self.device = cap, dtype, device
        self.kernel: Callable[..., Tensor] | None = None
        self.pdl = False

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is not None:
            return self.kernel(x, self.cap, pdl=self.pdl)
        return x.float().div_(self.cap).tanh_().mul_(self.cap).to(x.dtype)

    def prepare(self) -> None:
        """Choose the kernel. Call once, after loading."""
        if rows.has_kernels(self.device, self.dtype):
            self.kernel = rows.softcap
        if self.device.type == "cuda":
            from quire.kernels.triton.activation import softcap
            from quire.kernels.triton.launch import supports_pdl

            self.kernel, self.pdl = softcap, supports_pdl(self.device)
