"""Image processors as published models' configs describe them, over a few tokens."""

from __future__ import annotations

from quire.models.vision import VisionSettings
from quire.models.vision.named_configs import PREPROCESSOR_CONFIGS, VISION_CONFIGS
from quire.text.images.placeholders import read_placeholder
from quire.text.images.preprocessor import read_image_preprocessor
from quire.text.images.processor import ImageProcessor

WORDS = {"<image>": 90, "<img>": 91, "</img>": 92, "<IMG_CONTEXT>": 93, "<|image|>": 94, "<bos>": 2, "\n": 10}
WORDS |= {"<start_of_image>": 95, "<image_soft_token>": 96, "<end_of_image>": 97, "<|image>": 98, "<image|>": 99}
PIECES = {token: word for word, token in WORDS.items()}
TEXT_CONFIGS = {
    "llava-onevision-7b": {"text_config": {"hidden_size": 64}},
    "internvl2-8b": {"llm_config": {"hidden_size": 64}},
    "phi-3-vision": {"hidden_size": 64},
    "paligemma2-10b": {"text_config": {"hidden_size": 3584}},
    "gemma-3-4b": {"text_config": {"hidden_size": 2560}},
    "gemma-4-31b": {"image_token_id": 94, "text_config": {"hidden_size": 64}},
    "llama-3.2-11b-vision": {"text_config": {"hidden_size": 64}},
}


def published_processor(name: str) -> ImageProcessor:
    """Return the processor of a model of TEXT_CONFIGS; its prompts end with a newline if images come first."""
    config = PREPROCESSOR_CONFIGS[name]
    vision = VisionSettings.from_config({**VISION_CONFIGS[name], **TEXT_CONFIGS[name]}, config)
    preprocessor = read_image_preprocessor(config, vision.tiling, vision.normalization.mean)
    return ImageProcessor(preprocessor, read_placeholder(vision.kind, WORDS.get), PIECES.__getitem__, [10])
