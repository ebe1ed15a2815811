"""Every family and option, tiny and random, in fp32, loaded from transformers' checkpoint: its logits to 1e-4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dense_context import DenseContext
from safetensors.torch import load_file, save_file

from quire.models import read_model_config, read_spec, resolve_model_class
from quire.models.architectures import ARCHITECTURES, Architecture
from quire.models.decoder import attention_sinks
from quire.weights.checkpoint_files import read_config
from quire.weights.loader import load_weights

LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 97, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
SMOLLM3_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [1, 0, 1]}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
OPT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "vocab_size": 97,
    "max_position_embeddings": 64, "word_embed_proj_dim": 32,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 64}
GEMMA = {**LLAMA, "head_dim": 16, "tie_word_embeddings": True, "sliding_window": 5, "query_pre_attn_scalar": 11}
GEMMA2 = {**GEMMA, "attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5}  # so tight that they matter
GEMMA3 = {**GEMMA, "num_hidden_layers": 7}
GEMMA4 = {
    **GEMMA, "num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0, "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
    },
}  # fmt: skip
GEMMA4_SHARED = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "output_hidden_states": True}
GEMMA4_INPUTS = {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 99}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 20}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHARP_YARN = {  # truncate matters
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48, "beta_fast": 3, "rope_theta": 100.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.2, 2.0, 3.0, 5.0],
    "original_max_position_embeddings": 16, "rope_theta": 10000.0,
}  # fmt: skip
GPT_OSS = {**LLAMA, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
MIXTRAL = {**LLAMA, "num_local_experts": 4}
QWEN_MOE = {**LLAMA, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
QWEN2_MOE = {**QWEN_MOE, "shared_expert_intermediate_size": 28}
PHI4 = {
    **LLAMA, "hidden_size": 192, "num_attention_heads": 12, "num_key_value_heads": 4, "pad_token_id": None,
    "tie_word_embeddings": True,
    "partial_rotary_factor": 0.75, "original_max_position_embeddings": 16, "sliding_window": 128,
    "rope_scaling": {
        "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.2, 1.5, 2.0, 3.0, 4.0, 5.0],
    },
}  # fmt: skip
QWEN3_NEXT = {
    **QWEN2_MOE, "num_hidden_layers": 2, "head_dim": 16, "layer_types": ["full_attention"] * 2, "mlp_only_layers": [1],
}  # fmt: skip
LANGUAGE = "model.language_model."
YARN_GEMMA = {"rope_theta": 300.0, **YARN}
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
}


def rope(**parameters: Any) -> dict[str, Any]:
    return {**LLAMA, "rope_parameters": {"rope_theta": 10000.0, **parameters}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama, one kv head a query head": ("Llama", {**LLAMA, "num_key_value_heads": 4}),
    "llama, seven query heads a kv head": ("Llama", {**LLAMA, "hidden_size": 56, "num_attention_heads": 14}),
    "llama, tied": ("Llama", {**LLAMA, "tie_word_embeddings": True}),
    "llama, biases": ("Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama, head_dim": ("Llama", {**LLAMA, "head_dim": 10}),
    "llama, gelu": ("Llama", {**LLAMA, "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3}),
    "rope theta": ("Llama", rope(rope_type="default", rope_theta=500.0)),
    "rope linear": ("Llama", rope(rope_type="linear", factor=2.5)),
    "rope dynamic": ("Llama", rope(rope_type="dynamic", factor=2.0)),
    "rope yarn": ("Llama", rope(**YARN)),
    "rope yarn, mscale": ("Llama", rope(**YARN, mscale=0.7, mscale_all_dim=1.3)),
    "rope yarn, attention_factor": ("Llama", rope(**YARN, attention_factor=1.5, beta_fast=4, beta_slow=2)),
    "rope yarn, not truncated": ("Llama", rope(**SHARP_YARN, truncate=False)),
    "rope llama3": ("Llama", rope(**LLAMA3_ROPE, original_max_position_embeddings=32)),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": 5}),
    "mistral, no window": ("Mistral", {**LLAMA, "sliding_window": None}),
    "ministral": ("Ministral", {**LLAMA, "head_dim": 16, "sliding_window": 5, "layer_types": TYPES}),
    "ministral, windows everywhere": ("Ministral", {**LLAMA, "head_dim": 16, "sliding_window": 7}),
    "qwen2": ("Qwen2", LLAMA),
    "qwen2, windows by max_window_layers": ("Qwen2", {**LLAMA, **QWEN_WINDOW}),
    "qwen2, windows by layer_types": ("Qwen2", {**LLAMA, **QWEN_WINDOW, "layer_types": TYPES}),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 16}),
    "qwen3, tied and biased": ("Qwen3", {**LLAMA, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {**LLAMA, "num_hidden_layers": 5, "pad_token_id": None}),
    "smollm3, listed, windows, biased": (
        "SmolLM3",
        {**LLAMA, **SMOLLM3_WINDOW, "pad_token_id": None, "attention_bias": True, "mlp_bias": True},
    ),
    "smollm3, windows by layer_types": (
        "SmolLM3",
        {**LLAMA, **SMOLLM3_WINDOW, "pad_token_id": None, "layer_types": TYPES, "tie_word_embeddings": True},
    ),
    "olmo2": ("Olmo2", {**LLAMA, "pad_token_id": None}),
    "olmo2, tied, biased, rope": (
        "Olmo2",
        {**rope(**YARN), "pad_token_id": None, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral, window, one expert a token": ("Mixtral", {**MIXTRAL, "sliding_window": 5, "num_experts_per_tok": 1}),
    "qwen2_moe": ("Qwen2_Moe", QWEN2_MOE),
    "qwen2_moe, dense layers, normalised": (
        "Qwen2_Moe",
        {**QWEN2_MOE, "mlp_only_layers": [1], "norm_topk_prob": True, "qkv_bias": False, "hidden_act": "gelu"},
    ),
    "qwen2_moe, windows": ("Qwen2_Moe", {**QWEN2_MOE, **QWEN_WINDOW, "layer_types": TYPES}),
    "qwen3_moe": ("Qwen3_Moe", {**QWEN_MOE, "head_dim": 16}),
    "qwen3_moe, every second layer, normalised, window": (
        "Qwen3_Moe",
        {**QWEN_MOE, "decoder_sparse_step": 2, "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 5},
    ),
    "qwen3_moe, biased, tied": ("Qwen3_Moe", {**QWEN_MOE, "attention_bias": True, "tie_word_embeddings": True}),
    "gpt_oss": ("Gpt_Oss", GPT_OSS),
    "gpt_oss, layer_types, no biases, plain rope": (
        "Gpt_Oss",
        {
            **GPT_OSS,
            "layer_types": TYPES,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "qwen3_next, attention alone": ("Qwen3_Next", QWEN3_NEXT),
    "qwen3_next, attention alone, biased": (
        "Qwen3_Next",
        {**QWEN3_NEXT, "attention_bias": True, "norm_topk_prob": False, "partial_rotary_factor": 1.0},
    ),
    "phi3": ("Phi3", {**LLAMA, "pad_token_id": None}),
    "phi3, window, tied": ("Phi3", {**LLAMA, "pad_token_id": None, "sliding_window": 5, "tie_word_embeddings": True}),
    "phi3, longrope": (
        "Phi3",
        {**LLAMA, "pad_token_id": None, "original_max_position_embeddings": 16, "rope_parameters": LONGROPE},
    ),
    "phi3, as Phi-4-mini": ("Phi3", PHI4),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma2, bounds as published": ("Gemma2", {**GEMMA, "num_hidden_layers": 4}),
    "gemma2, no bounds": ("Gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2, untied, biased": ("Gemma2", {**GEMMA2, "tie_word_embeddings": False, "attention_bias": True}),
    "gemma2, layer_types": ("Gemma2", {**GEMMA2, "layer_types": TYPES, "rope_parameters": YARN_GEMMA}),
    "gemma3": ("Gemma3_Text", GEMMA3),
    "gemma3, every third layer full": ("Gemma3_Text", {**GEMMA3, "sliding_window_pattern": 3}),
    "gemma3, layer_types, ropes": ("Gemma3_Text", {**GEMMA, "layer_types": TYPES, "rope_parameters": ROPES}),
    "gemma3, bounded logits, biased": (
        "Gemma3_Text",
        {**GEMMA3, "final_logit_softcapping": 1.5, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma4": ("Gemma4_Text", GEMMA4),
    "gemma4, shared keys and values, softcap": (
        "Gemma4_Text",
        {**GEMMA4, **GEMMA4_SHARED, "final_logit_softcapping": 1.5, "attention_bias": True, "attention_k_eq_v": False},
    ),
    "gemma4, experts": ("Gemma4_Text", {**GEMMA4, **GEMMA4_EXPERTS}),
    "gemma4, per-layer inputs": ("Gemma4_Text", {**GEMMA4, **GEMMA4_SHARED, **GEMMA4_INPUTS}),
    "gemma4, all": ("Gemma4_Text", {**GEMMA4, **GEMMA4_SHARED, **GEMMA4_EXPERTS, **GEMMA4_INPUTS}),
    "opt": ("OPT", OPT),
    "opt, norm after, projected": ("OPT", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    "opt, norm before, projected": ("OPT", {**OPT, "word_embed_proj_dim": 48}),
    "opt, no biases, gelu": ("OPT", {**OPT, "enable_bias": False, "activation_function": "gelu"}),
    "opt, no final norm": ("OPT", {**OPT, "_remove_final_layer_norm": True}),
    "gpt2": ("GPT2", GPT2),
    "gpt2, n_inner": ("GPT2", {**GPT2, "n_inner": 40, "activation_function": "relu"}),
}


def layer_scalars(model: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers that a checkpoint has."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]


def reference(family: str, options: dict[str, Any], folder: Path, **save: Any) -> transformers.PreTrainedModel:
    """transformers' model with random weights (norms and biases too), saved to `folder`."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family.lower(), **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in (*model.parameters(), *layer_scalars(model)):
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder, **save)
    return model


