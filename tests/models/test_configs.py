"""Named shapes, parameter counts, and refusals of what isn't implemented."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers

from quire.errors import StartupError
from quire.models import ARCHITECTURES, read_model_config, read_spec, resolve_model_class
from quire.models.named_configs import CONFIGS, VISION_LANGUAGE_CONFIGS, named_config
from quire.protocol.parallel_layout import Shard

# Counted from the published checkpoints (tied weights once).
PUBLISHED = {
    "opt-125m": 125_239_296, "gpt2": 124_439_808, "gpt2-xl": 1_557_611_200, "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "yi-6b": 6_061_035_520,
    "yi-6b-200k": 6_061_035_520, "yi-34b": 34_388_917_248, "mistral-7b": 7_241_732_096, "llama3.2-1b": 1_235_814_400,
    "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320,
    "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
    "gemma-3-4b": 3_880_263_168, "qwen2-7b": 7_615_616_512, "qwen3-8b": 8_190_735_360,
    "qwen3-next-80b-a3b": 79_674_391_296,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in VISION_LANGUAGE_CONFIGS])
def test_parameters_are_those_of_the_built_module_and_of_transformers(name: str) -> None:
    config = named_config(name)
    parameters = read_spec(config).parameters
    model = resolve_model_class(config)(config, torch.bfloat16, torch.device("meta"))
    assert parameters == sum(parameter.numel() for parameter in model.parameters())
    assert parameters == PUBLISHED.get(name, parameters)
    unknown = ("architectures", "model_type", *(("layer_types",) if config["model_type"] == "llama" else ()))
    options = {key: value for key, value in config.items() if key not in unknown}
    sharers = sum(owner is not None for owner in config.get("kv_sharing", ()))
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(config["model_type"], **options)
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    unread = sharers * 2 * theirs.model.layers[0].self_attn.k_proj.weight.numel() if sharers else 0
    buffers = sum(buffer.numel() for name, buffer in theirs.named_buffers() if name.endswith("layer_scalar"))
    assert parameters == sum(parameter.numel() for parameter in theirs.parameters()) + buffers - unread


OLMO2 = "Olmo2ForCausalLM"  # which ranks do not divide
TEXT = [name for name, one in ARCHITECTURES.items() if one.model.partition(":")[0] not in ("vision_language", "mllama")]
SHAPES = {
    **dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), "qwen3-next-80b-a3b"),
    **dict.fromkeys(("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), "qwen3-next-80b-a3b"),
    "FalconMambaForCausalLM": "mamba-2.8b",
    "Gemma3ForConditionalGeneration": "gemma-3-4b",
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("architecture", "ranks"), [(name, ranks) for name in TEXT for ranks in (1, 2) if (name, ranks) != (OLMO2, 2)]
)
def test_declared_parameters_are_those_of_the_tensors(architecture: str, ranks: int, tied: bool) -> None:
    """With all biases, whole and divided."""
    named = next((name for name, config in CONFIGS.items() if config["architectures"] == [architecture]), "llama-125m")
    config = {**named_config(SHAPES.get(architecture, named)), "architectures": [architecture]}
    config |= dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "use_bias", "conv_bias"), True)
    config["attention_bias"] = architecture != "NemotronHForCausalLM"  # transformers ignores its attention_bias
    config |= {"residual_multiplier": 1.0, "tie_word_embeddings": tied, "text_config": dict(config)}
    for expert_parallel in (False, True)[:ranks]:
        shard = Shard(ranks - 1, ranks, expert_parallel=expert_parallel)
        model = resolve_model_class(config)(config, torch.bfloat16, torch.device("meta"), shard)
        assert read_spec(config, shard).parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", VISION_LANGUAGE_CONFIGS)
def test_parameters_of_models_that_see(name: str) -> None:
    config = named_config(name)
    spec, model = read_spec(config), resolve_model_class(config)(config, torch.bfloat16, torch.device("meta"))
    assert spec.vision is not None
    assert spec.vision.parameters == sum(parameter.numel() for parameter in model.vision_encoder.parameters())
    total = spec.parameters + spec.vision.parameters
    assert total == sum(parameter.numel() for parameter in model.parameters())
    if "text_config" in config:
        kinds = {"llava-onevision-7b": "llava_onevision", "paligemma2-10b": "paligemma", "gemma-3-4b-vision": "gemma3",
                 "gemma-4-31b-vision": "gemma4", "gemma-4-e2b-vision": "gemma4"}  # fmt: skip
        kind = kinds.get(name, "mllama")
        sections = {key: value for key, value in config.items() if key.endswith(("_config", "_index", "_dim"))}
        del sections["preprocessor_config"]
        with torch.device("meta"):
            config = transformers.AutoConfig.for_model(kind, tie_word_embeddings="gemma" in kind, **sections)
            theirs = transformers.AutoModelForImageTextToText.from_config(config)
        unread = 2 * 1152 if kind == "llava_onevision" else 0  # a norm behind the tower
        stored = ("layer_scalar", "std_bias", "std_scale", "_min", "_max")
        buffers = sum(buffer.numel() for name, buffer in theirs.named_buffers() if name.endswith(stored))
        assert total == sum(parameter.numel() for parameter in theirs.parameters()) + buffers - unread


def test_jengas_table_of_models_that_see() -> None:
    """Bytes of 16 tokens' keys and values over all layers, and of 16 rows of a picture."""
    for name, tokens, rows in (
        ("llava-onevision-7b", 896, 112), ("internvl2-8b", 2048, 128), ("phi-3-vision-4b", 6144, 96),
        ("paligemma2-10b", 2 * 2688, 112),
    ):  # fmt: skip
        spec = read_spec(named_config(name))
        assert spec.vision is not None
        assert (16 * spec.token_bytes(2), 32 * spec.vision.embed_dim) == (tokens << 10, rows << 10)


