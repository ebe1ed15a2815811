"""Settings of Mamba (Gu and Dao, 2023), FalconMamba and Jamba (Lieber et al., 2024). No torch. Defaults are
transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from quire.errors import StartupError
from quire.models.config_reader import ConfigReader
from quire.models.settings import MAX_LAYERS, check_quantization
from quire.protocol.model_spec import LayerSpec, ModelSpec, StateTensor
from quire.protocol.parallel_layout import UNSHARDED, Shard, check_tp_division

MAX_D_STATE = 256
"""Limit of the size of a channel's state."""
MIN_D_CONV, MAX_D_CONV = 2, 16
"""Limits of the convolution's width in tokens; all but the last are part of the state."""
MAX_EXPAND = 16
MAX_D_INNER = 2**20
MAX_DT_RANK = 2**16
MAX_EXPERTS = 1024
MAMBA_MAX_LEN = 2**20
"""quire's limit of a sequence's length: the architecture has none."""
ITEMSIZES = {"bfloat16": 2, "float16": 2}
STATE_ITEMSIZE = 4
"""Bytes of a number of the `ssm` state, unless --state-dtype is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerSettings:
    """One Mamba layer's mixer: `d_inner` channels with states of `d_state` numbers each, a convolution over `d_conv`
    tokens, and step sizes of rank `dt_rank`. `norms`, with `norm_eps`: step sizes, B and C are normalised with weights
    ("learned", Jamba), without ("plain", FalconMamba), or not at all ("none")."""

    hidden: int
    d_inner: int
    d_state: int
    d_conv: int
    dt_rank: int
    conv_bias: bool
    bias: bool
    norms: str
    norm_eps: float

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        products = 3 * self.hidden * self.d_inner + self.bias * (2 * self.d_inner + self.hidden)
        selection = self.d_inner * (self.dt_rank + 2 * self.d_state) + self.d_inner * (self.dt_rank + 1)
        norms = (self.norms == "learned") * (self.dt_rank + 2 * self.d_state)
        return (
            products
            + self.d_inner * (self.d_conv + self.conv_bias)
            + selection
            + self.d_inner * (self.d_state + 1)
            + norms
        )

    @property
    def fp32_parameters(self) -> int:
        """Number of parameters that are in float32 regardless of the model's dtype."""
        return self.d_inner * (self.d_state + 2)

    @property
    def dims(self) -> tuple[int, int, int, int, int]:
        """The fields of quire.layers.mamba.MambaDims, in order."""
        return self.hidden, self.d_inner, self.dt_rank, self.d_state, self.d_conv

    def for_shard(self, shard: Shard) -> Self:
        """Return one rank's settings: its channels."""
        return replace(self, d_inner=len(shard.shard_range(self.d_inner)))

    def layer_spec(self, itemsize: int) -> LayerSpec:
        """Return the layer's spec: its states, in a model of `itemsize` bytes per number."""
        conv = StateTensor("conv", (self.d_inner, self.d_conv - 1), itemsize)
        return LayerSpec(0, 0, state_tensors=(conv, StateTensor("ssm", (self.d_inner, self.d_state), STATE_ITEMSIZE)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSettings:
    """Mamba and FalconMamba: each layer is a norm and a mixer."""

    vocab_size: int
    hidden: int
    layers: int
    mixer: MixerSettings
    norm_eps: float
    tied: bool
    max_len: int
    eos_ids: tuple[int, ...]
    itemsize: int
    shard: Shard = UNSHARDED

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Read a config.json. Raise StartupError for a value that is missing, wrong or not supported."""
        fields = ConfigReader(config)
        check_quantization(fields)
        falcon = (config.get("architectures") or [""])[0] == "FalconMambaForCausalLM"
        hidden = fields.get_int("hidden_size")
        norms = ("plain", fields.get_float("mixer_rms_eps", 1e-6)) if falcon else ("none", 1e-6)
        return cls(
            vocab_size=fields.get_int("vocab_size"),
            hidden=hidden,
            layers=fields.get_int("num_hidden_layers", maximum=MAX_LAYERS),
            mixer=_read_mixer(
                fields, hidden, ("state_size", "conv_kernel", "expand", "time_step_rank"),
                fields.get_bool("use_conv_bias", True), fields.get_bool("use_bias", False), norms,
            ),
            norm_eps=fields.get_float("layer_norm_epsilon", 1e-5),
            tied=fields.get_bool("tie_word_embeddings", True),
            max_len=MAMBA_MAX_LEN,
            eos_ids=fields.get_token_ids("eos_token_id"),
            itemsize=_itemsize(config),
        )  # fmt: skip

    def for_shard(self, shard: Shard) -> Self:
        """Return one rank's settings. Raise StartupError if the model can't be divided among that many ranks."""
        if self.mixer.d_inner % shard.tp_size:
            raise StartupError(
                f"--tp is {shard.tp_size}, which doesn't divide the model: it has {self.mixer.d_inner} channels",
                "Use a number that divides them",
            )
        return replace(self, mixer=self.mixer.for_shard(shard), shard=shard)

    @property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        embeddings = (1 if self.tied else 2) * self.shard.padded_vocab_rows(self.vocab_size) * self.hidden
        return self.layers * (self.mixer.parameters + self.hidden) + self.hidden + embeddings

    def spec(self) -> ModelSpec:
        return ModelSpec(
            family="mamba",
            layers=(self.mixer.layer_spec(self.itemsize),) * self.layers,
            vocab_size=self.vocab_size,
            max_len=self.max_len,
            hidden=self.hidden,
            heads=0,
            intermediate=2 * self.mixer.d_inner,
            parameters=self.parameters,
            eos_ids=self.eos_ids,
            num_rope_tables=0,
            fp32_parameters=self.layers * self.mixer.fp32_parameters,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JambaSettings:
    """Jamba: Mamba layers with some attention layers between them (`is_attention_layer`, one entry per layer), which
    have no rotary embedding. Each layer has a feed-forward block; some (`is_moe_layer`) have `experts`, of which each
    token uses `experts_per_token`."""

    vocab_size: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    mixer: MixerSettings
    is_attention_layer: tuple[bool, ...]
    is_moe_layer: tuple[bool, ...]
    experts: int
    experts_per_token: int
    tied: bool
    max_len: int
    eos_ids: tuple[int, ...]
    itemsize: int
    shard: Shard = UNSHARDED
    qkv_bias: ClassVar[bool] = False
    out_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False
    norm_offset: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Read a config.json. Raise StartupError for a value that is missing, wrong or not supported."""
        fields = ConfigReader(config)
        check_quantization(fields)
        fields.require_value("mamba_inner_layernorms", True)
        fields.require_value("sliding_window", None)
        hidden, heads = fields.get_int("hidden_size"), fields.get_int("num_attention_heads")
        kv_heads, head_dim = _read_heads(fields, hidden, heads)
        layers, eps = fields.get_int("num_hidden_layers", maximum=MAX_LAYERS), fields.get_float("rms_norm_eps", 1e-6)
        experts = fields.get_int("num_experts", 16, MAX_EXPERTS)
        sparse = _periodic_layers(fields, "expert_layer", layers, 2, 1)
        return cls(
            vocab_size=fields.get_int("vocab_size"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=fields.get_int("intermediate_size"),
            norm_eps=eps,
            mixer=_read_mixer(
                fields, hidden, ("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank"),
                fields.get_bool("mamba_conv_bias", True), fields.get_bool("mamba_proj_bias", False), ("learned", eps),
            ),
            is_attention_layer=_periodic_layers(fields, "attn_layer", layers, 8, 4),
            is_moe_layer=sparse if experts > 1 else (False,) * layers,
            experts=experts,
            experts_per_token=fields.get_int("num_experts_per_tok", 2, experts) if experts > 1 else 1,
            tied=fields.get_bool("tie_word_embeddings", False),
            max_len=fields.get_int("max_position_embeddings", 262_144),
            eos_ids=fields.get_token_ids("eos_token_id"),
            itemsize=_itemsize(config),
        )  # fmt: skip

    def for_shard(self, shard: Shard) -> Self:
        """Return one rank's settings. Raise StartupError if the model can't be divided among that many ranks."""
        columns = {"intermediate_size": self.intermediate, "mamba_expand times hidden_size": self.mixer.d_inner}
        check_tp_division(shard.tp_size, self.heads, self.kv_heads, **columns)
        return replace(
            self,
            heads=self.heads // shard.tp_size,
            kv_heads=max(self.kv_heads // shard.tp_size, 1),
            intermediate=self.intermediate // shard.tp_size,
            mixer=self.mixer.for_shard(shard),
            shard=shard,
        )

    @property
    def parameters(self) -> int:
        """Number of parameters, all experts included; tied ones count once."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * queries + 2 * keys)
        block, sparse = 3 * self.hidden * self.intermediate, sum(self.is_moe_layer)
        total = sum(attention if attends else self.mixer.parameters for attends in self.is_attention_layer)
        total += (
            self.expert_parameters + sparse * self.experts * self.hidden + (len(self.is_moe_layer) - sparse) * block
        )
        embeddings = (1 if self.tied else 2) * self.shard.padded_vocab_rows(self.vocab_size) * self.hidden
        return total + len(self.is_attention_layer) * 2 * self.hidden + self.hidden + embeddings

    @property
    def expert_parameters(self) -> int:
        """Number of parameters of all experts, without routers."""
        return sum(self.is_moe_layer) * self.experts * 3 * self.hidden * self.intermediate

    def spec(self) -> ModelSpec:
        state, attention = self.mixer.layer_spec(self.itemsize), LayerSpec(self.kv_heads, self.head_dim)
        active = self.experts_per_token if any(self.is_moe_layer) else 1
        return ModelSpec(
            family="jamba",
            layers=tuple(attention if attends else state for attends in self.is_attention_layer),
            vocab_size=self.vocab_size,
            max_len=self.max_len,
            hidden=self.hidden,
            heads=self.heads,
            intermediate=max(active * self.intermediate, 2 * self.mixer.d_inner),
            parameters=self.parameters,
            eos_ids=self.eos_ids,
            num_rope_tables=0,
            experts=self.experts if any(self.is_moe_layer) else 0,
            active_experts=self.experts_per_token if any(self.is_moe_layer) else 0,
            expert_parameters=self.expert_parameters,
            fp32_parameters=self.is_attention_layer.count(False) * self.mixer.fp32_parameters,
        )


def _read_mixer(
    fields: ConfigReader,
    hidden: int,
    names: tuple[str, str, str, str],
    conv_bias: bool,
    bias: bool,
    norms: tuple[str, float],
) -> MixerSettings:
    """Read a mixer. `names` are the keys of d_state, d_conv, the factor from hidden to d_inner, and dt_rank."""
    fields.require_value("hidden_act", "silu")
    state, conv, expand, rank = names
    inner = fields.get_int(expand, 2, MAX_EXPAND) * hidden
    if inner > MAX_D_INNER:
        raise StartupError(
            f"{expand} times hidden_size in {fields.source} is {inner}", f"At most {MAX_D_INNER} channels"
        )
    auto = fields.config.get(rank) in (None, "auto")
    return MixerSettings(
        hidden=hidden,
        d_inner=inner,
        d_state=fields.get_int(state, 16, MAX_D_STATE),
        d_conv=fields.get_int(conv, 4, MAX_D_CONV, MIN_D_CONV),
        dt_rank=-(-hidden // 16) if auto else fields.get_int(rank, maximum=MAX_DT_RANK),
        conv_bias=conv_bias,
        bias=bias,
        norms=norms[0],
        norm_eps=norms[1],
    )


def _read_heads(fields: ConfigReader, hidden: int, heads: int) -> tuple[int, int]:
    """Return the number of key heads, and the size of a head."""
    kv_heads, head_dim = fields.get_int("num_key_value_heads", 8), fields.get_int("head_dim", hidden // heads)
    if heads % kv_heads:
        raise StartupError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if not head_dim:
        raise StartupError(f"num_attention_heads {heads} is more than the hidden size {hidden}")
    return kv_heads, head_dim


def _periodic_layers(fields: ConfigReader, name: str, layers: int, period: int, offset: int) -> tuple[bool, ...]:
    """Return, for each layer, whether it is one of those that `name`_period and `name`_offset select."""
    period = fields.get_int(f"{name}_period", period, MAX_LAYERS)
    offset = fields.get_int(f"{name}_offset", offset, period - 1, 0)
    if offset >= period:
        raise StartupError(f"{name}_offset {offset} in {fields.source} is not below {name}_period {period}")
    return tuple(layer % period == offset for layer in range(layers))


def _itemsize(config: dict[str, Any]) -> int:
    """Return the bytes of a number in the checkpoint."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    return ITEMSIZES.get(dtype, 4) if isinstance(dtype, str) else 4
