"""Settings of models that put image rows in place of token embeddings: a vision encoder, and a supported text model. No
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from quire.errors import StartupError, short_repr
from quire.models.config_reader import ConfigReader
from quire.models.gemma_settings import GemmaSettings
from quire.models.settings import LlamaSettings
from quire.models.vision.settings import VisionSettings
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import Shard

PREPROCESSOR_KEY = "preprocessor_config"
"""The key under which a config.json that was read has preprocessor_config.json (see quire.weights.checkpoint_files)."""
TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"vocab_size": 32_000, "max_position_embeddings": 2048}),
    "mistral": ("MistralForCausalLM", {"vocab_size": 32_000, "max_position_embeddings": 131_072}),
    "qwen2": ("Qwen2ForCausalLM", {"vocab_size": 151_936, "max_position_embeddings": 32_768}),
    "qwen3": ("Qwen3ForCausalLM", {"vocab_size": 151_936, "max_position_embeddings": 32_768}),
    "internlm2": ("InternLM2ForCausalLM", {"vocab_size": 103_168, "max_position_embeddings": 2048}),
    "phi3": ("Phi3ForCausalLM", {"vocab_size": 32_064, "max_position_embeddings": 4096}),
    "gemma2": ("Gemma2ForCausalLM", {"vocab_size": 256_000, "max_position_embeddings": 8192}),
}
"""The text's model_type -> its architecture, and transformers' defaults of keys that a config may leave out."""


@dataclass(frozen=True, slots=True)
class VisionLanguageSettings:
    """`text_config` is the config of the text model, read into `text`."""

    text_config: dict[str, Any]
    text: LlamaSettings | GemmaSettings
    vision: VisionSettings

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Read a config.json. Raise StartupError for a value that is missing, wrong or not supported, and for a vision
        encoder and a text model that don't fit."""
        text = extract_text_config(config)
        vision = VisionSettings.from_config(config, ConfigReader(config).get_object(PREPROCESSOR_KEY))
        kind = GemmaSettings if text["architectures"] == ["Gemma2ForCausalLM"] else LlamaSettings
        settings = cls(text, kind.from_config(text), vision)
        if vision.bidirectional != isinstance(settings.text, GemmaSettings):
            raise StartupError(
                f"the text of a {short_repr(config['architectures'][0])} is a {text['architectures'][0]}",
                "PaliGemma is supported with Gemma-2, the other architectures with Llama's relatives",
            )
        token, vocab = vision.image_token_id, settings.text.vocab_size
        if token is not None and token >= vocab:
            raise StartupError(
                f"config.json's image token is {token}, and the text model has {vocab} tokens",
                f"image_token_index must be below {vocab}",
            )
        return settings

    def for_shard(self, shard: Shard) -> Self:
        """Return one rank's settings: the whole vision encoder and a part of the text model. Raise StartupError if the
        text model can't be divided among that many ranks."""
        return replace(self, text=self.text.for_shard(shard))

    def spec(self) -> ModelSpec:
        """Return the ModelSpec. `parameters` are the text model's; those of the vision encoder are in `vision`."""
        text = self.text.spec()
        return replace(text, vision=self.vision.spec(text.parameters))


def extract_text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text model's config from a config.json; for Phi-3-Vision that is all of it."""
    name = config["architectures"][0]
    if name == "Phi3VForCausalLM":
        return {**TEXT_MODELS["phi3"][1], **config, "architectures": ["Phi3ForCausalLM"]}
    where = "llm_config" if name == "InternVLChatModel" and config.get("llm_config") else "text_config"
    section = config.get(where)
    if not isinstance(section, dict):
        raise StartupError(f"config.json has no {where}", "It must describe the text's model")
    kind = section.get("model_type")
    if not isinstance(kind, str) or kind not in TEXT_MODELS:
        raise StartupError(
            f"the model_type in {where} of config.json is {short_repr(kind)}", f"Supported: {', '.join(TEXT_MODELS)}"
        )
    architecture, usual = TEXT_MODELS[kind]
    more: dict[str, Any] = {"architectures": [architecture]}
    if config.get("tie_word_embeddings"):  # transformers reads it from either object
        more["tie_word_embeddings"] = True
    if config.get("quantization_config") is not None:
        more["quantization_config"] = config["quantization_config"]
    if kind == "gemma2":  # prompts attend in both directions, by the VisionSpec
        section = {k: v for k, v in section.items() if k != "use_bidirectional_attention"}
    return {**usual, **{k: v for k, v in section.items() if v is not None}, **more}
