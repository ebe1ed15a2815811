"""The families of models with experts in place of feed-forward blocks, as quire.models.families has those without. No
torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from quire.errors import StartupError, short_repr
from quire.layers.experts_config import SWIGLU_ALPHA, SWIGLU_LIMIT, ExpertsConfig
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import DecoderConfig, LayerConfig
from quire.models.families import LLAMA_NAMES, declare_gated, read_biases
from quire.models.layer_types import (
    FULL,
    LOCAL,
    Windows,
    read_layer_count,
    read_layer_types,
    read_qwen_windows,
    read_window,
    windows_for_types,
)
from quire.models.rope_settings import read_rope
from quire.models.weight_names import WeightNames

MAX_EXPERTS = 1024
QWEN_EXPERT = ("gate_proj", "up_proj", "down_proj")
SHARED_NAMES: WeightNames = {
    "layers.*.experts.shared.gate_up": tuple(f"layers.*.mlp.shared_expert.{x}_proj" for x in ("gate", "up")),
    "layers.*.experts.shared.down": "layers.*.mlp.shared_expert.down_proj",
    "layers.*.experts.shared_gate": "layers.*.mlp.shared_expert_gate",
}


def expert_names(
    block: str, count: int, router: str = "gate", expert: tuple[str, str, str] = QWEN_EXPERT
) -> WeightNames:
    """Return the names of a layer's experts (quire.layers.moe), which are separate modules of `block` in a checkpoint.
    `expert`: the names of an expert's gate, up and down."""
    gate, up, down = expert
    names = [f"layers.*.{block}.experts.{number}" for number in range(count)]
    return {
        "layers.*.experts.router": f"layers.*.{block}.{router}",
        "layers.*.experts.gate_up": tuple(f"{name}.{one}" for name in names for one in (gate, up)),
        "layers.*.experts.down": tuple(f"{name}.{down}" for name in names),
    }


def read_mixtral(fields: ConfigReader) -> DecoderConfig:
    """Mixtral (Jiang et al., 2024): experts in every layer."""
    fields = fields.with_aliases(num_experts="num_local_experts")
    count, window = fields.get_int("num_local_experts", 8, MAX_EXPERTS), fields.get_int("sliding_window", None)
    experts = ExpertsConfig(
        count=count,
        per_token=fields.get_int("num_experts_per_tok", 2, count),
        intermediate=fields.get_int("intermediate_size"),
        intermediate_key="intermediate_size",
        renormalize=True,
    )
    layers = read_layer_count(fields)
    return _declare(
        fields,
        (window,) * layers,
        experts,
        range(layers),
        1e6,
        kv_heads=8,
        norm_eps=fields.get_float("rms_norm_eps", 1e-5),
        weight_names={**LLAMA_NAMES, **expert_names("block_sparse_moe", count, expert=("w1", "w3", "w2"))},
    )


def read_qwen2_moe(fields: ConfigReader) -> DecoderConfig:
    """Qwen1.5-MoE and Qwen2-MoE (Yang et al., 2024): a shared expert beside those that a token chooses."""
    if read_layer_types(fields) is None:  # transformers gives windows to other layers than Qwen2's
        fields.require_value("use_sliding_window", False)
    qkv_bias = fields.get_bool("qkv_bias", True)
    shared = fields.get_int("shared_expert_intermediate_size", 5632)
    return _declare_qwen(fields, read_qwen_windows(fields), (60, 4, 1408), shared, kv_heads=16, qkv_bias=qkv_bias)


def read_qwen3_moe(fields: ConfigReader) -> DecoderConfig:
    """Qwen3-MoE (Yang et al., 2025): queries and keys are normalised per head. If there is a window, every layer has
    it."""
    window = read_window(fields) if fields.get_bool("use_sliding_window", False) else None
    windows = (window,) * read_layer_count(fields)
    return _declare_qwen(fields, windows, (128, 8, 768), 0, kv_heads=4, qk_norm="head", **read_biases(fields))


GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def read_gpt_oss(fields: ConfigReader) -> DecoderConfig:
    """gpt-oss (Agarwal et al., 2025): attention sinks, windows in every second layer, biases everywhere, experts with a
    clamped SwiGLU."""
    for name, value in (("hidden_act", "silu"), ("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        fields.require_value(name, value)
    fields.require_value("pyramid_kv", None)
    fields = fields.with_aliases(num_experts="num_local_experts")
    if not fields.config.get("rope_scaling") and fields.config.get("rope_parameters") is None:
        fields = ConfigReader({**fields.config, "rope_parameters": GPT_OSS_ROPE}, fields.source)
    count, layers = fields.get_int("num_local_experts", 128, MAX_EXPERTS), read_layer_count(fields)
    experts = ExpertsConfig(
        count=count,
        per_token=fields.get_int("num_experts_per_tok", min(4, count), count),
        intermediate=fields.get_int("intermediate_size"),
        intermediate_key="intermediate_size",
        renormalize=True,
        biases=True,
    )
    types = read_layer_types(fields) or tuple(FULL if layer % 2 else LOCAL for layer in range(layers))
    bias = fields.get_bool("attention_bias", True)
    return _declare(
        fields,
        windows_for_types(types, read_window(fields, 128)),
        experts,
        range(layers),
        150_000.0,
        kv_heads=8,
        head_dim=64,
        norm_eps=fields.get_float("rms_norm_eps", 1e-5),
        activation="clamped_swiglu",
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
        stacked_experts=True,
        weight_names={
            **LLAMA_NAMES,
            **expert_names("mlp", count, "router"),
            "layers.*.attention.sinks": "layers.*.self_attn.sinks",
        },
    )


def _declare_qwen(
    fields: ConfigReader, windows: Windows, defaults: tuple[int, int, int], shared: int, **declared: Any
) -> DecoderConfig:
    """Return a Qwen with experts, and `shared` columns of a shared expert. `defaults`: see `read_qwen_experts`."""
    experts = read_qwen_experts(fields, defaults, shared)
    names = {**LLAMA_NAMES, **qwen_expert_names(experts)}
    return _declare(fields, windows, experts, read_sparse_layers(fields), 1e4, weight_names=names, **declared)


def read_qwen_experts(
    fields: ConfigReader, defaults: tuple[int, int, int], shared: int, renormalize: bool = False
) -> ExpertsConfig:
    """Return the experts of a Qwen, with `shared` columns of a shared expert. `defaults`: the number of experts, those
    of a token, and their columns; `renormalize` is a default. Newer configs have `num_local_experts` in place of
    `num_experts`."""
    count = fields.with_aliases(num_local_experts="num_experts").get_int("num_experts", defaults[0], MAX_EXPERTS)
    return ExpertsConfig(
        count=count,
        per_token=fields.get_int("num_experts_per_tok", min(defaults[1], count), count),
        intermediate=fields.get_int("moe_intermediate_size", defaults[2]),
        renormalize=fields.get_bool("norm_topk_prob", renormalize),
        shared_intermediate=shared,
    )


def qwen_expert_names(experts: ExpertsConfig) -> WeightNames:
    """Return the names of a Qwen's experts."""
    return {**expert_names("mlp", experts.count), **SHARED_NAMES}


def read_sparse_layers(fields: ConfigReader) -> set[int]:
    """Return the layers with experts: every `decoder_sparse_step`-th, without those of `mlp_only_layers`."""
    layers, step = read_layer_count(fields), fields.get_int("decoder_sparse_step", 1)
    dense = fields.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < layers for layer in dense):
        raise StartupError(
            f"mlp_only_layers in {fields.source} is {short_repr(dense)}", f"It must list layers from 0 to {layers - 1}"
        )
    return set(range(step - 1, layers, step)).difference(dense)


def _declare(
    fields: ConfigReader, windows: Windows, experts: ExpertsConfig, sparse: Collection[int], theta: float,
    **declared: Any,
) -> DecoderConfig:  # fmt: skip
    """Return a model whose `sparse` layers have experts; `theta` is a default."""
    fields.require_value("kv_sharing", None)
    rope, max_len = read_rope(fields, theta=theta)
    layers = (
        LayerConfig(window, rope=rope, feed_forward="experts" if layer in sparse else "mlp")
        for layer, window in enumerate(windows)
    )
    return declare_gated(fields, layers, max_len, experts=experts if sparse else None, **declared)
