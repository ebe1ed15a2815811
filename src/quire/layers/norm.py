"""Normalisation over the last dimension, computed in fp32 whatever the dtype; and, before it, the residual sum. Where
ranks share out a layer, what it adds is their parts' sum: here they are exchanged, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.cpu import dispatch, norm
from quire.layers.exchange import Exchange


class RMSNorm(nn.Module):
    """x [..., size] -> x / sqrt(mean(x^2) + eps) * weight. With `delta`, first x += delta, in place; or x +=
    behind(delta), where the sum goes through a norm, of the same eps, before it is added.

    With `offset` a checkpoint keeps the weight's difference from one (Gemma): the sum of both is taken in fp32, and
    kept so, since in a shorter dtype it would lose what is small beside one.
    """

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, device: torch.device, *, offset: bool = False
    ) -> None:
        super().__init__()
        self.shape, self.eps, self.dtype, self.offset = (size,), eps, dtype, offset
        self.exchange: Exchange | None = None
        self.all_reduce_norm: Callable[..., Tensor | None] | None = None  # sum, residual sum and norm at once
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.kernel: Callable[..., Tensor] | None = None
        self.pdl = False

    def forward(self, x: Tensor, delta: Tensor | None = None, post_norm: RMSNorm | None = None) -> Tensor:
        if self.exchange is not None and delta is not None:
            if self.all_reduce_norm is not None:
                found = self.all_reduce_norm(
                    x, delta, self.weight, None, self.eps, None if post_norm is None else post_norm.weight
                )
                if found is not None:
                    return found
            delta = self.exchange.all_reduce(delta)
        if self.kernel is not None:
            added = None if post_norm is None else post_norm.weight
            return self.kernel(x, self.weight, self.eps, delta=delta, post_norm_weight=added, pdl=self.pdl)
        assert not self.offset, "prepare() adds the one"
        if delta is not None:
            x.add_(delta if post_norm is None else post_norm(delta))
        if self.weight.dtype != x.dtype:
            return F.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.shape, self.weight, self.eps)

    def prepare(self) -> None:
        """Call once, after loading. On a GPU sums and norms become one launch, on a CPU one operation of ours."""
        if self.offset:
            self.weight, self.offset = nn.Parameter(self.weight.float() + 1, requires_grad=False), False
        if dispatch.has_kernels(self.weight.device, self.dtype):
            self.kernel = norm.rms_norm
        if self.weight.is_cuda:
            from quire.kernels.triton.launch import supports_pdl
            from quire.kernels.triton.norm import rms_norm

            self.kernel, self.pdl = rms_norm, supports_pdl(self.weight.device)


class LayerNorm(nn.Module):
    """x [..., size] -> (x - mean) / sqrt(variance + eps) * weight + bias. With `delta`, first x += delta, in place."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape, self.eps = (size,), eps
        self.exchange: Exchange | None = None
        self.all_reduce_norm: Callable[..., Tensor | None] | None = None  # sum, residual sum and norm at once
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.kernel: Callable[..., Tensor] | None = None
        self.pdl = False

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        if self.exchange is not None and delta is not None:
            if (
                self.all_reduce_norm is not None
                and (found := self.all_reduce_norm(x, delta, self.weight, self.bias, self.eps)) is not None
            ):
                return found
            delta = self.exchange.all_reduce(delta)
        if self.kernel is not None:
            return self.kernel(x, self.weight, self.bias, self.eps, delta=delta, pdl=self.pdl)
        if delta is not None:
            x.add_(delta)
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)

    def prepare(self) -> None:
        """Call once, after loading. On a GPU the sum and the norm become one launch, on a CPU one operation of ours."""
        if dispatch.has_kernels(self.weight.device, self.weight.dtype):
            self.kernel = norm.layer_norm
        if self.weight.is_cuda:
            from quire.kernels.triton.launch import supports_pdl
            from quire.kernels.triton.norm import layer_norm

            self.kernel, self.pdl = layer_norm, supports_pdl(self.weight.device)
