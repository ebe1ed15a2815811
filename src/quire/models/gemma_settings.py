"""Settings of Gemma-2 and of Gemma-3's text model. No torch. Defaults are transformers'."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from quire.errors import StartupError, short_repr
from quire.layers.rope_config import RopeConfig
from quire.models.attention_kinds import LAYER_TYPES, read_layer_types
from quire.models.config_reader import ConfigReader
from quire.models.rope_settings import read_rope, read_rope_section
from quire.models.settings import MAX_LAYERS, check_quantization, read_heads, read_window, windows_for_types
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.parallel_layout import UNSHARDED, Shard, check_tp_division

FULL, LOCAL = LAYER_TYPES
TEXT_DEFAULTS = {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "intermediate_size": 9216,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaSettings:
    """Gemma-2 and Gemma-3. `ropes` and `windows` have one entry per layer. `scale` multiplies products of queries and
    keys, `softcap` bounds them, `final_softcap` bounds logits."""

    vocab_size: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    activation: str
    norm_eps: float
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    tied: bool
    scale: float
    softcap: float | None
    final_softcap: float | None
    ropes: tuple[RopeConfig, ...]
    windows: tuple[int | None, ...]
    max_len: int
    eos_ids: tuple[int, ...]
    shard: Shard = UNSHARDED
    norm_offset: ClassVar[bool] = True

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Read a config.json. Raise StartupError for a value that is missing, wrong or not supported."""
        check_quantization(ConfigReader(config))
        name = (config.get("architectures") or [""])[0]
        fields, third = ConfigReader(config), name != "Gemma2ForCausalLM"
        if name == "Gemma3ForConditionalGeneration":
            fields = read_gemma3_text(fields)
        fields.require_value("use_bidirectional_attention", False)
        if third:
            fields.require_value("attn_logit_softcapping", None)
        heads, bias = fields.get_int("num_attention_heads"), fields.get_bool("attention_bias", False)
        kv_heads, head_dim = read_heads(fields, heads, 4, 256)
        types, max_len = read_gemma_layer_types(fields, third), fields.get_int("max_position_embeddings")
        ropes = read_ropes(fields, max_len) if third else dict.fromkeys(LAYER_TYPES, read_rope(fields, max_len)[0])
        return cls(
            vocab_size=fields.get_int("vocab_size"),
            hidden=fields.get_int("hidden_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=fields.get_int("intermediate_size"),
            activation=fields.get_str("hidden_activation", "gelu_pytorch_tanh"),
            norm_eps=fields.get_float("rms_norm_eps", 1e-6),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=third,
            tied=fields.get_bool("tie_word_embeddings", True),
            scale=fields.get_float("query_pre_attn_scalar", 256.0) ** -0.5,
            softcap=None if third else _read_softcap(fields, "attn_logit_softcapping", 50.0),
            final_softcap=_read_softcap(fields, "final_logit_softcapping", None if third else 30.0),
            ropes=tuple(ropes[name] for name in types),
            windows=windows_for_types(types, read_window(fields)),
            max_len=max_len,
            eos_ids=fields.get_token_ids("eos_token_id"),
        )

    def for_shard(self, shard: Shard) -> Self:
        """Return one rank's settings. Raise StartupError if the model can't be divided among that many ranks."""
        check_tp_division(shard.tp_size, self.heads, self.kv_heads, intermediate_size=self.intermediate)
        return replace(
            self,
            heads=self.heads // shard.tp_size,
            kv_heads=max(self.kv_heads // shard.tp_size, 1),
            intermediate=self.intermediate // shard.tp_size,
            shard=shard,
        )

    @property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (queries + 2 * keys) + queries * self.hidden
        attention += self.qkv_bias * (queries + 2 * keys) + self.out_bias * self.hidden
        attention += self.qk_norm * 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + 4 * self.hidden
        embeddings = (1 if self.tied else 2) * self.shard.padded_vocab_rows(self.vocab_size) * self.hidden
        return len(self.windows) * layer + self.hidden + embeddings

    def spec(self) -> ModelSpec:
        layer = LayerSpec(self.kv_heads, self.head_dim, scale=self.scale, softcap=self.softcap)
        return ModelSpec(
            family="gemma",
            layers=tuple(replace(layer, window=window) for window in self.windows),
            vocab_size=self.vocab_size,
            max_len=self.max_len,
            hidden=self.hidden,
            heads=self.heads,
            intermediate=self.intermediate,
            parameters=self.parameters,
            eos_ids=self.eos_ids,
            num_rope_tables=len(set(self.ropes)),
        )


def read_gemma3_text(fields: ConfigReader) -> ConfigReader:
    """Return the text config of a Gemma-3 with a vision tower, with transformers' defaults. tie_word_embeddings is read
    from the outer config."""
    tied = fields.config.get("tie_word_embeddings")
    outer = {} if tied is None else {"tie_word_embeddings": tied}
    return ConfigReader(
        {**TEXT_DEFAULTS, **fields.get_object("text_config"), **outer}, f"text_config of {fields.source}"
    )


def read_gemma_layer_types(fields: ConfigReader, third: bool) -> tuple[str, ...]:
    """Return each layer's type: that of `layer_types`; by default every second layer attends to all tokens, in Gemma-3
    every sixth, or as `sliding_window_pattern` says."""
    layers = fields.get_int("num_hidden_layers", maximum=MAX_LAYERS)
    period = fields.get_int("sliding_window_pattern", 6) if third else 2
    usual = tuple(LOCAL if layer % period else FULL for layer in range(1, layers + 1))
    return read_layer_types(fields, layers) or usual


def read_ropes(fields: ConfigReader, max_len: int) -> dict[str, RopeConfig]:
    """Return Gemma-3's rotary embedding for each type of layer. `rope_parameters` has an object per type; older configs
    have `rope_local_base_freq`, and for layers that attend to all tokens `rope_theta` and `rope_scaling`. Either way
    `max_len` is the length after scaling."""
    section, scaling = fields.get_object("rope_parameters"), fields.get_object("rope_scaling")
    if not all(name in LAYER_TYPES for name in section):
        raise StartupError(
            f"rope_parameters in {fields.source} must be an object for each type of layers, got {short_repr(section)}",
            f"The types are {' and '.join(LAYER_TYPES)}",
        )
    types = ConfigReader(section, f"rope_parameters of {fields.source}")
    full = ConfigReader(types.get_object(FULL) | scaling, f"the rope of {FULL} in {fields.source}")
    local = ConfigReader(types.get_object(LOCAL), f"the rope of {LOCAL} in {fields.source}")
    thetas = fields.get_float("rope_theta", 1e6), fields.get_float("rope_local_base_freq", 1e4)
    ropes = (read_rope_section(fields, rope, max_len, theta)[0] for rope, theta in zip((full, local), thetas))
    return dict(zip((FULL, LOCAL), ropes))


def _read_softcap(fields: ConfigReader, name: str, default: float | None) -> float | None:
    """Return a bound: `default` if it is absent, None if it is null."""
    cap: float | None = fields.get_float(name, None if name in fields.config else default)
    return cap
