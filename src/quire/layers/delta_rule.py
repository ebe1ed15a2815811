"""The mixer of Gated DeltaNet (arXiv:2412.06464) as Qwen3-Next and Qwen3.5 have it: a convolution, the gated delta rule
and a gated norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from quire.kernels import delta_rule, mamba_states
from quire.kernels.mamba_states import StateCache, StatePlan
from quire.layers.linear import Linear
from quire.layers.mamba import initial_dt_bias
from quire.layers.norm import RMSNorm
from quire.layers.sharding import ParameterShards, shard_columns
from quire.layers.state_config import DeltaRuleConfig
from quire.layers.state_mixer import StateMixer, choose_convolution
from quire.protocol.parallel_layout import UNSHARDED, Shard


class DeltaRuleMixer(StateMixer):
    """See StateMixer. With tensor parallelism each rank has some key heads, their value heads, and the states of
    these."""

    initial_values: ClassVar[Mapping[str, Callable[[Tensor], Tensor]]] = {
        "A_log": torch.zeros_like,
        "dt_bias": initial_dt_bias,
    }

    def __init__(self, w: DeltaRuleConfig, dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED) -> None:
        super().__init__()
        keys, values, heads = (shard_columns(shard, size) for size in (w.keys, w.values, w.heads))
        by_head = ParameterShards((heads,), None)
        self.param_shards = {
            "conv_weight": ParameterShards((keys, keys, values), None), "dt_bias": by_head, "A_log": by_head,
        }  # fmt: skip

        def empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.in_proj = Linear(w.hidden, (keys, keys, values, values), False, dtype, device)  # the last: gates
        self.ba_proj = Linear(w.hidden, (heads, heads), False, dtype, device)
        self.split_sizes = [2 * keys.padded + values.padded, values.padded]
        self.conv_weight = empty(self.split_sizes[0], 1, w.taps, dtype=dtype)
        # fp32, since they are used with fp32 numbers; a checkpoint may have them in its own dtype.
        self.dt_bias = empty(heads.padded, dtype=torch.float32)
        self.A_log = empty(heads.padded, dtype=torch.float32)
        self.norm = RMSNorm(w.value_dim, w.norm_eps, dtype, device)
        self.out = Linear(values, w.hidden, False, dtype, device)
        self.A: Tensor | None = None
        self.conv, self.rule = mamba_states.causal_conv, delta_rule.gated_delta_rule
        self.gated_norm = delta_rule.gated_norm

    def mix(self, x: Tensor, cache: StateCache, plan: StatePlan) -> Tensor:
        """See StateMixer."""
        qkv, gate = self.in_proj(x).split(self.split_sizes, dim=1)
        ba = self.ba_proj(x)
        if plan.saved_tokens is not None:
            assert cache.saved is not None, "a step has draft tokens, and there is no room for their inputs"
            cache.saved.save(plan.saved_tokens, qkv, ba)
        return self.gated_norm(self._run_rule(qkv, ba, cache, plan), gate, self.norm.weight, self.norm.eps)

    def advance(self, cache: StateCache, plan: StatePlan, tokens: int) -> None:
        """See StateMixer."""
        assert cache.saved is not None, "no inputs are saved"
        qkv, ba = cache.saved.first(tokens)
        self._run_rule(qkv, ba, cache, plan)  # the output is not needed

    def _run_rule(self, qkv: Tensor, ba: Tensor, cache: StateCache, plan: StatePlan) -> Tensor:
        """Run the convolution and the gated delta rule: return the heads' outputs [T, heads value_dim]."""
        assert self.A is not None, "prepare() makes it"
        assert cache.ssm is not None, "the heads have states"
        convolved = self.conv(qkv, self.conv_weight[:, 0], None, cache, plan)
        return self.rule(convolved, ba, self.A, self.dt_bias, cache.ssm, plan)

    @torch.no_grad()
    def prepare(self, deterministic: bool = False) -> None:
        """See StateMixer."""
        self.A, self.conv = -torch.exp(self.A_log), choose_convolution(self.conv_weight)
        if self.A.is_cuda:
            from quire.kernels.triton import delta_rule as kernels
            from quire.kernels.triton.launch import supports_pdl

            pdl = supports_pdl(self.A.device)
            self.rule = partial(kernels.gated_delta_rule, pdl=pdl, deterministic=deterministic)
            self.gated_norm = partial(kernels.gated_norm, pdl=pdl)
