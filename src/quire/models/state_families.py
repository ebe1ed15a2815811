"""The families of models with layers that keep a running state, as quire.models.families has others. No torch."""

from __future__ import annotations

import math
from typing import Any

from quire.errors import StartupError, short_repr
from quire.layers.experts_config import ExpertsConfig
from quire.layers.state_config import Mamba2Config, MambaConfig, ShortConvConfig
from quire.models.config_reader import MAX_NUMBER, MAX_SIZE, ConfigReader
from quire.models.decoder_config import MAX_LAYERS, DecoderConfig, LayerConfig
from quire.models.expert_families import MAX_EXPERTS, expert_names
from quire.models.families import LLAMA_NAMES, declare, declare_gated, read_biases, read_heads
from quire.models.layer_types import FULL, read_layer_count, read_layer_types
from quire.models.rope_settings import read_rope
from quire.models.weight_names import MAMBA_NAMES, WeightNames, prefixed

MAX_D_STATE = 256
"""Limit of the size of a channel's state."""
MIN_D_CONV, MAX_D_CONV = 2, 16
"""Limits of the convolution's width in tokens; all but the last are part of the state."""
MAX_EXPAND = 16
MAX_D_INNER = 2**20
MAX_DT_RANK = 2**16
MAMBA_MAX_LEN = 2**20
"""quire's limit of a sequence's length: the architecture has none."""
ITEMSIZES = {"bfloat16": 2, "float16": 2}

MAMBA_MODEL_NAMES: WeightNames = {
    "embed_tokens": "embeddings",
    "layers.*.attention_norm": "layers.*.norm",
    **prefixed("layers.*.mixer", "layers.*.mixer.", MAMBA_NAMES),
    "norm": "norm_f",
    "head": "lm_head",
}
MAMBA2_NAMES: WeightNames = {
    "conv_weight": "conv1d.weight", "conv_bias": "conv1d.bias", "norm_weight": "norm.weight", "in_proj": "in_proj",
    "out": "out_proj", **{name: name for name in ("dt_bias", "A_log", "D")},
}  # fmt: skip
"""The names of a Mamba-2 layer's mixer (quire.layers.mamba2)."""
MAMBA2_MODEL_NAMES: WeightNames = {**MAMBA_MODEL_NAMES, **prefixed("layers.*.mixer", "layers.*.mixer.", MAMBA2_NAMES)}
JAMBA_NAMES: WeightNames = {
    "embed_tokens": "embed_tokens",
    "layers.*.attention_norm": "layers.*.input_layernorm",
    "layers.*.attention.qkv": tuple(f"layers.*.self_attn.{x}_proj" for x in "qkv"),
    "layers.*.attention.out": "layers.*.self_attn.o_proj",
    **prefixed("layers.*.mixer", "layers.*.mamba.", MAMBA_NAMES),
    "layers.*.mlp_norm": "layers.*.pre_ff_layernorm",
    "layers.*.mlp.gate_up": tuple(f"layers.*.feed_forward.{x}_proj" for x in ("gate", "up")),
    "layers.*.mlp.down": "layers.*.feed_forward.down_proj",
    "norm": "final_layernorm",
    "head": "lm_head",
}
LFM2_NAMES: WeightNames = {
    "embed_tokens": "embed_tokens",
    "layers.*.attention_norm": "layers.*.operator_norm",
    "layers.*.attention.qkv": tuple(f"layers.*.self_attn.{x}_proj" for x in "qkv"),
    "layers.*.attention.q_norm": "layers.*.self_attn.q_layernorm",
    "layers.*.attention.k_norm": "layers.*.self_attn.k_layernorm",
    "layers.*.attention.out": "layers.*.self_attn.out_proj",
    "layers.*.mixer.conv_weight": "layers.*.conv.conv.weight",
    "layers.*.mixer.conv_bias": "layers.*.conv.conv.bias",
    "layers.*.mixer.in_proj": "layers.*.conv.in_proj",
    "layers.*.mixer.out": "layers.*.conv.out_proj",
    "layers.*.mlp_norm": "layers.*.ffn_norm",
    "layers.*.mlp.gate_up": ("layers.*.feed_forward.w1", "layers.*.feed_forward.w3"),
    "layers.*.mlp.down": "layers.*.feed_forward.w2",
    "norm": "embedding_norm",
    "head": "lm_head",
}


