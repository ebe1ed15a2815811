"""The families of text models: for each a function from its config.json to the declaration of its model, registered in
quire.models.architectures. Defaults are transformers'. No torch.

The functions raise StartupError for a value that is missing, wrong or not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from quire.errors import StartupError, short_repr
from quire.layers.rope_config import RopeConfig
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import MAX_LAYERS, DecoderConfig, LayerConfig
from quire.models.layer_types import (
    FULL,
    LAYER_TYPES,
    LOCAL,
    Windows,
    read_layer_count,
    read_layer_types,
    read_llama_layers,
    read_mistral_windows,
    read_no_windows,
    read_qwen_windows,
    read_window,
    windows_for_types,
)
from quire.models.pyramid_kv import read_budgets
from quire.models.quantization import REMEDY, read_checkpoint_scheme
from quire.models.rope_settings import read_rope, read_rope_section
from quire.models.weight_names import WeightNames

LLAMA_NAMES: WeightNames = {
    "embed_tokens": "embed_tokens",
    "layers.*.attention_norm": "layers.*.input_layernorm",
    "layers.*.attention.qkv": tuple(f"layers.*.self_attn.{x}_proj" for x in "qkv"),
    "layers.*.attention.q_norm": "layers.*.self_attn.q_norm",
    "layers.*.attention.k_norm": "layers.*.self_attn.k_norm",
    "layers.*.attention.out": "layers.*.self_attn.o_proj",
    "layers.*.mlp_norm": "layers.*.post_attention_layernorm",
    "layers.*.mlp.gate_up": ("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"),
    "layers.*.mlp.down": "layers.*.mlp.down_proj",
    "norm": "norm",
    "head": "lm_head",
}
INTERNLM2_NAMES: WeightNames = {
    "embed_tokens": "tok_embeddings",
    "layers.*.attention_norm": "layers.*.attention_norm",
    "layers.*.attention.qkv": "layers.*.attention.wqkv",
    "layers.*.attention.out": "layers.*.attention.wo",
    "layers.*.mlp_norm": "layers.*.ffn_norm",
    "layers.*.mlp.gate_up": ("layers.*.feed_forward.w1", "layers.*.feed_forward.w3"),
    "layers.*.mlp.down": "layers.*.feed_forward.w2",
    "norm": "norm",
    "head": "output",
}
PHI3_NAMES: WeightNames = {
    **LLAMA_NAMES,
    "layers.*.attention.qkv": "layers.*.self_attn.qkv_proj",
    "layers.*.mlp.gate_up": "layers.*.mlp.gate_up_proj",
}


def post_norm_names(layers: int, last: str = "post_feedforward_layernorm") -> WeightNames:
    """Return the names of a model with post norms. Each is part of the norm that follows: of the `last` block of a
    layer these are the next layer's and the final one."""
    theirs = f"layers.{{}}.{last}".format
    return {
        **LLAMA_NAMES,
        "layers.*.mlp_norm.post_norm": "layers.*.post_attention_layernorm",
        **{f"layers.{i + 1}.attention_norm.post_norm": theirs(i) for i in range(layers - 1)},
        "norm.post_norm": theirs(layers - 1),
    }


def declare(fields: ConfigReader, **declared: Any) -> DecoderConfig:
    """Return the model with the keys that all families share, and with what is `declared`."""
    read_checkpoint_scheme(fields.config)  # raises StartupError for one that isn't supported
    if fields.config.get("is_causal", True) is not True:  # transformers takes a null for false
        raise StartupError(
            f"is_causal in {fields.source} is {short_repr(fields.config['is_causal'])}",
            "Only models whose tokens attend to earlier ones alone are supported",
        )
    return DecoderConfig(
        vocab_size=fields.get_int("vocab_size"),
        eos_ids=fields.get_token_ids("eos_token_id"),
        **{"embed_dim": declared["hidden"], **declared},
    )


