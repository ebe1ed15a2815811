"""Gemma-4 (Google, 2026), as quire.models.families has other families: from its config.json to the declaration of its
model. No torch.

Layers that attend to all tokens have larger heads than those with a window, and perhaps fewer key heads, whose product
also makes the values; rotation there is proportional. The last layers may read the keys and values of earlier ones.
Experts work beside a dense block.
"""

from __future__ import annotations

from typing import Any

from quire.errors import StartupError, short_repr
from quire.layers.experts_config import ExpertsConfig
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import MAX_LAYERS, DecoderConfig, LayerConfig
from quire.models.expert_families import MAX_EXPERTS
from quire.models.families import (
    declare_gated,
    post_norm_names,
    read_biases,
    read_ropes_of_types,
    read_softcap,
    text_section,
)
from quire.models.layer_types import FULL, LOCAL, read_layer_count, read_layer_types, windows_for_types
from quire.models.weight_names import WeightNames

TEXT_DEFAULTS = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "max_position_embeddings": 131_072,
}  # fmt: skip
ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
"""The default rotary embedding of layers that attend to all tokens."""
FULL_ATTENTION_KEYS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""The sizes of layers that attend to all tokens: their keys in newer configs' `per_layer_config`, and in the others."""
IMAGE_ENCODER = r"(vision_tower|embed_vision)\..*"
AUDIO_ENCODER = r"(audio_tower|embed_audio)\..*"


def read_gemma4_text(fields: ConfigReader) -> DecoderConfig:
    """Read the text model of a Gemma-4 whose config.json has encoders of images or audio too. These are not read."""
    return read_gemma4(text_section(fields, TEXT_DEFAULTS, tied=True))


def read_gemma4(fields: ConfigReader) -> DecoderConfig:
    """The text model of a Gemma-4."""
    if fields.config.get("use_bidirectional_attention") not in (None, False, "vision"):
        fields.require_value("use_bidirectional_attention", None)
    for key in ("pyramid_kv", "kv_sharing", "rope_scaling"):
        fields.require_value(key, None)
    layers = _read_layers(fields)
    experts, dim = _read_experts(fields), "hidden_size_per_layer_input"
    per_layer_dim = fields.get_int(dim, 0 if dim in fields.config else 256, minimum=0)  # null is 0, as in transformers
    return declare_gated(
        fields,
        [layer._replace(feed_forward="mlp" if experts is None else "both") for layer in layers],
        fields.get_int("max_position_embeddings"),
        kv_heads=4,
        head_dim=256,
        tied=True,
        family="gemma",
        activation=fields.get_activation("hidden_activation", "gelu_pytorch_tanh"),
        post_norms=True,
        qk_norm="head",
        v_norm=True,
        layer_scales=True,
        experts=experts,
        per_layer_dim=per_layer_dim,
        per_layer_vocab=_read_per_layer_vocab(fields) if per_layer_dim else 0,
        **read_biases(fields),
        scale=1.0,
        final_softcap=read_softcap(fields, "final_logit_softcapping", None),
        embed_scale=fields.get_int("hidden_size") ** 0.5,
        weight_names=_weight_names(layers, 0 if experts is None else experts.count, per_layer_dim),
        weight_prefixes=("model.language_model.", "language_model.model.", "language_model.", "model."),
        ignored_weights=(IMAGE_ENCODER, AUDIO_ENCODER, *_shared_weights(layers)),
    )


def _read_layers(fields: ConfigReader) -> list[LayerConfig]:
    """Return the layers, with the sizes of those that attend to all tokens where these differ."""
    count, ropes = read_layer_count(fields), read_ropes_of_types(fields, ROPE)
    types = read_layer_types(fields) or tuple(FULL if layer % 6 == 0 else LOCAL for layer in range(1, count + 1))
    if types[-1] != FULL:
        raise StartupError(f"the last of layer_types in {fields.source} is {types[-1]}", f"It must be {FULL}")
    windows = windows_for_types(types, fields.get_int("sliding_window", 512))
    keys_are_values = fields.get_bool("attention_k_eq_v", False)
    owners = _read_kv_sharing(fields, types)
    wide = fields.get_int("intermediate_size") * 2 if fields.get_bool("use_double_wide_mlp", False) else None
    layers = []
    for layer, (name, window, owner) in enumerate(zip(types, windows, owners)):
        kind = LayerConfig(window, None, owner, ropes[name], intermediate=wide if owner is not None else None)
        if name == FULL:
            head_dim, kv_heads = _read_full_sizes(fields, layer)
            kind = kind._replace(
                head_dim=head_dim, kv_heads=kv_heads, keys_are_values=keys_are_values and owner is None
            )
        layers.append(kind)
    return layers


def _read_full_sizes(fields: ConfigReader, layer: int) -> tuple[int, int | None]:
    """Return the head size and the number of key heads (None: as other layers) of a layer that attends to all
    tokens."""
    overrides = fields.config.get("per_layer_config")
    if overrides is None:
        keys = FULL_ATTENTION_KEYS
        has_kv_heads, sizes = fields.get_bool("attention_k_eq_v", False), fields
    else:
        keys = dict(zip(FULL_ATTENTION_KEYS, FULL_ATTENTION_KEYS))
        has_kv_heads, sizes = True, _read_overrides(fields).get(layer, ConfigReader({}))
    head_dim = sizes.get_int(keys["head_dim"], 512 if overrides is None else fields.get_int("head_dim", 256))
    kv_heads = sizes.get_int(keys["num_key_value_heads"], None) if has_kv_heads else None
    heads = fields.get_int("num_attention_heads")
    if head_dim % 2:
        raise StartupError(f"{keys['head_dim']} in {sizes.source} is {head_dim}", "It must be even")
    if kv_heads is not None and heads % kv_heads:
        raise StartupError(
            f"num_attention_heads {heads} in {fields.source} is not a multiple of {keys['num_key_value_heads']} "
            f"{kv_heads}",
            f"{keys['num_key_value_heads']} must divide it",
        )
    return head_dim, kv_heads