def read_mamba(fields: ConfigReader) -> DecoderConfig:
    """Mamba (Gu and Dao, 2023)."""
    return _declare_mamba(fields, "none", 1e-6)


def read_falcon_mamba(fields: ConfigReader) -> DecoderConfig:
    """FalconMamba (Zuo et al., 2024), which normalises dt, B and C."""
    return _declare_mamba(fields, "plain", fields.get_float("mixer_rms_eps", 1e-6))


def _declare_mamba(fields: ConfigReader, norms: str, eps: float) -> DecoderConfig:
    hidden = fields.get_int("hidden_size")
    keys = ("state_size", "conv_kernel", "expand", "time_step_rank", "use_conv_bias", "use_bias")
    return declare(
        fields,
        family="mamba",
        hidden=hidden,
        layers=(LayerConfig(mixer="state", feed_forward="none"),) * read_layer_count(fields),
        state_mixer=_read_mixer(fields, hidden, keys, norms, eps, "intermediate_size"),
        norm_eps=fields.get_float("layer_norm_epsilon", 1e-5),
        tied=fields.get_bool("tie_word_embeddings", True),
        max_len=MAMBA_MAX_LEN,
        weight_names=MAMBA_MODEL_NAMES,
        weight_prefixes=("backbone.",),
    )


def read_mamba2(fields: ConfigReader) -> DecoderConfig:
    """Mamba-2 (Dao and Gu, 2024)."""
    hidden, eps = fields.get_int("hidden_size"), fields.get_float("layer_norm_epsilon", 1e-5)
    fields.require_value("hidden_act", "silu")
    heads, head_dim, expand = (
        fields.get_int("num_heads", 128),
        fields.get_int("head_dim", 64),
        fields.get_int("expand", 2, MAX_EXPAND),
    )
    _check_inner(fields, "num_heads times head_dim", heads * head_dim, "expand times hidden_size", expand * hidden)
    return declare(
        fields,
        family="mamba2",
        hidden=hidden,
        layers=(LayerConfig(mixer="state", feed_forward="none"),) * read_layer_count(fields),
        state_mixer=_read_mamba2_mixer(fields, hidden, eps, ("num_heads", heads), head_dim, "state_size"),
        norm_eps=eps,
        tied=fields.get_bool("tie_word_embeddings", False),
        max_len=MAMBA_MAX_LEN,
        weight_names=MAMBA2_MODEL_NAMES,
        weight_prefixes=("backbone.",),
    )


