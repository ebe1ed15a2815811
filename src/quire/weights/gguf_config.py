"""The conversion of a GGUF file to the Hugging Face format: its config.json, and its tensors by their names there.

The layouts are those of llama.cpp's converter. No torch here.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from quire.errors import StartupError, short_repr
from quire.files import DOWNLOAD_AGAIN
from quire.models.config_reader import MAX_LIST_LENGTH, ConfigReader
from quire.models.decoder_config import MAX_LAYERS
from quire.models.quantization import GGUF_BLOCKS_KEY
from quire.weights.gguf_blocks import GGUFTensor
from quire.weights.gguf_file import GGUFFile

LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    **{f"mlp.shared_expert.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
    **{f"mlp.experts.*.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
    **{f"block_sparse_moe.experts.*.{ours}": f"ffn_{name}_exps" for ours, name in
       (("w1", "gate"), ("w3", "up"), ("w2", "down"))},
}  # fmt: skip
"""Modules of a layer -> their tensors in a file; those of all experts are one tensor."""
GEMMA_TENSORS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GEMMA4_TENSORS = GEMMA_TENSORS | {
    "layer_scalar": "layer_output_scale",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    **{f"experts.*.{name}_proj": "ffn_gate_up_exps" for name in ("gate", "up")},
    "experts.*.down_proj": "ffn_down_exps",
}
GPT_OSS_TENSORS = {
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.router": "ffn_gate_inp",
}
PHI3_TENSORS = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
LFM2_TENSORS = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    **{f"self_attn.{name}_layernorm": f"attn_{name}_norm" for name in "qk"},
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"conv.{name}": f"shortconv.{name}" for name in ("conv", "in_proj", "out_proj")},
    **{f"feed_forward.{ours}": f"ffn_{name}" for ours, name in (("w1", "gate"), ("w3", "up"), ("w2", "down"))},
}
GLOBAL_TENSORS = {
    "embed_tokens": "token_embd", "norm": "output_norm", "embedding_norm": "token_embd_norm", "lm_head": "output",
    "embed_tokens_per_layer": "per_layer_token_embd", "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}  # fmt: skip
ROPE_FREQS, ROPE_FACTORS_SHORT = "rope_freqs.weight", "rope_factors_short.weight"
ROPE_FACTORS_LONG = "rope_factors_long.weight"
"""Tensors with divisors of the rotation frequencies of a head's pairs."""
EXPERT = re.compile(r"\bexperts\.(\d+)\.")
KEYS_AND_VALUES = re.compile(r"blk\.(\d+)\.attn_(k|v|k_norm)\.weight")
UNROTATED = 1e20  # pairs of a head whose frequency has a greater divisor are not rotated
FLOAT_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
IGNORED_TENSORS = (ROPE_FREQS, ROPE_FACTORS_SHORT, ROPE_FACTORS_LONG)
LARGEST_LAYER_COUNTS = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the one model of a family that scales scores by hidden size / heads, not by the head size."""
SAMPLING_KEYS = {
    "temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip


SUPPORTED_VALUES = {
    "attention.causal": True, "attention.scale": 0.0, "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0,
    "logit_scale": 0.0, "embedding_scale": 0.0, "residual_scale": 0.0, "use_parallel_residual": False,
    "expert_weights_scale": 1.0, "leading_dense_block_count": 0, "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_log_multiplier": 0.0,
}  # fmt: skip
"""Keys of llama.cpp that change what a model computes -> their only supported values."""


class Architecture(NamedTuple):
    """An architecture of GGUF files, with transformers' names. `expert_keys`: the keys of a config.json with experts
    that the file has no keys for, or None if it has none. `interleaved_rope`: the rows of queries and keys are in
    the order of a rotary embedding whose pairs are adjacent. `norm_plus_one`: norms are stored with the 1 added that
    the model adds."""

    hf_architecture: str
    model_type: str
    layer_tensors: dict[str, str] = LAYER_TENSORS
    interleaved_rope: bool = False
    norm_plus_one: bool = False
    expert_keys: dict[str, Any] | None = None


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", interleaved_rope=True, expert_keys={}),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", expert_keys={"norm_topk_prob": False}),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", expert_keys={"norm_topk_prob": True}),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", LAYER_TENSORS | PHI3_TENSORS),
    "gpt-oss": Architecture("GptOssForCausalLM", "gpt_oss", LAYER_TENSORS | GPT_OSS_TENSORS, expert_keys={}),
    "lfm2": Architecture("Lfm2ForCausalLM", "lfm2", LFM2_TENSORS),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", LAYER_TENSORS | GEMMA_TENSORS, norm_plus_one=True),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", LAYER_TENSORS | GEMMA_TENSORS, norm_plus_one=True),
    "gemma4": Architecture("Gemma4ForCausalLM", "gemma4_text", LAYER_TENSORS | GEMMA4_TENSORS, expert_keys={}),
}


class HFTensors(NamedTuple):
    """The tensors of `file` by transformers' names, without a prefix. The projections of keys and values of
    `sharing_layers`, which use other layers' keys and values, are left out."""

    file: GGUFFile
    architecture: Architecture
    head_dim: int
    experts: int = 0
    sharing_layers: range = range(0)

    def gguf_name(self, name: str) -> str | None:
        """Return the file's name of the tensor `name`; None if GGUF has no such tensor."""
        if match := re.fullmatch(r"layers\.(\d+)\.(.+?)(\.weight|\.bias|)", name):
            layer, module, kind = match[1], match[2], match[3]
            gguf_module = self.architecture.layer_tensors.get(EXPERT.sub("experts.*.", module))
            if gguf_module is None:
                return None
            return f"blk.{layer}.{gguf_module}{kind or ('' if gguf_module.endswith('.scale') else '.weight')}"
        module, _, kind = name.rpartition(".")
        return f"{GLOBAL_TENSORS[module]}.{kind}" if module in GLOBAL_TENSORS else None

    def format_of(self, name: str) -> str | None:
        """Return the format of the tensor `name`; None if the file lacks it."""
        stored = self.file.tensors.get(self.gguf_name(name) or "")
        return None if stored is None else stored.format

    def get_tensor(self, name: str) -> GGUFTensor | None:
        """Return the tensor `name` with rows in transformers' order; None if the file lacks it. It is a view of the
        file, or a copy of queries, keys and norms that must be converted. Raise StartupError for scales that aren't
        finite."""
        gguf_name = self.gguf_name(name)
        stored = self.file.tensors.get(gguf_name or "")
        if stored is None:
            return None
        if (match := EXPERT.search(name)) is not None:
            is_pair = "ffn_gate_up_exps" in str(gguf_name)  # of each expert the gate's rows, then up's
            parts = max(self.experts, 1) * (2 if is_pair else 1)
            if stored.rows % parts:
                cause = f"{gguf_name} in {self.file.path} has {stored.rows} rows for {self.experts} experts"
                raise StartupError(cause, DOWNLOAD_AGAIN)
            rows, part = stored.rows // parts, int(match[1])
            part = 2 * part + (".up_proj." in name) if is_pair else part
            stored = stored.slice_rows(part * rows, (part + 1) * rows)
        if not stored.is_finite():
            raise StartupError(f"{gguf_name} in {self.file.path} has a number that isn't finite", DOWNLOAD_AGAIN)
        if self.architecture.interleaved_rope and re.search(r"\.self_attn\.[qk]_proj\.", name):
            return _deinterleave_rows(stored, self.head_dim)
        if self.architecture.norm_plus_one and name.endswith("norm.weight"):
            numbers = stored.dequantize() - np.float32(1)
            return GGUFTensor("f32", stored.rows, stored.columns, numbers.view(np.uint8))
        return stored

    def unknown_tensors(self, names: set[str]) -> list[str]:
        """Return the file's tensors that are not among `names`."""
        known = {*IGNORED_TENSORS, *(self.gguf_name(name) for name in names)}
        unknown = [name for name in self.file.tensors if name not in known]
        matches = [KEYS_AND_VALUES.fullmatch(name) for name in unknown]
        return [
            name for name, match in zip(unknown, matches) if match is None or int(match[1]) not in self.sharing_layers
        ]


