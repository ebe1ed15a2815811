"""Tiny models with eyes of transformers, random, and their vision tensors as checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from quire.data.models.vision import VisionSettings, build_encoder
from quire.data.weights.loader import load

TEXT = {
    "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 16, "vocab_size": 60, "head_dim": 12, "pad_token_id": 0,
}  # fmt: skip
TOWER = {  # of 31 pixels 28 are seen
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 31,
    "patch_size": 7,
}  # fmt: skip
SIZES = [[31 * rows, 31 * columns] for rows in range(1, 4) for columns in range(1, 4)]


def randomised(model: nn.Module) -> nn.Module:
    """Every parameter moved away from what it is at first: gates of 0, norms of 1."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.float().eval()


def theirs(family: str, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **options)
    return randomised(transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager"))


def llava(**options: Any) -> nn.Module:
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER}
    text = {"model_type": "qwen2", **TEXT}
    more = {"image_grid_pinpoints": SIZES, "vision_aspect_ratio": "anyres_max_4", "image_token_index": 59}
    return theirs("llava_onevision", vision_config=vision, text_config=text, **more, **options)


def paligemma() -> nn.Module:
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER}
    more = {"projection_dim": 24, "image_token_index": 59}
    return theirs("paligemma", vision_config=vision, text_config={"model_type": "gemma2", **TEXT}, **more)


def internvl(vision: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    tower = {**TOWER, "image_size": [28, 28], "patch_size": [7, 7], **(vision or {})}
    return theirs("internvl", vision_config=tower, text_config={"model_type": "qwen2", **TEXT}, **options)


def mllama(**vision: Any) -> nn.Module:
    """transformers counts layers' outputs, the model's authors their inputs: its 0 is our 1."""
    taps = [1] if "taps" not in vision else vision.pop("taps")
    tower = {**TOWER, "attention_heads": 4, "num_global_layers": 2, "intermediate_layers_indices": taps, **vision}
    tower["vision_output_dim"] = 32 * (1 + len(taps))
    text = {"model_type": "mllama_text_model", **TEXT, "cross_attention_layers": [0]}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    return theirs("mllama", vision_config=tower, text_config=text)


def saved(model: nn.Module, folder: Path, **save: Any) -> dict[str, Any]:
    """The model's vision tensors alone in `folder`, under the names that transformers writes; its config."""
    model.save_pretrained(folder, **save)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {k: v for k, v in tensors.items() if "language_model" not in k and "lm_head" not in k},
        folder / "model.safetensors",
    )
    return json.loads((folder / "config.json").read_text())


def ours(config: dict[str, Any], folder: Path, prepare: bool = True, **said: Any) -> Any:
    """Our encoder, loaded, of as many parameters as its settings say."""
    encoder = build_encoder(VisionSettings.read(config, said), torch.float32, torch.device("cpu"))
    assert sum(parameter.numel() for parameter in encoder.parameters()) == encoder.settings.parameters
    load(encoder, folder)
    if prepare:
        encoder.prepare()
    return encoder
