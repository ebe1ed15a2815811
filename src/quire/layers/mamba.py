"""The Mamba-1 mixer (arXiv:2312.00752): a gated state-space layer whose step size dt, input matrix B and output matrix
C depend on the token; with Jamba's norms of these three (arXiv:2403.19887)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.kernels import mamba_states
from quire.kernels.mamba_states import StateCache, StatePlan
from quire.layers.exchange import ShardedModule
from quire.layers.linear import Linear
from quire.layers.module_list import module_list
from quire.layers.norm import RMSNorm
from quire.layers.sharding import ParameterShards, shard_columns
from quire.protocol.parallel_layout import UNSHARDED, Shard


class MambaDims(NamedTuple):
    """Sizes per token: the hidden size, the mixer's channels, the rank of dt. Per channel: its state, and the taps of
    its convolution."""

    hidden: int
    d_inner: int
    dt_rank: int
    d_state: int
    d_conv: int


class MambaMixer(ShardedModule):
    """x [T, hidden] -> [T, hidden], by `mix` and then `out`. The layer's states, in `cache`, are advanced over the
    step's tokens, as the plan says.

    With tensor parallelism each rank has some channels and their states. dt, B and C are made of a sum over all
    channels, so there is an all-reduce within the mixer; its output is one rank's term of a sum."""

    def __init__(
        self, w: MambaDims, bias: bool, conv_bias: bool, norms: str, norm_eps: float, dtype: torch.dtype,
        device: torch.device, shard: Shard = UNSHARDED,
    ) -> None:  # fmt: skip
        """`norms` of dt, B and C: "learned", "plain" without weights, or "none"."""
        super().__init__()
        channels = shard_columns(shard, w.d_inner)
        self.param_shards = dict.fromkeys(
            ("conv_weight", "conv_bias", "dt_bias", "A_log", "D"), ParameterShards((channels,), None)
        )

        def empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.in_proj = Linear(w.hidden, (channels, channels), bias, dtype, device)
        self.conv_weight = empty(channels.padded, 1, w.d_conv, dtype=dtype)
        self.conv_bias = empty(channels.padded, dtype=dtype) if conv_bias else None
        self.x_proj = Linear(channels, (w.dt_rank, w.d_state, w.d_state), False, dtype, device)
        self.dt_proj = Linear(w.dt_rank, channels, False, dtype, device)
        # fp32, since they are used with fp32 numbers; a checkpoint may have them in its own dtype.
        self.dt_bias = empty(channels.padded, dtype=torch.float32)
        self.A_log = empty(channels.padded, w.d_state, dtype=torch.float32)
        self.D = empty(channels.padded, dtype=torch.float32)
        self.out = Linear(channels, w.hidden, bias, dtype, device)
        sizes, learned = () if norms == "none" else (w.dt_rank, w.d_state, w.d_state), norms == "learned"
        self.norms = module_list(RMSNorm(size, norm_eps, dtype, device, learned=learned) for size in sizes)
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
        """Advance the states over the plan's rows, which consist of some of the first `tokens` saved tokens."""
        assert self.A is not None, "prepare() makes it"
        assert cache.saved is not None, "no inputs are saved"
        projected, steps, bc = (part[:tokens] for part in cache.saved)
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
        """Choose kernels. Call once, after loading. If `deterministic`, a token's bits on a GPU, with states in fp32,
        depend neither on the batch's other rows nor on how its sequence is split into steps."""
        self.A = -torch.exp(self.A_log)
        for norm_module in self.norms:
            if norm_module.weight is None:  # FalconMamba's norms have no weight
                norm_module.prepare()
        if self.A.is_cuda:
            from quire.kernels.triton import mamba_conv, mamba_scan, norm
            from quire.kernels.triton.launch import supports_pdl

            pdl = supports_pdl(self.A.device)
            self.conv = partial(mamba_conv.causal_conv, pdl=pdl)
            self.scan = partial(mamba_scan.selective_scan, deterministic=deterministic, pdl=pdl)
            if self.norms:
                self.fused_norms = partial(norm.rms_norm_parts, pdl=pdl)
