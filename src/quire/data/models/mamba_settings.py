"""What the config.json of a Mamba (Gu and Dao, 2023), a FalconMamba or a Jamba (Lieber et al., 2024) says. No torch.
Defaults are transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from quire.data.models.fields import Fields
from quire.data.models.settings import MAX_LAYERS, refuse_quantised
from quire.errors import StartupError
from quire.vocabulary.layout import WHOLE, Part, check_division
from quire.vocabulary.specs import LayerSpec, ModelSpec, StatePart

MOST_STATE = 256
"""Numbers of a channel's state."""
LEAST_CONV, MOST_CONV = 2, 16
"""Tokens that the convolution sees; all but the last are part of the state."""
MOST_EXPAND = 16
MOST_INNER = 2**20
MOST_RANK = 2**16
MOST_EXPERTS = 1024
MAMBA_LENGTH = 2**20
"""A Mamba has no longest sequence of its own; this is how long quire's may be."""
ITEMSIZES = {"bfloat16": 2, "float16": 2}
STATE_ITEMSIZE = 4
"""Bytes of a number of `ssm`, unless --state-dtype says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerSettings:
    """One Mamba layer's mixer: `inner` channels, of `state` numbers each, a convolution over `conv` tokens, and step
    sizes of rank `rank`. `norms`: step sizes, B and C are normalised, with weights ("learned", Jamba), without
    ("plain", FalconMamba), or not ("none"), with `norm_eps`."""

    hidden: int
    inner: int
    state: int
    conv: int
    rank: int
    conv_bias: bool
    bias: bool
    norms: str
    norm_eps: float

    @property
    def parameters(self) -> int:
        """Weights of it."""
        products = 3 * self.hidden * self.inner + self.bias * (2 * self.inner + self.hidden)
        selection = self.inner * (self.rank + 2 * self.state) + self.inner * (self.rank + 1)
        norms = (self.norms == "learned") * (self.rank + 2 * self.state)
        return products + self.inner * (self.conv + self.conv_bias) + selection + self.inner * (self.state + 1) + norms

    @property
    def wide(self) -> int:
        """Of these, those that are in float32 whatever the model's dtype."""
        return self.inner * (self.state + 2)

    @property
    def widths(self) -> tuple[int, int, int, int, int]:
        """In the order of quire.data.layers.mamba."""
        return self.hidden, self.inner, self.rank, self.state, self.conv

    def of(self, part: Part) -> Self:
        """One rank's shard: its channels."""
        return replace(self, inner=len(part.share(self.inner)))

    def layer(self, itemsize: int) -> LayerSpec:
        """What such a layer keeps, in a model of numbers of `itemsize` bytes."""
        conv = StatePart("conv", (self.inner, self.conv - 1), itemsize)
        return LayerSpec(0, 0, state=(conv, StatePart("ssm", (self.inner, self.state), STATE_ITEMSIZE)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSettings:
    """Mamba and FalconMamba: a norm and a mixer a layer."""

    vocab_size: int
    hidden: int
    layers: int
    mixer: MixerSettings
    norm_eps: float
    tied: bool
    max_len: int
    eos_ids: tuple[int, ...]
    itemsize: int
    part: Part = WHOLE

    @classmethod
    def read(cls, config: dict[str, Any]) -> Self:
        """Raises StartupError for a value that is missing, wrong or not supported."""
        fields = Fields(config)
        refuse_quantised(fields)
        falcon = (config.get("architectures") or [""])[0] == "FalconMambaForCausalLM"
        hidden = fields.size("hidden_size")
        norms = ("plain", fields.number("mixer_rms_eps", 1e-6)) if falcon else ("none", 1e-6)
        return cls(
            vocab_size=fields.size("vocab_size"),
            hidden=hidden,
            layers=fields.size("num_hidden_layers", most=MAX_LAYERS),
            mixer=_mixer(
                fields, hidden, ("state_size", "conv_kernel", "expand", "time_step_rank"),
                fields.flag("use_conv_bias", True), fields.flag("use_bias", False), norms,
            ),
            norm_eps=fields.number("layer_norm_epsilon", 1e-5),
            tied=fields.flag("tie_word_embeddings", True),
            max_len=MAMBA_LENGTH,
            eos_ids=fields.ids("eos_token_id"),
            itemsize=_itemsize(config),
        )  # fmt: skip

    def of(self, part: Part) -> Self:
        """One rank's shard. StartupError if there can't be so many ranks."""
        if self.mixer.inner % part.ranks:
            raise StartupError(
                f"--tp is {part.ranks}, which doesn't divide the model: it has {self.mixer.inner} channels",
                "Use a number that divides them",
            )
        return replace(self, mixer=self.mixer.of(part), part=part)

    @property
    def parameters(self) -> int:
        """Weights of the model, tied ones once."""
        embeddings = (1 if self.tied else 2) * self.part.padded(self.vocab_size) * self.hidden
        return self.layers * (self.mixer.parameters + self.hidden) + self.hidden + embeddings

    def spec(self) -> ModelSpec:
        return ModelSpec(
            family="mamba",
            layers=(self.mixer.layer(self.itemsize),) * self.layers,
            vocab_size=self.vocab_size,
            max_len=self.max_len,
            hidden=self.hidden,
            heads=0,
            intermediate=2 * self.mixer.inner,
            parameters=self.parameters,
            eos_ids=self.eos_ids,
            rotaries=0,
            wide_parameters=self.layers * self.mixer.wide,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JambaSettings:
    """Jamba: Mamba layers with some of attention between them (`attends`, one entry a layer), which have no rotary
    embedding, and a feed-forward block in each, of which some (`sparse`) have `experts`, `active` of them a token."""

    vocab_size: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    mixer: MixerSettings
    attends: tuple[bool, ...]
    sparse: tuple[bool, ...]
    experts: int
    active: int
    tied: bool
    max_len: int
    eos_ids: tuple[int, ...]
    itemsize: int
    part: Part = WHOLE
    qkv_bias: ClassVar[bool] = False
    out_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False
    norm_offset: ClassVar[bool] = False

    @classmethod
    def read(cls, config: dict[str, Any]) -> Self:
        """Raises StartupError for a value that is missing, wrong or not supported."""
        fields = Fields(config)
        refuse_quantised(fields)
        fields.refuse("mamba_inner_layernorms", True)
        fields.refuse("sliding_window", None)
        hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        kv_heads, head_dim = _heads(fields, hidden, heads)
        layers, eps = fields.size("num_hidden_layers", most=MAX_LAYERS), fields.number("rms_norm_eps", 1e-6)
        experts = fields.size("num_experts", 16, MOST_EXPERTS)
        sparse = _every(fields, "expert_layer", layers, 2, 1)
        return cls(
            vocab_size=fields.size("vocab_size"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=fields.size("intermediate_size"),
            norm_eps=eps,
            mixer=_mixer(
                fields, hidden, ("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank"),
                fields.flag("mamba_conv_bias", True), fields.flag("mamba_proj_bias", False), ("learned", eps),
            ),
            attends=_every(fields, "attn_layer", layers, 8, 4),
            sparse=sparse if experts > 1 else (False,) * layers,
            experts=experts,
            active=fields.size("num_experts_per_tok", 2, experts) if experts > 1 else 1,
            tied=fields.flag("tie_word_embeddings", False),
            max_len=fields.size("max_position_embeddings", 262_144),
            eos_ids=fields.ids("eos_token_id"),
            itemsize=_itemsize(config),
        )  # fmt: skip

    def of(self, part: Part) -> Self:
        """One rank's shard. StartupError if there can't be so many ranks."""
        columns = {"intermediate_size": self.intermediate, "mamba_expand times hidden_size": self.mixer.inner}
        check_division(part.ranks, self.heads, self.kv_heads, **columns)
        return replace(
            self,
            heads=self.heads // part.ranks,
            kv_heads=max(self.kv_heads // part.ranks, 1),
            intermediate=self.intermediate // part.ranks,
            mixer=self.mixer.of(part),
            part=part,
        )

    @property
    def parameters(self) -> int:
        """Weights of the model, tied ones once, those of all experts."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * queries + 2 * keys)
        block, sparse = 3 * self.hidden * self.intermediate, sum(self.sparse)
        total = sum(attention if attends else self.mixer.parameters for attends in self.attends)
        total += self.expert_parameters + sparse * self.experts * self.hidden + (len(self.sparse) - sparse) * block
        embeddings = (1 if self.tied else 2) * self.part.padded(self.vocab_size) * self.hidden
        return total + len(self.attends) * 2 * self.hidden + self.hidden + embeddings

    @property
    def expert_parameters(self) -> int:
        """Of these, those of all experts; routers aren't among them."""
        return sum(self.sparse) * self.experts * 3 * self.hidden * self.intermediate

    def spec(self) -> ModelSpec:
        state, attention = self.mixer.layer(self.itemsize), LayerSpec(self.kv_heads, self.head_dim)
        active = self.active if any(self.sparse) else 1
        return ModelSpec(
            family="jamba",
            layers=tuple(attention if attends else state for attends in self.attends),
            vocab_size=self.vocab_size,
            max_len=self.max_len,
            hidden=self.hidden,
            heads=self.heads,
            intermediate=max(active * self.intermediate, 2 * self.mixer.inner),
            parameters=self.parameters,
            eos_ids=self.eos_ids,
            rotaries=0,
            experts=self.experts if any(self.sparse) else 0,
            active_experts=self.active if any(self.sparse) else 0,
            expert_parameters=self.expert_parameters,
            wide_parameters=self.attends.count(False) * self.mixer.wide,
        )


def _mixer(
    fields: Fields, hidden: int, names: tuple[str, str, str, str], conv_bias: bool, bias: bool, norms: tuple[str, float]
) -> MixerSettings:
    """`names` are those of the state's size, the convolution's, the factor from `hidden` to `inner`, and the rank."""
    fields.refuse("hidden_act", "silu")
    state, conv, expand, rank = names
    inner = fields.size(expand, 2, MOST_EXPAND) * hidden
    if inner > MOST_INNER:
        raise StartupError(f"{expand} times hidden_size in {fields.where} is {inner}", f"At most {MOST_INNER} channels")
    auto = fields.config.get(rank) in (None, "auto")
    return MixerSettings(
        hidden=hidden,
        inner=inner,
        state=fields.size(state, 16, MOST_STATE),
        conv=fields.size(conv, 4, MOST_CONV, LEAST_CONV),
        rank=-(-hidden // 16) if auto else fields.size(rank, most=MOST_RANK),
        conv_bias=conv_bias,
        bias=bias,
        norms=norms[0],
        norm_eps=norms[1],
    )


def _heads(fields: Fields, hidden: int, heads: int) -> tuple[int, int]:
    """Heads of keys, and the size of a head."""
    kv_heads, head_dim = fields.size("num_key_value_heads", 8), fields.size("head_dim", hidden // heads)
    if heads % kv_heads:
        raise StartupError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if not head_dim:
        raise StartupError(f"num_attention_heads {heads} is more than the hidden size {hidden}")
    return kv_heads, head_dim


def _every(fields: Fields, name: str, layers: int, period: int, offset: int) -> tuple[bool, ...]:
    """Which layers are those that `name`_period and `name`_offset mean."""
    period = fields.size(f"{name}_period", period, MAX_LAYERS)
    offset = fields.size(f"{name}_offset", offset, period - 1, 0)
    if offset >= period:
        raise StartupError(f"{name}_offset {offset} in {fields.where} is not below {name}_period {period}")
    return tuple(layer % period == offset for layer in range(layers))


def _itemsize(config: dict[str, Any]) -> int:
    """Bytes of a number in the checkpoint."""
    said = config.get("dtype") or config.get("torch_dtype")
    return ITEMSIZES.get(said, 4) if isinstance(said, str) else 4
