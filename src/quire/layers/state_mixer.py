"""The base class of mixers that keep a running state in place of keys and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

from torch import Tensor

from quire.kernels.cpu import convolution
from quire.kernels.cpu.rows import has_kernels
from quire.kernels.mamba_states import StateCache, StatePlan, causal_conv
from quire.layers.exchange import ShardedModule
from quire.layers.linear import Linear
from quire.layers.sharding import ParameterShards


class StateMixer(ShardedModule, ABC):
    """x [T, hidden] -> [T, hidden], by `mix` and then `out`, of which the last layer runs only some rows. The layer's
    states, in a cache, are advanced over the step's tokens, as the plan says. It is declared by a
    quire.layers.state_config.StateMixerConfig, and made with it, a dtype, a device and a Shard."""

    out: Linear
    """The output projection; its result is one rank's term of a sum."""
    param_shards: Mapping[str, ParameterShards]
    """The parts of the mixer's own parameters that ranks have; of those that aren't named each rank has all."""
    initial_values: ClassVar[Mapping[str, Callable[[Tensor], Tensor]]] = {}
    """The mixer's own parameters that dummy weights must not draw -> their values, as a function of a tensor like the
    whole parameter."""

    @abstractmethod
    def mix(self, x: Tensor, cache: StateCache, plan: StatePlan) -> Tensor:
        """Return the input [T, *] of `out`. Save the inputs of `plan.saved_tokens`, if there are any."""

    @abstractmethod
    def advance(self, cache: StateCache, plan: StatePlan, tokens: int) -> None:
        """Advance the states over the plan's rows, which consist of some of the first `tokens` saved tokens."""

    @abstractmethod
    def prepare(self, deterministic: bool = False) -> None:
        """Choose kernels. Call once, after loading. If `deterministic`, a token's bits on a GPU, with states in fp32,
        depend neither on the batch's other rows nor on how its sequence is split into steps."""


def choose_convolution(weight: Tensor) -> Callable[..., Tensor]:
    """Return the causal convolution for a weight's device and dtype: see quire.kernels.mamba_states.causal_conv."""
    if weight.is_cuda:
        from quire.kernels.triton import mamba_conv
        from quire.kernels.triton.launch import supports_pdl

        return partial(mamba_conv.causal_conv, pdl=supports_pdl(weight.device))
    return convolution.causal_conv if has_kernels(weight.device, weight.dtype) else causal_conv
