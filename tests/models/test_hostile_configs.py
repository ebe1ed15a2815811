"""Every key of a config.json with values of the wrong kind: a spec or a StartupError, never another error."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.memory.page_layout import MemorySize, build_kv_config
from quire.models import ARCHITECTURES, read_spec
from quire.models.named_configs import CONFIGS, named_config
from quire.models.pyramid_kv import linear_budgets
from quire.models.quantization import FP8_ON_LOAD, FP8Scheme, covers, resolve_scheme
from quire.models.vision.named_configs import SIGLIP_SO400M
from quire.models.vision.settings import PREPROCESSOR_KEY
from quire.protocol.model_spec import ModelSpec, SnapKVSelection
from quire.startup.memory_plan import plan_memory

ODD: list[Any] = [
    [], {}, [[]], {"a": {}}, None, True, False, -1, 0, 1, 2**31 - 1, 10**18, 10**4000, -(10**400), 1e308, 1e-320, -1.5,
    float("nan"), float("inf"), "", "x" * 10_000, "\ud800", ["a", ["b"]], [1, None], [{}],
]  # fmt: skip
SCALING = {
    "factor": 4.0, "mscale": 1, "mscale_all_dim": 1, "original_max_position_embeddings": 64, "attention_factor": 1,
    "beta_fast": 1, "beta_slow": 1, "truncate": True, "low_freq_factor": 1, "high_freq_factor": 2,
}  # fmt: skip
MORE = {
    "state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_rank": "auto", "use_bias": False,
    "use_conv_bias": True, "mixer_rms_eps": 1e-6, "layer_norm_epsilon": 1e-5, "mamba_inner_layernorms": True,
    "rope_theta": 1.0, "sliding_window": 4, "max_window_layers": 1,
    "use_sliding_window": True, "attention_bias": False, "mlp_bias": False, "word_embed_proj_dim": 64, "n_inner": 5,
    "do_layer_norm_before": True, "enable_bias": True, "_remove_final_layer_norm": True, "scale_attn_weights": True,
    "attention_chunk_size": 4,
    "quantization_config": None, "eos_token_id": [1], "head_dim": 64, "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 64, "final_logit_softcapping": 30.0, "use_bidirectional_attention": False,
    "hidden_activation": "gelu", "no_rope_layers": [1, 0] * 40, "no_rope_layer_interval": 2,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
    "mlp_only_layers": [0], "moe_intermediate_size": 8, "norm_topk_prob": True, "qkv_bias": True,
    "shared_expert_intermediate_size": 8, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    "conv_L_cache": 3, "conv_bias": False, "full_attn_idxs": [0],
    "block_ff_dim": 64, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
    "tie_embedding": True, "norm_eps": 1e-5, "num_heads": 4, "n_groups": 2, "time_step_limit": [0.0, 1.0],
    "hybrid_override_pattern": "M-*-", "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16,
    "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "attention_head_dim": 16,
    "position_embedding_type": "rope", "residual_multiplier": 1.0, "embedding_multiplier": 2.0, "logits_scaling": 2.0,
    "attention_multiplier": 0.1, "mamba_proj_bias": False, "shared_intermediate_size": 8,
    "full_attention_interval": 2, "attn_output_gate": True,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 0,
    "use_double_wide_mlp": True, "enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 262_208,
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    copy = json.loads(json.dumps(value))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return copy


def refusals(value: Any, read: Callable[[Any], object]) -> list[str]:
    """The errors of `value` with one odd value in it, wherever `read` refuses it; each has a cause and a remedy."""
    errors: list[StartupError] = []
    for path in places(value):
        for odd in ODD if path else ():
            try:
                read(changed(value, path, odd))
            except StartupError as error:
                errors.append(error)
    assert [error.cause for error in errors if not error.remedy and " must be " not in error.cause] == []
    return list(map(str, errors))


def every_value(config: dict[str, Any]) -> None:
    specs: list[ModelSpec] = []

    def read(odd: dict[str, Any]) -> None:
        specs.append(read_spec(odd))
        plan_memory(EngineConfig(), specs[-1], "x", "float32", 4, "cpu")

    errors = set(refusals(config, read))
    assert len(specs) > 100
    assert len(errors) > 100
    assert max(map(len, errors)) < 1200, "the list of architectures takes most of it"


TEXTS = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
"""Models that see, of which the text alone is read."""
SEEING = [name for name, one in ARCHITECTURES.items() if one.model.startswith("vision_language:")]


@pytest.mark.share(8)
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in SEEING])
@pytest.mark.parametrize("kind", ["yarn", "llama3", "dynamic"])
def test_any_value_of_any_key(architecture: str, kind: str) -> None:
    shape = next((shape for shape in CONFIGS.values() if shape["architectures"] == [architecture]), None)
    shape = shape or next(shape for shape in CONFIGS.values() if shape["architectures"] == ["LlamaForCausalLM"])
    config = {**shape, **MORE, "architectures": [architecture], "rope_scaling": {**SCALING, "rope_type": kind}}
    config["layer_types"] = ["full_attention"] * shape.get("num_hidden_layers", 1)
    if architecture == "LlamaForCausalLM":
        config["kv_sharing"] = [None, 0, *[None] * (shape.get("num_hidden_layers", 1) - 2)]
    if architecture == "Phi3ForCausalLM" and kind == "yarn":  # another name of LongRoPE there
        factors = [1.0] * (config["hidden_size"] // config["num_attention_heads"] // 2)
        config["rope_scaling"] |= {"short_factor": factors, "long_factor": factors}
    if architecture == "Mamba2ForCausalLM":
        config |= {key: shape[key] for key in ("num_heads", "head_dim", "state_size")}
    if architecture == "NemotronHForCausalLM":
        config["layer_types"] = None
    if architecture in ("JambaForCausalLM", "NemotronHForCausalLM"):
        config["sliding_window"] = None
    if architecture.startswith("Gemma4"):
        config["per_layer_config"] = {"1": {"head_dim": 64, "num_key_value_heads": 1}}
        config["rope_parameters"] = {"full_attention": config.pop("rope_scaling"), "sliding_attention": {}}
    if architecture.startswith(("Qwen3Next", "Qwen3_5")):
        config |= {"use_sliding_window": False, "layer_types": None}
    if architecture in TEXTS:
        config = {"architectures": [architecture], "text_config": config}
    every_value(config)


@pytest.mark.parametrize("architecture", SEEING)
def test_any_value_of_models_that_see(architecture: str) -> None:
    published = architecture if architecture != "InternVLForConditionalGeneration" else "InternVLChatModel"
    shape = next(shape for shape in CONFIGS.values() if shape["architectures"] == [published])
    config = {**shape, "architectures": [architecture]}
    if architecture != published:
        config["text_config"] = config.pop("llm_config") | {"model_type": "qwen2"}
        config["image_token_id"] = 92546
    config["rope_scaling"] = {"factor": 2.0, "attention_factor": 1.0, **config.get("rope_scaling", {})}
    config[PREPROCESSOR_KEY] |= {
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "do_rescale": True,
        "rescale_factor": 0.1,
    }
    if architecture == "Gemma4ForConditionalGeneration":
        config[PREPROCESSOR_KEY]["do_normalize"] = False
        config["text_config"] |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 262_144}
        config["text_config"] |= {"pad_token_id": 0}
    elif "vision_config" in config:
        config["vision_config"] = {**SIGLIP_SO400M, **config["vision_config"]}
    every_value(config)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llava-onevision-7b", {"vision_config": None}, "config.json has no vision_config"),
        ("llava-onevision-7b", {"text_config": None}, "config.json has no text_config"),
        ("llava-onevision-7b", {"image_token_index": 152128}, "is 152128, and the text model has 152128"),
        ("llava-onevision-7b", {"text_config": {"model_type": "opt"}}, "the model_type in text_config .* is 'opt'"),
        ("paligemma2-10b", {"text_config": {"model_type": "gemma"}}, "the model_type in text_config .* is 'gemma'"),
        ("paligemma2-10b", {"projection_dim": 2048, "vision_config": {}}, "projection_dim is 2048"),
        ("gemma-4-e2b-vision", {"image_token_id": 262_144}, "is 262144, and the text model has 262144.*image_token_id"),
        ("gemma-4-e2b-vision", {"text_config": {"pad_token_id": -1}}, "pad_token_id in text_config of config.json"),
        ("gemma-4-e2b-vision", {"text_config": {"pad_token_id": 262_144}}, "pad_token_id in text_config of config"),
        ("internvl2-8b", {"llm_config": {"bias": True}}, "bias=True"),
        ("phi-3-vision-4b", {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}}, "have 1 "),
        (
            "phi-3-vision-4b", {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [0.0]}},
            "long_factor in rope_scaling .* a list of 1 to 1024 numbers above 0",
        ),
        ("phi-3-vision-4b", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 48}}, "has no long_factor"),
    ],
)  # fmt: skip
def test_models_that_cannot_be(name: str, change: dict[str, Any], message: str) -> None:
    config = named_config(name)
    for key, value in change.items():
        nested = key in ("llm_config", "text_config") and value
        config[key] = {**config[key], **value} if nested else value
    with pytest.raises(StartupError, match=message):
        read_spec(config)


@pytest.mark.parametrize("old", [False, True])
def test_any_value_of_the_ropes_of_two_types(old: bool) -> None:
    config = {key: value for key, value in named_config("gemma-3-4b").items() if old or not key.startswith("rope")}
    if not old:
        rope = {"rope_theta": 1e4, **SCALING, "rope_type": "yarn"}
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": {**rope, "rope_type": "llama3"}}
        config["layer_types"] = ["full_attention", "sliding_attention"] * 17
    every_value(config)


# What a quantization_config says, as checkpoints are published; and what isn't supported, refused by its name.


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False,
           "group_size": None, "block_structure": None, "observer": "minmax"}  # fmt: skip
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": {"num_bits": 8, "strategy": "token"}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
              "kv_cache_scheme": None, "sparsity_config": {}, "config_groups": {"group_0": GROUP}}  # fmt: skip


def with_weights(**more: Any) -> dict[str, Any]:
    return {**COMPRESSED, "config_groups": {"group_0": {**GROUP, "weights": {**WEIGHTS, **more}}}}


@pytest.mark.parametrize(
    ("quantization", "scheme"),
    [
        (BLOCKS, FP8Scheme(True, True, ("lm_head",))),
        ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["x"]},
         FP8Scheme(True, False, ("x", "lm_head"))),
        (COMPRESSED, FP8Scheme(True, False, ("lm_head",))),
        (with_weights(strategy="block", block_structure=[128, 128]), FP8Scheme(True, True, ("lm_head",))),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["model.layers.0"]},
         FP8Scheme(True, False, ("model.layers.0", "lm_head"))),
        (None, None),
    ],
)  # fmt: skip
def test_published_configs(quantization: dict[str, Any] | None, scheme: FP8Scheme | None) -> None:
    config = {**named_config("llama3-8b"), "quantization_config": quantization}
    assert resolve_scheme(config, None) == scheme
    assert resolve_scheme(config, "fp8") == (scheme or FP8_ON_LOAD)
    assert read_spec(config) == read_spec(named_config("llama3-8b"))


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq', which is not supported"),
        ({"quant_method": "gptq"}, "has no bits. It must be an integer"),
        ({"quant_method": "x" * 500}, "quant_method 'xxx"),
        ({"bits": 4}, "quant_method None"),
        ("fp8", "quantization_config in config.json must be an object, got 'fp8'"),
        ({**BLOCKS, "weight_block_size": [64, 64]}, r"weight_block_size .* is \[64, 64\]"),
        ({**BLOCKS, "fmt": "e5m2"}, "fmt='e5m2'"),
        ({**BLOCKS, "activation_scheme": "none"}, "activation_scheme .* is 'none'"),
        ({**BLOCKS, "modules_to_not_convert": "lm_head"}, "must be a list of names, got 'lm_head'"),
        ({**BLOCKS, "modules_to_not_convert": ["a"] * 5000}, "has 5000 names"),
        ({**COMPRESSED, "format": "pack-quantized"}, "format .* is 'pack-quantized'"),
        ({**COMPRESSED, "config_groups": {}}, "config_groups .* has 0 entries"),
        ({**COMPRESSED, "config_groups": {"a": {**GROUP, "targets": ["re:.*mlp"]}}}, "targets="),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (with_weights(num_bits=4), "are not symmetric numbers of 8 bits"),
        (with_weights(type="int"), "type .* is 'int'"),
        (with_weights(strategy="group"), "strategy .* is 'group'"),
        (with_weights(strategy="block"), "a block_structure that doesn't fit"),
        (with_weights(block_structure=[128, 128]), "a block_structure that doesn't fit"),
        ({**COMPRESSED, "ignore": ["re:("]}, r"the pattern 're:\('"),
        ({**COMPRESSED, "ignore": ["re:(a+)+$"]}, "none of a group"),
        ({**COMPRESSED, "ignore": ["re:" + ".*" * 9]}, "4 repetitions"),
        ({**COMPRESSED, "ignore": [f"re:.*{i}" for i in range(65)]}, "65 patterns"),
    ],
)
def test_what_is_not_supported_is_refused(quantization: Any, words: str) -> None:
    config = {**named_config("llama3-8b"), "quantization_config": quantization}
    with pytest.raises(StartupError, match=words) as failure:
        read_spec(config)
    assert failure.value.remedy or "must be" in str(failure.value)
    assert len(str(failure.value)) < 400


def test_gpt2_keeps_its_weights_transposed() -> None:
    with pytest.raises(StartupError, match="checkpoints of GPT-2 are not supported: their weights are transposed"):
        read_spec({**named_config("gpt2"), "quantization_config": BLOCKS})
    assert read_spec({**named_config("gpt2"), "quantization_config": {}}) == read_spec(named_config("gpt2"))


@pytest.mark.parametrize(
    ("entry", "kept", "other"),
    [
        ("lm_head", "lm_head", "model.lm_head_2"),
        ("model.layers.1", "layers.1.mlp.up_proj", "layers.11.mlp.up_proj"),
        ("model.layers.1.*", "layers.1.mlp.up_proj", "layers.2.mlp.up_proj"),
        ("mlp.gate", "layers.0.mlp.gate", "layers.0.mlp.gate_proj"),
        (r"re:.*self_attn\.[qk]_proj$", "layers.3.self_attn.k_proj", "layers.3.self_attn.v_proj"),
        (r"re:model\.layers\.\d+\.mlp.*", "layers.12.mlp.down_proj", "layers.12.self_attn.q_proj"),
    ],
)
def test_names_of_modules(entry: str, kept: str, other: str) -> None:
    scheme = FP8Scheme(True, ignored_modules=(entry,))
    assert [covers(scheme, module, ("model.",)) for module in (kept, other)] == [False, True]


@pytest.mark.parametrize(
    "quantization", [BLOCKS, COMPRESSED, with_weights(strategy="block", block_structure=[128, 128])]
)
def test_any_value_of_any_key_of_a_quantization(quantization: dict[str, Any]) -> None:
    whole = {"quantization_config": quantization}  # itself replaced too
    refused = refusals(whole, lambda odd: read_spec({**named_config("llama3-8b"), **odd}))
    assert len(refused) > 100
    assert max(map(len, refused)) < 400


# What a config.json says of PyramidKV: budgets as the paper has them, and every value that can't be, by name.


def read(pyramid: Any, name: str = "llama3.1-8b", **more: Any) -> Any:
    return read_spec({**named_config(name), "pyramid_kv": pyramid, **more})


@pytest.mark.parametrize(("name", "layers"), [("pyramidkv-8b", 32), ("pyramidkv-70b", 80)])
def test_the_named_shapes(name: str, layers: int) -> None:
    """Eight groups of equal layers, whose pages are of one size: no large page is larger than a small one."""
    spec = read_spec(named_config(name))
    budgets = [layer.budget for layer in spec.layers]
    assert len(budgets) == layers
    assert sum(budgets) == 2048 * layers, "on average"
    assert budgets == sorted(budgets, reverse=True)
    assert list(Counter(budgets).values()) == [layers // 8] * 8
    assert spec.selection == SnapKVSelection(observation_window=32, pooling_kernel=5)
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=512)
    geometry = build_kv_config(config, spec, MemorySize(2**17, spec.max_len, 2))
    assert {group.page_bytes for group in geometry.groups} == {4096 * layers // 8 * 16}
    assert (len(geometry.groups), geometry.large_bytes) == (8, 0)
    assert {group.kind for group in geometry.groups} == {"budget"}
    assert (geometry.budget, geometry.queries) == (min(budgets), 32)


def test_budgets_fall_as_the_authors_have_them() -> None:
    """A group a layer: from nearly twice the average to a twentieth of it, in equal steps, behind the last queries."""
    budgets = linear_budgets(32 + 3200, 32, 20, 20)
    assert budgets[-1] == 32 + 3200 // 20
    assert budgets[0] == 32 + 2 * 3200 - 3200 // 20
    steps = [a - b for a, b in pairwise(budgets)]
    assert max(steps) - min(steps) <= 16, "a multiple of 16 is the nearest one"
    assert all((budget - 32) % 16 == 0 for budget in budgets)
    assert linear_budgets(100, 32, 1, 1) == (96,)


def test_budgets_of_ones_own() -> None:
    spec = read({"budgets": [64, None] * 16, "queries": 8})
    assert [layer.budget for layer in spec.layers] == [64, None] * 16
    assert spec.min_budget == 64
    assert read(None).min_budget == 0


@pytest.mark.parametrize(
    ("pyramid", "message"),
    [
        ([], "has []"),
        ({"averge": 9}, "has 'averge'"),
        ({}, "either average or budgets"),
        ({"average": 64, "budgets": [64] * 32}, "either average or budgets"),
        ({"average": 0}, "average in pyramid_kv of config.json must be an integer from 1 to 131072, got 0"),
        ({"average": 31}, "average in pyramid_kv of config.json is 31"),
        ({"average": 131073}, "got 131073"),
        ({"average": 64, "groups": 5}, "groups in pyramid_kv of config.json is 5"),
        ({"average": 64, "queries": 0}, "queries"),
        ({"average": 64, "pool": 4}, "pool in pyramid_kv of config.json is 4"),
        ({"budgets": [64] * 31}, "list of 32 numbers"),
        ({"budgets": [0] * 32}, "budgets in pyramid_kv of config.json has 0"),
        ({"budgets": [64] * 31 + [131073]}, "has 131073"),
        ({"budgets": [None] * 32}, "has no number"),
    ],
)
def test_what_cannot_be_is_named(pyramid: Any, message: str) -> None:
    with pytest.raises(StartupError) as refused:
        read(pyramid)
    assert message in str(refused.value)


@pytest.mark.parametrize("way", [{"average": 64, "groups": 1}, {"budgets": [64, None] * 16}])
def test_any_value_of_any_key_of_pyramid_kv(way: dict[str, Any]) -> None:
    errors = refusals({**way, "queries": 4, "pool": 3}, read)
    assert len(errors) > 50
    assert max(map(len, errors)) < 400


def test_windows_or_shared_layers_beside_budgets() -> None:
    with pytest.raises(StartupError, match="pyramid_kv, and layers that share keys"):
        read({"average": 2048}, "mistral-7b")
    with pytest.raises(StartupError, match="pyramid_kv, and layers that share keys"):
        read({"average": 2048}, kv_sharing=[None, 0] + [None] * 30)