def built(folder: Path, prepare: bool = True) -> Any:
    config = read_config(folder)
    model = resolve_model_class(config)(config, torch.float32, torch.device("cpu"))
    load_weights(model, folder)
    if prepare:
        model.prepare()
    return model


def run(model: Any, context: DenseContext, tokens: torch.Tensor, start: int = 0) -> torch.Tensor:
    positions, context.sinks = torch.arange(start, start + len(tokens)), attention_sinks(model)
    return model.logits(model.forward(tokens, context.step(positions, torch.zeros_like(positions))))


def test_every_declared_family_has_a_case() -> None:
    declared = {name for name, one in ARCHITECTURES.items() if one == Architecture(one.read)}
    elsewhere = {
        "InternLM2ForCausalLM",
        "MiMoForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "GptOssForCausalLM",
        "Gemma3ForCausalLM",
        "GPT2LMHeadModel",
        *(
            "JambaForCausalLM",
            "MambaForCausalLM",
            "FalconMambaForCausalLM",
            "Mamba2ForCausalLM",
            "BambaForCausalLM",
            "NemotronHForCausalLM",
            "GraniteMoeHybridForCausalLM",
            "Lfm2ForCausalLM",
        ),  # tests/test_state_logits.py
        *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),  # there too
        *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    }
    assert declared == {f"{name}ForCausalLM" for name, _ in CASES.values()} & declared | elsewhere


