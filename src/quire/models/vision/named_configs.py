"""The vision encoders of well-known models, as in their config.json and preprocessor_config.json, for plans and runs
with dummy weights. `VisionSettings.from_config` reads them. No torch.
"""

from __future__ import annotations

from typing import Any

# fmt: off
SIGLIP_SO400M = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "patch_size": 14, "vision_use_head": False,
}
GEMMA4_TOWER = {
    "model_type": "gemma4_vision", "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10_240,
    "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA4_TOKENS = {"image_token_id": 258_880, "vision_soft_tokens_per_image": 280}
GEMMA4_PREPROCESSOR = {
    "resample": 3, "size": {"height": 224, "width": 224}, "max_soft_tokens": 280, "patch_size": 16,
    "pooling_kernel_size": 3, "do_normalize": False,
}
CLIP_COLOURS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALF_COLOURS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
IMAGENET_COLOURS = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}

VISION_CONFIGS: dict[str, dict[str, Any]] = {
    "llava-onevision-7b": {
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "image_grid_pinpoints": [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)],
        "image_token_index": 151_646, "projector_hidden_act": "gelu", "vision_aspect_ratio": "anyres_max_9",
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        "vision_config": {**SIGLIP_SO400M, "image_size": 384, "num_hidden_layers": 26},
    },
    "internvl2-8b": {
        "architectures": ["InternVLChatModel"], "downsample_ratio": 0.5, "dynamic_image_size": True,
        "force_image_size": 448, "max_dynamic_patch": 12, "min_dynamic_patch": 1, "ps_version": "v2",
        "select_layer": -1, "use_thumbnail": True,
        "vision_config": {
            "architectures": ["InternVisionModel"], "hidden_act": "gelu", "hidden_size": 1024, "image_size": 448,
            "intermediate_size": 4096, "layer_norm_eps": 1e-6, "norm_type": "layer_norm", "num_attention_heads": 16,
            "num_hidden_layers": 24, "patch_size": 14, "qk_normalization": False, "qkv_bias": True,
        },
    },
    "phi-3-vision": {
        "architectures": ["Phi3VForCausalLM"],
        "embd_layer": {
            "embedding_cls": "image", "hd_transform_order": "sub_glb", "projection_cls": "mlp",
            "use_hd_transform": True, "with_learnable_separator": True,
        },
        "img_processor": {
            "image_dim_out": 1024, "model_name": "openai/clip-vit-large-patch14-336", "name": "clip_vision_model",
            "num_img_tokens": 144,
        },
    },
    "paligemma2-10b": {
        "architectures": ["PaliGemmaForConditionalGeneration"], "image_token_index": 257_152, "projection_dim": 3584,
        "vision_config": {**SIGLIP_SO400M, "image_size": 224, "projection_dim": 3584},
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "image_token_index": 262_144, "mm_tokens_per_image": 256,
        "vision_config": {**SIGLIP_SO400M, "image_size": 896},
    },
    "gemma-4-31b": {
        "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, **GEMMA4_TOKENS,
        "vision_config": {
            **GEMMA4_TOWER, "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
            "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72, "standardize": True,
            "use_clipped_linears": False,
        },
    },
    "gemma-4-e2b": {
        "architectures": ["Gemma4ForConditionalGeneration"], **GEMMA4_TOKENS,
        "vision_config": {
            **GEMMA4_TOWER, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16,
            "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64, "standardize": False,
            "use_clipped_linears": True,
        },
    },
    "llama-3.2-11b-vision": {
        "architectures": ["MllamaForConditionalGeneration"], "image_token_index": 128_256,
        "vision_config": {
            "model_type": "mllama_vision_model", "attention_heads": 16, "hidden_act": "gelu", "hidden_size": 1280,
            "image_size": 560, "intermediate_layers_indices": [3, 7, 15, 23, 30], "intermediate_size": 5120,
            "max_num_tiles": 4, "norm_eps": 1e-5, "num_global_layers": 8, "num_hidden_layers": 32, "patch_size": 14,
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
            "vision_output_dim": 7680,
        },
    },
}
"""Keys of config.json other than the text model's."""

PREPROCESSOR_CONFIGS: dict[str, dict[str, Any]] = {
    "llava-onevision-7b": {"resample": 3, "size": {"height": 384, "width": 384}, **HALF_COLOURS},
    "internvl2-8b": {"resample": 3, "size": 448, "crop_size": 448, "do_center_crop": True, **IMAGENET_COLOURS},
    "phi-3-vision": {"num_crops": 16, **CLIP_COLOURS},
    "paligemma2-10b": {"resample": 3, "size": {"height": 224, "width": 224}, **HALF_COLOURS},
    "gemma-3-4b": {
        "resample": 2, "size": {"height": 896, "width": 896}, "do_pan_and_scan": None, **HALF_COLOURS,
    },
    "gemma-4-31b": GEMMA4_PREPROCESSOR,
    "gemma-4-e2b": GEMMA4_PREPROCESSOR,
    "llama-3.2-11b-vision": {
        "resample": 2, "size": {"height": 560, "width": 560}, "max_image_tiles": 4, **CLIP_COLOURS,
    },
}
"""Keys of preprocessor_config.json."""
# fmt: on