def test_the_papers_kv_bytes() -> None:
    assert read_spec(named_config("opt-13b")).token_bytes(2) == 819_200  # PagedAttention, section 3: 800 KB a token
    assert read_spec(named_config("llama3-8b")).token_bytes(2) == 131_072
    for name, size in (("yi-6b", 64), ("yi-6b-200k", 64), ("llama3-8b", 128), ("yi-34b", 240)):
        assert read_spec(named_config(name)).token_bytes(2) == size * 1024, "vAttention, section 4"
    yi = read_spec(named_config("yi-34b"))
    assert (yi.heads, yi.layers[0].kv_heads, yi.layers[0].head_dim, len(yi.layers)) == (56, 8, 128, 60)  # Table 5
    assert read_spec(named_config("yi-6b-200k")).max_len == 200_000
    assert {layer.window for layer in read_spec(named_config("mistral-7b")).layers} == {4096}
    assert len(read_spec(named_config("llama-125m")).layers) == 12


def test_a_named_config_is_a_fresh_copy() -> None:
    named_config("llama3.1-8b")["rope_scaling"]["factor"] = 1.0
    assert named_config("llama3.1-8b")["rope_scaling"]["factor"] == 8.0
    with pytest.raises(StartupError, match=r"no model config 'opt-1t'.*opt-13b"):
        named_config("opt-1t")


@pytest.mark.parametrize("architectures", [["RwkvForCausalLM"], [], None, "LlamaForCausalLM", [7]])
def test_unknown_architectures_are_refused_with_the_list_of_known_ones(architectures: Any) -> None:
    with pytest.raises(StartupError, match=", ".join(ARCHITECTURES)) as failure:
        resolve_model_class({"architectures": architectures})
    if architectures == ["Mamba2ForCausalLM"]:
        assert "'Mamba2ForCausalLM'" in failure.value.cause