def open_hf_tensors(file: GGUFFile) -> HFTensors:
    """Return the tensors of `file` by transformers' names. Raise StartupError for an unsupported architecture."""
    family, fields = _read_architecture(file)
    heads, hidden = fields.get_int("attention.head_count"), fields.get_int("embedding_length")
    head_dim = fields.get_int("attention.key_length", hidden // heads)
    layers, sharing = fields.get_int("block_count"), fields.get_int("attention.shared_kv_layers", 0, minimum=0)
    return HFTensors(
        file, family, head_dim, fields.get_int("expert_count", 0, minimum=0), range(layers - sharing, layers)
    )


def to_hf_config(file: GGUFFile) -> dict[str, Any]:
    """Return the equivalent config.json. Raise StartupError for an unsupported architecture or value."""
    family, fields = _read_architecture(file)
    arch = str(file.metadata["general.architecture"])
    if arch == "gemma4":
        return _gemma4_config(file, family, fields)
    layer_types = _take_layer_types(fields) if arch == "lfm2" else []
    config = _common_config(file, family, fields)
    window = fields.get_int("attention.sliding_window", 0, minimum=0)
    if arch.startswith("gemma"):
        config |= _gemma_config(arch, fields, config)
    elif arch == "phi3":
        rotated = fields.get_int("rope.dimension_count", config["head_dim"], config["head_dim"])
        config |= {"sliding_window": window or None, "partial_rotary_factor": rotated / config["head_dim"]}
    elif family.expert_keys is not None and fields.get_int("expert_count", 0, minimum=0):
        config |= _expert_config(arch, fields, config) | {"sliding_window": window or None, **family.expert_keys}
    elif window and arch == "llama":
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    if arch == "gpt-oss":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if arch == "lfm2":
        config |= {"norm_eps": config["rms_norm_eps"], "conv_L_cache": fields.get_int("shortconv.l_cache")}
        config |= {"layer_types": layer_types, "block_auto_adjust_ff_dim": False}
    if arch == "llama":
        biased = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
        config |= {name: tensor in file.tensors for name, tensor in biased.items()}
    rope = _rope_config(file, fields) | {"rope_theta": fields.get_float("rope.freq_base", 10000.0)}
    if arch == "gpt-oss":
        rope["truncate"] = False
    if arch == "phi3" and "original_max_position_embeddings" in rope:
        config["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    if arch == "gemma3":
        local = {"rope_type": "default", "rope_theta": fields.get_float("rope.freq_base_swa", 10000.0)}
        return config | {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    return config | {"rope_parameters": rope}


def _take_layer_types(fields: ConfigReader) -> list[str]:
    """Return the types of LFM2's layers, which a list of each layer's key heads has, and replace it by their number:
    layers without any have convolutions."""
    heads = fields.config.get("attention.head_count_kv")
    numbers = {count for count in heads if count != 0} if isinstance(heads, list) else set()
    if not isinstance(heads, list) or len(numbers) != 1:
        raise StartupError(
            f"attention.head_count_kv in {fields.source} is {short_repr(heads)}",
            "It must list each layer's number of key heads, 0 or one other number",
        )
    fields.config["attention.head_count_kv"] = numbers.pop()
    return ["full_attention" if count else "conv" for count in heads]


def _common_config(file: GGUFFile, architecture: Architecture, fields: ConfigReader) -> dict[str, Any]:
    """Return the keys that all architectures have."""
    heads, hidden = fields.get_int("attention.head_count"), fields.get_int("embedding_length")
    head_dim = fields.get_int("attention.key_length", hidden // heads)
    for key, allowed in {"attention.value_length": head_dim, **SUPPORTED_VALUES}.items():
        fields.require_value(key, allowed)
    if architecture.hf_architecture != "Phi3ForCausalLM":
        fields.require_value("rope.dimension_count", head_dim)
    if architecture.expert_keys is None:
        fields.require_value("expert_count", 0)
    embedding, tokens = file.tensors.get("token_embd.weight"), file.metadata.get("tokenizer.ggml.tokens", ())
    if embedding is None:
        raise StartupError(f"{file.path} has no tensor token_embd.weight", "Give a GGUF file of a language model")
    if hasattr(tokens, "__len__") and len(tokens) > embedding.rows:
        raise StartupError(
            f"{file.path} has {len(tokens)} tokens, and its model knows {embedding.rows}", DOWNLOAD_AGAIN
        )
    return {
        "architectures": [architecture.hf_architecture],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": fields.get_int("block_count", maximum=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get_int("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": fields.get_int("feed_forward_length"),
        "vocab_size": embedding.rows,
        "max_position_embeddings": fields.get_int("context_length"),
        "rms_norm_eps": fields.get_float("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": FLOAT_DTYPES.get(_main_format(file), "bfloat16"),
        GGUF_BLOCKS_KEY: _main_format(file) not in FLOAT_DTYPES,
        "eos_token_id": eos_token_ids(file),
    }


def to_hf_generation_config(file: GGUFFile) -> dict[str, Any]:
    """Return the equivalent generation_config.json: the file's sampling defaults and end tokens."""
    sampling = {name: file.metadata.get(f"general.sampling.{key}") for key, name in SAMPLING_KEYS.items()}
    sampling = {name: value for name, value in sampling.items() if type(value) in (int, float)}
    return sampling | {"eos_token_id": eos_token_ids(file)}


def eos_token_ids(file: GGUFFile) -> list[int]:
    """Return the tokens that end a text, a turn or a message."""
    ids = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return sorted({token_id for token_id in ids if type(token_id) is int and token_id >= 0})


def _read_architecture(file: GGUFFile) -> tuple[Architecture, ConfigReader]:
    """Return the file's architecture, and its metadata of the model by keys without the architecture's prefix."""
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise StartupError(
            f"{file.path} holds a model of the architecture {short_repr(arch)}, which is not supported",
            f"Supported in GGUF files: {', '.join(ARCHITECTURES)}",
        )
    values = {
        key.removeprefix(f"{arch}."): _to_plain_value(value)
        for key, value in file.metadata.items()
        if key.startswith(f"{arch}.")
    }
    return ARCHITECTURES[arch], ConfigReader(values, str(file.path))


def _to_plain_value(value: Any) -> Any:
    """Return a value that can be compared and printed. Arrays are cut after the most layers that a model may have."""
    return value[:MAX_LAYERS].tolist() if isinstance(value, np.ndarray) else value


def _expert_config(arch: str, fields: ConfigReader, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a model with experts beyond Llama's."""
    count, per_token = fields.get_int("expert_count"), fields.get_int("expert_used_count")
    if arch == "llama":
        names = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        return {**names, "num_local_experts": count, "num_experts_per_tok": per_token}
    length = config["intermediate_size"]
    if arch == "gpt-oss":
        length = fields.get_int("expert_feed_forward_length", length)
        return {"num_local_experts": count, "num_experts_per_tok": per_token, "intermediate_size": length}
    return {
        "num_experts": count,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": fields.get_int("expert_feed_forward_length", length // per_token),
        "shared_expert_intermediate_size": fields.get_int("expert_shared_feed_forward_length", length),
    }


def _gemma_config(arch: str, fields: ConfigReader, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of Gemma's config beyond Llama's. The scale of scores isn't in the file; llama.cpp has the same
    table."""
    layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    keys = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if layers == LARGEST_LAYER_COUNTS[arch] else config["head_dim"],
        "sliding_window": fields.get_int("attention.sliding_window", 4096 if arch == "gemma2" else None),
        "final_logit_softcapping": fields.get_float("final_logit_softcapping", 30.0 if arch == "gemma2" else None),
    }
    pattern = "attention.sliding_window_pattern"
    if isinstance(fields.config.get(pattern), list):
        keys["layer_types"] = ["sliding_attention" if one else "full_attention" for one in _windowed_layers(fields)]
    elif arch == "gemma2":
        fields.require_value(pattern, 2)
    else:
        keys["sliding_window_pattern"] = fields.get_int(pattern, 6)
    if arch == "gemma2":
        keys["attn_logit_softcapping"] = fields.get_float("attn_logit_softcapping", 50.0)
    elif keys["sliding_window"] is None:
        keys |= {"layer_types": ["full_attention"] * layers, "sliding_window": 1}
    return keys


def _gemma4_config(file: GGUFFile, architecture: Architecture, fields: ConfigReader) -> dict[str, Any]:
    """Return the config.json of a Gemma-4. The file has one number of key heads, and one size of the feed-forward
    block, for all layers or a list for each. It has no projection of values where the keys are the values too."""
    count, windowed = fields.get_int("block_count", maximum=MAX_LAYERS), _windowed_layers(fields)
    shared = fields.get_int("attention.shared_kv_layers", 0, minimum=0, maximum=count - 1)
    full, own = [layer for layer in range(count) if not windowed[layer]], range(count - shared)
    kv_heads, sizes = (_per_layer(fields, key) for key in ("attention.head_count_kv", "feed_forward_length"))
    wide = sizes[-1] == 2 * sizes[0]
    _check_layers(fields, "attention.head_count_kv", kv_heads, {kv_heads[i] for i in range(count) if windowed[i]})
    _check_layers(
        fields, "feed_forward_length", sizes, {size if i in own else size / (1 + wide) for i, size in enumerate(sizes)}
    )
    without_values = {f"blk.{layer}.attn_v.weight" not in file.tensors for layer in full if layer in own}
    if len(without_values) > 1:
        raise StartupError(f"{file.path} has attn_v of some layers without a window", "All must have it, or none")
    fields.config["attention.head_count_kv"] = next((kv_heads[i] for i in range(count) if windowed[i]), kv_heads[0])
    fields.config["feed_forward_length"] = sizes[0]
    config = _common_config(file, architecture, fields)
    head_dim = fields.get_int("attention.key_length_swa", config["head_dim"])
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        fields.require_value(key, head_dim)
    for key, allowed in (("rope.scaling.type", "none"), ("rope.scaling.factor", 1.0), ("rope.scale_linear", 1.0)):
        fields.require_value(key, allowed)
    table = file.tensors.get("per_layer_token_embd.weight")
    return config | {
        "head_dim": head_dim,
        "per_layer_config": {
            str(i): {"head_dim": config["head_dim"], "num_key_value_heads": kv_heads[i]} for i in full
        },
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
        "sliding_window": fields.get_int("attention.sliding_window"),
        "attention_k_eq_v": True in without_values,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": wide,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": fields.get_float("final_logit_softcapping", None),
        "hidden_size_per_layer_input": fields.get_int("embedding_length_per_layer_input", 0, minimum=0),
        "vocab_size_per_layer_input": None if table is None else table.rows,
        "enable_moe_block": fields.get_int("expert_count", 0, minimum=0) > 0,
        "num_experts": fields.config.get("expert_count"),
        "top_k_experts": fields.config.get("expert_used_count"),
        "moe_intermediate_size": fields.config.get("expert_feed_forward_length"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": _rotated_share(file, config["head_dim"]),
                "rope_theta": fields.get_float("rope.freq_base", 10000.0),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": fields.get_float("rope.freq_base_swa", 10000.0),
            },
        },
    }


def _windowed_layers(fields: ConfigReader) -> list[bool]:
    """Return for each layer whether it has a window. Raise StartupError if the file doesn't list it for each."""
    given = fields.config.get("attention.sliding_window_pattern")
    count = fields.get_int("block_count", maximum=MAX_LAYERS)
    if not isinstance(given, list) or len(given) != count or not all(one in (0, 1) for one in given):
        raise StartupError(
            f"attention.sliding_window_pattern in {fields.source} is {short_repr(given)}",
            f"It must list true or false for each of {count} layers",
        )
    return list(map(bool, given))


def _per_layer(fields: ConfigReader, key: str) -> list[int]:
    """Return the number of each layer at `key`, which has a list or one number for all."""
    given, count = fields.config.get(key), fields.get_int("block_count", maximum=MAX_LAYERS)
    values = given if isinstance(given, list) else [given] * count
    if len(values) != count:
        raise StartupError(f"{key} in {fields.source} lists {len(values)} numbers", f"There are {count} layers")
    return [ConfigReader({key: value}, fields.source).get_int(key) for value in values]


def _check_layers(fields: ConfigReader, key: str, values: list[int], kinds: set[Any]) -> None:
    """Raise StartupError if `kinds`, the different numbers of layers that must have the same one, are several."""
    if len(kinds) > 1:
        raise StartupError(
            f"{key} in {fields.source} is {short_repr(values)}", "Layers of a kind must have the same number"
        )


def _rotated_share(file: GGUFFile, head_dim: int) -> float:
    """Return the share of a head's pairs that are rotated: those whose frequencies have the divisor 1. The others have
    huge ones."""
    divisors = _tensor_floats(file, ROPE_FREQS)
    rotated = divisors.count(1.0)
    if not rotated or len(divisors) != head_dim // 2 or not all(x > UNROTATED for x in divisors[rotated:]):
        raise StartupError(
            f"{ROPE_FREQS} in {file.path} has the numbers {short_repr(divisors)}",
            f"Supported: {head_dim // 2} numbers, 1 for each pair that is rotated, then {UNROTATED:g} or more",
        )
    return rotated / len(divisors)


def _rope_config(file: GGUFFile, fields: ConfigReader) -> dict[str, Any]:
    """Return rope_parameters without rope_theta."""
    original = fields.get_int("rope.scaling.original_context_length", fields.get_int("context_length"))
    factors = {"short": ROPE_FREQS, "long": ROPE_FREQS}
    if ROPE_FACTORS_SHORT in file.tensors:
        factors = {"short": ROPE_FACTORS_SHORT, "long": ROPE_FACTORS_LONG}
    if factors["short"] in file.tensors:  # Llama 3's scaling is stored as factors too
        lists = {f"{which}_factor": _tensor_floats(file, name) for which, name in factors.items()}
        attention = {"attention_factor": fields.get_float("rope.scaling.attn_factor", 1.0)}
        return {"rope_type": "longrope", "original_max_position_embeddings": original, **lists, **attention}
    kind = fields.get_str("rope.scaling.type", "linear")  # llama.cpp's default
    factor = fields.get_float("rope.scaling.factor", fields.get_float("rope.scale_linear", 1.0))
    if kind == "none" or factor == 1.0:
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise StartupError(f"rope.scaling.type in {file.path} is {short_repr(kind)}", "linear and yarn are supported")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    fields.require_value("rope.scaling.attn_factor", 1.0)
    betas = {f"beta_{name}": fields.get_float(f"rope.scaling.yarn_beta_{name}", None) for name in ("fast", "slow")}
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **betas}


def _tensor_floats(file: GGUFFile, name: str) -> list[float]:
    blocks = file.tensors.get(name)
    if blocks is None or blocks.rows * blocks.columns > MAX_LIST_LENGTH:
        raise StartupError(f"{file.path} has no tensor {name} of at most {MAX_LIST_LENGTH} numbers", DOWNLOAD_AGAIN)
    return [float(number) for number in blocks.dequantize().ravel()]


def _main_format(file: GGUFFile) -> str:
    """Return the format of most numbers of the file."""
    sizes: dict[str, int] = {}
    for blocks in file.tensors.values():
        sizes[blocks.format] = sizes.get(blocks.format, 0) + blocks.rows * blocks.columns
    return max(sizes, key=lambda kind: sizes[kind])


def _deinterleave_rows(tensor: GGUFTensor, head_dim: int) -> GGUFTensor:
    """Reorder the rows of each head: the first of every pair, then the second of every pair. llama.cpp has the two of a
    pair adjacent. A bias has one number per row."""
    if tensor.rows == 1 and tensor.is_float:
        tensor = GGUFTensor(tensor.format, tensor.columns, 1, tensor.data.reshape(tensor.columns, -1))
    if head_dim < 2 or head_dim % 2 or tensor.rows % head_dim:
        raise StartupError(f"heads of {head_dim} numbers don't divide {tensor.rows} rows of queries or keys")
    order = np.arange(tensor.rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2)
    return tensor.select_rows(order.ravel())