@pytest.mark.parametrize("case", CASES)
def test_logits_and_parameter_counts(case: str, tmp_path: Path) -> None:
    theirs = reference(*CASES[case], tmp_path)
    config, ours = read_config(tmp_path), built(tmp_path)
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        got = run(ours, DenseContext(read_spec(config)), tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    theirs_have = sum(parameter.numel() for parameter in (*theirs.parameters(), *layer_scalars(theirs)))
    assert read_spec(config).parameters == theirs_have


@pytest.mark.parametrize("case", ["mistral", "qwen3", "opt, norm after, projected", "gpt2", "gpt_oss"])
def test_a_flat_batch_of_chunks_equals_each_sequence_alone(case: str, tmp_path: Path) -> None:
    reference(*CASES[case], tmp_path)
    model, spec = built(tmp_path), read_spec(read_config(tmp_path))
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randint(0, 97, (length,), generator=generator) for length in (23, 14))
    alone = [run(model, DenseContext(spec), tokens) for tokens in (a, b)]
    context, got = DenseContext(spec), []
    context.sinks = attention_sinks(model)
    for (a0, a1), (b0, b1) in [((0, 9), (0, 1)), ((9, 10), (1, 13)), ((10, 23), (13, 14))]:
        positions = torch.cat((torch.arange(a0, a1), torch.arange(b0, b1)))
        sequences = torch.tensor([0] * (a1 - a0) + [1] * (b1 - b0))
        hidden = model.forward(torch.cat((a[a0:a1], b[b0:b1])), context.step(positions, sequences))
        got.append(model.logits(hidden).split((a1 - a0, b1 - b0)))
    for which in (0, 1):
        torch.testing.assert_close(torch.cat([part[which] for part in got]), alone[which], atol=1e-5, rtol=0)


def test_dynamic_ntk_beyond_the_original_length_equals_cached_generation(tmp_path: Path) -> None:
    theirs = reference("Llama", {**rope(rope_type="dynamic", factor=4.0), "max_position_embeddings": 16}, tmp_path)
    model, spec = built(tmp_path), read_spec(read_config(tmp_path))
    assert spec.max_len == 64
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(3))
    context, cache = DenseContext(spec), transformers.DynamicCache()
    for position in range(40):
        with torch.no_grad():
            token = tokens[position : position + 1]
            expected = theirs(token[None], None, None, cache, use_cache=True).logits[0]  # by place: its name changes
        torch.testing.assert_close(run(model, context, token, position), expected, atol=1e-4, rtol=0)


def test_older_rope_fields_mean_the_same_as_rope_parameters() -> None:
    new = {**rope(**LLAMA3_ROPE, original_max_position_embeddings=32), "architectures": ["LlamaForCausalLM"]}
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": 10000.0, "rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": 32}}
    older = {**old, "rope_scaling": {"type" if k == "rope_type" else k: v for k, v in old["rope_scaling"].items()}}
    [first], *others = [read_model_config(config).ropes for config in (new, old, older)]
    assert others == [(first,), (first,)]
    assert first.kind == "llama3"