OPTIONS: dict[str, list[tuple[dict[str, Any], str]]] = {}
OPTIONS["llama-125m"] = [
    ({"rope_scaling": {"rope_type": "axial", "factor": 2.0}}, "rope_type 'axial'"),
    ({"rope_scaling": {"type": "linear"}}, "no factor"),
    ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor in rope_scaling"),
    ({"rope_parameters": {"full_attention": {}}}, "rope_parameters must be one flat object, got .*'full_attention'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"hidden_size": "768"}, "hidden_size in config.json must be an integer from 1 to .*, got '768'"),
    ({"hidden_size": None}, "has no hidden_size"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers in config.json must be an integer from 1 to 4096"),
    ({"num_attention_heads": True}, "num_attention_heads"),
    (
        {"num_attention_heads": 10, "num_key_value_heads": 4},
        "not a multiple of num_key_value_heads 4. num_key_value_heads must divide it",
    ),
    ({"head_dim": 7}, "head_dim in config.json is 7, .* It must be even and above 0"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"eos_token_id": [1, "x"]}, "eos_token_id"),
    ({"rms_norm_eps": -1}, "rms_norm_eps"),
    ({"hidden_act": "xielu"}, "hidden_act in config.json is 'xielu'"),
]
OPTIONS["qwen2-7b"] = [
    ({"layer_types": ["full_attention"]}, "a list of 28 names"),
    ({"layer_types": ["sliding_attention"] * 28}, "no sliding window. Give a sliding_window of 1 or more"),
]
OPTIONS["mistral-7b"] = [
    ({"layer_types": "sliding_attention"}, "is 'sliding_attention'. It must be a list of 32 names"),
    ({"layer_types": ["linear_attention"] * 32}, "layer_types in config.json has 'linear_attention'"),
    ({"layer_types": ["sliding_attention"] * 32, "sliding_window": None}, "no sliding window"),
]
FLAT = {"rope_type": "default", "rope_theta": 1e4}
OPTIONS["gemma-2-2b"] = [
    ({"layer_types": ["attention"] * 26}, "layer_types .* has 'attention'.*full_attention, sliding_attention"),
    ({"sliding_window": None}, "no sliding window"),
    ({"attn_logit_softcapping": 0}, "attn_logit_softcapping in config.json must be a number above 0.*, got 0"),
    ({"final_logit_softcapping": "30"}, "final_logit_softcapping in config.json .*, got '30'"),
    ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar in config.json .*, got -1"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ({"rope_parameters": {"full_attention": FLAT, "sliding_attention": FLAT}}, "rope_parameters must be one flat"),
]  # fmt: skip
OPTIONS["gemma-4-31b"] = [
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
    ({"layer_types": ["sliding_attention"] * 60}, "the last of layer_types .* is sliding_attention. It must be full"),
    ({"num_kv_shared_layers": 55}, "num_kv_shared_layers in config.json is 55, of 60 layers"),
    ({"num_global_key_value_heads": 5}, "32 .* is not a multiple of num_global_key_value_heads 5"),
    ({"global_head_dim": 511}, "global_head_dim in config.json is 511. It must be even"),
    ({"rope_scaling": {"factor": 2.0}}, "rope_scaling="),
    ({"per_layer_config": {"0": {"head_dim": 512}}}, "per_layer_config of config.json has '0': .*of layers with full"),
    ({"per_layer_config": {"5": {"sliding_window": 8}}}, "per_layer_config .* has '5': {'sliding_window': 8}"),
    ({"per_layer_config": {"5": {"head_dim": "x"}}}, "head_dim in per_layer_config of config.json, layer 5 must be"),
    ({"enable_moe_block": True}, "has no num_experts"),
    ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts .* from 1 to 4, got 5"),
    ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input .* is 9, and"),
]
OPTIONS["gemma-3-4b"] = [
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ({"sliding_window_pattern": 0}, "sliding_window_pattern in config.json must be an integer from 1 to .*, got 0"),
    ({"rope_parameters": FLAT}, "rope_parameters .* must be an object for each type of layers, got .*default"),
    ({"rope_parameters": {"full_attention": 7}}, "full_attention in rope_parameters .* must be an object, got 7"),
    ({"rope_scaling": [8.0]}, r"rope_scaling in config.json must be an object, got \[8.0\]"),
    ({"rope_local_base_freq": 0}, "rope_local_base_freq in config.json must be a number above 0.*, got 0"),
    ({"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "rope of sliding_attention .* has no factor"),
]
OPTIONS["jamba-52b"] = [
    ({"mamba_d_state": 257}, "mamba_d_state in config.json must be an integer from 1 to 256, got 257"),
    ({"mamba_d_conv": 1}, "mamba_d_conv in config.json must be an integer from 2 to 16, got 1"),
    ({"mamba_expand": 0}, "mamba_expand in config.json must be an integer from 1 to 16, got 0"),
    ({"hidden_size": 2**18, "mamba_expand": 16}, "mamba_expand times hidden_size in config.json is 4194304.*1048576"),
    ({"mamba_dt_rank": "all"}, "mamba_dt_rank in config.json must be an integer from 1 to 65536, got 'all'"),
    ({"num_experts": 2**20}, "num_experts in config.json must be an integer from 1 to 1024, got 1048576"),
    ({"num_experts": 0}, "num_experts in config.json must be an integer from 1 to 1024, got 0"),
    ({"num_experts_per_tok": 17}, "num_experts_per_tok in config.json must be an integer from 1 to 16, got 17"),
    ({"attn_layer_offset": 8}, "attn_layer_offset in config.json must be an integer from 0 to 7, got 8"),
    ({"expert_layer_period": 0}, "expert_layer_period in config.json must be an integer from 1 to 4096, got 0"),
    (
        {"expert_layer_period": 1, "expert_layer_offset": None},
        "expert_layer_offset in config.json is 1. It must be below",
    ),
    ({"num_key_value_heads": 5}, "num_attention_heads 32 in config.json is not a multiple of num_key_value_heads 5"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"sliding_window": 8}, "sliding_window=8"),
    ({"mamba_inner_layernorms": False}, "mamba_inner_layernorms=False"),
]
OPTIONS["qwen3-30b-a3b"] = [
    ({"num_experts": 2000}, "num_experts in config.json must be an integer from 1 to 1024, got 2000"),
    ({"num_experts_per_tok": 129}, "num_experts_per_tok in config.json must be an integer from 1 to 128, got 129"),
    ({"mlp_only_layers": [48]}, r"mlp_only_layers in config.json is \[48\]. It must list layers from 0 to 47"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step in config.json must be an integer from 1 to .*, got 0"),
    ({"moe_intermediate_size": "768"}, "moe_intermediate_size in config.json must be an integer .*, got '768'"),
    ({"norm_topk_prob": 1}, "norm_topk_prob in config.json must be true or false, got 1"),
    ({"architectures": ["Qwen2MoeForCausalLM"], "use_sliding_window": True}, "use_sliding_window=True"),
]
OPTIONS["qwen3-next-80b-a3b"] = [
    (
        {"linear_num_value_heads": 24},
        "linear_num_value_heads 24 in config.json is not a multiple of linear_num_key_heads 16",
    ),
    ({"linear_num_key_heads": 0}, "linear_num_key_heads in config.json must be an integer from 1 to 4096, got 0"),
    ({"linear_key_head_dim": 512}, "linear_key_head_dim in config.json must be an integer from 1 to 256, got 512"),
    ({"linear_value_head_dim": -1}, "linear_value_head_dim in config.json must be an integer from 1 to 256, got -1"),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim in config.json must be an integer from 2 to 16, got 1"),
    ({"full_attention_interval": 0}, "full_attention_interval in config.json must be an integer from 1 to .*, got 0"),
    ({"layer_types": ["sliding_attention"] * 48}, "'sliding_attention'.*full_attention, linear_attention"),
    ({"partial_rotary_factor": 2}, "partial_rotary_factor is 2"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"use_sliding_window": True}, "use_sliding_window=True"),
    ({"attn_output_gate": False}, "attn_output_gate=False"),
    ({"architectures": ["Qwen3_5MoeForCausalLM"], "norm_topk_prob": False}, "norm_topk_prob=False"),
]
OPTIONS["mixtral-8x7b"] = [
    ({"num_local_experts": 0}, "num_local_experts in config.json must be an integer from 1 to 1024, got 0"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok in config.json must be an integer from 1 to 8, got 9"),
]
OPTIONS["gpt-oss-20b"] = [
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"swiglu_limit": 10.0}, "swiglu_limit=10.0"),
    ({"swiglu_alpha": 1.0}, "swiglu_alpha=1.0"),
    ({"pyramid_kv": {"budget": 64}}, "pyramid_kv={'budget': 64}"),
    ({"sliding_window": None}, "no sliding window"),
    ({"num_experts_per_tok": 33}, "num_experts_per_tok in config.json must be an integer from 1 to 32, got 33"),
    ({"layer_types": ["chunked_attention"] * 24}, "layer_types in config.json has 'chunked_attention'"),
    ({"quantization_config": {"quant_method": "mxfp8"}}, "the quant_method 'mxfp8'"),
]
OPTIONS["mamba-2.8b"] = [
    ({"state_size": 0}, "state_size in config.json must be an integer from 1 to 256, got 0"),
    ({"conv_kernel": 17}, "conv_kernel in config.json must be an integer from 2 to 16, got 17"),
    ({"time_step_rank": 0.5}, "time_step_rank in config.json must be an integer from 1 to 65536, got 0.5"),
    ({"expand": 1.5}, "expand in config.json must be an integer from 1 to 16, got 1.5"),
    ({"layer_norm_epsilon": 0}, "layer_norm_epsilon in config.json must be a number above 0.*, got 0"),
]
OPTIONS["mamba-codestral-7b"] = [
    ({"head_dim": 32}, "num_heads times head_dim in config.json is 4096, and expand times hidden_size is 8192"),
    ({"n_groups": 3}, "n_groups in config.json is 3. It must divide the 128 heads"),
    ({"time_step_limit": [0.5, 0.5]}, r"time_step_limit in config.json is \[0.5, 0.5\]. It must be two rising numbers"),
    ({"time_step_limit": [0, {"__float__": "NaN"}]}, "It must be two rising numbers"),
    ({"state_size": 257}, "state_size in config.json must be an integer from 1 to 256, got 257"),
]
OPTIONS["granite-4-h-small"] = [
    ({"position_embedding_type": "alibi"}, "position_embedding_type in config.json is 'alibi'. nope and rope are"),
    ({"mamba_d_head": 32}, "mamba_n_heads times mamba_d_head in config.json is 4096, and mamba_expand times"),
    ({"num_local_experts": -1}, "num_local_experts in config.json must be an integer from 0 to 1024, got -1"),
    ({"layer_types": ["mamba", "mlp"] * 20}, "layer_types in config.json has 'mlp', which is not supported"),
    ({"attention_bias": True}, "attention_bias=True in config.json is not supported. Only False is"),
    ({"logits_scaling": 0}, "logits_scaling in config.json must be a number above 0.*, got 0"),
]
OPTIONS["nemotron-h-8b"] = [
    ({"hybrid_override_pattern": "-M"}, "block 0 in config.json is '-'. Supported: Mamba-2"),
    ({"hybrid_override_pattern": "M--"}, "block 2 in config.json is '-'"),
    ({"hybrid_override_pattern": "ME"}, "block 1 in config.json is 'E'"),
    ({"hybrid_override_pattern": None}, "hybrid_override_pattern in config.json is None. It must name 1 to 4096"),
    ({"layers_block_type": [["mamba"]]}, r"block 0 in config.json is \['mamba'\]"),
    ({"mamba_head_dim": 2**20}, "mamba_head_dim in config.json must be an integer from 1 to 8192, got 1048576"),
    ({"sliding_window": 8}, "sliding_window=8"),
]
OPTIONS["lfm2-1.2b"] = [
    ({"full_attn_idxs": [16]}, r"full_attn_idxs in config.json is \[16\]. It must list layers from 0 to 15"),
    ({"layer_types": ["conv", "mamba"] * 8}, "layer_types in config.json has 'mamba', which is not supported"),
    ({"conv_L_cache": 1}, "conv_L_cache in config.json must be an integer from 2 to 16, got 1"),
    ({"block_multiple_of": 2**31 - 1, "block_ffn_dim_multiplier": 1e9}, "result in .* columns. They must result in 1"),
]
OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
    ("gpt2", {"n_head": 7}, "hidden size 768 in config.json is not a multiple of n_head 7. n_head must divide it"),
    ("opt-125m", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=False"),
    ("llama-125m", {"architectures": [OLMO2], "clip_qkv": 8.0}, "clip_qkv=8.0"),
    (
        "llama-125m",
        {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1] * 11},
        "0 or 1 for each of 12 layers",
    ),
    ("llama-125m", {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": False}, "no_rope_layers is False"),
    ("llama-125m", {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [2] * 12}, r"no_rope_layers is \[2, 2"),
]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    OTHERS + [(name, *row) for name, rows in OPTIONS.items() for row in rows],
)
def test_options_that_are_not_implemented_are_refused_by_name(name: str, change: dict[str, Any], words: str) -> None:
    config = {**named_config(name), **change}
    with pytest.raises(StartupError, match=words):
        resolve_model_class(config)(config, torch.float32, torch.device("meta"))


def test_phi_4_mini() -> None:
    """By the keys of its config.json: three quarters of a head are rotated, and its window exceeds every sequence."""
    factors = {"short_factor": [1.0] * 48, "long_factor": [1.0 + i for i in range(48)]}
    config = {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "full_attn_mod": 1, "hidden_act": "silu",
        "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "phi3", "num_attention_heads": 24,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-5, "rope_scaling": {"type": "longrope", **factors},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
        "eos_token_id": 199999,
    }  # fmt: skip
    model = read_model_config(config)
    [rope] = model.ropes
    assert (rope.kind, rope.rotary_dim(128), rope.original_max_len, model.max_len) == ("longrope", 96, 4096, 131072)
    assert {layer.window for layer in model.layers} == {None}
    assert model.parameters == 3_836_021_760
    with pytest.raises(StartupError, match=r"have 47 numbers\. They must have 48"):
        read_model_config({**config, "rope_scaling": {"type": "longrope", **{k: [1.0] * 47 for k in factors}}})


def test_end_tokens() -> None:
    for value, ids in ((None, ()), (5, (5,)), ([5, 6], (5, 6))):
        assert read_spec({**named_config("gpt2"), "eos_token_id": value}).eos_ids == ids


def test_specs_need_no_torch_and_models_no_transformers() -> None:
    code = (
        "import sys; from quire.models import read_spec, resolve_model_class\n"
        "from quire.models.named_configs import named_config\n"
        "import quire.weights.checkpoint_files, quire.models.vision.named_configs, quire.text.images\n"
        "[read_spec(named_config(name)) for name in ('llama3.1-8b', 'internvl2-8b')]\n"
        "assert not {'torch', 'PIL', 'transformers'} & set(sys.modules)\n"
        "[resolve_model_class(named_config(name)) for name in ('gpt2', 'opt-125m', 'llama-7b')]; import "
        "quire.weights.loader\n"
        "assert 'torch' in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("first", [0, 11, 28, None])
def test_qwen_windows_without_layer_types_equal_transformers(first: int | None) -> None:
    change = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": first}
    change = {name: value for name, value in change.items() if value is not None}
    types = transformers.Qwen2Config(num_hidden_layers=28, **change).layer_types
    assert types is not None
    windows = [layer.window for layer in read_spec({**named_config("qwen2-7b"), **change}).layers]
    assert windows == [512 if kind == "sliding_attention" else None for kind in types]


def test_character_ai_layers_are_local_and_shared_by_our_map() -> None:
    """Every sixth layer is global; two neighbours of a run of local layers share, and three global ones in a row."""
    for name, layers, whole, kept in (("characterai-8b", 32, 5, (2, 16)), ("characterai-70b", 80, 13, (5, 40))):
        spec = read_spec(named_config(name))
        full = [i for i, layer in enumerate(spec.layers) if layer.window is None]
        assert full == list(range(5, layers, 6))
        assert len(full) == whole
        assert {layer.window for layer in spec.layers} == {None, 1024}
        owned = [sum((i in full) == one for i in spec.kv_layers) for one in (True, False)]
        assert tuple(owned) == kept
        assert spec.token_bytes(2) == 4096 * sum(kept)
    small = read_spec(named_config("characterai-8b")).layers
    assert [layer.kv_source_layer for layer in small[:8]] == [None, 0, None, 2, None, None, None, 6]
    assert [small[i].kv_source_layer for i in (5, 11, 17, 23, 29)] == [None, 5, 5, None, 23]


KINDS = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "sliding_window": 8, "attention_chunk_size": 4,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "chunked_attention"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"kv_sharing": [None, None, 3, None]}, "layer 2 shares with layer 3. It must be an earlier layer"),
        ({"kv_sharing": [None, None, 2, None]}, "layer 2 shares with layer 2"),
        ({"kv_sharing": [None, None, True, None]}, "layer 2 shares with layer True"),
        ({"kv_sharing": [None, None, "x" * 900, None]}, "layer 2 shares with layer '?xxx"),
        ({"kv_sharing": [None, None, 0, None]}, "layer 2 shares with layer 0, but they attend to a window of 8 tokens"),
        ({"kv_sharing": [None, None, None, 1]}, "they attend to chunks of 4 tokens and a window of 8 tokens"),
        ({"kv_sharing": [None, None, None]}, "is .None, None, None.. It must be a list of 4 layers or nulls"),
        ({"layer_types": ["sliding_attention"] * 4, "kv_sharing": [None, 0, 1, None]}, "layer 1, which shares with 0"),
        ({"sliding_window": 0}, "sliding_window in config.json must be an integer from 1 to"),
        ({"sliding_window": None}, "config.json has no sliding_window"),
        ({"attention_chunk_size": 0}, "attention_chunk_size in config.json must be an integer from 1 to"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers=2 in config.json is not supported"),
        ({"architectures": ["Qwen2ForCausalLM"], "kv_sharing": [None, 0, 0, 0]}, "kv_sharing=.* is not supported"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_are_refused_with_the_value(changes: dict[str, Any], cause: str) -> None:
    config = {**named_config("llama-125m"), **KINDS}
    assert [layer.kind for layer in read_spec(config).layers] == ["full", "window", "window", "chunked"]
    with pytest.raises(StartupError, match=cause) as failure:
        read_spec({**config, **changes})
    assert len(failure.value.cause) < 400


def test_windows_of_named_shapes() -> None:
    """Gemma-2's every second layer attends to all, from the second on; Gemma-3's every sixth, from the sixth on."""
    for name, period, window in (("gemma-2-9b", 2, 4096), ("gemma-2-27b", 2, 4096), ("gemma-3-4b", 6, 1024)):
        layers = read_spec(named_config(name)).layers
        assert [layer.window for layer in layers] == [window if i % period else None for i in range(1, len(layers) + 1)]
    small, large, third = (read_spec(named_config(name)) for name in ("gemma-2-2b", "gemma-2-27b", "gemma-3-4b"))
    assert {(layer.scale, layer.softcap) for layer in small.layers} == {(1 / 16, 50.0)}
    assert {(layer.scale, layer.softcap) for layer in large.layers} == {(1 / 12, 50.0)}
    assert {(layer.scale, layer.softcap) for layer in third.layers} == {(1 / 16, None)}
    assert (small.num_rope_tables, third.num_rope_tables) == (1, 2)
    assert third.max_len == 131_072, "what a scaling reaches, not what it starts from"


def test_ropes_of_two_types_in_older_configs_and_in_newer_ones() -> None:
    old = named_config("gemma-3-4b")
    new = {key: value for key, value in old.items() if not key.startswith("rope")}
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    layers = read_model_config(old).layers
    assert layers == read_model_config(new).layers
    ropes = [layer.rope for layer in layers[4:6]]
    assert [(rope.kind, rope.theta, rope.factor) for rope in ropes if rope] == [("default", 1e4, 1), ("linear", 1e6, 8)]
    bare = {key: value for key, value in new.items() if key != "rope_parameters"}
    theirs = transformers.Gemma3TextConfig().rope_parameters
    assert {rope.theta for rope in read_model_config(bare).ropes} == {rope["rope_theta"] for rope in theirs.values()}


def test_models_of_experts() -> None:
    """Qwen3-30B-A3B: 30.5 billion weights, of which a token uses 3.3; Mixtral 8x7B: 46.7, and 12.9."""
    for name, total, active, experts in (
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704, 48 * 128 * 3 * 2048 * 768),
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248, 32 * 8 * 3 * 4096 * 14336),
        ("gpt-oss-20b", 20_914_757_184, 4_193_246_784, 24 * 32 * 3 * 2880 * 2880),
    ):
        spec = read_spec(named_config(name))
        assert (spec.parameters, spec.expert_parameters) == (total, experts)
        assert spec.parameters - experts + experts * spec.active_experts // spec.experts == active
    with pytest.raises(StartupError, match=r"moe_intermediate_size 768\. Use 1, 2, 4, 8, 16 or 32"):
        read_spec(named_config("qwen3-30b-a3b"), Shard(0, 5))


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b"])
def test_the_number_of_experts_by_its_other_name(name: str) -> None:
    config = named_config(name)
    keys = "num_experts", "num_local_experts"
    own, other = keys if keys[0] in config else keys[::-1]
    count = config[own]
    for more in ({own: None, other: count}, {other: None}, {other: count}):
        assert read_model_config(config | more) == read_model_config(config)
    with pytest.raises(StartupError, match=f"{other} {count + 1} and {own} {count}"):
        read_model_config({**config, other: count + 1})


