"""What the config.json of a Gemma-2 or of the text of a Gemma-3 says. No torch. Defaults are transformers'."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from quire.data.layers.rope import Rope
from quire.data.models.fields import Fields
from quire.data.models.layer_kinds import LAYER_TYPES, read_layer_types
from quire.data.models.rope_settings import read_rope, read_rope_section
from quire.data.models.settings import (
    MAX_LAYERS,
    read_heads,
    read_window,
    refuse_quantised,
    windows_of,
)
from quire.errors import StartupError, shown
from quire.vocabulary.layout import WHOLE, Part, check_division
from quire.vocabulary.specs import LayerSpec, ModelSpec

FULL, LOCAL = LAYER_TYPES
TEXT = {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "intermediate_size": 9216,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaSettings:
    """Gemma-2 and Gemma-3. `ropes` and `windows` have one entry a layer. `scale` multiplies products of queries and
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
    ropes: tuple[Rope, ...]
    windows: tuple[int | None, ...]
    max_len: int
    eos_ids: tuple[int, ...]
    part: Part = WHOLE
    norm_offset: ClassVar[bool] = True

    @classmethod
    def read(cls, config: dict[str, Any]) -> Self:
        """Raises StartupError for a value that is missing, wrong or not supported."""
        refuse_quantised(Fields(config))
        name = (config.get("architectures") or [""])[0]
        fields, third = Fields(config), name != "Gemma2ForCausalLM"
        if name == "Gemma3ForConditionalGeneration":
            fields = read_text_config(fields)
        fields.refuse("use_bidirectional_attention", False)
        if third:
            fields.refuse("attn_logit_softcapping", None)
        heads, bias = fields.size("num_attention_heads"), fields.flag("attention_bias", False)
        kv_heads, head_dim = read_heads(fields, heads, 4, 256)
        types, max_len = read_types(fields, third), fields.size("max_position_embeddings")
        ropes = read_ropes(fields, max_len) if third else dict.fromkeys(LAYER_TYPES, read_rope(fields, max_len)[0])
        return cls(
            vocab_size=fields.size("vocab_size"),
            hidden=fields.size("hidden_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=fields.size("intermediate_size"),
            activation=fields.text("hidden_activation", "gelu_pytorch_tanh"),
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=third,
            tied=fields.flag("tie_word_embeddings", True),
            scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
            softcap=None if third else _softcap(fields, "attn_logit_softcapping", 50.0),
            final_softcap=_softcap(fields, "final_logit_softcapping", None if third else 30.0),
            ropes=tuple(ropes[name] for name in types),
            windows=windows_of(types, read_window(fields)),
            max_len=max_len,
            eos_ids=fields.ids("eos_token_id"),
        )

    def of(self, part: Part) -> Self:
        """One rank's shard. StartupError if there can't be so many ranks."""
        check_division(part.ranks, self.heads, self.kv_heads, intermediate_size=self.intermediate)
        return replace(
            self,
            heads=self.heads // part.ranks,
            kv_heads=max(self.kv_heads // part.ranks, 1),
            intermediate=self.intermediate // part.ranks,
            part=part,
        )

    @property
    def parameters(self) -> int:
        """Weights of the model, tied ones once."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (queries + 2 * keys) + queries * self.hidden
        attention += self.qkv_bias * (queries + 2 * keys) + self.out_bias * self.hidden
        attention += self.qk_norm * 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + 4 * self.hidden
        embeddings = (1 if self.tied else 2) * self.part.padded(self.vocab_size) * self.hidden
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
            rotaries=len(set(self.ropes)),
        )


def read_text_config(fields: Fields) -> Fields:
    """The text of a Gemma-3 that reads pictures too, whose config may leave out anything that is as transformers has
    it. Whether the head is tied is said of the whole."""
    tied = fields.config.get("tie_word_embeddings")
    more = {} if tied is None else {"tie_word_embeddings": tied}
    return Fields({**TEXT, **fields.section("text_config"), **more}, f"text_config of {fields.where}")


def read_types(fields: Fields, third: bool) -> tuple[str, ...]:
    """Each layer's type: every second layer attends to all, of Gemma-3 every sixth, unless `layer_types`, or of Gemma-3
    `sliding_window_pattern`, says otherwise."""
    layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    period = fields.size("sliding_window_pattern", 6) if third else 2
    usual = tuple(LOCAL if layer % period else FULL for layer in range(1, layers + 1))
    return read_layer_types(fields, layers) or usual


def read_ropes(fields: Fields, max_len: int) -> dict[str, Rope]:
    """Gemma-3's rotary embedding for each type of layers. `rope_parameters` holds an object a type; older configs have
    `rope_local_base_freq`, and for layers that attend to all `rope_theta` and `rope_scaling`. Either way `max_len` is
    the length behind a scaling, not the one before it."""
    section, scaling = fields.section("rope_parameters"), fields.section("rope_scaling")
    if not all(name in LAYER_TYPES for name in section):
        raise StartupError(
            f"rope_parameters in {fields.where} must be an object for each type of layers, got {shown(section)}",
            f"The types are {' and '.join(LAYER_TYPES)}",
        )
    types = Fields(section, f"rope_parameters of {fields.where}")
    full = Fields(types.section(FULL) | scaling, f"the rope of {FULL} in {fields.where}")
    local = Fields(types.section(LOCAL), f"the rope of {LOCAL} in {fields.where}")
    thetas = fields.number("rope_theta", 1e6), fields.number("rope_local_base_freq", 1e4)
    found = (read_rope_section(fields, rope, max_len, theta)[0] for rope, theta in zip((full, local), thetas))
    return dict(zip((FULL, LOCAL), found))


def _softcap(fields: Fields, name: str, default: float | None) -> float | None:
    """A bound: `default` where it is absent, none where it is null."""
    cap: float | None = fields.number(name, None if name in fields.config else default)
    return cap
