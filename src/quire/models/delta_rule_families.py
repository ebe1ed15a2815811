"""The families of models with the gated delta rule in most layers and gated attention in the others, as
quire.models.families has those of attention alone: Qwen3-Next and Qwen3.5. No torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from quire.errors import StartupError
from quire.layers.experts_config import ExpertsConfig
from quire.layers.state_config import DeltaRuleConfig
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import MAX_LAYERS, DecoderConfig, LayerConfig
from quire.models.expert_families import qwen_expert_names, read_qwen_experts, read_sparse_layers
from quire.models.families import LLAMA_NAMES, declare_gated, read_biases, text_section
from quire.models.layer_types import FULL, read_layer_count, read_layer_types
from quire.models.rope_settings import read_rope
from quire.models.state_families import ITEMSIZES, MAX_D_CONV, MIN_D_CONV
from quire.models.weight_names import DELTA_RULE_NAMES, WeightNames, prefixed

LINEAR = "linear_attention"
"""The layer type of layers with the gated delta rule."""
MAX_HEAD_DIM, MAX_HEADS = 256, 2**12
"""Limits of the heads of the gated delta rule."""
THEIR_MIXER = "layers.*.linear_attn."
GATED_NAMES: WeightNames = {
    **LLAMA_NAMES,
    "layers.*.attention.qkv": tuple(f"layers.*.self_attn.{x}_proj" for x in "qqkv"),
}
NAMES: WeightNames = {**GATED_NAMES, **prefixed("layers.*.mixer", THEIR_MIXER, DELTA_RULE_NAMES)}
QWEN3_NEXT_NAMES: WeightNames = {
    **NAMES,
    "layers.*.mixer.in_proj": f"{THEIR_MIXER}in_proj_qkvz",
    "layers.*.mixer.ba_proj": f"{THEIR_MIXER}in_proj_ba",
}
QWEN3_5_NAMES: WeightNames = {
    **NAMES,
    "layers.*.mixer.in_proj": tuple(f"{THEIR_MIXER}in_proj_{x}" for x in ("qkv", "qkv", "qkv", "z")),
    "layers.*.mixer.ba_proj": tuple(f"{THEIR_MIXER}in_proj_{x}" for x in "ba"),
}


def read_qwen3_next(fields: ConfigReader) -> DecoderConfig:
    """Qwen3-Next (Qwen team, 2025): experts and a shared one in all layers, or those of `decoder_sparse_step` and
    `mlp_only_layers`."""
    experts, sparse = read_qwen3_next_experts(fields), read_sparse_layers(fields)
    inner = fields.get_int("intermediate_size", 5632)
    return _declare(fields, experts if sparse else None, sparse, QWEN3_NEXT_NAMES, kv_heads=2, intermediate=inner)


def read_qwen3_next_experts(fields: ConfigReader) -> ExpertsConfig:
    """Return the experts of a Qwen3-Next."""
    shared = fields.get_int("shared_expert_intermediate_size", 512)
    return read_qwen_experts(fields, (512, 10, 512), shared, renormalize=True)


def read_qwen3_5(fields: ConfigReader) -> DecoderConfig:
    """Qwen3.5 (Qwen team, 2026)."""
    return _declare(fields, None, (), QWEN3_5_NAMES, kv_heads=4)


def read_qwen3_5_moe(fields: ConfigReader) -> DecoderConfig:
    """Qwen3.5 with experts and a shared one in all layers."""
    experts, sparse = read_qwen3_5_experts(fields), range(read_layer_count(fields))
    return _declare(fields, experts, sparse, QWEN3_5_NAMES, kv_heads=2, intermediate=experts.intermediate)


def read_qwen3_5_experts(fields: ConfigReader) -> ExpertsConfig:
    """Return the experts of a Qwen3.5."""
    fields.require_value("norm_topk_prob", True)
    shared = fields.get_int("shared_expert_intermediate_size", 512)
    return read_qwen_experts(fields, (256, 8, 512), shared, renormalize=True)


def read_qwen3_5_with_vision(fields: ConfigReader) -> DecoderConfig:
    """The text model of a Qwen3.5 with a vision tower."""
    return read_qwen3_5(text_section(fields, {}, tied=False))


def read_qwen3_5_moe_with_vision(fields: ConfigReader) -> DecoderConfig:
    """The text model of a Qwen3.5 with experts and a vision tower."""
    return read_qwen3_5_moe(text_section(fields, {}, tied=False))


def _declare(
    fields: ConfigReader, experts: ExpertsConfig | None, sparse: Collection[int], names: WeightNames, **declared: Any
) -> DecoderConfig:
    """Return a model whose `sparse` layers have experts. Unless there are `layer_types`, every
    `full_attention_interval`-th layer has attention. Rotary embeddings of several axes (`mrope_section`) rotate text as
    one of one axis does."""
    fields.require_value("hidden_act", "silu")
    fields.require_value("kv_sharing", None)
    fields.require_value("pyramid_kv", None)
    fields.require_value("use_sliding_window", False)
    rope, max_len = read_rope(fields, partial=default_rotation(fields))
    count, interval = read_layer_count(fields), fields.get_int("full_attention_interval", 4, MAX_LAYERS)
    types = read_layer_types(fields, (FULL, LINEAR))
    attends = range(interval - 1, count, interval) if types is None else [i for i in range(count) if types[i] == FULL]
    layers = (
        LayerConfig(
            rope=rope if layer in attends else None,
            mixer="attention" if layer in attends else "state",
            feed_forward="experts" if layer in sparse else "mlp",
        )
        for layer in range(count)
    )
    return declare_gated(
        fields,
        layers,
        max_len,
        **read_gated_attention(fields),
        state_mixer=_read_mixer(fields) if len(attends) < count else None,
        experts=experts,
        weight_names=names if experts is None else {**names, **qwen_expert_names(experts)},
        weight_prefixes=("model.language_model.", "model."),
        ignored_weights=(r"mtp\..*", r"visual\..*"),
        **declared,
    )


def default_rotation(fields: ConfigReader) -> float:
    """Return the part of a head that is rotated if partial_rotary_factor has no number: a quarter if it is absent, 1 if
    it is null."""
    return 1.0 if "partial_rotary_factor" in fields.config else 0.25


def read_gated_attention(fields: ConfigReader) -> dict[str, Any]:
    """Return what these families declare of their attention, and of all norms."""
    fields.require_value("attn_output_gate", True)
    declared = {"head_dim": 256, "norm_offset": True, "qk_norm": "head", "attention_gate": True}
    return {**declared, **read_biases(fields)}


def _read_mixer(fields: ConfigReader) -> DeltaRuleConfig:
    keys, heads = (fields.get_int(f"linear_num_{x}_heads", n, MAX_HEADS) for x, n in (("key", 16), ("value", 32)))
    if heads % keys:
        raise StartupError(
            f"linear_num_value_heads {heads} in {fields.source} is not a multiple of linear_num_key_heads {keys}",
            "linear_num_key_heads must divide it",
        )
    dtype: Any = fields.config.get("dtype") or fields.config.get("torch_dtype")
    return DeltaRuleConfig(
        hidden=fields.get_int("hidden_size"),
        key_heads=keys,
        heads=heads,
        key_dim=fields.get_int("linear_key_head_dim", 128, MAX_HEAD_DIM),
        value_dim=fields.get_int("linear_value_head_dim", 128, MAX_HEAD_DIM),
        taps=fields.get_int("linear_conv_kernel_dim", 4, MAX_D_CONV, MIN_D_CONV),
        norm_eps=fields.get_float("rms_norm_eps", 1e-6),
        itemsize=ITEMSIZES.get(dtype, 4) if isinstance(dtype, str) else 4,
    )
