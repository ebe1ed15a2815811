"""Named configs: config.json objects with the published dimensions of well-known models, for plans, simulations and
runs with dummy weights (`--model-config NAME`). Sources: each model's config.json; GPT-3's paper, table 2.1. No torch.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from quire.errors import StartupError
from quire.models.vision.named_configs import PREPROCESSOR_CONFIGS, VISION_CONFIGS
from quire.models.vision.settings import PREPROCESSOR_KEY

# fmt: off

def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, length: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": ffn, "vocab_size": vocab, "max_position_embeddings": length, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1,
        "eos_token_id": 2, "dtype": "bfloat16", **more,
    }


_LLAMA3 = {"rope_theta": 500000.0, "bos_token_id": 128000, "eos_token_id": 128001}
_LLAMA31_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_PYRAMID = {**_LLAMA3, "rope_scaling": _LLAMA31_ROPE, "pyramid_kv": {"average": 2048}}
_LLAMA32_1B = {
    **_LLAMA3, "rope_scaling": {**_LLAMA31_ROPE, "factor": 32.0}, "head_dim": 64, "tie_word_embeddings": True,
}


def _character_ai(layers: int) -> dict[str, Any]:
    """Return the attention keys of character.ai's models ("Optimizing AI inference", 2024) for a Llama: windows of
    1,024 tokens, every sixth layer global, and layers that share keys and values. The sharing layers are not published;
    here two adjacent local layers share, and three successive global ones."""
    full = range(5, layers, 6)
    sharing: list[int | None] = [i - 1 if i % 6 in (1, 3) else None for i in range(layers)]
    for n, layer in enumerate(full):
        sharing[layer] = full[n - n % 3] if n % 3 else None
    types = ["full_attention" if i in full else "sliding_attention" for i in range(layers)]
    return {"layer_types": types, "sliding_window": 1024, "kv_sharing": sharing}


_YI = {"rope_theta": 5000000.0}
# Its authors state that theta was raised to between 5e6 and 1e7 for 200K tokens; the exact value could not be checked.
# No size depends on it.
_YI_200K = {"rope_theta": 10000000.0}
_MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}
_MINISTRAL = {
    **_MISTRAL, "architectures": ["MinistralForCausalLM"], "model_type": "ministral", "sliding_window": 32768,
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 9, "rope_theta": 1e8, "head_dim": 128,
}
# A draft model for Ministral 8B that was never published: Llama-3.2-1B's shape (Jenga's evaluation gives no more), with
# the tokens of Ministral 8B.
_MINISTRAL_1B = {**_LLAMA32_1B, "bos_token_id": 1, "eos_token_id": 2}
_QWEN = {"rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "bos_token_id": 151643, "use_sliding_window": False}
_QWEN2 = {**_QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "eos_token_id": 151643}
_QWEN3 = {
    **_QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "eos_token_id": 151645, "head_dim": 128,
}

# Qwen3-Next-80B-A3B-Instruct. The 5,120 columns of its intermediate_size are not used: all layers have experts.
_QWEN3_NEXT_80B = {
    **_QWEN, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "eos_token_id": 151645,
    "head_dim": 256, "partial_rotary_factor": 0.25, "rope_theta": 10000000.0, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}


def _opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": hidden, "word_embed_proj_dim": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "ffn_dim": 4 * hidden, "vocab_size": 50272,
        "max_position_embeddings": 2048, "activation_function": "relu", "do_layer_norm_before": True,
        "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 2, "dtype": "float16",
    }


def _gpt2(hidden: int, layers: int, heads: int, length: int, dtype: str = "float32") -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": hidden, "n_layer": layers,
        "n_head": heads, "n_positions": length, "vocab_size": 50257, "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256,
        "dtype": dtype,
    }


def _gemma2(hidden: int, layers: int, heads: int, ffn: int, head_dim: int, scalar: int) -> dict[str, Any]:
    """Gemma-2: half as many key heads as query heads, and a window in every second layer."""
    return {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2,
        "intermediate_size": ffn, "head_dim": head_dim, "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096, "vocab_size": 256000,
        "max_position_embeddings": 8192, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1, "dtype": "bfloat16",
    }


# The text models of Gemma-3. Their config.json files leave out transformers' defaults and could not be read; the
# window, the pattern and the ropes are those of published conversions.
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "sliding_window": 1024, "sliding_window_pattern": 6, "vocab_size": 262208,
    "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "eos_token_id": [1, 106],
}
_GEMMA3_4B = {**_gemma2(2560, 34, 8, 10240, 256, 256), **_GEMMA3}


def _gemma4(
    hidden: int, layers: int, heads: int, kv_heads: int, full_kv_heads: int, ffn: int, **more: Any
) -> dict[str, Any]:
    """The text model of a Gemma-4: five layers with a window to each without, which has larger heads."""
    return {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": full_kv_heads, "attention_k_eq_v": True, "head_dim": 256, "global_head_dim": 512,
        "intermediate_size": ffn, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * (layers // 6), "sliding_window": 1024,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "final_logit_softcapping": 30.0, "vocab_size": 262144, "max_position_embeddings": 262144,
        "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "bos_token_id": 2,
        "eos_token_id": [1, 106], "dtype": "bfloat16", **more,
    }


_GEMMA4_EXPERTS = {
    "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
}
_GEMMA4_E2B = _gemma4(
    1536, 35, 8, 1, 1, 6144, attention_k_eq_v=False, num_global_key_value_heads=None, sliding_window=512,
    layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7, hidden_size_per_layer_input=256,
    vocab_size_per_layer_input=262144, num_kv_shared_layers=20, use_double_wide_mlp=True,
    max_position_embeddings=131072,
)
_GEMMA4_31B = _gemma4(5376, 60, 32, 16, 4, 21504, use_bidirectional_attention="vision")
_QWEN3_MOE = {
    **_QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
    "rope_theta": 1000000.0, "sliding_window": None,
}
# The experts' weights are in MXFP4 in the checkpoints; here they are not.
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
    "vocab_size": 201088, "max_position_embeddings": 131072, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "attention_bias": True, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False, "eos_token_id": 200002, "dtype": "bfloat16",
}
_GPT_OSS_120B = {
    **_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
# Jamba-v0.1; its config.json has transformers' defaults.
_JAMBA = {
    "architectures": ["JambaForCausalLM"], "model_type": "jamba", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 65536,
    "max_position_embeddings": 262144, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attn_layer_period": 8,
    "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 16,
    "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256,
    "mamba_conv_bias": True, "mamba_proj_bias": False, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "dtype": "bfloat16",
}


def _mamba(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": hidden,
        "num_hidden_layers": layers, "vocab_size": 50280, "state_size": 16, "conv_kernel": 4, "expand": 2,
        "time_step_rank": hidden // 16, "use_conv_bias": True, "use_bias": False, "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
        "dtype": "float32",
    }


# Mamba-Codestral-7B-v0.1; its config.json has transformers' defaults.
_MAMBA2_7B = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 64,
    "vocab_size": 32768, "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "expand": 2,
    "conv_kernel": 4, "use_conv_bias": True, "use_bias": False, "hidden_act": "silu", "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 2, "dtype": "bfloat16",
}
# The multipliers are those of the other Granites with this hidden size.
_GRANITE_4_H_SMALL = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 4096,
    "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 100352,
    "intermediate_size": 768, "shared_intermediate_size": 1536, "num_local_experts": 72, "num_experts_per_tok": 10,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "mamba_n_heads": 128, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
    "mamba_proj_bias": False, "position_embedding_type": "nope", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22, "logits_scaling": 16.0, "tie_word_embeddings": True, "eos_token_id": 100257,
    "dtype": "bfloat16",
}
_NEMOTRON_H_8B = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "num_hidden_layers": 52,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504,
    "mlp_hidden_act": "relu2", "vocab_size": 131072, "mamba_num_heads": 128, "mamba_head_dim": 64,
    "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True, "use_bias": False,
    "mlp_bias": False, "attention_bias": False, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 8192,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
}
_LFM2_12B = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "block_ff_dim": 12288, "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True, "vocab_size": 65536, "conv_L_cache": 3,
    "conv_bias": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "max_position_embeddings": 128000, "norm_eps": 1e-5,
    "rope_theta": 1000000.0, "tie_embedding": True, "bos_token_id": 1, "eos_token_id": 7, "dtype": "bfloat16",
}
_QWEN2_TEXT = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152128, "max_position_embeddings": 32768,
    "rope_theta": 1000000.0, "use_sliding_window": False, "eos_token_id": 151645,
}
_INTERNLM2 = {
    "model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 92553,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
    "rope_scaling": {"type": "dynamic", "factor": 2.0}, "bias": False, "eos_token_id": 2,
}
_GEMMA2 = {
    "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
    "num_key_value_heads": 8, "intermediate_size": 14336, "head_dim": 256, "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096, "vocab_size": 257216,
    "hidden_activation": "gelu_pytorch_tanh", "eos_token_id": [1, 107],
}
_SHORT = [
    1.05, 1.05, 1.05, 1.1, 1.1, 1.1, 1.25, 1.25, 1.4, 1.45, 1.55, 1.85, 1.9, *[2.0] * 19, 2.1, 2.1, 2.2, *[2.35] * 4,
    2.4, 2.4, 2.65, 2.7, 2.9, 2.95, 3.05, 3.05, 3.05,
]

_LONG = [
    1.03, 1.05, 1.05, 1.08, 1.23, 1.23, 1.3, 1.45, 1.6, 1.65, 1.9, 2.86, 3.69, 5.42, 5.49, 5.49, 9.09, 11.58, 15.66,
    15.77, 15.79, 18.36, 21.99, 23.08, 30.01, 32.35, 32.59, 35.56, 39.95, 53.84, 56.2, 57.95, 59.29, 59.77, 59.92,
    61.19, 61.96, 62.5, 63.37, 63.48, 63.48, 63.66, 63.85, 64.08, 64.76, 64.8, 64.81, 64.81,
]
_PHI3 = {
    "model_type": "phi3_v", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 32064, "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "rope_scaling": {"type": "su", "short_factor": _SHORT, "long_factor": _LONG}, "sliding_window": 131072,
    "eos_token_id": 2,
}


def _llama_vision(hidden: int, layers: int, heads: int, intermediate: int) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "model_type": "mllama_text_model", "hidden_size": hidden, "num_hidden_layers": layers,
        "cross_attention_layers": list(range(3, layers, 5)), "num_attention_heads": heads, "num_key_value_heads": 8,
        "intermediate_size": intermediate,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": {**rope, "original_max_position_embeddings": 8192}, "eos_token_id": [128001, 128008, 128009],
    }


def _vision_language(encoder: str, **text: Any) -> dict[str, Any]:
    more = {PREPROCESSOR_KEY: PREPROCESSOR_CONFIGS[encoder], "tie_word_embeddings": False, "dtype": "bfloat16"}
    return {**VISION_CONFIGS[encoder], **text, **more}


VISION_LANGUAGE_CONFIGS: dict[str, dict[str, Any]] = {
    "llava-onevision-7b": _vision_language("llava-onevision-7b", text_config=_QWEN2_TEXT),
    "internvl2-8b": _vision_language("internvl2-8b", llm_config=_INTERNLM2),
    "phi-3-vision-4b": _vision_language("phi-3-vision", **_PHI3),
    "llama3.2-vision-11b": _vision_language("llama-3.2-11b-vision", text_config=_llama_vision(4096, 40, 32, 14336)),
    "llama3.2-vision-90b": _vision_language("llama-3.2-11b-vision", text_config=_llama_vision(8192, 100, 64, 28672)),
    "paligemma2-10b": {**_vision_language("paligemma2-10b", text_config=_GEMMA2), "tie_word_embeddings": True},
    "gemma-3-4b-vision": {**_vision_language("gemma-3-4b", text_config=_GEMMA3_4B), "tie_word_embeddings": True},
    "gemma-4-31b-vision": {**_vision_language("gemma-4-31b", text_config=_GEMMA4_31B), "tie_word_embeddings": True},
    "gemma-4-e2b-vision": {**_vision_language("gemma-4-e2b", text_config=_GEMMA4_E2B), "tie_word_embeddings": True},
}


CONFIGS: dict[str, dict[str, Any]] = {
    "opt-125m": _opt(768, 12, 12),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-66b": _opt(9216, 64, 72),
    "opt-175b": _opt(12288, 96, 96),
    "gpt2": _gpt2(768, 12, 12, 1024),
    "gpt2-xl": _gpt2(1600, 48, 25, 1024),
    "gpt3-175b": _gpt2(12288, 96, 96, 2048, "float16"),
    "llama-125m": _llama(768, 12, 12, 4, 2048, 32000, 4096),
    "llama-7b": _llama(4096, 32, 32, 32, 11008, 32000, 2048, rms_norm_eps=1e-6, dtype="float16"),
    "llama-13b": _llama(5120, 40, 40, 40, 13824, 32000, 2048, rms_norm_eps=1e-6, dtype="float16"),
    "llama2-7b": _llama(4096, 32, 32, 32, 11008, 32000, 4096, dtype="float16"),
    "llama3-8b": _llama(4096, 32, 32, 8, 14336, 128256, 8192, **_LLAMA3),
    "llama3.1-8b": _llama(4096, 32, 32, 8, 14336, 128256, 131072, **_LLAMA3, rope_scaling=_LLAMA31_ROPE),
    "llama3-70b": _llama(8192, 80, 64, 8, 28672, 128256, 8192, **_LLAMA3),
    "pyramidkv-8b": _llama(4096, 32, 32, 8, 14336, 128256, 131072, **_PYRAMID),
    "pyramidkv-70b": _llama(8192, 80, 64, 8, 28672, 128256, 131072, **_PYRAMID),
    "llama3.2-1b": _llama(2048, 16, 32, 8, 8192, 128256, 131072, **_LLAMA32_1B),
    "characterai-8b": _llama(4096, 32, 32, 8, 14336, 128256, 8192, **_LLAMA3, **_character_ai(32)),
    "characterai-70b": _llama(8192, 80, 64, 8, 28672, 128256, 8192, **_LLAMA3, **_character_ai(80)),
    "yi-6b": _llama(4096, 32, 32, 4, 11008, 64000, 4096, **_YI),
    "yi-6b-200k": _llama(4096, 32, 32, 4, 11008, 64000, 200000, **_YI_200K),
    "yi-34b": _llama(7168, 60, 56, 8, 20480, 64000, 4096, **_YI),
    "mistral-7b": _llama(4096, 32, 32, 8, 14336, 32000, 32768, **_MISTRAL),
    "mixtral-8x7b": _llama(4096, 32, 32, 8, 14336, 32000, 32768, **_MIXTRAL),
    "ministral-8b": _llama(4096, 36, 32, 8, 12288, 131072, 131072, **_MINISTRAL),
    "ministral-1b": _llama(2048, 16, 32, 8, 8192, 131072, 131072, **_MINISTRAL_1B),
    "gemma-2-2b": _gemma2(2304, 26, 8, 9216, 256, 256),
    # Mirrors of the 9B config.json disagree on query_pre_attn_scalar: 224 (hidden / heads) in the first ones, 256 (the
    # head size) as in Google's code. No size depends on it.
    "gemma-2-9b": _gemma2(3584, 42, 16, 14336, 256, 256),
    "gemma-2-27b": _gemma2(4608, 46, 32, 36864, 128, 144),
    "gemma-3-4b": _GEMMA3_4B,
    "gemma-3-12b": {**_gemma2(3840, 48, 16, 15360, 256, 256), **_GEMMA3},
    "gemma-4-31b": _GEMMA4_31B,
    "gemma-4-26b-a4b": _gemma4(2816, 30, 16, 8, 2, 2112, **_GEMMA4_EXPERTS),
    "gemma-4-e2b": _GEMMA4_E2B,
    "qwen2-7b": _llama(3584, 28, 28, 4, 18944, 152064, 131072, **_QWEN2),
    "jamba-52b": _JAMBA,
    "mamba-2.8b": _mamba(2560, 64),
    "mamba-codestral-7b": _MAMBA2_7B,
    "lfm2-1.2b": _LFM2_12B,
    "granite-4-h-small": _GRANITE_4_H_SMALL,
    "nemotron-h-8b": _NEMOTRON_H_8B,
    "qwen3-8b": _llama(4096, 36, 32, 8, 12288, 151936, 40960, **_QWEN3),
    "qwen3-30b-a3b": _llama(2048, 48, 32, 4, 6144, 151936, 40960, **_QWEN3_MOE),
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-120b": _GPT_OSS_120B,
    "qwen3-next-80b-a3b": _llama(2048, 48, 16, 2, 5120, 151936, 262144, **_QWEN3_NEXT_80B),
    **VISION_LANGUAGE_CONFIGS,
}
# fmt: on


def named_config(name: str) -> dict[str, Any]:
    """Return a new copy of the config `name`. Raise StartupError for an unknown name."""
    if name not in CONFIGS:
        raise StartupError(f"there is no model config {name!r}", f"Known: {', '.join(CONFIGS)}")
    return deepcopy(CONFIGS[name])
