"""Models that transformers computes, tiny and random in fp32: tokens equal transformers' own; what can't run is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_equality import SIZES, Compared, Oracle, assert_equal, engine_of, outputs_of, random_model

from quire.models import uses_transformers
from quire.protocol.sampling_params import SamplingParams

WINDOW = {"sliding_window": 9, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 2,
           "moe_intermediate_size": 20}  # fmt: skip
GROUPS = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 10,
          "num_key_value_heads": 4}  # fmt: skip
HEAD = {"head_dim": 8}
ALL_HEADS = {"num_key_value_heads": 4}
TINY: dict[str, dict[str, Any]] = {
    "afmoe": {**EXPERTS, **WINDOW, **HEAD, "num_dense_layers": 1, "global_attn_every_n_layers": 2},
    "apertus": {}, "apertus1p5_text": {}, "arcee": {**HEAD}, "aria_text": {**HEAD, "moe_num_experts": 4, "moe_topk": 2},
    "axk1": {**EXPERTS, **GROUPS, **LATENT}, "beam": {**EXPERTS, **WINDOW, **HEAD}, "bitnet": {}, "codegen": {
        "n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4, "n_positions": 128, "n_ctx": 128},
    "cohere": {"logit_scale": 0.5}, "cohere2": {**WINDOW, **HEAD}, "cohere2_moe": {**WINDOW, **HEAD, **EXPERTS},
    "ctrl": {"n_embd": 32, "n_head": 4, "n_layer": 2, "dff": 48, "n_positions": 128}, "cwm": {**WINDOW, **HEAD},
    "deepseek_v2": {**EXPERTS, **GROUPS, **LATENT},
    "deepseek_v3": {**EXPERTS, **GROUPS, **LATENT}, "diffllama": {}, "dory": {**WINDOW, **HEAD},
    "dots1": {**EXPERTS, **GROUPS, **WINDOW, **HEAD}, "ernie4_5": HEAD,
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 6, "moe_k": 2, "moe_layer_start_index": 1},
    "exaone4": {**WINDOW, **HEAD}, "exaone_moe": {**WINDOW, **HEAD, **EXPERTS, **GROUPS}, "flex_olmo": EXPERTS,
    "gemma": HEAD, "gemma4_text": {**WINDOW, **HEAD, "global_head_dim": 16, "vocab_size_per_layer_input": 97,
      "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}, "gemma4_unified_text": {**WINDOW, **HEAD},
    "glm": HEAD, "glm4": HEAD, "glm4_moe": {**EXPERTS, **GROUPS, **HEAD}, "glm4_moe_lite": {**EXPERTS, **GROUPS, **LATENT},
    "gpt_bigcode": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128}, "gpt_neox": ALL_HEADS,
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4, "n_positions": 128},
    "granite": {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    "granitemoe": {**EXPERTS, "attention_multiplier": 0.3}, "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 20},
    "helium": HEAD, "hrm_text": HEAD, "hunyuan_v1_dense": HEAD, "hunyuan_v1_moe": {**HEAD, **EXPERTS, "moe_topk": 2},
    "hy_v3": {**EXPERTS, **HEAD, **GROUPS},
    "hyperclovax": HEAD, "jais2": HEAD, "kolibri1": {**WINDOW, **HEAD}, "laguna": {**EXPERTS, **WINDOW, **HEAD},
    "longcat_flash": {**EXPERTS, **LATENT, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 20, "num_layers": 2, "zero_expert_num": 2, "moe_topk": 2},
    "mellum": {**EXPERTS, **HEAD, **WINDOW}, "minicpm3": LATENT, "minimax_m2": {**EXPERTS, **HEAD, "rotary_dim": 4}, "minimax_m3_vl_text": {**EXPERTS, **HEAD},
    "ministral3": HEAD, "modernbert-decoder": {**WINDOW, **ALL_HEADS}, "nanochat": {},
    "nemotron": HEAD, "olmo": {"clip_qkv": 0.5}, "olmo3": WINDOW, "olmoe": EXPERTS, "persimmon": ALL_HEADS, "phi": {}, "phimoe": EXPERTS,
    "seed_oss": HEAD, "solar_open": {**EXPERTS, **GROUPS, **HEAD}, "starcoder2": {"sliding_window": 9}, "vaultgemma": {**WINDOW, **HEAD},
    "youtu": LATENT,
}


class SmallOracle(Oracle):
    def __init__(self, kind: str, folder: Path) -> None:
        self.compared, self.folder = Compared(), folder
        config = transformers.AutoConfig.for_model(kind, **{**SIZES, **TINY[kind]})
        self.model = random_model(config)
        for name, buffer in self.model.named_buffers():
            if name.endswith("bias"):
                buffer.normal_(0, 0.1)
        self.model.save_pretrained(folder)
        self.ask()
