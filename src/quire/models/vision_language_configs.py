"""Well-known models whose text has pictures' rows in place of tokens' embeddings: what their config.json says of the
text, put together with what it says of the eyes. Sources: their own config.json; for Phi-3-Vision a copy of it in
diffusers' tests. No torch.
"""

from __future__ import annotations

from typing import Any

from quire.models.vision.named_configs import PREPROCESSOR_CONFIGS, VISION_CONFIGS
from quire.models.vision_language_settings import PREPROCESSOR_KEY

_LONG = [
    1.03, 1.05, 1.05, 1.08, 1.23, 1.23, 1.3, 1.45, 1.6, 1.65, 1.9, 2.86, 3.69, 5.42, 5.49, 5.49, 9.09, 11.58, 15.66,
    15.77, 15.79, 18.36, 21.99, 23.08, 30.01, 32.35, 32.59, 35.56, 39.95, 53.84, 56.2, 57.95, 59.29, 59.77, 59.92,
    61.19, 61.96, 62.5, 63.37, 63.48, 63.48, 63.66, 63.85, 64.08, 64.76, 64.8, 64.81, 64.81,
]  # fmt: skip
_SHORT = [
    1.05, 1.05, 1.05, 1.1, 1.1, 1.1, 1.25, 1.25, 1.4, 1.45, 1.55, 1.85, 1.9, *[2.0] * 19, 2.1, 2.1, 2.2, *[2.35] * 4,
    2.4, 2.4, 2.65, 2.7, 2.9, 2.95, 3.05, 3.05, 3.05,
]  # fmt: skip
_QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152128,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "eos_token_id": 151645,
}
_INTERNLM2 = {
    "model_type": "internlm2",
    "architectures": ["InternLM2ForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 92553,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "bias": False,
    "eos_token_id": 2,
}
_GEMMA2 = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
    "vocab_size": 257216,
    "hidden_activation": "gelu_pytorch_tanh",
    "eos_token_id": [1, 107],
}
_PHI3 = {
    "model_type": "phi3_v",
    "hidden_size": 3072,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 8192,
    "vocab_size": 32064,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "su", "short_factor": _SHORT, "long_factor": _LONG},
    "sliding_window": 131072,
    "eos_token_id": 2,
}


def _llama_vision(hidden: int, layers: int, heads: int, intermediate: int) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "model_type": "mllama_text_model",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "cross_attention_layers": list(range(3, layers, 5)),
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": intermediate,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {**rope, "original_max_position_embeddings": 8192},
        "eos_token_id": [128001, 128008, 128009],
    }


def _vision_language(eyes: str, **text: Any) -> dict[str, Any]:
    return {
        **VISION_CONFIGS[eyes],
        **text,
        PREPROCESSOR_KEY: PREPROCESSOR_CONFIGS[eyes],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


VISION_LANGUAGE_CONFIGS: dict[str, dict[str, Any]] = {
    "llava-onevision-7b": _vision_language("llava-onevision-7b", text_config=_QWEN2),
    "internvl2-8b": _vision_language("internvl2-8b", llm_config=_INTERNLM2),
    "phi-3-vision-4b": _vision_language("phi-3-vision", **_PHI3),
    "llama3.2-vision-11b": _vision_language("llama-3.2-11b-vision", text_config=_llama_vision(4096, 40, 32, 14336)),
    "llama3.2-vision-90b": _vision_language("llama-3.2-11b-vision", text_config=_llama_vision(8192, 100, 64, 28672)),
    "paligemma2-10b": _vision_language("paligemma2-10b", text_config=_GEMMA2),
}
