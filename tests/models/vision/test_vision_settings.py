"""What configs say of eyes: published ones, and hostile ones, each refused with the field and its value."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import StartupError
from quire.models import read_spec
from quire.models.named_configs import named_config
from quire.models.vision import VisionSettings, build_encoder
from quire.models.vision.named_configs import PREPROCESSOR_CONFIGS, VISION_CONFIGS
from quire.weights.checkpoint_files import read_preprocessor_config

WIDTHS = {
    "llava-onevision-7b": 3584, "internvl2-8b": 4096, "phi-3-vision": 3072, "paligemma2-10b": 3584,
    "gemma-3-4b": 2560, "gemma-4-31b": 5376, "gemma-4-e2b": 1536,
    "llama-3.2-11b-vision": 4096,
}  # fmt: skip


def whole(name: str) -> dict[str, Any]:
    """A published config with the text's width, where the family has it."""
    config = deepcopy(VISION_CONFIGS[name])
    text = {"llava-onevision-7b": "text_config", "internvl2-8b": "llm_config", "phi-3-vision": None}
    where = text.get(name, "text_config")
    (config if where is None else config.setdefault(where, {}))["hidden_size"] = WIDTHS[name]
    return config


@pytest.mark.parametrize(
    ("name", "millions", "most_rows", "parts"),
    [  # of the towers' cards: SigLIP-so400m without its head, InternViT-300M, CLIP-L's vision, mllama's
        ("llava-onevision-7b", 415, 8830, 37),
        ("internvl2-8b", 338, 3328, 13),
        ("phi-3-vision", 313, 2653, 17),
        ("paligemma2-10b", 417, 256, 1),
        ("gemma-3-4b", 420, 256, 1),
        ("gemma-4-31b", 576, 280, 1),
        ("gemma-4-e2b", 169, 280, 1),
        ("llama-3.2-11b-vision", 895, 6404, 1),
    ],
)
def test_published_ones(name: str, millions: int, most_rows: int, parts: int) -> None:
    settings = VisionSettings.from_config(whole(name), PREPROCESSOR_CONFIGS[name])
    assert settings.hidden == WIDTHS[name]
    assert round(settings.parameters / 1e6) == millions
    assert (settings.max_rows, settings.tiling.max_parts) == (most_rows, parts)
    encoder = build_encoder(settings, torch.bfloat16, torch.device("meta"))
    assert settings.uses_cross_attention == (name == "llama-3.2-11b-vision")
    assert encoder.encodes_whole_image == settings.encodes_whole_image == (name.startswith(("llama", "gemma-4")))
    assert settings.bidirectional == (name == "paligemma2-10b")
    spec = settings.spec(7_000_000_000)
    assert spec.bidirectional_images == (name == "gemma-3-4b")
    assert (spec.max_embeds, spec.bidirectional_prompt) == (most_rows, settings.bidirectional)
    assert spec.activations == settings.activation_bytes(min(8, settings.tiling.max_parts), 2)
    assert spec.part_embeds == (0 if settings.uses_cross_attention else most_rows // parts)
    assert 0 < spec.part_bytes < 200 << 20
    opened = settings.tiling.max_parts * 3 * settings.tower.image_size**2 * 2
    assert spec.partial_image_bytes == (0 if encoder.encodes_whole_image or settings.tiling.max_parts == 1 else opened)
    assert set(encoder.weight_sources()) == {name for name, _ in encoder.named_parameters()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("llava-onevision-7b", 69), ("internvl2-8b", 72), ("phi-3-vision-4b", 52), ("llama3.2-vision-11b", 2322)],
)
def test_a_part_counts_as_about_the_tokens_that_take_as_long(name: str, expected: int) -> None:
    """As measured on an H200 (docs/measurements/h200_sights_*.json): a tile of 1.32 ms where a token of 8,192 takes
    19.2 us, and so on."""
    vision = read_spec(named_config(name)).vision
    assert vision is not None
    assert 0.8 < vision.part_tokens / expected < 1.9


def test_preprocessor_config_may_be_missing() -> None:
    for name in VISION_CONFIGS:
        bare = VisionSettings.from_config(whole(name))
        stored = VisionSettings.from_config(whole(name), PREPROCESSOR_CONFIGS[name])
        assert bare.tiling == stored.tiling
        assert bare.tower == stored.tower


