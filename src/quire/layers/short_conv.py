"""The gated short convolution of LFM2 (Liquid AI, 2025): a mixer whose state is the convolution's last inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.kernels import mamba_states
from quire.kernels.cpu import convolution
from quire.kernels.mamba_states import StateCache, StatePlan
from quire.layers.linear import Linear
from quire.layers.sharding import ParameterShards, shard_columns
from quire.layers.state_config import ShortConvConfig
from quire.layers.state_mixer import StateMixer, choose_convolution
from quire.protocol.parallel_layout import UNSHARDED, Shard


class ShortConvMixer(StateMixer):
    """See StateMixer. B, C, x = in_proj(input); y = out(C * conv(B * x)). With tensor parallelism each rank has some
    channels."""

    def __init__(self, s: ShortConvConfig, dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED) -> None:
        super().__init__()
        channels = shard_columns(shard, s.channels)
        self.param_shards = dict.fromkeys(("conv_weight", "conv_bias"), ParameterShards((channels,), None))

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.in_proj = Linear(s.hidden, (channels,) * 3, s.bias, dtype, device)
        self.conv_weight = empty(channels.padded, 1, s.taps)
        self.conv_bias = empty(channels.padded) if s.bias else None
        self.out = Linear(channels, s.hidden, s.bias, dtype, device)
        self.conv = mamba_states.causal_conv

    def mix(self, x: Tensor, cache: StateCache, plan: StatePlan) -> Tensor:
        """See StateMixer."""
        b, c, inner = self.in_proj(x).chunk(3, dim=1)
        if self.conv is convolution.causal_conv and plan.saved_tokens is None:
            return self.conv(inner, self.conv_weight[:, 0], self.conv_bias, cache, plan, silu=False, gates=(b, c))
        gated = b * inner
        if plan.saved_tokens is not None:
            assert cache.saved is not None, "a step has draft tokens, and there is no room for their inputs"
            cache.saved.save(plan.saved_tokens, gated)
        return self.conv(gated, self.conv_weight[:, 0], self.conv_bias, cache, plan, silu=False).mul_(c)

    def advance(self, cache: StateCache, plan: StatePlan, tokens: int) -> None:
        """See StateMixer."""
        assert cache.saved is not None, "no inputs are saved"
        [gated] = cache.saved.first(tokens)
        self.conv(gated, self.conv_weight[:, 0], self.conv_bias, cache, plan, silu=False)  # its output is not needed

    def prepare(self, deterministic: bool = False) -> None:
        """See StateMixer."""
        self.conv = choose_convolution(self.conv_weight)
