"""The families of models with images: a vision encoder, and a text model that quire.models.families reads. Defaults are
transformers'. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire.errors import StartupError, short_repr
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import DecoderConfig, LayerConfig
from quire.models.families import (
    read_gemma2,
    read_gemma3_text,
    read_internlm2,
    read_llama,
    read_mistral,
    read_phi3,
    read_qwen2,
    read_qwen3,
)
from quire.models.gemma4 import IMAGE_ENCODER, read_gemma4_text
from quire.models.quantization import read_checkpoint_scheme
from quire.models.vision.settings import PREPROCESSOR_KEY, VisionSettings
from quire.models.weight_names import WeightNames

TEXT_MODELS: dict[str, tuple[Callable[[ConfigReader], DecoderConfig], dict[str, Any]]] = {
    "llama": (read_llama, {"vocab_size": 32_000, "max_position_embeddings": 2048}),
    "mistral": (read_mistral, {"vocab_size": 32_000, "max_position_embeddings": 131_072}),
    "qwen2": (read_qwen2, {"vocab_size": 151_936, "max_position_embeddings": 32_768}),
    "qwen3": (read_qwen3, {"vocab_size": 151_936, "max_position_embeddings": 32_768}),
    "internlm2": (read_internlm2, {"vocab_size": 103_168, "max_position_embeddings": 2048}),
    "phi3": (read_phi3, {"vocab_size": 32_064, "max_position_embeddings": 4096}),
    "gemma2": (read_gemma2, {"vocab_size": 256_000, "max_position_embeddings": 8192}),
}
"""The text's model_type -> its reader, and transformers' defaults of keys that a config may leave out."""
TIED_BY_DEFAULT = "InternVLForConditionalGeneration", "PaliGemmaForConditionalGeneration"
"""Models whose tie_word_embeddings is read from the outer config alone, and is true by default."""
MLLAMA_EXTRA_TOKENS = 8
"""Embeddings after the vocabulary's, for tokens that are never generated, such as the image token."""
MLLAMA_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128_256, "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14_336, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
}  # fmt: skip
MLLAMA_CROSS_LAYERS = [3, 8, 13, 18, 23, 28, 33, 38]
MLLAMA_NAMES: WeightNames = {
    "layers.*.cross.q": "layers.*.cross_attn.q_proj",
    "layers.*.cross.kv": ("layers.*.cross_attn.k_proj", "layers.*.cross_attn.v_proj"),
    "layers.*.cross.out": "layers.*.cross_attn.o_proj",
    "layers.*.cross.q_norm": "layers.*.cross_attn.q_norm",
    "layers.*.cross.k_norm": "layers.*.cross_attn.k_norm",
    "layers.*.attention_gate": "layers.*.cross_attn_attn_gate",
    "layers.*.mlp_gate": "layers.*.cross_attn_mlp_gate",
}
"""The names of Llama 3.2 Vision's cross-attention layers."""


def read_vision_language(fields: ConfigReader) -> DecoderConfig:
    """A model that puts image rows in place of token embeddings. Phi-3-Vision's text model is all of config.json."""
    config, name = fields.config, fields.config["architectures"][0]
    phi3, where = name == "Phi3VForCausalLM", "text_config"
    if name == "InternVLChatModel" and config.get("llm_config"):
        where = "llm_config"
    section = config if phi3 else config.get(where)
    if not isinstance(section, dict):
        raise StartupError(f"config.json has no {where}", "It must describe the text's model")
    kind = "phi3" if phi3 else section.get("model_type")
    if not isinstance(kind, str) or kind not in TEXT_MODELS:
        raise StartupError(
            f"the model_type in {where} of config.json is {short_repr(kind)}", f"Supported: {', '.join(TEXT_MODELS)}"
        )
    read_text, defaults = TEXT_MODELS[kind]
    given = dict(section)
    if name in TIED_BY_DEFAULT:
        given["tie_word_embeddings"] = fields.get_bool("tie_word_embeddings", True)
    elif not phi3 and config.get("tie_word_embeddings"):  # transformers reads it from either object
        given["tie_word_embeddings"] = True
    if kind == "gemma2":  # prompts attend in both directions, by the VisionSpec
        given.pop("use_bidirectional_attention", None)
    read_checkpoint_scheme(config)
    vision, text = _read_vision(fields), read_text(ConfigReader({**defaults, **given}))
    if vision.bidirectional != (kind == "gemma2"):
        raise StartupError(
            f"the text of a {short_repr(name)} is a {kind}",
            "PaliGemma is supported with Gemma-2, the other architectures with Llama's relatives",
        )
    _check_image_token(vision, text.vocab_size, "the text model has {} tokens")
    return replace(text, vision=vision)