def read_granite_hybrid(fields: ConfigReader) -> DecoderConfig:
    """Granite 4 hybrids (IBM, 2025): Mamba-2 layers and a few of attention, with or without a rotary embedding; in each
    layer a feed-forward block, beside experts if there are some."""
    fields = fields.with_aliases(layers_block_type="layer_types")
    hidden, eps = fields.get_int("hidden_size"), fields.get_float("rms_norm_eps", 1e-6)
    kind = fields.get_str("position_embedding_type", "nope")
    if kind not in ("nope", "rope"):
        raise StartupError(
            f"position_embedding_type in {fields.source} is {short_repr(kind)}", "nope and rope are supported"
        )
    rope, max_len = read_rope(fields)
    count = fields.get_int("num_local_experts", 8, MAX_EXPERTS, 0)
    shared = fields.get_int("shared_intermediate_size", 1024)
    experts = None
    if count:
        experts = ExpertsConfig(
            count=count,
            per_token=fields.get_int("num_experts_per_tok", min(2, count), count),
            intermediate=fields.get_int("intermediate_size", 11008),
            intermediate_key="intermediate_size",
            renormalize=True,
            shared_intermediate=shared,
            shared_key="shared_intermediate_size",
            shared_gated=False,
        )
    types = read_layer_types(fields, (FULL, "attention", "linear_attention", "mamba"))
    types = ("mamba",) * read_layer_count(fields) if types is None else types
    feed_forward = "experts" if count else "mlp"
    logits_scaling, residual = fields.get_float("logits_scaling", 1.0), fields.get_float("residual_multiplier", 1.0)
    for name in ("attention_bias", "mamba_proj_bias") if residual != 1 else ():
        fields.require_value(name, False)  # the inputs of these products are multiplied
    return declare_gated(
        fields,
        (
            LayerConfig(rope=rope if kind == "rope" else None, feed_forward=feed_forward)
            if name in (FULL, "attention")
            else LayerConfig(mixer="state", feed_forward=feed_forward)
            for name in types
        ),
        max_len,
        **read_biases(fields),
        intermediate=shared,
        intermediate_key="shared_intermediate_size",
        norm_eps=eps,
        scale=fields.get_float("attention_multiplier", 1.0),
        embed_scale=_scale(fields.get_float("embedding_multiplier", 1.0)),
        residual_scale=_scale(residual),
        logits_scale=_scale(1.0 / logits_scaling),
        experts=experts,
        state_mixer=_read_bamba_mixer(fields, hidden, eps),
        weight_names=_granite_hybrid_names(count),
    )


NEMOTRON_H_BLOCKS = {
    "M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe", "mamba": "linear_attention",
    "attention": "full_attention",
}  # fmt: skip
"""The characters of `hybrid_override_pattern`, and older names, -> the names in `layers_block_type`."""


