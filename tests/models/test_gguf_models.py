"""Every family that GGUF files hold, tiny and random, in fp32, laid out as llama.cpp's converter does it: its logits
beside transformers'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
import torch
import transformers
from dense_context import DenseContext
from test_against_transformers import (
    CASES,
    GEMMA,
    GEMMA4,
    GEMMA4_EXPERTS,
    GEMMA4_INPUTS,
    GEMMA4_SHARED,
    GPT_OSS,
    LLAMA,
    LONGROPE,
    MIXTRAL,
    PHI4,
    QWEN2_MOE,
    QWEN_MOE,
    reference,
    rope,
    run,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.errors import StartupError
from quire.models import read_model_config, read_spec, resolve_model_class
from quire.models.quantization import GGUF_BLOCKS_KEY, LowBitScheme
from quire.protocol.parallel_layout import ParallelLayout, Shard
from quire.weights.checkpoint_files import read_config
from quire.weights.gguf_config import to_hf_config, to_hf_generation_config
from quire.weights.gguf_file import read_gguf
from quire.weights.gguf_loader import load_gguf
from quire.weights.loader import load_weights
from quire.weights.low_bit import create_model

GPT_OSS_YARN = {**GPT_OSS, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": False,
                "original_max_position_embeddings": 16, "rope_theta": 150000.0}}  # fmt: skip
LONG = CASES["rope llama3"][1]
PHI = {**LLAMA, "pad_token_id": 0}
PHI_LONG = {**CASES["phi3, longrope"][1], "pad_token_id": 0}
GEMMA2 = {**GEMMA, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5}
GEMMA3 = {**GEMMA, "query_pre_attn_scalar": 16, "num_hidden_layers": 7, "rope_parameters": {
    "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}  # fmt: skip


GEMMA4_KEYS: dict[str, Any] = {
    "attention__sliding_window_pattern": [True, False] * 2, "attention__sliding_window": 5,
    "attention__key_length": 16, "attention__value_length": 16, "attention__key_length_swa": 8,
    "attention__value_length_swa": 8, "attention__head_count_kv": [2, 1, 2, 1], "rope__dimension_count": 16,
    "rope__dimension_count_swa": 8, "rope__freq_base": 500.0, "rope__freq_base_swa": 70.0,
    "rope_freqs": [1.0] * 2 + [1e30] * 6, "attention__shared_kv_layers": 0, "embedding_length_per_layer_input": 0,
}  # fmt: skip
GEMMA4_LAYERS = {
    "attention__shared_kv_layers": 2, "feed_forward_length": [48, 48, 96, 96], "embedding_length_per_layer_input": 6,
    "expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 20,
}  # fmt: skip


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
EXPERTS = {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 20}


def divisors() -> list[float]:
    """What Llama 3.1's scaling divides the pairs' frequencies by, as the converter stores it."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](transformers.LlamaConfig(**LONG), torch.device("cpu"))
    return (10000 ** -(torch.arange(0, 8, 2) / 8) / scaled).tolist()


