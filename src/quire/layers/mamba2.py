"""The Mamba-2 mixer (arXiv:2405.21060): heads with a scalar decay each, and B and C that heads of a group share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from quire.kernels import mamba_states, ssd
from quire.kernels.mamba_states import StateCache, StatePlan
from quire.layers.linear import Linear
from quire.layers.mamba import initial_dt_bias
from quire.layers.sharding import ParameterShards, ShardRange, shard_columns
from quire.layers.state_config import Mamba2Config
from quire.layers.state_mixer import StateMixer, choose_convolution
from quire.protocol.parallel_layout import UNSHARDED, Shard

SUM_COLUMNS = 64
"""Columns of a tensor that ranks sum."""


def initial_A_log(like: Tensor) -> Tensor:
    """Return A_log such that the n-th head decays n times as fast as the first."""
    return torch.arange(1, len(like) + 1, dtype=like.dtype, device=like.device).log()


class Mamba2Mixer(StateMixer):
    """See StateMixer. in_proj's rows are the gate z, the inputs x, B and C of the convolution, and the steps dt.

    With tensor parallelism each rank has some heads, with their states, and their groups; beyond the number of groups
    ranks have copies of them. Then the norm of a group needs a sum over ranks."""

    initial_values: ClassVar[Mapping[str, Callable[[Tensor], Tensor]]] = {
        "A_log": initial_A_log,
        "D": torch.ones_like,
        "dt_bias": initial_dt_bias,
        "norm_weight": torch.ones_like,
    }

    def __init__(self, s: Mamba2Config, dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED) -> None:
        super().__init__()
        own = shard.head_ranges(s.heads, s.groups)
        heads, inner = shard_columns(shard, s.heads), shard_columns(shard, s.heads * s.head_dim)
        first, last = own.kv_heads.start * s.d_state, own.kv_heads.stop * s.d_state
        states = ShardRange(range(first, last), s.groups * s.d_state, last - first, shard)
        convolved = ParameterShards((inner, states, states), None)
        self.param_shards = {
            **dict.fromkeys(("conv_weight", "conv_bias"), convolved),
            **dict.fromkeys(("dt_bias", "A_log", "D"), ParameterShards((heads,), None)),
            "norm_weight": ParameterShards((inner,), None),
        }

        def empty(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        channels = inner.padded + 2 * states.padded
        self.in_proj = Linear(s.hidden, (inner, inner, states, states, heads), s.bias, dtype, device)
        self.conv_weight = empty(channels, 1, s.d_conv)
        self.conv_bias = empty(channels) if s.conv_bias else None
        # fp32, since they are used with fp32 numbers; a checkpoint may have them in its own dtype.
        self.dt_bias, self.A_log, self.D = (empty(heads.padded, dtype=torch.float32) for _ in range(3))
        self.norm_weight = empty(inner.padded)
        self.out = Linear(inner, s.hidden, s.bias, dtype, device)
        self.config, self.own_groups, self.copies = s, own.kv_heads, shard.tp_size > s.groups
        self.widths = (inner.padded, channels, heads.padded)
        self.conv_widths = (inner.padded, states.padded, states.padded)
        self.A: Tensor | None = None
        self.conv, self.scan, self.norm = mamba_states.causal_conv, ssd.ssd_scan, ssd.gated_norm

    def mix(self, x: Tensor, cache: StateCache, plan: StatePlan) -> Tensor:
        """See StateMixer."""
        gate, convolved, steps = torch.split(self.in_proj(x), list(self.widths), dim=1)
        if plan.saved_tokens is not None:
            assert cache.saved is not None, "a step has draft tokens, and there is no room for their inputs"
            cache.saved.save(plan.saved_tokens, convolved, steps)
        y = self._scan(convolved, steps, cache, plan).flatten(1)
        reduce = self._mean_over_ranks if self.copies and self.exchange is not None else None
        return self.norm(y, gate, self.norm_weight, len(self.own_groups), self.config.norm_eps, reduce)

    def advance(self, cache: StateCache, plan: StatePlan, tokens: int) -> None:
        """See StateMixer."""
        assert cache.saved is not None, "no inputs are saved"
        convolved, steps = cache.saved.first(tokens)
        self._scan(convolved, steps, cache, plan)  # its output is not needed

    def _scan(self, convolved: Tensor, steps: Tensor, cache: StateCache, plan: StatePlan) -> Tensor:
        """Return the scan's output [T, heads, head_dim]."""
        assert self.A is not None, "prepare() makes it"
        convolved = self.conv(convolved, self.conv_weight[:, 0], self.conv_bias, cache, plan)
        x, b, c = torch.split(convolved, list(self.conv_widths), dim=1)
        b, c = (part.unflatten(1, (len(self.own_groups), -1)) for part in (b, c))
        heads = x.unflatten(1, (len(self.A), -1))
        return self.scan(heads, steps, self.A, b, c, self.D, self.dt_bias, self.config.step_limits, cache, plan)

    def _mean_over_ranks(self, squares: Tensor) -> Tensor:
        """Return the means of a group's squares [T, 1] over the ranks that have some of its heads, from theirs."""
        assert self.exchange is not None, "only ranks sum"
        groups, [own] = self.config.groups, self.own_groups
        every = squares.new_zeros(len(squares), -(-groups // SUM_COLUMNS) * SUM_COLUMNS)
        every[:, own] = squares[:, 0]
        return self.exchange.all_reduce(every)[:, own : own + 1] * (groups / self.exchange.shard.tp_size)

    @torch.no_grad()
    def prepare(self, deterministic: bool = False) -> None:
        """See StateMixer."""
        self.A, self.conv = -torch.exp(self.A_log), choose_convolution(self.conv_weight)
        if self.A.is_cuda:
            from quire.kernels.triton.ssd import gated_norm, ssd_scan

            self.scan = partial(ssd_scan, deterministic=deterministic)
            self.norm = gated_norm
