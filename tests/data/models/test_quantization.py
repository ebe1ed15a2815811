"""What a quantization_config says, as checkpoints are published; and what isn't supported, refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
from test_hostile_configs import refusals

from quire.data.models import read_spec
from quire.data.models.configs import named_config
from quire.data.models.quantization import FP8, MADE, fp8_of
from quire.errors import StartupError

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False,
           "group_size": None, "block_structure": None, "observer": "minmax"}  # fmt: skip
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": {"num_bits": 8, "strategy": "token"}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
              "kv_cache_scheme": None, "sparsity_config": {}, "config_groups": {"group_0": GROUP}}  # fmt: skip


def with_weights(**more: Any) -> dict[str, Any]:
    return {**COMPRESSED, "config_groups": {"group_0": {**GROUP, "weights": {**WEIGHTS, **more}}}}


@pytest.mark.parametrize(
    ("said", "scheme"),
    [
        (BLOCKS, FP8(True, True, ("lm_head",))),
        ({**BLOCKS, "modules_to_not_convert": ["lm_head", "a.b"]}, FP8(True, True, ("lm_head", "a.b", "lm_head"))),
        ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["x"]},
         FP8(True, False, ("x", "lm_head"))),
        (COMPRESSED, FP8(True, False, ("lm_head",))),
        (with_weights(strategy="tensor"), FP8(True, False, ("lm_head",))),
        (with_weights(strategy="block", block_structure=[128, 128]), FP8(True, True, ("lm_head",))),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["model.layers.0"]},
         FP8(True, False, ("model.layers.0", "lm_head"))),
        (None, None),
        ({}, None),
    ],
)  # fmt: skip
def test_published_configs(said: dict[str, Any] | None, scheme: FP8 | None) -> None:
    config = {**named_config("llama3-8b"), "quantization_config": said}
    assert fp8_of(config, None) == scheme
    assert fp8_of(config, "fp8") == (scheme or MADE)
    assert read_spec(config) == read_spec(named_config("llama3-8b"))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq', which is not supported"),
        ({"quant_method": "gptq"}, "has no bits. It must be an integer"),
        ({"quant_method": "x" * 500}, "quant_method 'xxx"),
        ({"bits": 4}, "quant_method None"),
        ("fp8", "quantization_config in config.json must be an object, got 'fp8'"),
        ({**BLOCKS, "weight_block_size": [64, 64]}, r"weight_block_size .* is \[64, 64\]"),
        ({**BLOCKS, "weight_block_size": 128}, "weight_block_size .* is 128"),
        ({**BLOCKS, "fmt": "e5m2"}, "fmt='e5m2'"),
        ({**BLOCKS, "activation_scheme": "none"}, "activation_scheme .* is 'none'"),
        ({**BLOCKS, "modules_to_not_convert": "lm_head"}, "must be a list of names, got 'lm_head'"),
        ({**BLOCKS, "modules_to_not_convert": [1]}, "must be a list of names"),
        ({**BLOCKS, "modules_to_not_convert": ["a"] * 5000}, "has 5000 names"),
        ({**COMPRESSED, "format": "pack-quantized"}, "format .* is 'pack-quantized'"),
        ({**COMPRESSED, "config_groups": {}}, "config_groups .* has 0 entries"),
        ({**COMPRESSED, "config_groups": {"a": GROUP, "b": GROUP}}, "config_groups .* has 2 entries"),
        ({**COMPRESSED, "config_groups": {"a": {**GROUP, "targets": ["re:.*mlp"]}}}, "targets="),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (with_weights(num_bits=4), "are not symmetric numbers of 8 bits"),
        (with_weights(type="int"), "type .* is 'int'"),
        (with_weights(strategy="group"), "strategy .* is 'group'"),
        (with_weights(group_size=64), "group_size=64"),
        (with_weights(strategy="block"), "a block_structure that doesn't fit"),
        (with_weights(block_structure=[128, 128]), "a block_structure that doesn't fit"),
        ({**COMPRESSED, "ignore": ["re:("]}, r"the pattern 're:\('"),
        ({**COMPRESSED, "ignore": ["re:(a+)+$"]}, "none of a group"),
        ({**COMPRESSED, "ignore": ["re:" + ".*" * 9]}, "4 repetitions"),
        ({**COMPRESSED, "ignore": ["re:(?P<a>.)(?P=a)"]}, "the pattern"),
        ({**COMPRESSED, "ignore": [f"re:.*{i}" for i in range(65)]}, "65 patterns"),
    ],
)
def test_what_is_not_supported_is_refused(said: Any, words: str) -> None:
    config = {**named_config("llama3-8b"), "quantization_config": said}
    with pytest.raises(StartupError, match=words) as failure:
        read_spec(config)
    assert failure.value.remedy or "must be" in str(failure.value) or "doesn't fit" in str(failure.value)
    assert len(str(failure.value)) < 400


def test_gpt2_keeps_its_weights_transposed() -> None:
    with pytest.raises(StartupError, match="checkpoints of GPT-2 are not supported: their weights are transposed"):
        read_spec({**named_config("gpt2"), "quantization_config": BLOCKS})
    assert read_spec({**named_config("gpt2"), "quantization_config": {}}) == read_spec(named_config("gpt2"))


@pytest.mark.parametrize(
    ("entry", "module", "kept"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head_2", False),
        ("model.layers.1", "layers.1.mlp.up_proj", True),
        ("model.layers.1", "layers.11.mlp.up_proj", False),
        ("model.layers.1.*", "layers.1.mlp.up_proj", True),
        ("mlp.gate", "layers.0.mlp.gate", True),
        ("mlp.gate", "layers.0.mlp.gate_proj", False),
        (r"re:.*self_attn\.[qk]_proj$", "layers.3.self_attn.k_proj", True),
        (r"re:.*self_attn\.[qk]_proj$", "layers.3.self_attn.v_proj", False),
        (r"re:model\.layers\.\d+\.mlp.*", "layers.12.mlp.down_proj", True),
    ],
)
def test_names_of_modules(entry: str, module: str, kept: bool) -> None:
    assert FP8(True, kept=(entry,)).covers(module, ("model.",)) is not kept


@pytest.mark.parametrize("said", [BLOCKS, COMPRESSED, with_weights(strategy="block", block_structure=[128, 128])])
def test_any_value_of_any_key(said: dict[str, Any]) -> None:
    whole = {"quantization_config": said}  # itself replaced too
    refused = refusals(whole, lambda odd: read_spec({**named_config("llama3-8b"), **odd}))
    assert len(refused) > 100
    assert max(map(len, refused)) < 400