def test_layers_of_mamba2() -> None:
    """Mamba-Codestral-7B: 128 heads of 64 channels with 128 numbers each, and 8 groups. Ranks beyond the groups have
    copies of them."""
    config = named_config("mamba-codestral-7b")
    spec = read_spec(config)
    assert spec.parameters == 7_285_403_648
    assert [part.shape for part in spec.layers[0].state_tensors] == [(10240, 3), (128, 64, 128)]
    parts = read_spec(config, Shard(0, 16)).layers[0].state_tensors
    assert [part.shape for part in parts] == [(8 * 64 + 2 * 128, 3), (8, 64, 128)]
    with pytest.raises(StartupError, match="--tp is 8, and the 48 heads of the Mamba layers have 3 groups"):
        read_spec({**config, "num_heads": 48, "hidden_size": 1536, "n_groups": 3}, Shard(0, 8))
    with pytest.raises(StartupError, match="it has num_heads 128"):
        read_spec(config, Shard(0, 3))
    limits = {"time_step_limit": [0.001, {"__float__": "Infinity"}]}
    assert read_model_config({**config, **limits}).state_mixer.step_limits == (0.001, float("inf"))


def test_layers_of_granite_4() -> None:
    """granite-4.0-h-small: 36 layers of Mamba-2 to 4 of attention, 72 experts and a shared block in each."""
    spec = read_spec(named_config("granite-4-h-small"))
    assert [i for i, layer in enumerate(spec.layers) if not layer.state_tensors] == [5, 15, 25, 35]
    assert (spec.experts, spec.active_experts, spec.expert_parameters) == (72, 10, 40 * 72 * 3 * 4096 * 768)
    dense = read_model_config({**named_config("granite-4-h-small"), "num_local_experts": 0})
    assert (dense.experts, dense.intermediate, dense.spec().experts) == (None, 1536, 0)