FILES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "Llama", LLAMA, {"rope__dimension_count": 8}),
    "llama, tied": ("llama", "Llama", {**LLAMA, "tie_word_embeddings": True}, {}),
    "llama, biases": ("llama", "Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}, {}),
    "llama, base": ("llama", "Llama", rope(rope_type="default", rope_theta=500.0), {"rope__freq_base": 500.0}),
    "llama, linear": ("llama", "Llama", rope(rope_type="linear", factor=2.5),
                      {"rope__scaling__type": "linear", "rope__scaling__factor": 2.5}),
    "llama, yarn": ("llama", "Llama", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
                    {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
                     "rope__scaling__original_context_length": 16}),
    "llama, linear without a type": ("llama", "Llama", rope(rope_type="linear", factor=2.5),
                                     {"rope__scaling__factor": 2.5}),
    "llama, yarn with bounds": (
        "llama", "Llama", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0),
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 16,
         "rope__scaling__yarn_beta_fast": 4.0}),
    "llama 3": ("llama", "Llama", LONG, {"rope_freqs": divisors()}),
    "mistral": ("llama", "Mistral", {**LLAMA, "sliding_window": 5}, {"attention__sliding_window": 5}),
    "qwen2": ("qwen2", "Qwen2", LLAMA, {}),
    "qwen3": ("qwen3", "Qwen3", {**LLAMA, "head_dim": 16}, {}),
    "mixtral": ("llama", "Mixtral", {**MIXTRAL, "rope_parameters": ROPE}, {"expert_count": 4, "expert_used_count": 2}),
    "mixtral, window": ("llama", "Mixtral", {**MIXTRAL, "sliding_window": 5, "rope_parameters": ROPE},
                        {"expert_count": 4, "expert_used_count": 2, "attention__sliding_window": 5}),
    "qwen2moe": ("qwen2moe", "Qwen2_Moe", QWEN2_MOE, {**EXPERTS, "expert_shared_feed_forward_length": 28}),
    "qwen3moe": ("qwen3moe", "Qwen3_Moe", {**QWEN_MOE, "head_dim": 16, "norm_topk_prob": True}, EXPERTS),
    "gpt-oss": ("gpt-oss", "Gpt_Oss", GPT_OSS_YARN, {
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48, "attention__sliding_window": 5,
        "rope__freq_base": 150000.0, "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 16}),
    "phi3": ("phi3", "Phi3", PHI, {"attention__sliding_window": 64}),
    "phi3, window": ("phi3", "Phi3", {**PHI, "sliding_window": 5}, {"attention__sliding_window": 5}),
    "phi3, longrope": ("phi3", "Phi3", PHI_LONG, {"rope_factors_short": LONGROPE["short_factor"],
                       "rope_factors_long": LONGROPE["long_factor"], "rope__scaling__original_context_length": 16,
                       "rope__scaling__attn_factor": float((1 + np.log(4) / np.log(16)) ** 0.5)}),
    "phi3, as Phi-4-mini": ("phi3", "Phi3", {**PHI4, "pad_token_id": 0}, {
        "rope_factors_short": PHI4["rope_scaling"]["short_factor"], "rope__dimension_count": 12,
        "rope_factors_long": PHI4["rope_scaling"]["long_factor"], "rope__scaling__original_context_length": 16,
        "rope__scaling__attn_factor": float((1 + np.log(4) / np.log(16)) ** 0.5), "attention__sliding_window": 128}),
    "gemma2": ("gemma2", "Gemma2", GEMMA2, {"attention__sliding_window": 5, "attn_logit_softcapping": 0.7,
                                            "final_logit_softcapping": 1.5}),
    "gemma3": ("gemma3", "Gemma3_text", GEMMA3, {"attention__sliding_window": 5, "rope__freq_base": 5000.0,
               "rope__scaling__type": "linear", "rope__scaling__factor": 3.0}),
    "gemma3, every third": ("gemma3", "Gemma3_text", {**GEMMA3, "sliding_window_pattern": 3}, {
        "attention__sliding_window": 5, "attention__sliding_window_pattern": 3, "rope__freq_base": 5000.0,
        "rope__scaling__type": "linear", "rope__scaling__factor": 3.0}),
    "gemma4": ("gemma4", "Gemma4_text", {**GEMMA4, "final_logit_softcapping": 1.5},
               {**GEMMA4_KEYS, "final_logit_softcapping": 1.5}),
    "gemma4, values of their own": ("gemma4", "Gemma4_text", {**GEMMA4, "attention_k_eq_v": False},
                                    {**GEMMA4_KEYS, "attention__head_count_kv": 2}),
    "gemma4, all": ("gemma4", "Gemma4_text", {**GEMMA4, **GEMMA4_SHARED, **GEMMA4_EXPERTS, **GEMMA4_INPUTS},
                    {**GEMMA4_KEYS, **GEMMA4_LAYERS}),
}  # fmt: skip


def built(path: Path, **options: Any) -> Any:
    file = read_gguf(path)
    config = to_hf_config(file)
    model = resolve_model_class(config)(config, torch.float32, torch.device("cpu"))
    load_gguf(model, file, **options)
    return model


@pytest.mark.parametrize("case", FILES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    arch, family, settings, more = FILES[case]
    theirs = reference(family, settings, tmp_path)
    path = gguf_files.convert(tmp_path, arch, tmp_path / "model.gguf", **more)
    ours, spec = built(path), read_spec(to_hf_config(read_gguf(path)))
    ours.prepare()
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    torch.testing.assert_close(run(ours, DenseContext(spec), tokens), expected, atol=1e-4, rtol=0)
    scalars = sum(buffer.numel() for name, buffer in theirs.named_buffers() if name.endswith("layer_scalar"))
    assert spec.parameters == sum(parameter.numel() for parameter in theirs.parameters()) + scalars


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention__sliding_window_pattern": 2}, "attention.sliding_window_pattern in .* is 2"),
        ({"attention__sliding_window_pattern": [True, False]}, "It must list true or false for each of 4 layers"),
        ({"attention__head_count_kv": [2, 1, 1, 1]}, r"attention.head_count_kv in .* is \[2, 1, 1, 1\]"),
        ({"attention__head_count_kv": [2, 1]}, "attention.head_count_kv in .* lists 2 numbers"),
        ({"feed_forward_length": [48, 48, 96, 96]}, "feed_forward_length in .* is"),
        ({"feed_forward_length": [48, 0, 48, 48]}, "feed_forward_length in .* must be an integer"),
        ({"attention__shared_kv_layers": 4}, "attention.shared_kv_layers in .* must be an integer from 0 to 3"),
        ({"attention__value_length_swa": 16}, "attention.value_length_swa=16"),
        ({"rope__dimension_count_swa": 4}, "rope.dimension_count_swa=4"),
        ({"rope__scaling__type": "linear"}, "rope.scaling.type='linear'"),
        ({"rope_freqs": [1.0] * 8 + [1e30] * 8}, "rope_freqs.weight in .* has the numbers"),
        ({"rope_freqs": [1.0, 2.0] + [1e30] * 6}, "Supported: 8 numbers, 1 for each pair that is rotated"),
    ],
)
def test_settings_of_gemma4(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    reference("Gemma4_text", GEMMA4, tmp_path)
    path = gguf_files.convert(tmp_path, "gemma4", tmp_path / "model.gguf", **{**GEMMA4_KEYS, **change})
    with pytest.raises(StartupError, match=message):
        to_hf_config(read_gguf(path))


def test_keys_of_layers_that_read_those_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published files have them."""
    reference("Gemma4_text", {**GEMMA4, **GEMMA4_SHARED}, tmp_path)
    write, spare = gguf_files.write, gguf_files.floats(np.ones((16, 32)))
    more = {f"blk.3.attn_{name}.weight": spare for name in ("k", "v", "k_norm")}
    monkeypatch.setattr(gguf_files, "write", lambda path, said, tensors: write(path, said, more | tensors))
    keys = {**GEMMA4_KEYS, "feed_forward_length": [48, 48, 96, 96]}
    path = gguf_files.convert(tmp_path, "gemma4", tmp_path / "a.gguf", **{**keys, "attention__shared_kv_layers": 2})
    assert len(built(path).layers) == 4
    more["blk.4.attn_k.weight"] = spare
    path = gguf_files.convert(tmp_path, "gemma4", tmp_path / "b.gguf", **{**keys, "attention__shared_kv_layers": 2})
    with pytest.raises(StartupError, match=r"holds 'blk\.4\.attn_k\.weight', which the model has no place for"):
        built(path)


def test_values_of_some_layers_of_gemma4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference("Gemma4_text", GEMMA4, tmp_path)
    write, more = gguf_files.write, {"blk.1.attn_v.weight": gguf_files.floats(np.ones((16, 32)))}
    monkeypatch.setattr(gguf_files, "write", lambda path, said, tensors: write(path, said, more | tensors))
    path = gguf_files.convert(tmp_path, "gemma4", tmp_path / "model.gguf", **GEMMA4_KEYS)
    with pytest.raises(StartupError, match="has attn_v of some layers without a window"):
        to_hf_config(read_gguf(path))


def test_experts_of_a_file_in_mxfp4(tmp_path: Path) -> None:
    """In four bits and expanded: the numbers that transformers has in their place."""
    options = {**GPT_OSS_YARN, "hidden_size": 64, "intermediate_size": 96}
    theirs = reference("Gpt_Oss", options, tmp_path)
    more = {**FILES["gpt-oss"][3], "expert_feed_forward_length": 96}
    path = gguf_files.convert(tmp_path, "gpt-oss", tmp_path / "model.gguf", "mxfp4", **more)
    file = read_gguf(path)
    config, ours = to_hf_config(file), built(path)
    assert config[GGUF_BLOCKS_KEY]
    numbers = dict(ours.named_parameters())
    packed = create_model(config, torch.float32, torch.device("cpu"), LowBitScheme(0, "gguf"), file)
    load_gguf(packed, file, scheme=LowBitScheme(0, "gguf"))
    for layer, block in enumerate(theirs.model.layers):
        for name in ("gate_up", "down"):
            weight = numbers[f"layers.{layer}.experts.{name}.weight"].view(4, -1, 64 if name == "gate_up" else 96)
            plain = getattr(block.mlp.experts, f"{name}_proj").transpose(1, 2)
            plain = torch.cat((plain[:, ::2], plain[:, 1::2]), 1) if name == "gate_up" else plain
            error = (weight - plain).view(4, -1, 32).abs().amax(2) / plain.reshape(4, -1, 32).abs().amax(2)
            assert 0.01 < error.mean() < error.max() < 0.26
            experts = packed.layers[layer].experts
            assert getattr(experts, name).weight.is_meta
    for shard in ParallelLayout(2, expert_parallel=True).shards():
        part = create_model(config, torch.float32, torch.device("cpu"), LowBitScheme(0, "gguf"), file, shard)
        load_gguf(part, file, scheme=LowBitScheme(0, "gguf"))
        for name in ("gate_up", "down"):
            own = getattr(part.layers[1].experts, name)
            assert own.weight.is_meta
            own.dequantize()
            assert torch.equal(own.weight, numbers[f"layers.1.experts.{name}.weight"].chunk(2)[shard.tp_rank])
    packed.prepare()
    assert packed.layers[0].experts.packed.down.weights[0].form.is_e2m1
    ours.prepare()
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1))
    contexts = [DenseContext(read_spec(config)) for _ in range(2)]
    torch.testing.assert_close(
        *(run(model, c, tokens) for model, c in zip((packed, ours), contexts)), atol=1e-4, rtol=0
    )


LFM2 = {
    **LLAMA, "num_hidden_layers": 20, "layer_types": ["conv", "full_attention", "conv", "conv"] * 5, "conv_L_cache": 4,
    "block_auto_adjust_ff_dim": False, "norm_eps": 1e-3, "rope_theta": 500.0,
}  # fmt: skip
LFM2_KEYS: dict[str, Any] = {
    "attention__head_count_kv": [0, 2, 0, 0] * 5, "shortconv__l_cache": 4, "rope__freq_base": 500.0
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_lfm2_is_its_checkpoint(tied: bool, ranks: int, tmp_path: Path) -> None:
    """Settings and weights are those of the folder (tests/test_state_logits.py compares it with transformers)."""
    reference("Lfm2", {**LFM2, "tie_word_embeddings": tied}, tmp_path)
    file = read_gguf(gguf_files.convert(tmp_path, "lfm2", tmp_path / "model.gguf", **LFM2_KEYS))
    config, folder = to_hf_config(file), read_config(tmp_path)
    ours, theirs = (read_model_config(one) for one in (config, folder))
    assert ours == replace(theirs, eos_ids=ours.eos_ids, intermediate_key=ours.intermediate_key)
    shard, cpu = Shard(ranks - 1, ranks), torch.device("cpu")
    models = [resolve_model_class(one)(one, torch.float32, cpu, shard) for one in (config, folder)]
    load_gguf(models[0], file)
    load_weights(models[1], tmp_path)
    for (name, got), expected in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(got, expected), name


@pytest.mark.parametrize("heads", [2, [0, 0], [1, 2], "2"])
def test_key_heads_of_lfm2_layers(heads: Any, tmp_path: Path) -> None:
    reference("Lfm2", {**LFM2, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, tmp_path)
    changed = {**LFM2_KEYS, "attention__head_count_kv": heads}
    path = gguf_files.convert(tmp_path, "lfm2", tmp_path / "model.gguf", **changed)
    with pytest.raises(StartupError, match=r"attention\.head_count_kv in .* is"):
        to_hf_config(read_gguf(path))


@pytest.mark.parametrize("kind", ["bf16", "f16", "q8_0"])
def test_other_kinds_are_what_their_numbers_stand_for(kind: str, tmp_path: Path) -> None:
    wide = {**LLAMA, "hidden_size": 64, "intermediate_size": 96}
    reference("Llama", wide, tmp_path)
    plain, other = (built(gguf_files.convert(tmp_path, "llama", tmp_path / f"{k}.gguf", k)) for k in ("f32", kind))
    config = to_hf_config(read_gguf(tmp_path / f"{kind}.gguf"))
    assert config[GGUF_BLOCKS_KEY] == (kind == "q8_0")
    assert config["dtype"] == ("float16" if kind == "f16" else "bfloat16")
    for (name, ours), theirs in zip(other.named_parameters(), plain.parameters()):
        if kind == "q8_0":
            assert ((ours - theirs).abs().max() < theirs.abs().max() / 200).item(), name
        else:
            dtype = torch.bfloat16 if kind == "bf16" else torch.float16
            expected = theirs if ours.dim() == 1 else theirs.to(dtype).float()
            assert torch.equal(ours, expected), name
    assert not torch.equal(other.layers[0].mlp.down.weight, plain.layers[0].mlp.down.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("blk.1.attn_k.weight"), r"lacks blk\.1\.attn_k\.weight"),
        (lambda tensors: tensors.update({"blk.9.attn_k.weight": gguf_files.floats(np.ones((4, 4)))}), "no place for"),
        (lambda tensors: tensors.update({"blk.0.ffn_up.weight": gguf_files.floats(np.ones((48, 16)))}), r"\[48, 16\]"),
        (lambda tensors: tensors.update({"blk.0.attn_q.weight": gguf_files.floats(np.ones((30, 32)))}), "don't divide"),
        (lambda tensors: tensors.update({"output_norm.weight": gguf_files.floats(np.full(32, np.nan))}), "finite"),
    ],
)
def test_tensors_that_do_not_fit(change: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference("Llama", LLAMA, tmp_path)
    write = gguf_files.write

    def changed(path: Path, metadata: Any, tensors: Any) -> Path:
        change(tensors)
        return write(path, metadata, tensors)

    monkeypatch.setattr(gguf_files, "write", changed)
    path = gguf_files.convert(tmp_path, "llama", tmp_path / "model.gguf")
    with pytest.raises(StartupError, match=message):
        built(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general__architecture": "mamba"}, "architecture 'mamba', which is not supported.*llama, qwen2"),
        ({"block_count": 0}, "block_count in .*model.gguf must be an integer"),
        ({"attention__head_count": 3}, "can't|divide|multiple"),
        ({"attention__value_length": 4}, "attention.value_length=4"),
        ({"rope__dimension_count": 4}, "rope.dimension_count=4"),
        ({"arch": "qwen2", "expert_count": 8}, "expert_count=8"),
        ({"expert_count": 8}, "has no expert_used_count"),
        ({"expert_count": 8, "expert_used_count": 9}, "num_experts_per_tok"),
        ({"rope__scaling__type": "weird", "rope__scaling__factor": 2.0}, "rope.scaling.type in .* is 'weird'"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
        ({"attention__causal": False}, "attention.causal=False"),
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 2.0},
            "rope.scaling.attn_factor=2.0",
        ),
        ({"feed_forward_length": [48, 48, 48]}, "feed_forward_length"),
    ],
)
def test_settings_that_are_not_supported(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    reference("Llama", LLAMA, tmp_path)
    file = read_gguf(gguf_files.convert(tmp_path, path=tmp_path / "model.gguf", **{"arch": "llama", **metadata}))
    if arch := file.metadata.pop("llama.general.architecture", None):
        file.metadata["general.architecture"] = arch
    with pytest.raises(StartupError, match=message):
        read_spec(to_hf_config(file))


def test_end_tokens_and_sampling(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 7,
            "general.sampling.temp": 0.25, "general.sampling.top_k": 9, "general.sampling.top_p": 0.5,
            "general.sampling.min_p": 0.125, "general.sampling.penalty_repeat": 1.5}  # fmt: skip
    file = read_gguf(gguf_files.write(tmp_path / "a.gguf", metadata, {}))
    more = {"top_p": 0.5, "min_p": 0.125, "repetition_penalty": 1.5}
    assert to_hf_generation_config(file) == {"temperature": 0.25, "top_k": 9, "eos_token_id": [3, 7], **more}
    odd = dict.fromkeys((name for name in metadata if "sampling" in name), "x") | {"general.sampling.temp": [1, 2]}
    odd = {**metadata, **odd}
    assert to_hf_generation_config(read_gguf(gguf_files.write(tmp_path / "b.gguf", odd, {}))) == {
        "eos_token_id": [3, 7]
    }