@pytest.mark.parametrize("short", [False, True])
def test_the_text_of_a_model_that_reads_pictures(short: bool, tmp_path: Path) -> None:
    """As transformers saves it now; and in its older form, with other names and a config that leaves defaults out."""
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    text = {**GEMMA3, "rope_parameters": ROPES, "max_position_embeddings": 131_072}
    text |= {"num_attention_heads": 8, "num_key_value_heads": 4} if short else {}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=96
    )
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    theirs.save_pretrained(tmp_path)
    path, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    assert any("vision_tower" in name for name in load_file(weights))
    if short:
        stored = json.loads(path.read_text())
        for name in ("max_position_embeddings", "num_attention_heads", "num_key_value_heads", "layer_types"):
            del stored["text_config"][name]
        path.write_text(json.dumps(stored))
        names = {f"language_model.model.{name.removeprefix(LANGUAGE)}" if LANGUAGE in name else name: tensor
                 for name, tensor in load_file(weights).items()}  # fmt: skip
        save_file(names, weights)
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(input_ids=tokens[None]).logits[0]
    spec = read_spec(read_config(tmp_path))
    torch.testing.assert_close(run(built(tmp_path), DenseContext(spec), tokens), expected, atol=1e-4, rtol=0)
    assert spec.parameters == sum(parameter.numel() for parameter in theirs.model.language_model.parameters())


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe", "Qwen3_5Moe, stacked"])
def test_the_text_of_a_qwen3_5_that_reads_pictures(kind: str, tmp_path: Path) -> None:
    """As transformers saves it, and with the experts of a layer in one tensor, as published checkpoints have them."""
    torch.manual_seed(0)
    name, _, stacked = kind.partition(", ")
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32,
              "num_position_embeddings": 16}  # fmt: skip
    kinds = [getattr(transformers, f"{name}{what}") for what in ("Config", "ForConditionalGeneration")]
    text = {key: value for key, value in QWEN3_NEXT.items() if key != "mlp_only_layers"}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                               "mrope_section": [2, 1, 1], "mrope_interleaved": True}  # fmt: skip
    theirs = kinds[1](kinds[0](text_config=text, vision_config=vision)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    theirs.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    assert any(".visual." in one for one in tensors)
    if stacked:
        experts = {one: tensors.pop(one) for one in list(tensors) if ".experts." in one}
        for block in {one[: one.index(".experts.")] + ".experts" for one in experts}:
            each = [[experts[f"{block}.{i}.{x}_proj.weight"] for x in ("gate", "up", "down")] for i in range(6)]
            tensors[f"{block}.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in each])
            tensors[f"{block}.down_proj"] = torch.stack([down for _, _, down in each])
        assert len(experts) == 2 * 6 * 3
    save_file({**tensors, "mtp.norm.weight": torch.zeros(1)}, weights)
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(input_ids=tokens[None]).logits[0]
    spec = read_spec(read_config(tmp_path))
    torch.testing.assert_close(run(built(tmp_path), DenseContext(spec), tokens), expected, atol=1e-4, rtol=0)
    assert spec.parameters == sum(parameter.numel() for parameter in theirs.model.language_model.parameters()) + 97 * 32


@pytest.mark.parametrize("images", [True, False])
def test_the_text_of_a_gemma4_with_encoders(images: bool, tmp_path: Path) -> None:
    """With the sizes of layers as they were published before `per_layer_config`. The encoder of audio is left out, and
    that of images if config.json has none."""
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 840}  # fmt: skip
    text = {**GEMMA4, "use_bidirectional_attention": "vision", "final_logit_softcapping": 1.5}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None, image_token_id=96)
    theirs = transformers.Gemma4ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in (*theirs.parameters(), *layer_scalars(theirs)):
            parameter.add_(torch.randn_like(parameter) * 0.15)
    theirs.save_pretrained(tmp_path)
    path, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    tensors = load_file(weights)
    assert any("vision_tower" in name for name in tensors)
    audio = ("model.audio_tower.output_proj.bias", "model.embed_audio.embedding_projection.weight")
    save_file({**tensors, **{name: torch.ones(3) for name in audio}}, weights)
    stored = json.loads(path.read_text())
    del stored["text_config"]["per_layer_config"]
    stored["text_config"] |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    stored["vision_config"] = stored["vision_config"] if images else None
    stored["text_config"] |= {"hidden_size_per_layer_input": None, "num_experts": None, "moe_intermediate_size": None}
    path.write_text(json.dumps(stored))
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(input_ids=tokens[None]).logits[0]
    got = run(built(tmp_path), DenseContext(read_spec(read_config(tmp_path))), tokens)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