def test_layers_of_nemotron_h() -> None:
    """Nemotron-H-8B: of 52 blocks 24 are Mamba-2, 4 attention and 24 MLPs; those behind another are of its layer."""
    config = named_config("nemotron-h-8b")
    spec = read_spec(config)
    assert [i for i, layer in enumerate(spec.layers) if not layer.state_tensors] == [4, 10, 16, 22]
    assert [i for i, layer in enumerate(read_model_config(config).layers) if layer.feed_forward == "none"] == [
        3,
        9,
        15,
        21,
    ]
    listed = {"M": "mamba", "*": "attention", "-": "mlp"}
    blocks = [listed[name] for name in config["hybrid_override_pattern"]]
    assert read_spec({**config, "hybrid_override_pattern": None, "layers_block_type": blocks}) == spec


def test_layers_of_lfm2() -> None:
    """LFM2-1.2B: 10 convolutions to 6 layers of attention, with two thirds of block_ff_dim."""
    config = read_model_config(named_config("lfm2-1.2b"))
    spec = config.spec()
    assert (config.intermediate, spec.parameters) == (8192, 1_170_340_608)
    assert [i for i, layer in enumerate(spec.layers) if not layer.state_tensors] == [2, 5, 8, 10, 12, 14]
    assert {layer.state_bytes for layer in spec.layers if layer.state_tensors} == {2048 * 2 * 2}
    given = {**named_config("lfm2-1.2b"), "block_ffn_dim_multiplier": 1.1, "block_multiple_of": 1000}
    assert read_model_config(given).intermediate == 10_000
    assert read_model_config({**given, "block_auto_adjust_ff_dim": False}).intermediate == 12288