def read_gemma3_with_images(fields: ConfigReader) -> DecoderConfig:
    """Gemma-3 (Kamath et al., 2025) with its vision encoder: the tokens of an image attend to one another both ways."""
    text, vision = read_gemma3_text(fields), _read_vision(fields)
    _check_image_token(vision, text.vocab_size, "the text model has {} tokens")
    return replace(text, vision=vision, ignored_weights=())


def read_gemma4_with_images(fields: ConfigReader) -> DecoderConfig:
    """Gemma-4 (Google, 2026) with its vision encoder, if config.json has a vision_config. Its encoder of audio is not
    read."""
    text = read_gemma4_text(fields)
    if fields.config.get("vision_config") is None:
        return text
    vision = _read_vision(fields)
    _check_image_token(vision, text.vocab_size, "the text model has {} tokens")
    padding = 0
    if text.per_layer_dim:
        section = ConfigReader(fields.get_object("text_config"), f"text_config of {fields.source}")
        padding = section.get_int("pad_token_id", 0, maximum=text.per_layer_vocab - 1, minimum=0)
    ignored = tuple(pattern for pattern in text.ignored_weights if pattern != IMAGE_ENCODER)
    return replace(text, vision=vision, per_layer_image_token=padding, ignored_weights=ignored)


def read_mllama(fields: ConfigReader) -> DecoderConfig:
    """Llama 3.2 Vision (Grattafiori et al., 2024, §7): a Llama some of whose layers have cross-attention to images in
    place of self-attention."""
    section = fields.get_object("text_config")
    if not section:
        raise StartupError("config.json has no text_config", "It must describe the text's model")
    read_checkpoint_scheme(fields.config)
    given = {name: value for name, value in section.items() if value is not None}
    text = read_llama(ConfigReader({**MLLAMA_TEXT_DEFAULTS, **given}))
    [rope] = text.ropes
    if text.head_dim * text.heads != text.hidden or text.tied or {*text.layers} != {LayerConfig(rope=rope)}:
        raise StartupError(
            "text_config of config.json has a head_dim other than hidden_size / num_attention_heads, tied "
            "embeddings, or layers that don't attend to all tokens",
            "Llama 3.2 Vision has none of these",
        )
    vision = _read_vision(fields)
    _check_image_token(vision, text.vocab_size + MLLAMA_EXTRA_TOKENS, "there are {} tokens, extra ones included")
    cross = _read_cross_layers(section.get("cross_attention_layers"), len(text.layers))
    return replace(
        text,
        family="mllama",
        layers=tuple(LayerConfig(mixer="cross") if i in cross else layer for i, layer in enumerate(text.layers)),
        extra_tokens=MLLAMA_EXTRA_TOKENS,
        vision=vision,
        weight_names={**text.weight_names, **MLLAMA_NAMES},
    )


def _read_vision(fields: ConfigReader) -> VisionSettings:
    return VisionSettings.from_config(fields.config, fields.get_object(PREPROCESSOR_KEY))


def _check_image_token(vision: VisionSettings, limit: int, tokens: str) -> None:
    """Raise StartupError unless the placeholder token of images is below `limit`."""
    if vision.image_token_id is not None and vision.image_token_id >= limit:
        raise StartupError(
            f"config.json's image token is {vision.image_token_id}, and {tokens.format(limit)}",
            f"image_token_id, or image_token_index if the file has that, must be below {limit}",
        )


def _read_cross_layers(value: Any, layers: int) -> list[int]:
    """Return the cross-attention layers. The last layer can't be one, since only selected tokens run to its end."""
    value = MLLAMA_CROSS_LAYERS if value is None else value
    if (
        not isinstance(value, list)
        or not value
        or not all(type(layer) is int and 0 <= layer < layers - 1 for layer in value)
        or value != sorted(set(value))
    ):
        raise StartupError(
            f"cross_attention_layers in text_config of config.json is {short_repr(value)}",
            f"It must list some of the layers 0 to {layers - 2}, in order",
        )
    return list(value)