def declare_gated(
    fields: ConfigReader, layers: Iterable[LayerConfig], max_len: int, *, kv_heads: int | None = None,
    head_dim: int | None = None, tied: bool = False, **declared: Any,
) -> DecoderConfig:  # fmt: skip
    """Return a model with the keys that Llama's relatives share. `kv_heads`, `head_dim` and `tied` are defaults; others
    are those of Llama."""
    hidden, heads = fields.get_int("hidden_size"), fields.get_int("num_attention_heads")
    kv_heads, head_dim = read_heads(fields, heads, kv_heads or heads, head_dim or hidden // heads)
    if head_dim % 2 or not head_dim:
        raise StartupError(
            f"head_dim in {fields.source} is {head_dim}, and rotary embeddings rotate pairs of numbers",
            "It must be even and above 0",
        )
    layers = tuple(layers)
    budgets, selection = read_budgets(fields, len(layers), max_len)
    if any(budgets) and any(layer != LayerConfig(rope=layer.rope, feed_forward=layer.feed_forward) for layer in layers):
        raise StartupError(
            "config.json has pyramid_kv, and layers that share keys and values or don't attend to all tokens",
            "Give one of them",
        )
    values = {
        "family": "llama",
        "activation": fields.get_activation("hidden_act", "silu"),
        "intermediate": declared.get("intermediate") or fields.get_int("intermediate_size"),
        "tied": fields.get_bool("tie_word_embeddings", tied),
        "norm_eps": fields.get_float("rms_norm_eps", 1e-6),
        "weight_names": LLAMA_NAMES,
    }
    config = declare(
        fields,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_len=max_len,
        layers=tuple(layer._replace(budget=budget) for layer, budget in zip(layers, budgets)),
        selection=selection,
        **(values | declared),
    )
    for rope, rotated_dim in config.rope_tables:
        _check_rope(rope, rotated_dim)
    return config


def declare_windowed(
    fields: ConfigReader, read_windows: Callable[[ConfigReader], Windows], **declared: Any
) -> DecoderConfig:
    """As `declare_gated`, for layers that differ at most in their windows."""
    fields.require_value("kv_sharing", None)
    rope, max_len = read_rope(fields)
    layers = (LayerConfig(window, rope=rope) for window in read_windows(fields))
    return declare_gated(fields, layers, max_len, **declared)


def read_biases(fields: ConfigReader) -> dict[str, bool]:
    """Return whether all products of the attention have biases."""
    bias = fields.get_bool("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias}


def read_llama(fields: ConfigReader) -> DecoderConfig:
    """LLaMA (Touvron et al., 2023) with grouped-query attention."""
    rope, max_len = read_rope(fields)
    layers = read_llama_layers(fields, rope)
    sharing = [number for number, layer in enumerate(layers) if layer.kv_sharing_layer is not None]
    return declare_gated(
        fields,
        layers,
        max_len,
        **read_biases(fields),
        mlp_bias=fields.get_bool("mlp_bias", False),
        weight_names={**LLAMA_NAMES, **{f"layers.{i}.attention.qkv": f"layers.{i}.self_attn.q_proj" for i in sharing}},
        ignored_weights=tuple(rf"layers\.{i}\.self_attn\.[kv]_proj\..*" for i in sharing),
    )


def read_mistral(fields: ConfigReader) -> DecoderConfig:
    """Mistral (Jiang et al., 2023) and Ministral: a sliding window in all layers, or in those of `layer_types`."""
    return declare_windowed(fields, read_mistral_windows, kv_heads=8)


def read_qwen2(fields: ConfigReader) -> DecoderConfig:
    """Qwen2 (Yang et al., 2024): biases of queries, keys and values."""
    return declare_windowed(fields, read_qwen_windows, kv_heads=32, qkv_bias=True)


def read_mimo(fields: ConfigReader) -> DecoderConfig:
    """MiMo-7B (Xiaomi, 2025): a Qwen2 whose checkpoint has layers for multi-token prediction (see
    quire.models.head_config)."""
    ignored = (r"mtp_layers\..*",)
    return declare_windowed(fields, read_qwen_windows, kv_heads=32, qkv_bias=True, ignored_weights=ignored)


def read_qwen3(fields: ConfigReader) -> DecoderConfig:
    """Qwen3 (Yang et al., 2025): queries and keys are normalised per head."""
    biases = read_biases(fields)
    return declare_windowed(fields, read_qwen_windows, kv_heads=32, head_dim=128, qk_norm="head", **biases)


def read_internlm2(fields: ConfigReader) -> DecoderConfig:
    """InternLM2 (Cai et al., 2024). Its `wqkv` has, for each key head, its query heads, the key head, and the value
    head."""
    fields.require_value("bias", False)
    return declare_windowed(fields, read_qwen_windows, grouped_qkv=True, weight_names=INTERNLM2_NAMES)


def read_phi3(fields: ConfigReader) -> DecoderConfig:
    """Phi-3 (Abdin et al., 2024): stacked weights, LongRoPE, heads that may be rotated in part."""
    fields.require_value("kv_sharing", None)
    fields = ConfigReader({"original_max_position_embeddings": 4096, **fields.config}, fields.source)
    rope, max_len = read_rope(fields, partial=1.0, longrope_names=("longrope", "su", "yarn"))
    window = fields.get_int("sliding_window", None)
    layer = LayerConfig(None if window is None or window >= max_len else window, rope=rope)
    eps = fields.get_float("rms_norm_eps", 1e-5)
    return declare_gated(fields, [layer] * read_layer_count(fields), max_len, norm_eps=eps, weight_names=PHI3_NAMES)


def read_smollm3(fields: ConfigReader) -> DecoderConfig:
    """SmolLM3 (Bakouche et al., 2025): some layers, every fourth by default, have no rotary embedding (NoPE), and a
    window if there is one. `no_rope_layers` has 1 for each layer that has a rotary embedding, and 0 for others."""
    fields.require_value("kv_sharing", None)
    rope, max_len = read_rope(fields, theta=2e6)
    count, interval = read_layer_count(fields), fields.get_int("no_rope_layer_interval", 4)
    rotated = fields.config.get("no_rope_layers")
    if rotated is None:
        rotated = [(layer + 1) % interval != 0 for layer in range(count)]
    if not isinstance(rotated, list) or len(rotated) < count or not all(x in (0, 1) for x in rotated[:count]):
        raise StartupError(
            f"no_rope_layers is {short_repr(rotated)}", f"It must list 0 or 1 for each of {count} layers"
        )
    window = fields.get_int("sliding_window", None) if fields.get_bool("use_sliding_window", False) else None
    types = read_layer_types(fields) or tuple(FULL if x or window is None else LOCAL for x in rotated[:count])
    windows, mlp_bias = windows_for_types(types, window), fields.get_bool("mlp_bias", False)
    layers = (LayerConfig(window, rope=rope if x else None) for window, x in zip(windows, rotated))
    return declare_gated(fields, layers, max_len, kv_heads=4, tied=True, mlp_bias=mlp_bias, **read_biases(fields))


def read_olmo2(fields: ConfigReader) -> DecoderConfig:
    """OLMo 2 (Walsh et al., 2025): x += norm(f(x)); queries and keys are normalised over all heads together."""
    fields.require_value("clip_qkv", None)
    return declare_windowed(
        fields,
        read_no_windows,
        norm_eps=fields.get_float("rms_norm_eps", 1e-5),
        pre_norms=False,
        post_norms=True,
        qk_norm="projection",
        **read_biases(fields),
        weight_names=post_norm_names(read_layer_count(fields)),
    )


GEMMA3_TEXT_DEFAULTS = {
    "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "intermediate_size": 9216,
    "vocab_size": 262_208, "max_position_embeddings": 131_072,
}  # fmt: skip


def read_gemma2(fields: ConfigReader) -> DecoderConfig:
    """Gemma-2 (Riviere et al., 2024): norms before and after each block, soft caps on scores and logits, a sliding
    window in every second layer."""
    ropes = dict.fromkeys(LAYER_TYPES, read_rope(fields)[0])
    return _declare_gemma(fields, ropes, 2, 30.0, softcap=read_softcap(fields, "attn_logit_softcapping", 50.0))


def read_gemma3(fields: ConfigReader) -> DecoderConfig:
    """The text model of Gemma-3 (Kamath et al., 2025): normalised queries and keys instead of the cap on scores, five
    layers with a window to each without, and a separate rotary embedding for those with one."""
    fields.require_value("attn_logit_softcapping", None)
    period = fields.get_int("sliding_window_pattern", 6)
    return _declare_gemma(fields, read_ropes_of_types(fields), period, None, qk_norm="head")


def read_gemma3_text(fields: ConfigReader) -> DecoderConfig:
    """The text model of a Gemma-3 with a vision tower."""
    text = text_section(fields, GEMMA3_TEXT_DEFAULTS, tied=True)
    text.require_value("final_logit_softcapping", None)  # transformers ignores it here
    return read_gemma3(text)


def text_section(fields: ConfigReader, defaults: dict[str, Any], tied: bool) -> ConfigReader:
    """Return a reader of the text_config of a model with a vision tower, with `defaults` of absent keys.
    tie_word_embeddings is read from the outer config, with the default `tied`."""
    read_checkpoint_scheme(fields.config)
    outer = {"tie_word_embeddings": fields.get_bool("tie_word_embeddings", tied)}
    return ConfigReader({**defaults, **fields.get_object("text_config"), **outer}, f"text_config of {fields.source}")


def _declare_gemma(
    fields: ConfigReader, ropes: dict[str, RopeConfig], period: int, final_softcap: float | None, **declared: Any
) -> DecoderConfig:
    """Return a Gemma with one of `ropes` for each type of layer. Unless there are `layer_types`, every layer that is a
    multiple of `period` attends to all tokens. `final_softcap` is a default. max_position_embeddings is the length
    after scaling."""
    fields.require_value("use_bidirectional_attention", False)
    fields.require_value("pyramid_kv", None)
    count = read_layer_count(fields)
    types = read_layer_types(fields) or tuple(LOCAL if layer % period else FULL for layer in range(1, count + 1))
    windows = windows_for_types(types, read_window(fields))
    return declare_gated(
        fields,
        (LayerConfig(window, rope=ropes[name]) for window, name in zip(windows, types)),
        fields.get_int("max_position_embeddings"),
        kv_heads=4,
        head_dim=256,
        tied=True,
        family="gemma",
        activation=fields.get_activation("hidden_activation", "gelu_pytorch_tanh"),
        norm_offset=True,
        post_norms=True,
        **read_biases(fields),
        scale=fields.get_float("query_pre_attn_scalar", 256.0) ** -0.5,
        final_softcap=read_softcap(fields, "final_logit_softcapping", final_softcap),
        embed_scale=fields.get_int("hidden_size") ** 0.5,
        weight_names={**post_norm_names(count), "layers.*.mlp_norm": "layers.*.pre_feedforward_layernorm"},
        weight_prefixes=("model.language_model.", "language_model.model.", "language_model.", "model."),
        ignored_weights=(r"(vision_tower|multi_modal_projector)\..*",),
        **declared,
    )


def read_ropes_of_types(fields: ConfigReader, default: dict[str, Any] | None = None) -> dict[str, RopeConfig]:
    """Return the rotary embedding of each type of layer. `rope_parameters` has an object per type; older configs of
    Gemma-3 have `rope_local_base_freq`, and for layers that attend to all tokens `rope_theta` and `rope_scaling`.
    `default`: the object for these if config.json has none."""
    section, scaling = fields.get_object("rope_parameters"), fields.get_object("rope_scaling")
    if not all(name in LAYER_TYPES for name in section):
        raise StartupError(
            f"rope_parameters in {fields.source} must be an object for each type of layers, got {short_repr(section)}",
            f"The types are {' and '.join(LAYER_TYPES)}",
        )
    types = ConfigReader(section, f"rope_parameters of {fields.source}")
    given = types.get_object(FULL) or default or {}
    full = ConfigReader(given | scaling, f"the rope of {FULL} in {fields.source}")
    local = ConfigReader(types.get_object(LOCAL), f"the rope of {LOCAL} in {fields.source}")
    for rope in (full, local):
        rope.require_value("truncate", True)  # transformers doesn't read it here
    thetas = fields.get_float("rope_theta", 1e6), fields.get_float("rope_local_base_freq", 1e4)
    max_len = fields.get_int("max_position_embeddings")
    ropes = (read_rope_section(fields, rope, max_len, theta)[0] for rope, theta in zip((full, local), thetas))
    return dict(zip((FULL, LOCAL), ropes))


def read_softcap(fields: ConfigReader, name: str, default: float | None) -> float | None:
    """Return a bound: `default` if it is absent, None if it is null."""
    cap: float | None = fields.get_float(name, None if name in fields.config else default)
    return cap


def read_heads(fields: ConfigReader, heads: int, kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Return the number of key heads and the head size, for `heads` query heads. `kv_heads` and `head_dim` are the
    defaults of absent keys. As in transformers, a null num_key_value_heads means `heads`."""
    kv_heads = heads if "num_key_value_heads" in fields.config else kv_heads
    kv_heads, head_dim = fields.get_int("num_key_value_heads", kv_heads), fields.get_int("head_dim", head_dim)
    if heads % kv_heads:
        raise StartupError(
            f"num_attention_heads {heads} in {fields.source} is not a multiple of num_key_value_heads {kv_heads}",
            "num_key_value_heads must divide it",
        )
    return kv_heads, head_dim


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    """Raise StartupError unless the rotary embedding fits a head of that size."""
    rotary_dim = rope.rotary_dim(head_dim)
    if rotary_dim % 2 or not rotary_dim:
        raise StartupError(
            f"partial_rotary_factor {rope.partial_rotary_factor} rotates {rotary_dim} numbers of head_dim {head_dim}",
            "The number must be even and above 0",
        )
    if rope.kind == "longrope" and len(rope.short_factors) != rotary_dim // 2:
        raise StartupError(
            f"short_factor and long_factor have {len(rope.short_factors)} numbers", f"They must have {rotary_dim // 2}"
        )


OPT_POSITION_OFFSET = 2
"""The first rows of the position table, which are never used."""
OPT_NAMES: WeightNames = {
    "embed_tokens": "embed_tokens",
    "positions": "embed_positions",
    "project_in": "project_in",
    "project_out": "project_out",
    "layers.*.attention_norm": "layers.*.self_attn_layer_norm",
    "layers.*.attention.qkv": tuple(f"layers.*.self_attn.{x}_proj" for x in "qkv"),
    "layers.*.attention.out": "layers.*.self_attn.out_proj",
    "layers.*.mlp_norm": "layers.*.final_layer_norm",
    "layers.*.mlp.up": "layers.*.fc1",
    "layers.*.mlp.down": "layers.*.fc2",
    "norm": "final_layer_norm",
    "head": "lm_head",
}
GPT2_NAMES: WeightNames = {
    "embed_tokens": "wte",
    "positions": "wpe",
    "layers.*.attention_norm": "h.*.ln_1",
    "layers.*.attention.qkv": "h.*.attn.c_attn",
    "layers.*.attention.out": "h.*.attn.c_proj",
    "layers.*.mlp_norm": "h.*.ln_2",
    "layers.*.mlp.up": "h.*.mlp.c_fc",
    "layers.*.mlp.down": "h.*.mlp.c_proj",
    "norm": "ln_f",
    "head": "lm_head",
}


def read_opt(fields: ConfigReader) -> DecoderConfig:
    """OPT (Zhang et al., 2022). opt-350m has smaller embeddings, and norms after each block: x = norm(x + f(x))."""
    fields.require_value("layer_norm_elementwise_affine", True)
    hidden, norm_before = fields.get_int("hidden_size"), fields.get_bool("do_layer_norm_before", True)
    heads, max_len = _read_head_count(fields, "num_attention_heads", hidden), fields.get_int("max_position_embeddings")
    bias = fields.get_bool("enable_bias", True)
    return declare(
        fields,
        family="opt",
        hidden=hidden,
        embed_dim=fields.get_int("word_embed_proj_dim", hidden),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=fields.get_int("ffn_dim"),
        intermediate_key="ffn_dim",
        activation=fields.get_activation("activation_function", "relu"),
        gated=False,
        norm_eps=1e-5,
        layer_norm=True,
        pre_norms=norm_before,
        post_norms=not norm_before,
        final_norm=norm_before and not fields.get_bool("_remove_final_layer_norm", False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied=fields.get_bool("tie_word_embeddings", True),
        layers=(LayerConfig(),) * fields.get_int("num_hidden_layers", maximum=MAX_LAYERS),
        max_len=max_len,
        positions=max_len + OPT_POSITION_OFFSET,
        position_offset=OPT_POSITION_OFFSET,
        weight_names=OPT_NAMES,
        weight_prefixes=("model.decoder.", "decoder."),
    )


def read_gpt2(fields: ConfigReader) -> DecoderConfig:
    """GPT-2 (Radford et al., 2019), and GPT-3 by its dimensions. Checkpoints may hold causal masks."""
    if read_checkpoint_scheme(fields.config):
        raise StartupError("quantised checkpoints of GPT-2 are not supported: their weights are transposed", REMEDY)
    fields = fields.with_aliases(
        hidden_size="n_embd", max_position_embeddings="n_positions", num_attention_heads="n_head",
        num_hidden_layers="n_layer",
    )  # fmt: skip
    fields.require_value("scale_attn_weights", True)
    fields.require_value("scale_attn_by_inverse_layer_idx", False)
    fields.require_value("add_cross_attention", False)
    hidden = fields.get_int("n_embd")
    heads, max_len = _read_head_count(fields, "n_head", hidden), fields.get_int("n_positions")
    return declare(
        fields,
        family="gpt2",
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=fields.get_int("n_inner", 4 * hidden),
        intermediate_key="n_inner",
        activation=fields.get_activation("activation_function", "gelu_new"),
        gated=False,
        norm_eps=fields.get_float("layer_norm_epsilon", 1e-5),
        layer_norm=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=fields.get_bool("tie_word_embeddings", True),
        layers=(LayerConfig(),) * fields.get_int("n_layer", maximum=MAX_LAYERS),
        max_len=max_len,
        positions=max_len,
        weight_names=GPT2_NAMES,
        weight_prefixes=("transformer.",),
        ignored_weights=(r"h\.\d+\.attn\.(masked_)?bias",),
        transposed_weights=r"\.(attention|mlp)\.",
    )


def _read_head_count(fields: ConfigReader, name: str, hidden: int) -> int:
    heads: int = fields.get_int(name)
    if hidden % heads:
        raise StartupError(
            f"the hidden size {hidden} in {fields.source} is not a multiple of {name} {heads}", f"{name} must divide it"
        )
    return heads
