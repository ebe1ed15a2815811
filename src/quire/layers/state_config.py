"""The parameters of layers that keep a running state in place of keys and values: an interface, and those of each kind.
No torch: memory plans read them too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from quire.errors import StartupError
from quire.protocol.model_spec import LayerSpec, SavedInput, StateTensor
from quire.protocol.parallel_layout import can_divide

STATE_ITEMSIZE = 4
"""Bytes of a number of the `ssm` state, unless --state-dtype is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMixerConfig(ABC):
    """The mixer of a layer with a state, of rows of `hidden` numbers. All such layers of a model have equal ones. The
    module that computes it is a quire.layers.state_mixer.StateMixer. Numbers of states have `itemsize` bytes, but those
    of a tensor "ssm", in which rounding errors accumulate, have STATE_ITEMSIZE."""

    hidden: int
    itemsize: int

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Number of parameters."""

    @property
    def fp32_parameters(self) -> int:
        """Number of parameters that are in float32 regardless of the model's dtype."""
        return 0

    @property
    @abstractmethod
    def columns(self) -> dict[str, int]:
        """What ranks divide equally, by its name in config.json."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The most numbers of a token that the mixer has at once."""

    @abstractmethod
    def divide(self, ranks: int) -> StateMixerConfig:
        """Return one rank's part, after `columns` were checked. Raise StartupError if it can't be divided so."""

    @abstractmethod
    def layer_spec(self) -> LayerSpec:
        """Return the layer's spec: its states, and the inputs from which they are advanced over draft tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(StateMixerConfig):
    """The mixer of a Mamba layer: `d_inner` channels (`inner_key`: their name in config.json) with states of `d_state`
    numbers each, a convolution over `d_conv` tokens, and step sizes of rank `dt_rank`. `norms`, with `norm_eps`: step
    sizes, B and C are normalised with weights ("learned", Jamba), without ("plain", FalconMamba), or not at all
    ("none")."""

    d_inner: int
    inner_key: str
    d_state: int
    d_conv: int
    dt_rank: int
    conv_bias: bool
    bias: bool
    norms: str
    norm_eps: float

    @property
    def parameters(self) -> int:
        """See StateMixerConfig."""
        s, selected = self, self.dt_rank + 2 * self.d_state
        products = 3 * s.hidden * s.d_inner + s.bias * (2 * s.d_inner + s.hidden)
        per_channel = (s.d_conv + s.conv_bias) + selected + (s.dt_rank + 1) + (s.d_state + 1)
        return products + s.d_inner * per_channel + (s.norms == "learned") * selected

    @property
    def fp32_parameters(self) -> int:
        """See StateMixerConfig."""
        return self.d_inner * (self.d_state + 2)

    @property
    def columns(self) -> dict[str, int]:
        """See StateMixerConfig."""
        return {self.inner_key: self.d_inner}

    @property
    def width(self) -> int:
        """See StateMixerConfig."""
        return 2 * self.d_inner

    def divide(self, ranks: int) -> MambaConfig:
        """See StateMixerConfig."""
        return replace(self, d_inner=self.d_inner // ranks)

    def layer_spec(self) -> LayerSpec:
        """See StateMixerConfig. The scan reads B and C side by side, so there is room for both."""
        conv = StateTensor("conv", (self.d_inner, self.d_conv - 1), self.itemsize)
        ssm = StateTensor("ssm", (self.d_inner, self.d_state), STATE_ITEMSIZE)
        inputs = SavedInput(self.d_inner), SavedInput(self.d_inner), SavedInput(2 * self.d_state, is_fp32=True)
        return LayerSpec(0, 0, state_tensors=(conv, ssm), saved_inputs=inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig(StateMixerConfig):
    """The gated short convolution of LFM2: of `channels` channels, as many as `hidden` numbers in the undivided model,
    over `taps` tokens. `bias`: all its products and the convolution have biases."""

    channels: int
    taps: int
    bias: bool

    @property
    def parameters(self) -> int:
        """See StateMixerConfig."""
        products = 4 * self.hidden * self.channels + self.bias * (3 * self.channels + self.hidden)
        return products + self.channels * (self.taps + self.bias)

    @property
    def columns(self) -> dict[str, int]:
        """See StateMixerConfig."""
        return {"hidden_size": self.channels}

    @property
    def width(self) -> int:
        """See StateMixerConfig."""
        return 3 * self.channels

    def divide(self, ranks: int) -> ShortConvConfig:
        """See StateMixerConfig."""
        return replace(self, channels=self.channels // ranks)

    def layer_spec(self) -> LayerSpec:
        """See StateMixerConfig."""
        conv = StateTensor("conv", (self.channels, self.taps - 1), self.itemsize)
        return LayerSpec(0, 0, state_tensors=(conv,), saved_inputs=(SavedInput(self.channels),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(StateMixerConfig):
    """The mixer of a Mamba-2 layer: `heads` heads (`heads_key`: their key in config.json) of `head_dim` channels with
    states of `d_state` numbers each; B and C of `groups` groups of heads; a convolution over `d_conv` tokens; step
    sizes within `step_limits`; a gated RMS norm of each group's channels."""

    heads: int
    heads_key: str
    head_dim: int
    groups: int
    d_state: int
    d_conv: int
    conv_bias: bool
    bias: bool
    norm_eps: float
    step_limits: tuple[float, float]

    @property
    def d_inner(self) -> int:
        """The channels of all heads."""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """The channels of the convolution: those of the heads, B and C."""
        return self.d_inner + 2 * self.groups * self.d_state

    @property
    def width(self) -> int:
        """See StateMixerConfig."""
        return self.d_inner + self.conv_channels + self.heads

    @property
    def parameters(self) -> int:
        """See StateMixerConfig."""
        s = self
        products = s.hidden * (s.width + s.d_inner) + s.bias * (s.width + s.hidden)
        return products + s.conv_channels * (s.d_conv + s.conv_bias) + s.fp32_parameters + s.d_inner

    @property
    def fp32_parameters(self) -> int:
        """See StateMixerConfig."""
        return 3 * self.heads

    @property
    def columns(self) -> dict[str, int]:
        """See StateMixerConfig."""
        return {self.heads_key: self.heads}

    def divide(self, ranks: int) -> Mamba2Config:
        """See StateMixerConfig."""
        if not can_divide(ranks, self.heads, self.groups, ()):
            raise StartupError(
                f"--tp is {ranks}, and the {self.heads} heads of the Mamba layers have {self.groups} groups",
                "Use a number that divides the groups, or that they divide",
            )
        return replace(self, heads=self.heads // ranks, groups=-(-self.groups // ranks))

    def layer_spec(self) -> LayerSpec:
        """See StateMixerConfig."""
        conv = StateTensor("conv", (self.conv_channels, self.d_conv - 1), self.itemsize)
        ssm = StateTensor("ssm", (self.heads, self.head_dim, self.d_state), STATE_ITEMSIZE)
        return LayerSpec(
            0, 0, state_tensors=(conv, ssm), saved_inputs=(SavedInput(self.conv_channels), SavedInput(self.heads))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRuleConfig(StateMixerConfig):
    """The mixer of a layer with the gated delta rule: `key_heads` heads of queries and keys of `key_dim` numbers, and
    `heads` of values of `value_dim`, as many for each key head. A convolution over `taps` tokens comes before it, and a
    norm of each head after it."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int
    norm_eps: float

    @property
    def keys(self) -> int:
        """Numbers of a token's keys, and of its queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of a token's values."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.keys + self.values

    @property
    def parameters(self) -> int:
        """See StateMixerConfig."""
        products = self.hidden * (self.channels + 2 * self.values + 2 * self.heads)
        return products + self.channels * self.taps + self.value_dim + self.fp32_parameters

    @property
    def fp32_parameters(self) -> int:
        """See StateMixerConfig."""
        return 2 * self.heads

    @property
    def columns(self) -> dict[str, int]:
        """See StateMixerConfig. `heads` are a multiple of these."""
        return {"linear_num_key_heads": self.key_heads}

    @property
    def width(self) -> int:
        """See StateMixerConfig."""
        return self.channels + self.values

    def divide(self, ranks: int) -> DeltaRuleConfig:
        """See StateMixerConfig."""
        return replace(self, key_heads=self.key_heads // ranks, heads=self.heads // ranks)

    def layer_spec(self) -> LayerSpec:
        """See StateMixerConfig."""
        conv = StateTensor("conv", (self.channels, self.taps - 1), self.itemsize)
        ssm = StateTensor("ssm", (self.heads, self.key_dim, self.value_dim), STATE_ITEMSIZE)
        inputs = SavedInput(self.channels), SavedInput(2 * self.heads)
        return LayerSpec(0, 0, state_tensors=(conv, ssm), saved_inputs=inputs)
