"""Every key of a config.json with values of the wrong kind: a spec or a StartupError, never another error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.budget import plan_memory
from quire.config import EngineConfig
from quire.data.models import ARCHITECTURES, read_spec
from quire.data.models.configs import CONFIGS, named_config
from quire.data.models.seeing_settings import PREPARATION, SeeingSettings
from quire.data.models.vision.shapes import SIGLIP
from quire.errors import StartupError
from quire.vocabulary.specs import ModelSpec

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
    "hidden_activation": "gelu",
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
    """What is said of `value` with one odd value in it, wherever `read` refuses it."""
    said = []
    for path in places(value):
        for odd in ODD if path else ():
            try:
                read(changed(value, path, odd))
            except StartupError as error:
                said.append(str(error))
    return said


def every_value(config: dict[str, Any]) -> None:
    specs: list[ModelSpec] = []

    def read(odd: dict[str, Any]) -> None:
        specs.append(read_spec(odd))
        plan_memory(EngineConfig(), specs[-1], "x", "float32", 4, "cpu")

    said = set(refusals(config, read))
    assert len(specs) > 100
    assert len(said) > 100
    assert max(map(len, said)) < 800


SEEING = [name for name, (settings, _) in ARCHITECTURES.items() if settings is SeeingSettings]


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
    if architecture == "JambaForCausalLM":
        config["sliding_window"] = None
    if architecture == "Gemma3ForConditionalGeneration":
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
    config[PREPARATION] |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_rescale": True, "rescale_factor": 0.1}
    if "vision_config" in config:
        config["vision_config"] = {**SIGLIP, **config["vision_config"]}
    every_value(config)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llava-onevision-7b", {"vision_config": None}, "config.json has no vision_config"),
        ("llava-onevision-7b", {"text_config": None}, "config.json has no text_config"),
        ("llava-onevision-7b", {"image_token_index": 152128}, "is 152128, and the text knows 152128"),
        ("llava-onevision-7b", {"text_config": {"model_type": "opt"}}, "the model_type in text_config .* is 'opt'"),
        ("paligemma2-10b", {"text_config": {"model_type": "gemma"}}, "the model_type in text_config .* is 'gemma'"),
        ("paligemma2-10b", {"projection_dim": 2048, "vision_config": {}}, "projection_dim is 2048"),
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