LLAVA, INTERN, PHI3, GEMMA, GEMMA3, GEMMA4, _, LLAMA = VISION_CONFIGS
HOSTILE: list[tuple[str, str, Any, str]] = [
    (LLAVA, "architectures", ["GPT2LMHeadModel"], "'GPT2LMHeadModel' has no vision encoder"),
    (LLAVA, "vision_config", {}, "has no vision_config"),
    (LLAVA, "vision_config", 3, "vision_config in config.json must be an object, got 3"),
    (LLAVA, "vision_config.hidden_size", 0, "hidden_size"),
    (LLAVA, "vision_config.hidden_size", 1153, "hidden_size 1153 is not"),
    (LLAVA, "vision_config.image_size", 1 << 20, "tiles of 1048576 pixels"),
    (LLAVA, "vision_config.image_size", [384, 392], "must be squares"),
    (LLAVA, "vision_config.patch_size", 1, "patches of 1"),
    (LLAVA, "vision_config.patch_size", 400, "patches of 400"),
    (LLAVA, "vision_config.num_hidden_layers", 10**6, "num_hidden_layers"),
    (LLAVA, "vision_config.hidden_act", "tanh" * 90, "hidden_act"),
    (LLAVA, "vision_config.num_channels", 1, "num_channels"),
    (LLAVA, "vision_config.layer_norm_eps", -1, "layer_norm_eps"),
    (LLAVA, "vision_feature_layer", [-1, -2], "vision_feature_layer"),
    (LLAVA, "vision_feature_layer", True, "vision_feature_layer"),
    (LLAVA, "vision_feature_select_strategy", "default", "vision_feature_select_strategy"),
    (LLAVA, "vision_aspect_ratio", "anyres", "vision_aspect_ratio"),
    (LLAVA, "vision_aspect_ratio", "anyres_max_0", "vision_aspect_ratio"),
    (LLAVA, "vision_aspect_ratio", "anyres_max_" + "9" * 5000, "vision_aspect_ratio"),
    (LLAVA, "image_grid_pinpoints", [], "image_grid_pinpoints"),
    (LLAVA, "image_grid_pinpoints", [[384, 385]], "image_grid_pinpoints"),
    (LLAVA, "image_grid_pinpoints", [[384 * 9, 384 * 9]], "64 tiles at most"),
    (LLAVA, "image_grid_pinpoints", [[384, 384]] * 257, "image_grid_pinpoints"),
    (LLAVA, "projector_hidden_act", "none", "projector_hidden_act"),
    (LLAVA, "text_config", {}, "hidden_size"),
    (INTERN, "downsample_ratio", 0.4, "downsample_ratio"),
    (INTERN, "downsample_ratio", 2, "downsample_ratio"),
    (INTERN, "downsample_ratio", 1 / 3, "downsample_ratio"),
    (INTERN, "ps_version", "v1", "ps_version"),
    (INTERN, "force_image_size", 224, "force_image_size is 224"),
    (INTERN, "max_dynamic_patch", 65, "max_dynamic_patch"),
    (INTERN, "min_dynamic_patch", 13, "minimum of an image's tiles, 13, is above"),
    (INTERN, "select_layer", 3, "select_layer"),
    (INTERN, "vision_config.norm_type", "batch", "norm_type"),
    (PHI3, "img_processor.name", "siglip", "name='siglip'"),
    (PHI3, "img_processor.layer_idx", 0, "layer_idx"),
    (PHI3, "img_processor.image_dim_out", 768, "image_dim_out is 768"),
    (PHI3, "embd_layer.projection_cls", "linear", "projection_cls"),
    (PHI3, "embd_layer.use_hd_transform", False, "use_hd_transform"),
    (PHI3, "embd_layer.hd_transform_order", "both", "hd_transform_order"),
    (GEMMA, "vision_config.projection_dim", 2048, "projection_dim is 2048"),
    (GEMMA3, "mm_tokens_per_image", 10, "mm_tokens_per_image is 10, and the tower has 64 x 64 patches"),
    (GEMMA3, "mm_tokens_per_image", 9, "It must be the square of a number that divides them"),
    (GEMMA4, "vision_config.num_key_value_heads", 8, "num_key_value_heads in vision_config of config.json is 8"),
    (GEMMA4, "vision_config.head_dim", 66, "head_dim in vision_config of config.json is 66"),
    (GEMMA4, "vision_config.position_embedding_size", 839, "is 839, and an image may have 840 patches a side"),
    (GEMMA4, "vision_config.pooling_kernel_size", 8, "280 rows an image, each of 8 x 8 patches of 16 pixels"),
    (GEMMA4, "vision_config.patch_size", 2048, "280 rows an image, each of 3 x 3 patches of 2048 pixels"),
    (GEMMA4, "vision_config.patch_size", 14, "patch_size of preprocessor_config.json is 16, the tower's is 14"),
    (GEMMA4, "vision_config.hidden_activation", "tanh", "hidden_activation 'tanh'"),
    (GEMMA4, "vision_config.attention_bias", True, "attention_bias=True"),
    (GEMMA4, "vision_config.num_hidden_layers", 10**6, "num_hidden_layers"),
    (GEMMA4, "vision_config.rope_parameters", {"rope_type": "yarn"}, "rope_type='yarn' in rope_parameters of vision_"),
    (GEMMA4, "vision_config.rope_parameters", {"rope_theta": 0}, "rope_theta in rope_parameters of vision_config"),
    (GEMMA4, "vision_config.standardize", 1, "standardize in vision_config of config.json must be true or false"),
    (GEMMA4, "image_token_id", -1, "image_token_id"),
    (LLAMA, "vision_config.max_num_tiles", 17, "max_num_tiles"),
    (LLAMA, "vision_config.max_num_tiles", 3, "supported_aspect_ratios"),
    (LLAMA, "vision_config.intermediate_layers_indices", [3, 32], "intermediate_layers_indices"),
    (LLAMA, "vision_config.intermediate_layers_indices", [7, 3], "must ascend"),
    (LLAMA, "vision_config.vision_output_dim", 1280, "vision_output_dim is 1280"),
    (LLAMA, "vision_config.num_global_layers", 0, "num_global_layers"),
]


