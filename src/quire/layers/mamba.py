"""The Mamba-1 mixer (arXiv:2312.00752): a gated state-space layer whose step size dt, input matrix B and output matrix
C depend on the token; with Jamba's norms of these three (arXiv:2403.19887)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from quire.kernels import mamba_states
from quire.kernels.mamba_states import StateCache, StatePlan
from quire.layers.linear import Linear
from quire.layers.module_list import module_list
from quire.layers.norm import RMSNorm
from quire.layers.sharding import ParameterShards, shard_columns
from quire.layers.state_config import MambaConfig
from quire.layers.state_mixer import StateMixer, choose_convolution
from quire.protocol.parallel_layout import UNSHARDED, Shard

MIN_DT, MAX_DT = 1e-3, 0.1
"""The range of step sizes of an untrained Mamba (arXiv:2312.00752, §3.6)."""


def initial_A_log(like: Tensor) -> Tensor:
    """Return A_log such that the n-th of a channel's d_state numbers decays n times as fast as the first."""
    return torch.arange(1, like.shape[1] + 1, device=like.device).log().expand(like.shape)


def initial_dt_bias(like: Tensor) -> Tensor:
    """Return the inverse softplus of steps from MIN_DT to MAX_DT, evenly spaced on a logarithmic scale."""
    steps = torch.linspace(math.log(MIN_DT), math.log(MAX_DT), len(like), device=like.device).exp()
    return steps.expm1().log()


class MambaMixer(StateMixer):
    """See StateMixer.

    With tensor parallelism each rank has some channels and their states. dt, B and C are made of a sum over all
    channels, so there is an all-reduce within the mixer."""

    initial_values: ClassVar[Mapping[str, Callable[[Tensor], Tensor]]] = {
        "A_log": initial_A_log,
        "D": torch.ones_like,
        "dt_bias": initial_dt_bias,
    }

    def __init__(self, w: MambaConfig, dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED) -> None:
        super().__init__()
        channels = shard_columns(shard, w.d_inner)
        self.param_shards = dict.fromkeys(
            ("conv_weight", "conv_bias", "dt_bias", "A_log", "D"), ParameterShards((channels,), None)
        )

        def empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.in_proj = Linear(w.hidden, (channels, channels), w.bias, dtype, device)
        self.conv_weight = empty(channels.padded, 1, w.d_conv, dtype=dtype)
        self.conv_bias = empty(channels.padded, dtype=dtype) if w.conv_bias else None
        self.x_proj = Linear(channels, (w.dt_rank, w.d_state, w.d_state), False, dtype, device)
        self.dt_proj = Linear(w.dt_rank, channels, False, dtype, device)
        # fp32, since they are used with fp32 numbers; a checkpoint may have them in its own dtype.
        self.dt_bias = empty(channels.padded, dtype=torch.float32)
        self.A_log = empty(channels.padded, w.d_state, dtype=torch.float32)
        self.D = empty(channels.padded, dtype=torch.float32)
        self.out = Linear(channels, w.hidden, w.bias, dtype, device)
        sizes, learned = () if w.norms == "none" else (w.dt_rank, w.d_state, w.d_state), w.norms == "learned"
        self.norms = module_list(RMSNorm(size, w.norm_eps, dtype, device, learned=learned) for size in sizes)
        self.fused_norms: Callable[..., tuple[Tensor, ...]] | None = None  # all three in one launch
        self.A: Tensor | None = None
        self.conv, self.scan = mamba_states.causal_conv, mamba_states.selective_scan

    def mix(self, x: Tensor, cache: StateCache, plan: StatePlan) -> Tensor:
        """Return the scan's output [T, d_inner] (of the local channels), before `out`."""
        assert self.A is not None, "prepare() makes it"
        projected, gate = self.in_proj(x).chunk(2, dim=1)
        inner = self.conv(projected, self.conv_weight[:, 0], self.conv_bias, cache, plan)
        product = self.x_proj(inner)
        if self.exchange is not None:
            product = self.exchange.all_reduce(product)
        dt, b, c = self.split_norm(product)
        steps = self.dt_proj(dt)
        if plan.saved_tokens is not None:
            assert cache.saved is not None, "a step has draft tokens, and there is no room for their inputs"
            cache.saved.save(plan.saved_tokens, projected, steps, b)
        return self.scan(inner, steps, self.A, b, c, self.D, gate, self.dt_bias, cache, plan)

    def advance(self, cache: StateCache, plan: StatePlan, tokens: int) -> None:
        """See StateMixer."""
        assert self.A is not None, "prepare() makes it"
        assert cache.saved is not None, "no inputs are saved"
        projected, steps, bc = cache.saved.first(tokens)
        inner = self.conv(projected, self.conv_weight[:, 0], self.conv_bias, cache, plan)
        b, c = bc.chunk(2, dim=1)
        self.scan(inner, steps, self.A, b, c, self.D, steps, self.dt_bias, cache, plan)  # the output is not needed

    def split_norm(self, product: Tensor) -> tuple[Tensor, ...]:
        """Split `x_proj`'s output into dt [T, dt_rank], B and C [T, d_state], and normalise them if there are norms."""
        if self.fused_norms is not None:
            return self.fused_norms(product, tuple(norm.weight for norm in self.norms), self.norms[0].eps)
        parts = torch.split(product, list(self.x_proj.output_sizes), dim=1)
        return tuple(norm(part) for norm, part in zip(self.norms, parts)) if self.norms else parts

    @torch.no_grad()
    def prepare(self, deterministic: bool = False) -> None:
        """See StateMixer."""
        self.A, self.conv = -torch.exp(self.A_log), choose_convolution(self.conv_weight)
        for norm_module in self.norms:
            if norm_module.weight is None:  # FalconMamba's norms have no weight
                norm_module.prepare()
        if self.A.is_cuda:
            from quire.kernels.triton import mamba_scan, norm
            from quire.kernels.triton.launch import supports_pdl

            pdl = supports_pdl(self.A.device)
            self.scan = partial(mamba_scan.selective_scan, deterministic=deterministic, pdl=pdl)
            if self.norms:
                self.fused_norms = partial(norm.rms_norm_parts, pdl=pdl)