def read_nemotron_h(fields: ConfigReader) -> DecoderConfig:
    """Nemotron-H (NVIDIA, 2025): each layer of config.json is one block, with a norm: Mamba-2, attention without a
    rotary embedding, or a plain MLP. One of the first two and the MLP that may follow are a layer of the decoder."""
    for name, allowed in (("mamba_hidden_act", "silu"), ("sliding_window", None), ("attention_bias", False)):
        fields.require_value(name, allowed)
    layers, names = _read_nemotron_h_layers(fields)
    hidden, eps = fields.get_int("hidden_size"), fields.get_float("layer_norm_epsilon", 1e-5)
    heads = fields.get_int("mamba_num_heads", 128, MAX_D_INNER)
    head_dim = fields.get_int("mamba_head_dim", 64, MAX_D_INNER // heads)
    return declare_gated(
        fields,
        layers,
        fields.get_int("max_position_embeddings", 4096),
        family="nemotron_h",
        kv_heads=8,
        head_dim=fields.get_int("attention_head_dim", 128),
        activation=fields.get_activation("mlp_hidden_act", "relu2"),
        gated=False,
        mlp_bias=fields.get_bool("mlp_bias", False),
        norm_eps=eps,
        state_mixer=_read_mamba2_mixer(fields, hidden, eps, ("mamba_num_heads", heads), head_dim, "ssm_state_size"),
        weight_names=names,
        weight_prefixes=("backbone.", "model."),
    )


def _read_nemotron_h_layers(fields: ConfigReader) -> tuple[list[LayerConfig], WeightNames]:
    """Return the decoder's layers, and the names of their weights."""
    key = next((key for key in ("layers_block_type", "layer_types") if fields.config.get(key) is not None), "")
    blocks: Any = fields.config.get(key or "hybrid_override_pattern")
    if not isinstance(blocks, list if key else str) or not 1 <= len(blocks) <= MAX_LAYERS:
        raise StartupError(
            f"{key or 'hybrid_override_pattern'} in {fields.source} is {short_repr(blocks)}",
            f"It must name 1 to {MAX_LAYERS} blocks",
        )
    layers: list[LayerConfig] = []
    names: dict[str, str | tuple[str, ...]] = {"embed_tokens": "embeddings", "norm": "norm_f", "head": "lm_head"}
    for block, name in enumerate(blocks):
        kind = NEMOTRON_H_BLOCKS.get(name, name) if isinstance(name, str) else None
        follows = bool(layers) and layers[-1].feed_forward == "none"
        if kind not in ("linear_attention", "full_attention", "mlp") or (kind == "mlp" and not follows):
            raise StartupError(
                f"block {block} in {fields.source} is {short_repr(name)}",
                "Supported: Mamba-2 (M) and attention (*), and a plain MLP (-) after one of them",
            )
        theirs = f"layers.{block}.mixer"
        if kind == "mlp":
            layers[-1], ours = layers[-1]._replace(feed_forward="mlp"), f"layers.{len(layers) - 1}"
            names |= {f"{ours}.mlp_norm": f"layers.{block}.norm"}
            names |= {f"{ours}.mlp.{part}": f"{theirs}.{part}_proj" for part in ("up", "down")}
            continue
        ours, mixer = f"layers.{len(layers)}", "state" if kind == "linear_attention" else "attention"
        layers.append(LayerConfig(mixer=mixer, feed_forward="none"))
        names[f"{ours}.attention_norm"] = f"layers.{block}.norm"
        if mixer == "state":
            names |= prefixed(f"{ours}.mixer", f"{theirs}.", MAMBA2_NAMES)
        else:
            names[f"{ours}.attention.qkv"] = tuple(f"{theirs}.{x}_proj" for x in "qkv")
            names[f"{ours}.attention.out"] = f"{theirs}.o_proj"
    return layers, names


def _scale(factor: float) -> float | None:
    return None if factor == 1 else factor


def read_bamba(fields: ConfigReader) -> DecoderConfig:
    """Bamba (IBM, Princeton and UIUC, 2024): Mamba-2 layers, and attention in some, which rotates half of each head."""
    hidden, eps = fields.get_int("hidden_size"), fields.get_float("rms_norm_eps", 1e-5)
    # As in transformers, partial_rotary_factor is not read outside of rope_parameters.
    rope, max_len = read_rope(ConfigReader({**fields.config, "partial_rotary_factor": 0.5}, fields.source), partial=0.5)
    attends = _read_attention_layers(fields, "attn_layer_indices", [])
    return declare_gated(
        fields,
        [LayerConfig(rope=rope) if one else LayerConfig(mixer="state") for one in attends],
        max_len,
        family="bamba",
        **read_biases(fields),
        kv_heads=8,
        mlp_bias=fields.get_bool("mlp_bias", False),
        norm_eps=eps,
        state_mixer=_read_bamba_mixer(fields, hidden, eps),
        weight_names={**JAMBA_NAMES, **prefixed("layers.*.mixer", "layers.*.mamba.", MAMBA2_NAMES)},
    )


def _read_mamba2_mixer(
    fields: ConfigReader, hidden: int, eps: float, heads: tuple[str, int], head_dim: int, state_key: str
) -> Mamba2Config:
    """Return the mixer that the keys of Mamba-2 and Nemotron-H describe. `heads`: the key of the number of heads, and
    that number. `state_key`: the key of the state size."""
    return Mamba2Config(
        hidden=hidden,
        itemsize=_read_itemsize(fields),
        heads=heads[1],
        heads_key=heads[0],
        head_dim=head_dim,
        groups=_read_groups(fields, "n_groups", 8, heads[1]),
        d_state=fields.get_int(state_key, 128, MAX_D_STATE),
        d_conv=fields.get_int("conv_kernel", 4, MAX_D_CONV, MIN_D_CONV),
        conv_bias=fields.get_bool("use_conv_bias", True),
        bias=fields.get_bool("use_bias", False),
        norm_eps=eps,
        step_limits=_read_step_limits(fields),
    )


def _read_bamba_mixer(fields: ConfigReader, hidden: int, eps: float) -> Mamba2Config:
    """Return the mixer that the keys of Granite 4 and Bamba describe. As in transformers, a null mamba_conv_bias means
    that there is none."""
    fields.require_value("hidden_act", "silu")
    heads, expand = fields.get_int("mamba_n_heads", 128), fields.get_int("mamba_expand", 2, MAX_EXPAND)
    is_auto = fields.config.get("mamba_d_head") in (None, "auto")
    head_dim = expand * hidden // heads if is_auto else fields.get_int("mamba_d_head")
    inner = "mamba_n_heads times mamba_d_head", heads * head_dim, "mamba_expand times hidden_size", expand * hidden
    _check_inner(fields, *inner)
    return Mamba2Config(
        hidden=hidden,
        itemsize=_read_itemsize(fields),
        heads=heads,
        heads_key="mamba_n_heads",
        head_dim=head_dim,
        groups=_read_groups(fields, "mamba_n_groups", 1, heads),
        d_state=fields.get_int("mamba_d_state", 256, MAX_D_STATE),
        d_conv=fields.get_int("mamba_d_conv", 4, MAX_D_CONV, MIN_D_CONV),
        conv_bias=fields.get_bool("mamba_conv_bias", "mamba_conv_bias" not in fields.config),
        bias=fields.get_bool("mamba_proj_bias", False),
        norm_eps=eps,
        step_limits=_read_step_limits(fields),
    )


def _granite_hybrid_names(experts: int) -> WeightNames:
    """Return the names of a Granite 4 hybrid; the experts' weights are stacks."""
    stack, shared = "layers.*.block_sparse_moe.{}_linear.weight[{}]".format, "layers.*.shared_mlp.{}_linear".format
    return {
        **LLAMA_NAMES,
        **prefixed("layers.*.mixer", "layers.*.mamba.", MAMBA2_NAMES),
        "layers.*.mlp.gate_up": shared("input"),
        "layers.*.mlp.down": shared("output"),
        "layers.*.experts.shared.gate_up": shared("input"),
        "layers.*.experts.shared.down": shared("output"),
        "layers.*.experts.router": "layers.*.block_sparse_moe.router.layer",
        "layers.*.experts.gate_up.weight": tuple(stack("input", expert) for expert in range(experts)),
        "layers.*.experts.down.weight": tuple(stack("output", expert) for expert in range(experts)),
    }


def _check_inner(fields: ConfigReader, name: str, size: int, other: str, expected: int) -> None:
    """Raise StartupError unless both sizes are the number of a Mamba-2 layer's channels, at most MAX_D_INNER."""
    if size != expected or size > MAX_D_INNER:
        raise StartupError(
            f"{name} in {fields.source} is {size}, and {other} is {expected}",
            f"They must be equal, and at most {MAX_D_INNER}",
        )


def _read_groups(fields: ConfigReader, name: str, default: int, heads: int) -> int:
    """Return the number of groups of heads, which share B and C."""
    groups: int = fields.get_int(name, default)
    if heads % groups:
        raise StartupError(f"{name} in {fields.source} is {groups}", f"It must divide the {heads} heads")
    return groups


def _read_step_limits(fields: ConfigReader, name: str = "time_step_limit") -> tuple[float, float]:
    """Return the least and the largest step size. JSON has no infinity: transformers writes an object for it."""
    limits = fields.config.get(name)
    if limits is None:
        return 0.0, math.inf
    pair: list[Any] = list(limits) if isinstance(limits, list | tuple) else []
    pair = [math.inf if one in ("Infinity", {"__float__": "Infinity"}) else one for one in pair]
    if len(pair) != 2 or not all(type(one) in (int, float) for one in pair) or not 0 <= pair[0] < pair[1]:
        raise StartupError(f"{name} in {fields.source} is {short_repr(limits)}", "It must be two rising numbers from 0")
    return float(min(pair[0], MAX_NUMBER)), math.inf if pair[1] > MAX_NUMBER else float(pair[1])


def read_jamba(fields: ConfigReader) -> DecoderConfig:
    """Jamba (Lieber et al., 2024): Mamba layers with some attention layers between them, which have no rotary
    embedding; in some layers experts."""
    fields = fields.with_aliases(num_local_experts="num_experts")
    fields.require_value("mamba_inner_layernorms", True)
    fields.require_value("sliding_window", None)
    hidden, heads = fields.get_int("hidden_size"), fields.get_int("num_attention_heads")
    kv_heads, head_dim = read_heads(fields, heads, 8, hidden // heads)
    if not head_dim:
        raise StartupError(f"num_attention_heads is {heads}, and hidden_size {hidden}", "Heads must be at most as many")
    count, eps = read_layer_count(fields), fields.get_float("rms_norm_eps", 1e-6)
    intermediate = fields.get_int("intermediate_size")
    experts = fields.get_int("num_experts", 16, MAX_EXPERTS)
    attends, sparse = _periodic_layers(fields, "attn_layer", 8, 4), _periodic_layers(fields, "expert_layer", 2, 1)
    sparse = sparse if experts > 1 else range(0)
    per_token = fields.get_int("num_experts_per_tok", 2, experts) if experts > 1 else 1
    keys = ("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank", "mamba_conv_bias", "mamba_proj_bias")
    return declare(
        fields,
        family="jamba",
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        norm_eps=eps,
        layers=tuple(
            LayerConfig(
                mixer="attention" if layer in attends else "state", feed_forward="experts" if layer in sparse else "mlp"
            )
            for layer in range(count)
        ),
        state_mixer=_read_mixer(fields, hidden, keys, "learned", eps),
        experts=ExpertsConfig(
            count=experts, per_token=per_token, intermediate=intermediate, intermediate_key="intermediate_size"
        )
        if sparse
        else None,
        tied=fields.get_bool("tie_word_embeddings", False),
        max_len=fields.get_int("max_position_embeddings", 262_144),
        weight_names={**JAMBA_NAMES, **expert_names("feed_forward", experts, "router")},
    )


def read_lfm2(fields: ConfigReader) -> DecoderConfig:
    """LFM2 (Liquid AI, 2025): gated short convolutions, and attention in some layers."""
    rope, max_len = read_rope(fields, theta=1e6)
    hidden = fields.get_int("hidden_size")
    bias = fields.get_bool("conv_bias", False)
    return declare_gated(
        fields,
        [
            LayerConfig(rope=rope) if attends else LayerConfig(mixer="state")
            for attends in _read_lfm2_attention_layers(fields)
        ],
        max_len,
        kv_heads=8,
        qk_norm="head",
        norm_eps=fields.get_float("norm_eps", 1e-5),
        intermediate=_read_lfm2_intermediate(fields),
        intermediate_key="block_ff_dim",
        tied=fields.get_bool("tie_embedding", fields.get_bool("tie_word_embeddings", True)),
        state_mixer=ShortConvConfig(
            hidden=hidden,
            itemsize=_read_itemsize(fields),
            channels=hidden,
            taps=fields.get_int("conv_L_cache", 3, MAX_D_CONV, MIN_D_CONV),
            bias=bias,
        ),
        weight_names=LFM2_NAMES,
    )


def _read_lfm2_attention_layers(fields: ConfigReader) -> list[bool]:
    """Return for each layer whether it attends: `layer_types`, else `full_attn_idxs` has it (all if it is absent)."""
    types = read_layer_types(fields, (FULL, "conv"))
    if types is not None:
        return [name == FULL for name in types]
    return _read_attention_layers(fields, "full_attn_idxs", list(range(read_layer_count(fields))))


def _read_attention_layers(fields: ConfigReader, key: str, default: list[int]) -> list[bool]:
    """Return for each layer whether it is in the list `key` of layers that attend."""
    attends, layers = fields.config.get(key), range(read_layer_count(fields))
    attends = default if attends is None else attends
    if not isinstance(attends, list) or not all(type(layer) is int and layer in layers for layer in attends):
        raise StartupError(
            f"{key} in {fields.source} is {short_repr(attends)}",
            f"It must list layers from 0 to {len(layers) - 1}",
        )
    return [layer in attends for layer in layers]


def _read_lfm2_intermediate(fields: ConfigReader) -> int:
    """Return the columns of a feed-forward block: with `block_auto_adjust_ff_dim` two thirds of `block_ff_dim`, times a
    factor, rounded up to a multiple."""
    columns: int = fields.get_int("block_ff_dim", fields.get_int("intermediate_size", 12288))
    if not fields.get_bool("block_auto_adjust_ff_dim", True):
        return columns
    columns, multiple = int(2 * columns / 3), fields.get_int("block_multiple_of", 256)
    columns = -(-int(fields.get_float("block_ffn_dim_multiplier", 1.0) * columns) // multiple) * multiple
    if not 1 <= columns <= MAX_SIZE:
        raise StartupError(
            f"block_ff_dim and block_ffn_dim_multiplier in {fields.source} result in {columns} columns",
            f"They must result in 1 to {MAX_SIZE}",
        )
    return columns


def _read_itemsize(fields: ConfigReader) -> int:
    """Return the bytes of a number of the checkpoint's dtype."""
    dtype: Any = fields.config.get("dtype") or fields.config.get("torch_dtype")
    return ITEMSIZES.get(dtype, 4) if isinstance(dtype, str) else 4


def _read_mixer(
    fields: ConfigReader, hidden: int, keys: tuple[str, ...], norms: str, norm_eps: float, inner_key: str = "",
) -> MambaConfig:  # fmt: skip
    """Read a mixer. `keys` are those of d_state, d_conv, the factor from hidden to d_inner, dt_rank, and two biases.
    `inner_key`, if given, is a key that may hold d_inner itself."""
    fields.require_value("hidden_act", "silu")
    state, conv, expand, rank, conv_bias, bias = keys
    inner, name = fields.get_int(expand, 2, MAX_EXPAND) * hidden, f"{expand} times hidden_size"
    if inner_key and fields.get_int(inner_key, inner) != inner:
        inner, name = fields.get_int(inner_key), inner_key
    if inner > MAX_D_INNER:
        raise StartupError(f"{name} in {fields.source} is {inner}", f"At most {MAX_D_INNER} channels")
    return MambaConfig(
        hidden=hidden,
        d_inner=inner,
        inner_key=name,
        d_state=fields.get_int(state, 16, MAX_D_STATE),
        d_conv=fields.get_int(conv, 4, MAX_D_CONV, MIN_D_CONV),
        dt_rank=-(-hidden // 16)
        if fields.config.get(rank) in (None, "auto")
        else fields.get_int(rank, maximum=MAX_DT_RANK),
        conv_bias=fields.get_bool(conv_bias, True),
        bias=fields.get_bool(bias, False),
        norms=norms,
        norm_eps=norm_eps,
        itemsize=_read_itemsize(fields),
    )


def _periodic_layers(fields: ConfigReader, name: str, period: int, offset: int) -> range:
    """Return the layers that `name`_period and `name`_offset select."""
    period = fields.get_int(f"{name}_period", period, MAX_LAYERS)
    offset = fields.get_int(f"{name}_offset", offset, period - 1, 0)
    if offset >= period:
        raise StartupError(f"{name}_offset in {fields.source} is {offset}", f"It must be below {name}_period {period}")
    return range(offset, read_layer_count(fields), period)