def test_layers_of_jamba() -> None:
    """v0.1: 28 layers of Mamba to 4 of attention, 16 experts in every second one; 51.6 billion weights."""
    spec = read_spec(named_config("jamba-52b"))
    assert [i for i, layer in enumerate(spec.layers) if not layer.state_tensors] == [4, 12, 20, 28]
    assert spec.parameters == 51_570_323_328
    assert (spec.experts, spec.active_experts, spec.expert_parameters) == (16, 2, 16 * 16 * 3 * 4096 * 14336)
    dense = read_spec({**named_config("jamba-52b"), "num_experts": 1})
    assert (dense.experts, dense.active_experts, dense.expert_parameters) == (0, 0, 0)
    state = spec.layers[0].state_tensors
    assert [(part.name, part.shape, part.itemsize) for part in state] == [
        ("conv", (8192, 3), 2), ("ssm", (8192, 16), 4)
    ]  # fmt: skip
    short = spec.with_state_itemsize(2, 2)
    assert sum(layer.state_bytes for layer in short.layers) == 28 * 311_296
    assert short.with_state_itemsize(2, 4) == spec
    assert read_spec(named_config("mamba-2.8b")).parameters == 2_768_345_600
    plain = read_spec(named_config("llama3-8b"))
    assert plain.with_state_itemsize(2, 2) is plain
