"""Settings of the Llama, OPT and GPT-2 families, read from config.json, and derived sizes (layers, parameters).

No torch: memory plans and simulations read a model's spec without building it. Defaults are transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from quire.errors import StartupError
from quire.layers.rope_config import RopeConfig
from quire.models.attention_kinds import AttentionKind, read_attention_kinds, read_layer_types
from quire.models.config_reader import ConfigReader
from quire.models.pyramid_kv import read_budgets
from quire.models.quantization import REMEDY, read_checkpoint_scheme
from quire.models.rope_settings import read_rope
from quire.protocol.model_spec import LayerSpec, ModelSpec, SnapKVSelection
from quire.protocol.parallel_layout import UNSHARDED, Shard, check_tp_division

MAX_LAYERS = 4096
WEIGHT_FORMATS = {"InternLM2ForCausalLM": "internlm2", "Phi3ForCausalLM": "phi3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSettings:
    """LLaMA and its relatives. `attention_kinds` has one entry per layer; `max_len` includes the rope scaling.
    `weight_format` is the checkpoint's naming and stacking of weights, empty for LLaMA's. In a shard, here and below,
    heads, `intermediate` and `parameters` are those of the shard."""

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
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    rope: RopeConfig
    attention_kinds: tuple[AttentionKind, ...]
    budgets: tuple[int | None, ...]
    selection: SnapKVSelection
    max_len: int
    eos_ids: tuple[int, ...]
    weight_format: str = ""
    shard: Shard = UNSHARDED
    norm_offset: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Read a config.json. Raise StartupError for a value that is missing, wrong or not supported."""
        fields = ConfigReader(config)
        check_quantization(fields)
        architecture = (config.get("architectures") or ["LlamaForCausalLM"])[0]
        qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
        weight_format = WEIGHT_FORMATS.get(architecture, "")
        if weight_format == "internlm2":
            fields.require_value("bias", False)
        hidden, heads = fields.get_int("hidden_size"), fields.get_int("num_attention_heads")
        kv_heads, head_dim = read_heads(fields, heads, heads, 128 if qwen3 else hidden // heads)
        rope, max_len = read_rope(fields, fields.get_int("max_position_embeddings"), architecture == "Phi3ForCausalLM")
        rotary_dim = rope.rotary_dim(head_dim)
        if rotary_dim % 2 or not rotary_dim:
            raise StartupError(
                f"partial_rotary_factor {rope.partial_rotary_factor} rotates {rotary_dim} of {head_dim} dimensions",
                "The number must be even and above 0",
            )
        if rope.kind == "longrope" and len(rope.short_factors) != rotary_dim // 2:
            raise StartupError(
                f"short_factor and long_factor have {len(rope.short_factors)} numbers",
                f"They must have {rotary_dim // 2}",
            )
        layers = fields.get_int("num_hidden_layers", maximum=MAX_LAYERS)
        kinds = _read_attention_kinds(fields, architecture, layers, max_len)
        budgets, selection = read_budgets(fields, layers, max_len)
        if any(budgets) and any(kind != AttentionKind() for kind in kinds):
            raise StartupError(
                "config.json has pyramid_kv, and layers that share keys and values or don't attend to all tokens",
                "Give one of them",
            )
        bias = fields.get_bool("attention_bias", False) and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        return cls(
            vocab_size=fields.get_int("vocab_size"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=fields.get_int("intermediate_size"),
            activation=fields.get_str("hidden_act", "silu"),
            norm_eps=fields.get_float("rms_norm_eps", 1e-6),
            qkv_bias=bias or qwen2,
            out_bias=bias,
            mlp_bias=fields.get_bool("mlp_bias", False) and architecture == "LlamaForCausalLM",
            qk_norm=qwen3,
            tied=fields.get_bool("tie_word_embeddings", False),
            rope=rope,
            attention_kinds=kinds,
            budgets=budgets,
            selection=selection,
            max_len=max_len,
            eos_ids=fields.get_token_ids("eos_token_id"),
            weight_format=weight_format,
        )

    def for_shard(self, shard: Shard) -> Self:
        """Return one rank's settings. Raise StartupError if the model can't be divided among that many ranks."""
        check_tp_division(shard.tp_size, self.heads, self.kv_heads, intermediate_size=self.intermediate)
        if any(self.budgets) and shard.tp_size > self.kv_heads:  # a key head selects tokens by all its query heads
            raise StartupError(
                f"--tp is {shard.tp_size}, and pyramid_kv of config.json needs whole key heads: there are "
                f"{self.kv_heads}",
                f"Use a --tp of at most {self.kv_heads}",
            )
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
        attention = 2 * self.hidden * queries + self.qkv_bias * queries + self.out_bias * self.hidden
        attention += self.qk_norm * 2 * self.head_dim
        kv_layers = sum(kind.kv_sharing_layer is None for kind in self.attention_kinds)
        keys_values = kv_layers * 2 * keys * (self.hidden + self.qkv_bias)
        mlp = 3 * self.hidden * self.intermediate + self.mlp_bias * (2 * self.intermediate + self.hidden)
        layer = attention + mlp + 2 * self.hidden
        embeddings = (1 if self.tied else 2) * self.shard.padded_vocab_rows(self.vocab_size) * self.hidden
        return len(self.attention_kinds) * layer + keys_values + self.hidden + embeddings

    def spec(self) -> ModelSpec:
        return ModelSpec(
            family="llama",
            layers=tuple(
                LayerSpec(self.kv_heads, self.head_dim, window, chunk=chunk, kv_source_layer=shares, budget=budget)
                for (window, chunk, shares), budget in zip(self.attention_kinds, self.budgets)
            ),
            vocab_size=self.vocab_size,
            max_len=self.max_len,
            hidden=self.hidden,
            heads=self.heads,
            intermediate=self.intermediate,
            parameters=self.parameters,
            eos_ids=self.eos_ids,
            selection=self.selection,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OPTSettings:
    """OPT. opt-350m has an `embed_dim` other than `hidden`, and norms after each block (`norm_before` is False)."""

    vocab_size: int
    embed_dim: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    activation: str
    bias: bool
    norm_before: bool
    final_norm: bool
    tied: bool
    max_len: int
    eos_ids: tuple[int, ...]
    shard: Shard = UNSHARDED

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Read a config.json. Raise StartupError for a value that is missing, wrong or not supported."""
        fields = ConfigReader(config)
        check_quantization(fields)
        fields.require_value("layer_norm_elementwise_affine", True)
        hidden, norm_before = fields.get_int("hidden_size"), fields.get_bool("do_layer_norm_before", True)
        return cls(
            vocab_size=fields.get_int("vocab_size"),
            embed_dim=fields.get_int("word_embed_proj_dim", hidden),
            hidden=hidden,
            layers=fields.get_int("num_hidden_layers", maximum=MAX_LAYERS),
            heads=_read_head_count(fields, "num_attention_heads", hidden),
            intermediate=fields.get_int("ffn_dim"),
            activation=fields.get_str("activation_function", "relu"),
            bias=fields.get_bool("enable_bias", True),
            norm_before=norm_before,
            final_norm=norm_before and not fields.get_bool("_remove_final_layer_norm", False),
            tied=fields.get_bool("tie_word_embeddings", True),
            max_len=fields.get_int("max_position_embeddings"),
            eos_ids=fields.get_token_ids("eos_token_id"),
        )

    def for_shard(self, shard: Shard) -> Self:
        """Return one rank's settings. Raise StartupError if the model can't be divided among that many ranks."""
        check_tp_division(shard.tp_size, self.heads, self.heads, ffn_dim=self.intermediate)
        heads, intermediate = self.heads // shard.tp_size, self.intermediate // shard.tp_size
        return replace(self, heads=heads, intermediate=intermediate, shard=shard)

    @property
    def head_dim(self) -> int:
        return self.hidden // (self.heads * self.shard.tp_size)

    @property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        h, ffn, queries = self.hidden, self.intermediate, self.heads * self.head_dim
        layer = 4 * h * queries + 2 * h * ffn + self.bias * (3 * queries + 2 * h + ffn) + 4 * h
        embeddings = (1 if self.tied else 2) * self.shard.padded_vocab_rows(self.vocab_size) * self.embed_dim
        embeddings += (self.max_len + 2) * h
        projections = 2 * h * self.embed_dim if self.embed_dim != h else 0
        return self.layers * layer + embeddings + projections + self.final_norm * 2 * h

    def spec(self) -> ModelSpec:
        return ModelSpec(
            family="opt",
            layers=(LayerSpec(self.heads, self.head_dim),) * self.layers,
            vocab_size=self.vocab_size,
            max_len=self.max_len,
            hidden=self.hidden,
            heads=self.heads,
            intermediate=self.intermediate,
            parameters=self.parameters,
            eos_ids=self.eos_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Settings:
    """GPT-2, and GPT-3 by its dimensions."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    activation: str
    norm_eps: float
    tied: bool
    max_len: int
    eos_ids: tuple[int, ...]
    shard: Shard = UNSHARDED

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Read a config.json. Raise StartupError for a value that is missing, wrong or not supported."""
        fields = ConfigReader(config)
        if read_checkpoint_scheme(config):
            raise StartupError("quantised checkpoints of GPT-2 are not supported: their weights are transposed", REMEDY)
        fields.require_value("scale_attn_weights", True)
        fields.require_value("scale_attn_by_inverse_layer_idx", False)
        fields.require_value("add_cross_attention", False)
        hidden = fields.get_int("n_embd")
        return cls(
            vocab_size=fields.get_int("vocab_size"),
            hidden=hidden,
            layers=fields.get_int("n_layer", maximum=MAX_LAYERS),
            heads=_read_head_count(fields, "n_head", hidden),
            intermediate=fields.get_int("n_inner", 4 * hidden),
            activation=fields.get_str("activation_function", "gelu_new"),
            norm_eps=fields.get_float("layer_norm_epsilon", 1e-5),
            tied=fields.get_bool("tie_word_embeddings", True),
            max_len=fields.get_int("n_positions"),
            eos_ids=fields.get_token_ids("eos_token_id"),
        )

    def for_shard(self, shard: Shard) -> Self:
        """Return one rank's settings. Raise StartupError if the model can't be divided among that many ranks."""
        check_tp_division(shard.tp_size, self.heads, self.heads, n_inner=self.intermediate)
        heads, intermediate = self.heads // shard.tp_size, self.intermediate // shard.tp_size
        return replace(self, heads=heads, intermediate=intermediate, shard=shard)

    @property
    def head_dim(self) -> int:
        return self.hidden // (self.heads * self.shard.tp_size)

    @property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        h, ffn, queries = self.hidden, self.intermediate, self.heads * self.head_dim
        layer = 4 * h * queries + 3 * queries + h + 2 * h * ffn + ffn + h + 4 * h
        embeddings = (1 if self.tied else 2) * self.shard.padded_vocab_rows(self.vocab_size) * h + self.max_len * h
        return self.layers * layer + embeddings + 2 * h

    def spec(self) -> ModelSpec:
        return ModelSpec(
            family="gpt2",
            layers=(LayerSpec(self.heads, self.head_dim),) * self.layers,
            vocab_size=self.vocab_size,
            max_len=self.max_len,
            hidden=self.hidden,
            heads=self.heads,
            intermediate=self.intermediate,
            parameters=self.parameters,
            eos_ids=self.eos_ids,
        )


def read_heads(fields: ConfigReader, heads: int, kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Return the number of key heads and the head size, for `heads` query heads; `kv_heads`, `head_dim`: defaults."""
    kv_heads, head_dim = fields.get_int("num_key_value_heads", kv_heads), fields.get_int("head_dim", head_dim)
    if heads % kv_heads:
        raise StartupError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2 or not head_dim:
        raise StartupError(f"head_dim must be even for rotary embeddings, got {head_dim}")
    return kv_heads, head_dim


def _read_attention_kinds(
    fields: ConfigReader, architecture: str, layers: int, max_len: int
) -> tuple[AttentionKind, ...]:
    """Return each layer's attention kind. None of Llama's relatives has layers that share keys and values."""
    if architecture == "LlamaForCausalLM":
        return read_attention_kinds(fields, layers)
    fields.require_value("kv_sharing", None)
    if architecture == "Phi3ForCausalLM":
        window = fields.get_int("sliding_window", None)
        return (AttentionKind(None if window is None or window >= max_len else window),) * layers
    return tuple(AttentionKind(window) for window in read_windows(fields, architecture, layers))


def read_windows(fields: ConfigReader, architecture: str, layers: int) -> tuple[int | None, ...]:
    """Return each layer's sliding window. Mistral's is the same for all layers. The layers that have one are given by
    `layer_types` (Mistral, Ministral, Qwen), or by Qwen's max_window_layers."""
    types = read_layer_types(fields, layers)
    if architecture in ("MistralForCausalLM", "MinistralForCausalLM"):
        window = read_window(fields)
        if types is None:
            return (window,) * layers
    else:
        window = fields.get_int("sliding_window", 4096) if fields.get_bool("use_sliding_window", False) else None
    if types is None:
        first = fields.config.get("max_window_layers", 28)
        return tuple(window if isinstance(first, int) and layer >= first else None for layer in range(layers))
    return windows_for_types(types, window)


def read_window(fields: ConfigReader) -> int | None:
    """Return `sliding_window`: 4,096 if it is absent, None if it is null."""
    window: int | None = fields.get_int("sliding_window", None if "sliding_window" in fields.config else 4096)
    return window


def windows_for_types(types: tuple[str, ...], window: int | None) -> tuple[int | None, ...]:
    """Return each layer's window, from its type."""
    if "sliding_attention" in types and window is None:
        raise StartupError("layer_types has sliding_attention, but there is no sliding window")
    return tuple(window if name == "sliding_attention" else None for name in types)


def _read_head_count(fields: ConfigReader, name: str, hidden: int) -> int:
    heads: int = fields.get_int(name)
    if hidden % heads:
        raise StartupError(f"the hidden size {hidden} is not a multiple of {name} {heads}")
    return heads


def check_quantization(fields: ConfigReader) -> None:
    """Raise StartupError for a quantization_config that isn't supported."""
    read_checkpoint_scheme(fields.config)