@pytest.mark.parametrize(("name", "field", "value", "words"), HOSTILE)
def test_hostile_ones(name: str, field: str, value: Any, words: str) -> None:
    config = whole(name)
    *path, last = field.split(".")
    section = config
    for part in path:
        section = section[part]
    section[last] = value
    with pytest.raises(StartupError) as refused:
        VisionSettings.from_config(config, PREPROCESSOR_CONFIGS[name])
    assert words in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("name", "preprocessor", "words"),
    [
        (LLAVA, {"size": {"height": 336, "width": 336}}, "tiles of 336 pixels, the tower has 384"),
        (LLAVA, {"size": {"height": 384, "width": 336}}, "must be squares"),
        (LLAVA, {"image_grid_pinpoints": [[384, 384]]}, "image_grid_pinpoints"),
        (LLAVA, {"image_mean": [0.5]}, "image_mean"),
        (LLAVA, {"image_mean": [0.5, 0.5, float("nan")]}, "image_mean"),
        (LLAVA, {"image_std": [0.5, 0, 0.5]}, "image_std"),
        (LLAVA, {"rescale_factor": 0}, "rescale_factor"),
        (LLAVA, {"do_normalize": False}, "do_normalize"),
        (PHI3, {"num_crops": 65}, "num_crops"),
        (PHI3, {"num_crops": -1}, "num_crops"),
        (GEMMA4, {"max_soft_tokens": 0}, "max_soft_tokens in preprocessor_config.json must be an integer from 1"),
        (GEMMA4, {"max_soft_tokens": 2240}, "2240 rows an image, each of 3 x 3 patches of 16 pixels"),
        (GEMMA4, {"pooling_kernel_size": 4}, "pooling_kernel_size of preprocessor_config.json is 4, the tower's is 3"),
        (GEMMA4, {"do_normalize": True}, "do_normalize=True"),
        (GEMMA4, {"do_rescale": False}, "do_rescale=False"),
        (LLAMA, {"max_image_tiles": 5}, "max_image_tiles is 5"),
        (INTERN, {"size": 336}, "tiles of 336"),
    ],
)
def test_hostile_preprocessors(name: str, preprocessor: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        VisionSettings.from_config(whole(name), preprocessor)


def test_preprocessor_configs_old_and_new(tmp_path: Path) -> None:
    assert read_preprocessor_config(tmp_path) == {}
    newer = {"image_processor": {"size": 3}, "processor_class": "P"}
    (tmp_path / "processor_config.json").write_text(json.dumps(newer))
    assert read_preprocessor_config(tmp_path) == {"size": 3}
    (tmp_path / "preprocessor_config.json").write_text('{"size": 4}')
    assert read_preprocessor_config(tmp_path) == {"size": 4}
    (tmp_path / "preprocessor_config.json").write_text("[" * 100_000)
    with pytest.raises(StartupError, match=r"preprocessor_config\.json can't be read as JSON"):
        read_preprocessor_config(tmp_path)
