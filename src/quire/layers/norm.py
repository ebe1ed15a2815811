"""Normalisation over the last dimension, computed in fp32, with the residual sum before it. With tensor parallelism the
residual is all-reduced here: a layer's output is one rank's term of a sum until the next norm.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.cpu import rows
from quire.layers.exchange import Exchange, ShardedModule


class RMSNorm(ShardedModule):
    """x [..., size] -> x / sqrt(mean(x^2) + eps) * weight. With `delta`, first x += delta, in place; if the norm has a
    `post_norm`, a norm of the same eps, x += post_norm(delta). With `scaled` the sum is then multiplied by a number of
    the checkpoint, `sum_scale` [1] (Gemma 4). `sums_ranks`: the delta of a rank is a term of a sum over all.

    With `offset` a checkpoint has weight - 1 (Gemma). The weight is then computed and stored in fp32, since a shorter
    dtype would lose small differences from one. Weights are multiplied by `factor`, in fp32 too. Without `learned` all
    are one, from `prepare` on.
    """

    __call__: Callable[..., Tensor]
    weight: nn.Parameter
    sum_scale: nn.Parameter | None

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, device: torch.device, *, offset: bool = False,
        post_norm: RMSNorm | None = None, learned: bool = True, scaled: bool = False, sums_ranks: bool = True,
        factor: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.shape, self.eps, self.dtype, self.device = (size,), eps, dtype, device
        self.offset, self.factor, self.sums_ranks = offset, factor, sums_ranks
        weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False) if learned else None
        self.register_parameter("weight", weight)
        self.post_norm = post_norm
        scale = nn.Parameter(torch.empty(1, dtype=dtype, device=device), requires_grad=False) if scaled else None
        self.register_parameter("sum_scale", scale)
        self.scale = 1.0  # from `prepare` on, `sum_scale`
        self.kernel: Callable[..., Tensor] | None = None
        self.pdl = False

    def connect(self, exchange: Exchange) -> None:
        """See ShardedModule."""
        if self.sums_ranks:
            super().connect(exchange)

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        post_norm = self.post_norm
        post_weight = None if post_norm is None else post_norm.weight
        if self.exchange is not None and delta is not None:
            if self.all_reduce_norm is not None and self.scale == 1:
                normed = self.all_reduce_norm(x, delta, self.weight, None, self.eps, post_weight)
                if normed is not None:
                    return normed
            delta = self.exchange.all_reduce(delta)
        if self.kernel is not None:
            return self.kernel(
                x, self.weight, self.eps, delta=delta, post_norm_weight=post_weight, scale=self.scale, pdl=self.pdl
            )
        assert (self.offset, self.factor) == (False, 1), "prepare() changes the weight"
        if delta is not None:
            x.add_(delta if post_norm is None else post_norm(delta))
            if self.scale != 1:
                x.mul_(self.scale)
        if self.weight.dtype != x.dtype:
            return F.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.shape, self.weight, self.eps)

    def normalize_(self, x: Tensor) -> None:
        """Replace x [T, size], which may be some columns of a tensor, by its norm."""
        if self.kernel is not None:
            self.kernel(x, self.weight, self.eps, out=x, pdl=self.pdl)
        else:
            x.copy_(self(x))

    def add_to(self, x: Tensor, delta: Tensor) -> None:
        """Add the norm of delta [T, size] to x, in place."""
        if self.kernel is not None:  # it also returns the norm of the sum, which is not needed
            self.kernel(x, self.weight, self.eps, delta=delta, post_norm_weight=self.weight, pdl=self.pdl)
        else:
            x.add_(self(delta))

    def normalize_term(self, delta: Tensor) -> Tensor:
        """Return the norm of delta [T, size], of the sum over all ranks if there are several."""
        return self(delta if self.exchange is None else self.exchange.all_reduce(delta))

    def prepare(self) -> None:
        """Choose the kernel that computes sum and norm at once. Call once, after loading."""
        if self.sum_scale is not None:
            self.scale = float(self.sum_scale)
        if self.weight is None:
            ones = torch.ones(self.shape, dtype=self.dtype, device=self.device)
            self.weight = nn.Parameter(ones, requires_grad=False)
        if self.offset or self.factor != 1:
            weight = (self.weight.float() + float(self.offset)) * self.factor
            self.weight, self.offset, self.factor = nn.Parameter(weight, requires_grad=False), False, 1.0
        if rows.has_kernels(self.weight.device, self.dtype):
            self.kernel = rows.rms_norm
        if self.weight.is_cuda:
            from quire.kernels.triton.launch import supports_pdl
            from quire.kernels.triton.norm import rms_norm

            self.kernel, self.pdl = rms_norm, supports_pdl(self.weight.device)


class ResidualSum(ShardedModule):
    """x -> x, after x += delta, or x += post_norm(delta), in place: where other models have a norm. `sums_ranks`: see
    RMSNorm."""

    __call__: Callable[..., Tensor]

    def __init__(self, post_norm: RMSNorm | None = None, sums_ranks: bool = True) -> None:
        super().__init__()
        self.post_norm, self.sums_ranks = post_norm, sums_ranks

    def connect(self, exchange: Exchange) -> None:
        """See ShardedModule."""
        if self.sums_ranks:
            super().connect(exchange)

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        if delta is None:
            return x
        if self.exchange is not None:
            delta = self.exchange.all_reduce(delta)
        if self.post_norm is None:
            return x.add_(delta)
        self.post_norm.add_to(x, delta)
        return x


class LayerNorm(ShardedModule):
    """x [..., size] -> (x - mean) / sqrt(variance + eps) * weight + bias. With `delta`, first x += delta, in place."""

    __call__: Callable[..., Tensor]

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape, self.eps = (size,), eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.kernel: Callable[..., Tensor] | None = None
        self.pdl = False

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        if self.exchange is not None and delta is not None:
            if self.all_reduce_norm is not None:
                normed = self.all_reduce_norm(x, delta, self.weight, self.bias, self.eps)
                if normed is not None:
                    return normed
            delta = self.exchange.all_reduce(delta)
        if self.kernel is not None:
            return self.kernel(x, self.weight, self.bias, self.eps, delta=delta, pdl=self.pdl)
        if delta is not None:
            x.add_(delta)
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)

    def prepare(self) -> None:
        """Choose the kernel that computes sum and norm at once. Call once, after loading."""
        if rows.has_kernels(self.weight.device, self.weight.dtype):
            self.kernel = rows.layer_norm
        if self.weight.is_cuda:
            from quire.kernels.triton.launch import supports_pdl
            from quire.kernels.triton.norm import layer_norm

            self.kernel, self.pdl = layer_norm, supports_pdl(self.weight.device)