def _read_overrides(fields: ConfigReader) -> dict[int, ConfigReader]:
    """Return the sizes in `per_layer_config`, by layer."""
    section, count, types = fields.get_object("per_layer_config"), read_layer_count(fields), read_layer_types(fields)
    found = {}
    for name in section:
        layer = int(name) if name.isdecimal() and len(name) <= len(str(MAX_LAYERS)) else count
        where = f"per_layer_config of {fields.source}"
        options = ConfigReader(section, where).get_object(name)
        full = layer < count and (types is None or types[layer] == FULL)
        if not full or not options.keys() <= FULL_ATTENTION_KEYS.keys():
            raise StartupError(
                f"{where} has {short_repr(name)}: {short_repr(options)}",
                f"Supported: {' and '.join(FULL_ATTENTION_KEYS)} of layers with {FULL}",
            )
        found[layer] = ConfigReader(options, f"{where}, layer {layer}")
    return found


def _read_kv_sharing(fields: ConfigReader, types: tuple[str, ...]) -> list[int | None]:
    """Return for each layer the one whose keys and values it reads, or None: the last `num_kv_shared_layers` layers
    read those of the last layer of their type before them."""
    count, shared = len(types), fields.get_int("num_kv_shared_layers", 0, minimum=0)
    own = types[: max(count - shared, 0)]
    if not set(types) <= set(own):
        raise StartupError(
            f"num_kv_shared_layers in {fields.source} is {shared}, of {count} layers",
            "The layers before them must include one of each type that layer_types names",
        )
    last = {name: max(layer for layer, other in enumerate(own) if other == name) for name in own}
    return [None if layer < len(own) else last[name] for layer, name in enumerate(types)]


def _read_experts(fields: ConfigReader) -> ExpertsConfig | None:
    if not fields.get_bool("enable_moe_block", False):
        return None
    count = fields.get_int("num_experts", maximum=MAX_EXPERTS)
    return ExpertsConfig(
        count=count,
        per_token=fields.get_int("top_k_experts", maximum=count),
        intermediate=fields.get_int("moe_intermediate_size"),
        renormalize=True,
        scaled=True,
    )


def _read_per_layer_vocab(fields: ConfigReader) -> int:
    rows, tokens = fields.get_int("vocab_size_per_layer_input", 262_144), fields.get_int("vocab_size")
    if rows < tokens:
        raise StartupError(
            f"vocab_size_per_layer_input in {fields.source} is {rows}, and vocab_size {tokens}",
            "It must be at least as large",
        )
    return int(rows)


def _weight_names(layers: list[LayerConfig], experts: int, per_layer_dim: int) -> WeightNames:
    last_norm = "post_per_layer_input_norm" if per_layer_dim else "post_feedforward_layernorm"
    names: dict[str, Any] = {
        **post_norm_names(len(layers), last_norm),
        "layers.*.feed_forward_sum.post_norm": "layers.*.post_feedforward_layernorm",
        "layers.*.gate": "layers.*.per_layer_input_gate",
        "layers.*.project": "layers.*.per_layer_projection",
        "input_table": "embed_tokens_per_layer",
        "input_product": "per_layer_model_projection",
        "input_norm": "per_layer_projection_norm",
        "layers.*.mlp_norm": "layers.*.pre_feedforward_layernorm",
        "norm.sum_scale": f"layers.{len(layers) - 1}.layer_scalar",
        "layers.*.experts.router": "layers.*.router.proj",
        "layers.*.experts.expert_scale": "layers.*.router.per_expert_scale",
        "layers.*.experts.gate_up": tuple(
            f"layers.*.experts.{expert}.{name}_proj" for expert in range(experts) for name in ("gate", "up")
        ),
        "layers.*.experts.down": tuple(f"layers.*.experts.{expert}.down_proj" for expert in range(experts)),
        "layers.*.router_norm.weight": "layers.*.router.scale",
        "layers.*.experts_norm": "layers.*.pre_feedforward_layernorm_2",
        "layers.*.mlp_post_norm": "layers.*.post_feedforward_layernorm_1",
        "layers.*.experts_sum.post_norm": "layers.*.post_feedforward_layernorm_2",
    }
    for number, layer in enumerate(layers):
        if number:
            names[f"layers.{number}.attention_norm.sum_scale"] = f"layers.{number - 1}.layer_scalar"
        projections = "q" if layer.kv_sharing_layer is not None else "qk" if layer.keys_are_values else ""
        if projections:
            names[f"layers.{number}.attention.qkv"] = tuple(f"layers.{number}.self_attn.{x}_proj" for x in projections)
    return names


def _shared_weights(layers: list[LayerConfig]) -> list[str]:
    """Return the tensors that a checkpoint may have for layers that read the keys and values of others."""
    sharing = [number for number, layer in enumerate(layers) if layer.kv_sharing_layer is not None]
    return [rf"layers\.{number}\.self_attn\.[kv]_(proj|norm)\..*" for number in sharing]
